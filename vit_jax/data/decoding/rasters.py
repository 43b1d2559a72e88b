"""Decode all formats but TIFF, by OpenCV and, for files that it reads wrongly, by other means.

OpenCV 5.0.0 exchanges red and blue of an AVIF with alpha, leaves grey AVIF at the range of video
and reads none with alpha, takes the second image of some animated PNGs, and shows the background
where a GIF is transparent or empty. Modules of formats are imported for their first file.
"""

import struct
from collections.abc import Callable

import cv2
import numpy as np

_COLOURS = cv2.IMREAD_IGNORE_ORIENTATION
_VALUES = cv2.IMREAD_IGNORE_ORIENTATION | cv2.IMREAD_ANYDEPTH
_GIF_BACKGROUND_AT = 11
_PNG_COLOURS_AT = 25
_PNG_GREY_ALPHA = 4
_PAM_START = b"P7"
_SUN_START = b"\x59\xa6\x6a\x95"
_BITMAP_STARTS = (_PAM_START, b"BM", _SUN_START)
_JPEG_2000_STARTS = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
"""First bytes of a file with boxes, and of a codestream without them."""
_BOXES = b"ftyp"
"""The first box of an AVIF, after four bytes."""
_MOST_CHUNKS = 64
"""Number of chunks of a PNG that are read before its pixels."""


def decode_colours(file: bytes) -> np.ndarray | None:
    """Return an image as uint8 RGB, (H, W, 3); None where it cannot be decoded.

    Alpha is dropped.

    Raises:
      UnreadableImage: the layout is not supported.
      cv2.error: the file states more pixels than OpenCV takes.
    """
    if file.startswith(_BITMAP_STARTS):
        from vit_jax.data.decoding import bitmaps

        if file.startswith(_PAM_START):
            values = bitmaps.decode_pam(file)
            return _drop_low_bits(values, 16)
        if bitmaps.is_bmp_of_bit_fields(file):
            return bitmaps.decode_bmp(file)
        if file.startswith(_SUN_START):
            bitmaps.require_plain_sun_raster(file)
    elif file.startswith(_JPEG_2000_STARTS):
        from vit_jax.data.decoding import jpeg_2000

        return jpeg_2000.decode_colours(file)
    elif file[4:8] == _BOXES:
        from vit_jax.data.decoding import heif

        if heif.is_monochrome(file):
            grey = _decode_grey_avif(file)
            if grey is None:
                return None
            return _drop_low_bits(grey, heif.count_bits(file))
    return _decode_by_opencv(_repair(file), _COLOURS)


def decode_stored_values(file: bytes) -> np.ndarray | None:
    """Return the values as stored, (H, W, 3) in RGB; None and exceptions as `decode_colours`."""
    if file.startswith(_PAM_START):
        from vit_jax.data.decoding import bitmaps

        return bitmaps.decode_pam(file)
    if file.startswith(_JPEG_2000_STARTS):
        from vit_jax.data.decoding import jpeg_2000

        return jpeg_2000.decode_stored_values(file)
    if file[4:8] == _BOXES:
        from vit_jax.data.decoding import heif

        if heif.is_monochrome(file):
            return _decode_grey_avif(file)
    return _decode_by_opencv(_repair(file), _VALUES)


def decode_bands(file: bytes) -> np.ndarray | None:
    """Return all bands as stored, (H, W) or (H, W, bands): grey, grey and alpha, RGB, or RGBA.

    Grey is three equal bands in JPEG 2000, AVIF, PAM, BMP and Sun raster. Return None and raise
    exceptions as `decode_colours`.
    """
    if file.startswith((_PAM_START, *_JPEG_2000_STARTS)) or file[4:8] == _BOXES:
        return decode_stored_values(file)
    if file.startswith(_BITMAP_STARTS):
        return decode_colours(file)

    encoded = np.frombuffer(_repair(file), np.uint8)
    values: np.ndarray | None = cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED)
    if values is None or values.ndim == 2:
        return values
    if file.startswith(b"\x89PNG") and file[_PNG_COLOURS_AT] == _PNG_GREY_ALPHA:
        return values[..., [0, 3]]
    if values.shape[-1] == 4:
        return values[..., [2, 1, 0, 3]]
    return values[..., ::-1]


def is_decoded_as_rgb(file: bytes) -> bool:
    """Return True for the formats of which grey or RGB is read, no other bands."""
    return file.startswith(_JPEG_2000_STARTS) or file[4:8] == _BOXES


def _decode_grey_avif(file: bytes) -> np.ndarray | None:
    """Return the values of a grey AVIF, (H, W, 3), without alpha."""
    import imagecodecs

    from vit_jax.data.decoding import heif

    try:
        # imagecodecs 2026.3.6 writes beyond its memory for the second image of a sequence.
        values: np.ndarray = imagecodecs.avif_decode(heif.remove_sequence(file))
    except Exception:  # its exceptions have no one class
        return None

    grey = values
    if values.ndim != 2:
        grey = values[..., 0]
    if grey.ndim != 2:
        return None
    return np.repeat(grey[..., None], 3, axis=-1)


def _drop_low_bits(values: np.ndarray, bits: int) -> np.ndarray:
    if values.dtype == np.uint8:
        return values
    return (values >> (bits - 8)).astype(np.uint8)


def _decode_by_opencv(file: bytes, flags: int) -> np.ndarray | None:
    encoded = np.frombuffer(file, np.uint8)
    if file[4:8] != _BOXES:
        pixels: np.ndarray | None = cv2.imdecode(encoded, flags | cv2.IMREAD_COLOR_RGB)
        return pixels

    # IMREAD_COLOR_RGB exchanges red and blue of an AVIF with alpha.
    pixels = cv2.imdecode(encoded, flags | cv2.IMREAD_COLOR_BGR)
    if pixels is None:
        return None
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _repair(file: bytes) -> bytes:
    """Return a file that OpenCV decodes as other programs decode this one."""
    for start, repair in _REPAIRS:
        if file.startswith(start):
            return repair(file)
    return file


def _remove_animation(file: bytes) -> bytes:
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


def _remove_transparency(file: bytes) -> bytes:
    """Clear the flag by which the first frame of a GIF has a transparent colour.

    Pixels outside of the frame show this colour, or else colour 0, as in Pillow; not the
    background.
    """
    if len(file) < 13:
        return file
    changed = bytearray(file)
    changed[_GIF_BACKGROUND_AT] = 0
    place = 13
    if file[10] & 0x80:
        place += 3 << ((file[10] & 7) + 1)
    while place + 8 <= len(file) and file[place] == 0x21:
        if file[place + 1] == 0xF9 and file[place + 3] & 1:
            changed[place + 3] &= 0xFE
            changed[_GIF_BACKGROUND_AT] = file[place + 6]
            break
        place += 2
        while place < len(file) and file[place]:
            place += 1 + file[place]
        place += 1
    return bytes(changed)


def _end_last_line(file: bytes) -> bytes:
    """End the last number of a PNM as text, which OpenCV does not read at the end of the file."""
    return file + b"\n"


_REPAIRS: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x89PNG", _remove_animation),
    (b"GIF8", _remove_transparency),
    (b"P1", _end_last_line),
    (b"P2", _end_last_line),
    (b"P3", _end_last_line),
)
