"""Stored examples, and sources of them."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.storage.files import is_mirrored
from vit_jax.text.printable import printable

MAX_CLASSES = 2**20
"""Largest number of classes without names; a larger number is an error of the data."""


class Record(NamedTuple):
    """One stored example.

    Attributes:
      image: an encoded file (JPEG, PNG, ...) as bytes, or pixels as uint8 (H, W), (H, W, 1) or (H,
        W, 3) in RGB, or with `input.channels` any numbers (H, W, bands).
      label: class number, 0 to num_classes - 1; multi-label: 0 or 1 for each class, (K,).
    """

    image: bytes | np.ndarray
    label: int | np.ndarray


class Source:
    """Records by index. A subclass sets `class_names` and `labels` and defines `image_of`.

    It can be pickled to worker processes and is read from many threads at once.

    Attributes:
      class_names: a name for each class.
      labels: integers (N,), 0 to num_classes - 1, or multi-label (N, K) of 0 and 1; available
        without decoding images.
      is_multilabel: an image has any number of labels, not exactly one.
    """

    class_names: tuple[str, ...]
    labels: np.ndarray
    is_multilabel: bool = False

    def image_of(self, index: int) -> bytes | np.ndarray:
        """Return the image of a record, as in `Record`; may raise `images.UnreadableImage`."""
        raise NotImplementedError(f"{type(self).__name__} must define image_of(index).")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the label of one record."""
        if self.is_multilabel:
            return (self.num_classes,)
        return ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        label = self.labels[index]
        if not self.is_multilabel:
            label = int(label)
        return Record(self.image_of(index), label)

    def name_of(self, index: int) -> str:
        """Return the record's name in messages: its file, or "split:index"."""
        return f"record {index}"

    def key_of(self, index: int) -> bytes:
        """Return bytes that identify the record in every copy of the data; hashes depend on it."""
        return b"%d" % index

    @property
    def origin(self) -> str | None:
        """A text that changes whenever an image may have changed; None if changes are unknown."""
        return None

    @functools.cached_property
    def records_sha256(self) -> str:
        """SHA-256 of the key and label of every record; images would take hours."""
        digest = hashlib.sha256()
        for index, label in enumerate(self.labels.tolist()):
            key = self.key_of(index)
            if self.is_multilabel:
                words = bytes(label)
            else:
                words = b"%d" % label
            digest.update(b"%b %d %b" % (words, len(key), key))
        return digest.hexdigest()


def require_same_classes(
    data: str,
    train_name: str,
    train: Source,
    name: str,
    source: Source,
) -> None:
    """Raise ValueError unless two splits have the same classes and the same kind of labels."""
    if train.class_names != source.class_names:
        raise ValueError(
            f"The splits of {data!r} have different classes: {train_name!r} has "
            f"{list(train.class_names)}, {name!r} has {list(source.class_names)}.",
        )
    if train.is_multilabel != source.is_multilabel:
        several = train_name if train.is_multilabel else name
        raise ValueError(
            f"The splits of {data!r} differ: only in {several!r} an image may have several labels.",
        )


def read_file_state(file: str) -> tuple[int, ...]:
    """Return numbers that change whenever a file may have changed.

    They are its size and times, or in a bucket its size and generation. The second time also
    changes when another file of the same size and time of change takes the name.

    Raises:
      OSError: an error of the system.
    """
    status = os.stat(file)
    if is_mirrored(file):  # the time of a placeholder is the generation
        return status.st_size, status.st_mtime_ns
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest_files(words: str, files: Iterable[str]) -> str:
    """Return a digest of words, and of the name and state of each file."""
    digest = hashlib.sha256(os.fsencode(words))
    for file in files:
        try:
            facts = b" ".join(b"%d" % number for number in read_file_state(file))
        except OSError:
            facts = b"unreadable"
        digest.update(b"\0%b %b" % (os.fsencode(file), facts))
    return digest.hexdigest()


class WrappedSource(Source):
    """Another source, `source`, with its class names; a subclass defines `__getitem__`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.class_names = source.class_names
        self.is_multilabel = source.is_multilabel

    def __len__(self) -> int:
        return len(self.source)

    @functools.cached_property
    def labels(self) -> np.ndarray:  # type: ignore[override]  # read when it is first needed
        return self.source.labels

    def name_of(self, index: int) -> str:
        return self.source.name_of(index)

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(index)

    @property
    def origin(self) -> str | None:
        return self.source.origin


def find_innermost(source: Source) -> Source:
    """Return the source that all others wrap."""
    while isinstance(source, WrappedSource):
        source = source.source
    return source


def check_labels(source: Source) -> np.ndarray:
    """Return the labels of a source.

    Raises:
      ValueError: a label is no class, as in test splits whose labels are secret (-1).
    """
    labels = source.labels
    if source.is_multilabel:
        highest = 1
        allowed = "each is 0 or 1"
    else:
        highest = source.num_classes - 1
        allowed = f"classes are 0 to {highest}"

    wrong = np.argwhere((labels < 0) | (labels > highest))
    if not len(wrong):
        return labels

    first = int(wrong[0, 0])
    name = printable(source.name_of(first))
    raise ValueError(
        f"{name} has the label {labels[first]}, but {allowed}: "
        "choose a split with labels, or correct them.",
    )


def count_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the number of labels, (N,) or (N, K), of each class, (K,)."""
    if labels.ndim == 2:
        return labels.sum(axis=0)
    return np.bincount(labels, minlength=num_classes)


def few(names: Sequence[str], shown: Callable[[str], str] = printable) -> str:
    """Return the first ten names, and the number of the others."""
    first_ten = ", ".join(map(shown, names[:10]))
    if len(names) <= 10:
        return first_ten
    return f"{first_ten} and {len(names) - 10} more"
