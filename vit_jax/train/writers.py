"""Where metrics go: metrics.jsonl always, TensorBoard events and Weights & Biases if configured."""

import json
import math
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from vit_jax.config import to_dict
from vit_jax.files import write_atomically

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


class JsonLines:
    """One JSON object a line. Lines of steps after `start_step`, left by a process that was killed, go."""

    def __init__(self, workdir: pathlib.Path, start_step: int):
        path = workdir / METRICS_FILE
        kept = _lines_up_to(path, start_step) if path.exists() else []
        write_atomically(path, "".join(kept))
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a bucket that is mounted as a folder has the line only now

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in `tensorboard/`, written without TensorFlow."""

    def __init__(self, workdir: pathlib.Path, start_step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project; continued when the workdir is."""

    def __init__(self, workdir: pathlib.Path, config: Any):
        try:
            import wandb
        except ImportError:
            raise ValueError(
                f"config.logging.wandb_project={config.logging.wandb_project!r} needs the package wandb: "
                f"pip install 'vit_jax[wandb]', or set the field to None."
            ) from None
        id_file = workdir / "wandb-run-id"  # kept, so that a continued run continues there too
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.logging.wandb_project,
            id=id_file.read_text(),
            name=workdir.name,
            dir=str(workdir),
            config=to_dict(config),
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All writers of a run, as one; none in processes that do not write."""

    def __init__(self, workdir: pathlib.Path, config: Any, start_step: int, *, enabled: bool):
        self._writers: list[JsonLines | TensorBoard | WeightsAndBiases] = []
        if not enabled:
            return
        if config.logging.wandb_project is not None:  # first, for it is the one that may be missing
            self._writers.append(WeightsAndBiases(workdir, config))
        self._writers.append(JsonLines(workdir, start_step))
        if config.logging.tensorboard:
            self._writers.append(TensorBoard(workdir, start_step))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics of a step to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """All metrics are on disk, or sent, when it returns."""
        for writer in self._writers:
            writer.close()


def write_summary(workdir: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json` atomically; it exists once a run has ended."""
    write_atomically(workdir / SUMMARY_FILE, json.dumps(dict(summary), indent=2) + "\n")


def read_summary(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The content of `summary.json`; None where no run has ended."""
    path = workdir / SUMMARY_FILE
    return json.loads(path.read_text()) if path.exists() else None


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, also while the run writes them; none where there is no such file."""
    path = workdir / METRICS_FILE
    return [json.loads(line) for line in _lines_up_to(path)] if path.exists() else []


def last_training_line(workdir: pathlib.Path) -> dict[str, float]:
    """The last metrics of a training step that `metrics.jsonl` holds; empty if there are none."""
    return next((line for line in reversed(read_metrics(workdir)) if "train_loss" in line), {})


def _lines_up_to(path: pathlib.Path, step: float = math.inf) -> list[str]:
    def is_kept(line: str) -> bool:
        try:
            return line.endswith("\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):  # cut off when the process was killed
            return False

    return [line for line in path.read_text().splitlines(keepends=True) if is_kept(line)]
