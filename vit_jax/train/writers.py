"""Write metrics: metrics.jsonl always, and trackers of experiments if configured.

TensorBoard, Weights & Biases and the custom classes of `logging.writers` are trackers.
"""

import contextlib
import json
import os
import pathlib
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from vit_jax.config import RunConfig, to_dict
from vit_jax.imports.references import explain_call, resolve
from vit_jax.storage.files import JsonObject, is_in_bucket, read_bounded, write_atomically
from vit_jax.train.profiling import Upload
from vit_jax.train.run_files import METRICS_FILE, metrics_up_to

if TYPE_CHECKING:
    from vit_jax.storage.buckets import BucketPath

FLUSH_SECONDS = 10.0
MAX_ID_BYTES = 256  # the limit of Weights & Biases for the id of a run


class Tracker(Protocol):
    """Receives the config and the metrics of a run, in its first process.

    A class of `logging.writers` has these methods and takes no arguments. A further method
    `flush()`, if it has one, is called before each checkpoint.
    """

    def start(self, workdir: pathlib.Path, config: JsonObject, start_step: int) -> None:
        """Open a run, or continue the run of an earlier process.

        Args:
          workdir: the folder of the run.
          config: all values of the config, as JSON values in sections.
          start_step: steps done; later metrics of an earlier process are written again.
        """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def close(self) -> None:
        """Write pending metrics and end the run."""


class Writer(Protocol):
    """Receives the metrics of a run; its `flush()`, if it has one, is called as of a `Tracker`."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def close(self) -> None:
        """Write pending metrics and end the run."""


class JsonLines:
    """One JSON object a line. Removes lines of a killed process, of steps after `start_step`."""

    def __init__(self, workdir: pathlib.Path, start_step: int):
        path = workdir / METRICS_FILE
        write_atomically(path, metrics_up_to(workdir, start_step))
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # only now a bucket that is mounted as a folder has the line

    def close(self) -> None:
        self._file.close()


class ObjectLines:
    """JSON lines in a bucket: an object that is written as a whole.

    It is written at most every `FLUSH_SECONDS`, and before checkpoints. Raises OSError if somebody
    else has written it, or the bucket does not answer.
    """

    def __init__(self, workdir: pathlib.Path, start_step: int):
        self._path = cast("BucketPath", workdir / METRICS_FILE)
        self._text = metrics_up_to(workdir, start_step)
        self._generation = self._path.write_bytes(self._text.encode())
        self._is_due_at = 0.0
        self._is_written = True

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._text += json.dumps({"step": step, **metrics}) + "\n"
        self._is_written = False
        if time.monotonic() >= self._is_due_at:
            self.flush()

    def flush(self) -> None:
        if not self._is_written:
            self._generation = self._path.write_bytes(self._text.encode(), self._generation)
            self._is_due_at = time.monotonic() + FLUSH_SECONDS
            self._is_written = True

    def close(self) -> None:
        self.flush()


class TensorBoard:
    """Event files in `tensorboard/`, written without TensorFlow."""

    def start(self, workdir: pathlib.Path, config: JsonObject, start_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._folder = Upload(workdir / "tensorboard")
        self._writer = SummaryWriter(str(self._folder.local), purge_step=start_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._folder.is_needed:
            self._writer.flush()
            self._folder.send()

    def close(self) -> None:
        self._writer.close()
        self._folder.send()


class WeightsAndBiases:
    """A run of a Weights & Biases project; continued when the workdir is."""

    def start(self, workdir: pathlib.Path, config: JsonObject, start_step: int) -> None:
        project = config["logging"]["wandb_project"]
        try:
            import wandb
        except ImportError:
            from vit_jax.imports.extras import install_command

            raise ValueError(
                f"config.logging.wandb_project={project!r} "
                f"needs the package wandb: {install_command('wandb')}, or set the field to None."
            ) from None
        id_file = workdir / "wandb-run-id"  # a resumed run resumes there, too
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=project,
            id=read_bounded(id_file, MAX_ID_BYTES).decode(),
            name=workdir.name,
            dir=str(Upload(workdir).local),
            config=config,
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All writers of a run, as one.

    Args:
      workdir: the folder of the run.
      config: config of the run.
      start_step: later metrics, of a process that was killed, are removed.
      enabled: False in processes that do not write.
    """

    def __init__(self, workdir: pathlib.Path, config: RunConfig, start_step: int, *, enabled: bool):
        self._writers: list[Writer] = []
        self._stack = contextlib.ExitStack()
        if not enabled:
            return
        values = to_dict(config)
        with contextlib.ExitStack() as stack:
            # Trackers come first, because a package may be missing, before a file is made.
            for tracker in _build_trackers(config):
                tracker.start(workdir, values, start_step)
                self._add(tracker, stack)
            lines = ObjectLines if is_in_bucket(workdir) else JsonLines
            self._add(lines(workdir, start_step), stack)
            if config.logging.tensorboard:
                events = TensorBoard()
                events.start(workdir, values, start_step)
                self._add(events, stack)
            self._stack = stack.pop_all()

    def _add(self, writer: Writer, stack: contextlib.ExitStack) -> None:
        """Add an open writer, which the stack closes."""
        self._writers.append(writer)
        stack.callback(writer.close)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, metrics)

    def flush(self) -> None:
        for writer in self._writers:
            if hasattr(writer, "flush"):
                writer.flush()

    def close(self) -> None:
        """Close all writers, also if one of them fails."""
        self._stack.close()


def _build_trackers(config: RunConfig) -> list[Tracker]:
    """Return the trackers of other packages, not started.

    Raises:
      ValueError: a reference names no class of trackers.
    """
    trackers = list[Tracker]()
    if config.logging.wandb_project is not None:
        trackers.append(WeightsAndBiases())
    for reference in config.logging.writers:
        build = resolve(reference, "config.logging.writers")
        with explain_call(f"config.logging.writers={reference!r}", "no arguments"):
            trackers.append(build())
    return trackers
