"""Datasets of tar archives, which are read once without unpacking, as shuffled ArrayRecord files.

The result is a folder that `tfds:NAME` reads, with a manifest of its records and a list of skipped
and unusual files. `tar_reading` reads the archives into a `scatter`, which holds the images until
all classes are known, and `tar_writing` writes them.
"""

import collections
import dataclasses
import functools
import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from vit_jax.data.kinds.folder import DESCRIPTION
from vit_jax.data.kinds.packed import read_class_names
from vit_jax.data.kinds.tar import STANDARD_INPUT
from vit_jax.data.kinds.tfds_source import UNFINISHED, look_up_dataset, tfds_folder
from vit_jax.data.records import few
from vit_jax.data.workers import count_cores, map_in_threads
from vit_jax.storage.files import JsonObject, read_json, write_atomically
from vit_jax.tools.prepare.scatter import Scatter, remove_files
from vit_jax.tools.prepare.tar_reading import (
    TRAIN,
    VALIDATION,
    Note,
    Options,
    Position,
    Reading,
    write_note,
)
from vit_jax.tools.prepare.tar_writing import VERSION, check_shard, write

SHARD_BYTES = 2**30
SHARDS_OF_STREAM = 1024

_REPORT_SECONDS = 10
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def read_classes(options: Mapping[str, str], option: str) -> tuple[str, ...]:
    """Return the names in the text file of an option of the command, one a line.

    Raises:
      ValueError: see `read_class_names`; or fewer than two names.
    """
    path = options[option]
    try:
        names = read_class_names(path)
    except ValueError as error:
        raise ValueError(f"--{option}={error}") from error
    if len(names) < 2:
        raise ValueError(
            f"--{option}={path}: must hold at least two names, one a line. It has {len(names)}."
        )
    return names


def list_archives(patterns: Sequence[str]) -> list[str]:
    """Return the files of patterns, in order; "-" is the standard input.

    Raises:
      ValueError: no file, a pipe or device, "-" beside others, or two files with the same name.
    """
    paths = list[str]()
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        if path == STANDARD_INPUT or os.path.lexists(path):
            paths.append(path)
        else:
            paths += sorted(glob.glob(path)) or [path]

    if STANDARD_INPUT in paths and len(paths) > 1:
        raise ValueError("tar:-: the standard input is one archive. Give it alone.")
    counts = collections.Counter(map(os.path.basename, paths))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f"tar:{few(repeated)}: archives must have different names, "
            "by which images are identified."
        )
    for path in paths:
        if path != STANDARD_INPUT:
            _require_file(path)
    return paths


def _require_file(path: str) -> None:
    if os.path.isdir(path):
        raise ValueError(f"tar:{path}: is a folder. Give its files, tar:'{path}/*.tar'.")
    if not os.path.isfile(path):
        raise ValueError(
            f"tar:{path}: must be an existing regular file. "
            "A pipe is read from the standard input by tar:-."
        )


def prepare_tars(
    archives: Sequence[str],
    name: str,
    *,
    data_dir: str | None,
    options: Options,
) -> tuple[Path, dict[str, int]]:
    """Write a dataset; continue an interrupted one if its archives are files.

    Args:
      archives: paths from `list_archives`.
      name: name of the dataset.
      data_dir: the folder of TFDS datasets; None: the default of TFDS.
      options: options of the dataset.

    Returns:
      The folder; and the numbers of records by split, of classes, and of listed files by kind.

    Raises:
      ValueError: the name is not allowed; a dataset of this name has other archives or options; the
        disk is too small; an archive is damaged or has a class that is not in `options.classes`;
        fewer than two classes.
    """
    if not _NAME.fullmatch(name) or look_up_dataset(name)[0]:
        raise ValueError(
            f"--name={name}: must be small letters, digits and '_', and no name of TFDS. "
            "Try my_dataset."
        )
    root = tfds_folder(data_dir) / name
    folder = root / VERSION
    unfinished = root / UNFINISHED
    sizes = _list_sizes(archives)
    about = _describe(archives, options, options.shards or _count_shards(archives, sizes))
    counts = _find_finished(folder, unfinished, about)
    if counts is not None:
        return folder, counts

    unfinished.mkdir(parents=True, exist_ok=True)
    scatter = _open_scatter(unfinished, about, options.seed)
    try:
        if not scatter.state["is_read"]:
            _read_archives(scatter, archives, sizes, options)
        counts = write(scatter, name, options, _Progress("written").show)
    finally:
        scatter.close()
    description = {"about": about, "counts": counts}
    write_atomically(unfinished / DESCRIPTION, json.dumps(description, indent=2))
    _publish(unfinished, folder)
    return folder, counts


def _list_sizes(archives: Sequence[str]) -> list[int]:
    """Return the sizes of the archives in bytes; 0 for the standard input."""
    if STANDARD_INPUT in archives:
        return [0]
    return [os.stat(path).st_size for path in archives]


def _count_shards(archives: Sequence[str], sizes: Sequence[int]) -> int:
    if STANDARD_INPUT in archives:
        return SHARDS_OF_STREAM
    return max(math.ceil(sum(sizes) / SHARD_BYTES), 1)


def _find_finished(
    folder: Path,
    unfinished: Path,
    about: JsonObject,
) -> dict[str, int] | None:
    """Return the counts of a finished dataset with this description; None if there is none.

    An interruption of `_publish` leaves a finished dataset in the folder `unfinished`.

    Raises:
      ValueError: the folder holds another dataset.
    """
    for place in (folder, unfinished):
        stated = {}
        if (place / DESCRIPTION).exists():
            stated = read_json(place / DESCRIPTION)
        if stated.get("about") == about:
            if place == unfinished:
                _publish(unfinished, folder)
            return stated["counts"]
        if stated or folder.exists():
            raise ValueError(
                f"{folder}: exists and was not made of these archives with these options. "
                "Give another --name=, or remove it."
            )
    return None


def _read_archives(
    scatter: Scatter,
    archives: Sequence[str],
    sizes: Sequence[int],
    options: Options,
) -> None:
    """Read the archives, or the rest of them after an interruption, into the scatter."""
    scatter.shorten_buckets()
    total = sum(sizes)
    if options.short_side is None:
        # A bucket is removed when its shards are written, a bucket by each thread.
        num_twice = min(count_cores(), scatter.num_buckets)
        _require_space(scatter.folder, total + num_twice * total // scatter.num_buckets)
    progress = _Progress("read", scatter.num_rows)

    def show(num_images: int, position: Position) -> None:
        num_bytes = sum(sizes[: position.archive]) + position.num_bytes
        progress.show(num_images, num_bytes / total if total else None)

    Reading(scatter, options, show).run(archives)


def _open_scatter(folder: Path, about: JsonObject, seed: int) -> Scatter:
    """Open the records of an earlier call, or an empty scatter."""
    state: JsonObject = {
        "about": about,
        "is_read": False,
        "place": [0, 0],
        "classes": [],
        "counts": {},
    }
    scatter = Scatter(folder, about["shards"], seed, state)
    if scatter.state["about"] != about:
        scatter.close()
        raise ValueError(
            f"{folder}: was begun with other archives or options. Give those, or remove it."
        )
    if about["archives"] == STANDARD_INPUT and scatter.is_begun and not scatter.state["is_read"]:
        logging.getLogger(__name__).warning(
            "The standard input cannot be continued: beginning again."
        )
        scatter.close()
        remove_files(folder)
        scatter = Scatter(folder, about["shards"], seed, state)
    if not scatter.is_begun:
        write_note(scatter, Note("source", "kind", "detail"))
    return scatter


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename the folder of a finished dataset."""
    remove_files(unfinished)
    os.sync()  # otherwise a loss of power could leave the name without content
    unfinished.rename(folder)


def _describe(
    archives: Sequence[str],
    options: Options,
    num_shards: int,
) -> JsonObject:
    """Return JSON values that are equal for equal archives and options."""
    files = []
    for path in archives:
        if path != STANDARD_INPUT:
            status = os.stat(path)
            files.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    return {
        "archives": files or STANDARD_INPUT,
        **dataclasses.asdict(options),
        "classes": _hash_names(options.classes),
        "number_names": _hash_names(options.number_names),
        "shards": num_shards,
    }


def _hash_names(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _require_space(folder: Path, needed: int) -> None:
    """Raise ValueError if the disk is too small for this number of bytes.

    They include the files of an earlier call.
    """
    existing = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    free = shutil.disk_usage(folder).free
    if free + existing < needed:
        raise ValueError(
            f"{folder}: its disk has {free / 1e9:,.1f} GB free, "
            f"and {(needed - existing) / 1e9:,.1f} GB are needed. "
            "Free space, or give another disk by --data_dir=."
        )


def check(name: str, data_dir: str | None) -> list[str]:
    """Compare a dataset of `prepare_tars` with its manifest: digest and label of each record, counts.

    Returns:
      problems in words; none for a dataset that has not changed.

    Raises:
      ValueError: there is no such dataset, or it was not made of tars.
    """
    folder = tfds_folder(data_dir) / name / VERSION
    num_shards, expected = _read_description(folder)
    features = tfds.builder_from_directory(str(folder)).info.features
    splits = list(expected)
    check_one = functools.partial(
        check_shard,
        folder,
        name,
        splits,
        features,
        count=num_shards,
    )

    progress = _Progress("checked")
    problems = list[str]()
    totals = collections.Counter[str]()
    for number, (found, sizes) in enumerate(map_in_threads(check_one, range(num_shards)), 1):
        problems += found
        totals += sizes
        progress.show(totals.total(), number / num_shards)
    if not problems and totals != collections.Counter(expected):
        problems.append(
            f"{folder}: its manifests have {dict(totals)} records instead of {expected}"
        )
    return problems


def _read_description(folder: Path) -> tuple[int, dict[str, int]]:
    """Return the number of shards, and the number of records by split."""
    file = folder / DESCRIPTION
    if not file.exists():
        hint = ""
        if folder.with_name(UNFINISHED).exists():
            hint = " It is unfinished: repeat the command that began it."
        raise ValueError(
            f"{folder}: has no {DESCRIPTION}, as `vit-jax prepare tar:FILE` writes it.{hint}"
        )
    stated = read_json(file)
    try:
        num_shards = int(stated["about"]["shards"])
        counts = stated["counts"]
        sizes = {split: int(counts[split]) for split in (TRAIN, VALIDATION) if split in counts}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: is damaged. Prepare the dataset again.") from error
    return num_shards, sizes


class _Progress:
    """Prints the number of images on the standard error from time to time."""

    def __init__(self, verb: str, done: int = 0) -> None:
        self._verb = verb
        self._first = done
        self._begin = time.monotonic()
        self._last = self._begin

    def show(self, done: int, share: float | None) -> None:
        """Print a line if the last one is old; `share` is the finished part of the work, if known."""
        now = time.monotonic()
        if now - self._last < _REPORT_SECONDS:
            return
        self._last = now
        speed = (done - self._first) / (now - self._begin)
        line = f"{self._verb}: {done:,} images, {speed:,.0f}/s"
        if share is not None:
            line += f", {share:.1%}"
        print(line, file=sys.stderr, flush=True)
