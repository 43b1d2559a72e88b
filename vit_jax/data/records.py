"""One stored example, and what a collection of them offers to the rest of the pipeline."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.files import printable


class Record(NamedTuple):
    """One stored example.

    Attributes:
      image: an encoded file (JPEG, PNG, ...) as bytes, or pixels as uint8 (H, W), (H, W, 1) or (H, W, 3) in RGB.
      label: class number, 0 to num_classes - 1; where an image may have several labels, 0 or 1 for each class, (K,).
    """

    image: bytes | np.ndarray
    label: int | np.ndarray


class Source:
    """Records by index. A subclass sets `class_names` and `labels` and defines `image_of`.

    It can be pickled to worker processes and is read from many threads at once.

    Attributes:
      class_names: one for each class.
      labels: integers (N,), 0 to num_classes - 1, available without decoding an image; or (N, K) of 0 and 1.
      is_multilabel: an image may have any number of the labels, not exactly one.
    """

    class_names: tuple[str, ...]
    labels: np.ndarray
    is_multilabel: bool = False

    def image_of(self, index: int) -> bytes | np.ndarray:
        """The image of a record, as in `Record`; may raise `images.UnreadableImage`."""
        raise NotImplementedError(f"{type(self).__name__} must define image_of(index).")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of the label of one record."""
        return (self.num_classes,) if self.is_multilabel else ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        label = self.labels[index]
        return Record(self.image_of(index), label if self.is_multilabel else int(label))

    def name_of(self, index: int) -> str:
        """The record's name in messages: its file, or "split:index"."""
        return f"record {index}"

    def key_of(self, index: int) -> bytes:
        """Identifies the record wherever the data is stored; choices by hash depend on it."""
        return b"%d" % index

    @property
    def origin(self) -> str | None:
        """Changes whenever an image may have changed, without reading any; None where that cannot be told."""
        return None

    @functools.cached_property
    def records_sha256(self) -> str:
        """SHA-256 over the key and label of every record; not over the images, which would take hours."""
        digest = hashlib.sha256()
        for index, label in enumerate(self.labels.tolist()):
            key = self.key_of(index)
            words = bytes(label) if self.is_multilabel else b"%d" % label
            digest.update(b"%b %d %b" % (words, len(key), key))
        return digest.hexdigest()


def checked_labels(source: Source) -> np.ndarray:
    """The labels of a source.

    Raises:
      ValueError: one is no class, as in test splits whose labels are secret (-1).
    """
    labels, highest = source.labels, 1 if source.is_multilabel else source.num_classes - 1
    is_wrong = (labels < 0) | (labels > highest)
    if len(wrong := np.flatnonzero(is_wrong.any(axis=1) if labels.ndim == 2 else is_wrong)):
        allowed = "each is 0 or 1" if source.is_multilabel else f"classes are 0 to {highest}"
        raise ValueError(
            f"{printable(source.name_of(int(wrong[0])))} has the label {labels[wrong[0]]}, but {allowed}: choose a "
            "split with labels, or correct them."
        )
    return labels


def class_sizes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """How many of the labels, (N,) or (N, K), are of each class, (K,)."""
    return labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=num_classes)


def few(names: Sequence[str], shown: Callable[[str], str] = printable) -> str:
    """The first ten of the names, and the number of the others."""
    return ", ".join(map(shown, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
