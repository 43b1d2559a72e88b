"""How a photograph is turned upright: the orientation that its Exif data state, of JPEG, PNG, WebP and TIFF."""

import re
import struct

import numpy as np

from vit_jax.data.crops import Box
from vit_jax.data.headers import jpeg_segments, tiff_entries, tiff_tags

_ORIENTATION = 274  # tag
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_JPEG_EXIF, _EXIF = 0xE1, b"Exif\0\0"
_TRANSPOSED, _UPSIDE_DOWN, _MIRRORED = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)  # in this order to be upright


def orientation_of(file: bytes | np.ndarray) -> int:
    """The orientation, 1 to 8; 1, upright, where none is stated."""
    if isinstance(file, np.ndarray):
        return 1
    try:
        stated = tiff_tags(_exif(file)).get(_ORIENTATION, 1)
    except (struct.error, ValueError):
        return 1
    return stated if 1 <= stated <= 8 else 1


def _exif(file: bytes) -> bytes:
    """The Exif data of a file, which have the form of a TIFF; nothing where there are none."""
    if file.startswith(b"\xff\xd8\xff"):
        places = (place for marker, place in jpeg_segments(file) if marker == _JPEG_EXIF)
        return next((file[place + len(_EXIF) :] for place in places if file.startswith(_EXIF, place)), b"")
    if file.startswith(_TIFF):
        return file
    kinds = {b"\x89PNG": rb"eXIf", b"RIFF": rb"EXIF.{4}(?:Exif\0\0)?"}
    found = re.search(kinds.get(file[:4], rb"(?!)"), file, re.DOTALL)
    return file[found.end() :] if found else b""


def without_orientation(file: bytes) -> bytes:
    """Set the orientation of a TIFF to upright; return any other file unchanged.

    OpenCV turns a TIFF by this tag, also with `IMREAD_IGNORE_ORIENTATION`.
    """
    if not file.startswith(_TIFF) or orientation_of(file) == 1:
        return file
    changed = bytearray(file)
    for tag, layout, place in tiff_entries(file):
        if tag == _ORIENTATION:
            struct.pack_into(layout, changed, place, 1)
    return bytes(changed)


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The upright image (H, W, 3) of one that is stored with this orientation."""
    if orientation == 1:
        return pixels
    upright = pixels.swapaxes(0, 1) if orientation in _TRANSPOSED else pixels
    upright = upright[::-1] if orientation in _UPSIDE_DOWN else upright
    return np.ascontiguousarray(upright[:, ::-1] if orientation in _MIRRORED else upright)


def turn_back(box: Box, orientation: int, height: int, width: int) -> Box:
    """Where a part of the upright image (of this height and width) is in the stored one."""
    top, left, tall, wide = box
    top = height - top - tall if orientation in _UPSIDE_DOWN else top
    left = width - left - wide if orientation in _MIRRORED else left
    return Box(left, top, wide, tall) if orientation in _TRANSPOSED else Box(top, left, tall, wide)


def is_transposed(orientation: int) -> bool:
    """Whether height and width of the stored image are width and height of the upright one."""
    return orientation in _TRANSPOSED


def tagged(jpeg: bytes, orientation: int) -> bytes:
    """A JPEG that has no Exif data, with an orientation."""
    if orientation == 1:
        return jpeg
    tiff = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, _ORIENTATION, 3, 1, orientation, 0, 0)
    return jpeg[:2] + struct.pack(">BBH", 0xFF, _JPEG_EXIF, 2 + len(_EXIF) + len(tiff)) + _EXIF + tiff + jpeg[2:]
