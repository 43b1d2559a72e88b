"""Lists of images with labels, with or without splits: common to folders, tables and packed files.

Without splits a fixed part of every class is held out for testing. Any split can be opened in
parts.
"""

import abc
import dataclasses
import functools
import itertools
import logging
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.depth import ValueRange, survey
from vit_jax.data.decoding.images import RANGE_OPTION
from vit_jax.data.kinds.image_files import read_file
from vit_jax.data.records import Source, count_labels, digest_files, few, find_innermost
from vit_jax.data.subset import hold_out, hold_out_by_hashes, select_part
from vit_jax.text.nearest import did_you_mean
from vit_jax.text.printable import printable

# Each name may stand for the others of its line.
_MEANINGS = (
    ("train", "training"),
    ("test", "val", "validation", "valid"),
)
SPLIT_NAMES = tuple(itertools.chain(*_MEANINGS))
_PART = re.compile(r"(?P<split>.+)\[(?:(?P<low>[\d.]+)%)?:(?:(?P<high>[\d.]+)%)?\]")
WHOLE = "all"
"""The split with every image of a list without splits."""


class ListedSource(Source):
    """The images of a listing."""

    def survey(self, value_range: ValueRange | None, option: str) -> list[str]:
        """Return warnings as `survey.survey`."""
        names = map(self.name_of, range(len(self)))
        return survey(names, value_range, option)


class FileSource(ListedSource):
    """Image files.

    Their paths are one numpy array of bytes: a million strings would be slow to send to each
    worker.
    """

    def __init__(
        self,
        paths: Sequence[str],
        class_names: tuple[str, ...],
        labels: np.ndarray,
        root: str,
    ) -> None:
        """Take paths below `root`, which need not be readable, or absolute ones."""
        self.class_names = class_names
        self.labels = labels
        self.root = root
        self.is_multilabel = labels.ndim == 2
        self._paths = np.array([os.fsencode(path) for path in paths])

    def image_of(self, index: int) -> bytes:
        return read_file(self.name_of(index))

    def name_of(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self._paths[index]))

    def key_of(self, index: int) -> bytes:
        return bytes(self._paths[index])

    @functools.cached_property
    def origin(self) -> str:  # type: ignore[override]
        return digest_files(self.root, map(self.name_of, range(len(self))))


class Listing(abc.ABC):
    """A list of images with labels.

    Attributes:
      kind: the word before the colon in "kind:PATH".
      classes_are: the parts of a list that make classes, for messages.
      unsplit: a relative clause on a list without splits, for messages.
      path: the folder, the file or the pattern.
      suffix: text behind the path in the name of the data.
    """

    kind: str
    classes_are = "labels"
    unsplit: str
    suffix = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abc.abstractmethod
    def exists(self) -> bool:
        """Return True if the folder or file exists."""

    @abc.abstractmethod
    def require(self) -> None:
        """Raise ValueError if it does not exist."""

    @abc.abstractmethod
    def splits(self, *names: str) -> list[str]:
        """Return the splits with usual names or with one of these, which may name a part."""

    def require_splits(self, *names: str) -> None:
        """Raise ValueError for a split that is neither usual nor one of these."""
        return

    @abc.abstractmethod
    def classes(self, split: str | None) -> list[str]:
        """Return the names of the classes in a split, or without splits, by their numbers."""

    @abc.abstractmethod
    def read(self, split: str | None, class_names: tuple[str, ...]) -> ListedSource:
        """Return the images of a split, or without splits."""

    @property
    def address(self) -> str:
        """The text of the data with their real path, by which data are compared."""
        return f"{self.kind}:{os.path.realpath(self.path)}{self.suffix}"

    def place(self, split: str | None) -> str:
        """Return the name of the data and the split, for messages."""
        name = f"{self.kind}:{self.path}"
        if split:
            name += f", split {split!r}"
        return printable(name)


def list_known_splits(names: Iterable[str]) -> set[str]:
    """Return the usual names of splits, and these, which may name parts of splits."""
    return {*SPLIT_NAMES, *(parse_split(name)[0] for name in names)} - {""}


def open_listing(
    listing: Listing,
    split: str,
    config: InputConfig,
    seed: int,
    held_hashes: Mapping[str, str] | None = None,
    range_option: str = RANGE_OPTION,
    *,
    is_classified: bool = True,
) -> Source:
    """Open one split.

    Splits are named train, training, test, val, validation, valid, or as in the config; the classes
    are those of `config.train_split`. A missing split is replaced by another of the same meaning,
    "test" also by "val". "NAME[:99%]" and "NAME[99%:]" are parts of a split, class by class, chosen
    as the hold-out is. Without splits, `config.test_split` is `config.holdout_fraction` of every
    class, chosen by (seed, class, file name), `config.train_split` is the rest, and "all" is both.
    With `held_hashes`, from `subset.read_held_hashes`, the splits are those of an earlier state of
    the list, and new images are on either side by their names.

    With `is_classified=False`, for images without a classifier, one class is enough, there need be
    no training split, and classes without training images have the last numbers.

    Raises:
      ValueError: there is no such list or split; it cannot be read; no images; fewer than two
        classes; a class without training images; two classes whose names differ in case or Unicode
        normal form alone; a hold-out that leaves a class without training or test images; otherwise
        as `Listing.read`.
    """
    listing.require()
    whole, low, high = parse_split(split)
    named = find_whole_splits(config)
    if listing.splits(named.train_split, named.test_split):
        source = _open_split(listing, whole, named, is_classified=is_classified)
    else:
        source = _open_flat(
            listing,
            whole,
            named,
            seed,
            held_hashes or {},
            is_classified=is_classified,
        )
    listed = find_innermost(source)
    assert isinstance(listed, ListedSource)
    # All images of a list without splits are checked, for one warning.
    if not config.reads_bands:  # all values and bands are read
        for line in listed.survey(config.value_range, range_option):
            warn_once(f"{listing.path}: {line}")

    if (low, high) == (0.0, 1.0):
        return source
    return select_part(source, low, high, seed)


def parse_split(split: str) -> tuple[str, float, float]:
    """Return the name in "NAME[10%:90%]" and the two fractions; 0 and 1 for any other name."""
    if "[" not in split:
        return split, 0.0, 1.0
    if match := _PART.fullmatch(split):
        low = float(match["low"] or 0) / 100
        high = float(match["high"] or 100) / 100
        if 0 <= low < high <= 1:
            return match["split"], low, high
    raise ValueError(
        f"Split {split!r}: write parts of this kind of data in percent, "
        "such as 'train[:99%]' and 'train[99%:]'.",
    )


def find_whole_splits(config: InputConfig) -> InputConfig:
    """Return the config with splits instead of parts.

    For two parts of one split the test split is "".
    """
    train, _, _ = parse_split(config.train_split)
    test, _, _ = parse_split(config.test_split)
    if train == test and config.train_split != config.test_split:
        test = ""
    return dataclasses.replace(config, train_split=train, test_split=test)


def _open_split(
    listing: Listing,
    split: str,
    config: InputConfig,
    *,
    is_classified: bool,
) -> Source:
    splits = listing.splits(config.train_split, config.test_split, split)
    listing.require_splits(config.train_split, config.test_split, split)
    split = _find_present_split(str(listing.path), split, splits)
    if not is_classified:
        advice = f"Name one of them as the split, such as {splits[0]!r}."
        _require_split(listing, split, splits, advice)
        class_names = _list_all_class_names(listing, split, config.train_split, splits)
        return listing.read(split, class_names)

    train_split = _find_present_split(str(listing.path), config.train_split, splits)
    advice = "Set config.input.train_split and config.input.test_split."
    if len(splits) == 1:
        (only,) = splits
        advice = (
            f"Set config.input.train_split='{only}[:90%]' and "
            f"config.input.test_split='{only}[90%:]' to hold out a part of it."
        )
    for name in (train_split, split):
        _require_split(listing, name, splits, advice)
    class_names = _list_class_names(listing, train_split)
    present = listing.classes(split)
    _require_distinct(listing, sorted({*class_names, *present}))
    extra = sorted({*present} - {*class_names})
    if extra:
        raise ValueError(
            f"{listing.place(split)} has classes that {train_split!r} does not have: {few(extra)}. "
            "Every class needs training images: add them, or remove these images.",
        )
    return listing.read(split, class_names)


def _require_split(listing: Listing, name: str, splits: Sequence[str], advice: str) -> None:
    """Raise ValueError, which ends with the advice, for a split that is missing."""
    if name not in splits:
        near = did_you_mean(name, splits)
        raise ValueError(
            f"{listing.place(None)} has no split {name!r}; it has {splits}.{near} {advice}",
        )


def _list_all_class_names(
    listing: Listing,
    split: str,
    train_split: str,
    splits: Sequence[str],
) -> tuple[str, ...]:
    """Return the classes of the training split, if any, and those that only the split has."""
    class_names = list[str]()
    present = _find_split(train_split, splits)
    if present is not None:
        class_names += listing.classes(present)
    for name in _list_class_names(listing, split, 1):
        if name not in class_names:
            class_names.append(name)
    _require_distinct(listing, sorted(class_names))
    return tuple(class_names)


def _find_split(split: str, splits: Sequence[str]) -> str | None:
    """Return the split or, if it is missing, the first of the same meaning; None without any."""
    if split in splits:
        return split
    for names in _MEANINGS:
        if split not in names:
            continue
        for name in names:
            if name in splits:
                return name
    return None


def _find_present_split(path: str, split: str, splits: Sequence[str]) -> str:
    """Return the split or one of the same meaning; without any the name itself."""
    present = _find_split(split, splits)
    if present is None or present == split:
        return split
    warn_once(f"{path} has no split {split!r}: {present!r} is taken.")
    return present


def _open_flat(
    listing: Listing,
    split: str,
    config: InputConfig,
    seed: int,
    held_hashes: Mapping[str, str],
    *,
    is_classified: bool,
) -> Source:
    names = (config.train_split, config.test_split, WHOLE)
    unsplit = f"{listing.place(None)}, {listing.unsplit}"
    if split not in names or len(set(names)) < len(names):
        raise ValueError(
            f"Split {split!r} of {unsplit}; allowed are config.input.train_split, "
            f"config.input.test_split and {WHOLE!r} (every image), here {names}, which must differ.",
        )
    fewest = 2 if is_classified else 1
    everything = listing.read(None, _list_class_names(listing, None, fewest))
    if split == WHOLE or not config.test_split:
        return everything
    if held_hashes:
        rest, held_out = hold_out_by_hashes(everything, held_hashes, seed)
    else:
        _require_hold_out(everything, config.holdout_fraction, unsplit)
        rest, held_out = hold_out(everything, config.holdout_fraction, seed, purpose=b"")
    if split == config.test_split:
        return held_out
    return rest


def _require_hold_out(everything: Source, fraction: float, unsplit: str) -> None:
    """Raise ValueError unless a fraction of each class can be held out."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(
            f"config.input.holdout_fraction={fraction}: must be between 0 and 1 for {unsplit}.",
        )
    if everything.is_multilabel:
        return

    sizes = count_labels(everything.labels, everything.num_classes)
    single = []
    for name, size in zip(everything.class_names, sizes, strict=True):
        if size == 1:
            single.append(name)
    if single:
        raise ValueError(
            f"Classes of {unsplit}, have one image: {few(single)}. Add images, or name the splits.",
        )


def _list_class_names(listing: Listing, split: str | None, fewest: int = 2) -> tuple[str, ...]:
    """Return the classes of a split, in distinct names.

    Raises:
      ValueError: there are fewer than the least number.
    """
    names = tuple(listing.classes(split))
    if len(names) < fewest:
        present = few(names, repr) or "none"
        number = "one class" if fewest == 1 else "two classes"
        raise ValueError(
            f"{listing.place(split)}: must have images of at least {number}, and has {present}. "
            f"Its {listing.classes_are} are the classes.",
        )
    _require_distinct(listing, names)
    return names


def _require_distinct(listing: Listing, names: Sequence[str]) -> None:
    """Reject names that look the same or that some systems treat as one."""
    seen: dict[str, str] = {}
    for name in names:
        normal = unicodedata.normalize("NFC", name)
        other = seen.setdefault(normal.lower(), name)
        if other == name:
            continue

        difference = "upper and lower case"
        if normal == unicodedata.normalize("NFC", other):
            difference = f"their Unicode form, {other!a} and {name!a}"
        raise ValueError(
            f"The classes {other!r} and {name!r} of {listing.place(None)} differ only in "
            f"{difference}. Give their images one name.",
        )


@functools.cache
def warn_once(message: str) -> None:
    """Warn once, because a list without splits is read for each of its parts."""
    from vit_jax import hosts  # here, because it loads jax, which workers do without

    if hosts.is_first():
        logging.getLogger(__name__).warning(message)
