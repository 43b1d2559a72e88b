"""The files of a run that programs read, with their structure checked: config, start, metrics and summary.

They may come from somebody else, or from a disk that was full. `workdir` and `writers` write them.
"""

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config.evaluators import MULTILABEL_RESULTS
from vit_jax.files import MAX_JSON_BYTES, parse_json, printable, read_bounded, shortened, write_atomically

CONFIG_FILE, START_FILE = "config.json", "start.json"
METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"
PAUSE_FILE = "pause.json"  # of a run that a sweep has paused: the fraction that it has reached, and all its steps
ERROR_FILE = "error.json"  # of a run that an error ended, until it is started again
DIVERGENCE_FILE = "divergence.json"
MAX_METRICS_BYTES = 2**28  # about 800,000 lines; in memory they take ten times as much
MAX_LINE_BYTES = 2**20
MAX_SHOWN = 60  # letters of a name in an error
MAX_ERROR = 2000  # letters
MAX_STEP = 2**53  # whole numbers up to this are exact as floats
DIVERGED = "diverged"
"""In `summary.json` the reason why a run's loss was not finite; its results are null then."""

_RESULTS = ("accuracy", "_loss", *MULTILABEL_RESULTS)  # ends of names
_AMOUNTS = {
    *("steps", "best_step", "images", "test_images", "validation_images", "unreadable_images", "parameters"),
    *("exaflops", "wall_seconds", "images_per_second", "num_devices", "num_processes"),
}


def read_config(workdir: pathlib.Path) -> dict[str, Any]:
    """Return the content of `config.json`, not compared with the schema: it may be of an older version.

    Raises:
      ValueError: it is damaged, or not the config of a run.
    """
    values = _read_object(workdir / CONFIG_FILE)
    with _damage(workdir / CONFIG_FILE):
        _require(_is_count(values.get("global_batch", 1)), "global_batch must be a whole number from 1")
        _require(isinstance(values.get("data"), str | None), "data must be text or null")
        _require(isinstance(values.get("model", {}), dict), "model must be an object")
    return values


def read_start(file: pathlib.Path) -> dict[str, Any]:
    """Return what a run or a sweep started from, with the digest of the weights in "parameters_sha256".

    Raises:
      ValueError: the file is damaged, or lacks the digest.
    """
    values = _read_object(file)
    with _damage(file):
        _require(isinstance(values.get("parameters_sha256"), str), "parameters_sha256 must be text")
    return values


def write_error(workdir: pathlib.Path, error: BaseException) -> None:
    """Write the error that ends a run; nothing if the disk is full."""
    text = json.dumps({"error": shortened(f"{type(error).__name__}: {error}", MAX_ERROR), "seconds": time.time()})
    with contextlib.suppress(OSError):
        write_atomically(workdir / ERROR_FILE, text + "\n")


def read_error(workdir: pathlib.Path) -> str | None:
    """Return the error that ended a run, its type first; None if there is none.

    Raises:
      ValueError: the file is damaged.
    """
    if not (workdir / ERROR_FILE).exists():
        return None
    values = _read_object(workdir / ERROR_FILE)
    with _damage(workdir / ERROR_FILE):
        _require(isinstance(values.get("error"), str), "error must be text")
    return str(values["error"])


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, also while the run writes them; an empty list where there is no such file.

    Raises:
      ValueError: the file is damaged; the message names the line.
    """
    return [values for _, values in _read_lines(workdir)]


def metrics_up_to(workdir: pathlib.Path, step: int) -> str:
    """Return the text of the lines up to a step; arguments and errors as for `read_metrics`."""
    return "".join(f"{line}\n" for line, values in _read_lines(workdir) if values["step"] <= step)


def last_training_line(workdir: pathlib.Path) -> dict[str, float]:
    """Return the last metrics of a training step in `metrics.jsonl`; an empty dictionary if there are none."""
    return next((line for line in reversed(read_metrics(workdir)) if "train_loss" in line), {})


def write_summary(workdir: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` atomically; it exists once a run has ended."""
    write_atomically(workdir / SUMMARY_FILE, json.dumps(dict(summary), indent=2) + "\n")


def read_summary(workdir: pathlib.Path, *needs: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the content of `summary.json`; None where no run has ended.

    Args:
      workdir: of the run.
      needs: names of results; the summary must have one name of each tuple.

    Raises:
      ValueError: it is damaged, or lacks a result.
    """
    if not (workdir / SUMMARY_FILE).exists():
        return None
    values = _read_object(workdir / SUMMARY_FILE)
    with _damage(workdir / SUMMARY_FILE):
        _require(isinstance(values.get(DIVERGED, ""), str), f"{DIVERGED} must be text")
        for name, value in values.items():
            if name.endswith(_RESULTS):
                _require(value is None or _is_number(value), f"{_shown(name)} must be a number or null")
        _require_amounts(values)
        for names in needs:
            _require(any(name in values for name in names), f"it must have {' or '.join(names)}")
    return values


def write_pause(workdir: pathlib.Path, pause: Mapping[str, Any]) -> None:
    """Write `pause.json` atomically."""
    write_atomically(workdir / PAUSE_FILE, json.dumps(dict(pause)) + "\n")


def read_pause(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Return the "fraction" that a run was paused at, and its "steps"; None where it was not. Errors as above."""
    if not (workdir / PAUSE_FILE).exists():
        return None
    values = _read_object(workdir / PAUSE_FILE)
    with _damage(workdir / PAUSE_FILE):
        _require(_is_number(values.get("fraction")) and 0 < values["fraction"] < 1, "fraction must be between 0 and 1")
        _require(_is_count(values.get("steps")), "steps must be a whole number from 1")
    return values


def read_divergence(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Return the content of `divergence.json`: "step", "records", "metrics", "config"; None where no run diverged.

    Raises:
      ValueError: it is damaged.
    """
    if not (workdir / DIVERGENCE_FILE).exists():
        return None
    values = _read_object(workdir / DIVERGENCE_FILE)
    with _damage(workdir / DIVERGENCE_FILE):
        _require(_is_count(values.get("step")), "step must be a whole number from 1")
        metrics = values.get("metrics")
        _require(isinstance(metrics, dict) and all(map(_is_number, metrics.values())), "metrics must be numbers")
        _require(isinstance(values.get("config"), dict), "config must be an object")
    return values


def _read_lines(workdir: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the text and the values of each line, without a last one that is not complete."""
    path = workdir / METRICS_FILE
    if not path.exists():
        return
    with _damage(path):
        *lines, _ = read_bounded(path, MAX_METRICS_BYTES).split(b"\n")  # the last one is being written, or was cut off
    for number, line in enumerate(lines, 1):
        with _damage(path, f", line {number:,}"):
            _require(len(line) <= MAX_LINE_BYTES, f"it must not be longer than {MAX_LINE_BYTES:,} bytes")
            text = line.decode()
            values = parse_json(text)
            _require(isinstance(values, dict), "it must be an object")
            _require(_is_count(values.get("step")), "step must be a whole number from 1")
            for name, value in values.items():
                _require(_is_number(value), f"{_shown(name)} must be a number")
            _require_amounts(values)
        yield text, values


def _read_object(file: pathlib.Path) -> dict[str, Any]:
    with _damage(file):
        values = parse_json(read_bounded(file, MAX_JSON_BYTES))
        _require(isinstance(values, dict), "it must be an object")
    return values  # type: ignore[no-any-return]


@contextlib.contextmanager
def _damage(file: pathlib.Path, line: str = "") -> Iterator[None]:
    """Make one error of what is wrong with a file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).removesuffix(".")
        raise ValueError(f"{file}{line} is damaged: {reason}. Restore the file, or use another workdir.") from error


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _shown(name: str) -> str:
    return printable(shortened(name, MAX_SHOWN))


def _require_amounts(values: Mapping[str, Any]) -> None:
    for name in _AMOUNTS & values.keys():
        _require(_is_number(values[name]) and 0 <= values[name] < math.inf, f"{name} must be a number from 0")


def _is_number(value: Any) -> bool:
    """Return whether it is a number that a float can hold, also NaN or infinite."""
    return type(value) is float or (type(value) is int and abs(value) <= MAX_STEP)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_STEP
