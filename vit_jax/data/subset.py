"""Parts of a source, and the split of one into two to choose settings on.

What is chosen depends on the seed and on what each record is known by (`Source.key_of`), not on its neighbours:
a record that is added leaves the order of the others, and the first ten of a class are among its first twenty.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources import Record, Source


class SubsetSource:
    """Chosen records of another source, in the order given; it holds their numbers and nothing else."""

    def __init__(
        self,
        source: Source,
        indices: Sequence[int] | np.ndarray,
        class_names: tuple[str, ...] | None = None,
        relabel: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Takes the records by their numbers in `source`.

        Args:
          source: where they are.
          indices: integers (N,), 0 to len(source) - 1.
          class_names: of the subset; None: those of `source`.
          relabel: for each class of `source` its number among `class_names`, -1 for a class that no chosen record
            has; None: the number stays.

        Raises:
          ValueError: an index, or the new number of a chosen record, lies outside its range.
        """
        self.source, self.class_names = source, source.class_names if class_names is None else tuple(class_names)
        self._indices = np.asarray(indices, np.int64).reshape(-1)
        self._relabel = np.arange(source.num_classes) if relabel is None else np.asarray(relabel, np.int64)
        if len(self._indices) and not 0 <= self._indices.min() <= self._indices.max() < len(source):
            raise ValueError(
                f"indices reach {self._indices.min()} to {self._indices.max()}; give 0 to {len(source) - 1}."
            )
        if len(self._relabel) != source.num_classes:
            raise ValueError(
                f"relabel has {len(self._relabel)} numbers; give one for each of {source.num_classes} classes."
            )
        if class_names is not None or relabel is not None:
            _require_classes(self.labels, self.class_names)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:
        record = self.source[int(self._indices[index])]
        return Record(record.image, int(self._relabel[record.label]))

    @property
    def labels(self) -> np.ndarray:
        return self._relabel[checked_labels(self.source)[self._indices]].astype(np.int32)

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self._indices[index]))

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(int(self._indices[index]))


def hold_out(
    source: Source, fraction: float, seed: int, purpose: bytes = b"hold-out/"
) -> tuple[SubsetSource, SubsetSource]:
    """Splits a source, class by class, into the rest and a held-out part, each in the order of the source.

    Of a class with two examples or more at least one comes to either side; the only example of a class stays in the
    rest.

    Args:
      source: what to split.
      fraction: of each class that is held out, above 0 and below 1.
      seed: chooses the examples.
      purpose: chooses others with the same seed.

    Raises:
      ValueError: the fraction lies outside its range, or no class has two examples.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"The fraction to hold out is {fraction}; give one above 0 and below 1.")
    labels = checked_labels(source)
    sizes = np.bincount(labels, minlength=source.num_classes)
    counts = np.where(sizes < 2, 0, np.clip(np.rint(fraction * sizes), 1, sizes - 1)).astype(np.int64)
    if not counts.any():
        raise ValueError("Nothing can be held out: no class has two examples. Add some, or choose without a hold-out.")
    held = first_by_hash(source, np.arange(len(source)), labels, counts, b"%d/%s" % (seed, purpose))
    return SubsetSource(source, np.flatnonzero(~held)), SubsetSource(source, np.flatnonzero(held))


def classes_without_examples(source: Source) -> list[str]:
    """Names of the classes that no record is of."""
    sizes = np.bincount(checked_labels(source), minlength=source.num_classes)
    return [name for name, size in zip(source.class_names, sizes.tolist(), strict=True) if not size]


def first_by_hash(
    source: Source, indices: np.ndarray, labels: np.ndarray, counts: np.ndarray, salt: bytes
) -> np.ndarray:
    """Picks the first `counts[label]` records of each class, in the order of their hash.

    Args:
      source: where the records are.
      indices: integers (N,), the candidates.
      labels: integers (N,), their classes.
      counts: integers (num_classes,).
      salt: hashed with each record's key: the seed, and what the choice is for.

    Returns:
      bool (N,): which are picked.
    """
    keys = [hashlib.sha256(salt + source.key_of(index)).digest() for index in indices.tolist()]
    by_hash = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    order = by_hash[np.argsort(labels[by_hash], kind="stable")]
    sizes = np.bincount(labels, minlength=len(counts))
    place_in_class = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(indices), bool)
    chosen[order] = place_in_class < counts[labels[order]]
    return chosen


def checked_labels(source: Source) -> np.ndarray:
    """The labels of a source.

    Raises:
      ValueError: one is no class, as in test splits whose labels are secret (-1).
    """
    labels = source.labels
    wrong = np.flatnonzero((labels < 0) | (labels >= source.num_classes))
    if len(wrong):
        raise ValueError(
            f"{source.name_of(int(wrong[0]))} has the label {labels[wrong[0]]}, but classes are 0 to "
            f"{source.num_classes - 1}: this split has no labels to choose by. Take another."
        )
    return labels


def _require_classes(labels: np.ndarray, class_names: tuple[str, ...]) -> None:
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        raise ValueError(f"New labels reach {labels.min()} to {labels.max()}; there are {len(class_names)} classes.")
