"""Crops of JPEG files, decoded without the rest of the file if possible.

A decoder has to read a JPEG from its first pixel. Where the file has a restart marker after every
row of blocks, the rows above and below the crop are removed before; else a smaller height is
written into the header, and decoding ends below the crop. Both give the very pixels of the complete
image. A crop of at least twice the wanted size is decoded at a half, a quarter or an eighth of its
size, which averages where a later bilinear resize would skip pixels.
"""

import functools
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

from vit_jax.data.crops import Box, cut
from vit_jax.data.decoding.headers import JPEG_FRAMES, JPEG_SCAN, jpeg_segments

try:
    import simplejpeg
except (
    ImportError
):  # OpenCV decodes the same pixels; it is slower, and complains of files whose height was changed
    simplejpeg = None

DECODER = "OpenCV" if simplejpeg is None else "simplejpeg"
# The part of a side, by OpenCV's flag for it, which says nothing of colours where a flag for these
# stands beside it.
REDUCTIONS = {
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
    1: 0,
}
_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_SEQUENTIAL = (0xC0, 0xC1)  # baseline and extended, with Huffman codes
_RESTART_INTERVAL = 0xDD
_END = b"\xff\xd9"
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_CONTEXT = (
    2  # pixels around a crop that smooth its colours, which are stored at half the resolution
)


class Layout(NamedTuple):
    """Contents of the header of a JPEG.

    Attributes:
      height, width: in pixels.
      size_at: offset of both in the file.
      unit: height and width of the blocks that are coded together.
      interval: blocks from one restart marker to the next, from left to right and row by row; 0: no
        markers.
      data_at: offset of the coded blocks; 0: they are in several scans, and all are needed.
    """

    height: int
    width: int
    size_at: int
    unit: tuple[int, int]
    interval: int
    data_at: int


def layout_of(file: bytes) -> Layout | None:
    """Return the layout of a JPEG that is grey or has three colours of 8 bits; None for any other file."""
    if not file.startswith(b"\xff\xd8\xff"):
        return None
    frame = None
    interval = 0
    for marker, place in jpeg_segments(file):
        if marker in JPEG_FRAMES and frame is None:
            frame = place
            is_sequential = marker in _SEQUENTIAL
        elif marker == _RESTART_INTERVAL:
            interval = int.from_bytes(file[place : place + 2], "big")
        elif marker == JPEG_SCAN and frame is not None and len(file) > place:
            bits, height, width, components = struct.unpack_from(">BHHB", file, frame)
            if bits != 8 or components not in (1, 3) or not height * width:
                return None
            factors = [file[frame + 7 + 3 * k] for k in range(components)]
            across = max(f >> 4 for f in factors)
            down = max(f & 15 for f in factors)
            unit = (8 * down, 8 * across) if components == 3 else (8, 8)
            is_one_scan = (
                is_sequential and file[place] == components and file.endswith(_END) and min(unit)
            )
            data_at = (
                place - 2 + int.from_bytes(file[place - 2 : place], "big") if is_one_scan else 0
            )
            return Layout(height, width, frame + 1, unit, interval, data_at)
    return None


def plan_crop(
    file: bytes, layout: Layout, box: Box, size: tuple[int, int]
) -> Callable[[], np.ndarray | None]:
    """Remove the data of a JPEG that a part of it does not need; decode nothing yet.

    Returns:
      A function that decodes the part to uint8 (H, W, 3), RGB, or to None if the file is damaged.
      The shape is that of `box` divided by 1, 2, 4 or 8 and not smaller than `size` (height,
      width); borders are rounded to these pixels.
    """
    reduction = next(
        n for n in REDUCTIONS if n == 1 or (box.height >= n * size[0] and box.width >= n * size[1])
    )
    is_complete = True
    if layout.data_at:
        file, layout, box, is_complete = _without_the_rest(file, layout, box)
    top, left, bottom, right = (
        round(n / reduction) for n in (*box[:2], box.top + box.height, box.left + box.width)
    )
    part = Box(top, left, bottom - top, right - left)
    return functools.partial(_decode_part, file, layout, reduction, is_complete, part)


def _decode_part(
    file: bytes, layout: Layout, reduction: int, is_complete: bool, part: Box
) -> np.ndarray | None:
    if simplejpeg is None:
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), _FLAGS | REDUCTIONS[reduction])
        return None if pixels is None else cut(pixels, part)
    height, width = (
        -(-side // reduction) for side in layout[:2]
    )  # the sizes for which libjpeg takes this fraction
    size = {"min_height": height, "min_width": width, "min_factor": reduction}
    try:
        return cut(simplejpeg.decode_jpeg(file, "RGB", strict=is_complete, **size), part)
    except ValueError:
        return None


def _without_the_rest(file: bytes, layout: Layout, box: Box) -> tuple[bytes, Layout, Box, bool]:
    """Return a smaller file with the crop, its layout, the crop in it, and whether its data end with its height."""
    unit = layout.unit[0]
    across = -(-layout.width // layout.unit[1])
    down = -(-layout.height // layout.unit[0])
    top = max(box.top - _CONTEXT, 0) // unit  # in rows of units
    bottom = -(-min(box.top + box.height + _CONTEXT, layout.height) // unit)
    if layout.interval == across:
        marks = [match.start() for match in _RESTART.finditer(file, layout.data_at)]
        if len(marks) + 1 == down:
            starts = [layout.data_at, *(mark + 2 for mark in marks)]
            ends = [*marks, len(file) - 2]
            pieces = [
                file[start:end]
                for start, end in zip(starts[top:bottom], ends[top:bottom], strict=True)
            ]
            coded = [part for n, piece in enumerate(pieces) for part in (_marker(n), piece)][1:]
            part = layout._replace(height=min(bottom * unit, layout.height) - top * unit)
            header = _header(file[: layout.data_at], part)
            return (
                b"".join([header, *coded, _END]),
                part,
                box._replace(top=box.top - top * unit),
                True,
            )
    if simplejpeg is None or bottom == down:
        return file, layout, box, True
    part = layout._replace(height=bottom * unit)
    return _header(file, part), part, box, False


def _marker(n: int) -> bytes:
    """Return the restart marker before a piece; they are numbered from the second on."""
    return bytes((0xFF, 0xD0 + (n - 1) % 8))


def _header(file: bytes, layout: Layout) -> bytes:
    """Return the same bytes with another height and width."""
    changed = bytearray(file)
    struct.pack_into(">HH", changed, layout.size_at, layout.height, layout.width)
    return bytes(changed)
