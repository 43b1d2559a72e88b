"""Datasets made of tar archives: read once, without unpacking, and written as shuffled ArrayRecord files.

The result is a folder that `tfds:NAME` reads, with a manifest of its records and a list of the files that were left out
or are odd. `tar_images` finds the images, and `scatter` holds them until all classes are known.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import glob
import hashlib
import io
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from vit_jax.data.files import MAX_NAME_BYTES
from vit_jax.data.folder import DESCRIPTION
from vit_jax.data.headers import stated_pixels
from vit_jax.data.images import UnreadableImage, decode
from vit_jax.data.prepared import QUALITY, reduced
from vit_jax.data.records import few
from vit_jax.data.scatter import NOTES, Order, Scatter, order_of, remove
from vit_jax.data.subset import first_of_class
from vit_jax.data.tar import STANDARD_INPUT, is_mislabelled
from vit_jax.data.tar_images import Class, Found, Noted, Place, read_images
from vit_jax.data.tfds_source import UNFINISHED, in_catalogue
from vit_jax.data.workers import available_cores
from vit_jax.files import expanded, open_regular, read_json, read_lines, write_atomically
from vit_jax.tables import to_csv

VERSION = "1.0.0"
MANIFEST = "manifest"
TRAIN, VALIDATION = "train", "validation"
UNREADABLE, TINY, MISLABELLED, DUPLICATE, SMALL_CLASS = "unreadable", "tiny", "mislabelled", "duplicate", "small class"
MAX_FOUND_CLASSES = 2**17
SHARD_BYTES = 2**30
SHARDS_OF_STREAM = 1024

_MEMORY_BYTES = 2**29  # of images that are checked at a time, with their pixels
_OVERHEAD_BYTES = 2**13
_COMMIT_BYTES = 2**28  # repeating the work on this much after an interruption takes seconds
_REPORT_SECONDS = 10
_ROW_GROUP = 10_000  # of the manifest, written at once
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_FORMAT = "group_size:1,uncompressed"  # TFDS compresses, which makes images no smaller and takes four times as long
_ANOTHER = "Give another --name=, or remove it."
_COLUMNS = pa.schema(
    {"id": pa.string(), "split": pa.string(), "label": pa.int32(), "class": pa.string()}
    | {"source": pa.string(), "sha256": pa.string(), "size": pa.int64()}
)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a dataset is made of archives.

    Attributes:
      seed: of the order of the records.
      classes: names in the order of their numbers; empty: the sorted names of the classes that are found.
      number_names: names of the classes whose numbers files state; empty: those of `classes`.
      skips_others: skip images of other classes than `classes`, which are an error otherwise.
      min_side: pixels; an image with a shorter side is left out.
      min_class_images: a class with fewer images is left out.
      holdout_per_class: images of each class, at most half of it, that are the split "validation".
      short_side: pixels to which longer short sides are reduced, as `prepared.reduced` does; None: none.
      quality: of the JPEGs that are then written.
      shards: files of each split; None: one for each `SHARD_BYTES` of the archives, and `SHARDS_OF_STREAM` for the
        standard input.
    """

    seed: int = 0
    classes: tuple[str, ...] = ()
    number_names: tuple[str, ...] = ()
    skips_others: bool = False
    min_side: int = 32
    min_class_images: int = 1
    holdout_per_class: int = 0
    short_side: int | None = None
    quality: int = QUALITY
    shards: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that are written."""
        return (TRAIN, VALIDATION) if self.holdout_per_class else (TRAIN,)


def read_classes(options: Mapping[str, str], option: str) -> tuple[str, ...]:
    """Return the names in the text file that an option of the command gives, one a line.

    Raises:
      ValueError: it is no regular file, or has fewer than two names, one twice, or an empty line between them.
    """
    path = options[option]
    try:
        with open_regular(path) as file:
            names = [line.decode("utf-8", "backslashreplace").strip() for line in read_lines(file, MAX_NAME_BYTES)]
    except ValueError as error:
        raise ValueError(f"--{option}={path}: {error}. Give a text file with one name a line.") from error
    while names and not names[-1]:
        names.pop()
    repeated = [name or "an empty line" for name, count in collections.Counter(names).items() if count > 1 or not name]
    if repeated or len(names) < 2:
        problem = f"{few(repeated)} must not repeat" if repeated else f"it has {len(names)}"
        raise ValueError(f"--{option}={path}: must hold the names of at least two classes, one a line; {problem}.")
    return tuple(names)


def list_archives(patterns: Sequence[str]) -> list[str]:
    """Return the files that patterns name, in order; "-" is the standard input.

    Raises:
      ValueError: no file, a pipe or device, "-" beside others, or two files with the same name.
    """
    found = list[str]()
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        files = [path] if path == STANDARD_INPUT or os.path.lexists(path) else sorted(glob.glob(path))
        if not files:
            raise ValueError(f"tar:{pattern}: there is no such file. Give tar files, or '-' for the standard input.")
        found += files
    if STANDARD_INPUT in found and len(found) > 1:
        raise ValueError("tar:-: the standard input is one archive. Give it alone.")
    if repeated := [name for name, count in collections.Counter(map(os.path.basename, found)).items() if count > 1]:
        raise ValueError(f"tar: {few(repeated)}: archives must have different names, by which images are identified.")
    if wrong := [path for path in found if path != STANDARD_INPUT and not os.path.isfile(path)]:
        if os.path.isdir(wrong[0]):
            raise ValueError(f"tar:{wrong[0]}: is a folder. Give its files, tar:'{wrong[0]}/*.tar'.")
        raise ValueError(f"tar:{wrong[0]}: must be a regular file. Send a pipe to the standard input and give tar:-.")
    return found


def prepare_tars(
    archives: Sequence[str], name: str, *, data_dir: str | None, options: Options
) -> tuple[Path, dict[str, int]]:
    """Write a dataset; continue one that was interrupted, as far as its archives are files.

    Args:
      archives: paths from `list_archives`.
      name: of the dataset.
      data_dir: the folder of TFDS datasets; None: TFDS's own.
      options: how it is made.

    Returns:
      The folder; and how many records it has by split, how many classes, and how many files are listed by kind.

    Raises:
      ValueError: the name is not allowed; a dataset of this name was made or begun with others; the disk is too small;
        an archive is damaged or has a class that is not in `options.classes`; fewer than two classes.
    """
    if not _NAME.fullmatch(name) or in_catalogue(name)[0]:
        raise ValueError(f"--name={name}: must be small letters, digits and '_', and no name of TFDS. Try my_dataset.")
    root = expanded(data_dir or tfds.core.constants.DATA_DIR) / name
    folder, unfinished = root / VERSION, root / UNFINISHED
    is_stream = STANDARD_INPUT in archives
    sizes = [0 if is_stream else os.stat(path).st_size for path in archives]
    num_shards = options.shards or (SHARDS_OF_STREAM if is_stream else -(-sum(sizes) // SHARD_BYTES) or 1)
    about = _about(archives, options, num_shards)
    for place in (folder, unfinished):  # the second where it was interrupted while it was given its name
        if (place / DESCRIPTION).exists():
            found = read_json(place / DESCRIPTION)
            if found.get("about") != about:
                raise ValueError(f"{folder}: exists and was made of other archives or with other options. {_ANOTHER}")
            if place == unfinished:
                _publish(unfinished, folder)
            return folder, found["counts"]
    if folder.exists():
        raise ValueError(f"{folder}: exists and was not made of tars. {_ANOTHER}")
    unfinished.mkdir(parents=True, exist_ok=True)
    scatter = _open_scatter(unfinished, about, options.seed)
    try:
        if not scatter.state["is_read"]:
            scatter.shorten_buckets()
            if options.short_side is None:
                at_once = min(available_cores(), num_shards)  # buckets that are written again before they are removed
                _require_space(unfinished, sum(sizes) + at_once * sum(sizes) // num_shards)
            _Reading(scatter, options, sizes).run(archives)
        counts = _write(scatter, name, options)
    finally:
        scatter.close()
    write_atomically(unfinished / DESCRIPTION, json.dumps({"about": about, "counts": counts}, indent=2))
    _publish(unfinished, folder)
    return folder, counts


def _open_scatter(folder: Path, about: dict[str, Any], seed: int) -> Scatter:
    """Open the records of an earlier call, or none."""
    state: dict[str, Any] = {"about": about, "is_read": False, "place": [0, 0], "classes": [], "counts": {}}
    scatter = Scatter(folder, about["shards"], seed, state)
    if scatter.state["about"] != about:
        scatter.close()
        raise ValueError(f"{folder}: was begun with other archives or options. Give those, or remove it.")
    if about["archives"] == STANDARD_INPUT and scatter.is_begun and not scatter.state["is_read"]:
        logging.getLogger(__name__).warning("The standard input cannot be continued: beginning again.")
        scatter.close()
        remove(folder)
        scatter = Scatter(folder, about["shards"], seed, state)
    if not scatter.is_begun:
        _note(scatter, Noted("source", "kind", "detail"))
    return scatter


def _publish(unfinished: Path, folder: Path) -> None:
    """Give a finished dataset its name."""
    remove(unfinished)
    os.sync()  # or a loss of power could leave the name without content
    unfinished.rename(folder)


def _about(archives: Sequence[str], options: Options, num_shards: int) -> dict[str, Any]:
    """Return JSON values that are equal for equal archives and options."""
    facts = [(path, os.stat(path)) for path in archives if path != STANDARD_INPUT]
    files = [[os.path.realpath(path), found.st_size, found.st_mtime_ns] for path, found in facts]
    lists = {
        name: hashlib.sha256("\n".join(getattr(options, name)).encode()).hexdigest()
        for name in ("classes", "number_names")
    }
    return {"archives": files or STANDARD_INPUT} | dataclasses.asdict(options) | lists | {"shards": num_shards}


def _require_space(folder: Path, needed: int) -> None:
    """Refuse a disk that cannot hold the dataset and one bucket, beside what an earlier call has written."""
    there = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    free = shutil.disk_usage(folder).free
    if free + there < needed:
        raise ValueError(
            f"{folder}: its disk has {free / 1e9:,.1f} GB free, and {(needed - there) / 1e9:,.1f} GB are needed. Free "
            "space, or give the folder of another disk by --data_dir=."
        )


class _Checked(NamedTuple):
    """A found image after its check: what is stored, and what is listed of it."""

    image: bytes | None
    sha256: bytes
    noted: Noted | None


def _check(found: Found, options: Options) -> _Checked:
    try:
        pixels = decode(found.image)
    except UnreadableImage as error:
        return _Checked(None, b"", Noted(found.source, UNREADABLE, str(error)))
    height, width = pixels.shape[:2]
    if min(height, width) < options.min_side:
        return _Checked(None, b"", Noted(found.source, TINY, f"{width} x {height} pixels"))
    noted = None
    if is_mislabelled(found.source, found.image):
        noted = Noted(found.source, MISLABELLED, f"begins with {found.image[:4].hex(' ')}; it is in the dataset")
    smaller = None if options.short_side is None else reduced(found.image, options.short_side, options.quality)
    stored = found.image if smaller is None else smaller
    return _Checked(stored, hashlib.sha256(stored).digest(), noted)


class _Reading:
    """Reads archives once: images are checked by threads, and stored and listed in the order of the archives."""

    def __init__(self, scatter: Scatter, options: Options, sizes: Sequence[int]) -> None:
        self._scatter, self._options, self._sizes = scatter, options, sizes
        state = scatter.state
        self._labels: dict[Class, int] = {label: number for number, (label, _) in enumerate(state["classes"])}
        self._counts = collections.Counter[str](state["counts"])
        self._wanted = {*options.classes}
        self._uncommitted, self._in_flight, self._place = 0, 0, Place(*state["place"])
        self._waiting = collections.deque[tuple[Found | Noted | Place, int, Any]]()
        self._progress = _Progress("read", sum(sizes), scatter.num_rows)

    def run(self, archives: Sequence[str]) -> None:
        pool = concurrent.futures.ThreadPoolExecutor(available_cores())
        try:
            for item in read_images(archives, self._place, self._is_wanted):
                weight = _OVERHEAD_BYTES
                if isinstance(item, Found):
                    weight += len(item.image) + 4 * stated_pixels(item.image)
                while self._waiting and self._in_flight + weight > _MEMORY_BYTES:
                    self._take()
                checked = pool.submit(_check, item, self._options) if isinstance(item, Found) else None
                self._waiting.append((item, weight, checked))
                self._in_flight += weight
                while self._waiting and ((first := self._waiting[0][2]) is None or first.done()):
                    self._take()
            while self._waiting:
                self._take()
        finally:
            pool.shutdown(cancel_futures=True)
        self._scatter.state["counts"] = self._counts
        self._commit()

    def _take(self) -> None:
        """Store or list the oldest item; it waits for the end of its check."""
        item, weight, future = self._waiting.popleft()
        self._in_flight -= weight
        if isinstance(item, Place):
            self._place = item
            if self._uncommitted >= _COMMIT_BYTES:
                self._commit()
            self._progress.show(self._scatter.num_rows, sum(self._sizes[: item.archive]) + item.num_bytes)
            return
        noted = item if isinstance(item, Noted) else None
        if isinstance(item, Found):
            image, sha256, noted = future.result()
            if image is not None:
                self._scatter.add(item.source, self._number_of(item), image, sha256)
                self._uncommitted += len(image)
        if noted is not None:
            _note(self._scatter, noted)
            self._counts[noted.kind] += 1

    def _commit(self) -> None:
        self._scatter.state |= {"place": [self._place.archive, self._place.member], "counts": self._counts}
        self._scatter.commit()
        self._uncommitted = 0

    def _named(self, label: Class) -> Class:
        """Return the name of a class that files state by its number, where the names of numbers are known."""
        names = self._options.number_names or self._options.classes
        return names[label] if isinstance(label, int) and label < len(names) else label

    def _is_wanted(self, label: Class) -> bool:
        """Return whether a class is in the list of classes; without a list every class is.

        Raises:
          ValueError: it is not, and others are not skipped.
        """
        if not self._wanted or self._named(label) in self._wanted:
            return True
        if self._options.skips_others:
            return False
        raise ValueError(
            f"class {label}: is not among the {len(self._wanted):,} of --classes=. Complete the list, or give "
            f"--other_classes=skip; remove {self._scatter.folder} before."
        )

    def _number_of(self, found: Found) -> int:
        """Return the number of a class in the order in which they are found."""
        classes: list[list[Any]] = self._scatter.state["classes"]
        label = self._named(found.label)
        number = self._labels.setdefault(label, len(classes))
        if number == len(classes):
            if number == MAX_FOUND_CLASSES:
                raise ValueError(f"{found.source}: is of a {number + 1:,}th class. Give archives that state classes.")
            classes.append([label, found.folder])
            if isinstance(label, int) != isinstance(classes[0][0], int):
                raise ValueError(
                    f"{found.source}: states the class {label!r}, and others have names or numbers. Use one."
                )
        elif found.folder != classes[number][1] and found.folder is not None:
            raise ValueError(
                f"{found.source}: class {label} is in the folders {classes[number][1]!r} and {found.folder!r}, as if "
                "they were splits. Pack each split as an archive and prepare it under a name of its own."
            )
        return number


def _note(scatter: Scatter, noted: Noted) -> None:
    scatter.note(to_csv([noted]))


class _Plan(NamedTuple):
    """The plan of the dataset, made when every record is known.

    Attributes:
      order: of the records.
      class_names: in the order of their numbers.
      number: int64 (classes that were found,), the number of each class; -1 for one that is left out.
      is_in: for each split which records of `order` are in it, bool (N,).
      dropped: the classes that are left out, and their sizes.
    """

    order: Order
    class_names: tuple[str, ...]
    number: np.ndarray
    is_in: dict[str, np.ndarray]
    dropped: dict[str, int]


def plan(scatter: Scatter, options: Options) -> _Plan:
    """Number the classes and divide the records among the splits.

    Numbers are those in `options.classes`; those that files state, where they state numbers; and otherwise the places
    in the sorted names of the classes that are not left out.

    Raises:
      ValueError: fewer than two classes have images.
    """
    order, found = order_of(scatter), [label for label, _ in scatter.state["classes"]]
    sizes = np.bincount(order.label[order.is_first], minlength=len(found))
    is_kept = sizes >= max(options.min_class_images, 1)
    kept = [label for label, keep in zip(found, is_kept.tolist(), strict=True) if keep]
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept)} classes have {options.min_class_images} images or more, of {scatter.num_rows:,} images that "
            f"can be used; at least two classes are needed. {scatter.folder / NOTES} has the files left out."
        )
    if options.classes:
        class_names = options.classes
    elif isinstance(kept[0], int):
        class_names = tuple(map(str, range(max(found) + 1)))
    else:
        class_names = tuple(sorted(kept))
    numbers = {name: number for number, name in enumerate(class_names)}
    number = np.array([numbers[str(label)] if keep else -1 for label, keep in zip(found, is_kept, strict=True)])
    used = np.flatnonzero(order.is_first & is_kept[order.label])
    counts = np.minimum(options.holdout_per_class, sizes // 2)
    is_in = {split: np.zeros(len(order.label), bool) for split in options.splits}
    is_in[TRAIN][used] = True
    if options.holdout_per_class:
        held = used[first_of_class(order.label[used], counts)]
        is_in[VALIDATION][held], is_in[TRAIN][held] = True, False
    dropped = {str(label): int(size) for label, keep, size in zip(found, is_kept, sizes, strict=True) if not keep}
    return _Plan(order, class_names, number, is_in, dropped)


def _write(scatter: Scatter, name: str, options: Options) -> dict[str, int]:
    """Write the files of the dataset that are missing, bucket by bucket; returns counts as `prepare_tars`."""
    planned = plan(scatter, options)
    counts = collections.Counter(scatter.state["counts"])
    if not scatter.state["is_read"]:
        counts += _note_rest(scatter, planned)
        scatter.state |= {"is_read": True, "counts": counts}
        scatter.commit()
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(),
            "label": tfds.features.ClassLabel(names=planned.class_names),
            "file_name": tfds.features.Text(),
        }
    )
    num = scatter.num_buckets
    starts = {split: np.append(0, np.cumsum(is_in))[planned.order.bounds] for split, is_in in planned.is_in.items()}
    totals = {split: int(start[-1]) for split, start in starts.items()}
    (scatter.folder / MANIFEST).mkdir(exist_ok=True)
    progress = _Progress("written", sum(totals.values()), 0)

    def write(bucket: int) -> int:
        files = [shard(scatter.folder, name, split, bucket, num) for split in totals]
        files.append(manifest(scatter.folder, bucket, num))
        if not all(file.exists() for file in files):
            _write_bucket(
                scatter, planned, features, bucket, {split: int(starts[split][bucket]) for split in totals}, files
            )
        scatter.bucket(bucket).unlink(missing_ok=True)
        return sum(int(start[bucket + 1] - start[bucket]) for start in starts.values())

    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        done = 0
        try:
            for count in pool.map(write, range(num)):
                done += count
                progress.show(done, done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=np.diff(start).tolist(),
            num_bytes=sum(shard(scatter.folder, name, split, k, num).stat().st_size for k in range(num)),
        )
        for split, start in starts.items()
    ]
    tfds.folder_dataset.write_metadata(
        data_dir=scatter.folder, features=features, split_infos=infos, version=VERSION, check_data=False
    )
    return {**totals, "classes": len(planned.class_names), **counts}


def _note_rest(scatter: Scatter, planned: _Plan) -> collections.Counter[str]:
    """List what is known at the end: members of one name, and classes with few images."""
    order, counts = planned.order, collections.Counter[str]()
    for row in np.flatnonzero(~order.is_first).tolist():
        with scatter.open_bucket(int(np.searchsorted(order.bounds, row, "right")) - 1) as bucket:
            stored = scatter.read(bucket, int(order.offset[row]), int(order.size[row]))
        _note(scatter, Noted(stored.name, DUPLICATE, "another member has this name; the first is in the dataset"))
        counts[DUPLICATE] += 1
    for name, size in planned.dropped.items():
        _note(scatter, Noted(name, SMALL_CLASS, f"{size:,} images"))
        counts[SMALL_CLASS] += 1
    return counts


def shard(folder: Path, name: str, split: str, number: int, count: int) -> Path:
    """Return a file of a split, named as TFDS does."""
    return folder / f"{name}-{split}.array_record-{number:05d}-of-{count:05d}"


def manifest(folder: Path, number: int, count: int) -> Path:
    """Return the manifest of one shard of each split."""
    return folder / MANIFEST / f"{number:05d}-of-{count:05d}.parquet"


def _write_bucket(
    scatter: Scatter, planned: _Plan, features: Any, number: int, starts: dict[str, int], files: Sequence[Path]
) -> None:
    """Write one shard of each split and their manifest, each under its name when it is complete."""
    order = planned.order
    begin, end = map(int, order.bounds[number : number + 2])
    unfinished = [file.with_name(f"{file.name}.tmp") for file in files]
    writers = {
        split: array_record_module.ArrayRecordWriter(str(file), _FORMAT)
        for split, file in zip(starts, unfinished, strict=False)
    }
    serializer = ExampleSerializer(features.get_serialized_info())
    next_index, rows = dict(starts), list[tuple[Any, ...]]()
    with (
        scatter.open_bucket(number) if begin < end else io.BytesIO() as bucket,
        pq.ParquetWriter(unfinished[-1], _COLUMNS, compression="zstd") as table,
    ):
        if begin < end and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(bucket.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # it is read at random
        for row in range(begin, end):
            for split in starts:
                if not planned.is_in[split][row]:
                    continue
                stored = scatter.read(bucket, int(order.offset[row]), int(order.size[row]))
                label = int(planned.number[order.label[row]])
                example = {"image": stored.image, "label": label, "file_name": stored.name}
                message = serializer.get_tf_example(features.encode_example(example))
                with _written(scatter.folder):
                    writers[split].write(message.SerializeToString(deterministic=True))  # TFDS leaves order to chance
                about = (stored.name, stored.sha256.hex(), len(stored.image))
                rows.append((f"{split}:{next_index[split]}", split, label, planned.class_names[label], *about))
                next_index[split] += 1
            if len(rows) >= _ROW_GROUP or (rows and row == end - 1):
                columns = zip(*rows, strict=True)
                table.write_table(
                    pa.table([pa.array(c, f.type) for c, f in zip(columns, _COLUMNS, strict=True)], _COLUMNS)
                )
                rows.clear()
    with _written(scatter.folder):
        for writer in writers.values():
            writer.close()
    for file, final in zip(unfinished, files, strict=True):
        file.replace(final)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raise OSError, as for other files, where ArrayRecord raises RuntimeError: on a full disk."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, f"cannot be written ({error})", str(folder)) from error


def check(name: str, data_dir: str | None) -> list[str]:
    """Compare a dataset that `prepare_tars` wrote with its manifest: every record, its digest and label, and counts.

    Returns:
      What is wrong, in words; nothing for a dataset that is as it was written.

    Raises:
      ValueError: there is no such dataset, or it was made otherwise.
    """
    folder = expanded(data_dir or tfds.core.constants.DATA_DIR) / name / VERSION
    if not (folder / DESCRIPTION).exists():
        hint = " It is unfinished: repeat the command that began it." if folder.with_name(UNFINISHED).exists() else ""
        raise ValueError(f"{folder}: has no {DESCRIPTION}, as `vit-jax prepare tar:FILE` writes it.{hint}")
    stated = read_json(folder / DESCRIPTION)
    try:
        num, counts = int(stated["about"]["shards"]), stated["counts"]
        expected = {split: int(counts[split]) for split in (TRAIN, VALIDATION) if split in counts}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION}: is damaged. Prepare the dataset again.") from error
    features = tfds.builder_from_directory(str(folder)).info.features
    progress, problems, totals = _Progress("checked", num, 0), list[str](), collections.Counter[str]()
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        checks = pool.map(lambda number: _check_shard(folder, name, [*expected], features, number, num), range(num))
        for number, (found, sizes) in enumerate(checks):
            problems += found
            totals += sizes
            progress.show(totals.total(), number + 1)
    if not problems and totals != collections.Counter(expected):
        problems.append(f"{folder}: its manifests have {dict(totals)} records instead of {expected}")
    return problems


def _check_shard(
    folder: Path, name: str, splits: Sequence[str], features: Any, number: int, count: int
) -> tuple[list[str], collections.Counter[str]]:
    problems, sizes, file = list[str](), collections.Counter[str](), manifest(folder, number, count)
    paths = {split: shard(folder, name, split, number, count) for split in splits}
    readers = {split: array_record_module.ArrayRecordReader(str(path)) for split, path in paths.items()}
    try:
        for batch in pq.ParquetFile(file).iter_batches(_ROW_GROUP):
            for row in batch.to_pylist():
                index, split = sizes[row["split"]], row["split"]
                sizes[split] += 1
                if not _is_as_stated(readers[split], index, row, features):
                    problems.append(
                        f"{paths[split]}: {row['id']} ({row['source']}) is damaged, or another image or label"
                    )
        for split, reader in readers.items():
            if (found := reader.num_records()) != sizes[split]:
                problems.append(f"{paths[split]}: has {found:,} records instead of {sizes[split]:,}")
            reader.close()
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        problems.append(f"{file} or its shards: cannot be read ({error})")
    return problems, sizes


def _is_as_stated(reader: Any, index: int, row: dict[str, Any], features: Any) -> bool:
    if index >= reader.num_records():
        return False
    try:
        stored = reader.read([index])[0]
    except RuntimeError:
        return False
    record = features.deserialize_example_np(stored, decoders={"image": tfds.decode.SkipDecoding()})
    return (hashlib.sha256(record["image"]).hexdigest(), int(record["label"])) == (row["sha256"], row["label"])


class _Progress:
    """Prints a line on the standard error from time to time."""

    def __init__(self, what: str, total: int, done: int) -> None:
        self._what, self._total, self._done = what, total, done
        self._begin = self._last = time.monotonic()

    def show(self, done: int, part: int) -> None:
        """Print the number of images, and the part of the total."""
        now = time.monotonic()
        if now - self._last >= _REPORT_SECONDS:
            self._last, speed = now, (done - self._done) / (now - self._begin)
            share = f", {part / self._total:.1%}" if self._total else ""
            print(f"{self._what}: {done:,} images, {speed:,.0f}/s{share}", file=sys.stderr, flush=True)
