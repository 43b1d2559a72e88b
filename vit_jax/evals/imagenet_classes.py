"""The 1,000 classes of ILSVRC-2012, and which outputs of a network stand for them.

docs/imagenet_classes.py writes imagenet_classes.tsv and names its sources.
"""

import collections
import functools
import importlib.resources
import operator
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.records import few
from vit_jax.evals.label_map import WeightsInfo

COUNT = 1000
MOST_ABSENT = 10
"""Classes that a network may lack: the 21,841 of ImageNet-21k lack one, timm's 11,821 seven."""
FOREIGN = ("released", "big_vision", "bit", "timm", "huggingface")
"""Formats whose 1,000 outputs are ImageNet's."""
_SPELLINGS = ("first_lemma", "name", "lemmas", "wordnet_id")
"""Names of a class; of two that match, the later is the more certain."""
_RECURRING = {  # first lemmas of two classes each
    "n02012849": "crane (bird)",
    "n03126707": "crane (machine)",
    "n03710637": "maillot (tights)",
    "n03710721": "maillot (bathing suit)",
}
_WORDNET_ID = re.compile(r"n\d{8}\b")


class Class(NamedTuple):
    """A class.

    Attributes:
      wordnet_id: "n01440764".
      subsets: letters of the sets that have it, "A" and "R".
      lemmas: names of WordNet, "tench, Tinca tinca".
    """

    wordnet_id: str
    subsets: str
    lemmas: str

    @property
    def first_lemma(self) -> str:
        """Usual short name."""
        return self.lemmas.partition(",")[0]

    @property
    def name(self) -> str:
        """Unique short name."""
        return _RECURRING.get(self.wordnet_id, self.first_lemma)


@functools.cache
def classes() -> tuple[Class, ...]:
    """Return all classes in the order of WordNet ids, of networks and validation labels."""
    table = importlib.resources.files(__package__) / "imagenet_classes.tsv"
    text = table.read_text("utf-8")
    return tuple(Class(*line.split("\t")) for line in text.splitlines())


def class_names() -> tuple[str, ...]:
    """Return the unique short names."""
    names = map(operator.attrgetter("name"), classes())
    return tuple(names)


def numbers_by_id() -> dict[str, int]:
    """Return the number of each WordNet id."""
    return {one.wordnet_id: number for number, one in enumerate(classes())}


def members(subset: str) -> np.ndarray:
    """Return the numbers of the classes of a subset, ascending; of all classes for ""."""
    numbers = [number for number, one in enumerate(classes()) if subset in one.subsets]
    return np.array(numbers)


def is_unnamed(weights: WeightsInfo) -> bool:
    """Return True if the format of weights says that 1,000 outputs without names are ImageNet's."""
    return (
        weights.class_names is None
        and weights.architecture.num_classes == COUNT
        and weights.format in FOREIGN
    )


def readable_names(weights: WeightsInfo) -> tuple[str, ...] | None:
    """Return names of the outputs: ImageNet's for `is_unnamed` ones and for WordNet ids.

    Return None if they have none.
    """
    if is_unnamed(weights):
        return class_names()
    if weights.class_names is None:
        return None

    known = {one.wordnet_id: one.name for one in classes()}
    names = [known.get(name, name) for name in weights.class_names]
    return tuple(names)


def find_outputs(weights: WeightsInfo) -> np.ndarray:
    """Return the output of each class, (1000,), -1 if there is none.

    Outputs are recognised by names that begin with a WordNet id, that are all lemmas of a class, or
    the first of them.

    Raises:
      ValueError: outputs without names that are not known to be ImageNet's, or too few of the
        classes are among them.
    """
    if is_unnamed(weights):
        return np.arange(COUNT)
    if weights.class_names is None:
        raise ValueError(
            f"{weights.source} does not name its {weights.architecture.num_classes:,} classes, so "
            "they cannot be matched with ImageNet's: add --class_names=FILE, one WordNet id "
            "(n01440764) or name (tench) a line."
        )

    output = _match_classes(weights.class_names)
    absent = np.flatnonzero(output < 0)
    if len(absent) > MOST_ABSENT:
        names = few([classes()[number].name for number in absent])
        raise ValueError(
            f"{weights.source} has {COUNT - len(absent)} of ImageNet's {COUNT:,} classes; it lacks "
            f"{names}. --class_names=FILE gives names, one a line, to weights that have none."
        )
    return output


def match_outputs(weights: WeightsInfo, class_names: Sequence[str]) -> np.ndarray:
    """Return the output of each class of the data, -1 if there is none.

    Classes are found by equal names; where some are not, ImageNet's classes also as `find_outputs`
    finds them.

    Raises:
      ValueError: the outputs have no names, or more than `MOST_ABSENT` classes, or all of them,
        have no output.
    """
    output_L = _find_equal_names(weights, class_names)
    if (output_L < 0).any():
        number_of = _match_classes(class_names)
        if (number_of >= 0).all() and len(class_names) == COUNT:
            output_L[number_of] = find_outputs(weights)

    absent = np.flatnonzero(output_L < 0)
    if len(absent) > MOST_ABSENT or len(absent) == len(class_names):
        missing = few([class_names[int(place)] for place in absent])
        raise ValueError(
            f"config.model.head='select': {weights.source} must have outputs of the "
            f"{len(class_names):,} classes of the data, and {len(absent):,} were not found by "
            f"name: {missing}. Use zero with config.model.head_stddev=0.02."
        )
    return output_L


def _find_equal_names(weights: WeightsInfo, class_names: Sequence[str]) -> np.ndarray:
    """Return the output with the name of each class of the data, -1 if there is none."""
    names = weights.class_names
    if is_unnamed(weights):
        names = readable_names(weights)

    places = {name: place for place, name in enumerate(names or ())}

    output_L = np.full(len(class_names), -1)
    for number, name in enumerate(class_names):
        output_L[number] = places.get(name, -1)
    return output_L


def _match_classes(names: Sequence[str]) -> np.ndarray:
    """Return the place of each class among names, -1 for none.

    Equal spellings are matched in their order.
    """
    places = _group_places(list(map(_cut_to_id, names)))
    output = np.full(COUNT, -1)
    for kind in _SPELLINGS:
        spellings = list(map(operator.attrgetter(kind), classes()))
        for spelling, numbers in _group_places(spellings).items():
            named = places.get(spelling, [])
            if len(named) == len(numbers):
                output[numbers] = named
    return output


def _cut_to_id(name: str) -> str:
    """Return the WordNet id that a name begins with, or the name."""
    match = _WORDNET_ID.match(name)
    if match is None:
        return name
    return match[0]


def _group_places(words: Sequence[str]) -> dict[str, list[int]]:
    """Return the places of each word."""
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, word in enumerate(words):
        places[word].append(place)
    return dict(places)
