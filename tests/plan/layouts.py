"""Compile layouts of a run for a machine, to compare the default with the best of all: `python -m tests.plan.layouts`.

A layout is a policy of rematerialisation, the devices that share parameters, and a number of micro-batches. Layouts
without a loop over layers compile for minutes: networks of DEPTHS layers are compiled, the rest extrapolated.
Figures go to tests/golden/layouts.json, a table to the README of `vit_jax/plan`. Needs a checkout of the repository.
"""

import argparse
import dataclasses
import fcntl
import json
import pathlib
import time
from typing import Any

from docs.tables import table
from vit_jax.config import load_recipe
from vit_jax.config.architecture import UNROLLED
from vit_jax.plan.arithmetic import limit_seconds
from vit_jax.plan.dataset import choose_dataset
from vit_jax.plan.estimate import make_plan
from vit_jax.plan.topology import parse_topology
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.layout import RESERVE, usable_bytes

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN, DEFAULTS = ROOT / "tests/golden/layouts.json", ROOT / "tests/golden/default_layouts.json"
DEPTHS = (2, 4)
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
    parts: int  # micro-batches
    unrolled: bool

    @property
    def name(self) -> str:
        form = "unrolled" if self.unrolled else "loop"
        return f"{self.network} {self.machine} {self.remat} {form} /{self.shared_by} x{self.parts}"

    def options(self, depth: int) -> list[str]:
        """Options of the command line."""
        chips = parse_topology(self.machine).num_chips
        values = {
            "model.remat": self.remat,
            "model.depth": depth,
            "model.scan_unroll": depth if self.unrolled else 1,
            "sharding.parameters": "replicated" if self.shared_by == 1 else "fsdp",
            "sharding.num_replicas": None if self.shared_by == 1 else chips // self.shared_by,
            "optimizer.accumulation_steps": self.parts,
        }
        return [f"--config.{name}={value}" for name, value in values.items()]


def parse(text: str) -> Layout:
    """Return the layout of this name."""
    network, machine, remat, form, shared, parts = text.split()
    return Layout(network, machine, remat, int(shared[1:]), int(parts[1:]), form == "unrolled")


def compiled(layout: Layout, depth: int) -> dict[str, Any]:
    """Compile the step of this network with this many layers; return its figures."""
    recipe, topology = NETWORKS[layout.network], parse_topology(layout.machine)
    config = load_recipe(recipe, layout.options(depth))
    began, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(config, topology, choose_dataset(recipe, config))
    line = plan.timeline
    return {
        "gib": None if plan.needed_bytes is None else plan.needed_bytes / 2**30,
        "fits": plan.fits,
        "ms": None if line is None else 1e3 * line.seconds,
        "waits_ms": None if line is None else 1e3 * line.collective_seconds,
        "prefetch_ms": None if line is None else 1e3 * line.prefetch_seconds,
        "parts_ms": None if line is None else {part: 1e3 * seconds for part, seconds in line.parts.items()},
        "memory": None if plan.memory is None else {k: v / 2**30 for k, v in dataclasses.asdict(plan.memory).items()},
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


def at_full_depth(layout: Layout, figures: dict[str, Any]) -> tuple[float, float] | None:
    """Return milliseconds and GiB of the complete network; None if it was not compiled."""
    full = FULL_DEPTH[layout.network]
    if figures.get(str(full), {}).get("ms"):
        return figures[str(full)]["ms"], figures[str(full)]["gib"]
    low, high = (figures.get(str(depth), {}) for depth in DEPTHS)
    if not low.get("ms") or not high.get("ms"):
        return None
    layers = (full - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    ms, gib = (high[name] + layers * (high[name] - low[name]) for name in ("ms", "gib"))
    return ms, gib


def choose(network: str, machine: str) -> dict[str, Any]:
    """Return what a run does by default, and the least milliseconds of a step."""
    recipe, topology = NETWORKS[network], parse_topology(machine)
    config = load_recipe(recipe)
    dataset, devices = choose_dataset(recipe, config), topology.stand_ins()
    run = assemble(
        config, architecture_of(config, dataset.num_classes), num_examples=dataset.num_examples, devices=devices
    )
    policy, least = run.architecture.remat, limit_seconds(run, topology)
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
        same = [layout for layout in compiled if (layout.network, layout.machine) == (network, machine)]
        every = {layout: full for layout in same if (full := at_full_depth(layout, compiled[layout])) is not None}
        fitting = sorted((full[0], _short(layout)) for layout, full in every.items() if full[1] <= usable)
        default, limit = parse(default_of["layout"]), default_of["least_ms"]
        of_default, of_best = ["–"] * 3, ["–"] * 3
        if default in every:
            time, gib = every[default]
            of_default = [f"{time:,.1f}", f"{limit / time:.0%}", f"{gib:.1f}"]
        if fitting:
            above = f"{every[default][0] / fitting[0][0] - 1:+.1%}" if default in every else "–"
            of_best = [fitting[0][1], f"{fitting[0][0]:,.1f}", above]
        lines.append([machine, network, _short(default), f"{limit:,.1f}", *of_default, *of_best, str(len(every))])
    columns = ("default", "least, ms", "ms", "least / ms", "GiB", "best that fits", "ms", "default above", "compiled")
    return table(("machine", "network", *columns), lines)


def _short(layout: Layout) -> str:
    shared = "replicated" if layout.shared_by == 1 else f"FSDP over {layout.shared_by}"
    return f"{layout.remat}, {shared}, {layout.parts} part{'s' * (layout.parts > 1)}"


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
            short = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items() if k != "memory"}
            print(layout.name, depth, short, flush=True)
