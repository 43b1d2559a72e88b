"""ImageNet's classes as they are shipped, and the outputs of networks for them."""

import dataclasses
import pathlib

import numpy as np
import pytest

from tests.evals.samples import SEVEN, sample_weights
from tests.evals.small_sets import NAMES_FILE
from tests.rejections import rejects
from vit_jax.evals.imagenet_classes import (
    class_names,
    classes,
    find_outputs,
    is_unnamed,
    members,
    numbers_by_id,
    readable_names,
)

IDS = tuple(pathlib.Path(NAMES_FILE).read_text().split())


def make_weights(names, num_classes=1000, **details):
    a = dataclasses.replace(SEVEN, num_classes=num_classes)
    return dataclasses.replace(sample_weights(a, class_names=names), **details)


def test_the_shipped_classes_are_those_of_tfds():
    assert tuple(one.wordnet_id for one in classes()) == IDS
    assert len(members("A")) == len(members("R")) == 200
    assert len(members("")) == len(set(class_names())) == 1000
    assert numbers_by_id()["n15075141"] == 999


def test_names_of_shipped_classes():
    """Classes with one name are told apart."""
    tench, goldfish = classes()[:2]

    assert tench.name == "tench"
    assert tench.lemmas == "tench, Tinca tinca"
    assert tench.subsets == "-"
    assert goldfish.name == "goldfish"
    assert goldfish.subsets == "R"
    assert class_names()[134] == "crane (bird)"
    assert class_names()[517] == "crane (machine)"


@pytest.mark.parametrize("format_name", ["released", "timm"])
def test_networks_of_released_formats_get_imagenets_names(format_name):
    """ImageNet's networks are released in these formats, with 1,000 outputs."""
    weights = make_weights(None, format=format_name)

    assert readable_names(weights) == class_names()


@pytest.mark.parametrize(
    ("num_classes", "details"),
    [
        (1000, {}),
        (21_843, {"format": "released"}),
        (7, {}),
    ],
)
def test_names_of_other_networks_are_not_guessed(num_classes, details):
    weights = make_weights(None, num_classes, **details)

    assert readable_names(weights) is None
    assert not is_unnamed(weights)
    with rejects("classes", "--class_names=FILE"):
        find_outputs(weights)


def test_identifiers_become_readable_names():
    mixed = ("n01440764", "n99999999", "cat")

    assert readable_names(make_weights(IDS)) == class_names()
    assert readable_names(make_weights(mixed, 3)) == ("tench", "n99999999", "cat")


@pytest.mark.parametrize(
    "spell",
    [
        lambda one: one.wordnet_id,
        lambda one: f"{one.wordnet_id} {one.name}",
        lambda one: one.lemmas,
        lambda one: one.first_lemma,
        lambda one: one.name,
    ],
    ids=["id", "id and name", "lemmas", "first lemma", "name"],
)
def test_outputs_by_any_spelling_in_a_larger_head(spell):
    """Every third output stands for a class; classes with one spelling are in their order."""
    names = [f"n{90_000_000 + place} other" for place in range(3000)]
    names[1::3] = [spell(one) for one in classes()]

    outputs = find_outputs(make_weights(tuple(names), 3000))

    assert outputs.tolist() == list(range(1, 3000, 3))


ORDER = np.random.default_rng(0).permutation(1000)


SHUFFLED_IDS = tuple(IDS[number] for number in ORDER)


def test_outputs_in_another_order():
    outputs = find_outputs(make_weights(SHUFFLED_IDS))

    assert outputs[ORDER].tolist() == list(range(1000))


@pytest.mark.parametrize("count", [1, 10])
def test_a_head_may_lack_a_few_classes(count):
    outputs = find_outputs(make_weights(SHUFFLED_IDS[count:], 1000 - count))

    missing = np.flatnonzero(outputs < 0)
    assert np.array_equal(missing, np.sort(ORDER[:count]))


def test_a_head_that_lacks_many_classes_is_rejected():
    """The classes of the sample weights are ants, bees and eels among others."""
    with rejects("989 of ImageNet's 1,000", "and 1 more"):
        find_outputs(make_weights(SHUFFLED_IDS[11:], 989))
    with rejects("3 of ImageNet's 1,000", "tench, goldfish"):
        find_outputs(sample_weights())
