"""Image folders ("folder:PATH"): a sub-folder for each class, optionally below a sub-folder for each split.

Without split sub-folders a fixed part of every class is held out for testing. `class_folders` reads the classes.
"""

import difflib
import os
from pathlib import Path

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.class_folders import read_class_names, read_classes, require_distinct, subfolders
from vit_jax.data.listing import is_image
from vit_jax.data.records import Source, few
from vit_jax.data.subset import hold_out

SPLIT_NAMES = ("train", "test", "val", "validation", "valid")
WHOLE = "all"  # the split that is every image of a folder without split sub-folders


def folder_of(data: str) -> Path | None:
    """The path in "folder:PATH"; None for other data."""
    kind, _, name = data.partition(":")
    return Path(name).expanduser() if kind == "folder" and name else None


def located(data: str) -> str:
    """The same text for every way to write one folder; other data unchanged."""
    path = folder_of(data)
    return data if path is None else f"folder:{path.resolve()}"


def open_folder(path: Path, split: str, config: InputConfig, seed: int) -> Source:
    """Opens one split of an image folder.

    With sub-folders named like splits (train, test, val, validation, valid, and those of the config), each with
    class folders in it, the split is any such sub-folder and the classes are those of `config.train_split`.
    Otherwise `config.test_split` is `config.holdout_fraction` of every class, chosen by (seed, class, file
    name), `config.train_split` is the rest, and "all" is both.

    Raises:
      ValueError: no such folder or split; no images; fewer than two classes; a class without images, or one
        that training does not have; two classes whose names differ in case or Unicode normal form alone; folders that
        look like splits under other names; a hold-out that leaves a class without training or test images.
    """
    if not path.is_dir():
        raise ValueError(f"There is no folder {str(path)!r}; give folder:PATH with a sub-folder for each class.")
    if "[" in split:
        raise ValueError(
            f"Split {split!r} of a folder: parts of splits exist only for TFDS. For folders set "
            "config.input.holdout_fraction, or make sub-folders for the splits."
        )
    if split_folders(path, config.train_split, config.test_split):
        return _open_split(path, split, config)
    return _open_flat(path, split, config, seed)


def split_folders(path: Path, *names: str) -> list[str]:
    """Sub-folders that are splits: named like one, or as given, with class folders and no images directly inside."""
    return [name for name in subfolders(path) if name in (*SPLIT_NAMES, *names) and _holds_folders(path / name)]


def holds_out(data: str, config: InputConfig) -> bool:
    """Whether `config.holdout_fraction` has an effect: the data are a folder without split sub-folders."""
    path = folder_of(data)
    if path is None:
        return False
    return not (path.is_dir() and split_folders(path, config.train_split, config.test_split))


def _open_split(path: Path, split: str, config: InputConfig) -> Source:
    train_split = config.train_split
    splits = split_folders(path, train_split, config.test_split, split)
    for name in (train_split, split):
        if name not in splits:
            near = difflib.get_close_matches(name, splits, n=1)
            raise ValueError(
                f"{str(path)!r} has no split {name!r}; it has {splits}."
                + (f" Did you mean {near[0]!r}?" if near else "")
                + (
                    " Set config.input.train_split and config.input.test_split."
                    if len(splits) > 1
                    else f" Give folder:{path / splits[0]}, and a part of it is held out for testing."
                )
            )
    class_names = read_class_names(path / train_split)
    present = set(subfolders(path / split))
    require_distinct(path, sorted({*class_names, *present}))
    extra = sorted(present - set(class_names))
    if extra:
        raise ValueError(
            f"Split {split!r} of {str(path)!r} has classes that {train_split!r} does not have: {few(extra)}. "
            "Every class needs training images: add them, or remove the folders."
        )
    return read_classes(path / split, class_names, present)


def _open_flat(path: Path, split: str, config: InputConfig, seed: int) -> Source:
    names = (config.train_split, config.test_split, WHOLE)
    if split not in names or len(set(names)) < len(names):
        raise ValueError(
            f"Split {split!r} of {str(path)!r}, which has no split sub-folders; allowed are config.input.train_split, "
            f"config.input.test_split and {WHOLE!r} (every image), here {names}, which must differ."
        )
    class_names = read_class_names(path)
    _refuse_splits(path, class_names)
    everything = read_classes(path, class_names, class_names)
    if split == WHOLE:
        return everything
    if not 0.0 < config.holdout_fraction < 1.0:
        raise ValueError(
            f"config.input.holdout_fraction is {config.holdout_fraction}; a folder without split sub-folders needs "
            "a fraction between 0 and 1."
        )
    if single := [name for name, size in zip(class_names, np.bincount(everything.labels), strict=True) if size < 2]:
        raise ValueError(
            f"Class folders of {str(path)!r} with one image, which cannot serve for training and for testing: "
            f"{few(single)}. Add images, or make sub-folders for the splits."
        )
    rest, held_out = hold_out(everything, config.holdout_fraction, seed, purpose=b"")
    return held_out if split == config.test_split else rest


def _refuse_splits(path: Path, class_names: tuple[str, ...]) -> None:
    """Classes with a name like a split's that hold the same folders and no images are splits under other names."""
    inside = [subfolders(path / name) for name in class_names if _holds_folders(path / name)]
    is_like_splits = any(word in name.lower() for name in class_names for word in ("train", "test", "val"))
    if not is_like_splits or len(inside) < len(class_names) or any(names != inside[0] for names in inside):
        return
    train = next((name for name in class_names if "train" in name.lower()), class_names[0])
    test = next(name for name in class_names if name != train)
    raise ValueError(
        f"The folders {few(class_names, repr)} of {str(path)!r} look like splits and not like classes: all hold the "
        f"folders {few(inside[0], repr)}, and no images beside them. Set config.input.train_split={train} and "
        f"config.input.test_split={test} (for evaluate --split={test}). If they are classes, put their images directly "
        "into them."
    )


def _holds_folders(path: Path) -> bool:
    """Whether there are folders directly inside, and no images."""
    return bool(subfolders(path)) and not any(is_image(name) for name in os.listdir(path))
