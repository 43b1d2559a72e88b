"""Image files as a source, and the files that the arguments of a command line name."""

import difflib
import glob
import os
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.data.listing import EXTENSIONS, image_files, is_image, read_file, walk_folders
from vit_jax.data.records import Source


class FileSource(Source):
    """Image files. Their paths are one numpy array of bytes: a million strings would be slow to send to each worker."""

    def __init__(
        self, paths: Sequence[str], class_names: tuple[str, ...], labels: np.ndarray | None = None, root: str = ""
    ) -> None:
        """Takes paths, which need not be readable, below `root`; without labels all have class 0, to predict on."""
        self.class_names, self.root = tuple(class_names), root
        self.labels = np.zeros(len(paths), np.int32) if labels is None else labels
        self._paths = np.array([os.fsencode(path) for path in paths])

    def image_of(self, index: int) -> bytes:
        return read_file(self.name_of(index))

    def name_of(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._paths[index]))

    def key_of(self, index: int) -> bytes:
        return bytes(self._paths[index])


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
    for argument in arguments:
        for path in _expand(argument):
            found.setdefault(_identity(path), path)
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


def _identity(path: str) -> str:
    """Equal for two ways to write one path."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)
