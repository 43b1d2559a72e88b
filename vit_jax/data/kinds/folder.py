"""Image folders ("folder:PATH"): a sub-folder for each class, optionally below a sub-folder for each split."""

import collections
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from vit_jax.data.kinds.image_files import contents_of, describe_skipped, images_in, is_image
from vit_jax.data.kinds.listing import FileSource, Listing, known_splits, warn_once
from vit_jax.data.records import few
from vit_jax.storage.files import read_json

DESCRIPTION = "prepared.json"  # of a copy that `vit-jax prepare` makes
MAX_DESCRIPTION_BYTES = 2**16


class Description(TypedDict):
    """How a copy was prepared; `complete` is False while it is being written, and `folder` is the copy."""

    short_side: int
    quality: int
    complete: bool
    source: str
    folder: str


class Folder(Listing):
    """An image folder.

    Its splits are sub-folders named like one, or as asked for, with class folders and no images
    directly inside.
    """

    kind = "folder"
    classes_are = "sub-folders"
    unsplit = "which has no sub-folders for splits"

    def exists(self) -> bool:
        return self.path.is_dir()

    def require(self) -> None:
        copy = description_of(self.path)
        if not self.exists():
            problem = "there is no such folder. Give a folder with a sub-folder for each class."
        elif copy is not None and not copy["complete"]:
            options = f"--short_side={copy['short_side']} --quality={copy['quality']} --output={copy['folder']}"
            problem = (
                f"the copy is unfinished. Run: vit-jax prepare folder:{copy['source']} {options}"
            )
        else:
            return
        raise ValueError(f"{self.place(None)}: {problem}")

    def splits(self, *names: str) -> list[str]:
        wanted = known_splits(names)
        return [
            name
            for name in _subfolders(self.path)
            if name in wanted and _holds_folders(self.path / name)
        ]

    def classes(self, split: str | None) -> list[str]:
        names = _subfolders(self._below(split))
        if split is None and len(names) > 1:
            _reject_splits(self.path, names)
        return names

    def read(self, split: str | None, class_names: tuple[str, ...]) -> FileSource:
        """Return image files at any depth by class, then by name; ValueError for a class folder without images."""
        path = self._below(split)
        files = list[str]()
        sizes = list[int]()
        present = {*_subfolders(path)}
        others = collections.Counter[str]()
        for name in class_names:
            images = images_in(os.path.join(path, name), others) if name in present else []
            files += [os.path.relpath(file, path) for file in images]
            sizes.append(len(images))
        if others:
            warn_once(f"{path}: {' '.join(describe_skipped(others))}")
        labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return FileSource(files, class_names, labels, root=str(path))

    def _below(self, split: str | None) -> Path:
        return self.path if split is None else self.path / split


def folder_of(data: str) -> Path | None:
    """Return the path in "folder:PATH"; None for other data."""
    kind, _, name = data.partition(":")
    return Path(os.path.expanduser(name)) if kind == "folder" and name else None


def description_of(folder: Path) -> Description | None:
    """Return how a copy was prepared, or the copy that a split's folder is part of; None for other folders.

    Raises:
      ValueError: the file that states it is damaged.
    """
    for place in (folder, folder.parent):
        if (file := place / DESCRIPTION).is_file():
            stated = read_json(file, MAX_DESCRIPTION_BYTES)
            kinds = {"short_side": int, "quality": int, "complete": bool, "source": str}
            stated = {"complete": True, "source": ""} | stated if isinstance(stated, dict) else {}
            if not all(type(stated.get(name)) is kind for name, kind in kinds.items()):
                raise ValueError(
                    f"{file}: must state short_side and quality as JSON. Prepare the folder again."
                )
            return cast(Description, stated | {"folder": str(place)})
    return None


def _reject_splits(path: Path, class_names: Sequence[str]) -> None:
    """Reject folders named like splits that hold the same folders and no images: they are splits, not classes."""
    inside = [_subfolders(path / name) for name in class_names if _holds_folders(path / name)]
    is_like_splits = any(
        word in name.lower() for name in class_names for word in ("train", "test", "val")
    )
    if (
        not is_like_splits
        or len(inside) < len(class_names)
        or any(names != inside[0] for names in inside)
    ):
        return
    train = next((name for name in class_names if "train" in name.lower()), class_names[0])
    test = next(name for name in class_names if name != train)
    raise ValueError(
        f"The folders {few(class_names, repr)} of {str(path)!r} look like splits and not like classes: all hold the "
        f"folders {few(inside[0], repr)} and no images. Set config.input.train_split={train} and "
        f"config.input.test_split={test} (for evaluate --split={test}), or put images of classes directly into them."
    )


def _holds_folders(path: Path) -> bool:
    """Return True for a folder with folders directly inside, and no images."""
    folders, files = contents_of(path)
    return bool(folders) and not any(is_image(entry.name) for entry in files)


def _subfolders(path: Path) -> list[str]:
    """Return the names of the folders directly inside, sorted, without hidden ones."""
    return [entry.name for entry in contents_of(path)[0]]


def describe_copy(data: str) -> str:
    """Return words on the prepared copy that the data of a run are; empty for other data."""
    folder = folder_of(data)
    copy = description_of(folder) if folder else None
    if not copy:
        return ""
    return f", prepared with short side {copy['short_side']} and JPEG quality {copy['quality']}"
