"""Which images of a labelled dataset are evaluated, and their labels in the numbering of the weights' classes.

Data that the weights were trained on are split as they were then, also where images were added or removed since. Of
other data the split "test" is evaluated, but of files without splits, in a folder or a table, all images.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.listing import WHOLE
from vit_jax.data.records import Source, few
from vit_jax.data.sources import listing_of, located, open_source
from vit_jax.data.subset import SubsetSource, hold_out, hold_out_as_then
from vit_jax.weights import Weights
from vit_jax.weights.description import TrainingData


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitChoice:
    """What the user chooses of the images to judge, named as the options of the command line; None leaves it open."""

    split: str | None = None  # to evaluate
    train_split: str | None = None  # of files, the split whose classes count
    classes: tuple[str, ...] | None = None  # to evaluate
    seed: int | None = None  # of the hold-out of files without splits
    holdout_fraction: float | None = None  # of every class of such files
    data_dir: str | None = None  # where TFDS keeps prepared datasets
    value_range: tuple[float, float] | None = None  # of the model's preparation: with it, deep files need no warning


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Key:
    """Which outputs of the network may be answers, and which are right.

    Legend: K outputs, L classes of the data, N images, S right answers of an image.

    Attributes:
      answer_names: of the outputs, as they are shown.
      is_allowed_K: the others take no part, as if the network did not have them.
      output_L: the output that stands for each class of the data; -1 where there is none.
      listed: classes of the data that have images.
      right_NS: the outputs that are right for each image, filled with -1; None where it is that of its class.
    """

    answer_names: tuple[str, ...]
    is_allowed_K: np.ndarray
    output_L: np.ndarray
    listed: np.ndarray
    right_NS: np.ndarray | None = None

    def is_right(self, record_N: np.ndarray, label_N: np.ndarray, class_NT: np.ndarray) -> np.ndarray:
        """Which answers are right, bool (N, T)."""
        right_NS = self.output_L[label_N][:, None] if self.right_NS is None else self.right_NS[record_N]
        return (class_NT[:, :, None] == right_NS[:, None, :]).any(axis=2)

    @property
    def has_loss(self) -> bool:
        """Whether each image has one right output."""
        return self.right_NS is None and bool((self.output_L[self.listed] >= 0).all())


def plain_key(names: tuple[str, ...]) -> Key:
    """Every output is a class of the data, with the same number."""
    numbers = np.arange(len(names))
    return Key(answer_names=names, is_allowed_K=np.ones(len(names), bool), output_L=numbers, listed=numbers)


class Labelled(NamedTuple):
    """Images to evaluate."""

    source: Source
    words: str  # which split of which data, and how many of how many images
    notes: list[str]  # what readers of the result should know
    key: Key


def open_labelled(data: str, weights: Weights, choice: SplitChoice | None = None) -> Labelled:
    """Opens the part of a dataset, `data` as in a recipe, that is evaluated.

    Classes are matched by name; where the weights have no names, by number, if there are as many.

    Raises:
      ValueError: the data cannot be opened, have no such split, or have classes that the weights do not have, or have
        twice; or an option has no effect on these data.
    """
    choice = choice or SplitChoice()
    split, how, notes = _decide(data, choice, weights)
    config = InputConfig(
        train_split=how.train_split,
        test_split=how.test_split,
        image_size=weights.architecture.image_size,
        data_dir=choice.data_dir,
        classes=how.classes if choice.classes is None else choice.classes,
        holdout_fraction=how.holdout_fraction,
        value_range=choice.value_range,
    )
    opened = open_source(data, split, config, how.seed, how.held_up_to, "--value_range")
    if how.held_up_to and _has_changed(opened, how):
        notes.append(
            f"{data} has changed since training: what was held out then is held out, and of new images those that "
            "would have been. No image has changed sides."
        )
    source = _numbered(opened, data, weights)
    if weights.class_names is None:
        notes.append("the weights do not name their classes: matched by number with the data's.")
    words = f"{split} of {data}, {len(source):,} of {len(_whole(source)):,} images"
    return Labelled(source, words, notes, plain_key(source.class_names))


_Decision = tuple[str, TrainingData, list[str]]  # the split, how the data are split, notes
_USUAL = TrainingData(
    data="", seed=0, holdout_fraction=InputConfig.holdout_fraction, train_split="train", test_split="test", classes=()
)


def _decide(data: str, choice: SplitChoice, weights: Weights) -> _Decision:
    known = weights.training
    own = known if known and located(known.data) == located(data) else None
    how = own or _USUAL
    split = choice.split or how.test_split
    listing = listing_of(data)
    if listing is None:
        _refuse_idle(data, choice, "train_split", "seed", "holdout_fraction")
        return split, how, []
    if not listing.exists():
        return split, how, []  # opening it says so
    _refuse_idle(data, choice, "data_dir")
    splits = listing.splits(how.train_split, split, choice.train_split or "")
    if not splits:
        return _decide_flat(data, f"{data}, {listing.unsplit}", choice, weights, own)
    _refuse_idle(f"{data}, which has {splits} in it", choice, "seed", "holdout_fraction")
    usual = how.train_split if own or how.train_split in splits else split  # evaluation needs no training images
    notes = [f"{data} had no splits in training: its {split} may hold images of then."] if how.held_up_to else []
    how = dataclasses.replace(how, train_split=choice.train_split or usual, test_split=split, held_up_to={})
    return split, how, notes


def _decide_flat(data: str, words: str, choice: SplitChoice, weights: Weights, own: TrainingData | None) -> _Decision:
    """Of files without splits: what the training run held out, the rest, or all."""
    _refuse_idle(words, choice, "train_split")
    how = own or _USUAL
    parts = {"train": how.train_split, "test": how.test_split, WHOLE: WHOLE}
    parts |= {name: name for name in (how.train_split, how.test_split)}
    is_chosen = choice.seed is not None or choice.holdout_fraction is not None
    split = choice.split or (how.test_split if own or is_chosen else WHOLE)
    if split not in parts:
        raise ValueError(f"--split={split}: {words}; choose one of {', '.join(parts)}.")
    if parts[split] == WHOLE:
        _refuse_idle(f"{WHOLE} of {data}", choice, "seed", "holdout_fraction")
        trained_on = "" if weights.training is None else weights.training.data
        note = f"the weights were trained on {trained_on}. If {data} holds the same images, say --split=test."
        if own:
            note = f"the weights were trained on most of {data}: --split=test is what they have not seen."
        return WHOLE, dataclasses.replace(how, held_up_to={}), [note] if listing_of(trained_on) else []
    then = weights.training or how  # also where it is not recognised: it may be a copy
    how = dataclasses.replace(
        how,
        seed=then.seed if choice.seed is None else choice.seed,
        holdout_fraction=then.holdout_fraction if choice.holdout_fraction is None else choice.holdout_fraction,
    )
    is_as_then = (how.seed, how.holdout_fraction) == (then.seed, then.holdout_fraction)
    how = dataclasses.replace(how, held_up_to=then.held_up_to if is_as_then else {})
    note = (
        f"training held out {then.holdout_fraction:g} of each class by seed {then.seed}; this is another hold-out, in "
        "which there are images that the weights were trained on."
    )
    return parts[split], how, [note] if own and not is_as_then else []


def _has_changed(source: Source, how: TrainingData) -> bool:
    """Whether another part of the files would be held out today than was in training."""
    everything = _whole(source)
    _, now = hold_out(everything, how.holdout_fraction, how.seed, purpose=b"")
    _, then = hold_out_as_then(everything, how.held_up_to, how.seed)
    return now.records_sha256 != then.records_sha256


def _refuse_idle(what: str, choice: SplitChoice, *names: str) -> None:
    if given := [f"--{name}" for name in names if getattr(choice, name) is not None]:
        raise ValueError(f"{', '.join(given)}: without effect on {what}; leave it out.")


def _numbered(source: Source, data: str, weights: Weights) -> Source:
    """The source with labels as the weights number their classes."""
    if source.is_multilabel != weights.is_multilabel:
        one, several = (data, weights.source) if weights.is_multilabel else (weights.source, data)
        raise ValueError(
            f"{several} is of images that may have several labels, {one} of images with one: answers of the one kind "
            "cannot be judged by labels of the other."
        )
    known = weights.class_names
    if known is None:
        if weights.architecture.num_classes != source.num_classes:
            raise ValueError(
                f"{data} has {source.num_classes} classes, {weights.source} {weights.architecture.num_classes}, and no "
                "names to match them by."
            )
        return source
    if unknown := [name for name in source.class_names if name not in known]:
        raise ValueError(
            f"{data} has classes that {weights.source} does not know: {few(unknown)}. It knows {few(known)}. To "
            "evaluate on some classes of the data only, name them: --classes=A,B."
        )
    if source.class_names == known:
        return source
    if clashing := [name for name in source.class_names if known.count(name) > 1]:
        raise ValueError(f"{weights.source} has more than one class named {few(clashing)}: names cannot match them.")
    relabel = np.array([known.index(name) for name in source.class_names])
    return SubsetSource(source, np.arange(len(source)), class_names=known, relabel=relabel)


def _whole(source: Source) -> Source:
    """The source before parts and classes were chosen."""
    while isinstance(source, SubsetSource):
        source = source.source
    return source
