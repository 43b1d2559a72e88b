"""The state of runs from the files in their workdirs, while they train and afterwards."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping, Sequence

from vit_jax.checkpoint import CheckpointReader
from vit_jax.config.durations import parse_duration
from vit_jax.config.lengths import Clock
from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.storage.files import JsonObject, expand_path
from vit_jax.text.printable import printable
from vit_jax.text.tables import align_table
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

RECENT_LINES = 10
"""Number of lines of training metrics that estimate the remaining time."""
HEAD = (
    "run",
    "state",
    "step",
    "of",
    "loss",
    "accuracy",
    "images/s",
    "goodput",
    "left",
    "checkpoint",
    "written",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one run. A value is None if it is unknown.

    Attributes:
      run: the workdir.
      state: running, ended, diverged, paused (by a sweep) or stopped.
      step: the newest step with metrics.
      total_steps: length of the run.
      train_loss: loss of the newest logged step.
      test_accuracy: accuracy on the test split; mean average precision of multi-label data.
      images_per_second: speed of the newest logged step.
      goodput: share of the time so far in which the run took steps.
      seconds_left: time to the end; only for a running run.
      checkpoint_step: step of the newest checkpoint.
      seconds_since_written: time since metrics or the summary were written.
      error: message of the error that ended the run.
    """

    run: str
    state: str
    step: int | None
    total_steps: int | None
    train_loss: float | None
    test_accuracy: float | None
    images_per_second: float | None
    goodput: float | None
    seconds_left: float | None
    checkpoint_step: int | None
    seconds_since_written: float | None
    error: str | None

    def cells(self) -> list[str]:
        """Return the cells below `HEAD`."""
        return [
            self.run,
            self.state,
            _format(self.step, ","),
            _format(self.total_steps, ","),
            _format(self.train_loss, ".4f"),
            _format(self.test_accuracy, ".2%"),
            _format(self.images_per_second, ",.0f"),
            _format(self.goodput, ".0%"),
            _format_duration(self.seconds_left),
            _format(self.checkpoint_step, ","),
            _format_duration(self.seconds_since_written, " ago"),
        ]


def _format(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)


def _format_duration(seconds: float | None, suffix: str = "") -> str:
    if seconds is None:
        return ""
    return f"{duration_text(seconds)}{suffix}"


def find_runs(folders: Sequence[str]) -> list[pathlib.Path]:
    """Return workdirs: the folders themselves, or the workdirs inside folders of runs.

    Raises:
      ValueError: a folder holds no run.
    """
    workdirs: dict[pathlib.Path, None] = {}
    for name in folders:
        found = _find_workdirs(expand_path(name))
        if not found:
            raise ValueError(
                f"{name}: must be a workdir with {CONFIG_FILE}, or a folder of workdirs."
            )
        workdirs.update(dict.fromkeys(found))
    return list(workdirs)


def _find_workdirs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return a workdir itself, or the workdirs below a folder; weights are no workdir."""
    if (folder / CONFIG_FILE).exists():
        candidates = [folder]
    else:
        candidates = sorted(file.parent for file in folder.rglob(CONFIG_FILE))
    return [candidate for candidate in candidates if "total" in read_config(candidate)]


def read_status(workdir: pathlib.Path, now: float) -> Status:
    """Read the state of a run.

    Args:
      workdir: the folder of the run, local or on a file system that other machines share.
      now: seconds since 1970.

    Raises:
      ValueError: a file of the run is damaged.
    """
    config = read_config(workdir)
    lines = read_metrics(workdir)
    newest: dict[str, float] = {}
    for line in lines:
        newest.update(line)

    reader = CheckpointReader(workdir)
    saved_steps = reader.all_steps()
    checkpoint_step = None
    num_examples = None
    if saved_steps:
        checkpoint_step = saved_steps[-1]
        num_examples = reader.metadata(checkpoint_step).get("num_examples")

    summary = read_summary(workdir)
    state, error = _read_state(workdir, summary, now)
    total = total_steps(config, num_examples)
    if summary is not None:
        total = summary.get("steps", total)

    return Status(
        run=str(workdir),
        state=state,
        step=int(newest["step"]) if lines else None,
        total_steps=total,
        train_loss=newest.get("train_loss"),
        test_accuracy=_find_accuracy(newest),
        images_per_second=newest.get("images_per_second"),
        goodput=newest.get("goodput"),
        seconds_left=seconds_left(lines, total) if _is_running(workdir, now) else None,
        checkpoint_step=checkpoint_step,
        seconds_since_written=_measure_silence(workdir, now),
        error=error,
    )


def _read_state(
    workdir: pathlib.Path,
    summary: JsonObject | None,
    now: float,
) -> tuple[str, str | None]:
    """Return the state of a run in one word, and its error if it has one."""
    if summary is not None:
        if DIVERGED in summary:
            return "diverged", summary[DIVERGED]
        return "ended", None

    divergence = read_divergence(workdir)
    if divergence is not None:
        step = divergence["step"]
        return "diverged", f"step {step:,} is not finite: vit-jax replay {workdir}"

    error = read_error(workdir)
    if _is_running(workdir, now):
        return "running", error
    if (workdir / PAUSE_FILE).exists():
        return "paused", error
    return "stopped", error


def _is_running(workdir: pathlib.Path, now: float) -> bool:
    return (workdir / LOCK_FILE).exists() and not is_abandoned(workdir, now, EXPIRY_SECONDS)


def _find_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the accuracy on the test split, or the first metric of multi-label data."""
    accuracy = metrics.get("test_accuracy")
    if accuracy is not None:
        return accuracy
    return metrics.get(f"test_{MULTILABEL_RESULTS[0]}")


def _measure_silence(workdir: pathlib.Path, now: float) -> float | None:
    """Return the seconds since the run has written metrics or its summary; None if it has not."""
    times = []
    for name in (METRICS_FILE, SUMMARY_FILE):
        if (workdir / name).exists():
            times.append((workdir / name).stat().st_mtime)
    if not times:
        return None
    return max(0.0, now - max(times))


def total_steps(config: JsonObject, num_examples: int | None) -> int | None:
    """Return the length of a run in steps; None with phases or an unknown number of images."""
    batch = config.get("global_batch")
    total = config.get("total")
    if not batch or not isinstance(total, str) or config.get("phases"):
        return None
    _, unit = parse_duration(total)
    if unit == "epochs" and not num_examples:
        return None
    return Clock(batch, num_examples or 0).to_steps(total)


def seconds_left(lines: Sequence[Mapping[str, float]], total: int | None) -> float | None:
    """Return the time to the last step at the speed of recent steps, with evaluations and saves."""
    timed = [line for line in lines if "wall_seconds" in line]
    recent = timed[-RECENT_LINES:]
    if total is None or len(recent) < 2:
        return None
    first = recent[0]
    last = recent[-1]
    seconds = last["wall_seconds"] - first["wall_seconds"]
    seconds_per_step = seconds / max(last["step"] - first["step"], 1)
    left = seconds_per_step * (total - last["step"])
    if not math.isfinite(left) or left < 0:
        return None
    return left


def to_table(statuses: Sequence[Status]) -> str:
    """Return a table with a line for each run, and the errors below it."""
    rows = [status.cells() for status in statuses]
    table = align_table(HEAD, rows, ("run", "state"))
    errors = ""
    for status in statuses:
        if status.error:
            errors += printable(f"{status.run}: {status.error}") + "\n"
    if errors:
        return f"{table}\n{errors}"
    return table


def read_all(folders: Sequence[str]) -> list[Status]:
    """Read the state of all runs in folders; errors as `find_runs` and `read_status`."""
    return [read_status(workdir, time.time()) for workdir in find_runs(folders)]
