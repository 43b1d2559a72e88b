"""Early stopping of bad runs: one rung of successive halving.

Every run is trained up to a fraction of its steps, where it is paused after an evaluation. The settings are compared by
the mean over their seeds, and only the best are resumed. A paused run is an ordinary workdir with a checkpoint, so a
resumed one ends as if it had not been paused. The comparison depends on the runs alone, not on machines or their order.
"""

import dataclasses
import functools
import math
import pathlib
import statistics

from vit_jax import hosts
from vit_jax.config import FinetuneConfig
from vit_jax.data.records import few
from vit_jax.sweeps.grid import Grid, Run
from vit_jax.sweeps.results import folder_of, rank, settings_of
from vit_jax.train.lifecycle.interruption import Paused
from vit_jax.train.run_files import DIVERGED, read_metrics, read_pause, read_summary, write_pause
from vit_jax.train.series import Perform, Unfinished, of_first, run_once, say


@dataclasses.dataclass(frozen=True)
class Halving:
    """The fraction of steps after which settings are compared, and the number that is trained to the end."""

    fraction: float  # of a run's steps, below 1
    keep: int | None = None  # None: half of them, rounded up

    def check(self, grid: Grid) -> None:
        """Raise ValueError for a sweep that cannot be stopped in part."""
        if self.num_kept(grid) >= (most := len(settings_of(grid))):
            raise ValueError(f"--keep={self.num_kept(grid)}: must be below {most}, the number of settings.")
        if any(isinstance(run.config, FinetuneConfig) and run.config.search.learning_rates for run in grid.runs):
            raise ValueError(
                "--stop_after= compares runs with one learning rate. Leave config.search.learning_rates out, and give "
                "--grid=schedule.learning_rate=A,B."
            )

    def num_kept(self, grid: Grid) -> int:
        return self.keep or math.ceil(len(settings_of(grid)) / 2)

    def reach(self, grid: Grid, run: Run, workdir: pathlib.Path, perform: Perform, title: str) -> None:
        """Train a run up to the comparison, unless it is trained so far; raises as `run_once`."""
        folder = folder_of(workdir, run)
        if of_first(self.value(grid, run, workdir)) is not None:
            return
        try:
            run_once(run.config, folder, functools.partial(perform, pause_fraction=self.fraction), title)
        except Paused as pause:
            say(str(pause))
            if hosts.is_first():
                write_pause(folder, {"fraction": self.fraction, "steps": pause.total})

    def value(self, grid: Grid, run: Run, workdir: pathlib.Path) -> float | None:
        """Return the last value of the metric up to the comparison; None before, NaN for a run that diverged."""
        (metric,), folder = grid.study.measures, folder_of(workdir, run)
        summary, pause = read_summary(folder), read_pause(folder)
        if summary is not None and DIVERGED in summary:
            return math.nan
        if summary is None and (pause is None or pause["fraction"] < self.fraction):
            return None
        last = self.fraction * (pause or summary or {}).get("steps", 0)
        values = [line[metric] for line in read_metrics(folder) if metric in line and line["step"] <= last]
        if not values:
            raise ValueError(f"--stop_after={self.fraction:g}: no {metric} up to there. Use a larger fraction.")
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
                f"The runs of this machine are trained to {self.fraction:.0%}. All settings are compared there, and "
                f"these runs are missing in {workdir}: {few(missing)}. The same command goes on when the machines that "
                "have them have done them."
            )
        (metric,), settings = grid.study.measures, settings_of(grid)

        def order(point: tuple[str, ...]) -> float:
            found = [rank({metric: values[run.name]}, metric) for run in settings[point]]
            return -statistics.fmean(found) if all(map(math.isfinite, found)) else math.inf

        dropped = sorted(settings, key=order)[self.num_kept(grid) :]
        return {run.name: values[run.name] for point in dropped for run in settings[point]}
