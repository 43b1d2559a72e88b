"""Write the records of tar archives as shuffled ArrayRecord files of TFDS with a manifest, and check such files."""

import collections
import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from vit_jax.data.subset import find_first_of_class
from vit_jax.data.workers import map_in_threads
from vit_jax.tools.prepare.scatter import NOTES, Order, Scatter, order_of
from vit_jax.tools.prepare.tar_reading import TRAIN, VALIDATION, Noted, Options, note

VERSION = "1.0.0"
MANIFEST = "manifest"
DUPLICATE = "duplicate"
SMALL_CLASS = "small class"

_ROW_GROUP = 10_000  # of the manifest, written at once
# TFDS compresses, which makes images no smaller and takes four times as long
_FORMAT = "group_size:1,uncompressed"
_COLUMNS = pa.schema(
    {"id": pa.string(), "split": pa.string(), "label": pa.int32(), "class": pa.string()}
    | {"source": pa.string(), "sha256": pa.string(), "size": pa.int64()}
)


class _Plan(NamedTuple):
    """Classes and splits of the dataset, chosen when every record is known."""

    order: Order
    class_names: tuple[str, ...]
    number: np.ndarray  # of each class of the archives; -1 for a skipped one
    is_in: dict[str, np.ndarray]  # by split: the records of `order` in it, bool (N,)
    dropped: dict[str, int]  # sizes of skipped classes


def plan(scatter: Scatter, options: Options) -> _Plan:
    """Number the classes and divide the records among the splits.

    Numbers are those of `options.classes`, else those that files state, else places in the sorted
    names of the classes that are not skipped.

    Raises:
      ValueError: fewer than two classes have images.
    """
    order = order_of(scatter)
    labels = [label for label, _ in scatter.state["classes"]]
    sizes = np.bincount(order.label[order.is_first], minlength=len(labels))
    is_kept = sizes >= max(options.min_class_images, 1)
    kept = [label for label, keep in zip(labels, is_kept.tolist(), strict=True) if keep]
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept)} classes have {options.min_class_images} images or more, of {scatter.num_rows:,} images that "
            f"can be used; at least two classes are needed. {scatter.folder / NOTES} has the skipped files."
        )
    if options.classes:
        class_names = options.classes
    elif isinstance(kept[0], int):
        class_names = tuple(map(str, range(max(labels) + 1)))
    else:
        class_names = tuple(sorted(kept))
    numbers = {name: number for number, name in enumerate(class_names)}
    number = np.array(
        [numbers[str(label)] if keep else -1 for label, keep in zip(labels, is_kept, strict=True)]
    )
    used = np.flatnonzero(order.is_first & is_kept[order.label])
    counts = np.minimum(options.holdout_per_class, sizes // 2)
    is_in = {split: np.zeros(len(order.label), bool) for split in options.splits}
    is_in[TRAIN][used] = True
    if options.holdout_per_class:
        held = used[find_first_of_class(order.label[used], counts)]
        is_in[VALIDATION][held] = True
        is_in[TRAIN][held] = False
    dropped = {
        str(label): int(size)
        for label, keep, size in zip(labels, is_kept, sizes, strict=True)
        if not keep
    }
    return _Plan(order, class_names, number, is_in, dropped)


def write(
    scatter: Scatter, name: str, options: Options, show: Callable[[int, float], None]
) -> dict[str, int]:
    """Write the files of the dataset that are missing, bucket by bucket.

    Returns:
      Counts as of `tar_dataset.prepare_tars`.
    """
    planned = plan(scatter, options)
    num = scatter.num_buckets
    counts = collections.Counter(scatter.state["counts"])
    if not scatter.state["is_read"]:
        counts += _note_rest(scatter, planned)
        scatter.state |= {"is_read": True, "counts": counts}
        scatter.commit()
    label = tfds.features.ClassLabel(names=planned.class_names)
    kinds = {"image": tfds.features.Image(), "label": label, "file_name": tfds.features.Text()}
    features = tfds.features.FeaturesDict(kinds)
    starts = {
        split: np.append(0, np.cumsum(is_in))[planned.order.bounds]
        for split, is_in in planned.is_in.items()
    }
    totals = {split: int(start[-1]) for split, start in starts.items()}
    (scatter.folder / MANIFEST).mkdir(exist_ok=True)

    def write_missing(bucket: int) -> int:
        files = [*(shard(scatter.folder, name, split, bucket, num) for split in totals)]
        files.append(manifest(scatter.folder, bucket, num))
        first = {split: int(start[bucket]) for split, start in starts.items()}
        if not all(file.exists() for file in files):
            _write_bucket(scatter, planned, features, bucket, first, files)
        scatter.bucket(bucket).unlink(missing_ok=True)
        return sum(int(start[bucket + 1]) for start in starts.values()) - sum(first.values())

    done = 0
    for count in map_in_threads(write_missing, range(num)):
        done += count
        show(done, done / max(sum(totals.values()), 1))
    infos = []
    for split, start in starts.items():
        num_bytes = sum(
            shard(scatter.folder, name, split, k, num).stat().st_size for k in range(num)
        )
        infos.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=np.diff(start).tolist(), num_bytes=num_bytes
            )
        )
    tfds.folder_dataset.write_metadata(
        data_dir=scatter.folder,
        features=features,
        split_infos=infos,
        version=VERSION,
        check_data=False,
    )
    return {**totals, "classes": len(planned.class_names), **counts}


def _note_rest(scatter: Scatter, planned: _Plan) -> collections.Counter[str]:
    """List repeated names of members and classes with few images, which are known at the end."""
    order = planned.order
    counts = collections.Counter[str]()
    for row in np.flatnonzero(~order.is_first).tolist():
        with scatter.open_bucket(int(np.searchsorted(order.bounds, row, "right")) - 1) as bucket:
            stored = scatter.read(bucket, int(order.offset[row]), int(order.size[row]))
        note(
            scatter,
            Noted(
                stored.name, DUPLICATE, "another member has this name; the first is in the dataset"
            ),
        )
        counts[DUPLICATE] += 1
    for name, size in planned.dropped.items():
        note(scatter, Noted(name, SMALL_CLASS, f"{size:,} images"))
        counts[SMALL_CLASS] += 1
    return counts


def shard(folder: Path, name: str, split: str, number: int, count: int) -> Path:
    """Return a file of a split, named as TFDS does."""
    return folder / f"{name}-{split}.array_record-{number:05d}-of-{count:05d}"


def manifest(folder: Path, number: int, count: int) -> Path:
    """Return the manifest of one shard of each split."""
    return folder / MANIFEST / f"{number:05d}-of-{count:05d}.parquet"


def _write_bucket(
    scatter: Scatter,
    planned: _Plan,
    features: Any,
    number: int,
    starts: dict[str, int],
    files: Sequence[Path],
) -> None:
    """Write one shard of each split and their manifest, each under its name when it is complete."""
    order = planned.order
    begin, end = map(int, order.bounds[number : number + 2])
    unfinished = [file.with_name(f"{file.name}.tmp") for file in files]
    files_of = dict(zip(starts, unfinished, strict=False))
    writers = {
        split: array_record_module.ArrayRecordWriter(str(file), _FORMAT)
        for split, file in files_of.items()
    }
    serializer = ExampleSerializer(features.get_serialized_info())
    next_index = dict(starts)
    rows = list[dict[str, Any]]()
    with scatter.open_bucket(number) if begin < end else io.BytesIO() as bucket:
        if begin < end and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(bucket.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # it is read at random
        for row in range(begin, end):
            split = next((split for split in starts if planned.is_in[split][row]), None)
            if split is None:
                continue
            stored = scatter.read(bucket, int(order.offset[row]), int(order.size[row]))
            label = int(planned.number[order.label[row]])
            example = {"image": stored.image, "label": label, "file_name": stored.name}
            message = serializer.get_tf_example(features.encode_example(example))
            with _written(scatter.folder):
                writers[split].write(
                    message.SerializeToString(deterministic=True)
                )  # TFDS leaves order to chance
            named = {"id": f"{split}:{next_index[split]}", "split": split, "label": label}
            named |= {"class": planned.class_names[label], "source": stored.name}
            rows.append(named | {"sha256": stored.sha256.hex(), "size": len(stored.image)})
            next_index[split] += 1
    table = pa.Table.from_pylist(rows, schema=_COLUMNS)
    pq.write_table(table, unfinished[-1], row_group_size=_ROW_GROUP, compression="zstd")
    with _written(scatter.folder):
        for writer in writers.values():
            writer.close()
    for file, final in zip(unfinished, files, strict=True):
        file.replace(final)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raise OSError, as for other files, if ArrayRecord raises RuntimeError: on a full disk."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, f"cannot be written ({error})", str(folder)) from error


def check_shard(
    folder: Path, name: str, splits: Sequence[str], features: Any, number: int, count: int
) -> tuple[list[str], collections.Counter[str]]:
    """Compare one shard of each split with their manifest; returns problems, and the number of records by split."""
    problems = list[str]()
    sizes = collections.Counter[str]()
    file = manifest(folder, number, count)
    paths = {split: shard(folder, name, split, number, count) for split in splits}
    readers = {
        split: array_record_module.ArrayRecordReader(str(path)) for split, path in paths.items()
    }
    try:
        for batch in pq.ParquetFile(file).iter_batches(_ROW_GROUP):
            for row in batch.to_pylist():
                split = row["split"]
                if not _is_as_stated(readers[split], sizes[split], row, features):
                    named = f"{row['id']} ({row['source']})"
                    problems.append(
                        f"{paths[split]}: {named} is damaged, or another image or label"
                    )
                sizes[split] += 1
        for split, reader in readers.items():
            if (count := reader.num_records()) != sizes[split]:
                problems.append(
                    f"{paths[split]}: has {count:,} records instead of {sizes[split]:,}"
                )
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
    return (hashlib.sha256(record["image"]).hexdigest(), int(record["label"])) == (
        row["sha256"],
        row["label"],
    )
