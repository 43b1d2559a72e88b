"""Warnings about image files that lose bits or pages when they are read, from the headers of some of them."""

import functools
from collections.abc import Callable, Iterable
from typing import BinaryIO

from vit_jax.data.depth import ValueRange, depth_of, num_pages
from vit_jax.files import open_regular

MOST_FILES = 256
CAN_BE_DEEP = (".jp2", ".pgm", ".png", ".pnm", ".ppm", ".pxm", ".tif", ".tiff")


def survey(
    paths: Iterable[str],
    value_range: ValueRange | None,
    option: str,
    open_file: Callable[[str], BinaryIO] | None = None,
) -> list[str]:
    """Return warnings about values and pages that are lost when files are read, with counts.

    Reads a few KiB of at most `MOST_FILES` files, evenly spaced, whose names have an extension of such formats.

    Args:
      paths: of all files.
      value_range: the range that the user gives; with it no values are lost.
      option: the name of its option in messages, such as "--value_range".
      open_file: opens a file by a path that the file system does not know; all such files may be checked.
    """
    paths = [path for path in paths if open_file is not None or path.lower().endswith(CAN_BE_DEEP)]
    count = min(len(paths), MOST_FILES)
    checked = [paths[k * len(paths) // count] for k in range(count)]
    headers = [_header_of(path) if open_file is None else _read_header(open_file, path) for path in checked]
    found: dict[str, list[str]] = {"silent": [], "unknown": []}
    for path, (kind, _) in zip(checked, headers, strict=True) if value_range is None else ():
        found.get(kind, []).append(path)
    silent, unknown = found["silent"], found["unknown"]
    pages = [number for _, number in headers if number > 1]
    lines = []
    if silent:
        lines.append(
            f"{len(silent):,} of {count:,} checked files have 16 bits and state no other depth (first: {silent[0]}): "
            f"values are divided by 256. Pass {option}=0,4095 for 12-bit data."
        )
    if unknown:
        lines.append(
            f"{len(unknown):,} of {count:,} checked files have floating-point or 32-bit values and state no range "
            f"(first: {unknown[0]}): they cannot be read. Pass {option}=0,1 for values from 0 to 1."
        )
    if pages:
        of = f"{pages[0]:,}" if min(pages) == max(pages) else f"{min(pages):,} to {max(pages):,}"
        lines.append(f"{len(pages):,} of {count:,} checked files have several pages: page 1 of {of} is used.")
    return lines


@functools.lru_cache(2 * MOST_FILES)  # the files of a dataset are opened for each of its splits
def _header_of(path: str) -> tuple[str, int]:
    return _read_header(open_regular, path)


def _read_header(open_file: Callable[[str], BinaryIO], path: str) -> tuple[str, int]:
    """Return the number of pages, after "silent" or "unknown" for values that are cut or cannot be read, or ""."""
    try:
        with open_file(path) as file:

            def read(place: int, size: int) -> bytes:
                file.seek(place)
                return file.read(size)

            depth, pages = depth_of(read), num_pages(read)
    except (OSError, ValueError):  # also a pipe or a device
        return "", 1
    if depth is None or depth.stated is not None:
        return "", pages
    return "unknown" if depth.needs_range else "silent" if depth.bits == 16 else "", pages
