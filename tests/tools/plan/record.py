"""Renew the recorded plans: `python -m tests.tools.plan.record [NAME ...]` compiles cases in turn.

Figures are stored in tests/golden/plan.json and plan_gpus.json, with which tests compare arithmetic,
and shown in the tables of `vit_jax/bench/PLANS.md`. Rows of other cases stay as they are. Needs libtpu and a
checkout of the repository.
"""

import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from docs.tables import find_origin, renew, table
from tests.tools.plan import record_gpus
from tests.tools.plan.calibration import calibration_table
from tests.tools.plan.layouts import layouts_table
from tests.tools.plan.matrix_limit import limit_table
from tests.tools.plan.record_gpus import (
    machine_table,
    measured_table,
    recipe_table,
    tuning_table,
)
from vit_jax.config import load_recipe
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import Plan, make_plan
from vit_jax.tools.plan.report import GIB, to_json
from vit_jax.tools.plan.topology import parse_topology

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/plan.json"
README = ROOT / "vit_jax/bench/PLANS.md"
Row = dict[str, Any]


# These overrides apply unless a case has its own value.
LAYOUT = (
    "model.remat=dots",
    "sharding.parameters=replicated",
    "optimizer.accumulation_steps=1",
)


class Case(NamedTuple):
    """One recorded plan: a recipe, a machine, and overrides without `--config.`, separated by
    spaces.
    """

    name: str
    recipe: str
    topology: str
    overrides: str = ""

    @property
    def options(self) -> list[str]:
        """Return options with an explicit layout, so that a wrong formula does not change the
        record.
        """
        return [f"--config.{override}" for override in (*LAYOUT, *self.overrides.split())]

    @property
    def command(self) -> str:
        words = [
            f"--config={self.recipe}",
            f"--topology={self.topology}",
            *self.options,
        ]
        return " ".join(["vit-jax plan", *words])


_JFT = "configs/pretrain_jft.py:"
_S16 = "configs/pretrain_s16_baseline.py:epochs=90"
_B16 = f"{_JFT}ViT-B/16"
_L16 = f"{_JFT}ViT-L/16,epochs=7"
_H14 = f"{_JFT}ViT-H/14"
_FULL = "model.remat=full sharding.parameters=fsdp"
HEADLINES = (
    Case("H/14 on v5e:16x16", _H14, "v5e:16x16", _FULL),
    Case(
        "L/16 on v5e:4x4",
        _L16,
        "v5e:4x4",
        "global_batch=1024 model.scan_unroll=1",
    ),
    Case(
        "L/16 on v5e:8x8",
        _L16,
        "v5e:8x8",
        "global_batch=4096 model.scan_unroll=1",
    ),
    Case(
        "L/16 on v5e:16x16",
        _L16,
        "v5e:16x16",
        "global_batch=16384 model.scan_unroll=1",
    ),
)
SPREAD = (
    Case("H/14 on v4:4x4x8", _H14, "v4:4x4x8", _FULL),
    Case(
        "G/14 on v5p:8x8x8",
        _H14,
        "v5p:8x8x8",
        f"model.name=ViT-G/14 {_FULL} sharding.num_replicas=4",
    ),
    Case("S/16 dots", _S16, "v5e:2x2", "model.remat=dots"),
    Case(
        "B/16 none",
        _B16,
        "v5e:2x2",
        "global_batch=128 model.remat=none model.scan_unroll=1",
    ),
    Case("B/16 dots", _B16, "v5e:2x2", "global_batch=256 model.scan_unroll=1"),
    Case("B/16 full", _B16, "v5e:2x2", "global_batch=512 model.remat=full"),
    Case(
        "B/16 fsdp",
        _B16,
        "v5e:4x4",
        "global_batch=1024 sharding.parameters=fsdp model.scan_unroll=1",
    ),
    Case(
        "B/16 unrolled",
        _B16,
        "v5e:4x4",
        "global_batch=1024 model.remat=none",
    ),
    Case(
        "B/16 on v6e",
        _B16,
        "v6e:2x2",
        "global_batch=256 model.scan_unroll=1",
    ),
    Case(
        "B/16 average", _B16, "v5e:2x2", "global_batch=128 polyak.factor=0.9999 model.scan_unroll=1"
    ),
    Case(
        "B/16 4 parts",
        _B16,
        "v5e:2x2",
        "global_batch=1024 optimizer.accumulation_steps=4",
    ),
    Case(
        "B/16 2 model",
        _B16,
        "v5e:2x2",
        "global_batch=256 sharding.num_model_shards=2",
    ),
    Case("L/16 none", _L16, "v5p:2x2x1", "global_batch=256 model.remat=none"),
    Case(
        "L/16 fsdp", _L16, "v5e:4x4", "global_batch=1024 model.remat=full sharding.parameters=fsdp"
    ),
    Case(
        "L/16 attention",
        _L16,
        "v5e:4x4",
        "global_batch=1024 model.remat=attention sharding.parameters=fsdp",
    ),
    Case(
        "H/14 dots",
        _H14,
        "v5p:2x2x1",
        "global_batch=128 model.remat=dots sharding.parameters=replicated",
    ),
    Case("H/14 fsdp", _H14, "v5e:4x4", f"global_batch=512 {_FULL}"),
    Case("R50x1 dots", f"{_JFT}R50x1", "v5e:2x2", "global_batch=256 model.scan_unroll=1"),
    Case(
        "R50x1 none",
        f"{_JFT}R50x1",
        "v5e:2x2",
        "global_batch=128 model.remat=none model.scan_unroll=1",
    ),
    Case("R50+B/16 dots", f"{_JFT}R50+ViT-B/16", "v5e:2x2", "global_batch=128"),
)
CASES = (*HEADLINES, *SPREAD)


def plan_of(case: Case, *, can_compile: bool) -> Plan:
    """Return the plan of a case."""
    config = load_recipe(case.recipe, case.options)
    topology = parse_topology(case.topology)
    return make_plan(
        config,
        topology,
        choose_dataset(case.recipe, config),
        can_compile=can_compile,
    )


def record(case: Case) -> Row:
    """Compile a case and return the figures to store."""
    plan = to_json(plan_of(case, can_compile=True))
    timeline = plan.pop("timeline") or {}
    for name in ("dataset", "reason", "roofline", "limit_seconds", "compile_seconds"):
        plan.pop(name)

    seconds = {}
    for name, value in timeline.items():
        if name.endswith("_seconds"):
            seconds[name] = value

    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {
        "name": case.name,
        "command": case.command,
        **plan,
        "timeline": seconds,
        "dearest_collectives": timeline.get("collectives", [])[:3],
        "versions": versions,
        **find_origin(),
    }


def load() -> dict[str, Row]:
    """Return all recorded figures by name of the case."""
    return json.loads(GOLDEN.read_text())


def write(rows: dict[str, Row]) -> None:
    """Store the figures in the order of the cases, and renew the tables of the page."""
    store(GOLDEN, rows, [case.name for case in CASES])


def store(golden: pathlib.Path, rows: Mapping[str, Row], keys: Iterable[str]) -> None:
    """Store recorded figures in the order of their keys, and renew the tables of the page."""
    ordered = {key: rows[key] for key in keys if key in rows}
    golden.write_text(json.dumps(ordered, indent=1) + "\n")
    README.write_text(renew(README.read_text(), TABLES))


HEADLINE_COLUMNS = (
    "",
    "fits",
    "GiB a chip, of",
    "parameters",
    "optimiser",
    "activations",
    "gradients",
    "temporary",
    "step, ms",
    "waiting for collectives, ms",
    "MFU",
    "days",
    "chip-hours",
    "exaFLOPs",
)


def headline_table() -> str:
    """Return the table of memory, time and cost of runs on pods."""
    rows = load()
    lines = []
    for case in HEADLINES:
        row = rows[case.name]
        memory = row["memory"]
        totals = row["totals"]
        lines.append(
            [
                row["name"],
                "yes" if row["fits"] else "no",
                f"{row['needed_bytes'] / GIB:.2f}, {row['usable_bytes'] / GIB:.2f}",
                f"{memory['parameters'] / GIB:.3f}",
                f"{memory['optimizer'] / GIB:.3f}",
                f"{memory['activations'] / GIB:.3f}",
                f"{memory['gradients'] / GIB:.3f}",
                f"{memory['temporary'] / GIB:.3f}",
                f"{1e3 * row['step_seconds']:,.1f}",
                f"{1e3 * row['timeline']['collective_seconds']:,.1f}",
                f"{totals['mfu']:.1%}",
                f"{totals['days']:,.2f}",
                f"{totals['chip_hours']:,.0f}",
                f"{totals['exaflops']:,.0f}",
            ]
        )
    return table(HEADLINE_COLUMNS, lines)


TABLES = {
    "headlines": headline_table,
    "calibration": calibration_table,
    "layouts": layouts_table,
    "gpus": machine_table,
    "gpu recipes": recipe_table,
    "gpu fine-tuning": tuning_table,
    "measured": measured_table,
    "fine-tuning on v5e": limit_table,
}


def main(names: Sequence[str]) -> None:
    """Record the named cases of TPUs and GPUs, or all."""
    for case in CASES:
        if not names or case.name in names:
            print(case.command, flush=True)
            write(load() | {case.name: record(case)})
    record_gpus.main(names)


if __name__ == "__main__":
    main(sys.argv[1:])
