"""ArrayRecord files that lie in a bucket, read in ranges.

The library `array_record` opens files of this machine only.

A file is a sequence of chunks in blocks of 64 KiB (the format of Riegeli). Each block begins with a
header of 24 bytes, wherever in a chunk that is. The last block has the offset of the footer, a
chunk that lists the offsets of all others. TFDS writes one record to a chunk. Chunks with
transposed records, which nobody writes for images, are rejected.
"""

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from array_record.python import array_record_module

from vit_jax.storage.files import is_mirrored, measure_size, open_regular, read_range

_BLOCK_BYTES = 2**16
_BLOCK_HEADER_BYTES = 24
# Hash, size of the data, its hash, kind and number of records, their size.
_CHUNK_HEADER = struct.Struct("<5Q")
_MAGIC = 0x71930E704FDAE05E
_SIMPLE = ord("r")
_COMPRESSION = {0: None, ord("z"): "zstd", ord("b"): "brotli", ord("s"): "snappy"}
_MOST_FOOTER_BYTES = 2**30
# Fields of a chunk in the footer.
_OFFSET = 1
_NUM_RECORDS = 3
# Fields of the last block.
_FOOTER_OFFSET = 1
_FOOTER_MAGIC = 2


class _Index(NamedTuple):
    """The N chunks of a file.

    Attributes:
      offsets: start of each chunk, and end of the last one, int64 (N + 1,).
      firsts: number of the first record of each chunk, and of all records, int64 (N + 1,).
    """

    offsets: np.ndarray
    firsts: np.ndarray


class BucketRecords:
    """Serialised records of parts of ArrayRecord files, by index.

    They can be pickled and read by many threads. Reading raises RuntimeError for a damaged record,
    as `array_record` does, and OSError if the bucket does not answer.
    """

    def __init__(self, parts: Sequence[tuple[str, int, int]]):
        """Take (file, first record, number of records); the index of each file is read."""
        self._parts = list(parts)
        counts = [count for _, _, count in parts]
        self._firsts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> bytes:
        """Return one record."""
        return self.__getitems__(range(index, index + 1))[0]

    def __getitems__(self, indices: range) -> list[bytes]:
        """Return consecutive records by one request for each file."""
        records = list[bytes]()
        index = indices.start
        while index < indices.stop:
            part = int(np.searchsorted(self._firsts, index, side="right")) - 1
            first_of_part = int(self._firsts[part])
            end_of_part = int(self._firsts[part + 1])
            stop = min(indices.stop, end_of_part)

            file, first, _ = self._parts[part]
            begin = first + index - first_of_part
            end = begin + stop - index
            records += _read_records(file, begin, end)
            index = stop
        return records


def num_records(file: str) -> int:
    """Return the number of records of a file, whose index is at its end.

    Raises:
      RuntimeError: the end is damaged, or the file is not there.
      OSError: the bucket does not answer.
    """
    if is_mirrored(file):
        return int(_read_index(file).firsts[-1])

    reader = array_record_module.ArrayRecordReader(file)
    count: int = reader.num_records()
    reader.close()
    return count


def _read_records(file: str, begin: int, end: int) -> list[bytes]:
    """Return the records of a file from number `begin` to `end`, exclusive."""
    index = _read_index(file)
    first = int(np.searchsorted(index.firsts, begin, side="right")) - 1
    last = int(np.searchsorted(index.firsts, end - 1, side="right"))
    offsets = index.offsets[first : last + 1].tolist()
    start = offsets[0]
    content = read_range(file, start, offsets[-1] - start)

    records = list[bytes]()
    for low, high in itertools.pairwise(offsets):
        stored = content[low - start : high - start]
        chunk = _remove_headers(stored, low)
        records += _split_chunk(chunk)

    skipped = begin - int(index.firsts[first])
    return records[skipped : skipped + end - begin]


@functools.lru_cache(4096)  # files of one dataset
def _read_index(file: str) -> _Index:
    """Return the index at the end of a file.

    Raises:
      RuntimeError: the end is damaged, or of another kind of file.
    """
    with open_regular(file) as opened:
        size = measure_size(opened)
    has_whole_blocks = size > 0 and size % _BLOCK_BYTES == 0
    _require(has_whole_blocks, "it does not end as an ArrayRecord file")

    start = size - _BLOCK_BYTES
    last_block = _read_chunk(file, start, size)
    postscript = dict(_read_fields(last_block[0]))
    footer = postscript.get(_FOOTER_OFFSET, 0)
    is_inside = 0 < footer < start and start - footer <= _MOST_FOOTER_BYTES
    has_magic = postscript.get(_FOOTER_MAGIC) == _MAGIC
    _require(is_inside and has_magic, "it does not end as an ArrayRecord file")

    _, *chunks = _read_chunk(file, footer, start)
    offsets = []
    counts = []
    for chunk in chunks:
        fields = dict(_read_fields(chunk))
        offsets.append(fields[_OFFSET])
        counts.append(fields.get(_NUM_RECORDS, 0))
    bounds = np.array([*offsets, footer], np.int64)
    is_ascending = bool((np.diff(bounds) > 0).all())
    _require(is_ascending, "its footer is damaged")
    return _Index(bounds, np.cumsum([0, *counts]))


def _read_chunk(file: str, start: int, end: int) -> list[bytes]:
    """Return the records of the chunk between two places of a file."""
    content = read_range(file, start, end - start)
    return _split_chunk(_remove_headers(content, start))


def _remove_headers(content: bytes, offset: int) -> bytes:
    """Remove the headers of blocks from bytes that begin at this offset of a file."""
    parts = list[bytes]()
    start = 0
    while start < len(content):
        if (offset + start) % _BLOCK_BYTES == 0:
            start += _BLOCK_HEADER_BYTES
        bytes_of_block = _BLOCK_BYTES - (offset + start) % _BLOCK_BYTES
        end = start + bytes_of_block
        parts.append(content[start:end])
        start = end
    return b"".join(parts)


def _split_chunk(chunk: bytes) -> list[bytes]:
    """Return the records of a chunk, which begins with its header."""
    try:
        ends, values = _read_chunk_data(chunk)
    except (struct.error, IndexError, pa.ArrowException, OSError, ValueError) as error:
        raise RuntimeError(f"a chunk is damaged ({error})") from error
    _require(
        ends[-1] == len(values),
        "a chunk is damaged: its records have another size than it states",
    )
    return [values[low:high] for low, high in itertools.pairwise(ends)]


def _read_chunk_data(chunk: bytes) -> tuple[list[int], bytes]:
    """Return the bounds of the records of a chunk, and their bytes."""
    _, num_bytes, _, kind, _ = _CHUNK_HEADER.unpack_from(chunk)
    data = chunk[_CHUNK_HEADER.size :][:num_bytes]
    is_simple = kind & 0xFF == _SIMPLE and len(data) == num_bytes and data[0] in _COMPRESSION
    _require(is_simple, "a chunk is damaged, or of another kind than TFDS writes")

    codec = _COMPRESSION[data[0]]
    num_sizes, start_of_sizes = _read_varint(data, 1)
    start_of_values = start_of_sizes + num_sizes
    sizes = _decompress(data[start_of_sizes:start_of_values], codec)
    values = _decompress(data[start_of_values:], codec)

    num_records = kind >> 8
    ends = [0]
    position = 0
    for _ in range(num_records):
        size, position = _read_varint(sizes, position)
        ends.append(ends[-1] + size)
    return ends, values


def _decompress(content: bytes, codec: str | None) -> bytes:
    """Return bytes whose size comes before their compressed content."""
    if codec is None:
        return content
    size, start = _read_varint(content, 0)
    return bytes(pa.Codec(codec).decompress(content[start:], size, asbytes=True))


def _read_fields(message: bytes) -> Iterator[tuple[int, int]]:
    """Yield the numbers and values of a protocol buffer that has integers only."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        _require(key & 7 == 0, "its index is damaged")
        value, position = _read_varint(message, position)
        yield key >> 3, value


def _require(condition: bool, problem: str) -> None:
    """Raise RuntimeError with the problem unless the condition holds."""
    if not condition:
        raise RuntimeError(problem)


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position, seven bits a byte, and the position after it."""
    value = 0
    shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
