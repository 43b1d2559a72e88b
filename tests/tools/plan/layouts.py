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
from vit_jax.config import load_recipe
from vit_jax.config.architecture import UNROLLED
from vit_jax.models.flops import count_parameters
from vit_jax.tools.plan.arithmetic import limit_seconds
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.layout import RESERVE, usable_bytes

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/layouts.json"
DEFAULTS = ROOT / "tests/golden/default_layouts.json"
DEPTHS = (2, 4)
OF_LAYERS = ("norm", "attention", "mlp", "dropout")  # phases of a step, of `plan.timeline.PHASES`
OF_UPDATE = ("optimizer", "average", "metrics")
NETWORKS = {
    "B/16": "configs/pretrain_imagenet1k.py:ViT-B/16",
    "L/16": "configs/pretrain_imagenet1k.py:ViT-L/16",
    "H/14": "configs/pretrain_jft.py:ViT-H/14",
}
FULL_DEPTH = {"B/16": 12, "L/16": 24, "H/14": 32}
MACHINES = ("v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v6e:4x4", "h100:8")
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
        return f"{self.network} {self.machine} {self.remat} {form} /{self.shared_by} x{self.micro_batches}"

    def options(self, depth: int) -> list[str]:
        """Options of the command line."""
        chips = parse_topology(self.machine).num_chips
        values = {
            "model.remat": self.remat,
            "model.depth": depth,
            "model.scan_unroll": depth if self.unrolled else 1,
            "sharding.parameters": "replicated" if self.shared_by == 1 else "fsdp",
            "sharding.num_replicas": None if self.shared_by == 1 else chips // self.shared_by,
            "optimizer.accumulation_steps": self.micro_batches,
        }
        return [f"--config.{name}={value}" for name, value in values.items()]


def parse(text: str) -> Layout:
    """Return the layout of this name."""
    network, machine, remat, form, shared, micro_batches = text.split()
    return Layout(
        network, machine, remat, int(shared[1:]), int(micro_batches[1:]), form == "unrolled"
    )


def compiled(layout: Layout, depth: int) -> dict[str, Any]:
    """Compile the step of this network with this many layers; return its figures."""
    recipe = NETWORKS[layout.network]
    topology = parse_topology(layout.machine)
    config = load_recipe(recipe, layout.options(depth))
    began = time.perf_counter()
    cpu = time.process_time()
    plan = make_plan(config, topology, choose_dataset(recipe, config))
    line = plan.timeline
    return {
        "gib": None if plan.needed_bytes is None else plan.needed_bytes / 2**30,
        "fits": plan.fits,
        "ms": None if line is None else 1e3 * line.seconds,
        "waits_ms": None if line is None else 1e3 * line.collective_seconds,
        "prefetch_ms": None if line is None else 1e3 * line.prefetch_seconds,
        "parts_ms": None
        if line is None
        else {phase: 1e3 * seconds for phase, seconds in line.phases.items()},
        "memory": None
        if plan.memory is None
        else {k: v / 2**30 for k, v in dataclasses.asdict(plan.memory).items()},
        "mfu": plan.totals.mfu if plan.totals else None,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - began,
    }


def depths_of(layout: Layout, *, full: bool) -> tuple[int, ...]:
    """Loops compile as fast with all their layers; others are extrapolated unless `full`."""
    return DEPTHS if layout.unrolled and not full else (FULL_DEPTH[layout.network],)


def load() -> dict[str, dict[str, Any]]:
    """Return the figures by name of the layout, then by depth."""
    return json.loads(GOLDEN.read_text())


def load_defaults() -> dict[str, dict[str, Any]]:
    """Return the name of the default layout and the least milliseconds of its step, by network and machine."""
    return json.loads(DEFAULTS.read_text())


def store_defaults() -> None:
    """Write what a run does by default now."""
    every = {f"{network} {machine}": choose(network, machine) for network, machine in PAIRS}
    DEFAULTS.write_text(json.dumps(every, indent=1) + "\n")


def store(name: str, depth: int, figures: dict[str, Any]) -> None:
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
    """A step of the complete network."""

    core_ms: float  # without waiting for collectives
    update_ms: (
        float | None
    )  # of these for norms, optimiser, average: what sharding can save; None if not recorded
    ms: (
        float | None
    )  # with waiting; None if one depth alone was compiled, in which nothing runs beside collectives
    gib: float | None  # likewise


def at_full_depth(layout: Layout, figures: dict[str, Any]) -> Estimate | None:
    """Return figures of the complete network, of which every layer costs the same; None if too little was compiled.

    From two depths by extrapolation. From one the parts of layers count in proportion to the depth,
    the update to the parameters, and the rest once.
    """
    full = FULL_DEPTH[layout.network]
    by_depth = {int(depth): one for depth, one in figures.items() if one.get("ms")}
    if not by_depth:
        return None
    update = max(
        (_by_parts(layout, depth, one)[1] for depth, one in by_depth.items() if "parts_ms" in one),
        default=None,
    )
    if full in by_depth:
        one = by_depth[full]
        return Estimate(one["ms"] - one["waits_ms"], update, one["ms"], one["gib"])
    depths = sorted(by_depth)
    if len(depths) == 1:
        one = by_depth[depths[0]]
        return (
            Estimate(*_by_parts(layout, depths[0], one), None, None) if "parts_ms" in one else None
        )
    low, high = (by_depth[depth] for depth in depths[-2:])
    layers = (full - depths[-1]) / (depths[-1] - depths[-2])
    ms, waits, gib = (
        high[name] + layers * (high[name] - low[name]) for name in ("ms", "waits_ms", "gib")
    )
    return Estimate(ms - max(waits, 0.0), update, ms, gib)


def _by_parts(layout: Layout, depth: int, figures: dict[str, Any]) -> tuple[float, float]:
    """Return milliseconds of the core with all layers, and those of the update among them."""
    deeper = FULL_DEPTH[layout.network] / depth
    more = _parameters(layout.network, FULL_DEPTH[layout.network]) / _parameters(
        layout.network, depth
    )
    times = dict.fromkeys(OF_LAYERS, deeper) | dict.fromkeys(OF_UPDATE, more)
    scaled = {part: ms * times.get(part, 1.0) for part, ms in figures["parts_ms"].items()}
    return sum(scaled.values()) + figures["prefetch_ms"] * deeper, sum(
        scaled.get(part, 0.0) for part in OF_UPDATE
    )


@functools.cache
def _parameters(network: str, depth: int) -> int:
    config = load_recipe(NETWORKS[network], [f"--config.model.depth={depth}"])
    return count_parameters(
        architecture_of(config, choose_dataset(NETWORKS[network], config).num_classes)
    )


def choose(network: str, machine: str) -> dict[str, Any]:
    """Return what a run does by default, and the least milliseconds of a step."""
    recipe = NETWORKS[network]
    topology = parse_topology(machine)
    config = load_recipe(recipe)
    dataset = choose_dataset(recipe, config)
    devices = topology.stand_ins()
    run = assemble(
        config,
        architecture_of(config, dataset.num_classes),
        num_examples=dataset.num_examples,
        devices=devices,
    )
    policy = run.architecture.remat
    least = limit_seconds(run, topology)
    is_replicated = run.config.sharding.parameters == "replicated"
    shared_by = 1 if is_replicated else run.batch_sharding.mesh.shape["data"]
    parts = run.config.optimizer.accumulation_steps
    layout = Layout(network, machine, policy, shared_by, parts, policy in UNROLLED)
    return {"layout": layout.name, "least_ms": round(1e3 * least, 1)}


def layouts_table() -> str:
    """Return the default beside the best compiled layout that fits, for each network and machine."""
    compiled = {parse(name): figures for name, figures in load().items()}
    lines = []
    for name, default_of in load_defaults().items():
        network, machine = name.split()
        usable = (1 - RESERVE) * usable_bytes(parse_topology(machine).stand_ins()[0]) / 2**30
        same = [
            layout for layout in compiled if (layout.network, layout.machine) == (network, machine)
        ]
        every = {
            layout: full
            for layout in same
            if (full := at_full_depth(layout, compiled[layout])) is not None
        }
        fitting = [layout for layout, full in every.items() if (full.gib or 0.0) <= usable]
        default = parse(default_of["layout"])
        limit = default_of["least_ms"]
        of_default = ["–"] * 4
        of_best = ["–"] * 4
        if default in every:
            full = every[default]
            with_waits = (
                [f"{full.ms:,.1f}", f"{full.gib:.1f}"] if full.ms and full.gib else ["–", "–"]
            )
            of_default = [f"{full.core_ms:,.1f}", f"{limit / full.core_ms:.0%}", *with_waits]
        if fitting:
            best = min(fitting, key=lambda layout: every[layout].core_ms)
            known = [
                full.core_ms - full.update_ms
                for full in map(every.__getitem__, fitting)
                if full.update_ms is not None
            ]
            of_best = [_short(best), f"{every[best].core_ms:,.1f}", "–", "–"]
            if default in every:
                core = every[default].core_ms
                bound = min([every[best].core_ms, *known]) if known else None
                of_best[2] = f"{core / every[best].core_ms - 1:+.1%}"
                of_best[3] = "–" if bound is None else f"{core / bound - 1:+.1%}"
        lines.append(
            [
                machine,
                network,
                _short(default),
                f"{limit:,.1f}",
                *of_default,
                *of_best,
                str(len(every)),
            ]
        )
    columns = ("default", "least, ms", "core, ms", "least / core", "with waits, ms", "GiB")
    columns += (
        "best that was compiled",
        "core, ms",
        "default above",
        "above the bound",
        "compiled",
    )
    return table(("machine", "network", *columns), lines)


def _short(layout: Layout) -> str:
    shared = "replicated" if layout.shared_by == 1 else f"FSDP over {layout.shared_by}"
    return (
        f"{layout.remat}, {shared}, {layout.micro_batches} part{'s' * (layout.micro_batches > 1)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--depths", type=int, nargs="+", default=[])
    arguments = parser.parse_args()
    for text in arguments.layouts:
        layout = parse(text)
        for depth in arguments.depths or depths_of(layout, full=arguments.full):
            if str(depth) in load().get(layout.name, {}):
                continue
            try:
                figures = compiled(layout, depth)
            except ValueError as error:
                figures = {"error": str(error)}
            store(layout.name, depth, figures)
            short = {
                k: round(v, 3) if isinstance(v, float) else v
                for k, v in figures.items()
                if k != "memory"
            }
            print(layout.name, depth, short, flush=True)
