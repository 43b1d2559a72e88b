"""Runs of one command, each done once: what has ended is not repeated, and what diverged is not tried again."""

import pathlib
from collections.abc import Callable
from typing import Any

from vit_jax import hosts
from vit_jax.train import workdir as workdirs
from vit_jax.train.run_files import DIVERGED, read_summary, write_summary
from vit_jax.train.search import say


def run_once(config: Any, folder: pathlib.Path, perform: Callable[[Any, str], object], name: str) -> None:
    """Performs a run in its workdir, or resumes it, unless it has ended there.

    Every process of the machine's run calls this, after `hosts.start`.

    Raises:
      ValueError: the workdir is of a run of another config; otherwise as `perform`.
    """
    if hosts.gather("" if read_summary(folder) is None else "ended")[0]:
        workdirs.require_same_config(folder, config)
        return
    say(f"\n{name}")
    try:
        perform(config, str(folder))
    except FloatingPointError as error:
        say(f"{name}: {error}")
        if hosts.is_first():
            write_summary(folder, {"test_accuracy": None, "test_loss": None, DIVERGED: str(error)})
