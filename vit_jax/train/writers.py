"""Write metrics: metrics.jsonl always, TensorBoard events and Weights & Biases if configured."""

import abc
import json
import os
import pathlib
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from vit_jax.config import RunConfig, to_dict
from vit_jax.storage.files import is_in_bucket, read_bounded, write_atomically
from vit_jax.train.profiling import Upload
from vit_jax.train.run_files import METRICS_FILE, metrics_up_to

if TYPE_CHECKING:
    from vit_jax.storage.buckets import BucketPath

FLUSH_SECONDS = 10.0
MAX_ID_BYTES = 256  # the limit of Weights & Biases for the id of a run


class Writer(abc.ABC):
    """Writes the metrics of steps."""

    @abc.abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def flush(self) -> None:  # noqa: B027
        """Store the metrics so that they outlive the process; called before each checkpoint."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write pending metrics and close the files."""


class JsonLines(Writer):
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


class ObjectLines(Writer):
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


class TensorBoard(Writer):
    """Event files in `tensorboard/`, written without TensorFlow."""

    def __init__(self, workdir: pathlib.Path, start_step: int):
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


class WeightsAndBiases(Writer):
    """A run of a Weights & Biases project; continued when the workdir is."""

    def __init__(self, workdir: pathlib.Path, config: RunConfig):
        try:
            import wandb
        except ImportError:
            from vit_jax.imports.extras import install_command

            raise ValueError(
                f"config.logging.wandb_project={config.logging.wandb_project!r} "
                f"needs the package wandb: {install_command('wandb')}, or set the field to None."
            ) from None
        id_file = workdir / "wandb-run-id"  # a resumed run resumes there, too
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.logging.wandb_project,
            id=read_bounded(id_file, MAX_ID_BYTES).decode(),
            name=workdir.name,
            dir=str(Upload(workdir).local),
            config=to_dict(config),
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Writers(Writer):
    """All writers of a run, as one.

    Args:
      workdir: the folder of the run.
      config: config of the run.
      start_step: later metrics, of a process that was killed, are removed.
      enabled: False in processes that do not write.
    """

    def __init__(self, workdir: pathlib.Path, config: RunConfig, start_step: int, *, enabled: bool):
        self._writers: list[Writer] = []
        if not enabled:
            return
        if config.logging.wandb_project is not None:  # first, because its package may be missing
            self._writers.append(WeightsAndBiases(workdir, config))

        if is_in_bucket(workdir):
            self._writers.append(ObjectLines(workdir, start_step))
        else:
            self._writers.append(JsonLines(workdir, start_step))

        if config.logging.tensorboard:
            self._writers.append(TensorBoard(workdir, start_step))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, metrics)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
