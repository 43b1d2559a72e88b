"""A folder with a sub-folder of images for each class, as a source.

`folder` reads splits of such folders, `listing` decides which files are images.
"""

import collections
import functools
import logging
import os
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from vit_jax.data.files import FileSource
from vit_jax.data.listing import EXTENSIONS, image_files
from vit_jax.data.records import few


def read_class_names(path: Path) -> tuple[str, ...]:
    """The classes of a folder, in alphabetical order.

    Raises:
      ValueError: there are fewer than two, or two whose names differ in case or Unicode normal form alone.
    """
    names = tuple(subfolders(path))
    if len(names) < 2:
        found = f"only one, {names[0]!r}" if names else "none"
        raise ValueError(
            f"{str(path)!r} needs a sub-folder of images for each of at least two classes; it has {found}."
        )
    require_distinct(path, names)
    return names


def require_distinct(path: Path, names: Sequence[str]) -> None:
    """Refuses names that some systems treat as one, or that look the same: they are one class under two names."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unicodedata.normalize("NFC", name).lower(), name)
        if other != name:
            case = unicodedata.normalize("NFC", name) != unicodedata.normalize("NFC", other)
            difference = "upper and lower case" if case else f"their Unicode form, {other!a} and {name!a}"
            raise ValueError(
                f"The classes {other!r} and {name!r} of {str(path)!r} differ only in {difference}. Put their images "
                "into one folder, or rename one of them."
            )


def read_classes(path: Path, class_names: tuple[str, ...], present: Collection[str]) -> FileSource:
    """Image files of every class at any depth, ordered by class and then by name; absent classes have none.

    Raises:
      ValueError: a class that is present has none.
    """
    files: list[str] = []
    sizes: list[int] = []
    others: collections.Counter[str] = collections.Counter()
    for name in class_names:
        found = image_files(os.path.join(path, name), others) if name in present else []
        if name in present and not found:
            raise ValueError(
                f"Class folder {str(path / name)!r} has no images (files named {' '.join(EXTENSIONS)}); "
                "add images or remove the folder."
            )
        files += [os.path.relpath(file, path) for file in found]
        sizes.append(len(found))
    if others:
        kinds = [f"{n:,} {extension}" for extension, n in sorted(others.items(), key=lambda item: (-item[1], item[0]))]
        _warn_once(f"{path}: skipped files whose names are not those of images: {few(kinds)}.")
    labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return FileSource(files, class_names, labels, root=str(path))


@functools.cache
def _warn_once(message: str) -> None:
    """A folder without split sub-folders is read once for each of its parts."""
    from vit_jax import hosts  # here, because it loads jax, which workers do without

    if hosts.is_first():
        logging.getLogger(__name__).warning(message)


def subfolders(path: Path) -> list[str]:
    """Names of the folders directly inside, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
