"""The layout of parquet files: sizes in their footers and page headers, read without the library.

The library trusts these numbers: it allocates as much memory as a page states, and ends the process
for some damaged footers. Both are structs of Thrift's compact protocol, whose fields have numbers
instead of names.
"""

from typing import Any, NamedTuple

from vit_jax.storage.files import measure_size, open_regular, read_range

Struct = dict[int, Any]
"""Values of a struct by the numbers of its fields."""

_MAGIC = b"PAR1"
_END_BYTES = 8
"""Number of bytes of the length of the footer and of the magic number."""
_MOST_FOOTER_BYTES = 2**28
_PAGE_HEADER_BYTES = (2**12, 2**20)
"""Number of bytes that are read for a page header; the second if the first is too small."""
_MOST_LEVELS = 32
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_INTEGERS = (_I16, _I32, _I64)


class LayoutError(ValueError):
    """A footer or page header is cut off, damaged or states impossible sizes."""


class Chunk(NamedTuple):
    """A column of a row group, as the footer states it.

    Attributes:
      uncompressed: bytes of its pages after decompression.
      first_page: place of its first page in the file.
      compressed: bytes of its pages in the file.
      num_missing: rows without a value; None if it is not stated.
    """

    uncompressed: int
    first_page: int
    compressed: int
    num_missing: int | None


class RowGroup(NamedTuple):
    """A row group, as the footer states it.

    Attributes:
      num_rows: number of rows of each column.
      chunks: by the path of the column, "image.bytes".
    """

    num_rows: int
    chunks: dict[str, Chunk]


class Layout(NamedTuple):
    """The footer of a file.

    Attributes:
      groups: in the order of the rows.
      repeated: paths that several columns have.
    """

    groups: list[RowGroup]
    repeated: list[str]


def read_layout(file: str) -> Layout:
    """Return the sizes in the footer of a file.

    Raises:
      LayoutError: the file is cut off, or its footer is damaged.
      OSError: an error of the system.
    """
    with open_regular(file) as opened:
        num_bytes = measure_size(opened)
        opened.seek(max(num_bytes - _END_BYTES, 0))
        end = opened.read(_END_BYTES)
        if num_bytes < len(_MAGIC) + _END_BYTES or end[4:] != _MAGIC:
            raise LayoutError(
                "it does not end as parquet files do: it is cut off or of another kind",
            )
        footer_bytes = int.from_bytes(end[:4], "little")
        place = num_bytes - _END_BYTES - footer_bytes
        if place < len(_MAGIC) or footer_bytes > _MOST_FOOTER_BYTES:
            raise LayoutError(f"its end states a footer of {footer_bytes:,} bytes")
        opened.seek(place)
        footer = _Reader(opened.read(footer_bytes)).read_struct()
    return _parse_footer(footer, num_bytes)


def _parse_footer(footer: Struct, num_bytes: int) -> Layout:
    try:
        groups = list[RowGroup]()
        num_rows = int(footer[3])
        repeated = set[str]()
        rows_of_groups = 0
        for group in footer.get(4, []):
            parsed = _parse_group(group, num_bytes)
            groups.append(parsed)
            rows_of_groups += parsed.num_rows
            repeated.update(_find_repeated_paths(group))
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise LayoutError("its footer is damaged") from error
    if rows_of_groups != num_rows:
        raise LayoutError(f"its footer states {num_rows:,} rows, but its row groups others")
    return Layout(groups, sorted(repeated))


def _parse_group(group: Struct, num_bytes: int) -> RowGroup:
    chunks = {}
    for column in group[1]:
        path = _read_path(column)
        chunks[path] = _parse_chunk(column[3], num_bytes)

    num_rows = int(group[3])
    if num_rows < 0:
        raise LayoutError(f"its footer states {num_rows:,} rows")
    return RowGroup(num_rows, chunks)


def _find_repeated_paths(group: Struct) -> list[str]:
    paths = list(map(_read_path, group[1]))
    if len({*paths}) == len(paths):
        return []
    return [path for path in paths if paths.count(path) > 1]


def _read_path(column: Struct) -> str:
    return ".".join(part.decode() for part in column[3][3])


def _parse_chunk(described: Struct, num_bytes: int) -> Chunk:
    data_page = int(described[9])
    dictionary_page = int(described.get(11, 0))
    first_page = data_page
    if dictionary_page > 0:
        first_page = min(data_page, dictionary_page)
    num_missing = described.get(12, {}).get(3)
    chunk = Chunk(int(described[6]), first_page, int(described[7]), num_missing)
    is_inside = len(_MAGIC) <= first_page <= first_page + chunk.compressed <= num_bytes
    if not is_inside or chunk.uncompressed < 0 or (num_missing or 0) < 0:
        raise LayoutError("its footer states a place or a size that cannot be")
    return chunk


def measure_pages(file: str, chunk: Chunk, most_bytes: int) -> int:
    """Return the size of the headers and uncompressed pages of a column, as the headers state it.

    Raises:
      LayoutError: a header is damaged, or the size is above `most_bytes`.
      OSError: an error of the system.
    """
    place = chunk.first_page
    end = chunk.first_page + chunk.compressed
    total = 0
    while place < end:
        header, header_bytes = _read_page_header(file, place, end)
        uncompressed: Any = header.get(2)
        compressed: Any = header.get(3)
        if not _is_size(uncompressed) or not _is_size(compressed):
            raise LayoutError(f"the page header at byte {place:,} is damaged")
        total += header_bytes + uncompressed
        if total > most_bytes:
            raise LayoutError(f"its pages hold more than {most_bytes / 2**20:,.0f} MiB")
        place += header_bytes + compressed
    if place > end:
        raise LayoutError(f"a page ends at byte {place:,}, behind its column")
    return total


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _read_page_header(file: str, place: int, end: int) -> tuple[Struct, int]:
    """Return the fields and the size of a page header."""
    for most in _PAGE_HEADER_BYTES:
        reader = _Reader(read_range(file, place, min(most, end - place)))
        try:
            return reader.read_struct(), reader.place
        except LayoutError as error:
            problem = error
    raise LayoutError(f"the page header at byte {place:,} is damaged") from problem


class _Reader:
    """Values of Thrift's compact protocol.

    Attributes:
      place: position of the next byte.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.place = 0

    def read_struct(self, level: int = 0) -> Struct:
        """Return the values of a struct by the numbers of its fields.

        Raises:
          LayoutError: it is cut off or damaged.
        """
        if level > _MOST_LEVELS:
            raise LayoutError("it is nested too deep")
        fields = Struct()
        number = 0
        while True:
            byte = self._read_bytes(1)[0]
            if byte == 0:
                return fields
            kind = byte & 0xF
            step = byte >> 4
            if step:
                number += step
            else:
                number = self._read_integer()

            if kind in (_TRUE, _FALSE):
                fields[number] = kind == _TRUE
            else:
                fields[number] = self._read_value(kind, level)

    def _read_value(self, kind: int, level: int) -> Any:
        if kind in _INTEGERS:
            return self._read_integer()
        if kind == _BINARY:
            return self._read_bytes(self._read_unsigned())
        if kind in (_LIST, _SET):
            return self._read_list(level)
        if kind == _STRUCT:
            return self.read_struct(level + 1)
        if kind in (_TRUE, _FALSE, _BYTE):  # elements of lists
            return self._read_bytes(1)[0]
        if kind == _DOUBLE:
            return self._read_bytes(8)
        raise LayoutError(f"it has a value of kind {kind}, which parquet files do not use")

    def _read_list(self, level: int) -> list[Any]:
        byte = self._read_bytes(1)[0]
        kind = byte & 0xF
        size = byte >> 4
        if size == 0xF:
            size = self._read_unsigned()
        if size > len(self._content) - self.place:  # an element has at least a byte
            raise LayoutError("it is cut off")
        return [self._read_value(kind, level + 1) for _ in range(size)]

    def _read_integer(self) -> int:
        number = self._read_unsigned()
        return (number >> 1) ^ -(number & 1)

    def _read_unsigned(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._read_bytes(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise LayoutError("it has a number of more than 64 bits")

    def _read_bytes(self, size: int) -> bytes:
        content = self._content[self.place : self.place + size]
        if len(content) < size:
            raise LayoutError("it is cut off")
        self.place += size
        return content
