"""Image files: which files are images, by their names; how folders of them are walked; what a command line names.

Files and folders whose names start with a dot are skipped. Links are followed, but no folder is walked twice and
none that contains the start, so the walk ends where links form a circle.
"""

import collections
import difflib
import glob
import os
from collections.abc import Iterator, Sequence
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
    """Image files below an existing folder, at any depth, sorted; `others` counts the other files, by extension."""
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
    seen = {_inode(parent) for parent in Path(os.path.abspath(folder)).parents}
    for parent, folders, _ in os.walk(folder, followlinks=True):
        if _inode(parent) in seen:
            folders.clear()
            continue
        seen.add(_inode(parent))
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


def list_images(arguments: Sequence[str]) -> list[str]:
    """Image files that the arguments of a command line name, in their order, none twice.

    A file is used whatever its name. A folder means the image files below it, and a pattern (`*`, `?`, `[…]`, `**`
    for folders at any depth) the image files and folders that match it, sorted. An existing file with the name of
    the pattern itself comes first.

    Raises:
      ValueError: no arguments, or one without an image; the message gives the nearest names that exist.
    """
    if not arguments:
        raise ValueError("No images are given; name files, folders or patterns such as 'photos/*.jpg'.")
    found: dict[str, str] = {}
    for path in (path for argument in arguments for path in _expand(argument)):
        folder, name = os.path.split(path)
        found.setdefault(os.path.join(os.path.realpath(folder), name), path)  # equal for two ways to write one path
    return list(found.values())


def _expand(argument: str) -> list[str]:
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        files = image_files(path)
        if not files:
            raise ValueError(f"Folder {argument!r} has no images (files named {' '.join(EXTENSIONS)}).")
        return files
    if os.path.lexists(path):
        return [path]
    matches = sorted({match.removeprefix("./") for match in _matches(path)}) if glob.has_magic(path) else []
    files = [file for match in matches for file in (image_files(match) if os.path.isdir(match) else [match])]
    files = [file for file in files if is_image(os.path.basename(file))]
    if not files:
        raise ValueError(_nothing(argument, path))
    return files


def _matches(pattern: str) -> Iterator[str]:
    """As `glob.glob(pattern, recursive=True)`, but it ends where links form a circle."""
    head, double_star, rest = f"/{pattern}/".partition("/**/")
    if not double_star:
        yield from glob.glob(pattern)
        return
    head, rest = head[1:] or pattern[: pattern.startswith("/")], rest.removesuffix("/")
    for start in glob.glob(head) if head else [os.curdir]:
        if rest and os.path.isdir(start):
            for folder in walk_folders(start):
                yield from _matches(os.path.join(glob.escape(folder), rest))
        else:
            yield start


def _nothing(argument: str, path: str) -> str:
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if glob.has_magic(path):
        return f"No image matches the pattern {argument!r}; images are files named {' '.join(EXTENSIONS)}."
    if not os.path.isdir(folder):
        return f"There is no file, folder or pattern {argument!r}: there is no folder {folder!r} either."
    near = difflib.get_close_matches(name, os.listdir(folder), n=3)
    nearest = f"Nearest in {folder!r}: {', '.join(map(repr, near))}." if near else f"Nothing in {folder!r} is similar."
    return f"There is no file or folder {argument!r}. {nearest}"


def _inode(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
