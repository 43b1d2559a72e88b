"""Image folders ("folder:PATH"): a sub-folder for each class, optionally below a sub-folder for each split.

Without split sub-folders a fixed part of every class is held out for testing.
"""

import collections
import dataclasses
import difflib
import functools
import hashlib
import itertools
import logging
import os
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.files import EXTENSIONS, entries_of, image_files, is_folder, is_image, read_file
from vit_jax.data.records import Source, few
from vit_jax.data.subset import hold_out, hold_out_as_then, part_of

_MEANINGS = (("train", "training"), ("test", "val", "validation", "valid"))  # in the place of one that is not there
SPLIT_NAMES = tuple(itertools.chain(*_MEANINGS))
_PART = re.compile(r"(?P<split>.+)\[(?:(?P<low>[\d.]+)%)?:(?:(?P<high>[\d.]+)%)?\]")
WHOLE = "all"  # the split that is every image of a folder without split sub-folders


class FileSource(Source):
    """Image files. Their paths are one numpy array of bytes: a million strings would be slow to send to each worker."""

    def __init__(self, paths: Sequence[str], class_names: tuple[str, ...], labels: np.ndarray, root: str) -> None:
        """Takes paths below `root`, which need not be readable."""
        self.class_names, self.labels, self.root = class_names, labels, root
        self._paths = np.array([os.fsencode(path) for path in paths])

    def image_of(self, index: int) -> bytes:
        return read_file(self.name_of(index))

    def name_of(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._paths[index]))

    def key_of(self, index: int) -> bytes:
        return bytes(self._paths[index])

    @functools.cached_property
    def origin(self) -> str:  # type: ignore[override]
        """A digest of the name of each file, its size, and when it was changed."""
        digest = hashlib.sha256(os.fsencode(self.root))
        for index in range(len(self)):
            try:
                found = os.stat(self.name_of(index))
                digest.update(b"\0%b %d %d" % (self.key_of(index), found.st_size, found.st_mtime_ns))
            except OSError:
                digest.update(b"\0%b unreadable" % self.key_of(index))
        return digest.hexdigest()


def folder_of(data: str) -> Path | None:
    """The path in "folder:PATH"; None for other data."""
    kind, _, name = data.partition(":")
    return Path(name).expanduser() if kind == "folder" and name else None


def located(data: str) -> str:
    """The same text for every way to write one folder; other data unchanged."""
    path = folder_of(data)
    return data if path is None else f"folder:{path.resolve()}"


def open_folder(
    path: Path, split: str, config: InputConfig, seed: int, held_then: Mapping[str, str] | None = None
) -> Source:
    """Opens one split of an image folder.

    With sub-folders named like splits (train, training, test, val, validation, valid, and those of the config), each
    with class folders in it, the split is any such sub-folder and the classes are those of `config.train_split`. For
    one that is not there another of the same meaning is taken, for "test" also "val". "NAME[:99%]" and "NAME[99%:]" are
    parts of a split, class by class, chosen as the hold-out is.
    Otherwise `config.test_split` is `config.holdout_fraction` of every class, chosen by (seed, class, file
    name), `config.train_split` is the rest, and "all" is both. With `held_then`, from `subset.held_up_to`, they are as
    they were then, and what has been added since is on either side by its name.

    Raises:
      ValueError: no such folder or split; a folder that cannot be read; no images; fewer than two classes; a class
        without images, or one that training does not have; two classes whose names differ in case or Unicode normal
        form alone; folders that look like splits under other names; a hold-out that leaves a class without training or
        test images.
    """
    if not path.is_dir():
        raise ValueError(f"There is no folder {str(path)!r}; give folder:PATH with a sub-folder for each class.")
    whole, low, high = _part_of(split)
    named = _whole_splits(config)
    if split_folders(path, named.train_split, named.test_split):
        source = _open_split(path, whole, named)
    else:
        source = _open_flat(path, whole, named, seed, held_then or {})
    return source if (low, high) == (0.0, 1.0) else part_of(source, low, high, seed)


def _part_of(split: str) -> tuple[str, float, float]:
    """The name in "NAME[10%:90%]" and the two fractions; of any other name 0 and 1."""
    if "[" not in split:
        return split, 0.0, 1.0
    if (match := _PART.fullmatch(split)) is not None:
        low, high = (float(match[side] or usual) / 100 for side, usual in (("low", 0), ("high", 100)))
        if 0 <= low < high <= 1:
            return match["split"], low, high
    raise ValueError(f"Split {split!r} of a folder: write parts in percent, such as 'train[:99%]' and 'train[99%:]'.")


def _whole_splits(config: InputConfig) -> InputConfig:
    """The config with splits instead of parts of them; of two parts of one split there is no test split, ""."""
    (train, *_), (test, *_) = map(_part_of, (config.train_split, config.test_split))
    are_parts = train == test and config.train_split != config.test_split
    return dataclasses.replace(config, train_split=train, test_split="" if are_parts else test)


def split_folders(path: Path, *names: str) -> list[str]:
    """Sub-folders that are splits: named like one, or as given, with class folders and no images directly inside."""
    names = tuple(_part_of(name)[0] for name in names if name)
    return [name for name in _subfolders(path) if name in (*SPLIT_NAMES, *names) and _holds_folders(path / name)]


def holds_out(data: str, config: InputConfig) -> bool:
    """Whether `config.holdout_fraction` has an effect: the data are a folder without split sub-folders."""
    path = folder_of(data)
    if path is None:
        return False
    named = _whole_splits(config)
    return bool(named.test_split) and not (path.is_dir() and split_folders(path, named.train_split, named.test_split))


def _open_split(path: Path, split: str, config: InputConfig) -> Source:
    splits = split_folders(path, config.train_split, config.test_split, split)
    train_split, split = (_present(path, name, splits) for name in (config.train_split, split))
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
    class_names = _read_class_names(path / train_split)
    present = set(_subfolders(path / split))
    _require_distinct(path, sorted({*class_names, *present}))
    if extra := sorted(present - set(class_names)):
        raise ValueError(
            f"Split {split!r} of {str(path)!r} has classes that {train_split!r} does not have: {few(extra)}. "
            "Every class needs training images: add them, or remove the folders."
        )
    return _read_classes(path / split, class_names, present)


def _present(path: Path, split: str, splits: Sequence[str]) -> str:
    """The split or, where there is none of this name, the first of the same meaning; the name itself without one."""
    same = next((names for names in _MEANINGS if split in names), ())
    found = [name for name in (split, *same) if name in splits]
    if found and found[0] != split:
        _warn_once(f"{path} has no split {split!r}: {found[0]!r} is taken.")
    return found[0] if found else split


def _open_flat(path: Path, split: str, config: InputConfig, seed: int, held_then: Mapping[str, str]) -> Source:
    names = (config.train_split, config.test_split, WHOLE)
    if split not in names or len(set(names)) < len(names):
        raise ValueError(
            f"Split {split!r} of {str(path)!r}, which has no split sub-folders; allowed are config.input.train_split, "
            f"config.input.test_split and {WHOLE!r} (every image), here {names}, which must differ."
        )
    class_names = _read_class_names(path)
    _refuse_splits(path, class_names)
    everything = _read_classes(path, class_names, class_names)
    if split == WHOLE or not config.test_split:
        return everything
    if held_then:
        rest, held_out = hold_out_as_then(everything, held_then, seed)
        return held_out if split == config.test_split else rest
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
    inside = [_subfolders(path / name) for name in class_names if _holds_folders(path / name)]
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
    return bool(_subfolders(path)) and not any(is_image(entry.name) for entry in entries_of(path))


def _read_class_names(path: Path) -> tuple[str, ...]:
    """The classes of a folder, at least two, in alphabetical order."""
    names = tuple(_subfolders(path))
    if len(names) < 2:
        found = f"only one, {names[0]!r}" if names else "none"
        raise ValueError(
            f"{str(path)!r} needs a sub-folder of images for each of at least two classes; it has {found}."
        )
    _require_distinct(path, names)
    return names


def _require_distinct(path: Path, names: Sequence[str]) -> None:
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


def _read_classes(path: Path, class_names: tuple[str, ...], present: Collection[str]) -> FileSource:
    """Image files of every class at any depth, ordered by class and then by name; of a present class at least one."""
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
        _warn_once(f"{path}: skipped what is no file with the name of an image: {few(kinds)}.")
    labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return FileSource(files, class_names, labels, root=str(path))


@functools.cache
def _warn_once(message: str) -> None:
    """A folder without split sub-folders is read once for each of its parts."""
    from vit_jax import hosts  # here, because it loads jax, which workers do without

    if hosts.is_first():
        logging.getLogger(__name__).warning(message)


def _subfolders(path: Path) -> list[str]:
    """Names of the folders directly inside, sorted, without hidden ones."""
    return sorted(entry.name for entry in entries_of(path) if is_folder(entry) and not entry.name.startswith("."))
