"""Read headers of image files without decoding: the number of pixels, the directories of a TIFF.

Sizes are read of every format that we decode: JPEG, PNG, GIF, BMP, TIFF (also BigTIFF), WebP, AVIF, JPEG 2000, PBM to
PAM, Sun raster. Pillow 13 takes 6 to 10 times as long for a JPEG, 5 to 8 % of decoding it, and reads no PAM.
"""

import math
import re
import struct
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""From a place and a size to these bytes of a file, or fewer at its end."""

JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x00, 0x01, *range(0xD0, 0xD8)))  # markers without content
JPEG_SCAN, _JPEG_END = 0xDA, 0xD9
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_TIFF_NUMBERS = {1: "B", 7: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 16: "Q", 17: "q"}
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_MOST_ENTRIES, _MOST_VALUES = 4096, 16  # of a directory and of a tag, that are read
_LERC_START = b"Lerc2 "
PNM_GAP = rb"(?:\s|#[^\r\n]*[\r\n])"


def stated_pixels(file: bytes) -> int:
    """Return width times height; 0 if the header is cut off or of an unknown format."""
    try:
        reader = next((reader for start, reader in _READERS if re.match(start, file, re.DOTALL)), None)
        return 0 if reader is None else reader(file)
    except (struct.error, ValueError, OverflowError):
        return 0


def jpeg_segments(file: bytes) -> Iterator[tuple[int, int]]:
    """Yield the markers up to the first scan, and where the content of each begins; skip bytes as libjpeg does."""
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
            place += 2 + max(file[place + 2] << 8 | file[place + 3], 2)


def jpeg_frame(file: bytes) -> tuple[int, int, int]:
    """Return height, width and number of components of a JPEG; zeros if it has no frame."""
    place = next((place for marker, place in jpeg_segments(file) if marker in JPEG_FRAMES), None)
    height, width, components = (0, 0, 0) if place is None else struct.unpack_from(">HHB", file, place + 1)
    return height, width, components


def _at(layout: str, place: int, mask: int = -1) -> Callable[[bytes], int]:
    """Return a reader of two numbers at a fixed place, of which only some bits count."""

    def read(file: bytes) -> int:
        width, height = struct.unpack_from(layout, file, place)
        return abs((width & mask) * (height & mask))  # rows of a BMP from top to bottom have a negative number

    return read


def _jpeg(file: bytes) -> int:
    height, width, _ = jpeg_frame(file)
    return height * width


def _lossless_webp(file: bytes) -> int:
    (bits,) = struct.unpack_from("<I", file, 21)
    return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)


def _extended_webp(file: bytes) -> int:
    return (int.from_bytes(file[24:27], "little") + 1) * (int.from_bytes(file[27:30], "little") + 1)


class Tag(NamedTuple):
    """A tag of a TIFF that holds numbers.

    Attributes:
      values: the first of them, at least one.
      layout: of one value, as `struct` writes it.
      place: of the first value in the file.
    """

    values: tuple[float, ...]
    layout: str
    place: int


def tiff_directories(read: Read, wanted: Container[int], most_values: int = _MOST_VALUES) -> Iterator[dict[int, Tag]]:
    """Yield the wanted tags with numbers of each directory of a TIFF, which is a page.

    Of equal tags the first counts. Of a tag at most `most_values` numbers are read.

    Raises:
      struct.error: the file is cut off.
    """
    start = read(0, 16)
    order = "<" if start.startswith(b"II") else ">"
    is_big = struct.unpack_from(f"{order}H", start, 2) == (43,)
    count, word, first, size = ("Q", "Q", 8, 20) if is_big else ("H", "I", 4, 12)
    head, inline = struct.calcsize(order + count), struct.calcsize(order + word)
    (place,) = struct.unpack_from(order + word, start, first)
    seen = set[int]()
    while place and place not in seen:
        seen.add(place)
        (entries,) = struct.unpack(order + count, read(place, head))
        table = read(place + head, min(entries, _MOST_ENTRIES) * size)
        tags: dict[int, Tag] = {}
        for entry in range(0, len(table) - size + 1, size):
            tag, kind, number = struct.unpack_from(f"{order}HH{word}", table, entry)
            if tag in wanted and tag not in tags and kind in _TIFF_NUMBERS and number:
                layout = f"{order}{min(number, most_values)}{_TIFF_NUMBERS[kind]}"
                at = place + head + entry + size - inline
                if struct.calcsize(order + _TIFF_NUMBERS[kind]) * number > inline:
                    (at,) = struct.unpack(order + word, read(at, inline))
                values = struct.unpack(layout, read(at, struct.calcsize(layout)))
                tags[tag] = Tag(values, order + _TIFF_NUMBERS[kind], at)
        yield tags
        (place,) = struct.unpack(order + word, read(place + head + entries * size, inline))


def tiff_tags(file: bytes, wanted: Container[int], most_values: int = _MOST_VALUES) -> dict[int, Tag]:
    """Return the wanted tags of the first directory of a TIFF; raises as `tiff_directories`."""

    def read(place: int, size: int) -> bytes:
        return file[place : place + size]

    return next(tiff_directories(read, wanted, most_values), {})


def lerc_pixels(data: bytes) -> int:
    """Return the pixels that a LERC blob states; raise ValueError if it does not start as one."""
    if not data.startswith(_LERC_START):
        raise ValueError("it is no LERC, or has a further compression")
    (version,) = struct.unpack_from("<i", data, len(_LERC_START))
    checksum_bytes = 4 if version >= 3 else 0
    rows, columns = struct.unpack_from("<ii", data, len(_LERC_START) + 4 + checksum_bytes)
    return rows * columns


def _tiff(file: bytes) -> int:
    tags = tiff_tags(file, (_TIFF_WIDTH, _TIFF_HEIGHT))
    return math.prod(int(tags[side].values[0]) for side in (_TIFF_WIDTH, _TIFF_HEIGHT)) if len(tags) == 2 else 0


def _largest(pattern: bytes) -> Callable[[bytes], int]:
    """Return a reader of the largest of all sizes that follow a pattern: there may be thumbnails."""

    def read(file: bytes) -> int:
        sizes = (struct.unpack_from(">II", file, match.end()) for match in re.finditer(pattern, file, re.DOTALL))
        return max((width * height for width, height in sizes), default=0)

    return read


def _pnm(file: bytes) -> int:
    match = re.match(rb"P[1-6]%b*(\d{1,20})%b+(\d{1,20})" % (PNM_GAP, PNM_GAP), file)
    return int(match[1]) * int(match[2]) if match else 0


def _pam(file: bytes) -> int:
    header = file.partition(b"ENDHDR")[0]
    width, height = (re.findall(rb"%b\s+(\d{1,20})" % name, header) for name in (b"WIDTH", b"HEIGHT"))
    return max(map(int, width), default=0) * max(map(int, height), default=0)


_READERS: tuple[tuple[bytes, Callable[[bytes], int]], ...] = (
    (rb"\xff\xd8\xff", _jpeg),
    (rb"\x89PNG", _at(">II", 16)),
    (rb"GIF8", _at("<HH", 6)),
    (rb"BM.{12}\x0c\0\0\0", _at("<HH", 18)),
    (rb"BM", _at("<ii", 18)),
    (rb"II[*+]\0|MM\0[*+]", _tiff),
    (rb"RIFF.{4}WEBPVP8 ", _at("<HH", 26, 0x3FFF)),
    (rb"RIFF.{4}WEBPVP8L", _lossless_webp),
    (rb"RIFF.{4}WEBPVP8X", _extended_webp),
    (rb".{4}ftyp", _largest(rb"ispe.{4}")),
    (rb"\0\0\0\x0cjP  |\xffO\xffQ", _largest(rb"\xffO\xffQ.{4}")),
    (rb"P[1-6]", _pnm),
    (rb"P7", _pam),
    (rb"\x59\xa6\x6a\x95", _at(">II", 4)),
)
