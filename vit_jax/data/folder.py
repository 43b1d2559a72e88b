"""Image folders: a sub-folder for each class, optionally below a sub-folder for each split.

Without split sub-folders a fixed part of every class is held out for testing. Which files count as images is
said in `listing`.
"""

import difflib
import hashlib
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.listing import EXTENSIONS, image_files, is_image, read_file
from vit_jax.data.sources import Record

SPLIT_NAMES = ("train", "test", "val", "validation", "valid")


class FolderSource:
    """Files of image folders, ordered by class and then by name.

    Paths are held in one numpy array of bytes: a million Python strings would be slow to send to each worker.
    """

    def __init__(self, root: Path, files: list[list[str]], class_names: tuple[str, ...]) -> None:
        """Takes `files[label]`, the paths of each class relative to `root`."""
        self.root, self.class_names = str(root), class_names
        self._paths = np.array([os.fsencode(path) for paths in files for path in paths])
        self.labels = np.repeat(np.arange(len(files), dtype=np.int32), [len(paths) for paths in files])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        return Record(read_file(self.name_of(index)), int(self.labels[index]))

    def name_of(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._paths[index]))

    def key_of(self, index: int) -> bytes:
        return bytes(self._paths[index])


def open_folder(path: Path, split: str, config: InputConfig, seed: int) -> FolderSource:
    """Opens one split of an image folder.

    With sub-folders named like splits (train, test, val, validation, valid, and those of the config), each
    holding class folders, the split is such a sub-folder and the classes are those of `config.train_split`.
    Otherwise `config.test_split` is `config.holdout_fraction` of every class, chosen by (seed, class, file
    name), and `config.train_split` is the rest.

    Raises:
      ValueError: no such folder or split; no images; fewer than two classes; a class without images, or one
        that training does not have; two classes whose names differ in case or Unicode normal form alone; a hold-out
        that leaves a class without training or test images.
    """
    if not path.is_dir():
        raise ValueError(f"There is no folder {str(path)!r}; give folder:PATH with a sub-folder for each class.")
    if "[" in split:
        raise ValueError(
            f"Split {split!r} of a folder: parts of splits exist only for TFDS. For folders set "
            "config.input.holdout_fraction, or make sub-folders for the splits."
        )
    splits = _split_folders(path, config)
    if splits:
        return _open_split(path, split, splits, config.train_split)
    return _open_holdout(path, split, config, seed)


def _open_split(path: Path, split: str, splits: list[str], train_split: str) -> FolderSource:
    for name in (train_split, split):
        if name not in splits:
            near = difflib.get_close_matches(name, splits, n=1)
            raise ValueError(
                f"{str(path)!r} has no split {name!r}; it has {splits}."
                + (f" Did you mean {near[0]!r}?" if near else "")
                + " Set config.input.train_split and config.input.test_split."
            )
    class_names = _class_names(path / train_split)
    present = set(_subfolders(path / split))
    _require_distinct(path, sorted({*class_names, *present}))
    extra = sorted(present - set(class_names))
    if extra:
        raise ValueError(
            f"Split {split!r} of {str(path)!r} has classes that {train_split!r} does not have: {_listing(extra)}. "
            "Every class needs training images: add them, or remove the folders."
        )
    files = [_class_files(path / split, name) if name in present else [] for name in class_names]
    return FolderSource(path / split, files, class_names)


def _open_holdout(path: Path, split: str, config: InputConfig, seed: int) -> FolderSource:
    allowed = (config.train_split, config.test_split)
    if split not in allowed or allowed[0] == allowed[1]:
        raise ValueError(
            f"Split {split!r} of {str(path)!r}, which has no split sub-folders; allowed are config.input.train_split "
            f"and config.input.test_split, here {allowed}, which must differ."
        )
    class_names = _class_names(path)
    held_out = split == config.test_split
    files = [_class_files(path, name) for name in class_names]
    chosen = [_holdout(path / name, paths, config, seed) for name, paths in zip(class_names, files, strict=True)]
    parts = [[p for p in paths if (p in hold) == held_out] for paths, hold in zip(files, chosen, strict=True)]
    return FolderSource(path, parts, class_names)


def _holdout(class_folder: Path, paths: list[str], config: InputConfig, seed: int) -> set[str]:
    """The files of one class that are held out: at least one, and not all of them."""
    if not 0.0 < config.holdout_fraction < 1.0:
        raise ValueError(
            f"config.input.holdout_fraction is {config.holdout_fraction}; a folder without split sub-folders needs "
            "a fraction between 0 and 1."
        )
    if len(paths) < 2:
        raise ValueError(
            f"Class folder {str(class_folder)!r} has one image, which cannot serve for training and for testing: add "
            "images, or make sub-folders for the splits."
        )
    # By hash and not by a random permutation: adding a file leaves the others where they were.
    ranked = sorted(paths, key=lambda path: hashlib.sha256(b"%d/" % seed + os.fsencode(path)).digest())
    return set(ranked[: min(max(round(config.holdout_fraction * len(paths)), 1), len(paths) - 1)])


def _split_folders(path: Path, config: InputConfig) -> list[str]:
    """Sub-folders that are splits: named like one, with class folders and no images directly inside."""
    candidates = [name for name in _subfolders(path) if name in (*SPLIT_NAMES, config.train_split, config.test_split)]
    return [
        name
        for name in candidates
        if _subfolders(path / name) and not any(is_image(entry) for entry in os.listdir(path / name))
    ]


def _class_names(path: Path) -> tuple[str, ...]:
    names = tuple(_subfolders(path))
    if len(names) < 2:
        found = f"only one, {names[0]!r}" if names else "none"
        raise ValueError(
            f"{str(path)!r} needs a sub-folder of images for each of at least two classes; it has {found}."
        )
    _require_distinct(path, names)
    return names


def _require_distinct(path: Path, names: Sequence[str]) -> None:
    """Refuses names that some systems take for one, or that look the same: they are one class under two names."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unicodedata.normalize("NFC", name).lower(), name)
        if other != name:
            case = unicodedata.normalize("NFC", name) != unicodedata.normalize("NFC", other)
            difference = "upper and lower case" if case else f"how Unicode spells them, {other!a} and {name!a}"
            raise ValueError(
                f"The classes {other!r} and {name!r} of {str(path)!r} differ only in {difference}. Put their images "
                "into one folder, or rename one of them."
            )


def _class_files(path: Path, class_name: str) -> list[str]:
    """Image files of a class at any depth, sorted, relative to `path`.

    Raises:
      ValueError: there are none.
    """
    files = [os.path.relpath(file, path) for file in image_files(os.path.join(path, class_name))]
    if not files:
        raise ValueError(
            f"Class folder {str(path / class_name)!r} has no images (files named {' '.join(EXTENSIONS)}); "
            "add images or remove the folder."
        )
    return files


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _listing(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
