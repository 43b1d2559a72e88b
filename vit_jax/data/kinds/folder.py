"""Image folders ("folder:PATH"): a sub-folder for each class, perhaps below one for each split."""

import collections
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from vit_jax.data.kinds.image_files import describe_skipped, is_image, list_folder, require_images
from vit_jax.data.kinds.listing import FileSource, Listing, list_known_splits, warn_once
from vit_jax.data.records import few
from vit_jax.storage.files import read_json

DESCRIPTION = "prepared.json"
"""File in a copy by `vit-jax prepare` that describes it."""
MAX_DESCRIPTION_BYTES = 2**16
_DESCRIPTION_KINDS = {"short_side": int, "quality": int, "complete": bool, "source": str}


class Description(TypedDict):
    """The options with which a copy was prepared.

    `complete` is False while it is being written, and `folder` is the copy.
    """

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
        copy = read_copy_description(self.path)
        if not self.exists():
            raise ValueError(
                f"{self.place(None)}: there is no such folder. "
                "Give a folder with a sub-folder for each class.",
            )
        if copy is not None and not copy["complete"]:
            options = (
                f"--short_side={copy['short_side']} --quality={copy['quality']} "
                f"--output={copy['folder']}"
            )
            raise ValueError(
                f"{self.place(None)}: the copy is unfinished. "
                f"Run: vit-jax prepare folder:{copy['source']} {options}",
            )

    def splits(self, *names: str) -> list[str]:
        wanted = list_known_splits(names)
        splits = []
        for name in _list_subfolders(self.path):
            if name in wanted and _holds_folders(self.path / name):
                splits.append(name)
        return splits

    def classes(self, split: str | None) -> list[str]:
        names = _list_subfolders(self._get_split_folder(split))
        if split is None and len(names) > 1:
            _reject_splits(self.path, names)
        return names

    def read(self, split: str | None, class_names: tuple[str, ...]) -> FileSource:
        """Return image files at any depth by class, then by name.

        Raises:
          ValueError: a class folder has no images.
        """
        path = self._get_split_folder(split)
        # All files begin with the path of the folder; `os.path.relpath` would take most of the time.
        prefix = os.path.join(path, "")
        files = list[str]()
        sizes = list[int]()
        present = {*_list_subfolders(path)}
        others = collections.Counter[str]()
        for name in class_names:
            images = list[str]()
            if name in present:
                images = require_images(os.path.join(path, name), others)
            for file in images:
                files.append(file.removeprefix(prefix))
            sizes.append(len(images))

        if others:
            warn_once(f"{path}: {' '.join(describe_skipped(others))}")
        labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return FileSource(files, class_names, labels, root=str(path))

    def _get_split_folder(self, split: str | None) -> Path:
        if split is None:
            return self.path
        return self.path / split


def folder_of(data: str) -> Path | None:
    """Return the path in "folder:PATH"; None for other data."""
    kind, _, name = data.partition(":")
    if kind != "folder" or not name:
        return None
    return Path(os.path.expanduser(name))


def read_copy_description(folder: Path) -> Description | None:
    """Return the options with which a copy was prepared; None for other folders.

    The folder of a split has the description of its copy.

    Raises:
      ValueError: the file of the description is damaged.
    """
    for place in (folder, folder.parent):
        file = place / DESCRIPTION
        if file.is_file():
            return _read_description(file)
    return None


def _read_description(file: Path) -> Description:
    stated = read_json(file, MAX_DESCRIPTION_BYTES)
    if not isinstance(stated, dict):
        stated = {}
    stated = {"complete": True, "source": ""} | stated
    for name, kind in _DESCRIPTION_KINDS.items():
        if type(stated.get(name)) is not kind:
            raise ValueError(
                f"{file}: must state short_side and quality as JSON. Prepare the folder again.",
            )
    return cast(Description, stated | {"folder": str(file.parent)})


def _reject_splits(path: Path, class_names: Sequence[str]) -> None:
    """Raise ValueError for folders that are splits and not classes.

    They are named like splits, and all hold the same folders and no images.
    """
    if not any(map(_is_like_split, class_names)):
        return
    inside = []
    for name in class_names:
        if not _holds_folders(path / name):
            return
        inside.append(_list_subfolders(path / name))
    if any(names != inside[0] for names in inside):
        return

    train = class_names[0]
    for name in reversed(class_names):
        if "train" in name.lower():
            train = name
    test = class_names[0]
    if test == train:
        test = class_names[1]
    raise ValueError(
        f"The folders {few(class_names, repr)} of {str(path)!r} look like splits and not like "
        f"classes: all hold the folders {few(inside[0], repr)} and no images. "
        f"Set config.input.train_split={train} and config.input.test_split={test} "
        f"(for evaluate --split={test}), or put images of classes directly into them.",
    )


def _is_like_split(name: str) -> bool:
    """Return True if a name contains train, test or val."""
    lower = name.lower()
    return "train" in lower or "test" in lower or "val" in lower


def _holds_folders(path: Path) -> bool:
    """Return True for a folder with folders directly inside, and no images."""
    folders, files = list_folder(path)
    return bool(folders) and not any(is_image(entry.name) for entry in files)


def _list_subfolders(path: Path) -> list[str]:
    """Return the names of the folders directly inside, sorted, without hidden ones."""
    folders, _ = list_folder(path)
    return [entry.name for entry in folders]


def describe_copy(data: str) -> str:
    """Return the options of a prepared copy in words; "" for other data."""
    folder = folder_of(data)
    if folder is None:
        return ""
    copy = read_copy_description(folder)
    if copy is None:
        return ""
    return f", prepared with short side {copy['short_side']} and JPEG quality {copy['quality']}"
