"""Which files are images, by their names, and how folders of them are walked and read.

Files and folders whose names start with a dot are skipped. Links are followed, but no folder is walked twice and
none that contains the start, so the walk ends where links form a circle.
"""

import collections
import os
from collections.abc import Iterator
from pathlib import Path

from vit_jax.data.images import UnreadableImage

EXTENSIONS = (
    *(".avif", ".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm"),
    *(".png", ".pnm", ".ppm", ".pxm", ".ras", ".sr", ".tif", ".tiff", ".webp"),
)
"""What OpenCV decodes to 8 bits; compared without regard to case."""


def is_image(name: str) -> bool:
    """Whether a file of this name is treated as an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def image_files(folder: str, others: collections.Counter[str] | None = None) -> list[str]:
    """Image files below a folder, at any depth, sorted; each path starts with `folder`.

    Args:
      folder: must exist.
      others: counts the other files, by their extension.
    """
    found = []
    for parent in walk_folders(folder):
        for entry in os.scandir(parent):
            if is_image(entry.name):
                found.append(entry.path)
            elif others is not None and not entry.name.startswith(".") and entry.is_file():
                others[os.path.splitext(entry.name)[1].lower() or "without extension"] += 1
    return sorted(found)


def walk_folders(folder: str) -> Iterator[str]:
    """The folder and those below it, each once; `folder` must exist."""
    seen = {_identity(parent) for parent in Path(os.path.abspath(folder)).parents}
    for parent, folders, _ in os.walk(folder, followlinks=True):
        if _identity(parent) in seen:
            folders.clear()
            continue
        seen.add(_identity(parent))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield parent


def read_file(path: str) -> bytes:
    """The bytes of an image file.

    Raises:
      UnreadableImage: the file was removed since it was listed, or may not be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UnreadableImage(f"The file cannot be opened ({error.strerror})") from error


def _identity(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
