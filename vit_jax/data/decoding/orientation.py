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
from vit_jax.data.decoding import heif
from vit_jax.data.decoding.headers import TIFF_STARTS, jpeg_segments, tiff_tags

_ORIENTATION = 274
_TIFF_XMP = 700  # tags
_APP1 = 0xE1
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_PNG_XMP = b"XML:com.adobe.xmp\0"
_PNG_PROFILE = re.compile(
    rb"Raw profile type (exif|APP1|xmp)\0", re.IGNORECASE
)  # of ImageMagick, in hexadecimal
_JP2_EXIF = b"JpgTiffExif->JP2"
_JP2_XMP = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
_XMP_ORIENTATION = re.compile(rb"""tiff:Orientation\s*(?:=\s*["']|>)\s*([0-9])\s*["'<]""")
_MOST_XMP = 2**20  # bytes that are searched
_MOST_CHUNKS = 2**16  # of a PNG or WebP
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (
    (5, 6, 7, 8),
    (3, 4, 7, 8),
    (2, 3, 6, 7),
)  # in this order to be upright


class _Stated(NamedTuple):
    """Metadata of a file that may state an orientation: Exif as TIFF, XMP as text."""

    exif: bytes = b""
    xmp: bytes = b""


def orientation_of(file: bytes | np.ndarray) -> int:
    """Return the orientation, 1 to 8; 1, upright, if none is stated."""
    if isinstance(file, np.ndarray):
        return 1
    try:
        stated = _read_orientation(file)
    except (struct.error, ValueError, OverflowError, IndexError, zlib.error):
        return 1
    return stated if stated is not None and 1 <= stated <= 8 else 1


def _read_orientation(file: bytes) -> int | None:
    if file[4:8] == b"ftyp":
        metadata = heif.read_metadata(file)
        if metadata.orientation is not None:
            return metadata.orientation
        found = _Stated(metadata.exif, metadata.xmp)
    else:
        found = _find_metadata(file)
    stated = _orientation_in_exif(found.exif)
    return stated if stated is not None else _orientation_in_xmp(found.xmp)


def _orientation_in_exif(exif: bytes) -> int | None:
    if not exif:
        return None
    try:
        tags = tiff_tags(exif, (_ORIENTATION,))
    except (struct.error, ValueError, OverflowError):
        return None
    return int(tags[_ORIENTATION].values[0]) if tags else None


def _orientation_in_xmp(xmp: bytes) -> int | None:
    match = _XMP_ORIENTATION.search(xmp, 0, _MOST_XMP)
    return int(match[1]) if match else None


def _find_metadata(file: bytes) -> _Stated:
    if file.startswith(b"\xff\xd8\xff"):
        return _metadata_of_jpeg(file)
    if file.startswith(TIFF_STARTS):
        return _metadata_of_tiff(file)
    if file.startswith(b"\x89PNG"):
        return _metadata_of_png(file)
    if file.startswith(b"RIFF"):
        return _metadata_of_webp(file)
    if file.startswith(b"\0\0\0\x0cjP  "):
        return _metadata_of_jp2(file)
    if file.startswith(b"GIF8"):
        place = file.find(b"XMP DataXMP")
        return _Stated(xmp=file[place : place + _MOST_XMP] if place > 0 else b"")
    return _Stated()


def _metadata_of_jpeg(file: bytes) -> _Stated:
    exif = b""
    xmp = b""
    for marker, place in jpeg_segments(file):
        if marker != _APP1:
            continue
        end = place - 2 + int.from_bytes(file[place - 2 : place], "big")
        if file.startswith(_EXIF, place) and not exif:
            exif = file[place + len(_EXIF) : end]
        elif file.startswith(_XMP, place) and not xmp:
            xmp = file[place + len(_XMP) : end]
    return _Stated(exif, xmp)


def _metadata_of_tiff(file: bytes) -> _Stated:
    tag = tiff_tags(file, (_TIFF_XMP,), most_values=_MOST_XMP).get(_TIFF_XMP)
    xmp = b""
    if tag is not None:
        xmp = bytes(int(value) & 255 for value in tag.values)
    return _Stated(file, xmp)


def _metadata_of_png(file: bytes) -> _Stated:
    exif = b""
    xmp = b""
    for kind, body in _png_metadata(file):
        if kind == b"eXIf":
            exif = body
        elif kind == b"iTXt" and body.startswith(_PNG_XMP):
            xmp = _text_of_itxt(body)
        elif kind in (b"tEXt", b"zTXt") and (match := _PNG_PROFILE.match(body)):
            profile = _read_profile(body[match.end() :], is_compressed=kind == b"zTXt")
            if profile.startswith(_EXIF):
                exif = exif or profile[len(_EXIF) :]
            else:
                xmp = xmp or profile
    return _Stated(exif, xmp)


def _png_metadata(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of the chunks of a PNG that may hold metadata."""
    place = 8
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(file):
            return
        size, kind = struct.unpack_from(">I4s", file, place)
        if kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            yield kind, file[place + 8 : place + 8 + min(size, _MOST_XMP)]
        place += size + 12


def _text_of_itxt(body: bytes) -> bytes:
    is_compressed = body[len(_PNG_XMP)] == 1
    _, _, rest = body[len(_PNG_XMP) + 2 :].partition(b"\0")  # the language
    _, _, text = rest.partition(b"\0")  # the translated keyword
    return _inflate(text) if is_compressed else text


def _read_profile(text: bytes, is_compressed: bool) -> bytes:
    """Return the bytes of a profile: a name, a length and hexadecimal digits, on lines."""
    if is_compressed:
        text = _inflate(text[1:])
    lines = text.strip().split(b"\n", 2)
    if len(lines) < 3:
        return b""
    return bytes.fromhex(lines[2].decode("ascii"))


def _inflate(data: bytes) -> bytes:
    return zlib.decompressobj().decompress(data, _MOST_XMP)


def _metadata_of_webp(file: bytes) -> _Stated:
    exif = b""
    xmp = b""
    place = 12
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(file):
            break
        kind, size = struct.unpack_from("<4sI", file, place)
        if kind == b"EXIF":
            exif = file[place + 8 : place + 8 + size].removeprefix(_EXIF)
        elif kind == b"XMP ":
            xmp = file[place + 8 : place + 8 + size]
        place += 8 + size + size % 2
    return _Stated(exif, xmp)


def _metadata_of_jp2(file: bytes) -> _Stated:
    exif = b""
    xmp = b""
    for box in heif.read_boxes(file):
        if box.kind != b"uuid":
            continue
        identifier = file[box.start : box.start + 16]
        if identifier == _JP2_EXIF:
            exif = file[box.start + 16 : box.end].removeprefix(_EXIF)
        elif identifier == _JP2_XMP:
            xmp = file[box.start + 16 : box.end]
    return _Stated(exif, xmp)


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return the upright image (H, W, 3) of pixels stored with this orientation."""
    if orientation == 1:
        return pixels
    upright = pixels.swapaxes(0, 1) if orientation in _TRANSPOSED else pixels
    upright = upright[::-1] if orientation in _UPSIDE_DOWN else upright
    return np.ascontiguousarray(upright[:, ::-1] if orientation in _MIRRORED else upright)


def turn_back(box: Box, orientation: int, height: int, width: int) -> Box:
    """Return the box in the stored image of a box in the upright image, which has this height and width."""
    top, left, tall, wide = box
    top = height - top - tall if orientation in _UPSIDE_DOWN else top
    left = width - left - wide if orientation in _MIRRORED else left
    return Box(left, top, wide, tall) if orientation in _TRANSPOSED else Box(top, left, tall, wide)


def is_transposed(orientation: int) -> bool:
    """Return True if height and width of the stored image are width and height of the upright image."""
    return orientation in _TRANSPOSED


def tagged(jpeg: bytes, orientation: int) -> bytes:
    """Add an orientation to a JPEG that has no Exif data."""
    if orientation == 1:
        return jpeg
    tiff = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, _ORIENTATION, 3, 1, orientation, 0, 0)
    return (
        jpeg[:2]
        + struct.pack(">BBH", 0xFF, _APP1, 2 + len(_EXIF) + len(tiff))
        + _EXIF
        + tiff
        + jpeg[2:]
    )
