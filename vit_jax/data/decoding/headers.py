"""Read headers of image files without decoding: the number of pixels, the directories of a TIFF.

Sizes are read of every format that is decoded: JPEG, PNG, GIF, BMP, TIFF (also BigTIFF), WebP,
AVIF, JPEG 2000, PBM to PAM, Sun raster; and of formats that a TIFF may contain: JPEG XL, JPEG XR,
LERC. Pillow 13 takes 6 to 10 times as long for a JPEG, 5 to 8 % of decoding it, and reads no PAM.
"""

import re
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""Returns the bytes of a file at an offset, of a size, or fewer at its end."""

JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_UNDECODED_FRAMES = {
    0xC3: "without loss",
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "in a hierarchy of frames"),
    0xCB: "without loss",
    0xF7: "of the kind JPEG-LS",
}
_JPEG_BARE = frozenset((0x00, 0x01, *range(0xD0, 0xD8)))  # markers without content
JPEG_SCAN = 0xDA
_JPEG_END = 0xD9
_JPEG_SEQUENTIAL = (0xC0, 0xC1)
MAX_JPEG_SCANS = 128
"""Number of scans that are decoded at most.

A progressive JPEG has about 10 scans, an optimised one up to 64. Each costs a pass over the image.
"""
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of TIFF (two) and of BigTIFF."""
_TIFF_NUMBERS = {
    1: "B",
    2: "B",  # text
    3: "H",
    4: "I",
    6: "b",
    7: "B",
    8: "h",
    9: "i",
    11: "f",
    12: "d",
    16: "Q",
    17: "q",
}
_TIFF_SUBFILE = 254
_TIFF_OLD_SUBFILE = 255
TIFF_COPY_TAGS = (_TIFF_SUBFILE, _TIFF_OLD_SUBFILE)
"""Tags of a directory that is a smaller copy or a mask of another one."""
_SMALLER_OR_MASK = 1 | 4
_OLD_SMALLER = 2
_TIFF_WIDTH = 256
_TIFF_HEIGHT = 257
_MOST_ENTRIES = 4096
"""Number of entries of a directory that are read."""
_MOST_VALUES = 16
"""Number of values of a tag that are read by default."""
PNM_GAP = rb"(?:\s|#[^\r\n]*[\r\n])"


def count_stated_pixels(file: bytes) -> int:
    """Return width times height; 0 if the header is cut off or of an unknown format."""
    try:
        for start, reader in _READERS:
            if re.match(start, file, re.DOTALL):
                return reader(file)
    except (struct.error, ValueError, OverflowError):
        return 0
    return 0


def find_jpeg_segments(file: bytes) -> Iterator[tuple[int, int]]:
    """Yield the markers up to the first scan, and where the content of each begins.

    Bytes between segments are skipped as libjpeg skips them.
    """
    place = 2
    while (place := file.find(b"\xff", place)) >= 0 and place + 4 <= len(file):
        marker = file[place + 1]
        if marker == _JPEG_END:
            return
        if marker == 0xFF:  # any number of these may precede a marker
            place += 1
        elif marker in _JPEG_BARE:
            place += 2
        else:
            yield marker, place + 4
            if marker == JPEG_SCAN:
                return
            stated_size = file[place + 2] << 8 | file[place + 3]
            place += 2 + max(stated_size, 2)


def count_jpeg_scans(file: bytes) -> int:
    """Return the number of scans that a decoder of a JPEG reads; 0 for any other file.

    No scan can hold the bytes that start one. A sequential JPEG whose first scan has all colours
    ends with it.
    """
    if not file.startswith(b"\xff\xd8\xff"):
        return 0
    frame_marker = 0
    components = 0
    for marker, place in find_jpeg_segments(file):
        if marker in JPEG_FRAMES:
            frame_marker = marker
            components = 0
            if place + 5 < len(file):
                components = file[place + 5]
        elif marker == JPEG_SCAN:
            has_all_components = file[place : place + 1] == bytes((components,))
            if frame_marker in _JPEG_SEQUENTIAL and has_all_components:
                return 1
            return file.count(b"\xff\xda", place - 4)
    return 0


def find_unsupported_process(file: bytes) -> str | None:
    """Return the process or bits of a JPEG that OpenCV does not decode; None for any other file."""
    if not file.startswith(b"\xff\xd8\xff"):
        return None
    for marker, place in find_jpeg_segments(file):
        if marker in _UNDECODED_FRAMES:
            return _UNDECODED_FRAMES[marker]
        if marker in JPEG_FRAMES:
            bits = file[place] if place < len(file) else 8
            if bits == 8:
                return None
            return f"of {bits} bits"
    return None


def read_jpeg_frame(file: bytes) -> tuple[int, int, int]:
    """Return height, width and number of components of a JPEG; zeros if it has no frame."""
    for marker, place in find_jpeg_segments(file):
        if marker in JPEG_FRAMES:
            height, width, components = struct.unpack_from(">HHB", file, place + 1)
            return height, width, components
    return 0, 0, 0


def _make_size_reader(layout: str, place: int, mask: int = -1) -> Callable[[bytes], int]:
    """Return a function that multiplies two numbers at a fixed offset, by the bits of a mask."""

    def read(file: bytes) -> int:
        width, height = struct.unpack_from(layout, file, place)
        pixels = (width & mask) * (height & mask)
        return abs(pixels)  # rows of a BMP from top to bottom have a negative number

    return read


def _measure_jpeg(file: bytes) -> int:
    height, width, _ = read_jpeg_frame(file)
    return height * width


def _measure_lossless_webp(file: bytes) -> int:
    (bits,) = struct.unpack_from("<I", file, 21)
    width = (bits & 0x3FFF) + 1
    height = (bits >> 14 & 0x3FFF) + 1
    return width * height


def _measure_extended_webp(file: bytes) -> int:
    width = int.from_bytes(file[24:27], "little") + 1
    height = int.from_bytes(file[27:30], "little") + 1
    return width * height


class Tag(NamedTuple):
    """A tag of a TIFF that holds numbers.

    Attributes:
      values: the first values, at least one.
    """

    values: tuple[float, ...]


class _Form(NamedTuple):
    """The form of a TIFF or BigTIFF.

    Attributes:
      entries_layout: `struct` layout of the number of entries of a directory.
      word_layout: `struct` layout of an offset or a number of values.
      first_at: offset of the word with the offset of the first directory.
      entry_layout: `struct` layout of tag, kind and number of values.
      entry_bytes: size of an entry with its values or their offset.
    """

    entries_layout: str
    word_layout: str
    first_at: int
    entry_layout: str
    entry_bytes: int

    @property
    def head_bytes(self) -> int:
        """Size of the number of entries."""
        return struct.calcsize(self.entries_layout)

    @property
    def inline_bytes(self) -> int:
        """Largest size of values that stand in their entry."""
        return struct.calcsize(self.word_layout)

    def read_word(self, read: Read, place: int) -> int:
        (value,) = struct.unpack(self.word_layout, read(place, self.inline_bytes))
        return value


def _read_order(start: bytes) -> str:
    if start.startswith(b"II"):
        return "<"
    return ">"


def _read_form(start: bytes) -> _Form:
    order = _read_order(start)
    (version,) = struct.unpack_from(f"{order}H", start, 2)
    if version == 43:
        return _Form(
            entries_layout=f"{order}Q",
            word_layout=f"{order}Q",
            first_at=8,
            entry_layout=f"{order}HHQ",
            entry_bytes=20,
        )
    return _Form(
        entries_layout=f"{order}H",
        word_layout=f"{order}I",
        first_at=4,
        entry_layout=f"{order}HHI",
        entry_bytes=12,
    )


def read_tiff_directories(read: Read, wanted: Container[int]) -> Iterator[dict[int, Tag]]:
    """Yield the wanted tags of each directory of a TIFF, as `locate_tiff_directories`."""
    for _, tags in locate_tiff_directories(read, wanted):
        yield tags


def locate_tiff_directories(
    read: Read,
    wanted: Container[int],
    most_values: int = _MOST_VALUES,
    directory_at: int = 0,
) -> Iterator[tuple[int, dict[int, Tag]]]:
    """Yield where each directory of a TIFF begins, which is a page, and its wanted tags.

    Tags hold numbers, or the bytes of text. Of equal tags the first counts. At most `most_values`
    numbers of a tag are read.

    Args:
      read: reads the file.
      wanted: numbers of tags.
      most_values: see above.
      directory_at: offset of the first directory that is read; 0: the first of the file.

    Raises:
      struct.error: the file is cut off.
    """
    start = read(0, 16)
    form = _read_form(start)
    place = directory_at
    if not place:
        (place,) = struct.unpack_from(form.word_layout, start, form.first_at)

    seen = set[int]()
    while place and place not in seen:
        seen.add(place)
        (entries,) = struct.unpack(form.entries_layout, read(place, form.head_bytes))
        entries_at = place + form.head_bytes
        num_read = min(entries, _MOST_ENTRIES)
        table = read(entries_at, num_read * form.entry_bytes)

        yield place, _read_tags(read, form, entries_at, table, wanted, most_values)
        place = form.read_word(read, entries_at + entries * form.entry_bytes)


def is_smaller_copy(tags: Mapping[int, Tag]) -> bool:
    """Return True for a directory whose tags `TIFF_COPY_TAGS` mark it as smaller copy or mask."""
    if _TIFF_SUBFILE in tags:
        return bool(int(tags[_TIFF_SUBFILE].values[0]) & _SMALLER_OR_MASK)
    if _TIFF_OLD_SUBFILE in tags:
        return tags[_TIFF_OLD_SUBFILE].values[0] == _OLD_SMALLER
    return False


def _read_tags(
    read: Read,
    form: _Form,
    entries_at: int,
    table: bytes,
    wanted: Container[int],
    most_values: int,
) -> dict[int, Tag]:
    """Return the wanted tags of a directory, whose entries are the table."""
    tags: dict[int, Tag] = {}
    order = form.word_layout[0]
    size = form.entry_bytes
    inline_bytes = form.inline_bytes
    for entry in range(0, len(table) - size + 1, size):
        tag, kind, number = struct.unpack_from(form.entry_layout, table, entry)
        if tag not in wanted or tag in tags:
            continue
        if kind not in _TIFF_NUMBERS or not number:
            continue

        number_layout = order + _TIFF_NUMBERS[kind]
        values_at = entries_at + entry + size - inline_bytes
        if struct.calcsize(number_layout) * number > inline_bytes:
            values_at = form.read_word(read, values_at)
        num_values = min(number, most_values)
        layout = f"{order}{num_values}{_TIFF_NUMBERS[kind]}"
        values = struct.unpack(layout, read(values_at, struct.calcsize(layout)))
        tags[tag] = Tag(values)
    return tags


def read_tiff_tags(
    file: bytes,
    wanted: Container[int],
    most_values: int = _MOST_VALUES,
    directory_at: int = 0,
) -> dict[int, Tag]:
    """Return the wanted tags of one directory of a TIFF, as `locate_tiff_directories`."""
    read = read_from(file)
    directories = locate_tiff_directories(read, wanted, most_values, directory_at)
    _, tags = next(directories, (0, {}))
    return tags


def read_from(file: bytes) -> Read:
    """Return a function that reads a complete file."""

    def read(place: int, size: int) -> bytes:
        return file[place : place + size]

    return read


def _measure_tiff(file: bytes) -> int:
    tags = read_tiff_tags(file, (_TIFF_WIDTH, _TIFF_HEIGHT))
    if len(tags) < 2:
        return 0
    return int(tags[_TIFF_WIDTH].values[0]) * int(tags[_TIFF_HEIGHT].values[0])


def _make_largest_reader(pattern: bytes) -> Callable[[bytes], int]:
    """Return a function that finds the largest size after a pattern: there may be thumbnails."""

    def read(file: bytes) -> int:
        most = 0
        for match in re.finditer(pattern, file, re.DOTALL):
            width, height = struct.unpack_from(">II", file, match.end())
            most = max(most, width * height)
        return most

    return read


def _measure_pnm(file: bytes) -> int:
    match = re.match(rb"P[1-6]%b*(\d{1,20})%b+(\d{1,20})" % (PNM_GAP, PNM_GAP), file)
    if match is None:
        return 0
    return int(match[1]) * int(match[2])


def _measure_pam(file: bytes) -> int:
    header, _, _ = file.partition(b"ENDHDR")
    width = _find_largest_number(rb"WIDTH\s+(\d{1,20})", header)
    height = _find_largest_number(rb"HEIGHT\s+(\d{1,20})", header)
    return width * height


def _find_largest_number(pattern: bytes, header: bytes) -> int:
    """Return the largest of the numbers that a pattern finds; 0 without any."""
    return max(map(int, re.findall(pattern, header)), default=0)


_JXR_WIDTH = 0xBC80
_JXR_HEIGHT = 0xBC81


def _measure_jpeg_xr(file: bytes) -> int:
    """Return the pixels of JPEG XR, whose directory has the form of TIFF."""
    tags = read_tiff_tags(file, (_JXR_WIDTH, _JXR_HEIGHT))
    if len(tags) < 2:
        return 0
    return int(tags[_JXR_WIDTH].values[0]) * int(tags[_JXR_HEIGHT].values[0])


# Width by height, in the order of their codes from 1 on.
_JXL_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
_JXL_SIDE_BITS = (9, 13, 18, 30)


def _measure_jpeg_xl(file: bytes) -> int:
    """Return the pixels of JPEG XL, whose sides are coded in fields of bits, the lowest first."""
    match = re.match(rb"\xff\x0a|.{,4096}?(?:jxlc|jxlp.{4})\xff\x0a", file, re.DOTALL)
    if match is None:
        return 0
    remaining_bits = int.from_bytes(file[match.end() : match.end() + 16], "little")

    def take(bits: int) -> int:
        nonlocal remaining_bits
        value = remaining_bits & ((1 << bits) - 1)
        remaining_bits >>= bits
        return value

    is_small = take(1)

    def take_side() -> int:
        if is_small:
            return 8 * (take(5) + 1)
        return take(_JXL_SIDE_BITS[take(2)]) + 1

    height = take_side()
    ratio = take(3)
    if ratio == 0:
        return height * take_side()
    across, down = _JXL_RATIOS[ratio - 1]
    return height * (height * across // down)


def _measure_lerc(file: bytes) -> int:
    """Return the number of samples: a pixel may have several."""
    (version,) = struct.unpack_from("<i", file, 6)
    sides_at = 10 if version < 3 else 14
    rows, columns = struct.unpack_from("<ii", file, sides_at)
    samples = 1
    if version > 3:
        (samples,) = struct.unpack_from("<i", file, 22)
    return rows * columns * samples


_READERS: tuple[tuple[bytes, Callable[[bytes], int]], ...] = (
    (rb"\xff\xd8\xff", _measure_jpeg),
    (rb"\x89PNG", _make_size_reader(">II", 16)),
    (rb"GIF8", _make_size_reader("<HH", 6)),
    (rb"BM.{12}\x0c\0\0\0", _make_size_reader("<HH", 18)),
    (rb"BM", _make_size_reader("<ii", 18)),
    (rb"II[*+]\0|MM\0[*+]", _measure_tiff),
    (rb"RIFF.{4}WEBPVP8 ", _make_size_reader("<HH", 26, 0x3FFF)),
    (rb"RIFF.{4}WEBPVP8L", _measure_lossless_webp),
    (rb"RIFF.{4}WEBPVP8X", _measure_extended_webp),
    (rb".{4}ftyp", _make_largest_reader(rb"ispe.{4}")),
    (rb"\0\0\0\x0cjP  |\xffO\xffQ", _make_largest_reader(rb"\xffO\xffQ.{4}")),
    (rb"P[1-6]", _measure_pnm),
    (rb"P7", _measure_pam),
    (rb"\x59\xa6\x6a\x95", _make_size_reader(">II", 4)),
    (rb"II\xbc\x01", _measure_jpeg_xr),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", _measure_jpeg_xl),
    (rb"Lerc2 ", _measure_lerc),
)
