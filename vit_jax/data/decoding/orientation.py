"""Turn photographs upright by the orientation that their file states.

Exif data state it in JPEG, PNG, WebP, TIFF, AVIF and JPEG 2000; where they do not, XMP data in
these formats and GIF. The properties irot and imir of an AVIF come first. Pillow 13 takes 4 to 10
times as long for a JPEG, and may decode a PNG for it.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vit_jax.data.crops import Box
from vit_jax.data.decoding.headers import TIFF_STARTS, find_jpeg_segments, read_tiff_tags

# Tags of a TIFF.
_ORIENTATION = 274
_TIFF_XMP = 700
_APP1 = 0xE1
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_PNG_XMP = b"XML:com.adobe.xmp\0"
_PNG_PROFILE = re.compile(rb"Raw profile type (exif|APP1|xmp)\0", re.IGNORECASE)
"""The begin of a profile by ImageMagick, in hexadecimal."""
_JP2_EXIF = b"JpgTiffExif->JP2"
_JP2_XMP = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
_XMP_ORIENTATION = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([0-9])\s*["'<]""")
_MOST_XMP = 2**20
"""Number of bytes that are searched."""
_MOST_CHUNKS = 2**16
"""Number of chunks of a PNG or WebP that are read."""
# Orientations with each step to the upright image, in the order of the steps.
_TRANSPOSED = (5, 6, 7, 8)
_UPSIDE_DOWN = (3, 4, 7, 8)
_MIRRORED = (2, 3, 6, 7)


class _Metadata(NamedTuple):
    """Metadata of a file that may state an orientation: Exif as TIFF, XMP as text."""

    exif: bytes = b""
    xmp: bytes = b""


def read_orientation(file: bytes | np.ndarray) -> int:
    """Return the orientation, 1 to 8; 1, upright, if none is stated."""
    if isinstance(file, np.ndarray):
        return 1
    try:
        stated = _find_orientation(file)
    except (struct.error, ValueError, OverflowError, IndexError, zlib.error):
        return 1
    if stated is None or not 1 <= stated <= 8:
        return 1
    return stated


def _find_orientation(file: bytes) -> int | None:
    if file[4:8] == b"ftyp":
        from vit_jax.data.decoding import heif

        metadata = heif.read_metadata(file)
        if metadata.orientation is not None:
            return metadata.orientation
        found = _Metadata(metadata.exif, metadata.xmp)
    else:
        found = _find_metadata(file)

    stated = _read_exif_orientation(found.exif)
    if stated is not None:
        return stated
    return _read_xmp_orientation(found.xmp)


def _read_exif_orientation(exif: bytes) -> int | None:
    if not exif:
        return None
    try:
        tags = read_tiff_tags(exif, (_ORIENTATION,))
    except (struct.error, ValueError, OverflowError):
        return None
    if not tags:
        return None
    return int(tags[_ORIENTATION].values[0])


def _read_xmp_orientation(xmp: bytes) -> int | None:
    match = _XMP_ORIENTATION.search(xmp, 0, _MOST_XMP)
    if match is None:
        return None
    return int(match[1])


def _find_metadata(file: bytes) -> _Metadata:
    if file.startswith(b"\xff\xd8\xff"):
        return _read_jpeg_metadata(file)
    if file.startswith(TIFF_STARTS):
        return _read_tiff_metadata(file)
    if file.startswith(b"\x89PNG"):
        return _read_png_metadata(file)
    if file.startswith(b"RIFF"):
        return _read_webp_metadata(file)
    if file.startswith(b"\0\0\0\x0cjP  "):
        return _read_jp2_metadata(file)
    if file.startswith(b"GIF8"):
        return _read_gif_metadata(file)
    return _Metadata()


def _read_gif_metadata(file: bytes) -> _Metadata:
    place = file.find(b"XMP DataXMP")
    if place <= 0:
        return _Metadata()
    return _Metadata(xmp=file[place : place + _MOST_XMP])


def _read_jpeg_metadata(file: bytes) -> _Metadata:
    exif = b""
    xmp = b""
    for marker, place in find_jpeg_segments(file):
        if marker != _APP1:
            continue

        size = int.from_bytes(file[place - 2 : place], "big")
        end = place - 2 + size
        if file.startswith(_EXIF, place) and not exif:
            exif = file[place + len(_EXIF) : end]
        elif file.startswith(_XMP, place) and not xmp:
            xmp = file[place + len(_XMP) : end]
    return _Metadata(exif, xmp)


def _read_tiff_metadata(file: bytes) -> _Metadata:
    tags = read_tiff_tags(file, (_TIFF_XMP,), most_values=_MOST_XMP)
    if _TIFF_XMP not in tags:
        return _Metadata(file)

    values = tags[_TIFF_XMP].values
    xmp = bytes(int(value) & 255 for value in values)
    return _Metadata(file, xmp)


def _read_png_metadata(file: bytes) -> _Metadata:
    exif = b""
    xmp = b""
    for kind, body in _find_png_metadata(file):
        if kind == b"eXIf":
            exif = body
        elif kind == b"iTXt" and body.startswith(_PNG_XMP):
            xmp = _read_itxt_text(body)
        elif kind in (b"tEXt", b"zTXt"):
            profile = _find_profile(body, is_compressed=kind == b"zTXt")
            if profile is None:
                continue
            if profile.startswith(_EXIF):
                exif = exif or profile[len(_EXIF) :]
            else:
                xmp = xmp or profile
    return _Metadata(exif, xmp)


def _find_png_metadata(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of the chunks of a PNG that may hold metadata."""
    place = 8
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(file):
            return
        size, kind = struct.unpack_from(">I4s", file, place)
        if kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            start = place + 8
            end = start + min(size, _MOST_XMP)
            yield kind, file[start:end]
        place += size + 12


def _read_itxt_text(body: bytes) -> bytes:
    flag_at = len(_PNG_XMP)
    is_compressed = body[flag_at] == 1
    _, _, after_language = body[flag_at + 2 :].partition(b"\0")
    _, _, text = after_language.partition(b"\0")  # after the translated keyword
    if is_compressed:
        return _inflate(text)
    return text


def _find_profile(body: bytes, is_compressed: bool) -> bytes | None:
    """Return the bytes of a profile: a name, a length and hexadecimal digits, on lines.

    Another text of a PNG is None.
    """
    match = _PNG_PROFILE.match(body)
    if match is None:
        return None

    text = body[match.end() :]
    if is_compressed:
        text = _inflate(text[1:])
    lines = text.strip().split(b"\n", 2)
    if len(lines) < 3:
        return b""
    return bytes.fromhex(lines[2].decode("ascii"))


def _inflate(data: bytes) -> bytes:
    return zlib.decompressobj().decompress(data, _MOST_XMP)


def _read_webp_metadata(file: bytes) -> _Metadata:
    exif = b""
    xmp = b""
    place = 12
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(file):
            break
        kind, size = struct.unpack_from("<4sI", file, place)
        start = place + 8
        end = start + size
        if kind == b"EXIF":
            exif = file[start:end].removeprefix(_EXIF)
        elif kind == b"XMP ":
            xmp = file[start:end]
        place = end + size % 2
    return _Metadata(exif, xmp)


def _read_jp2_metadata(file: bytes) -> _Metadata:
    from vit_jax.data.decoding import heif

    exif = b""
    xmp = b""
    for box in heif.read_boxes(file):
        if box.kind != b"uuid":
            continue

        content_at = box.start + 16
        identifier = file[box.start : content_at]
        if identifier == _JP2_EXIF:
            exif = file[content_at : box.end].removeprefix(_EXIF)
        elif identifier == _JP2_XMP:
            xmp = file[content_at : box.end]
    return _Metadata(exif, xmp)


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return the upright image (H, W, 3) of pixels stored with this orientation."""
    if orientation == 1:
        return pixels
    if orientation in _TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _UPSIDE_DOWN:
        pixels = pixels[::-1]
    if orientation in _MIRRORED:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def turn_back(box: Box, orientation: int, height: int, width: int) -> Box:
    """Return the box in the stored image of a box in the upright image.

    `height` and `width` are those of the upright image.
    """
    top = box.top
    if orientation in _UPSIDE_DOWN:
        top = height - box.top - box.height
    left = box.left
    if orientation in _MIRRORED:
        left = width - box.left - box.width

    if orientation in _TRANSPOSED:
        return Box(left, top, box.width, box.height)
    return Box(top, left, box.height, box.width)


def is_transposed(orientation: int) -> bool:
    """Return True if the height of the stored image is the width of the upright image."""
    return orientation in _TRANSPOSED


def add_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Add an orientation to a JPEG that has no Exif data."""
    if orientation == 1:
        return jpeg
    tiff = struct.pack(
        ">2sHIHHHIHHI",
        b"MM",
        42,
        8,
        1,
        _ORIENTATION,
        3,
        1,
        orientation,
        0,
        0,
    )
    size = 2 + len(_EXIF) + len(tiff)
    head = struct.pack(">BBH", 0xFF, _APP1, size)
    return jpeg[:2] + head + _EXIF + tiff + jpeg[2:]
