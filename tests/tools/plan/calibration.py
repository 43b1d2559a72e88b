"""Compare arithmetic with all compiled steps, and fit its rates: `python -m tests.tools.plan.calibration`.

It stores the work and the errors of each row in tests/golden/calibration.json, and prints fitted
rates for `vit_jax/tools/plan/arithmetic.py`. Nothing is compiled. Each row is also predicted by
rates that were fitted without it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize

from docs.tables import table
from tests.tools.plan import layouts, record_gpus
from vit_jax.config import RunConfig, load_recipe
from vit_jax.tools.plan.arithmetic import get_rates, measure_work
from vit_jax.tools.plan.dataset import Dataset, choose_dataset
from vit_jax.tools.plan.estimate import Network, make_plan
from vit_jax.tools.plan.topology import parse_topology

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/calibration.json"
GIB = 2**30
Row = dict[str, Any]
PARTS = {
    "products": "products",
    "results": "results",
    "attention": "attention",
    "operations": "operations",
    "maps": "maps",
    "update": "updates",
    "copies": "copies",
    "stacks": "stacks",
    "launches": "launches",
}
"""Names of a step's parts of work, and of their rates."""
FITTED = {
    "GPU": (
        "products",
        "attention",
        "operations",
        "update",
        "stacks",
        "launches",
    ),
    "TPU v5e": ("products", "results", "copies", "stacks"),
    "TPU v5p": ("products", "results"),
    "TPU v6e": ("products", "results"),
}
"""Parts of work that are fitted for transformers, by platform; on TPUs the update outside of loops
is assumed to take one pass."""


UNITS = {"R50x1 dots": (26.4, 2.4), "R50+B/16 dots": (47.3, 4.3)}
"""Milliseconds and GiB of networks with units in kernels, by `matrix_limit.py` of 24 November."""


class Compiled(NamedTuple):
    """A compiled step: its run, milliseconds, and GiB of one device; None: not known.

    `has_waits` is False for the time without waiting for collectives.
    """

    name: str
    topology: str
    config: RunConfig
    dataset: Dataset
    ms: float
    gib: float | None
    has_waits: bool = True
    network: Network | None = None


def list_compiled() -> Iterator[Compiled]:
    """Yield all steps that were compiled with all layers, for TPUs also extrapolated ones.

    Two and four layers on a GPU say too little of all: XLA keeps more of the first layers.
    """
    from tests.tools.plan import record

    for case in record.CASES:
        row = record.load().get(case.name)
        if row is None or not row["memory"]:
            continue
        config = load_recipe(case.recipe, case.options)
        dataset = choose_dataset(case.recipe, config)
        gib = row["needed_bytes"] / GIB
        name = case.name
        if case.topology not in name:
            name = f"{name} {case.topology}"
        yield Compiled(
            name,
            case.topology,
            config,
            dataset,
            1e3 * row["step_seconds"],
            gib,
        )
    for case, machine, row in record_gpus.list_rows():
        yield Compiled(
            f"{case.name} on {machine}",
            machine,
            case.load(machine),
            case.find_dataset(machine),
            row["ms"],
            row["gib"],
            network=case.find_network(machine),
        )
    for case in record.CASES:
        if case.name in UNITS:
            config = load_recipe(case.recipe, case.options)
            dataset = choose_dataset(case.recipe, config)
            yield Compiled(
                case.name,
                case.topology,
                config,
                dataset,
                *UNITS[case.name],
            )
    yield from _list_layouts()


def _list_layouts() -> Iterator[Compiled]:
    for name, figures in layouts.load().items():
        layout = layouts.parse(name)
        depth = layouts.FULL_DEPTH[layout.network]
        estimate = layouts.at_full_depth(layout, figures)
        if estimate is None:
            continue
        recipe = layouts.NETWORKS[layout.network]
        config = load_recipe(recipe, layout.options(depth))
        yield Compiled(
            name,
            layout.machine,
            config,
            choose_dataset(recipe, config),
            estimate.ms or estimate.core_ms,
            estimate.gib,
            has_waits=estimate.ms is not None,
        )


def compare(step: Compiled) -> Row:
    """Return the work, and the time and memory by arithmetic, of a compiled step."""
    topology = parse_topology(step.topology)
    plan = make_plan(
        step.config,
        topology,
        step.dataset,
        network=step.network,
        can_compile=False,
    )
    work = measure_work(plan.run, topology)
    rates = get_rates(topology)
    waits_ms = 0.0
    if step.has_waits:
        waited = rates.overlapped if work.is_overlapped else rates.exposed
        waits_ms = 1e3 * waited * work.collectives
    core_seconds = plan.roofline.seconds - plan.roofline.collective_seconds
    arithmetic_ms = 1e3 * core_seconds + waits_ms

    parts = {"copies": 0.0}
    for field in dataclasses.fields(work):
        if field.name in PARTS:
            parts[field.name] = getattr(work, field.name)
    if work.is_looped and topology.is_tpu:
        parts["copies"] = parts["update"]
        parts["update"] = 0.0
    return {
        "platform": topology.chip.name if topology.is_tpu else "GPU",
        "kind": "residual units" if plan.run.architecture.has_resnet else "transformer",
        "compiled_ms": round(step.ms, 2),
        "arithmetic_ms": round(arithmetic_ms, 2),
        "waits_ms": round(waits_ms, 3),
        "compiled_gib": None if step.gib is None else round(step.gib, 3),
        "arithmetic_gib": round(plan.memory.total / GIB, 3),
        "assumed": parts["update"] if topology.is_tpu else 0.0,
        "parts": {name: float(f"{value:.6g}") for name, value in parts.items()},
    }


def load() -> dict[str, Row]:
    """Return the stored rows by name."""
    return json.loads(GOLDEN.read_text())


def fit(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """Return rates that are not negative, with the least squares of relative errors."""
    work = []
    shares = []
    for row in rows:
        compiled = row["compiled_ms"] / 1e3
        assumed = row["waits_ms"] / 1e3 + row["assumed"]
        work.append([row["parts"][name] / compiled for name in names])
        shares.append(1 - assumed / compiled)
    rates, _ = scipy.optimize.nnls(np.array(work), np.array(shares))
    return dict(zip(names, rates.tolist(), strict=True))


def predict_ms(row: Row, rates: dict[str, float]) -> float:
    """Return the time of a step by these rates."""
    seconds = 0.0
    for name, rate in rates.items():
        seconds += rate * row["parts"][name]
    return 1e3 * (seconds + row["assumed"]) + row["waits_ms"]


def compute_errors(rows: Sequence[Row]) -> list[float]:
    """Return the relative error of each row's time by arithmetic."""
    return [row["arithmetic_ms"] / row["compiled_ms"] - 1 for row in rows]


def compute_memory_errors(rows: Sequence[Row]) -> list[float]:
    """Return the relative error of the memory of each row that has one."""
    known = [row for row in rows if row["compiled_gib"]]
    return [row["arithmetic_gib"] / row["compiled_gib"] - 1 for row in known]


def leave_out(rows: Sequence[Row], names: Sequence[str]) -> list[float]:
    """Return the relative error of each row by rates that are fitted to the others."""
    errors = []
    for index, row in enumerate(rows):
        others = [*rows[:index], *rows[index + 1 :]]
        rates = fit(others, names)
        predicted = predict_ms(row, rates)
        errors.append(predicted / row["compiled_ms"] - 1)
    return errors


def select(platform: str, kind: str) -> list[Row]:
    """Return the stored rows of a platform and a kind of network."""
    rows = []
    for row in load().values():
        if row["platform"] == platform and row["kind"] == kind:
            rows.append(row)
    return rows


COLUMNS = (
    "platform",
    "network",
    "rows",
    "time",
    "time, fitted without the row",
    "memory",
)


def calibration_table() -> str:
    """Return the table of errors by platform and kind of network."""
    lines = []
    for platform in FITTED:
        for kind in ("transformer", "residual units"):
            rows = select(platform, kind)
            if not rows:
                continue
            left_out = "–"
            if kind == "transformer":
                left_out = _format_range(leave_out(rows, FITTED[platform]))
            memory = compute_memory_errors(rows)
            lines.append(
                [
                    platform,
                    kind,
                    str(len(rows)),
                    _format_range(compute_errors(rows)),
                    left_out,
                    _format_range(memory) if memory else "–",
                ]
            )
    return table(COLUMNS, lines)


def _format_range(errors: Sequence[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def main() -> None:
    """Store all rows and print fitted rates."""
    rows = {step.name: compare(step) for step in list_compiled()}
    GOLDEN.write_text(json.dumps(rows, indent=1) + "\n")
    for platform, names in FITTED.items():
        transformers = select(platform, "transformer")
        rates = {PARTS[name]: rate for name, rate in fit(transformers, names).items()}
        print(platform, {name: float(f"{rate:.3g}") for name, rate in rates.items()})
    for name, row in rows.items():
        time = row["arithmetic_ms"] / row["compiled_ms"] - 1
        memory = 0.0
        if row["compiled_gib"]:
            memory = row["arithmetic_gib"] / row["compiled_gib"] - 1
        if max(abs(time), abs(memory)) > 0.15:
            print(f"{name}: time {time:+.0%}, memory {memory:+.0%}")
    print(calibration_table())


if __name__ == "__main__":
    main()
