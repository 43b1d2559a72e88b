"""Check and perform the runs of a study or a sweep, each once, by `vit_jax.train.series`.

They are in the sub-folder `runs/` of the workdir; several machines may share them.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from vit_jax import hosts
from vit_jax.config.check import validate
from vit_jax.tools.sweeps.grid import Grid, Run
from vit_jax.tools.sweeps.halving import Halving
from vit_jax.tools.sweeps.results import get_run_folder, require_measures
from vit_jax.tools.sweeps.results_table import write_results
from vit_jax.train.series import Perform, run_once
from vit_jax.train.state_builder import architecture_of


@contextlib.contextmanager
def name_run_in_errors(run: Run) -> Iterator[None]:
    """Begin the errors of a run with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{run.name}: {error}") from error


def check(grid: Grid, halving: Halving | None = None) -> None:
    """Check every run, before the first one starts.

    Raises:
      ValueError: an invalid config, or a measure that no run will have.
    """
    for run in grid.runs:
        with name_run_in_errors(run):
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
    """Perform this machine's unfinished runs; after each, write the results of all.

    Every process of the machine's run calls this, after `hosts.start`.

    Args:
      grid: all runs.
      workdir: folder of the study or sweep.
      share: the runs of this machine.
      perform: performs one run; with `halving` it has the keyword argument `pause_fraction`.
      halving: stops bad runs.

    Returns:
      The values of stopped runs, by name.

    Raises:
      ValueError: errors of `check` and of `perform`, or a workdir of another config.
      Unfinished: other machines have not reached the comparison of runs.
      Interrupted: SIGTERM or Ctrl-C; the run it arrived in is saved.
    """
    check(grid, halving)
    stopped: dict[str, float] = {}
    if halving is not None:
        _train_to_comparison(grid, workdir, grid.runs[share], perform, halving)
        stopped = halving.find_stopped(grid, workdir)

    continued = [run for run in grid.runs if run.name not in stopped]
    # The largest training sets come first: the data may have fewer images than a run asks for
    runs = sorted(continued[share], key=_count_examples, reverse=True)
    for number, run in enumerate(runs, 1):
        title = f"\nrun {number} of {len(runs)}: {run.name}"
        with name_run_in_errors(run):
            run_once(run.config, get_run_folder(workdir, run), perform, title)
        if hosts.is_first():
            write_results(grid, workdir, stopped=stopped)
    return stopped


def _train_to_comparison(
    grid: Grid,
    workdir: pathlib.Path,
    runs: Sequence[Run],
    perform: Perform,
    halving: Halving,
) -> None:
    """Train this machine's runs up to the comparison of settings."""
    for number, run in enumerate(runs, 1):
        title = f"\nrun {number} of {len(runs)}, to {halving.fraction:.0%}: {run.name}"
        with name_run_in_errors(run):
            halving.train_to_comparison(grid, run, workdir, perform, title)


def _count_examples(run: Run) -> int:
    """Return the number of training images that a run asks for; 0 for all images."""
    return run.config.input.train_examples or 0
