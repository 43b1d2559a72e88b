"""Parts of a source: the selection of a config, and hold-outs.

The choice depends on the seed and on the key of each record (`Source.key_of`), not on its
neighbours: adding a record keeps the order of the others, and the first ten of a class are among
its first twenty. Multi-label records are chosen from one group, not class by class, because a
record belongs to several classes.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.records import (
    Record,
    Source,
    WrappedSource,
    check_labels,
    count_labels,
    few,
)
from vit_jax.text.nearest import closest


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Data of a training run, as its weights describe them.

    Attributes:
      data: the data of the config; files by their absolute path.
      seed: the random seed of the run; it selects the hold-out of files without splits.
      holdout_fraction: fraction of each class of files without splits that is held out.
      train_split: the split that the run trained on.
      test_split: the split that it did not train on.
      classes: the chosen classes of the data; (): all.
      is_multilabel: images may have several labels.
      held_up_to: for files without splits, the hold-out by class, from `read_held_hashes`.
      lora_rank: rank of the LoRA factors that are merged into the kernels.
    """

    data: str
    seed: int
    holdout_fraction: float
    train_split: str
    test_split: str
    classes: tuple[str, ...]
    is_multilabel: bool = False
    held_up_to: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lora_rank: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))  # JSON has lists


class SubsetSource(WrappedSource):
    """Chosen records of another source in the order of their numbers."""

    def __init__(
        self,
        source: Source,
        indices: Sequence[int] | np.ndarray,
        class_names: tuple[str, ...] | None = None,
        relabel: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Choose records of a source.

        Args:
          source: the other source.
          indices: numbers of the records in `source`, (N,).
          class_names: names of the classes of the subset; None: unchanged.
          relabel: for each class of `source` its number among `class_names`, -1 for a class without
            chosen records; None: unchanged.
        """
        super().__init__(source)
        if class_names is not None:
            self.class_names = tuple(class_names)
        if relabel is None:
            relabel = np.arange(source.num_classes)
        self._relabel = np.asarray(relabel, np.int64)
        self._indices = np.asarray(indices, np.int64).reshape(-1)
        assert len(self._relabel) == source.num_classes, "one new number for each class"
        assert np.all((self._indices >= 0) & (self._indices < len(source))), "numbers of records"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:
        record = self.source[int(self._indices[index])]
        label = self._renumber(np.asarray(record.label))
        if self.is_multilabel:
            return Record(record.image, label)
        return Record(record.image, int(label))

    @functools.cached_property
    def labels(self) -> np.ndarray:  # type: ignore[override]  # read when it is first needed
        labels = check_labels(self.source)[self._indices]
        return self._renumber(labels).astype(np.int32)

    def _renumber(self, labels: np.ndarray) -> np.ndarray:
        """Return labels of the source in the numbering of the subset."""
        if not self.is_multilabel:
            return self._relabel[labels]

        known = self._relabel >= 0
        shape = (*labels.shape[:-1], self.num_classes)
        renumbered = np.zeros(shape, labels.dtype)
        new_numbers = self._relabel[known]
        renumbered[..., new_numbers] = labels[..., known]
        return renumbered

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self._indices[index]))

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(int(self._indices[index]))

    @property
    def origin(self) -> str | None:
        inner = self.source.origin
        if not inner:
            return inner
        chosen = hashlib.sha256(self._indices.tobytes())
        return f"{inner} {chosen.hexdigest()}"


def hold_out(
    source: Source,
    fraction: float,
    seed: int,
    purpose: bytes = b"hold-out/",
) -> tuple[SubsetSource, SubsetSource]:
    """Split a source, class by class, into the rest and a held-out fraction.

    Both have the order of the source. A class with two examples or more has at least one on either
    side; the only example of a class stays in the rest. Another `purpose` chooses other records
    with the same seed.

    Raises:
      ValueError: no class has two examples.
    """
    assert 0.0 < fraction < 1.0, fraction
    _, labels, sizes = _read_groups(source)
    rounded = np.rint(fraction * sizes)
    at_least_one_on_either_side = np.clip(rounded, 1, sizes - 1)
    counts = np.where(sizes < 2, 0, at_least_one_on_either_side)
    counts = counts.astype(np.int64)
    if not counts.any():
        raise ValueError(
            "Nothing can be held out: no class has two examples. "
            "Add some, or choose without a hold-out.",
        )

    salt = b"%d/%s" % (seed, purpose)
    everything = np.arange(len(source))
    is_held = _find_first_by_hash(source, everything, labels, counts, salt)
    return _split(source, is_held)


def select_part(
    source: Source,
    low: float,
    high: float,
    seed: int,
) -> SubsetSource:
    """Return the records of each class between two fractions, by their hashes as in `hold_out`."""
    _, labels, sizes = _read_groups(source)

    everything = np.arange(len(source))
    salt = b"%d/" % seed

    def find_first(fraction: float) -> np.ndarray:
        counts = np.rint(fraction * sizes).astype(np.int64)
        return _find_first_by_hash(source, everything, labels, counts, salt)

    is_in_part = find_first(high) & ~find_first(low)
    return SubsetSource(source, np.flatnonzero(is_in_part))


def read_held_hashes(held_out: Source, seed: int) -> dict[str, str]:
    """Return by class the last hash (64 bits, as hex digits) of the records that `hold_out` chose.

    After the source has changed, records up to this hash were held out.
    """
    last: dict[str, str] = {}
    names, labels, _ = _read_groups(held_out)
    for index, label in enumerate(labels.tolist()):
        name = names[label]
        short_hash = _compute_short_hash(held_out, index, seed)
        last[name] = max(last.get(name, ""), short_hash)
    return last


def hold_out_by_hashes(
    source: Source,
    last: Mapping[str, str],
    seed: int,
) -> tuple[SubsetSource, SubsetSource]:
    """Hold out the records up to the hashes of `held_up_to`.

    No record is held out that was trained on. All records of unknown classes are held out.
    """
    names, labels, _ = _read_groups(source)
    is_held = np.zeros(len(source), bool)
    for index, label in enumerate(labels.tolist()):
        last_held = last.get(names[label])
        if last_held is None:
            is_held[index] = True
        else:
            is_held[index] = _compute_short_hash(source, index, seed) <= last_held
    return _split(source, is_held)


def _split(
    source: Source,
    is_held: np.ndarray,
) -> tuple[SubsetSource, SubsetSource]:
    rest = SubsetSource(source, np.flatnonzero(~is_held))
    held_out = SubsetSource(source, np.flatnonzero(is_held))
    return rest, held_out


def _compute_short_hash(source: Source, index: int, seed: int) -> str:
    key = source.key_of(index)
    digest = hashlib.sha256(b"%d/%b" % (seed, key))
    return digest.hexdigest()[:16]


def _read_groups(source: Source) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Return names of groups, the group of each record (N,), and sizes.

    The groups are classes, or one group if an image has several labels.
    """
    if source.is_multilabel:
        one_group = np.zeros(len(source), np.int64)
        return ("",), one_group, np.array([len(source)])

    labels = check_labels(source)
    sizes = count_labels(labels, source.num_classes)
    return source.class_names, labels, sizes


def find_classes_without_examples(source: Source) -> list[str]:
    """Return the names of the classes without records."""
    labels = check_labels(source)
    sizes = count_labels(labels, source.num_classes).tolist()
    missing = []
    for name, size in zip(source.class_names, sizes, strict=True):
        if size == 0:
            missing.append(name)
    return missing


def _find_first_by_hash(
    source: Source,
    indices: np.ndarray,
    labels: np.ndarray,
    counts: np.ndarray,
    salt: bytes,
) -> np.ndarray:
    """Find the first `counts[label]` records of their class by their hash, bool (N,).

    The key of the record and the salt are hashed. The salt is the seed, and the purpose of the
    choice.
    """
    hashes = []
    for index in indices.tolist():
        key = source.key_of(index)
        hashes.append(hashlib.sha256(salt + key).digest())
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    by_hash = np.array(order, np.int64)

    chosen = np.zeros(len(indices), bool)
    chosen[by_hash] = find_first_of_class(labels[by_hash], counts)
    return chosen


def find_first_of_class(labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Find the first `counts[label]` records of their class, bool (N,).

    Labels are (N,), counts (K,).
    """
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=len(counts))
    first_of_each = np.cumsum(sizes) - sizes
    place_in_class = np.arange(len(labels)) - np.repeat(first_of_each, sizes)

    chosen = np.zeros(len(labels), bool)
    chosen[by_class] = place_in_class < counts[labels[by_class]]
    return chosen


def select(
    source: Source,
    config: InputConfig,
    *,
    training: bool,
    seed: int,
) -> Source:
    """Select the classes and, for training, the examples of a config.

    The fields are `classes`, `train_examples` and `train_examples_per_class`. Every multi-label
    image stays, with its labels among the chosen classes.

    Raises:
      ValueError: a class that the data does not have, that is named twice or is the only one; no
        examples, or too few for training, in all or of a class.
    """
    per_class = None
    in_all = None
    if training:
        per_class = config.train_examples_per_class
        in_all = config.train_examples
    if not config.classes and per_class is None and in_all is None:
        return source
    if per_class is not None and source.is_multilabel:
        raise ValueError(
            f"config.input.train_examples_per_class={per_class}: an image of these data may have "
            "several labels, so that no class has images to itself. "
            "Use config.input.train_examples, of all images.",
        )

    class_names = source.class_names
    relabel = np.arange(source.num_classes)
    if config.classes:
        class_names = tuple(config.classes)
        relabel = _number_classes(source.class_names, class_names)

    indices = np.arange(len(source))
    labels = SubsetSource(source, indices, class_names, relabel).labels
    if not source.is_multilabel:
        indices = np.flatnonzero(labels >= 0)
    if training:
        _require_examples(class_names, labels[indices], per_class or 1)
    if not len(indices):
        classes = ",".join(class_names)
        raise ValueError(f"config.input.classes={classes}: this split has no image of them.")

    if per_class is not None:
        counts = np.full(len(class_names), per_class)
        salt = b"%d/examples/" % seed
        is_chosen = _find_first_by_hash(source, indices, labels[indices], counts, salt)
        indices = indices[is_chosen]
    if in_all is not None:
        indices = _choose_in_all(source, indices, in_all, seed)
    return SubsetSource(source, indices, class_names, relabel)


def _choose_in_all(
    source: Source,
    indices: np.ndarray,
    count: int,
    seed: int,
) -> np.ndarray:
    """Choose a number of records, without regard to their classes."""
    if len(indices) < count:
        rule = f"must be at most {len(indices)}"
        raise ValueError(f"config.input.train_examples={count}: {rule}.")
    one_group = np.zeros(len(indices), np.int64)
    salt = b"%d/subset/" % seed
    counts = np.array([count])
    is_chosen = _find_first_by_hash(source, indices, one_group, counts, salt)
    return indices[is_chosen]


def _require_examples(
    class_names: tuple[str, ...],
    labels: np.ndarray,
    needed: int,
) -> None:
    """Raise ValueError unless each class has enough examples to train on."""
    sizes = count_labels(labels, len(class_names)).tolist()
    short = []
    for name, size in zip(class_names, sizes, strict=True):
        if size < needed:
            short.append(f"{name!r} has {size}")
    if short:
        raise ValueError(
            f"Training needs {needed} example(s) of each class; {few(short)}. Lower "
            "config.input.train_examples_per_class, leave the class out of "
            "config.input.classes, or add images.",
        )


def _number_classes(
    known: tuple[str, ...],
    chosen: tuple[str, ...],
) -> np.ndarray:
    """Return for each known class its number among the chosen ones, or -1."""
    option = f"config.input.classes={','.join(chosen)}"
    for name in chosen:
        if name not in known:
            near = closest(name, known, 3)
            hint = f"It has {few(known, repr)}"
            if near:
                hint = f"Nearest: {few(near, repr)}"
            raise ValueError(f"{option}: the data have no class {name!r}. {hint}.")

    numbers = {name: number for number, name in enumerate(chosen)}
    if len(chosen) < 2 or len(numbers) < len(chosen):
        raise ValueError(f"{option}: must be at least two different classes.")

    return np.array([numbers.get(name, -1) for name in known])
