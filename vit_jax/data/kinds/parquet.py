"""Hugging Face image datasets in parquet files ("parquet:PATH"), such as a copy of the Hub.

Parquet compresses the images of a row group together, so that one image costs reading its group.
Groups are kept in memory up to `CACHE_BYTES`: images in order are read once, images in random order
a group at a time.
"""

import base64
import collections
import concurrent.futures
import contextlib
import functools
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vit_jax.data.decoding.depth import MOST_FILES
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import MAX_NAME_BYTES
from vit_jax.data.kinds.listing import warn_once
from vit_jax.data.kinds.packed import Packed, PackedSource, require_distinct_names
from vit_jax.data.kinds.parquet_layout import Chunk, Layout, measure_pages, read_layout
from vit_jax.data.records import MAX_CLASSES, few
from vit_jax.storage.files import JsonObject, is_mirrored, open_regular, parse_json
from vit_jax.storage.gcs_client import NoAnswer
from vit_jax.text.printable import first_line, printable

CACHE_BYTES = 2**28
"""Limit of the uncompressed images in memory, of all sources of a process.

Each thread may read one more group.
"""
MAX_GROUP_BYTES = 2**30
"""Limit of the images of one row group. The Hub writes groups of 100 images."""
_LABELS = ("label", "labels", "fine_label")
"""Columns of labels, of which the first present one is read."""
MAX_LABEL_BYTES = 2**30
"""Limit of the labels of one row group."""
_HUGGING_FACE = b"huggingface"
"""Key of the metadata of the columns."""
_SCHEMA_COPY = b"ARROW:schema"
"""Key of a copy of the schema with all metadata, by pyarrow."""
_LABELS_AT_ONCE = 2**13
"""Number of rows that are read for their labels at once."""
_DAMAGE = (OSError, pa.ArrowException, ValueError, KeyError, IndexError, OverflowError, MemoryError)
"""Errors of the library for damaged files."""


class _File(NamedTuple):
    """A file in one state: groups of an earlier state are not used."""

    path: str
    size: int
    mtime_ns: int


class _Group(NamedTuple):
    """The images of a row group, in memory or being read.

    Attributes:
      images: bytes of each image, None for one without.
      num_bytes: size that the file states, or the actual size once they are read.
    """

    images: concurrent.futures.Future[list[bytes | None]]
    num_bytes: int


class _Groups:
    """The images of the most recently used row groups."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._held = collections.OrderedDict[tuple[_File, int, str], _Group]()

    def get(self, file: _File, group: int, column: str) -> list[bytes | None]:
        """Return the images of a column; one of several threads reads a group."""
        key = (file, group, column)
        with self._lock:
            is_held = key in self._held
            if not is_held:
                size = _find_chunk(file, group, column).uncompressed
                self._hold(key, _Group(concurrent.futures.Future(), size))
            self._held.move_to_end(key)
            images = self._held[key].images
            self._shrink()
        if not is_held:
            self._read(key, images)
        return images.result()

    def _read(
        self,
        key: tuple[_File, int, str],
        images: concurrent.futures.Future[list[bytes | None]],
    ) -> None:
        try:
            content = _read_group(*key)
        except BaseException as error:
            images.set_exception(error)
            with self._lock:
                self._forget(key)
            return
        images.set_result(content)
        num_bytes = sum(map(len, filter(None, content)))  # the file may state another size
        with self._lock:
            if key in self._held:
                self._hold(key, _Group(images, num_bytes))
                self._shrink()

    def _hold(self, key: tuple[_File, int, str], group: _Group) -> None:
        if key in self._held:
            self._bytes -= self._held[key].num_bytes
        self._held[key] = group
        self._bytes += group.num_bytes

    def _forget(self, key: tuple[_File, int, str]) -> None:
        if key in self._held:
            self._bytes -= self._held.pop(key).num_bytes

    def _shrink(self) -> None:
        while self._bytes > self._most_bytes and len(self._held) > 1:
            self._forget(next(iter(self._held)))


_GROUPS = _Groups(CACHE_BYTES)


def _stat_file(path: str) -> _File:
    status = os.stat(path)
    return _File(path, status.st_size, status.st_mtime_ns)


def _open_if_remote(path: str) -> str | io.BufferedReader:
    """Return the argument of the library: a path, or an open file of a bucket."""
    if is_mirrored(path):
        return open_regular(path)
    return path


@contextlib.contextmanager
def _explain_damage(file: str, part: str) -> Iterator[None]:
    """Raise ValueError with the file's name for the errors of the library on damaged files."""
    try:
        yield
    except NoAnswer:
        raise
    except _DAMAGE as error:
        reason = printable(first_line(error)).rstrip(".")
        raise ValueError(
            f"{file}: {part} cannot be read ({reason}). Copy the file again, or write it anew.",
        ) from error


class _Description(NamedTuple):
    """The footer of a file.

    Attributes:
      metadata: the footer for the library. Do not call `column` of its row groups: that method
        ends the process for damaged files.
      layout: sizes.
    """

    metadata: pq.FileMetaData
    layout: Layout


@functools.lru_cache(1024)
def _describe(file: _File) -> _Description:
    """Return the footer of a file.

    Raises:
      ValueError: it is no parquet file, or is cut off or damaged.
    """
    try:
        layout = read_layout(file.path)
        metadata = pq.read_metadata(_open_if_remote(file.path))
    except NoAnswer:
        raise
    except _DAMAGE as error:
        reason = printable(first_line(error)).rstrip(".")
        raise ValueError(
            f"{file.path}: it is no complete parquet file ({reason}). Copy it again.",
        ) from error
    return _Description(metadata, layout)


def _find_chunk(file: _File, group: int, column: str) -> Chunk:
    """Return the sizes of a column in a row group.

    Raises:
      ValueError: the footer has none.
    """
    chunks = _describe(file).layout.groups[group].chunks
    if column not in chunks:
        raise ValueError(
            f"{file.path}: row group {group} has no column {column!r}. Copy the file again.",
        )
    return chunks[column]


def _read_group(file: _File, group: int, column: str) -> list[bytes | None]:
    """Return the images of a row group.

    Raises:
      ValueError: their actual size is larger than `MAX_GROUP_BYTES`, or they are more or
        fewer than it states.
    """
    metadata, layout = _describe(file)
    measure_pages(file.path, _find_chunk(file, group, column), MAX_GROUP_BYTES)

    images = list[bytes | None]()
    num_bytes = 0
    opened = pq.ParquetFile(
        _open_if_remote(file.path),
        metadata=metadata,
        page_checksum_verification=True,
    )
    with opened:
        # One by one: a page may hold one image that many rows repeat.
        batches = opened.iter_batches(
            1,
            row_groups=[group],
            columns=[column],
            use_threads=False,
        )
        for batch in batches:
            array = batch.column(0)
            if pa.types.is_struct(array.type):
                array = array.field(0)
            image = array[0].as_py()
            num_bytes += len(image or b"")
            if num_bytes > MAX_GROUP_BYTES:
                raise ValueError(f"it holds more than {MAX_GROUP_BYTES / 2**30:g} GiB of images")
            images.append(image)

    stated = layout.groups[group].num_rows
    if len(images) != stated:
        raise ValueError(f"it holds {len(images):,} images, and the footer states {stated:,}")
    return images


def _count_missing(file: str, column: str) -> int:
    """Return the number of rows without bytes that the statistics in the footer state."""
    state = _stat_file(file)
    num_groups = len(_describe(state).layout.groups)
    num_missing = 0
    for group in range(num_groups):
        chunk = _find_chunk(state, group, column)
        num_missing += chunk.num_missing or 0
    return num_missing


class ParquetSource(PackedSource):
    """Images of parquet files.

    The key of a record is the name of its file, relative to the folder, and the number of its row.
    """

    def __init__(
        self,
        files: Sequence[str],
        column: str,
        class_names: tuple[str, ...],
        labels: np.ndarray,
        root: str,
    ) -> None:
        self._column = column
        self._states = [_stat_file(file) for file in files]
        rows_of_files = []
        for state in self._states:
            groups = _describe(state).layout.groups
            rows_of_files.append([group.num_rows for group in groups])
        sizes = list(map(sum, rows_of_files))
        super().__init__(files, sizes, class_names, labels, root)
        if len(labels) != self._firsts[-1]:
            raise ValueError(
                f"{few(files)}: {len(labels):,} labels are of {self._firsts[-1]:,} rows. "
                "Copy them again.",
            )
        # The first row of each group, by file.
        self._first_rows = [np.cumsum([0, *num_rows]) for num_rows in rows_of_files]

    def image_of(self, index: int) -> bytes:
        number, row = self._place_of(index)
        file = self._states[number]
        first_rows = self._first_rows[number]
        group = int(np.searchsorted(first_rows, row, side="right")) - 1

        place = f"Row group {group} of column {self._column!r} of {printable(file.path)}"
        try:
            images = _GROUPS.get(file, group, self._column)
        except NoAnswer:
            raise
        except _DAMAGE as error:
            raise UnreadableImage(
                f"{place} cannot be read ({printable(first_line(error))})",
            ) from error
        image = images[row - int(first_rows[group])]
        if image is None:
            name = printable(file.path)
            raise UnreadableImage(
                f"Row {row} of column {self._column!r} of {name} holds no bytes of an image",
            )
        return image

    def key_of(self, index: int) -> bytes:
        file, row = self._place_of(index)
        return b"%b:%d" % (self._names[file], row)

    def list_surveyed(self) -> Sequence[int]:
        """Return records of the first group: others would have to be read for this."""
        for first_rows in self._first_rows:
            for size in np.diff(first_rows):
                return range(min(int(size), MOST_FILES))
        return range(0)


class Parquet(Packed):
    """Parquet files with a column of images and one of labels.

    The metadata that Hugging Face writes name them. Without these the columns are `image` and
    `label`, and classes are numbers or the texts of the labels.
    """

    kind = "parquet"
    extension = ".parquet"
    card_features: Mapping[str, JsonObject] = {}
    """Columns that a card describes, for files without metadata of Hugging Face."""

    def require(self) -> None:
        super().require()
        self._require_same_facts(self.files)

    def _require_same_facts(self, files: Sequence[str]) -> None:
        """Raise ValueError for a file with other columns or classes than the first one."""
        first = self._read_facts(self._schema_file)
        for file in files:
            if file == self._schema_file:
                continue
            for name, value in self._read_facts(file).items():
                if value != first[name]:
                    raise ValueError(
                        f"{file} and {self._schema_file} differ in their {name}: "
                        f"{few(value or (), repr)} and {few(first[name] or (), repr)}. "
                        "Give files of one dataset.",
                    )

    @property
    def _schema_file(self) -> str:
        """The file whose columns and metadata stand for those of all."""
        return self.files[0]

    @property
    def names(self) -> tuple[str, ...] | None:
        feature = self._features.get(self._label_column, {})
        if feature.get("_type") != "ClassLabel":
            return None
        names = feature.get("names")
        if names is None:
            return None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{self._schema_file}: the names of classes in its metadata are no list of texts.",
            )
        require_distinct_names(
            f"{self._schema_file}, metadata of column {self._label_column!r}", names
        )
        return tuple(names)

    def labels(self, files: Sequence[str]) -> np.ndarray:
        labels = [_read_labels(file, self._label_column) for file in map(_stat_file, files)]
        return np.concatenate(labels)

    def records(
        self,
        files: Sequence[str],
        class_names: tuple[str, ...],
        labels: np.ndarray,
    ) -> ParquetSource:
        self._require_small_groups(files)
        self._require_bytes(files, len(labels))
        return ParquetSource(files, self._image_path, class_names, labels, self.root)

    def _require_small_groups(self, files: Sequence[str]) -> None:
        for file in map(_stat_file, files):
            for group in range(len(_describe(file).layout.groups)):
                size = _find_chunk(file, group, self._image_path).uncompressed
                if size > MAX_GROUP_BYTES:
                    raise ValueError(
                        f"{file.path}: row group {group} holds {size / 2**30:.1f} GiB of images, "
                        "which are read together. Write the file with smaller groups: "
                        "pyarrow.parquet.write_table(…, row_group_size=100).",
                    )

    def _require_bytes(self, files: Sequence[str], num_rows: int) -> None:
        """Reject files that hold only the paths of images; warn of rows without bytes."""
        incomplete = []
        num_missing = 0
        for file in files:
            count = _count_missing(file, self._image_path)
            num_missing += count
            if count:
                incomplete.append(file)
        if not incomplete:
            return
        without = few(incomplete)
        column = f"column {self._image_path!r}"
        if num_missing >= num_rows:
            raise ValueError(
                f"{without}: {column} holds no bytes in all {num_rows:,} rows. Store the files of "
                "the images in it, or list their paths in a table: csv:FILE.",
            )
        warn_once(
            f"{without}: {column} holds no bytes in {num_missing:,} of {num_rows:,} rows, "
            "which are unreadable.",
        )

    @functools.cached_property
    def _schema(self) -> pa.Schema:
        metadata = _describe(_stat_file(self._schema_file)).metadata
        with _explain_damage(self._schema_file, "the schema"):
            schema = metadata.schema.to_arrow_schema()
            _require_same_metadata(metadata.metadata or {})
            return schema

    @functools.cached_property
    def _features(self) -> dict[str, dict[str, object]]:
        """The columns as Hugging Face describes them; those of the card without its metadata."""
        text = (self._schema.metadata or {}).get(_HUGGING_FACE, b"{}")
        described = dict(self.card_features)
        try:
            info = parse_json(text)
            for name, feature in info.get("info", {}).get("features", {}).items():
                if isinstance(feature, dict):
                    described[name] = feature
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{self._schema_file}: its metadata 'huggingface' are damaged ({error}).",
            ) from error
        return described

    def _list_features(self, kind: str) -> list[str]:
        """Return the columns of this kind, by the metadata of Hugging Face."""
        names = []
        for name, feature in self._features.items():
            if feature.get("_type") == kind:
                names.append(name)
        return names

    @functools.cached_property
    def _image_path(self) -> str:
        """The column with the bytes of images, as parquet writes its path.

        Without metadata and the name "image", it is the only column of Hugging Face's type.
        """
        names = [*self._list_features("Image"), "image"]
        structs = self._list_image_structs()
        if len(structs) == 1:
            names += structs
        for name in names:
            if name not in self._schema.names:
                continue
            kind = self._field(name).type
            is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            if is_struct and _is_bytes(kind.field("bytes").type):
                return self._require_one_column(f"{name}.bytes")
            if _is_bytes(kind):
                return self._require_one_column(name)
        raise ValueError(
            f"{self._schema_file} has no column of images, with their bytes; it has "
            f"{few(self._describe_columns())}. Name it 'image', a struct with the field 'bytes'.",
        )

    def _list_image_structs(self) -> list[str]:
        """Return the columns of the type in which Hugging Face stores images: bytes and path."""
        names = []
        for field in self._schema:
            if not pa.types.is_struct(field.type):
                continue
            parts = {part.name for part in field.type}
            if parts == {"bytes", "path"}:
                names.append(field.name)
        return names

    @functools.cached_property
    def _label_column(self) -> str:
        wanted = [*_LABELS, *self._list_features("ClassLabel")]
        if self.label:
            wanted = [self.label]
        for name in wanted:
            if name in self._schema.names and _is_label(self._field(name).type):
                return self._require_one_column(name)
        raise ValueError(
            f"{self._schema_file} has no column of labels {few(wanted, repr)}, integers or text; "
            f"it has {few(self._describe_columns())}. Name it behind the data: #COLUMN.",
        )

    def _field(self, name: str) -> pa.Field:
        """Return a column by its name; ValueError if several have it."""
        indices = self._schema.get_all_field_indices(name)
        if len(indices) > 1:
            raise ValueError(
                f"{self._schema_file}: {len(indices)} columns have the name {name!r}. "
                "Rename the others.",
            )
        return self._schema.field(indices[0])

    def _require_one_column(self, path: str) -> str:
        """Return a path.

        Raises:
          ValueError: several columns have it, as a column "a.b" and the field "b" of "a".
        """
        if path in _describe(_stat_file(self._schema_file)).layout.repeated:
            raise ValueError(
                f"{self._schema_file}: several columns have the path {path!r}. Rename the others.",
            )
        return path

    def _describe_columns(self) -> list[str]:
        return [f"{field.name!r} ({field.type})" for field in self._schema]

    def _read_facts(self, file: str) -> dict[str, tuple[str, ...] | None]:
        other = Parquet(Path(f"{file}{self.suffix}"))
        other.card_features = self.card_features
        return {
            "columns": (other._image_path, other._label_column),
            "names of classes": other.names,
        }


def _require_same_metadata(stored: dict[bytes, bytes]) -> None:
    """Raise ValueError unless the copy of the metadata for pyarrow is equal.

    A footer has no checksum.
    """
    if _SCHEMA_COPY not in stored:
        return
    copy = base64.b64decode(stored[_SCHEMA_COPY])
    schema = pa.ipc.read_schema(pa.BufferReader(copy))
    if (schema.metadata or {}).get(_HUGGING_FACE) != stored.get(_HUGGING_FACE):
        raise ValueError("the two copies of the metadata 'huggingface' differ")


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_label(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or _is_text(kind)


def _read_labels(file: _File, column: str) -> np.ndarray:
    """Return the labels of a file, int64 or text (N,), as objects.

    Raises:
      ValueError: the column cannot be read; a row has no label, or one that is no class.
    """
    metadata, layout = _describe(file)
    chunks = [_find_chunk(file, group, column) for group in range(len(layout.groups))]

    found = list[np.ndarray]()
    first_row = 0
    place = f"column {column!r}"
    with contextlib.ExitStack() as stack:
        with _explain_damage(file.path, place):
            for chunk in chunks:
                measure_pages(file.path, chunk, MAX_LABEL_BYTES)
            # As a dictionary, a text that many rows repeat is read once.
            source = _open_if_remote(file.path)
            opened = pq.ParquetFile(
                source,
                metadata=metadata,
                read_dictionary=[column],
                page_checksum_verification=True,
            )
            stack.enter_context(opened)
            batches = opened.iter_batches(_LABELS_AT_ONCE, columns=[column], use_threads=False)

        while True:
            with _explain_damage(file.path, place):
                batch = next(batches, None)
                if batch is None:
                    break
                array = batch.column(0)
            if array.null_count:
                is_null = array.is_null().to_numpy(zero_copy_only=False)
                row = first_row + int(np.flatnonzero(is_null)[0])
                raise ValueError(
                    f"{file.path}: row {row:,} has no label in {place}. Remove such rows.",
                )
            found.append(_check_labels(file.path, place, array, first_row))
            first_row += len(array)
    if not found:
        return np.zeros(0, np.int64)
    return np.concatenate(found)


def _check_labels(file: str, place: str, array: pa.Array, first_row: int) -> np.ndarray:
    """Return the labels of an array without nulls, int64 or text (N,).

    Raises:
      ValueError: a label is no class; the message counts rows from `first_row`, the first of them.
    """
    is_dictionary = pa.types.is_dictionary(array.type)
    if is_dictionary and _is_text(array.type.value_type):
        return _check_texts(file, place, array, first_row)
    with _explain_damage(file, place):
        if is_dictionary:
            array = array.dictionary_decode()
        numbers = array.to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= MAX_CLASSES))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{file}: row {first_row + row:,} has the label {numbers[row]} in {place}, and class "
            f"numbers are 0 to {MAX_CLASSES - 1:,}. Choose a split with labels, or correct them.",
        )
    return numbers.astype(np.int64)


def _check_texts(file: str, place: str, array: pa.DictionaryArray, first_row: int) -> np.ndarray:
    """Return labels that are text, as objects (N,); errors as `_check_labels`."""
    with _explain_damage(file, place):
        codes = array.indices.to_numpy(zero_copy_only=False)
        used, first_rows, inverse = np.unique(codes, return_index=True, return_inverse=True)
        values = array.dictionary.take(pa.array(used))
        num_bytes = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)

    wrong = np.flatnonzero((num_bytes == 0) | (num_bytes > MAX_NAME_BYTES))
    if len(wrong):
        number = int(wrong[0])
        row = first_row + int(first_rows[number])
        raise ValueError(
            f"{file}: row {row:,} has a label of {num_bytes[number]:,} bytes in {place}. Labels "
            f"have 1 to {MAX_NAME_BYTES:,} bytes: correct it, or name another column: "
            "parquet:PATH#COLUMN.",
        )
    texts = np.empty(len(used), object)
    with _explain_damage(file, place):
        texts[:] = values.to_pylist()
    return texts[inverse]
