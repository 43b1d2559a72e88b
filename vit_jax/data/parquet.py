"""Hugging Face image datasets in parquet files ("parquet:PATH"), such as a local copy of a repository of the Hub.

Parquet compresses the images of a row group together, so that one image costs reading its group. Groups are kept in
memory up to `CACHE_BYTES`: images in order are read once, images in random order a group at a time.
"""

import collections
import concurrent.futures
import functools
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vit_jax.data.depth import MOST_FILES
from vit_jax.data.images import UnreadableImage
from vit_jax.data.packed import Packed, PackedSource
from vit_jax.data.records import few
from vit_jax.files import is_mirrored, open_regular, parse_json, printable

CACHE_BYTES = 2**28
"""Images in memory, uncompressed, of all sources of a process; beside them each thread may read one group."""
MAX_GROUP_BYTES = 2**30
"""Limit of the images of one row group. The Hub writes groups of 100 images."""
_LABELS = ("label", "labels", "fine_label")  # the first that there is


class _File(NamedTuple):
    """A file in one state: groups of an earlier state are not used."""

    path: str
    size: int
    mtime_ns: int


class _Groups:
    """The images of the most recently used row groups."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes, self._lock = most_bytes, 0, threading.Lock()
        self._held = collections.OrderedDict[tuple[_File, int, str], tuple[concurrent.futures.Future[pa.Array], int]]()

    def get(self, file: _File, group: int, column: str) -> pa.Array:
        """Return the column as an array of bytes; several threads that want the same group read it once."""
        key = file, group, column
        with self._lock:
            if not (is_held := key in self._held):
                size = _column_bytes(_metadata(file), group, column)
                self._held[key] = concurrent.futures.Future(), size
                self._bytes += size
            self._held.move_to_end(key)
            images, _ = self._held[key]
            while self._bytes > self._most_bytes and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1][1]
        if not is_held:
            try:
                images.set_result(_read_group(file, group, column))
            except BaseException as error:
                images.set_exception(error)
                with self._lock:
                    self._bytes -= self._held.pop(key, (images, 0))[1]
        return images.result()


_GROUPS = _Groups(CACHE_BYTES)


def _now(path: str) -> _File:
    status = os.stat(path)
    return _File(path, status.st_size, status.st_mtime_ns)


def _readable(path: str) -> str | io.BufferedReader:
    """Return what the library opens: a path, or a file that lies in a bucket."""
    return open_regular(path) if is_mirrored(path) else path


@functools.lru_cache(1024)
def _metadata(file: _File) -> pq.FileMetaData:
    """Return the description at the end of a file; ValueError if it is no parquet file, or is cut off."""
    try:
        return pq.read_metadata(_readable(file.path))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file.path}: it is no complete parquet file ({error}). Copy it again.") from error


def _column_bytes(metadata: pq.FileMetaData, group: int, column: str) -> int:
    row_group = metadata.row_group(group)
    chunks = (row_group.column(number) for number in range(row_group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _read_group(file: _File, group: int, column: str) -> pa.Array:
    with pq.ParquetFile(_readable(file.path), metadata=_metadata(file)) as opened:
        table = opened.read_row_group(group, columns=[column], use_threads=False)
    array = table.column(0).combine_chunks()
    return array.field(0) if pa.types.is_struct(array.type) else array


class ParquetSource(PackedSource):
    """Images of parquet files.

    The key of a record is the name of its file, relative to the folder, and the number of its row.
    """

    def __init__(
        self, files: Sequence[str], column: str, class_names: tuple[str, ...], labels: np.ndarray, root: str
    ) -> None:
        self._column, self._states = column, [_now(file) for file in files]
        described = [_metadata(file) for file in self._states]
        rows = [[one.row_group(group).num_rows for group in range(one.num_row_groups)] for one in described]
        super().__init__(files, [*map(sum, rows)], class_names, labels, root)
        self._first_rows = [np.cumsum([0, *groups]) for groups in rows]  # of each group of a file

    def image_of(self, index: int) -> bytes:
        number, row = self._place_of(index)
        file, first_rows = self._states[number], self._first_rows[number]
        group = int(np.searchsorted(first_rows, row, side="right")) - 1
        try:
            image = _GROUPS.get(file, group, self._column)[row - int(first_rows[group])].as_py()
        except (OSError, pa.ArrowException) as error:
            raise UnreadableImage(f"Row group {group} of {printable(file.path)} cannot be read ({error})") from error
        if image is None:
            raise UnreadableImage("The file holds no bytes of this image")
        return image

    def key_of(self, index: int) -> bytes:
        file, row = self._place_of(index)
        return b"%b:%d" % (self._names[file], row)

    def surveyed(self) -> Sequence[int]:
        """Return records of the first group: each further one would be read for it."""
        sizes = (int(size) for first_rows in self._first_rows for size in np.diff(first_rows))
        return range(min(next(sizes, 0), MOST_FILES))


class Parquet(Packed):
    """Parquet files with a column of images and one of labels, named in the metadata that Hugging Face writes.

    Without it the columns are `image` and `label`, and classes are numbers or the texts of the labels.
    """

    kind, extension = "parquet", ".parquet"

    def require(self) -> None:
        super().require()
        first = self._facts(self.files[0])
        for file in self.files[1:]:
            for name, value in self._facts(file).items():
                if value != first[name]:
                    raise ValueError(
                        f"{file} and {self.files[0]} differ in their {name}: {few(value or (), repr)} and "
                        f"{few(first[name] or (), repr)}. Give files of one dataset."
                    )

    @property
    def names(self) -> tuple[str, ...] | None:
        feature = self._features.get(self._label_column, {})
        names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return tuple(names)
        if names is not None:
            raise ValueError(f"{self.files[0]}: the names of classes in its metadata are no list of texts.")
        return None

    def labels(self, files: Sequence[str]) -> np.ndarray:
        name, columns = self._label_column, []
        for file in files:
            column = pq.read_table(_readable(file), columns=[name], partitioning=None).column(0)
            if column.null_count:
                raise ValueError(f"{file}: {column.null_count:,} rows have no label in column {name!r}. Remove them.")
            columns.append(column.to_numpy())
        labels = np.concatenate(columns)
        return labels.astype(np.int64) if np.issubdtype(labels.dtype, np.integer) else labels.astype(str)

    def records(self, files: Sequence[str], class_names: tuple[str, ...], labels: np.ndarray) -> ParquetSource:
        for file, metadata in ((file, _metadata(_now(file))) for file in files):
            for group in range(metadata.num_row_groups):
                if (size := _column_bytes(metadata, group, self._image_path)) > MAX_GROUP_BYTES:
                    raise ValueError(
                        f"{file}: row group {group} holds {size / 2**30:.1f} GiB of images, which are read together. "
                        "Write the file with smaller groups: pyarrow.parquet.write_table(…, row_group_size=100)."
                    )
        return ParquetSource(files, self._image_path, class_names, labels, self.root)

    @functools.cached_property
    def _schema(self) -> pa.Schema:
        return _metadata(_now(self.files[0])).schema.to_arrow_schema()

    @functools.cached_property
    def _features(self) -> dict[str, dict[str, object]]:
        """The columns as Hugging Face describes them; empty without its metadata."""
        try:
            info = parse_json((self._schema.metadata or {}).get(b"huggingface", b"{}"))
            features = info.get("info", {}).get("features", {})
            return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{self.files[0]}: its metadata 'huggingface' are damaged ({error}).") from error

    @functools.cached_property
    def _image_path(self) -> str:
        """The column with the bytes of images, as parquet writes its path."""
        stated = [name for name, feature in self._features.items() if feature.get("_type") == "Image"]
        for name in (*stated, "image"):
            if name not in self._schema.names:
                continue
            kind = self._schema.field(name).type
            if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_bytes(kind.field("bytes").type):
                return f"{name}.bytes"
            if _is_bytes(kind):
                return name
        raise ValueError(
            f"{self.files[0]} has no column of images, with their bytes; it has {few(self._described())}. Name it "
            "'image', a struct with the field 'bytes'."
        )

    @functools.cached_property
    def _label_column(self) -> str:
        known = [name for name, feature in self._features.items() if feature.get("_type") == "ClassLabel"]
        wanted = (self.label,) if self.label else (*_LABELS, *known)
        for name in wanted:
            if name in self._schema.names and _is_label(self._schema.field(name).type):
                return name
        raise ValueError(
            f"{self.files[0]} has no column of labels {few(wanted, repr)}, integers or text; it has "
            f"{few(self._described())}. Name it: parquet:PATH#COLUMN."
        )

    def _described(self) -> list[str]:
        return [f"{field.name!r} ({field.type})" for field in self._schema]

    def _facts(self, file: str) -> dict[str, tuple[str, ...] | None]:
        other = Parquet(Path(f"{file}{self.suffix}"))
        return {"columns": (other._image_path, other._label_column), "names of classes": other.names}


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_label(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
