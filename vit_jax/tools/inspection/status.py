"""The state of runs from the files in their workdirs, while they train and afterwards."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping, Sequence

from vit_jax.checkpoint import CheckpointReader
from vit_jax.config.check import Clock
from vit_jax.config.durations import parse_duration
from vit_jax.config.evaluators import MULTILABEL_RESULTS
from vit_jax.storage.files import JsonObject, expanded
from vit_jax.text.printable import printable
from vit_jax.text.tables import aligned
from vit_jax.train.lifecycle.lock import EXPIRY_SECONDS, is_abandoned
from vit_jax.train.lifecycle.lock import FILE as LOCK_FILE
from vit_jax.train.progress import duration_text
from vit_jax.train.run_files import (
    CONFIG_FILE,
    DIVERGED,
    METRICS_FILE,
    PAUSE_FILE,
    SUMMARY_FILE,
    read_config,
    read_divergence,
    read_error,
    read_metrics,
    read_summary,
)

RECENT_LINES = 10  # of training metrics, whose speed is that of the time left
HEAD = (
    "run",
    "state",
    "step",
    "of",
    "loss",
    "accuracy",
    "images/s",
    "left",
    "checkpoint",
    "written",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one run. None: not known, or not yet."""

    run: str
    state: str  # running, ended, diverged, paused (by a sweep), stopped
    step: int | None
    total_steps: int | None
    train_loss: float | None
    test_accuracy: float | None  # of multi-label data the mean average precision
    images_per_second: float | None
    seconds_left: float | None
    checkpoint_step: int | None
    seconds_since_written: float | None
    error: str | None

    def cells(self) -> list[str]:
        """Return the cells below `HEAD`."""

        def shown(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        left, ago = (
            "" if s is None else duration_text(s)
            for s in (self.seconds_left, self.seconds_since_written)
        )
        numbers = (
            shown(self.step, ","),
            shown(self.total_steps, ","),
            shown(self.train_loss, ".4f"),
        )
        results = (shown(self.test_accuracy, ".2%"), shown(self.images_per_second, ",.0f"))
        return [
            self.run,
            self.state,
            *numbers,
            *results,
            left,
            shown(self.checkpoint_step, ","),
            ago and f"{ago} ago",
        ]


def find_runs(folders: Sequence[str]) -> list[pathlib.Path]:
    """Return workdirs: the folders themselves, or those inside of folders of runs.

    Raises:
      ValueError: there is no run in one of them.
    """
    workdirs: list[pathlib.Path] = []
    for name in folders:
        folder = expanded(name)
        files = (
            [folder / CONFIG_FILE]
            if (folder / CONFIG_FILE).exists()
            else sorted(folder.rglob(CONFIG_FILE))
        )
        runs = [
            file.parent for file in files if "total" in read_config(file.parent)
        ]  # weights have this file, too
        if not runs:
            raise ValueError(
                f"{name}: must be a workdir with {CONFIG_FILE}, or a folder of workdirs."
            )
        workdirs += runs
    return list(dict.fromkeys(workdirs))


def read_status(workdir: pathlib.Path, now: float) -> Status:
    """Read the state of a run.

    Args:
      workdir: of the run, here or on a file system that other machines share.
      now: seconds since 1970.

    Raises:
      ValueError: a file of the run is damaged.
    """
    config = read_config(workdir)
    lines = read_metrics(workdir)
    summary = read_summary(workdir)
    last = {name: value for line in lines for name, value in line.items()}
    reader = CheckpointReader(workdir)
    steps = reader.all_steps()
    examples = reader.metadata(steps[-1]).get("num_examples") if steps else None
    step = int(last["step"]) if lines else None
    total = total_steps(config, examples)
    files = [file for name in (METRICS_FILE, SUMMARY_FILE) if (file := workdir / name).exists()]
    is_running = (workdir / LOCK_FILE).exists() and not is_abandoned(workdir, now, EXPIRY_SECONDS)
    error = read_error(workdir)
    divergence = read_divergence(workdir)
    state = "running" if is_running else "paused" if (workdir / PAUSE_FILE).exists() else "stopped"
    if summary is not None:
        state, error = ("diverged", summary[DIVERGED]) if DIVERGED in summary else ("ended", None)
        total = summary.get("steps", total)
    elif divergence is not None:
        state = "diverged"
        error = f"step {divergence['step']:,} is not finite: vit-jax replay {workdir}"
    left = seconds_left(lines, total) if is_running else None
    accuracies = (last.get(f"test_{name}") for name in ("accuracy", MULTILABEL_RESULTS[0]))
    return Status(
        run=str(workdir),
        state=state,
        step=step,
        total_steps=total,
        train_loss=last.get("train_loss"),
        test_accuracy=next((value for value in accuracies if value is not None), None),
        images_per_second=last.get("images_per_second"),
        seconds_left=left,
        checkpoint_step=steps[-1] if steps else None,
        seconds_since_written=max(0.0, now - max(file.stat().st_mtime for file in files))
        if files
        else None,
        error=error,
    )


def total_steps(config: JsonObject, num_examples: int | None) -> int | None:
    """Return the length of a run in steps; None if it has phases, or counts epochs of an unknown number of images."""
    batch = config.get("global_batch")
    total = config.get("total")
    if not batch or not isinstance(total, str) or config.get("phases"):
        return None
    if parse_duration(total)[1] == "epochs" and not num_examples:
        return None
    return Clock(batch, num_examples or 0).to_steps(total)


def seconds_left(lines: Sequence[Mapping[str, float]], total: int | None) -> float | None:
    """Return the time to the last step at the speed of the recent lines, evaluations and saves included."""
    timed = [(line["step"], line["wall_seconds"]) for line in lines if "wall_seconds" in line][
        -RECENT_LINES:
    ]
    if total is None or len(timed) < 2:
        return None
    (first, start), (last, end) = timed[0], timed[-1]
    seconds = (end - start) / max(last - first, 1) * (total - last)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def to_table(statuses: Sequence[Status]) -> str:
    """Return a table with a line for each run, and the errors below it."""
    errors = [
        printable(f"{status.run}: {status.error}") + "\n" for status in statuses if status.error
    ]
    table = aligned(HEAD, [status.cells() for status in statuses], ("run", "state"))
    return "".join([table, "\n", *errors] if errors else [table])


def read_all(folders: Sequence[str]) -> list[Status]:
    """Read the state of all runs in folders; errors as those of `find_runs` and `read_status`."""
    return [read_status(workdir, time.time()) for workdir in find_runs(folders)]
