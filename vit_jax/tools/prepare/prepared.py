"""Smaller copies of image folders, which are read several times faster: the same files, each with a shorter side.

The copies are JPEGs with a restart marker after every row of blocks, where `jpeg` skips the rows
above a crop. A file beside them states their size and quality, and whether the copy is complete.
"""

import functools
import json
import logging
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
# Height and width of the blocks that are coded together, with colours at half the resolution
_UNIT = 16


def prepare_folder(
    folder: Path, output: Path, *, short_side: int, quality: int = QUALITY
) -> dict[str, int]:
    """Write a copy of an image folder with the same names, classes and splits; continue one that was interrupted.

    An image whose short side is not longer than `short_side`, that has more than 8 bits, or that
    cannot be decoded, is copied unchanged. Of a larger one, each new pixel is the average over its
    area, and the file is a JPEG whatever its name. It keeps the orientation that its Exif data
    state. Files that cannot be opened are skipped and named.

    Returns:
      How many images this call made smaller, copied, and could not open: "reduced", "copied" and
      "unreadable".

    Raises:
      ValueError: there is no such folder, it has no images, or `output` is inside it, holds another
        copy or cannot be written.
    """
    files = image_files(str(folder)) if folder.is_dir() else []
    if not files:
        raise ValueError(f"{str(folder)!r} is no folder with images; give folder:PATH.")
    description = {"short_side": short_side, "quality": quality}
    stated = read_copy_description(output) or ({} if output.exists() else description)
    problem = (
        ""
        if description.items() <= stated.items()
        else f"exists and was not prepared with {description}"
    )
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)):
        problem = f"is inside {str(folder)!r}, whose copy it would be"
    if problem:
        raise ValueError(f"{str(output)!r} {problem}; give another --output=.")
    with make_folder(output):
        state = description | {"source": str(folder.absolute()), "complete": False}
        write_atomically(output / DESCRIPTION, json.dumps(state))
    unfinished = find_unfinished(output)  # by a process that was killed
    make = functools.partial(
        _prepare_file, folder=folder, output=output, short_side=short_side, quality=quality
    )
    done = list(map_in_threads(make, files))
    for path in unfinished:
        path.unlink(missing_ok=True)
    write_atomically(
        output / DESCRIPTION, json.dumps(state | {"complete": True})
    )  # last: readers require it
    if names := [file for file, kind in zip(files, done, strict=True) if kind == "unreadable"]:
        words = "%d images cannot be read and are not in the copy: %s. Repair them and repeat the command."
        logging.getLogger(__name__).warning(words, len(names), few(names))
    return {kind: done.count(kind) for kind in ("reduced", "copied", "unreadable")}


def _prepare_file(file: str, folder: Path, output: Path, short_side: int, quality: int) -> str:
    target = output / os.path.relpath(file, folder)
    if target.exists():
        return "done before"
    try:
        stored = read_file(file)
    except UnreadableImage:
        return "unreadable"
    smaller = reduced(stored, short_side, quality)
    with make_folder(target.parent):
        write_atomically(target, stored if smaller is None else smaller)
    return "copied" if smaller is None else "reduced"


def reduced(stored: bytes, short_side: int, quality: int) -> bytes | None:
    """Return the smaller image as JPEG; None for a small or deep image, and for one that is not decoded or encoded."""
    if is_deep(stored):
        return None
    try:
        image = decode(stored)
    except UnreadableImage:
        return None
    if min(image.shape[:2]) <= short_side:
        return None
    smaller = cv2.cvtColor(resize_to_cover(image, (short_side, short_side)), cv2.COLOR_RGB2BGR)
    sampling = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420)
    restarts = (cv2.IMWRITE_JPEG_RST_INTERVAL, -(-smaller.shape[1] // _UNIT))
    is_encoded, file = cv2.imencode(
        ".jpg", smaller, (cv2.IMWRITE_JPEG_QUALITY, quality, *sampling, *restarts)
    )
    # No with more than 65,535 columns
    return add_orientation(file.tobytes(), read_orientation(stored)) if is_encoded else None
