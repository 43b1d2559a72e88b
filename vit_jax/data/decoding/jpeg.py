"""Crops of JPEG files, decoded without the rest of the file if possible.

A decoder has to read a JPEG from its first pixel. If the file has a restart marker after every row
of blocks, the rows above and below the crop are removed first. Otherwise a smaller height is
written into the header, and decoding ends below the crop. Both give the pixels of the complete
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
from vit_jax.data.decoding.headers import JPEG_FRAMES, JPEG_SCAN, find_jpeg_segments

try:
    import simplejpeg
except ImportError:
    # OpenCV decodes the same pixels; it is slower, and complains of files whose height was changed.
    simplejpeg = None

DECODER = "OpenCV" if simplejpeg is None else "simplejpeg"
# OpenCV's flags by the number that divides a side. A flag for colours beside them takes precedence
# over their grey.
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
# Pixels around a crop that smooth its colours, which are stored at half the resolution.
_CONTEXT = 2


class Layout(NamedTuple):
    """Contents of the header of a JPEG.

    Attributes:
      height, width: sides in pixels.
      size_at: offset of both sides in the file.
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


def find_layout(file: bytes) -> Layout | None:
    """Return the layout of a JPEG that is grey or has three colours of 8 bits, else None."""
    if not file.startswith(b"\xff\xd8\xff"):
        return None

    frame_marker = 0
    frame_at = 0
    interval = 0
    for marker, place in find_jpeg_segments(file):
        if marker in JPEG_FRAMES and not frame_at:
            frame_marker = marker
            frame_at = place
        elif marker == _RESTART_INTERVAL:
            interval = int.from_bytes(file[place : place + 2], "big")
        elif marker == JPEG_SCAN and frame_at and len(file) > place:
            is_sequential = frame_marker in _SEQUENTIAL
            return _read_layout(file, frame_at, is_sequential, interval, place)
    return None


def _read_layout(
    file: bytes,
    frame_at: int,
    is_sequential: bool,
    interval: int,
    scan_at: int,
) -> Layout | None:
    """Return the layout by the contents of the frame and of the first scan."""
    bits, height, width, components = struct.unpack_from(">BHHB", file, frame_at)
    if bits != 8 or components not in (1, 3) or not height * width:
        return None

    across = 0
    down = 0
    for component in range(components):
        factors = file[frame_at + 7 + 3 * component]
        across = max(across, factors >> 4)
        down = max(down, factors & 15)
    unit = (8, 8)
    if components == 3:
        unit = (8 * down, 8 * across)

    data_at = 0
    has_all_components = file[scan_at] == components
    if is_sequential and has_all_components and file.endswith(_END) and min(unit):
        header_bytes = int.from_bytes(file[scan_at - 2 : scan_at], "big")
        data_at = scan_at - 2 + header_bytes
    return Layout(height, width, frame_at + 1, unit, interval, data_at)


def plan_crop(
    file: bytes,
    layout: Layout,
    box: Box,
    size: tuple[int, int],
) -> Callable[[], np.ndarray | None]:
    """Remove the data of a JPEG that a part of it does not need; decode nothing yet.

    Returns:
      A function that decodes the part to uint8 (H, W, 3), RGB, or to None if the file is damaged.
      The shape is that of `box` divided by 1, 2, 4 or 8 and not smaller than `size` (height,
      width); borders are rounded to these pixels.
    """
    reduction = _choose_reduction(box, size)
    is_complete = True
    if layout.data_at:
        file, layout, box, is_complete = _remove_rest(file, layout, box)

    top = round(box.top / reduction)
    left = round(box.left / reduction)
    bottom = round((box.top + box.height) / reduction)
    right = round((box.left + box.width) / reduction)
    part = Box(top, left, bottom - top, right - left)
    return functools.partial(_decode_part, file, layout, reduction, is_complete, part)


def _choose_reduction(box: Box, size: tuple[int, int]) -> int:
    """Return the largest number that divides a box without making it smaller than a size."""
    height, width = size
    for reduction in REDUCTIONS:
        if box.height >= reduction * height and box.width >= reduction * width:
            return reduction
    return 1


def _decode_part(
    file: bytes,
    layout: Layout,
    reduction: int,
    is_complete: bool,
    part: Box,
) -> np.ndarray | None:
    if simplejpeg is None:
        encoded = np.frombuffer(file, np.uint8)
        pixels = cv2.imdecode(encoded, _FLAGS | REDUCTIONS[reduction])
        if pixels is None:
            return None
        return cut(pixels, part)

    try:
        # These are the sizes for which libjpeg takes this fraction.
        pixels = simplejpeg.decode_jpeg(
            file,
            "RGB",
            strict=is_complete,
            min_height=-(-layout.height // reduction),
            min_width=-(-layout.width // reduction),
            min_factor=reduction,
        )
    except ValueError:
        return None
    return cut(pixels, part)


def _remove_rest(
    file: bytes,
    layout: Layout,
    box: Box,
) -> tuple[bytes, Layout, Box, bool]:
    """Return a smaller file with the crop, its layout, and the crop in it.

    The last value is True if the data of the file end with its height.
    """
    unit_height, unit_width = layout.unit
    across = -(-layout.width // unit_width)
    down = -(-layout.height // unit_height)

    # In rows of units.
    lowest_pixel = min(box.top + box.height + _CONTEXT, layout.height)
    top = max(box.top - _CONTEXT, 0) // unit_height
    bottom = -(-lowest_pixel // unit_height)

    if layout.interval == across:
        marks = [match.start() for match in _RESTART.finditer(file, layout.data_at)]
        if len(marks) + 1 == down:
            first_pixel = top * unit_height
            end_pixel = min(bottom * unit_height, layout.height)
            part = layout._replace(height=end_pixel - first_pixel)
            shorter = _keep_rows(file, part, marks, top, bottom)
            return shorter, part, box._replace(top=box.top - first_pixel), True

    if simplejpeg is None or bottom == down:
        return file, layout, box, True
    part = layout._replace(height=bottom * unit_height)
    return _set_size(file, part), part, box, False


def _keep_rows(file: bytes, part: Layout, marks: list[int], top: int, bottom: int) -> bytes:
    """Return a file with the rows of units from `top` to `bottom`, which `marks` separate."""
    starts = [part.data_at]
    starts.extend(mark + 2 for mark in marks)
    ends = [*marks, len(file) - 2]

    pieces = [_set_size(file[: part.data_at], part)]
    for row in range(top, bottom):
        if row > top:
            pieces.append(_build_restart_marker(row - top))
        pieces.append(file[starts[row] : ends[row]])
    pieces.append(_END)
    return b"".join(pieces)


def _build_restart_marker(n: int) -> bytes:
    """Return the restart marker before a piece; they are numbered from the second on."""
    return bytes((0xFF, 0xD0 + (n - 1) % 8))


def _set_size(file: bytes, layout: Layout) -> bytes:
    """Return the same bytes with another height and width."""
    changed = bytearray(file)
    struct.pack_into(">HH", changed, layout.size_at, layout.height, layout.width)
    return bytes(changed)
