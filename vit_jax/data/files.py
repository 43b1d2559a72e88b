"""Files to predict on: from what a person types (files, folders, patterns) to a list, and that list as a source."""

import difflib
import glob
import os
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.data.listing import EXTENSIONS, image_files, is_image, read_file, walk_folders
from vit_jax.data.sources import Record


class FileSource:
    """Image files without labels: class 0 stands for every one. It is for evaluation batches, not for training."""

    def __init__(self, paths: Sequence[str], class_names: tuple[str, ...]) -> None:
        """Takes paths, which need not be readable, and the names of the classes of whoever predicts.

        Raises:
          ValueError: there are no paths.
        """
        if not paths:
            raise ValueError("The list of image files is empty; give at least one.")
        self.class_names = tuple(class_names)
        self._paths = np.array([os.fsencode(path) for path in paths])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Record:
        return Record(read_file(self.name_of(index)), 0)

    @property
    def labels(self) -> np.ndarray:
        return np.zeros(len(self), np.int32)

    def name_of(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def key_of(self, index: int) -> bytes:
        return bytes(self._paths[index])


def list_images(arguments: Sequence[str]) -> list[str]:
    """Image files that arguments of a command line stand for, in their order, none twice.

    A file is taken whatever its name. A folder stands for the image files below it, and a pattern (`*`, `?`, `[…]`,
    `**` for folders at any depth) for the image files and folders that match it, sorted. What exists under the very
    name of a pattern comes first.

    Raises:
      ValueError: no arguments, or one that stands for no image; it is named with the nearest that exist.
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
    """As `glob.glob(pattern, recursive=True)`, but links in a circle do not make it walk for ever."""
    head, double_star, rest = _cut_at_double_star(pattern)
    if not double_star:
        yield from glob.glob(pattern)
        return
    for start in glob.glob(head) if head else [os.curdir]:
        if rest and os.path.isdir(start):
            for folder in walk_folders(start):
                yield from _matches(os.path.join(glob.escape(folder), rest))
        else:
            yield start


def _cut_at_double_star(pattern: str) -> tuple[str, bool, str]:
    """What stands before and after the first segment `**`, and whether there is one."""
    segments = pattern.split(os.sep)
    if "**" not in segments:
        return pattern, False, ""
    place = segments.index("**")
    head = os.sep.join(segments[:place]) or (os.sep if place else "")
    return head, True, os.sep.join(segments[place + 1 :])


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
    """The same for two ways to write one path."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)
