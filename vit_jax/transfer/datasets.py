"""The data that few-shot evaluation and probes take: images to learn from, and images to test on."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import InputConfig
from vit_jax.data.listing import WHOLE
from vit_jax.data.records import Source
from vit_jax.data.sources import holds_out, located, open_source
from vit_jax.data.subset import held_up_to
from vit_jax.weights.description import TrainingData


class Known(NamedTuple):
    """A dataset of the released few-shot evaluation (big_vision, `common_fewshot`)."""

    data: str
    train_split: str
    test_split: str


RELEASED = {
    "caltech101": Known("tfds:caltech101", "train", "test"),
    "cars196": Known("tfds:cars196:2.1.0", "train", "test"),
    "cifar100": Known("tfds:cifar100", "train", "test"),
    "dtd": Known("tfds:dtd", "train", "test"),
    "pets": Known("tfds:oxford_iiit_pet", "train", "test"),
    "uc_merced": Known("tfds:uc_merced", "train[:1000]", "train[1000:]"),
    "imagenet": Known("tfds:imagenet2012", "train[:65000]", "validation"),  # 65,000 images hold 30 of each class
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairChoice:
    """What the user chooses of the two sides, named as the options of the command line; None leaves it open."""

    train_split: str | None = None
    test_split: str | None = None
    classes: tuple[str, ...] = ()
    data_dir: str | None = None
    value_range: tuple[float, float] | None = None  # of the preparation: with it, deep files need no warning


class Pair(NamedTuple):
    """Images to learn from and images to test on, of the same classes."""

    name: str
    train: Source
    test: Source
    training: TrainingData | None = None  # describes both for weights that are trained on `train`


def open_pair(name: str, choice: PairChoice, training: TrainingData | None = None) -> Pair:
    """Opens both sides of a dataset.

    Args:
      name: one of `RELEASED`, or data as in a recipe.
      choice: of splits and classes.
      training: the data of the run that made the weights. Files that it held images out of are split as then.

    Raises:
      ValueError: an unknown name (the nearest are named), sides that are the same or of other classes, images that
        may have several labels, or as `open_source`.
    """
    data, config, seed, held = _how(name, choice, training)
    if config.train_split == config.test_split:
        raise ValueError(f"{name}: the training and the test split are both {config.train_split!r}; name two.")
    splits = (config.train_split, config.test_split)
    train, test = (open_source(data, split, config, seed, held, "--value_range") for split in splits)
    if train.is_multilabel or test.is_multilabel:
        raise ValueError(f"{name}: its images may have several labels, and a classifier of features gives one.")
    if train.class_names != test.class_names:
        raise ValueError(
            f"The splits of {name} have different classes: {config.train_split!r} {list(train.class_names)}, "
            f"{config.test_split!r} {list(test.class_names)}."
        )
    described = TrainingData(
        data=located(data),
        seed=seed,
        holdout_fraction=config.holdout_fraction,
        train_split=config.train_split,
        test_split=config.test_split,
        classes=config.classes,
        held_up_to=(held or held_up_to(test, seed)) if holds_out(data, config) else {},
    )
    return Pair(name, train, test, described)


def open_split(name: str, split: str | None, choice: PairChoice, training: TrainingData | None = None) -> Source:
    """Opens any split, the one to test on unless it is named; other arguments as for `open_pair`."""
    data, config, seed, held = _how(name, choice, training)
    return open_source(data, split or config.test_split, config, seed, held, "--value_range")


def split_to_search(name: str, usual: str, choice: PairChoice, others: Sequence[str]) -> str:
    """Return the usual split, or "all" for files without splits: which of them are held out depends on a run's seed.

    It is the usual one too where data are compared with themselves, among `others`.
    """
    data, config, _, _ = _how(name, choice, None)
    is_whole = holds_out(data, config) and located(data) not in map(located, others)
    return WHOLE if is_whole else usual


def _how(
    name: str, choice: PairChoice, training: TrainingData | None
) -> tuple[str, InputConfig, int, Mapping[str, str]]:
    known = RELEASED.get(name)
    if known is None and ":" not in name and name != "digits":
        near = difflib.get_close_matches(name, [*RELEASED, "digits"], n=2) + [f"tfds:{name}"] * name.isidentifier()
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"--data={name} is not known. {hint}Known are {', '.join(RELEASED)}, digits, and data as in a recipe: "
            "folder:PATH, csv:FILE, wds:PATH, parquet:PATH, tfds:NAME, vtab:TASK, package.module:name."
        )
    known = known or Known(name, "train800val200" if name.startswith("vtab:") else "train", "test")
    then = training if training and located(training.data) == located(known.data) else None
    config = InputConfig(
        train_split=choice.train_split or (then.train_split if then else known.train_split),
        test_split=choice.test_split or (then.test_split if then else known.test_split),
        image_size=(1, 1),  # not used to open data
        data_dir=choice.data_dir,
        classes=choice.classes,
        holdout_fraction=then.holdout_fraction if then else InputConfig.holdout_fraction,
        value_range=choice.value_range,
    )
    return known.data, config, then.seed if then else 0, then.held_up_to if then else {}
