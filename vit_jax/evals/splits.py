"""The choice of the images to evaluate, by the data of the training run.

Data of the training run are split as in training, even if images were added or removed since. For
other data the split "test" is evaluated, or all images of a folder or a table without splits.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.config.data_kinds import EMBEDDED, REFERENCE_FORM, find_kind, spell_forms
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.data.decoding.bands import BandChoice
from vit_jax.data.kinds.listing import WHOLE
from vit_jax.data.records import Source, few, require_same_classes
from vit_jax.data.sources import find_listing, holds_out, normalize_data, open_source, pin_data
from vit_jax.data.subset import (
    SubsetSource,
    TrainingData,
    hold_out,
    hold_out_by_hashes,
    read_held_hashes,
)
from vit_jax.evals import imagenet_classes
from vit_jax.evals.label_map import (
    Labelled,
    WeightsInfo,
    build_identity_map,
    describe_pairs,
    match_by_value,
)
from vit_jax.text.nearest import closest


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitChoice:
    """Options of the command line that choose images; None: as in training, or the usual value.

    Attributes:
      split: split to evaluate.
      train_split: split to fit on; for files, the split that determines the classes.
      test_split: split to test on.
      classes: classes to use.
      seed: seed of the hold-out of files without splits.
      holdout_fraction: held-out fraction of each class of files without splits.
      data_dir: folder of prepared TFDS datasets.
      value_range: value range of the model's preparation; files of more than 8 bits need no warning
        with it.
      bands: bands of the model's preparation; None: RGB.
    """

    split: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    classes: tuple[str, ...] | None = None
    seed: int | None = None
    holdout_fraction: float | None = None
    data_dir: str | None = None
    value_range: tuple[float, float] | None = None
    bands: BandChoice | None = None


class Released(NamedTuple):
    """A dataset of the released few-shot evaluation (big_vision, `common_fewshot`)."""

    data: str
    train_split: str
    test_split: str


RELEASED = {
    "caltech101": Released("tfds:caltech101", "train", "test"),
    "cars196": Released("tfds:cars196:2.1.0", "train", "test"),
    "cifar100": Released("tfds:cifar100", "train", "test"),
    "dtd": Released("tfds:dtd", "train", "test"),
    "pets": Released("tfds:oxford_iiit_pet", "train", "test"),
    "uc_merced": Released("tfds:uc_merced", "train[:1000]", "train[1000:]"),
    # 65,000 images hold 30 of each class.
    "imagenet": Released("tfds:imagenet2012", "train[:65000]", "validation"),
}


class Plan(NamedTuple):
    """Splits of data; `held_up_to` describes the hold-out in training, see `TrainingData`."""

    data: str
    config: InputConfig
    seed: int
    held_up_to: Mapping[str, str]
    was_trained_on: bool = False

    def open_split(self, split: str, *, is_classified: bool = True) -> Source:
        """Open one of the splits; raises as `open_source`."""
        return open_source(
            self.data,
            split,
            self.config,
            self.seed,
            self.held_up_to,
            "--images.value_range",
            is_classified=is_classified,
        )

    def describe(self, test: Source) -> TrainingData:
        """Describe the data for weights that are trained on the training split.

        `test` is the opened test split.
        """
        config = self.config
        held: Mapping[str, str] = {}
        if holds_out(self.data, config):
            held = self.held_up_to or read_held_hashes(test, self.seed)
        return TrainingData(
            data=normalize_data(self.data),
            seed=self.seed,
            holdout_fraction=config.holdout_fraction,
            train_split=config.train_split,
            test_split=config.test_split,
            classes=config.classes,
            held_up_to=held,
            is_multilabel=test.is_multilabel,
        )


def plan_splits(
    data: str,
    choice: SplitChoice,
    training: TrainingData | None,
    usual: Released | None = None,
) -> Plan:
    """Return the splits of data: as chosen, as in training on the same data, or as usual."""
    usual = usual or Released(data, "train", "test")
    # The commit of training holds out the same images.
    trained_on = None if training is None else training.data
    usual = usual._replace(data=pin_data(usual.data, trained_on))
    config = InputConfig(
        train_split=choice.train_split or usual.train_split,
        test_split=choice.test_split or usual.test_split,
        image_size=(1, 1),  # not used to open data
        data_dir=choice.data_dir,
        classes=choice.classes or (),
        value_range=choice.value_range,
    )
    if choice.bands is not None:
        numbers = choice.bands.numbers
        if not numbers and choice.bands.count == RGB_CHANNELS:
            numbers = tuple(range(1, RGB_CHANNELS + 1))
        config = dataclasses.replace(config, channels=choice.bands.count, bands=numbers)
    if training is None or normalize_data(training.data) != normalize_data(usual.data):
        return Plan(usual.data, config, seed=0, held_up_to={})

    classes = training.classes
    if choice.classes is not None:
        classes = choice.classes
    config = dataclasses.replace(
        config,
        train_split=choice.train_split or training.train_split,
        test_split=choice.test_split or training.test_split,
        classes=classes,
        holdout_fraction=training.holdout_fraction,
    )
    return Plan(usual.data, config, training.seed, training.held_up_to, was_trained_on=True)


# Two sides: images to fit on, and images to test on.


class Pair(NamedTuple):
    """Images to fit on and images to test on, of the same classes."""

    name: str
    train: Source
    test: Source
    training: TrainingData | None = None  # for weights that are trained on `train`


def open_pair(
    name: str,
    choice: SplitChoice,
    training: TrainingData | None = None,
    *,
    allows_several_labels: bool = False,
) -> Pair:
    """Open both sides of a dataset.

    Args:
      name: one of `RELEASED`, or data as in a recipe.
      choice: splits and classes.
      training: data of the run that trained the weights.
      allows_several_labels: images may have several labels.

    Raises:
      ValueError: an unknown name, equal sides, sides of different classes, images of several labels
        that are not allowed, or as `open_source`.
    """
    plan = _plan_data(name, choice, training)
    train_split = plan.config.train_split
    test_split = plan.config.test_split
    if train_split == test_split:
        raise ValueError(
            f"{name}: the training and the test split are both {train_split!r}. Choose two."
        )
    train = plan.open_split(train_split)
    test = plan.open_split(test_split)
    if (train.is_multilabel or test.is_multilabel) and not allows_several_labels:
        raise ValueError(
            f"--data={name}: images must have one label, and may have several. Use vit-jax probe."
        )
    require_same_classes(name, train_split, train, test_split, test)
    return Pair(name, train, test, plan.describe(test))


def open_split(
    name: str,
    split: str | None,
    choice: SplitChoice,
    training: TrainingData | None = None,
) -> Source:
    """Open one split, by default the test split, without a classifier to fit.

    Files may have one class, and no training split; other arguments as for `open_pair`.
    """
    plan = _plan_data(name, choice, training)
    return plan.open_split(split or plan.config.test_split, is_classified=False)


def open_train_split(
    name: str,
    choice: SplitChoice,
    training: TrainingData | None = None,
) -> Source:
    """Open the training split, whose images determine statistics; arguments as for `open_split`."""
    plan = _plan_data(name, choice, training)
    return plan.open_split(plan.config.train_split, is_classified=False)


def split_to_search(name: str, usual: str, choice: SplitChoice, others: Sequence[str]) -> str:
    """Return the usual split, "all" for files without splits, or the only split of files.

    The hold-out of files depends on the seed of a run. Data that are compared with themselves,
    among `others`, keep the usual split.
    """
    plan = _plan_data(name, choice, None)
    if normalize_data(plan.data) in map(normalize_data, others):
        return usual
    if holds_out(plan.data, plan.config):
        return WHOLE
    listing = find_listing(plan.data)
    if listing is None or not listing.exists():
        return usual

    splits = listing.splits(plan.config.train_split, plan.config.test_split)
    if len(splits) != 1:
        return usual
    return splits[0]


def _plan_data(name: str, choice: SplitChoice, training: TrainingData | None) -> Plan:
    known = RELEASED.get(name)
    if known is None and ":" not in name and find_kind(name) is None:
        raise _build_unknown_error(name)
    if known is None and name.startswith("vtab:"):
        known = Released(name, "train800val200", "test")

    choice = dataclasses.replace(choice, classes=choice.classes or ())
    return plan_splits(name, choice, training, known)


def _build_unknown_error(name: str) -> ValueError:
    """Return the error for data of an unknown name, with the nearest names."""
    near = closest(name, [*RELEASED, *EMBEDDED], 2)
    if name.isidentifier():
        near.append(f"tfds:{name}")
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return ValueError(
        f"--data={name} is not known. {hint}Known are {', '.join(RELEASED)}, and data as in a "
        f"recipe: {spell_forms()}, {REFERENCE_FORM}."
    )


# One side: images on which a classifier is evaluated.


def open_labelled(data: str, weights: WeightsInfo, choice: SplitChoice | None = None) -> Labelled:
    """Open the images to evaluate; `data` as in a recipe.

    Classes are matched by name, or by number if the weights have no names.

    Raises:
        ValueError: see `open_source`; classes that cannot be matched; an option has no effect on
          these data.
    """
    split, plan, notes = _choose_images(data, choice or SplitChoice(), weights)
    opened = plan.open_split(split)
    if plan.held_up_to and _has_changed(opened, plan):
        notes.append(
            f"{data} has changed since training: what was held out then is held out, and of new "
            "images those that would have been. No image has changed sides."
        )
    _require_same_kind(weights, opened, data)
    if weights.class_names is None:
        source = _relabel_without_names(weights, opened, data, notes)
    else:
        source = _relabel_by_name(weights, opened, data)
    words = f"{split} of {plan.data}, {len(source):,} of {len(_find_whole(source)):,} images"
    return Labelled(source, words, notes, build_identity_map(source.class_names))


def _require_same_kind(weights: WeightsInfo, source: Source, data: str) -> None:
    """Raise ValueError if only the weights or only the data are multi-label."""
    if source.is_multilabel == weights.is_multilabel:
        return
    one = weights.source
    several = data
    if weights.is_multilabel:
        one = data
        several = weights.source
    raise ValueError(
        f"--data={data}: {several} is for images that may have several labels, {one} for "
        "images with one label. Both must be of the same kind."
    )


def _relabel_without_names(
    weights: WeightsInfo,
    source: Source,
    data: str,
    notes: list[str],
) -> Source:
    """Return the source with labels in the numbering of weights that do not name their classes.

    A note is added. Data of a library or of code number their classes. Files do not: integer names
    are numbers of outputs, and ImageNet's names are known.

    Raises:
      ValueError: another number of classes, or as `match_by_value`.
    """
    names = source.class_names
    count = weights.architecture.num_classes
    if find_listing(data) is None:
        if source.num_classes != count:
            raise ValueError(
                f"{data} has {source.num_classes} classes, {weights.source} {count}, and no names "
                "to match them by. Add --class_names=FILE, the name of each output on a line."
            )
        outputs = np.arange(count)
        reason = "by the numbers of the data's classes"
    elif imagenet := _find_imagenet_outputs(weights, names):
        outputs = np.array(imagenet)
        reason = "by ImageNet's names"
    else:
        outputs = match_by_value(data, names, weights)
        reason = "by the integers that name the data's classes"

    notes.append(
        f"the weights do not name their classes: outputs are matched {reason}: "
        f"{describe_pairs(names, outputs)}."
    )
    if np.array_equal(outputs, np.arange(count)):
        return source
    output_names = [str(number) for number in range(count)]
    for name, output in zip(names, outputs.tolist(), strict=True):
        output_names[output] = name
    return SubsetSource(
        source,
        np.arange(len(source)),
        class_names=tuple(output_names),
        relabel=outputs,
    )


def _find_imagenet_outputs(weights: WeightsInfo, names: Sequence[str]) -> list[int] | None:
    """Return the outputs of WordNet ids, or of short names, if weights have ImageNet's classes.

    Return None for other weights or names.
    """
    if not imagenet_classes.is_unnamed(weights):
        return None

    numbers = {name: number for number, name in enumerate(imagenet_classes.class_names())}
    for known in (imagenet_classes.numbers_by_id(), numbers):
        if all(name in known for name in names):
            return [known[name] for name in names]
    return None


def _relabel_by_name(weights: WeightsInfo, source: Source, data: str) -> Source:
    """Return the source with labels in the numbering of weights that name their classes.

    Raises:
      ValueError: the weights lack a class of the data, or have it twice.
    """
    known = weights.class_names
    assert known is not None
    unknown = [name for name in source.class_names if name not in known]
    if unknown:
        raise ValueError(
            f"{data} has classes that {weights.source} does not know: {few(unknown)}. It knows "
            f"{few(known)}. To evaluate on some classes of the data only, name them: "
            "--classes=A,B."
        )
    if source.class_names == known:
        return source
    clashing = [name for name in source.class_names if known.count(name) > 1]
    if clashing:
        raise ValueError(
            f"{weights.source} has more than one class named {few(clashing)}: names cannot match "
            "them."
        )
    relabel = np.array([known.index(name) for name in source.class_names])
    return SubsetSource(source, np.arange(len(source)), class_names=known, relabel=relabel)


class _Choice(NamedTuple):
    """A choice of images: the split, the plan of all splits, and notes for readers."""

    split: str
    plan: Plan
    notes: list[str]


def _choose_images(data: str, choice: SplitChoice, weights: WeightsInfo) -> _Choice:
    plan = plan_splits(data, dataclasses.replace(choice, train_split=None), weights.training)
    split = choice.split or plan.config.test_split
    listing = find_listing(plan.data)
    if listing is None:
        reject_idle(data, choice, "train_split", "seed", "holdout_fraction")
        return _Choice(split, plan, [])
    if not listing.exists():
        return _Choice(split, plan, [])  # opening it raises
    reject_idle(data, choice, "data_dir")

    train_split = plan.config.train_split
    splits = listing.splits(train_split, split, choice.train_split or "")
    if not splits:
        return _choose_without_splits(f"{data}, {listing.unsplit}", choice, weights, plan)
    reject_idle(f"{data}, which has {splits} in it", choice, "seed", "holdout_fraction")
    if not plan.was_trained_on and train_split not in splits:
        train_split = split  # no training images are needed
    notes = []
    if plan.held_up_to:
        notes.append(f"{data} had no splits in training: its {split} may hold training images.")
    config = dataclasses.replace(
        plan.config, train_split=choice.train_split or train_split, test_split=split
    )
    return _Choice(split, plan._replace(config=config, held_up_to={}), notes)


def _choose_without_splits(
    words: str,
    choice: SplitChoice,
    weights: WeightsInfo,
    plan: Plan,
) -> _Choice:
    """Choose images of files without splits: the hold-out of training, the others, or all."""
    reject_idle(words, choice, "train_split")
    train_split = plan.config.train_split
    test_split = plan.config.test_split
    splits = {"train": train_split, "test": test_split, WHOLE: WHOLE}
    splits[train_split] = train_split
    splits[test_split] = test_split

    is_chosen = choice.seed is not None or choice.holdout_fraction is not None
    usual = test_split if plan.was_trained_on or is_chosen else WHOLE
    split = choice.split or usual
    if split not in splits:
        raise ValueError(f"--split={split}: must be one of {', '.join(splits)} for {words}.")
    if splits[split] == WHOLE:
        reject_idle(f"{WHOLE} of {plan.data}", choice, "seed", "holdout_fraction")
        notes = _note_on_whole(plan, weights.training)
        return _Choice(WHOLE, plan._replace(held_up_to={}), notes)
    return _choose_held_out(splits[split], choice, weights.training, plan)


def _note_on_whole(plan: Plan, training: TrainingData | None) -> list[str]:
    """Return a remark on all images of the data, some of which may be training images."""
    if training is None or find_listing(training.data) is None:
        return []
    if plan.was_trained_on:
        return [
            f"the weights were trained on most of {plan.data}: --split=test is what they have not "
            "seen."
        ]
    return [
        f"the weights were trained on {training.data}. If {plan.data} holds the same images, say "
        "--split=test."
    ]


def _choose_held_out(
    split: str,
    choice: SplitChoice,
    training: TrainingData | None,
    plan: Plan,
) -> _Choice:
    """Choose one side of a hold-out, by default the hold-out of training.

    It also applies to data of another name, which may be a copy.
    """
    training_seed = plan.seed
    training_fraction = plan.config.holdout_fraction
    if training is not None:
        training_seed = training.seed
        training_fraction = training.holdout_fraction

    seed = training_seed if choice.seed is None else choice.seed
    fraction = training_fraction
    if choice.holdout_fraction is not None:
        fraction = choice.holdout_fraction

    is_as_in_training = seed == training_seed and fraction == training_fraction
    held: Mapping[str, str] = {}
    if training is not None and is_as_in_training:
        held = training.held_up_to
    notes = []
    if plan.was_trained_on and not is_as_in_training:
        notes.append(
            f"training held out {training_fraction:g} of each class by seed {training_seed}; this "
            "is another hold-out, in which there are images that the weights were trained on."
        )
    config = dataclasses.replace(plan.config, holdout_fraction=fraction)
    plan = plan._replace(config=config, seed=seed, held_up_to=held)
    return _Choice(split, plan, notes)


def _has_changed(source: Source, plan: Plan) -> bool:
    """Return True if the hold-out of the present images differs from the hold-out of training."""
    everything = _find_whole(source)
    _, now = hold_out(everything, plan.config.holdout_fraction, plan.seed, purpose=b"")
    _, then = hold_out_by_hashes(everything, plan.held_up_to, plan.seed)
    return now.records_sha256 != then.records_sha256


def reject_idle(where: str, choice: SplitChoice, *names: str) -> None:
    """Raise ValueError if one of these options is set; they have no effect on `where`."""
    idle = []
    for name in names:
        if getattr(choice, name) is not None:
            idle.append(f"--{name}")
    if idle:
        raise ValueError(f"{', '.join(idle)}: has no effect on {where}. Leave it out.")


def _find_whole(source: Source) -> Source:
    """Return the source before splits and classes were chosen."""
    while isinstance(source, SubsetSource):
        source = source.source
    return source
