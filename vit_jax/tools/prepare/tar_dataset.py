"""Datasets made of tar archives: read once, without unpacking, and written as shuffled ArrayRecord files.

The result is a folder that `tfds:NAME` reads, with a manifest of its records and a list of skipped
and odd files. `tar_reading` reads the archives into a `scatter`, which holds the images until all
classes are known, and `tar_writing` writes them.
"""

import collections
import dataclasses
import functools
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from vit_jax.data.kinds.folder import DESCRIPTION
from vit_jax.data.kinds.packed import read_class_names
from vit_jax.data.kinds.tar import STANDARD_INPUT
from vit_jax.data.kinds.tfds_source import UNFINISHED, look_up_dataset, tfds_folder
from vit_jax.data.records import few
from vit_jax.data.workers import count_cores, map_in_threads
from vit_jax.storage.files import read_json, write_atomically
from vit_jax.tools.prepare.scatter import Scatter, remove
from vit_jax.tools.prepare.tar_reading import (
    TRAIN,
    VALIDATION,
    Noted,
    Options,
    Place,
    Reading,
    note,
)
from vit_jax.tools.prepare.tar_writing import VERSION, check_shard, write

SHARD_BYTES = 2**30
SHARDS_OF_STREAM = 1024

_REPORT_SECONDS = 10
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def read_classes(options: Mapping[str, str], option: str) -> tuple[str, ...]:
    """Return the names in the text file that an option of the command names, one a line.

    Raises:
      ValueError: as `read_class_names`, or fewer than two names.
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
    """Return the files that patterns name, in order; "-" is the standard input.

    Raises:
      ValueError: no file, a pipe or device, "-" beside others, or two files with the same name.
    """
    paths = list[str]()
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        is_one = path == STANDARD_INPUT or os.path.lexists(path)
        paths += [path] if is_one else sorted(glob.glob(path)) or [path]
    repeated = [
        name
        for name, count in collections.Counter(map(os.path.basename, paths)).items()
        if count > 1
    ]
    wrong = next(
        (path for path in paths if path != STANDARD_INPUT and not os.path.isfile(path)), ""
    )
    if STANDARD_INPUT in paths and len(paths) > 1:
        problem = "-: the standard input is one archive. Give it alone."
    elif repeated:
        problem = (
            f"{few(repeated)}: archives must have different names, by which images are identified."
        )
    elif os.path.isdir(wrong):
        problem = f"{wrong}: is a folder. Give its files, tar:'{wrong}/*.tar'."
    elif wrong:
        problem = f"{wrong}: must be an existing regular file. A pipe is read from the standard input by tar:-."
    else:
        return paths
    raise ValueError(f"tar:{problem}")


def prepare_tars(
    archives: Sequence[str], name: str, *, data_dir: str | None, options: Options
) -> tuple[Path, dict[str, int]]:
    """Write a dataset; continue an interrupted one if its archives are files.

    Args:
      archives: paths from `list_archives`.
      name: of the dataset.
      data_dir: the folder of TFDS datasets; None: TFDS's own.
      options: of the dataset.

    Returns:
      The folder; and the numbers of records by split, of classes, and of listed files by kind.

    Raises:
      ValueError: the name is not allowed; a dataset of this name has other archives or options; the
        disk is too small; an archive is damaged or has a class that is not in `options.classes`;
        fewer than two classes.
    """
    if not _NAME.fullmatch(name) or look_up_dataset(name)[0]:
        raise ValueError(
            f"--name={name}: must be small letters, digits and '_', and no name of TFDS. Try my_dataset."
        )
    root = tfds_folder(data_dir) / name
    folder = root / VERSION
    unfinished = root / UNFINISHED
    is_stream = STANDARD_INPUT in archives
    sizes = [0 if is_stream else os.stat(path).st_size for path in archives]
    num_shards = options.shards or (
        SHARDS_OF_STREAM if is_stream else -(-sum(sizes) // SHARD_BYTES) or 1
    )
    about = _about(archives, options, num_shards)
    for place in (folder, unfinished):  # the second after an interruption of `_publish`
        stated = read_json(place / DESCRIPTION) if (place / DESCRIPTION).exists() else {}
        if stated.get("about") == about:
            if place == unfinished:
                _publish(unfinished, folder)
            return folder, stated["counts"]
        if stated or folder.exists():
            another = "Give another --name=, or remove it."
            raise ValueError(
                f"{folder}: exists and was not made of these archives with these options. {another}"
            )
    unfinished.mkdir(parents=True, exist_ok=True)
    scatter = _open_scatter(unfinished, about, options.seed)
    try:
        if not scatter.state["is_read"]:
            scatter.shorten_buckets()
            if options.short_side is None:
                at_once = min(
                    count_cores(), num_shards
                )  # buckets that are written again before they are removed
                _require_space(unfinished, sum(sizes) + at_once * sum(sizes) // num_shards)
            progress = _Progress("read", scatter.num_rows)
            total = sum(sizes)

            def show(num_images: int, place: Place) -> None:
                done = sum(sizes[: place.archive]) + place.num_bytes
                progress.show(num_images, done / total if total else None)

            Reading(scatter, options, show).run(archives)
        counts = write(scatter, name, options, _Progress("written").show)
    finally:
        scatter.close()
    write_atomically(
        unfinished / DESCRIPTION, json.dumps({"about": about, "counts": counts}, indent=2)
    )
    _publish(unfinished, folder)
    return folder, counts


def _open_scatter(folder: Path, about: dict[str, Any], seed: int) -> Scatter:
    """Open the records of an earlier call, or none."""
    state: dict[str, Any] = {
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
        remove(folder)
        scatter = Scatter(folder, about["shards"], seed, state)
    if not scatter.is_begun:
        note(scatter, Noted("source", "kind", "detail"))
    return scatter


def _publish(unfinished: Path, folder: Path) -> None:
    """Give a finished dataset its name."""
    remove(unfinished)
    os.sync()  # or a loss of power could leave the name without content
    unfinished.rename(folder)


def _about(archives: Sequence[str], options: Options, num_shards: int) -> dict[str, Any]:
    """Return JSON values that are equal for equal archives and options."""
    facts = [(path, os.stat(path)) for path in archives if path != STANDARD_INPUT]
    files = [[os.path.realpath(path), status.st_size, status.st_mtime_ns] for path, status in facts]
    lists = {
        name: hashlib.sha256("\n".join(getattr(options, name)).encode()).hexdigest()
        for name in ("classes", "number_names")
    }
    return (
        {"archives": files or STANDARD_INPUT}
        | dataclasses.asdict(options)
        | lists
        | {"shards": num_shards}
    )


def _require_space(folder: Path, needed: int) -> None:
    """Reject a disk that cannot hold the dataset and one bucket, beside the files of an earlier call."""
    there = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    free = shutil.disk_usage(folder).free
    if free + there < needed:
        sizes = f"{free / 1e9:,.1f} GB free, and {(needed - there) / 1e9:,.1f} GB are needed"
        raise ValueError(
            f"{folder}: its disk has {sizes}. Free space, or give another disk by --data_dir=."
        )


def check(name: str, data_dir: str | None) -> list[str]:
    """Compare a dataset that `prepare_tars` wrote with its manifest: every record, its digest and label, and counts.

    Returns:
      Problems, in words; none for a dataset that has not changed.

    Raises:
      ValueError: there is no such dataset, or it was not made of tars.
    """
    folder = tfds_folder(data_dir) / name / VERSION
    if not (folder / DESCRIPTION).exists():
        hint = (
            " It is unfinished: repeat the command that began it."
            if folder.with_name(UNFINISHED).exists()
            else ""
        )
        raise ValueError(
            f"{folder}: has no {DESCRIPTION}, as `vit-jax prepare tar:FILE` writes it.{hint}"
        )
    stated = read_json(folder / DESCRIPTION)
    try:
        num = int(stated["about"]["shards"])
        counts = stated["counts"]
        expected = {split: int(counts[split]) for split in (TRAIN, VALIDATION) if split in counts}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / DESCRIPTION}: is damaged. Prepare the dataset again."
        ) from error
    features = tfds.builder_from_directory(str(folder)).info.features
    progress = _Progress("checked")
    problems = list[str]()
    totals = collections.Counter[str]()
    check_one = functools.partial(check_shard, folder, name, [*expected], features, count=num)
    for number, (new, sizes) in enumerate(map_in_threads(check_one, range(num)), 1):
        problems += new
        totals += sizes
        progress.show(totals.total(), number / num)
    if not problems and totals != collections.Counter(expected):
        problems.append(
            f"{folder}: its manifests have {dict(totals)} records instead of {expected}"
        )
    return problems


class _Progress:
    """Prints the number of images on the standard error from time to time."""

    def __init__(self, verb: str, done: int = 0) -> None:
        self._verb = verb
        self._done = done
        self._begin = self._last = time.monotonic()

    def show(self, done: int, share: float | None) -> None:
        """Print a line, if it is time, with the share of the work that is done; None: unknown."""
        now = time.monotonic()
        if now - self._last >= _REPORT_SECONDS:
            self._last = now
            speed = (done - self._done) / (now - self._begin)
            part = "" if share is None else f", {share:.1%}"
            print(
                f"{self._verb}: {done:,} images, {speed:,.0f}/s{part}", file=sys.stderr, flush=True
            )
