"""What a config selects of a dataset: some of its classes, and for training a few examples of each."""

import difflib

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.records import Source, checked_labels, few
from vit_jax.data.subset import SubsetSource, first_by_hash


def select(source: Source, config: InputConfig, *, training: bool, seed: int) -> Source:
    """Applies `config.classes` and, for training, `config.train_examples_per_class`; the source itself without them.

    Raises:
      ValueError: a class that the data does not have, that is named twice or is the only one; no examples, or for
        training a class with too few.
    """
    per_class = config.train_examples_per_class
    if not config.classes and (per_class is None or not training):
        return source
    class_names = tuple(config.classes) or source.class_names
    relabel = _numbering(source.class_names, class_names) if config.classes else np.arange(source.num_classes)
    labels = relabel[checked_labels(source)]
    indices = np.flatnonzero(labels >= 0)
    if training:
        _require_examples(np.bincount(labels[indices], minlength=len(class_names)), class_names, per_class or 1)
    if not len(indices):
        raise ValueError(f"No example of this split is of the classes {few(class_names, repr)}; choose others.")
    if training and per_class is not None:
        counts = np.full(len(class_names), per_class)
        indices = indices[first_by_hash(source, indices, labels[indices], counts, b"%d/examples/" % seed)]
    return SubsetSource(source, indices, class_names, relabel)


def _numbering(known: tuple[str, ...], chosen: tuple[str, ...]) -> np.ndarray:
    """For each known class its number among the chosen ones, or -1."""
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"config.input.classes names {name!r}, which the data does not have. "
                + (f"Nearest: {few(near, repr)}." if near else f"It has {few(known, repr)}.")
            )
    repeated = [name for name in dict.fromkeys(chosen) if chosen.count(name) > 1]
    if repeated or len(chosen) < 2:
        found = f"{few(repeated, repr)} more than once" if repeated else f"only {chosen[0]!r}"
        raise ValueError(f"config.input.classes names {found}; give at least two different classes.")
    numbers = {name: number for number, name in enumerate(chosen)}
    return np.array([numbers.get(name, -1) for name in known])


def _require_examples(sizes: np.ndarray, class_names: tuple[str, ...], needed: int) -> None:
    short = [f"{name!r} has {size}" for name, size in zip(class_names, sizes.tolist(), strict=True) if size < needed]
    if short:
        raise ValueError(
            f"Training needs {needed} example(s) of each class; {few(short)}. Lower "
            "config.input.train_examples_per_class, leave the class out of config.input.classes, or add images."
        )
