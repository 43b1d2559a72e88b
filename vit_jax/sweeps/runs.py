"""The runs of a study, in order, none of them twice; several machines may share them.

All state is in the runs' own folders, `runs/` of the study's: a run that has ended has a `summary.json`, one that was
interrupted resumes.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from vit_jax import hosts
from vit_jax.config.validate import validate
from vit_jax.sweeps.grid import Grid, Run
from vit_jax.sweeps.results import folder_of, require_measures, write_results
from vit_jax.train import series
from vit_jax.train.assemble import architecture_of
from vit_jax.train.pretrain import learn
from vit_jax.train.series import Perform, run_once


def run_study(grid: Grid, workdir: pathlib.Path, own: Sequence[Run], perform: Perform = learn) -> None:
    """Does what is left of this machine's runs, `own`; after each the results of all are written anew.

    Every process of the machine's run calls this, after `hosts.start`.

    Raises:
      ValueError: a config that cannot be, or a measure that no run would have, before the first run; a workdir of
        another config; otherwise as `perform`.
      Interrupted: SIGTERM or Ctrl-C; the run it arrived in is saved.
    """
    for run in grid.runs:
        with named(run):
            validate(run.config)
            architecture_of(run.config, num_classes=1)
    require_measures(grid)
    largest_first = sorted(own, key=lambda run: -(run.config.input.train_examples or 0))  # which the data may not have
    for number, run in enumerate(largest_first, 1):
        with named(run):
            run_once(run.config, folder_of(workdir, run), perform, f"\nrun {number} of {len(own)}: {run.name}")
        if hosts.is_first():
            write_results(grid, workdir)


def state_of(run: Run, workdir: pathlib.Path) -> str:
    """Return the state of a run: "ended", "diverged", "interrupted" or "new"."""
    return series.state_of(folder_of(workdir, run))


@contextlib.contextmanager
def named(run: Run) -> Iterator[None]:
    """Errors of a run begin with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{run.name}: {error}") from error
