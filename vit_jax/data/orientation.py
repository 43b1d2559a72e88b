"""Turn photographs upright by the orientation in the Exif data of JPEG, PNG, WebP and TIFF.

Pillow 13 takes 4 to 10 times as long for a JPEG, and may decode a PNG for it.
"""

import re
import struct

import numpy as np

from vit_jax.data.crops import Box
from vit_jax.data.headers import TIFF_STARTS, jpeg_segments, tiff_tags

_ORIENTATION = 274  # tag
_JPEG_EXIF, _EXIF = 0xE1, b"Exif\0\0"
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)  # in this order to be upright


def orientation_of(file: bytes | np.ndarray) -> int:
    """Return the orientation, 1 to 8; 1, upright, if none is stated."""
    if isinstance(file, np.ndarray):
        return 1
    try:
        tags = tiff_tags(_exif(file), (_ORIENTATION,))
        stated = int(tags[_ORIENTATION].values[0]) if tags else 1
    except (struct.error, ValueError, OverflowError):
        return 1
    return stated if 1 <= stated <= 8 else 1


def _exif(file: bytes) -> bytes:
    """Return the Exif data of a file, which have the form of a TIFF; empty without any."""
    if file.startswith(b"\xff\xd8\xff"):
        places = (place for marker, place in jpeg_segments(file) if marker == _JPEG_EXIF)
        return next((file[place + len(_EXIF) :] for place in places if file.startswith(_EXIF, place)), b"")
    if file.startswith(TIFF_STARTS):
        return file
    chunk = {b"\x89PNG": rb"eXIf", b"RIFF": rb"EXIF.{4}(?:Exif\0\0)?"}.get(file[:4])
    match = chunk and re.search(chunk, file, re.DOTALL)
    return file[match.end() :] if match else b""


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
    return jpeg[:2] + struct.pack(">BBH", 0xFF, _JPEG_EXIF, 2 + len(_EXIF) + len(tiff)) + _EXIF + tiff + jpeg[2:]
