"""Parts of a source, and the split of one into two to choose settings on.

The choice depends on the seed and on each record's own key (`Source.key_of`), not on its neighbours: adding a
record keeps the order of the others, and the first ten of a class are among its first twenty.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from vit_jax.data.records import Record, Source, checked_labels


class SubsetSource(Source):
    """Chosen records of another source, in the order given; it stores their numbers only."""

    def __init__(
        self,
        source: Source,
        indices: Sequence[int] | np.ndarray,
        class_names: tuple[str, ...] | None = None,
        relabel: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Takes the records by their numbers in `source`.

        Args:
          source: of all records.
          indices: integers (N,), 0 to len(source) - 1.
          class_names: of the subset; None: those of `source`.
          relabel: for each class of `source` its number among `class_names`, -1 for a class without chosen records;
            None: the number stays.
        """
        self.source, self.class_names = source, source.class_names if class_names is None else tuple(class_names)
        self._indices = np.asarray(indices, np.int64).reshape(-1)
        self._relabel = np.arange(source.num_classes) if relabel is None else np.asarray(relabel, np.int64)
        assert len(self._relabel) == source.num_classes, "one new number for each class"
        assert np.all((self._indices >= 0) & (self._indices < len(source))), "numbers of records"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:
        record = self.source[int(self._indices[index])]
        return Record(record.image, int(self._relabel[record.label]))

    @functools.cached_property
    def labels(self) -> np.ndarray:  # type: ignore[override]  # read when it is first needed
        return self._relabel[checked_labels(self.source)[self._indices]].astype(np.int32)

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self._indices[index]))

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(int(self._indices[index]))


def hold_out(
    source: Source, fraction: float, seed: int, purpose: bytes = b"hold-out/"
) -> tuple[SubsetSource, SubsetSource]:
    """Splits a source, class by class, into the rest and a held-out part, each in the order of the source.

    A class with two examples or more has at least one on either side; the only example of a class stays in the rest.

    Args:
      source: to split.
      fraction: of each class that is held out, above 0 and below 1.
      seed: chooses the examples.
      purpose: chooses others with the same seed.

    Raises:
      ValueError: no class has two examples.
    """
    assert 0.0 < fraction < 1.0, fraction
    labels = checked_labels(source)
    sizes = np.bincount(labels, minlength=source.num_classes)
    counts = np.where(sizes < 2, 0, np.clip(np.rint(fraction * sizes), 1, sizes - 1)).astype(np.int64)
    if not counts.any():
        raise ValueError("Nothing can be held out: no class has two examples. Add some, or choose without a hold-out.")
    held = first_by_hash(source, np.arange(len(source)), labels, counts, b"%d/%s" % (seed, purpose))
    return SubsetSource(source, np.flatnonzero(~held)), SubsetSource(source, np.flatnonzero(held))


def classes_without_examples(source: Source) -> list[str]:
    """Names of the classes without records."""
    sizes = np.bincount(checked_labels(source), minlength=source.num_classes)
    return [name for name, size in zip(source.class_names, sizes.tolist(), strict=True) if not size]


def first_by_hash(
    source: Source, indices: np.ndarray, labels: np.ndarray, counts: np.ndarray, salt: bytes
) -> np.ndarray:
    """Picks the first `counts[label]` records of each class, in the order of their hash.

    Args:
      source: of the records.
      indices: integers (N,), the candidates.
      labels: integers (N,), their classes.
      counts: integers (num_classes,).
      salt: hashed with each record's key: the seed, and the purpose of the choice.

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
