"""The files of a run that programs read, with their structure checked.

They may come from somebody else, or from a disk that was full: readers raise ValueError for a
damaged file, and return None, or no lines, for a missing one. `workdir` and `writers` write them.
"""

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.config.recipes import CONFIG_FILE
from vit_jax.config.specification import REQUESTED
from vit_jax.storage.files import (
    MAX_JSON_BYTES,
    JsonObject,
    parse_json,
    read_bounded,
    write_atomically,
)
from vit_jax.text.printable import printable, shorten

START_FILE = "start.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
PAUSE_FILE = "pause.json"  # the fraction reached by a run that a sweep has paused, and all steps
ERROR_FILE = "error.json"  # the error that ended a run, until the run is restarted
DIVERGENCE_FILE = "divergence.json"
MAX_METRICS_BYTES = 2**28  # about 800,000 lines; in memory they take ten times as much
MAX_LINE_BYTES = 2**20
MAX_SHOWN = 60  # letters of a name in an error
MAX_ERROR = 2000  # letters
MAX_STEP = 2**53  # whole numbers up to this are exact as floats
DIVERGED = "diverged"
"""In `summary.json` the reason why a run's loss was not finite; its results are null then."""

_RESULTS = ("accuracy", "_loss", *MULTILABEL_RESULTS)  # ends of names
_AMOUNTS = (
    "best_step",
    "images",
    "test_images",
    "validation_images",
    "unreadable_images",
    "parameters",
    "exaflops",
    "wall_seconds",
    "images_per_second",
    "goodput",
    "num_devices",
    "num_processes",
)
_COUNT = "a whole number from 1"
_KIND_OF_AMOUNTS = dict.fromkeys(_AMOUNTS, "a number from 0")
_KINDS_BY_FILE: Mapping[str, Mapping[str, str]] = {
    CONFIG_FILE: {
        "global_batch": _COUNT,
        "data": "text or null",
        "model": "an object",
        REQUESTED: "an object",
    },
    START_FILE: {"parameters_sha256": "text"},
    METRICS_FILE: {"step": _COUNT, **_KIND_OF_AMOUNTS},
    SUMMARY_FILE: {DIVERGED: "text", **_KIND_OF_AMOUNTS},
    PAUSE_FILE: {"fraction": "between 0 and 1", "steps": _COUNT},
    ERROR_FILE: {"error": "text"},
    DIVERGENCE_FILE: {"step": _COUNT, "metrics": "an object of numbers", "config": "an object"},
}
"""Kinds of values by name.

Other values of metrics are numbers, and other results of a summary are numbers or null."""


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float can hold, also NaN or infinite."""
    return type(value) is float or (type(value) is int and abs(value) <= MAX_STEP)


def _is_object_of_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "text or null": lambda value: isinstance(value, str | None),
    "an object": lambda value: isinstance(value, dict),
    "an object of numbers": _is_object_of_numbers,
    "a number": _is_number,
    "a number or null": lambda value: value is None or _is_number(value),
    "a number from 0": lambda value: _is_number(value) and 0 <= value < math.inf,
    "between 0 and 1": lambda value: _is_number(value) and 0 < value < 1,
    _COUNT: lambda value: type(value) is int and 0 < value <= MAX_STEP,
}


def read_config(workdir: pathlib.Path) -> JsonObject:
    """Return the config in `config.json` with which a run computes, maybe of an older version."""
    values = _read_object(workdir, CONFIG_FILE)
    values.pop(REQUESTED, None)
    return values


def read_start(file: pathlib.Path) -> JsonObject:
    """Return the recorded start of a run or a sweep; "parameters_sha256" identifies the weights."""
    with _name_damage(file):
        return _parse_object(
            read_bounded(file, MAX_JSON_BYTES),
            START_FILE,
            ("parameters_sha256",),
        )


def write_error(workdir: pathlib.Path, error: BaseException) -> None:
    """Write the error that ends a run; nothing if the disk is full."""
    text = shorten(f"{type(error).__name__}: {error}", MAX_ERROR)
    content = json.dumps({"error": text, "seconds": time.time()})
    with contextlib.suppress(OSError):
        write_atomically(workdir / ERROR_FILE, content + "\n")


def read_error(workdir: pathlib.Path) -> str | None:
    """Return the error that ended a run, its type first."""
    values = _read_optional(workdir, ERROR_FILE, ("error",))
    if values is None:
        return None
    return values["error"]


def read_metrics(workdir: pathlib.Path) -> list[dict[str, float]]:
    """Return the lines of `metrics.jsonl`, also while the run writes them."""
    return [values for _, values in _read_lines(workdir)]


def metrics_up_to(workdir: pathlib.Path, step: int) -> str:
    """Return the text of the lines up to a step."""
    lines = []
    for line, values in _read_lines(workdir):
        if values["step"] <= step:
            lines.append(f"{line}\n")
    return "".join(lines)


def last_training_line(workdir: pathlib.Path) -> dict[str, float]:
    """Return the last metrics of a training step in `metrics.jsonl`; empty without any."""
    for metrics in reversed(read_metrics(workdir)):
        if "train_loss" in metrics:
            return metrics
    return {}


def write_summary(workdir: pathlib.Path, summary: Mapping[str, object]) -> None:
    """Write `summary.json` atomically; it exists once a run has ended."""
    write_atomically(workdir / SUMMARY_FILE, json.dumps(dict(summary), indent=2) + "\n")


def read_summary(workdir: pathlib.Path, *needs: tuple[str, ...]) -> JsonObject | None:
    """Return the content of `summary.json`, which must have one name of each tuple of `needs`."""
    return _read_optional(workdir, SUMMARY_FILE, *needs)


def write_pause(workdir: pathlib.Path, pause: Mapping[str, float]) -> None:
    """Write `pause.json` atomically."""
    write_atomically(workdir / PAUSE_FILE, json.dumps(dict(pause)) + "\n")


def read_pause(workdir: pathlib.Path) -> JsonObject | None:
    """Return the "fraction" that a run was paused at, and its "steps"."""
    return _read_optional(workdir, PAUSE_FILE, ("fraction",), ("steps",))


def read_divergence(workdir: pathlib.Path) -> JsonObject | None:
    """Return the content of `divergence.json`: "step", "records", "metrics", "config"."""
    return _read_optional(
        workdir,
        DIVERGENCE_FILE,
        ("step",),
        ("metrics",),
        ("config",),
    )


def remove_divergence(workdir: pathlib.Path) -> None:
    """Remove `divergence.json`, if there is one."""
    (workdir / DIVERGENCE_FILE).unlink(missing_ok=True)


def _read_lines(workdir: pathlib.Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the text and the values of each line, without a last one that is not complete."""
    path = workdir / METRICS_FILE
    if not path.exists():
        return
    with _name_damage(path):
        content = read_bounded(path, MAX_METRICS_BYTES)
    *lines, _ = content.split(b"\n")  # the last one is being written, or was cut off

    for number, line in enumerate(lines, 1):
        with _name_damage(path, f", line {number:,}"):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"it must not be longer than {MAX_LINE_BYTES:,} bytes")
            text = line.decode()
            values = _parse_object(text, METRICS_FILE, ("step",))
        yield text, values


def _read_optional(workdir: pathlib.Path, name: str, *needs: tuple[str, ...]) -> JsonObject | None:
    """Return the object of a file; None if there is no file."""
    if not (workdir / name).exists():
        return None
    return _read_object(workdir, name, *needs)


def _read_object(workdir: pathlib.Path, name: str, *needs: tuple[str, ...]) -> JsonObject:
    """Return the object of a file; arguments as of `_parse_object`."""
    with _name_damage(workdir / name):
        return _parse_object(read_bounded(workdir / name, MAX_JSON_BYTES), name, *needs)


def _parse_object(text: str | bytes, file: str, *needs: tuple[str, ...]) -> JsonObject:
    """Return an object that has one name of each tuple, and values of the kinds of the file."""
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError("it must be an object")

    for name, value in values.items():
        kind = _get_kind(file, name)
        if kind and not _KINDS[kind](value):
            raise ValueError(f"{printable(shorten(name, MAX_SHOWN))} must be {kind}")

    for names in needs:
        if not values.keys() & {*names}:
            raise ValueError(f"it must have {' or '.join(names)}")
    return values


def _get_kind(file: str, name: str) -> str | None:
    """Return the kind of a value of a file; None if the file may have any."""
    kinds = _KINDS_BY_FILE[file]
    if name in kinds:
        return kinds[name]
    if file == METRICS_FILE:
        return "a number"
    if file == SUMMARY_FILE and name.endswith(_RESULTS):
        return "a number or null"
    return None


@contextlib.contextmanager
def _name_damage(file: pathlib.Path, line: str = "") -> Iterator[None]:
    """Open a context that turns errors of reading into one error that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).removesuffix(".")
        if isinstance(error, OSError):
            reason = str(error.strerror)
        raise ValueError(
            f"{file}{line} is damaged: {reason}. Restore the file, or use another workdir."
        ) from error
