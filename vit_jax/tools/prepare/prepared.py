"""Copies of image folders with smaller images, which are read several times faster.

The copies are JPEGs with a restart marker after every row of blocks, at which `jpeg` skips the rows
above a crop. A file beside them states their size and quality, and whether the copy is complete.
"""

import functools
import json
import logging
import math
import os
from pathlib import Path

import cv2

from vit_jax.data.decoding.depth import is_deep
from vit_jax.data.decoding.images import UnreadableImage, decode, resize_to_cover
from vit_jax.data.decoding.orientation import add_orientation, read_orientation
from vit_jax.data.kinds.folder import DESCRIPTION, read_copy_description
from vit_jax.data.kinds.image_files import image_files, read_file
from vit_jax.data.records import few
from vit_jax.data.workers import map_in_threads
from vit_jax.storage.files import find_unfinished, make_folder, write_atomically

QUALITY = 90
_COUNTED = ("reduced", "copied", "unreadable")
# Height and width of the blocks that are coded together, with colours at half the resolution
_UNIT = 16


def prepare_folder(
    folder: Path,
    output: Path,
    *,
    short_side: int,
    quality: int = QUALITY,
) -> dict[str, int]:
    """Write a copy of an image folder with the same names, classes and splits.

    An interrupted copy is continued. An image is copied unchanged if its short side is not longer
    than `short_side`, if it has more than 8 bits, or if it cannot be decoded. In a reduced image,
    each pixel is the average over its area, and the file is a JPEG whatever its name. It keeps the
    orientation of its Exif data. Files that cannot be opened are skipped, and a warning names them.

    Returns:
      The numbers of images that this call reduced, copied, and could not open: "reduced", "copied"
      and "unreadable".

    Raises:
      ValueError: the folder does not exist or has no images, or `output` is inside it, holds
        another copy or cannot be written.
    """
    files = image_files(str(folder)) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{str(folder)!r} is no folder with images; give folder:PATH.")
    description = {"short_side": short_side, "quality": quality}
    _require_output(output, folder, description)

    with make_folder(output):
        state = description | {"source": str(folder.absolute()), "complete": False}
        write_atomically(output / DESCRIPTION, json.dumps(state))
    unfinished = find_unfinished(output)  # files of a killed process
    prepare_file = functools.partial(
        _prepare_file,
        folder=folder,
        output=output,
        short_side=short_side,
        quality=quality,
    )
    results = list(map_in_threads(prepare_file, files))
    for path in unfinished:
        path.unlink(missing_ok=True)
    # Readers require a complete copy, so this file is written last.
    write_atomically(output / DESCRIPTION, json.dumps(state | {"complete": True}))

    unreadable = []
    for file, result in zip(files, results, strict=True):
        if result == "unreadable":
            unreadable.append(file)
    if unreadable:
        logging.getLogger(__name__).warning(
            "%d images cannot be read and are not in the copy: %s. "
            "Repair them and repeat the command.",
            len(unreadable),
            few(unreadable),
        )
    return {result: results.count(result) for result in _COUNTED}


def _require_output(
    output: Path,
    folder: Path,
    description: dict[str, int],
) -> None:
    """Raise ValueError if `output` is inside the folder or holds anything but this copy."""
    stated = read_copy_description(output)
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"{str(output)!r} is inside {str(folder)!r}, whose copy it would be; "
            "give another --output=."
        )
    if stated is None and not output.exists():
        return
    if stated is None or not description.items() <= stated.items():
        raise ValueError(
            f"{str(output)!r} exists and was not prepared with {description}; "
            "give another --output=."
        )


def _prepare_file(
    file: str,
    folder: Path,
    output: Path,
    short_side: int,
    quality: int,
) -> str:
    """Write the copy of an image; return "reduced", "copied", "unreadable" or "done before"."""
    target = output / os.path.relpath(file, folder)
    if target.exists():
        return "done before"
    try:
        stored = read_file(file)
    except UnreadableImage:
        return "unreadable"
    result = "reduced"
    content = reduce_image(stored, short_side, quality)
    if content is None:
        result = "copied"
        content = stored
    with make_folder(target.parent):
        write_atomically(target, content)
    return result


def reduce_image(
    stored: bytes,
    short_side: int,
    quality: int,
) -> bytes | None:
    """Return the smaller image as JPEG.

    None for a small or deep image, and for an image that cannot be decoded or encoded.
    """
    if is_deep(stored):
        return None
    try:
        image = decode(stored)
    except UnreadableImage:
        return None
    if min(image.shape[:2]) <= short_side:
        return None

    smaller = cv2.cvtColor(resize_to_cover(image, (short_side, short_side)), cv2.COLOR_RGB2BGR)
    blocks_per_row = math.ceil(smaller.shape[1] / _UNIT)
    options = (
        *(cv2.IMWRITE_JPEG_QUALITY, quality),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, blocks_per_row),
    )
    is_encoded, file = cv2.imencode(".jpg", smaller, options)
    if not is_encoded:  # more than 65,535 columns
        return None
    return add_orientation(file.tobytes(), read_orientation(stored))
