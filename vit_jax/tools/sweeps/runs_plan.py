"""The plan of a study or a sweep: the state of each run, and its compute and time on a machine."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from vit_jax.config import to_text
from vit_jax.sharding.fabrics import GIB
from vit_jax.text.tables import align_table
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.topology import Topology, parse_topology
from vit_jax.tools.sweeps.grid import Grid, Run
from vit_jax.tools.sweeps.halving import Halving
from vit_jax.tools.sweeps.results import get_run_folder
from vit_jax.tools.sweeps.runs import check, name_run_in_errors
from vit_jax.train.series import Unfinished, state_of

_ANY_MACHINE = "v5e:1x1"  # exaFLOPs do not depend on it
_TEXT_COLUMNS = ("run", "this machine", "state")
_FORMATS = {
    "steps": ",.0f",
    "exaFLOPs": ".3g",
    "hours": ".3g",
    "chip-hours": ".3g",
    "GiB a chip": ".2f",
}
_UNFINISHED = ("new", "interrupted", "paused")

Costs = Mapping[str, float]
"""The numbers of a run, by the names in `_FORMATS`."""


def plan_to_markdown(
    grid: Grid,
    workdir: pathlib.Path,
    local_runs: Sequence[Run],
    topology: Topology | None,
    sizes: Mapping[str, int],
    halving: Halving | None = None,
) -> str:
    """Return a table of all runs and their states.

    Training runs also have their compute and, with `topology`, their time there.

    `local_runs` are the runs of this machine. `sizes` has the numbers of images and classes from the
    command.

    Raises:
      ValueError: errors of `check`, a config that does not fit the machine or the data, or data
        of an unknown size.
    """
    check(grid, halving)
    states = _read_states(grid, workdir, halving)
    columns = _select_columns(grid, topology)
    costs: list[Costs] = [{} for _ in grid.runs]
    if columns:
        costs = _estimate_all_costs(grid, topology or parse_topology(_ANY_MACHINE), sizes)

    lines = []
    unfinished = []
    for run, state, run_costs in zip(grid.runs, states, costs, strict=True):
        line = [run.name, "yes" if run in local_runs else "no", state]
        for name in columns:
            line.append(f"{run_costs[name]:{_FORMATS[name]}}")
        lines.append(line)
        if state in _UNFINISHED:
            unfinished.append(run_costs)
    table = align_table([*_TEXT_COLUMNS, *columns], lines, _TEXT_COLUMNS)
    return f"{table}\n{_describe_unfinished(grid, topology, unfinished)}\n"


def _describe_unfinished(
    grid: Grid,
    topology: Topology | None,
    unfinished: Sequence[Costs],
) -> str:
    """Return the number of unfinished runs, and their compute and time."""
    text = f"Left: {len(unfinished)} of {len(grid.runs)} runs"
    if grid.study.is_trained:
        exaflops = sum(costs["exaFLOPs"] for costs in unfinished)
        text += f", {exaflops:.3g} exaFLOPs"
    if grid.study.is_trained and topology is not None:
        hours = sum(costs["hours"] for costs in unfinished)
        chip_hours = sum(costs["chip-hours"] for costs in unfinished)
        text += (
            f"; on {topology.name} {hours:,.3g} hours one after the other, "
            f"{chip_hours:,.3g} chip-hours, {topology.fabric.usable_bytes / GIB:.2f} GiB usable of each"
        )
    return f"{text}."


def _read_states(
    grid: Grid,
    workdir: pathlib.Path,
    halving: Halving | None,
) -> list[str]:
    """Return the state of each run; until all runs reach the comparison, none is stopped."""
    stopped: Mapping[str, float] = {}
    if halving is not None:
        with contextlib.suppress(Unfinished):
            stopped = halving.find_stopped(grid, workdir)

    states = []
    for run in grid.runs:
        if run.name in stopped:
            states.append("stopped")
        else:
            states.append(state_of(get_run_folder(workdir, run)))
    return states


def _select_columns(grid: Grid, topology: Topology | None) -> list[str]:
    """Return the numbers to show: none of timed runs, and times only for a given machine."""
    if not grid.study.is_trained:
        return []
    if topology is None:
        return ["steps", "exaFLOPs"]
    return list(_FORMATS)


def _estimate_all_costs(
    grid: Grid,
    machine: Topology,
    sizes: Mapping[str, int],
) -> list[Costs]:
    """Return the costs of each run; runs that differ by the seed alone are planned once."""
    costs_by_config: dict[str, Costs] = {}
    costs = []
    for run in grid.runs:
        config = to_text(dataclasses.replace(run.config, seed=0))
        if config not in costs_by_config:
            with name_run_in_errors(run):
                costs_by_config[config] = _estimate_costs(run, machine, sizes)
        costs.append(costs_by_config[config])
    return costs


def _estimate_costs(
    run: Run,
    machine: Topology,
    sizes: Mapping[str, int],
) -> Costs:
    """Return the costs of one run; zeros for a custom network, whose FLOPs no formula gives."""
    sizes = dict(sizes)
    if run.config.input.train_examples:
        sizes["num_examples"] = run.config.input.train_examples
    dataset = choose_dataset(run.recipe, run.config, **sizes)
    plan = make_plan(run.config, machine, dataset, can_compile=False)
    totals = plan.totals
    if totals is None:
        return dict.fromkeys(_FORMATS, 0.0)
    return {
        "steps": totals.steps,
        "exaFLOPs": totals.exaflops or 0.0,
        "hours": 24 * totals.days,
        "chip-hours": totals.chip_hours,
        "GiB a chip": (plan.needed_bytes or 0) / GIB,
    }
