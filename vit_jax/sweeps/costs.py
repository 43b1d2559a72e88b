"""What a study would do: its runs, their state, and what they cost by the arithmetic of `vit-jax plan`."""

import pathlib
from collections.abc import Mapping, Sequence

from vit_jax.plan.dataset import choose_dataset
from vit_jax.plan.estimate import Totals, make_plan
from vit_jax.plan.topology import Topology, parse_topology
from vit_jax.sweeps.grid import Grid, Run
from vit_jax.sweeps.results import require_measures
from vit_jax.sweeps.runs import named, state_of
from vit_jax.tables import aligned

ANY_MACHINE = "v5e:1x1"  # exaFLOPs do not depend on it


def totals_of(run: Run, topology: Topology, given: Mapping[str, int]) -> Totals | None:
    """Of one run, by arithmetic; None for a network with a user's own code. `given`: numbers of images and classes.

    Raises:
      ValueError: a config that does not fit the machine or the data, or data of an unknown size.
    """
    examples = run.config.input.train_examples
    given = dict(given) | ({"num_examples": examples} if examples else {})
    dataset = choose_dataset(run.recipe, run.config, **given)
    return make_plan(run.config, topology, dataset, can_compile=False).totals


def plan_to_markdown(
    grid: Grid, workdir: pathlib.Path, own: Sequence[Run], topology: Topology | None, given: Mapping[str, int]
) -> str:
    """Every run and its state; of a study that trains also its compute and, with a machine, its time there."""
    require_measures(grid)
    head = ["run", "this machine", "state"]
    head += ["steps", "exaFLOPs"] if grid.study.is_trained else []
    head += ["hours", "chip-hours"] if grid.study.is_trained and topology else []
    machine, lines = topology or parse_topology(ANY_MACHINE), []
    left = {"runs": 0, "exaFLOPs": 0.0, "chip-hours": 0.0, "hours": 0.0}
    for run in grid.runs:
        state = state_of(run, workdir)
        is_left = state in ("new", "interrupted")
        left["runs"] += is_left
        line = [run.name, "yes" if run in own else "no", state]
        if grid.study.is_trained:
            with named(run):
                totals = totals_of(run, machine, given)
            figures = (
                [0.0] * 4
                if totals is None
                else [*(totals.steps, totals.exaflops or 0.0, 24 * totals.days, totals.chip_hours)]
            )
            line += [f"{figures[0]:,.0f}", *(f"{value:.3g}" for value in figures[1 : 4 if topology else 2])]
            for name, value in zip(("exaFLOPs", "hours", "chip-hours"), figures[1:], strict=True):
                left[name] += is_left * value
        lines.append(line)
    text = f"\nLeft: {left['runs']} of {len(grid.runs)} runs"
    text += f", {left['exaFLOPs']:.3g} exaFLOPs" if grid.study.is_trained else ""
    if grid.study.is_trained and topology:
        text += (
            f"; on {topology.name} {left['hours']:,.3g} hours one after the other, {left['chip-hours']:,.3g} chip-hours"
        )
    return aligned(head, lines, head[:3]) + text + ".\n"
