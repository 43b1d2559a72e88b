"""Records of tar archives as shuffled ArrayRecord files of TFDS with a manifest: write and check."""

import collections
import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from vit_jax.data.subset import find_first_of_class
from vit_jax.data.workers import map_in_threads
from vit_jax.storage.files import JsonObject
from vit_jax.tools.prepare.scatter import NOTES, Order, Scatter, Stored, sort_records
from vit_jax.tools.prepare.tar_reading import TRAIN, VALIDATION, Class, Note, Options, write_note

VERSION = "1.0.0"
MANIFEST = "manifest"
DUPLICATE = "duplicate"
SMALL_CLASS = "small class"

_ROW_GROUP = 10_000  # rows of the manifest in memory
# TFDS compresses, which makes images no smaller and takes four times as long
_FORMAT = "group_size:1,uncompressed"
_COLUMNS = pa.schema(
    {
        "id": pa.string(),
        "split": pa.string(),
        "label": pa.int32(),
        "class": pa.string(),
        "source": pa.string(),
        "sha256": pa.string(),
        "size": pa.int64(),
    }
)


class _Plan(NamedTuple):
    """Classes and splits of the dataset, chosen when every record is known.

    Attributes:
      order: all records.
      class_names: names of the classes by number.
      number: number of each class of the archives; -1 for a skipped class.
      is_in: bool (N,) by split, True for records of `order` in the split.
      dropped: number of images of each skipped class.
    """

    order: Order
    class_names: tuple[str, ...]
    number: np.ndarray
    is_in: dict[str, np.ndarray]
    dropped: dict[str, int]

    def find_split(self, record: int) -> str | None:
        """Return the split of a record of `order`; None for a skipped record."""
        for split, is_in in self.is_in.items():
            if is_in[record]:
                return split
        return None

    def read(
        self,
        scatter: Scatter,
        bucket: BinaryIO,
        record: int,
    ) -> Stored:
        """Return a record of `order` from its bucket."""
        offset = int(self.order.offset[record])
        size = int(self.order.size[record])
        return scatter.read(bucket, offset, size)

    def find_starts(self) -> dict[str, np.ndarray]:
        """Return for each split the number of its first record in each bucket, and its size."""
        starts = {}
        for split, is_in in self.is_in.items():
            number_before = np.append(0, np.cumsum(is_in))
            starts[split] = number_before[self.order.bounds]
        return starts


def plan(scatter: Scatter, options: Options) -> _Plan:
    """Number the classes and divide the records among the splits.

    Raises:
      ValueError: fewer than two classes have images.
    """
    order = sort_records(scatter)
    labels = [label for label, _ in scatter.state["classes"]]
    sizes = np.bincount(order.label[order.is_first], minlength=len(labels))
    is_kept = sizes >= max(options.min_class_images, 1)

    kept = []
    dropped = {}
    for label, is_label_kept, size in zip(labels, is_kept, sizes, strict=True):
        if is_label_kept:
            kept.append(label)
        else:
            dropped[str(label)] = int(size)
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept)} classes have {options.min_class_images} images or more, "
            f"of {scatter.num_rows:,} images that can be used; at least two classes are needed. "
            f"{scatter.folder / NOTES} has the skipped files."
        )

    class_names = _name_classes(options, labels, kept)
    numbers = {name: number for number, name in enumerate(class_names)}
    number = np.full(len(labels), -1)
    for index in np.flatnonzero(is_kept).tolist():
        number[index] = numbers[str(labels[index])]

    is_used = order.is_first & is_kept[order.label]
    is_in = _divide(order, np.flatnonzero(is_used), sizes, options)
    return _Plan(order, class_names, number, is_in, dropped)


def _divide(
    order: Order,
    used: np.ndarray,
    sizes: np.ndarray,
    options: Options,
) -> dict[str, np.ndarray]:
    """Divide the used records of `order` among the splits, as `_Plan.is_in` has them.

    `sizes` are the numbers of images of the classes, of which at most half are held out.
    """
    num_records = len(order.label)
    is_in = {split: np.zeros(num_records, bool) for split in options.splits}
    is_in[TRAIN][used] = True
    if options.holdout_per_class:
        counts = np.minimum(options.holdout_per_class, sizes // 2)
        first = find_first_of_class(order.label[used], counts)
        held_out = used[first]
        is_in[VALIDATION][held_out] = True
        is_in[TRAIN][held_out] = False
    return is_in


def _name_classes(
    options: Options,
    labels: Sequence[Class],
    kept: Sequence[Class],
) -> tuple[str, ...]:
    """Return the names of classes by number.

    The numbers are those of `options.classes`, else those in the files, else positions in the
    sorted names of the classes that are kept.
    """
    if options.classes:
        return options.classes
    if isinstance(kept[0], int):
        largest = max(map(int, labels))
        return tuple(map(str, range(largest + 1)))
    return tuple(sorted(map(str, kept)))


def write(
    scatter: Scatter,
    name: str,
    options: Options,
    show: Callable[[int, float], None],
) -> dict[str, int]:
    """Write the files of the dataset that are missing, bucket by bucket.

    Returns:
      Counts as of `tar_dataset.prepare_tars`.
    """
    planned = plan(scatter, options)
    counts = collections.Counter[str](scatter.state["counts"])
    if not scatter.state["is_read"]:
        counts += _note_skipped(scatter, planned)
        scatter.state["is_read"] = True
        scatter.state["counts"] = counts
        scatter.commit()

    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(),
            "label": tfds.features.ClassLabel(names=planned.class_names),
            "file_name": tfds.features.Text(),
        }
    )
    starts = planned.find_starts()
    totals = {split: int(start[-1]) for split, start in starts.items()}
    total = max(sum(totals.values()), 1)
    (scatter.folder / MANIFEST).mkdir(exist_ok=True)

    def write_missing(bucket: int) -> int:
        first = {}
        num_records = 0
        for split, start in starts.items():
            begin, end = start[bucket : bucket + 2].tolist()
            first[split] = begin
            num_records += end - begin

        files = _list_files(
            scatter.folder,
            name,
            list(starts),
            bucket,
            scatter.num_buckets,
        )
        if not all(file.exists() for file in files):
            _write_bucket(scatter, planned, features, bucket, first, files)
        scatter.bucket(bucket).unlink(missing_ok=True)
        return num_records

    done = 0
    for count in map_in_threads(write_missing, range(scatter.num_buckets)):
        done += count
        show(done, done / total)
    _write_metadata(scatter, name, features, starts)
    return {**totals, "classes": len(planned.class_names), **counts}


def _write_metadata(
    scatter: Scatter,
    name: str,
    features: tfds.features.FeaturesDict,
    starts: Mapping[str, np.ndarray],
) -> None:
    """Write the files of TFDS that describe the dataset."""
    infos = []
    for split, start in starts.items():
        num_bytes = 0
        for bucket in range(scatter.num_buckets):
            path = shard_path(
                scatter.folder,
                name,
                split,
                bucket,
                scatter.num_buckets,
            )
            num_bytes += path.stat().st_size
        info = tfds.core.SplitInfo(
            name=split,
            shard_lengths=np.diff(start).tolist(),
            num_bytes=num_bytes,
        )
        infos.append(info)
    tfds.folder_dataset.write_metadata(
        data_dir=scatter.folder,
        features=features,
        split_infos=infos,
        version=VERSION,
        check_data=False,
    )


def _note_skipped(scatter: Scatter, planned: _Plan) -> collections.Counter[str]:
    """List repeated names of members and classes with few images, which are known at the end."""
    order = planned.order
    counts = collections.Counter[str]()
    for record in np.flatnonzero(~order.is_first).tolist():
        number = int(np.searchsorted(order.bounds, record, "right")) - 1
        with scatter.open_bucket(number) as bucket:
            name = planned.read(scatter, bucket, record).name
        detail = "another member has this name; the first is in the dataset"
        write_note(scatter, Note(name, DUPLICATE, detail))
        counts[DUPLICATE] += 1

    for name, size in planned.dropped.items():
        write_note(scatter, Note(name, SMALL_CLASS, f"{size:,} images"))
        counts[SMALL_CLASS] += 1
    return counts


def shard_path(
    folder: Path,
    name: str,
    split: str,
    number: int,
    count: int,
) -> Path:
    """Return the path of a shard of a split, as TFDS names it."""
    return folder / f"{name}-{split}.array_record-{number:05d}-of-{count:05d}"


def manifest_path(folder: Path, number: int, count: int) -> Path:
    """Return the path of the manifest of one shard of each split."""
    return folder / MANIFEST / f"{number:05d}-of-{count:05d}.parquet"


def _list_files(
    folder: Path,
    name: str,
    splits: Sequence[str],
    number: int,
    count: int,
) -> list[Path]:
    """Return the shards of a bucket, in the order of the splits, and its manifest."""
    files = [shard_path(folder, name, split, number, count) for split in splits]
    return [*files, manifest_path(folder, number, count)]


def _write_bucket(
    scatter: Scatter,
    planned: _Plan,
    features: tfds.features.FeaturesDict,
    number: int,
    starts: Mapping[str, int],
    files: Sequence[Path],
) -> None:
    """Write one shard of each split and their manifest, each under its name when it is complete.

    `starts` has the number of the first record of each split; `files` are as of `_list_files`.
    """
    unfinished = [file.with_name(f"{file.name}.tmp") for file in files]
    *shards, manifest = unfinished
    writers = {}
    for split, path in zip(starts, shards, strict=True):
        writers[split] = array_record_module.ArrayRecordWriter(str(path), _FORMAT)
    serializer = ExampleSerializer(features.get_serialized_info())

    next_index = dict(starts)
    rows = list[JsonObject]()
    for split, label, stored in _read_bucket(scatter, planned, number):
        example = {
            "image": stored.image,
            "label": label,
            "file_name": stored.name,
        }
        message = serializer.get_tf_example(features.encode_example(example))
        # The order of fields is random by default, as TFDS writes them.
        content = message.SerializeToString(deterministic=True)
        with _convert_errors(scatter.folder):
            writers[split].write(content)
        rows.append(
            {
                "id": f"{split}:{next_index[split]}",
                "split": split,
                "label": label,
                "class": planned.class_names[label],
                "source": stored.name,
                "sha256": stored.sha256.hex(),
                "size": len(stored.image),
            }
        )
        next_index[split] += 1

    table = pa.Table.from_pylist(rows, schema=_COLUMNS)
    pq.write_table(
        table,
        manifest,
        row_group_size=_ROW_GROUP,
        compression="zstd",
    )
    with _convert_errors(scatter.folder):
        for writer in writers.values():
            writer.close()
    for file, final in zip(unfinished, files, strict=True):
        file.replace(final)


def _read_bucket(
    scatter: Scatter,
    planned: _Plan,
    number: int,
) -> Iterator[tuple[str, int, Stored]]:
    """Yield split, label and content of the records of a bucket, without skipped records."""
    order = planned.order
    begin, end = order.bounds[number : number + 2].tolist()
    if begin == end:  # the bucket has no file
        return
    with scatter.open_bucket(number) as bucket:
        if hasattr(os, "posix_fadvise"):
            # Records are read in a random order.
            os.posix_fadvise(bucket.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        for record in range(begin, end):
            split = planned.find_split(record)
            if split is not None:
                label = int(planned.number[order.label[record]])
                yield split, label, planned.read(scatter, bucket, record)


@contextlib.contextmanager
def _convert_errors(folder: Path) -> Iterator[None]:
    """Raise OSError, as for other files, if ArrayRecord raises RuntimeError: on a full disk."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, f"cannot be written ({error})", str(folder)) from error


def check_shard(
    folder: Path,
    name: str,
    splits: Sequence[str],
    features: tfds.features.FeaturesDict,
    number: int,
    count: int,
) -> tuple[list[str], collections.Counter[str]]:
    """Compare one shard of each split with their manifest.

    Returns:
      problems in words, and the number of records by split.
    """
    problems = list[str]()
    sizes = collections.Counter[str]()
    manifest = manifest_path(folder, number, count)
    paths = {}
    readers = {}
    for split in splits:
        paths[split] = shard_path(folder, name, split, number, count)
        readers[split] = array_record_module.ArrayRecordReader(str(paths[split]))
    try:
        for batch in pq.ParquetFile(manifest).iter_batches(_ROW_GROUP):
            for row in batch.to_pylist():
                split = row["split"]
                if not _matches_manifest(readers[split], sizes[split], row, features):
                    problems.append(
                        f"{paths[split]}: {row['id']} ({row['source']}) "
                        "is damaged, or another image or label"
                    )
                sizes[split] += 1
        for split, reader in readers.items():
            num_records = reader.num_records()
            if num_records != sizes[split]:
                problems.append(
                    f"{paths[split]}: has {num_records:,} records instead of {sizes[split]:,}"
                )
            reader.close()
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        problems.append(f"{manifest} or its shards: cannot be read ({error})")
    return problems, sizes


def _matches_manifest(
    reader: array_record_module.ArrayRecordReader,
    index: int,
    row: JsonObject,
    features: tfds.features.FeaturesDict,
) -> bool:
    """Return True if a record has the image and the label of a row of the manifest."""
    if index >= reader.num_records():
        return False
    try:
        stored = reader.read([index])[0]
    except RuntimeError:
        return False
    decoders = {"image": tfds.decode.SkipDecoding()}
    record = features.deserialize_example_np(stored, decoders=decoders)
    if int(record["label"]) != row["label"]:
        return False
    digest = hashlib.sha256(record["image"]).hexdigest()
    return digest == row["sha256"]
