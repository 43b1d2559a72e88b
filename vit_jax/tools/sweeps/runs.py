"""Check, plan and perform the runs of a study or a sweep, in order and none twice, by `vit_jax.train.series`.

They are in the sub-folder `runs/` of the workdir; several machines may share them.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

from vit_jax import hosts
from vit_jax.config import FinetuneConfig, to_text
from vit_jax.config.check import validate
from vit_jax.data.records import few
from vit_jax.text.tables import aligned
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.topology import Topology, parse_topology
from vit_jax.tools.sweeps.grid import Grid, Run
from vit_jax.tools.sweeps.results import (
    folder_of,
    rank,
    require_measures,
    settings_of,
    write_results,
)
from vit_jax.train.assemble import architecture_of
from vit_jax.train.lifecycle.interruption import Paused
from vit_jax.train.run_files import DIVERGED, read_metrics, read_pause, read_summary, write_pause
from vit_jax.train.series import Perform, Unfinished, of_first, run_once, say, state_of

ANY_MACHINE = "v5e:1x1"  # exaFLOPs do not depend on it


@dataclasses.dataclass(frozen=True)
class Halving:
    """Early stopping of bad settings: one rung of successive halving.

    Every run is trained up to a fraction of its steps, where it is paused after an evaluation.
    Settings are compared by the mean over their seeds, and only the best are resumed. A paused run
    is an ordinary workdir with a checkpoint, so a resumed one ends as if it had never been paused.
    The comparison depends on the runs alone, not on machines.
    """

    fraction: float  # of a run's steps, below 1
    keep: int | None = None  # None: half of them, rounded up

    def check(self, grid: Grid) -> None:
        """Raise ValueError for a sweep that cannot be stopped in part."""
        if self.num_kept(grid) >= (most := len(settings_of(grid))):
            raise ValueError(
                f"--keep={self.num_kept(grid)}: must be below {most}, the number of settings."
            )
        if any(
            isinstance(run.config, FinetuneConfig) and run.config.search.learning_rates
            for run in grid.runs
        ):
            fix = "Leave config.search.learning_rates out, and give --grid=schedule.learning_rate=A,B."
            raise ValueError(f"--stop_after= compares runs with one learning rate. {fix}")

    def num_kept(self, grid: Grid) -> int:
        return self.keep or math.ceil(len(settings_of(grid)) / 2)

    def reach(
        self, grid: Grid, run: Run, workdir: pathlib.Path, perform: Perform, title: str
    ) -> None:
        """Train a run up to the comparison, unless it is trained so far; raises as `run_once`."""
        folder = folder_of(workdir, run)
        if of_first(self.value(grid, run, workdir)) is not None:
            return
        try:
            run_once(
                run.config, folder, functools.partial(perform, pause_fraction=self.fraction), title
            )
        except Paused as pause:
            say(str(pause))
            if hosts.is_first():
                write_pause(folder, {"fraction": self.fraction, "steps": pause.total})

    def value(self, grid: Grid, run: Run, workdir: pathlib.Path) -> float | None:
        """Return the last value of the metric up to the comparison; None before, NaN for a run that diverged."""
        (metric,), folder = grid.study.measures, folder_of(workdir, run)
        summary = read_summary(folder)
        pause = read_pause(folder)
        if summary is not None and DIVERGED in summary:
            return math.nan
        if summary is None and (pause is None or pause["fraction"] < self.fraction):
            return None
        last = self.fraction * (pause or summary or {}).get("steps", 0)
        values = [
            line[metric] for line in read_metrics(folder) if metric in line and line["step"] <= last
        ]
        if not values:
            raise ValueError(
                f"--stop_after={self.fraction:g}: no {metric} up to there. Use a larger fraction."
            )
        return values[-1]

    def stopped(self, grid: Grid, workdir: pathlib.Path) -> dict[str, float]:
        """Return the runs that are not resumed, by name, with their values; in every process the same.

        Of equal settings the first ones are kept. A setting with a run that diverged comes last.

        Raises:
          Unfinished: runs of other machines are not trained so far.
        """
        values = of_first({run.name: self.value(grid, run, workdir) for run in grid.runs})
        if missing := [name for name, value in values.items() if value is None]:
            raise Unfinished(
                f"The runs of this machine are trained to {self.fraction:.0%}. Runs to compare with are missing in "
                f"{workdir}: {few(missing)}. The same command goes on when other machines have done them."
            )
        (metric,), settings = grid.study.measures, settings_of(grid)

        def order(runs: Sequence[Run]) -> float:
            mean = statistics.fmean(rank({metric: values[run.name]}, run, metric) for run in runs)
            return -mean if math.isfinite(mean) else math.inf

        dropped = sorted(settings.values(), key=order)[self.num_kept(grid) :]
        return {run.name: values[run.name] for runs in dropped for run in runs}


def check(grid: Grid, halving: Halving | None = None) -> None:
    """Check every run, before the first one starts.

    Raises:
      ValueError: an invalid config, or a measure that no run will have.
    """
    for run in grid.runs:
        with named(run):
            validate(run.config)
            if run.config.model.name is not None:
                architecture_of(run.config, num_classes=1)
    require_measures(grid)
    if halving is not None:
        halving.check(grid)


def run_grid(
    grid: Grid,
    workdir: pathlib.Path,
    share: slice,
    perform: Perform,
    halving: Halving | None = None,
) -> dict[str, float]:
    """Perform the runs of this machine that are left; after each, write the results of all.

    Every process of the machine's run calls this, after `hosts.start`.

    Args:
      grid: all runs.
      workdir: of the study or sweep.
      share: the runs of this machine.
      perform: performs one run; with `halving` it has the keyword argument `pause_fraction`.
      halving: stops bad runs.

    Returns:
      The values of stopped runs, by name.

    Raises:
      ValueError: as `check`; a workdir of another config; otherwise as `perform`.
      Unfinished: other machines have not reached the comparison of runs.
      Interrupted: SIGTERM or Ctrl-C; the run it arrived in is saved.
    """
    check(grid, halving)
    runs = grid.runs
    stopped = dict[str, float]()
    if halving is not None:
        for number, run in enumerate(own := grid.runs[share], 1):
            with named(run):
                title = f"\nrun {number} of {len(own)}, to {halving.fraction:.0%}: {run.name}"
                halving.reach(grid, run, workdir, perform, title)
        stopped = halving.stopped(grid, workdir)
        runs = tuple(run for run in grid.runs if run.name not in stopped)
    left = sorted(
        runs[share], key=lambda run: -(run.config.input.train_examples or 0)
    )  # the data may have fewer
    for number, run in enumerate(left, 1):
        with named(run):
            run_once(
                run.config,
                folder_of(workdir, run),
                perform,
                f"\nrun {number} of {len(left)}: {run.name}",
            )
        if hosts.is_first():
            write_results(grid, workdir, stopped=stopped)
    return stopped


@contextlib.contextmanager
def named(run: Run) -> Iterator[None]:
    """Begin the errors of a run with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{run.name}: {error}") from error


def plan_to_markdown(
    grid: Grid,
    workdir: pathlib.Path,
    own: Sequence[Run],
    topology: Topology | None,
    sizes: Mapping[str, int],
    halving: Halving | None = None,
) -> str:
    """Return a table of all runs and their states; for training runs also compute and, with `topology`, time there.

    `sizes` has the numbers of images and classes from the command.

    Raises:
      ValueError: as `check`; a config that does not fit the machine or the data, or data of an
        unknown size.
    """
    check(grid, halving)
    stopped: Mapping[str, float] = {}
    with contextlib.suppress(Unfinished):
        stopped = halving.stopped(grid, workdir) if halving else {}
    machine = topology or parse_topology(ANY_MACHINE)
    is_trained = grid.study.is_trained
    costs = {"steps": ",.0f", "exaFLOPs": ".3g"} | (
        {"hours": ".3g", "chip-hours": ".3g"} if topology else {}
    )
    costs = costs if is_trained else {}
    known: dict[str, list[float]] = {}
    lines = []
    num_left = 0
    left = dict.fromkeys(costs, 0.0)
    for run in grid.runs:
        state = "stopped" if run.name in stopped else state_of(folder_of(workdir, run))
        alike = to_text(dataclasses.replace(run.config, seed=0))
        if alike not in known and is_trained:
            with named(run):
                known[alike] = _costs(run, machine, sizes)
        figures = dict(zip(costs, known.get(alike, ()), strict=False))
        if state in ("new", "interrupted", "paused"):
            num_left += 1
            left = {name: total + figures[name] for name, total in left.items()}
        cells = [f"{figures[name]:{form}}" for name, form in costs.items()]
        lines.append([run.name, "yes" if run in own else "no", state, *cells])
    text = f"\nLeft: {num_left} of {len(grid.runs)} runs" + (
        f", {left['exaFLOPs']:.3g} exaFLOPs" if is_trained else ""
    )
    if is_trained and topology:
        hours = left["hours"]
        chip_hours = left["chip-hours"]
        text += f"; on {topology.name} {hours:,.3g} hours one after the other, {chip_hours:,.3g} chip-hours"
    words = ["run", "this machine", "state"]
    return aligned([*words, *costs], lines, words) + text + ".\n"


def _costs(run: Run, machine: Topology, sizes: Mapping[str, int]) -> list[float]:
    """Return steps, exaFLOPs, hours and chip-hours; zeros for a network with a user's own code."""
    examples = run.config.input.train_examples
    dataset = choose_dataset(
        run.recipe, run.config, **dict(sizes) | ({"num_examples": examples} if examples else {})
    )
    totals = make_plan(run.config, machine, dataset, can_compile=False).totals
    return (
        [totals.steps, totals.exaflops or 0.0, 24 * totals.days, totals.chip_hours]
        if totals
        else [0.0] * 4
    )
