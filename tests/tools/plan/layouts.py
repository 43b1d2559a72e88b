"""Compile layouts of a run for a machine, to compare the default with the best of all.

`python -m tests.tools.plan.layouts` runs it.

A layout is a policy of rematerialisation, the devices that share parameters, and a number of
micro-batches. Layouts without a loop over layers compile for minutes: networks of DEPTHS layers are
compiled, the rest extrapolated. Figures go to tests/golden/layouts.json, a table to the README of
`vit_jax/plan`. Needs a checkout of the repository.
"""

import argparse
import dataclasses
import fcntl
import functools
import json
import pathlib
import time
from typing import Any

from docs.tables import table
from tests.tools.plan import record_gpus
from vit_jax.config import load_recipe
from vit_jax.config.architecture import UNROLLED
from vit_jax.models.flops import count_parameters
from vit_jax.sharding.memory import Memory
from vit_jax.tools.plan.arithmetic import estimate_limit
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.timeline import Timeline
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.assemble import assemble
from vit_jax.train.layout import RESERVE, usable_bytes
from vit_jax.train.state_builder import architecture_of

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/layouts.json"
DEFAULTS = ROOT / "tests/golden/default_layouts.json"
GIB = 2**30
DEPTHS = (2, 4)
# Phases of a step, of `plan.timeline.PHASES`
OF_LAYERS = ("norm", "attention", "mlp", "dropout")
OF_UPDATE = ("optimizer", "average", "metrics")
NETWORKS = {
    "B/16": "configs/pretrain_imagenet1k.py:ViT-B/16",
    "L/16": "configs/pretrain_imagenet1k.py:ViT-L/16",
    "H/14": "configs/pretrain_jft.py:ViT-H/14",
}
FULL_DEPTH = {"B/16": 12, "L/16": 24, "H/14": 32}
MACHINES = (
    "v5e:4x4",
    "v5e:16x16",
    "v5p:2x2x4",
    "v6e:4x4",
    "h100:8",
)
PAIRS = tuple((network, machine) for machine in MACHINES for network in NETWORKS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One layout of one run."""

    network: str
    machine: str
    remat: str
    shared_by: int  # devices that share parameters; 1: replicated
    micro_batches: int
    unrolled: bool

    @property
    def name(self) -> str:
        form = "unrolled" if self.unrolled else "loop"
        run = f"{self.network} {self.machine}"
        return f"{run} {self.remat} {form} /{self.shared_by} x{self.micro_batches}"

    def options(self, depth: int) -> list[str]:
        """Return options of the command line."""
        sharding = "replicated"
        num_replicas = None
        if self.shared_by > 1:
            sharding = "fsdp"
            num_replicas = parse_topology(self.machine).num_chips // self.shared_by

        values = {
            "model.remat": self.remat,
            "model.depth": depth,
            "model.scan_unroll": depth if self.unrolled else 1,
            "sharding.parameters": sharding,
            "sharding.num_replicas": num_replicas,
            "optimizer.accumulation_steps": self.micro_batches,
        }
        return [f"--config.{name}={value}" for name, value in values.items()]


def parse(text: str) -> Layout:
    """Return the layout of this name."""
    network, machine, remat, form, shared, micro_batches = text.split()
    return Layout(
        network=network,
        machine=machine,
        remat=remat,
        shared_by=int(shared[1:]),
        micro_batches=int(micro_batches[1:]),
        unrolled=form == "unrolled",
    )


def compile_layout(layout: Layout, depth: int) -> dict[str, Any]:
    """Compile the step of this network with this many layers; return its figures."""
    recipe = NETWORKS[layout.network]
    topology = parse_topology(layout.machine)
    config = load_recipe(recipe, layout.options(depth))

    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    plan = make_plan(config, topology, choose_dataset(recipe, config))
    cpu_seconds = time.process_time() - cpu_start
    wall_seconds = time.perf_counter() - wall_start

    return {
        "gib": None if plan.needed_bytes is None else plan.needed_bytes / GIB,
        "fits": plan.fits,
        **read_times(plan.timeline),
        "memory": read_memory(plan.memory),
        "mfu": plan.totals.mfu if plan.totals else None,
        "cpu_s": cpu_seconds,
        "wall_s": wall_seconds,
    }


def read_times(timeline: Timeline | None) -> dict[str, Any]:
    """Return milliseconds of a step; values are None without a timeline."""
    if timeline is None:
        return dict.fromkeys(("ms", "waits_ms", "prefetch_ms", "parts_ms"))
    return {
        "ms": 1e3 * timeline.seconds,
        "waits_ms": 1e3 * timeline.collective_seconds,
        "prefetch_ms": 1e3 * timeline.prefetch_seconds,
        "parts_ms": {phase: 1e3 * seconds for phase, seconds in timeline.phases.items()},
    }


def read_memory(memory: Memory | None) -> dict[str, float] | None:
    """Return GiB by kind of memory."""
    if memory is None:
        return None
    by_kind = dataclasses.asdict(memory)
    return {kind: num_bytes / GIB for kind, num_bytes in by_kind.items()}


def depths_of(layout: Layout, *, full: bool) -> tuple[int, ...]:
    """Return the depths to compile: few for unrolled layers unless `full`, for loops the complete
    one.
    """
    if layout.unrolled and not full:
        return DEPTHS
    return (FULL_DEPTH[layout.network],)


def load() -> dict[str, dict[str, Any]]:
    """Return the figures by name of the layout, then by depth."""
    return json.loads(GOLDEN.read_text())


def load_defaults() -> dict[str, dict[str, Any]]:
    """Return the name of the default layout and the least milliseconds of its step, by network and
    machine.
    """
    return json.loads(DEFAULTS.read_text())


def store_defaults() -> None:
    """Write the present default layouts."""
    defaults = {f"{network} {machine}": choose(network, machine) for network, machine in PAIRS}
    DEFAULTS.write_text(json.dumps(defaults, indent=1) + "\n")


def store(
    name: str,
    depth: int,
    figures: dict[str, Any],
) -> None:
    """Add the figures to the file; several processes may do so."""
    with open(GOLDEN, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        every = json.load(file)
        every.setdefault(name, {})[str(depth)] = figures
        file.seek(0)
        file.truncate()
        file.write(json.dumps(every, indent=1, sort_keys=True) + "\n")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step of the complete network.

    `core_ms` excludes waiting for collectives. `update_ms` is its part for norms, optimiser and
    average, which sharding can save; None if it is not recorded. `ms` includes waiting, and `gib` is
    the memory. Both are None if only one depth was compiled, because nothing runs beside collectives there.
    """

    core_ms: float
    update_ms: float | None
    ms: float | None
    gib: float | None


def at_full_depth(layout: Layout, figures: dict[str, Any]) -> Estimate | None:
    """Return figures of the complete network, in which every layer costs the same.

    Two depths are extrapolated. From one depth, the parts of layers grow with the depth, the update
    grows with the parameters, and the rest counts once. Returns None if too little was compiled.
    """
    full = FULL_DEPTH[layout.network]
    by_depth = {int(depth): one for depth, one in figures.items() if one.get("ms")}
    if not by_depth:
        return None

    scaled = {}
    for depth, one in by_depth.items():
        if "parts_ms" in one:
            scaled[depth] = _scale_parts(layout, depth, one)
    update = max(
        (update_ms for _, update_ms in scaled.values()),
        default=None,
    )

    if full in by_depth:
        one = by_depth[full]
        return Estimate(
            one["ms"] - one["waits_ms"],
            update,
            one["ms"],
            one["gib"],
        )

    if not parse_topology(layout.machine).is_tpu:
        return None  # XLA for GPUs keeps more of few layers: 29 % of the memory of L/16
    if len(by_depth) == 1:
        if not scaled:
            return None
        ((core_ms, update_ms),) = scaled.values()
        return Estimate(core_ms, update_ms, None, None)

    low_depth, high_depth = sorted(by_depth)[-2:]
    layers = (full - high_depth) / (high_depth - low_depth)
    low = by_depth[low_depth]
    high = by_depth[high_depth]
    complete = {}
    for name in ("ms", "waits_ms", "gib"):
        complete[name] = high[name] + layers * (high[name] - low[name])

    core_ms = complete["ms"] - max(complete["waits_ms"], 0.0)
    return Estimate(core_ms, update, complete["ms"], complete["gib"])


def _scale_parts(
    layout: Layout,
    depth: int,
    figures: dict[str, Any],
) -> tuple[float, float]:
    """Return milliseconds of the core with all layers, and milliseconds of its update."""
    full = FULL_DEPTH[layout.network]
    deeper = full / depth
    larger = _count_parameters(layout.network, full) / _count_parameters(layout.network, depth)
    factors = dict.fromkeys(OF_LAYERS, deeper) | dict.fromkeys(OF_UPDATE, larger)

    core_ms = figures["prefetch_ms"] * deeper
    update_ms = 0.0
    for part, ms in figures["parts_ms"].items():
        scaled_ms = ms * factors.get(part, 1.0)
        core_ms += scaled_ms
        if part in OF_UPDATE:
            update_ms += scaled_ms
    return core_ms, update_ms


@functools.cache
def _count_parameters(network: str, depth: int) -> int:
    recipe = NETWORKS[network]
    config = load_recipe(recipe, [f"--config.model.depth={depth}"])
    num_classes = choose_dataset(recipe, config).num_classes
    return count_parameters(architecture_of(config, num_classes))


def choose(network: str, machine: str) -> dict[str, Any]:
    """Return the default layout of a run, and the least milliseconds of its step."""
    recipe = NETWORKS[network]
    topology = parse_topology(machine)
    config = load_recipe(recipe)
    dataset = choose_dataset(recipe, config)
    run = assemble(
        config,
        architecture_of(config, dataset.num_classes),
        num_examples=dataset.num_examples,
        devices=topology.stand_ins(),
    )

    policy = run.architecture.remat
    is_replicated = run.config.sharding.parameters == "replicated"
    layout = Layout(
        network=network,
        machine=machine,
        remat=policy,
        shared_by=1 if is_replicated else run.batch_sharding.mesh.shape["data"],
        micro_batches=run.config.optimizer.accumulation_steps,
        unrolled=policy in UNROLLED,
    )
    least_ms = 1e3 * estimate_limit(run, topology)
    return {
        "layout": layout.name,
        "least_ms": round(least_ms, 1),
    }


COLUMNS = (
    "machine",
    "network",
    "default",
    "least, ms",
    "core, ms",
    "with waits, ms",
    "GiB",
    "best, if another",
    "default above",
    "above the bound",
    "compiled",
)


def layouts_table() -> str:
    """Return the default beside the best compiled layout that fits, for each network and machine."""
    compiled = {parse(name): figures for name, figures in load().items()}
    lines = []
    for name, default in load_defaults().items():
        network, machine = name.split()
        estimates = {}
        for layout, figures in compiled.items():
            if (layout.network, layout.machine) != (network, machine):
                continue
            if estimate := at_full_depth(layout, figures):
                estimates[layout] = estimate

        default_layout = parse(default["layout"])
        recipe_row = find_recipe_row(network, machine)
        if recipe_row is not None:
            estimates[default_layout] = recipe_row
        least_ms = default["least_ms"]
        lines.append(
            [
                machine,
                network,
                _describe(default_layout),
                f"{least_ms:,.1f}",
                *_default_cells(estimates.get(default_layout)),
                *_best_cells(estimates, default_layout),
                str(len(estimates)),
            ]
        )
    return table(COLUMNS, lines)


def find_recipe_row(network: str, machine: str) -> Estimate | None:
    """Return the figures of the recipe with its default layout on GPUs, compiled with all layers."""
    recipe = NETWORKS[network].removeprefix("configs/").replace(".py", "")
    row = record_gpus.load().get(f"{recipe} on {machine}")
    if row is None:
        return None
    return Estimate(
        row["ms"] - row["collectives_ms"],
        None,
        row["ms"],
        row["gib"],
    )


def _default_cells(estimate: Estimate | None) -> list[str]:
    """Return the cells of the default layout."""
    if estimate is None:
        return ["–"] * 3
    cells = [f"{estimate.core_ms:,.1f}"]
    if not (estimate.ms and estimate.gib):
        return [*cells, "–", "–"]
    return [*cells, f"{estimate.ms:,.1f}", f"{estimate.gib:.1f}"]


def _best_cells(estimates: dict[Layout, Estimate], default: Layout) -> list[str]:
    """Return the cells of the layout with the fastest core that fits."""
    fitting = {}
    for layout, estimate in estimates.items():
        device = parse_topology(layout.machine).stand_ins()[0]
        usable_gib = (1 - RESERVE) * usable_bytes(device) / GIB
        if (estimate.gib or 0.0) <= usable_gib:
            fitting[layout] = estimate
    if not fitting:
        return ["–"] * 3

    best = min(fitting, key=lambda layout: fitting[layout].core_ms)
    best_ms = fitting[best].core_ms
    cells = ["–" if best == default else _describe(best)]
    if default not in estimates:
        return [*cells, "–", "–"]

    default_ms = estimates[default].core_ms
    cells.append(f"{default_ms / best_ms - 1:+.1%}")
    without_update = []
    for estimate in fitting.values():
        if estimate.update_ms is not None:
            without_update.append(estimate.core_ms - estimate.update_ms)
    if not without_update:
        return [*cells, "–"]
    bound_ms = min(best_ms, *without_update)
    return [*cells, f"{default_ms / bound_ms - 1:+.1%}"]


def _describe(layout: Layout) -> str:
    shared = "replicated" if layout.shared_by == 1 else f"FSDP over {layout.shared_by}"
    plural = "s" if layout.micro_batches > 1 else ""
    return f"{layout.remat}, {shared}, {layout.micro_batches} part{plural}"


def round_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures to print."""
    rounded = {}
    for name, value in figures.items():
        if isinstance(value, float):
            value = round(value, 3)
        if name != "memory":
            rounded[name] = value
    return rounded


def main() -> None:
    """Compile the layouts of the command line that are not recorded yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--full", action="store_true")
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[],
    )
    arguments = parser.parse_args()

    for text in arguments.layouts:
        layout = parse(text)
        for depth in arguments.depths or depths_of(layout, full=arguments.full):
            if str(depth) in load().get(layout.name, {}):
                continue
            try:
                figures = compile_layout(layout, depth)
            except ValueError as error:
                figures = {"error": str(error)}
            store(layout.name, depth, figures)
            print(layout.name, depth, round_figures(figures), flush=True)


if __name__ == "__main__":
    main()
