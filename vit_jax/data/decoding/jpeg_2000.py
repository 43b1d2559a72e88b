"""Decode JPEG 2000 by imagecodecs.

OpenCV 5.0.0 converts YCbCr by wrong coefficients, and reads neither values of fewer than 8 bits nor
codestreams of 1 or 2 bands.
"""

import struct
from typing import NamedTuple

import imagecodecs
import numpy as np

from vit_jax.data.decoding.bitmaps import MOST_BANDS
from vit_jax.data.decoding.errors import UnreadableImage
from vit_jax.data.decoding.heif import read_boxes

_CODESTREAM = b"\xff\x4f\xff\x51"
_BANDS_AT = 40
"""Offset of the number of bands in the codestream."""
_SIGNED = 0x80
_ENUMERATED = 1
"""The kind of colours that have a number, not a profile."""
# Enumerated colours that would be taken for RGB or grey.
_OTHER_COLOURS = {
    **dict.fromkeys((1, 3, 4, 22, 23), "YCbCr of video"),
    9: "Photo YCC",
    11: "CMY",
    12: "CMYK",
    13: "YCCK",
    14: "CIELAB",
    15: "inverted black and white",
    19: "CIEJab",
    24: "e-sYCC",
}


class _Header(NamedTuple):
    """Numbers of the header.

    Attributes:
      bands: bands of a stored pixel.
      bits: bits of a value, after the palette.
      is_signed: values may be negative.
    """

    bands: int
    bits: int
    is_signed: bool


def decode_stored_values(file: bytes) -> np.ndarray:
    """Return the values as stored, (H, W, 3), uint8 or uint16; YCbCr becomes RGB.

    Raises:
      UnreadableImage: the layout is not supported, or the file is damaged; the message says
        which.
    """
    values, _ = _decode(file)
    return values


def decode_colours(file: bytes) -> np.ndarray:
    """Return the image as uint8 RGB, (H, W, 3); exceptions as `decode_stored_values`."""
    values, header = _decode(file)
    if header.bits > 8:
        return (values >> (header.bits - 8)).astype(np.uint8)
    if header.bits < 8:
        most = (1 << header.bits) - 1
        return np.rint(values * (255 / most)).astype(np.uint8)
    return values


def _decode(file: bytes) -> tuple[np.ndarray, _Header]:
    header = _read_header(file)
    description = f"JPEG 2000 of {header.bands} bands of {header.bits} bits"
    if header.is_signed:
        raise _build_unsupported_error("signed values", description)
    if header.bits > 16:
        raise _build_unsupported_error(f"values of {header.bits} bits", description)
    try:
        values: np.ndarray = imagecodecs.jpeg2k_decode(file)
    except Exception as error:  # its exceptions have no one class
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UnreadableImage(
            f"The file starts as {description} but is cut off, damaged or of an unknown kind: "
            f"{reason}",
        ) from error
    if values.dtype not in (np.uint8, np.uint16) or values.ndim not in (2, 3):
        raise _build_unsupported_error(f"values as {values.dtype} {values.shape}", description)
    if values.ndim == 2:
        values = values[..., None]
    if values.shape[2] < 3:
        values = np.repeat(values[..., :1], 3, axis=-1)
    return np.ascontiguousarray(values[..., :3]), header


def _read_header(file: bytes) -> _Header:
    try:
        start = file.index(_CODESTREAM)
        (bands,) = struct.unpack_from(">H", file, start + _BANDS_AT)
        kinds = {file[start + _BANDS_AT + 2 + 3 * band] for band in range(min(bands, MOST_BANDS))}
        colours, palette_kinds = _read_jp2_header(file[:start])
    except (ValueError, IndexError, struct.error) as error:
        raise UnreadableImage(
            "The file starts as JPEG 2000 but its header is cut off or damaged",
        ) from error
    if not 1 <= bands <= MOST_BANDS:
        raise UnreadableImage(
            f"The file is a JPEG 2000 of {bands} bands, and images have 1 to {MOST_BANDS}: "
            "save it as RGB",
        )
    description = f"JPEG 2000 of {bands} bands"
    if colours in _OTHER_COLOURS:
        raise _build_unsupported_error(
            f"colours of the kind {colours} ({_OTHER_COLOURS[colours]})",
            description,
        )
    kinds = palette_kinds or kinds
    if len(kinds) != 1:
        raise _build_unsupported_error("bands of different kinds", description)
    (kind,) = kinds
    return _Header(bands, (kind & ~_SIGNED) + 1, bool(kind & _SIGNED))


def _read_jp2_header(head: bytes) -> tuple[int | None, set[int]]:
    """Return the number of the colours or None, and the kinds of the bands of a palette, if any."""
    colours: int | None = None
    palette_kinds: set[int] = set()
    for outer in read_boxes(head):
        if outer.kind != b"jp2h":
            continue
        for box in read_boxes(head, outer.start, outer.end):
            if box.kind == b"colr" and head[box.start] == _ENUMERATED and colours is None:
                (colours,) = struct.unpack_from(">I", head, box.start + 3)
            elif box.kind == b"pclr":
                count = head[box.start + 2]
                palette_kinds |= {*head[box.start + 3 : box.start + 3 + count]}
    return colours, palette_kinds


def _build_unsupported_error(layout: str, description: str) -> UnreadableImage:
    return UnreadableImage(
        f"The file has {layout}, which cannot be decoded ({description}): "
        "save it as PNG, or as grey or RGB",
    )
