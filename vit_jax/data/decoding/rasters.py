"""Decode all formats but TIFF, by OpenCV, and by other means what it reads wrongly.

OpenCV 5.0.0 exchanges red and blue of an AVIF with alpha, takes the second image of some animated PNGs, draws the
background where a GIF is transparent, halves the range of a BMP of 16 bits, and mixes up bands of a PAM.
"""

import re
import struct
from collections.abc import Callable

import cv2
import imagecodecs
import numpy as np

MOST_BANDS = 4
_COLOURS = cv2.IMREAD_IGNORE_ORIENTATION
_VALUES = cv2.IMREAD_IGNORE_ORIENTATION | cv2.IMREAD_ANYDEPTH
_MOST_CHUNKS = 64  # of a PNG before its pixels
_BMP_BITS_AT = 28
_BMP_COMPRESSION_AT = 30
_BMP_WITHOUT_RLE = (0, 3)
_PAM_HEADER = re.compile(rb"P7\s.*?\bENDHDR[^\n]*\n", re.DOTALL)


class UndecodableRaster(ValueError):
    """A layout that is not supported; the message names it."""


def decode_colours(file: bytes) -> np.ndarray | None:
    """Return an image as uint8 RGB, (H, W, 3); None where it cannot be decoded.

    Alpha is dropped.

    Raises:
      UndecodableRaster: the layout is not supported.
      cv2.error: the file states more pixels than OpenCV takes.
    """
    if file.startswith(b"P7"):
        values = _decode_pam(file)
        return values if values.dtype == np.uint8 else (values >> 8).astype(np.uint8)
    if _is_bmp_of_16_bits(file):
        return _decode_bmp(file)
    return _decode_by_opencv(_repair(file), _COLOURS)


def decode_stored_values(file: bytes) -> np.ndarray | None:
    """Return the values as stored, (H, W, 3) in RGB; None and exceptions as `decode_colours`."""
    if file.startswith(b"P7"):
        return _decode_pam(file)
    return _decode_by_opencv(_repair(file), _VALUES)


def _decode_by_opencv(file: bytes, flags: int) -> np.ndarray | None:
    encoded = np.frombuffer(file, np.uint8)
    if file[4:8] != b"ftyp":
        pixels: np.ndarray | None = cv2.imdecode(encoded, flags | cv2.IMREAD_COLOR_RGB)
        return pixels
    # IMREAD_COLOR_RGB exchanges red and blue of an AVIF with alpha.
    pixels = cv2.imdecode(encoded, flags | cv2.IMREAD_COLOR_BGR)
    return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _repair(file: bytes) -> bytes:
    """Return a file that OpenCV decodes as other programs decode this one."""
    for start, repair in _REPAIRS:
        if file.startswith(start):
            return repair(file)
    return file


def _without_animation(file: bytes) -> bytes:
    """Remove the chunk that makes a PNG an animation, so that its default image is decoded."""
    place = 33
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(file):
            return file
        size, kind = struct.unpack_from(">I4s", file, place)
        if kind == b"IDAT":
            return file
        end = place + 12 + size
        if kind == b"acTL":
            return file[:place] + file[end:]
        place = end
    return file


def _without_transparency(file: bytes) -> bytes:
    """Clear the flag by which the first frame of a GIF has a transparent colour."""
    if len(file) < 13:
        return file
    place = 13
    if file[10] & 0x80:
        place += 3 << ((file[10] & 7) + 1)
    while place + 8 <= len(file) and file[place] == 0x21:
        if file[place + 1] == 0xF9 and file[place + 3] & 1:
            changed = bytearray(file)
            changed[place + 3] &= 0xFE
            return bytes(changed)
        place += 2
        while place < len(file) and file[place]:
            place += 1 + file[place]
        place += 1
    return file


_REPAIRS: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x89PNG", _without_animation),
    (b"GIF8", _without_transparency),
)


def _is_bmp_of_16_bits(file: bytes) -> bool:
    if not file.startswith(b"BM") or len(file) < _BMP_COMPRESSION_AT + 4 or file[14] < 40:
        return False
    (bits,) = struct.unpack_from("<H", file, _BMP_BITS_AT)
    (compression,) = struct.unpack_from("<I", file, _BMP_COMPRESSION_AT)
    return bits == 16 and compression in _BMP_WITHOUT_RLE


def _decode_bmp(file: bytes) -> np.ndarray | None:
    try:
        pixels: np.ndarray = imagecodecs.bmp_decode(file)
    except Exception:  # its exceptions have no one class
        return None
    return np.ascontiguousarray(pixels[..., :3]) if pixels.ndim == 3 else None


def _decode_pam(file: bytes) -> np.ndarray:
    """Return the values of a PAM, (H, W) or (H, W, 3), uint8 or uint16; MAXVAL scales them later.

    Raises:
      UndecodableRaster: the layout is not supported, or the file is cut off.
    """
    header = _PAM_HEADER.match(file)
    if header is None:
        raise UndecodableRaster("The file starts as PAM but its header is cut off or damaged")
    fields = dict(
        re.findall(rb"^(WIDTH|HEIGHT|DEPTH|MAXVAL)\s+(\d{1,9})\s*$", header[0], re.MULTILINE)
    )
    kind = re.search(rb"^TUPLTYPE\s+(\w+)", header[0], re.MULTILINE)
    if len(fields) < 4:
        raise UndecodableRaster(
            "The file starts as PAM but its header lacks WIDTH, HEIGHT, DEPTH or MAXVAL"
        )
    width, height, bands, most = (
        int(fields[name]) for name in (b"WIDTH", b"HEIGHT", b"DEPTH", b"MAXVAL")
    )
    if not 1 <= bands <= MOST_BANDS:
        raise UndecodableRaster(
            f"The file is a PAM of {bands} bands, and images have 1 to {MOST_BANDS}: save it as RGB"
        )
    if kind is not None and kind[1].startswith(b"CMYK"):
        raise UndecodableRaster("The file is a PAM of CMYK: save it as RGB")
    if not 1 <= most <= 65535:
        raise UndecodableRaster(
            f"The file is a PAM with MAXVAL {most}, which must be from 1 to 65535"
        )
    dtype = np.dtype(">u2" if most > 255 else "u1")
    count = height * width * bands
    if len(file) - header.end() < count * dtype.itemsize:
        raise UndecodableRaster(f"The file starts as PAM but is cut off ({len(file)} bytes)")
    values = np.frombuffer(file, dtype, count, header.end()).reshape(height, width, bands)
    colours = values[..., :3] if bands >= 3 else np.repeat(values[..., :1], 3, axis=-1)
    return np.ascontiguousarray(colours, dtype.newbyteorder("="))
