"""Values of more than 8 bits: their range, their conversion to uint8, warnings about losses.

A file states a range by PNG's sBIT, TIFF's BitsPerSample below 16, MaxSampleValue or
SMaxSampleValue, and by the largest value of PGM, PPM and PAM.
"""

import functools
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vit_jax.data.decoding import rasters
from vit_jax.data.decoding.headers import (
    PNM_GAP,
    TIFF_COPY_TAGS,
    TIFF_STARTS,
    Read,
    Tag,
    is_smaller_copy,
    read_from,
    read_tiff_directories,
)
from vit_jax.storage.files import open_regular

ValueRange = tuple[float, float]
"""The values that become 0 and 255."""

MOST_FILES = 256
"""Number of files that `survey` checks at most."""
SURVEYED = (".avif", ".jp2", ".pgm", ".png", ".pnm", ".ppm", ".pxm", ".tif", ".tiff", ".webp")
HEADER_BYTES = 4096
"""Number of bytes that are read at once."""
_MOST_CHUNKS = 64
"""Number of chunks of a PNG that are read before its pixels."""
_BITS = 258
_PHOTOMETRIC = 262
_SAMPLES = 277
_FORMAT = 339
_LARGEST = 281
_S_SMALLEST = 340
_S_LARGEST = 341
_TIFF_TAGS = frozenset((_BITS, _PHOTOMETRIC, _FORMAT, _LARGEST, _S_SMALLEST, _S_LARGEST))
_PNM_HEADER = re.compile(rb"P[2356](?:%b+\d{1,20}){2}%b+(\d{1,9})\s" % (PNM_GAP, PNM_GAP))
# The depth of JPEG 2000 (SIZ) and AVIF (pixi).
_SIZ_OR_PIXI = re.compile(
    rb".{4}jP  .*?\xffO\xffQ.{38}(.)|\xffO\xffQ.{38}(.)|.{4}ftyp.*?pixi.{5}(.)",
    re.DOTALL,
)
_WHITE_IS_ZERO = 0
_BLACK_IS_ZERO = 1
_RGB = 2
_MASK = 4
_CMYK = 5
_UNSIGNED = 1
_SIGNED = 2
_FLOAT = 3


class Depth(NamedTuple):
    """Bits and range of values that a file states.

    Attributes:
      bits: bits of a stored value.
      stated: the range that the file states; None: all values of these bits, or unknown.
      is_float: values are floating point.
      is_inverted: the lowest value is white.
      form: "TIFF", "PNG" or another, which is not named.
    """

    bits: int
    stated: ValueRange | None = None
    is_float: bool = False
    is_inverted: bool = False
    form: str = ""

    @property
    def needs_range(self) -> bool:
        """True if values cannot be converted without a range."""
        return self.is_float or self.bits > 16

    def choose_range(self, value_range: ValueRange | None) -> ValueRange | None:
        """Return the range to map; None: all 16 bits.

        It is `value_range` for more than 8 bits, else the stated one.
        """
        if value_range is not None and self.bits > 8:
            return value_range
        return self.stated


def read_depth(read: Read) -> Depth | None:
    """Return the depth of a file whose values may need scaling.

    Return None for any other file, and for one with a damaged header.
    """
    start = read(0, HEADER_BYTES)
    try:
        if start.startswith(b"\x89PNG"):
            return _read_png_depth(start, read)
        if start.startswith(TIFF_STARTS):
            return _read_tiff_depth(next(read_tiff_directories(read, _TIFF_TAGS), {}))
        if re.match(rb"P[2-7]\s", start):
            return _read_pnm_depth(start)
    except (struct.error, ValueError, OverflowError):
        return None

    match = _SIZ_OR_PIXI.match(start)
    if match is None:
        return None
    siz = match[1] or match[2]
    if siz:
        bits = (siz[0] & 127) + 1
    else:
        bits = match[3][0]
    if not 8 < bits <= 16:
        return None
    return Depth(bits)


def read_file_depth(file: bytes) -> Depth | None:
    """Return the depth of a complete file, as `read_depth`."""
    return read_depth(read_from(file))


def is_deep(file: bytes) -> bool:
    """Return True if values have more than 8 bits."""
    depth = read_file_depth(file)
    return depth is not None and depth.bits > 8


def decode_values(file: bytes, depth: Depth) -> np.ndarray | None:
    """Return the values as stored, (H, W) or (H, W, 3) in RGB; None where they cannot be decoded.

    Raises:
      UnreadableImage: the layout is not supported; the message names it.
      cv2.error: the file states more pixels than OpenCV takes.
    """
    if depth.form != "TIFF":
        return rasters.decode_stored_values(file)

    from vit_jax.data.decoding import tiff

    values, _ = tiff.read_values(file)
    return values


def map_values(values: np.ndarray, depth: Depth, value_range: ValueRange) -> np.ndarray:
    """Map a range linearly to 0..255, rounded and clipped, as uint8; NaN becomes 0."""
    low, high = value_range
    is_short = values.dtype.itemsize <= 2
    scaled: Any = values.astype(np.float32 if is_short else np.float64)
    scaled -= low
    scaled *= 255 / (high - low)
    np.nan_to_num(scaled, copy=False, nan=0.0)
    clipped = np.clip(scaled, 0, 255)
    pixels: np.ndarray = np.rint(clipped).astype(np.uint8)
    if depth.is_inverted:
        return 255 - pixels
    return pixels


def contradicts(values: np.ndarray, depth: Depth) -> bool:
    """Return True if 16-bit integers contradict the range that the file states.

    They are larger, or they are scaled up. By the PNG specification, values are scaled to all 16
    bits, and sBIT states their bits before. Some programs write sBIT and do not scale.
    """
    if depth.stated is None or depth.bits != 16 or depth.is_float:
        return False
    if values.max(initial=0) > depth.stated[1]:
        return True
    if depth.form != "PNG":
        return False
    unused_bits = 16 - int(depth.stated[1]).bit_length()
    lower_bits = values & ((1 << unused_bits) - 1)
    return not lower_bits.any()


def count_pages(read: Read, most: int = 1000) -> int:
    """Count the pages of a TIFF without smaller copies, up to `most`; 1 for any other file."""
    if not read(0, 4).startswith(TIFF_STARTS):
        return 1
    pages = 0
    try:
        for tags in read_tiff_directories(read, TIFF_COPY_TAGS):
            if not is_smaller_copy(tags):
                pages += 1
            if pages == most:
                break
    except (struct.error, ValueError, OverflowError):
        pass  # the pages before the damage
    return max(pages, 1)


class _Header(NamedTuple):
    """Values, pages and bands of a file that are lost when it is read.

    Attributes:
      loss: "silent" for values that are cut, "unknown" for values that cannot be read, or empty.
      pages: number of pages; the first one is read.
      has_extra_band: alpha or another band beyond grey or RGB.
    """

    loss: str = ""
    pages: int = 1
    has_extra_band: bool = False


_Headers = list[tuple[str, _Header]]
"""The checked files, each with its header."""


def survey(
    paths: Iterable[str],
    value_range: ValueRange | None,
    option: str,
    open_file: Callable[[str], BinaryIO] | None = None,
) -> list[str]:
    """Return warnings about values, bands and pages that are lost when files are read, with counts.

    A few KiB are read of at most `MOST_FILES` files, evenly spaced, whose names have an extension
    of these formats.

    Args:
      paths: paths of all files.
      value_range: the range that the user gives; with it no values are lost.
      option: the name of its option in messages, "--images.value_range".
      open_file: opens a file by a path that the file system does not know; all such files may be
        checked.
    """
    if open_file is None:
        paths = [path for path in paths if path.lower().endswith(SURVEYED)]
    else:
        paths = list(paths)
    count = min(len(paths), MOST_FILES)

    headers = []
    for number in range(count):
        path = paths[number * len(paths) // count]
        if open_file is None:
            header = _read_cached_header(path)
        else:
            header = _read_header(open_file, path)
        headers.append((path, header))

    lines = []
    if value_range is None:
        lines += _warn_about_values(headers, count, option)
    lines += _warn_about_bands(headers, count)
    lines += _warn_about_pages(headers, count)
    return lines


def _warn_about_values(headers: _Headers, count: int, option: str) -> list[str]:
    silent = [path for path, header in headers if header.loss == "silent"]
    unknown = [path for path, header in headers if header.loss == "unknown"]
    lines = []
    if silent:
        lines.append(
            f"{len(silent):,} of {count:,} checked files have 16 bits and state no other depth "
            f"(first: {silent[0]}): values are divided by 256. "
            f"Pass {option}=0,4095 for 12-bit data."
        )
    if unknown:
        lines.append(
            f"{len(unknown):,} of {count:,} checked files have floating-point or 32-bit values "
            f"and state no range (first: {unknown[0]}): they cannot be read. "
            f"Pass {option}=0,1 for values from 0 to 1."
        )
    return lines


def _warn_about_bands(headers: _Headers, count: int) -> list[str]:
    extra = [path for path, header in headers if header.has_extra_band]
    if not extra:
        return []
    return [
        f"{len(extra):,} of {count:,} checked files have a band beyond grey or RGB, such as alpha "
        f"or infrared (first: {extra[0]}): it is ignored."
    ]


def _warn_about_pages(headers: _Headers, count: int) -> list[str]:
    pages = [header.pages for _, header in headers if header.pages > 1]
    if not pages:
        return []
    fewest = min(pages)
    most = max(pages)
    numbers = f"{fewest:,}"
    if fewest != most:
        numbers = f"{fewest:,} to {most:,}"
    return [
        f"{len(pages):,} of {count:,} checked files have several pages: "
        f"page 1 of {numbers} is used; input.channels reads pages as bands."
    ]


@functools.lru_cache(2 * MOST_FILES)  # the files of a dataset are opened for each of its splits
def _read_cached_header(path: str) -> _Header:
    return _read_header(open_regular, path)


def _read_header(open_file: Callable[[str], BinaryIO], path: str) -> _Header:
    try:
        with open_file(path) as file:

            @functools.cache  # several readers begin with the same bytes
            def read(place: int, size: int) -> bytes:
                file.seek(place)
                return file.read(size)

            depth = read_depth(read)
            return _Header(_find_loss(depth), count_pages(read), has_extra_band(read))
    except (OSError, ValueError):  # also a pipe or a device
        return _Header()


def _find_loss(depth: Depth | None) -> str:
    if depth is None or depth.stated is not None:
        return ""
    if depth.needs_range:
        return "unknown"
    if depth.bits == 16:
        return "silent"
    return ""


def has_extra_band(read: Read) -> bool:
    """Return True if a file has two or four bands, of which the last is ignored."""
    start = read(0, HEADER_BYTES)
    if start.startswith(b"\x89PNG"):
        return start[25:26] in (b"\4", b"\6")
    if start.startswith(b"RIFF"):
        return _has_alpha_in_webp(start)
    if start[4:8] == b"ftyp":
        return b"auxiliary:alpha" in start or b"aux:hevc:2015:auxid:1" in start
    if start.startswith(TIFF_STARTS):
        return _has_extra_sample(read)
    if b"jP  " not in start[:12]:
        return False
    match = re.match(rb".*?\xffO\xffQ.{36}(..)", start, re.DOTALL)
    if match is None:
        return False
    return int.from_bytes(match[1], "big") in (2, 4)


def _has_alpha_in_webp(start: bytes) -> bool:
    flags_at = {b"VP8X": 20, b"VP8L": 24}.get(start[12:16])
    if flags_at is None or len(start) <= flags_at:
        return False
    return bool(start[flags_at] & 0x10)


def _has_extra_sample(read: Read) -> bool:
    try:
        tags = next(read_tiff_directories(read, (_SAMPLES, _PHOTOMETRIC)), {})
    except (struct.error, ValueError, OverflowError):
        return False
    if _SAMPLES not in tags:
        return False
    if _PHOTOMETRIC in tags and tags[_PHOTOMETRIC].values[0] == _CMYK:
        return False
    return tags[_SAMPLES].values[0] in (2, 4)


def _read_png_depth(start: bytes, read: Read) -> Depth | None:
    bits, colours = struct.unpack_from("2B", start, 24)
    if bits != 16:
        return None
    place = 33
    for _ in range(_MOST_CHUNKS):
        size, kind = struct.unpack(">I4s", read(place, 8))
        if kind == b"IDAT":
            break
        if kind == b"sBIT":
            bands = 3 if colours & 2 else 1
            used_bits = max(read(place + 8, min(size, bands)), default=0)
            stated = None
            if 0 < used_bits < 16:
                stated = (0, 2**used_bits - 1)
            return Depth(16, stated, form="PNG")
        place += size + 12
    return Depth(16, form="PNG")


def _read_pnm_depth(start: bytes) -> Depth | None:
    if start.startswith(b"P7"):
        header, _, _ = start.partition(b"ENDHDR")
        match = re.search(rb"\nMAXVAL\s+(\d{1,9})\s", header)
    else:
        match = _PNM_HEADER.match(start)
    if match is None:
        return None

    most = int(match[1])
    if most == 65535:
        return Depth(16)
    if 255 < most < 65535:
        return Depth(16, (0, most))
    is_text = start[1:2] in b"23"  # OpenCV scales its 8 bits
    if 0 < most < 255 and not is_text:
        return Depth(8, (0, most))
    return None


def _read_tiff_depth(directory: Mapping[int, Tag]) -> Depth | None:
    tags = {number: tag.values for number, tag in directory.items()}
    bits = int(max(tags.get(_BITS, (1,))))
    photometric = int(tags.get(_PHOTOMETRIC, (_BLACK_IS_ZERO,))[0])
    sample_format = int(tags.get(_FORMAT, (_UNSIGNED,))[0])
    if bits <= 8 or photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _MASK):
        return None

    is_float = sample_format == _FLOAT
    low = 0.0
    if sample_format != _UNSIGNED:
        low = min(tags.get(_S_SMALLEST, (0.0,)))
    unknown = (math.nan,)
    high = max(tags.get(_S_LARGEST, tags.get(_LARGEST, unknown)))
    full = 2**bits - 1
    if not is_float and not high < full:
        high = full if bits < 16 else math.nan

    stated = None
    if math.isfinite(low) and math.isfinite(high) and low < high:
        stated = (low, high)
    is_inverted = photometric == _WHITE_IS_ZERO
    return Depth(bits, stated, is_float, is_inverted, "TIFF")
