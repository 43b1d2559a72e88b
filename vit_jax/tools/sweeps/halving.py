"""Early stopping of bad settings in a sweep."""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Sequence

from vit_jax import hosts
from vit_jax.config import FinetuneConfig
from vit_jax.data.records import few
from vit_jax.tools.sweeps.grid import Grid, Run
from vit_jax.tools.sweeps.results import get_run_folder, group_by_setting, score
from vit_jax.train.lifecycle.interruption import Paused
from vit_jax.train.run_files import DIVERGED, read_metrics, read_pause, read_summary, write_pause
from vit_jax.train.series import Perform, Unfinished, run_once, say, share_first


@dataclasses.dataclass(frozen=True)
class Halving:
    """Early stopping of bad settings: one rung of successive halving.

    Every run is trained up to a fraction of its steps, where it is paused after an evaluation.
    Settings are compared by the mean over their seeds, and only the best are resumed. A paused run
    is an ordinary workdir with a checkpoint, so a resumed one ends as if it had never been paused.
    The comparison depends on the runs alone, not on machines.
    """

    fraction: float  # share of a run's steps, below 1
    keep: int | None = None  # number of settings; None: half of them, rounded up

    def check(self, grid: Grid) -> None:
        """Raise ValueError for a sweep whose settings cannot be compared before the end."""
        num_settings = len(group_by_setting(grid))
        num_kept = self.count_kept(grid)
        if num_kept >= num_settings:
            raise ValueError(
                f"--keep={num_kept}: must be below {num_settings}, the number of settings."
            )
        for run in grid.runs:
            if isinstance(run.config, FinetuneConfig) and run.config.search.learning_rates:
                raise ValueError(
                    "--stop_after= compares runs with one learning rate. Remove "
                    "config.search.learning_rates, and use --grid=schedule.learning_rate=A,B."
                )

    def count_kept(self, grid: Grid) -> int:
        """Return the number of settings that are resumed."""
        return self.keep or math.ceil(len(group_by_setting(grid)) / 2)

    def train_to_comparison(
        self,
        grid: Grid,
        run: Run,
        workdir: pathlib.Path,
        perform: Perform,
        title: str,
    ) -> None:
        """Train a run up to the comparison, unless it has reached that; raises as `run_once`."""
        if share_first(self.read_value(grid, run, workdir)) is not None:
            return
        folder = get_run_folder(workdir, run)
        perform_to_pause = functools.partial(perform, pause_fraction=self.fraction)
        try:
            run_once(run.config, folder, perform_to_pause, title)
        except Paused as pause:
            say(str(pause))
            if hosts.is_first():
                write_pause(folder, {"fraction": self.fraction, "steps": pause.total})

    def read_value(
        self,
        grid: Grid,
        run: Run,
        workdir: pathlib.Path,
    ) -> float | None:
        """Return the metric at the comparison; None before, NaN for a run that diverged."""
        (metric,) = grid.study.measures
        folder = get_run_folder(workdir, run)
        summary = read_summary(folder)
        pause = read_pause(folder)
        if summary is not None and DIVERGED in summary:
            return math.nan
        if summary is None and (pause is None or pause["fraction"] < self.fraction):
            return None

        num_steps = (pause or summary or {}).get("steps", 0)
        last_step = self.fraction * num_steps
        values = []
        for line in read_metrics(folder):
            if metric in line and line["step"] <= last_step:
                values.append(line[metric])
        if not values:
            raise ValueError(
                f"--stop_after={self.fraction:g}: no {metric} up to there. Use a larger fraction."
            )
        return values[-1]

    def find_stopped(
        self,
        grid: Grid,
        workdir: pathlib.Path,
    ) -> dict[str, float]:
        """Return the runs that are not resumed, by name, with their values.

        The result is the same in every process.

        Of equal settings the first ones are kept. A setting with a run that diverged comes last.

        Raises:
          Unfinished: runs of other machines have not reached the comparison.
        """
        (metric,) = grid.study.measures
        local_values = {}
        for run in grid.runs:
            local_values[run.name] = self.read_value(grid, run, workdir)
        values = share_first(local_values)
        missing = [name for name, value in values.items() if value is None]
        if missing:
            raise Unfinished(
                f"The runs of this machine are trained to {self.fraction:.0%}. "
                f"Runs to compare with are missing in {workdir}: {few(missing)}. "
                "The same command goes on when other machines have done them."
            )

        def get_order(runs: Sequence[Run]) -> float:
            scores = [score({metric: values[run.name]}, run, metric) for run in runs]
            mean = statistics.fmean(scores)
            if not math.isfinite(mean):
                return math.inf
            return -mean

        settings = sorted(group_by_setting(grid).values(), key=get_order)
        stopped = {}
        for runs in settings[self.count_kept(grid) :]:
            for run in runs:
                stopped[run.name] = values[run.name]
        return stopped
