"""ImageNet's classes as they are shipped, and the outputs of networks that stand for them."""

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
    is_unnamed,
    members,
    numbers_by_id,
    outputs_of,
    readable_names,
)

IDS = tuple(pathlib.Path(NAMES_FILE).read_text().split())


def weights_with(names, num_classes=1000, **details):
    weights = sample_weights(dataclasses.replace(SEVEN, num_classes=num_classes), class_names=names)
    return dataclasses.replace(weights, **details)


def test_the_shipped_classes_are_those_of_tfds():
    assert tuple(one.wordnet_id for one in classes()) == IDS
    assert len(members("A")) == len(members("R")) == 200
    assert len(members("")) == len(set(class_names())) == 1000

    tench, goldfish = classes()[:2]

    assert tench.name == "tench"
    assert tench.lemmas == "tench, Tinca tinca"
    assert tench.subsets == "-"
    assert goldfish.name == "goldfish"
    assert goldfish.subsets == "R"

    expected = ["crane (bird)", "crane (machine)"]
    assert [class_names()[number] for number in (134, 517)] == expected
    assert numbers_by_id()["n15075141"] == 999


def test_which_networks_get_imagenets_names():
    """Those of the formats in which ImageNet's networks are released, with 1,000 outputs; nothing else is guessed."""
    assert readable_names(weights_with(None, format="released")) == class_names()
    assert readable_names(weights_with(None, format="timm")) == class_names()

    for weights in (
        weights_with(None),
        weights_with(None, 21_843, format="released"),
        weights_with(None, 7),
    ):
        assert readable_names(weights) is None
        assert not is_unnamed(weights)

        with rejects("classes", "--class_names=FILE"):
            outputs_of(weights)

    assert readable_names(weights_with(IDS)) == class_names()

    mixed = ("n01440764", "n99999999", "cat")

    assert readable_names(weights_with(mixed, 3)) == ("tench", "n99999999", "cat")


@pytest.mark.parametrize(
    "spelling",
    [
        lambda one: one.wordnet_id,
        lambda one: f"{one.wordnet_id} {one.name}",
        lambda one: one.lemmas,
        lambda one: one.first_lemma,
        lambda one: one.name,
    ],
    ids=["id", "id and name", "lemmas", "first lemma", "name"],
)
def test_outputs_by_any_spelling_in_a_larger_head(spelling):
    """Every third output stands for a class; two classes spelled alike, as the cranes, are in their order."""
    names = [f"n{90_000_000 + place} other" for place in range(3000)]
    names[1::3] = [spelling(one) for one in classes()]

    assert outputs_of(weights_with(tuple(names), 3000)).tolist() == list(range(1, 3000, 3))


def test_outputs_in_another_order_and_classes_that_a_head_lacks():
    order = np.random.default_rng(0).permutation(1000)
    names = [IDS[number] for number in order]

    assert outputs_of(weights_with(tuple(names)))[order].tolist() == list(range(1000))

    for count in (1, 10):
        found = outputs_of(weights_with(tuple(names[count:]), 1000 - count))
        assert np.array_equal(np.flatnonzero(found < 0), np.sort(order[:count]))

    with rejects("989 of ImageNet's 1,000", "and 1 more"):
        outputs_of(weights_with(tuple(names[11:]), 989))
    with rejects("3 of ImageNet's 1,000", "tench, goldfish"):
        outputs_of(sample_weights())  # ants, bees, eels
