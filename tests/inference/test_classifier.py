"""Weights made ready to use: nothing in them changes, and how images are prepared is known or asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.inference.samples import CROPPED, DIRECT, NAMES, SEVEN, logits_of, sample_pixels, sample_weights, softmax
from tests.weights.small_networks import HYBRID, RESNET, VIT, assert_same
from vit_jax import pytree
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.inference.classifier import build_classifier, probabilities, top_classes


@pytest.mark.parametrize("a", [SEVEN, HYBRID, RESNET], ids=lambda a: a.family)
def test_parameters_are_those_of_the_weights(a):
    weights = sample_weights(a, class_names=None)
    found = pytree.named_leaves(build_classifier(weights).model)
    assert_same({name: np.asarray(array) for name, array in found.items()}, weights.parameters)


def test_parameters_where_the_sharding_says():
    mesh = jax.make_mesh((8,), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    classifier = build_classifier(sample_weights(), sharding=whole)
    assert {array.sharding for array in jax.tree.leaves(classifier.model)} == {whole}
    spread = {array.sharding for array in jax.tree.leaves(build_classifier(sample_weights()).model)}
    assert {len(sharding.device_set) for sharding in spread} == {1}


def test_probabilities_are_the_softmax_of_the_logits():
    classifier, pixels = build_classifier(sample_weights()), sample_pixels(5)
    found = np.asarray(probabilities(classifier.model, jnp.asarray(pixels), "float32"))
    assert found.dtype == np.float32
    assert found == pytest.approx(softmax(logits_of(classifier.model, pixels)), abs=1e-6)
    assert found.sum(axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    assert len(set(found.argmax(axis=1))) > 1, "images that look the same would prove little"


def test_nothing_random_is_left_in():
    a = dataclasses.replace(SEVEN, dropout_fraction=0.5, stochastic_depth_fraction=0.5, remat="full")
    classifier, plain = build_classifier(sample_weights(a)), build_classifier(sample_weights())
    assert classifier.architecture == plain.architecture
    assert np.array_equal(logits_of(classifier.model, sample_pixels(2)), logits_of(plain.model, sample_pixels(2)))


def test_the_compute_dtype_is_ours_to_choose():
    stored = sample_weights(dataclasses.replace(SEVEN, compute_dtype="bfloat16"))
    pixels = jnp.asarray(sample_pixels(3))
    found = {}
    for dtype in ("float32", "bfloat16"):
        classifier = build_classifier(stored, compute_dtype=dtype)
        assert classifier.architecture.compute_dtype == dtype
        found[dtype] = np.asarray(probabilities(classifier.model, pixels, dtype))
        assert found[dtype].dtype == np.float32
    assert not np.array_equal(found["float32"], found["bfloat16"])
    assert found["float32"] == pytest.approx(found["bfloat16"], abs=0.1)
    with pytest.raises(ValueError, match="--compute_dtype=float16: choose float32 or bfloat16"):
        build_classifier(stored, compute_dtype="float16")


def test_classes_without_names_are_numbers():
    assert build_classifier(sample_weights()).class_names == NAMES
    assert build_classifier(sample_weights(class_names=None)).class_names == tuple("0123456")


def test_a_network_without_classes_is_no_classifier():
    with pytest.raises(ValueError, match="has no classes"):
        build_classifier(sample_weights(dataclasses.replace(VIT, num_classes=0), class_names=None))


@pytest.mark.parametrize(
    ("stored", "options", "expected"),
    [
        (DIRECT, {}, ("direct", 1.0)),
        (CROPPED, {}, ("short_side", 0.5)),
        (CROPPED, {"resize": "short_side", "crop_fraction": 0.5}, ("short_side", 0.5)),
        ({"resize": "direct"}, {}, ("direct", 1.0)),
        ({"resize": "short_side", "crop_fraction": 1}, {}, ("short_side", 1.0)),
        ({"resize": "short_side", "crop_fraction": None}, {"crop_fraction": 0.9}, ("short_side", 0.9)),
        ({"resize": "short_side"}, {"crop_fraction": 0.9}, ("short_side", 0.9)),
        (None, {"resize": "direct"}, ("direct", 1.0)),
        (None, {"resize": "direct", "crop_fraction": 1.0}, ("direct", 1.0)),
        (None, {"resize": "short_side", "crop_fraction": 0.7}, ("short_side", 0.7)),
    ],
)
def test_how_images_are_prepared(stored, options, expected):
    classifier = build_classifier(sample_weights(preprocessing=stored), **options)
    assert classifier.transform == EvaluationTransform((8, 12), *expected)


@pytest.mark.parametrize(
    ("stored", "options", "words"),
    [
        (None, {}, r"w.npz .released. does not say how images are prepared .resize, crop_fraction.: add --resize="),
        ({}, {}, "add --resize=direct"),
        (None, {"crop_fraction": 0.9}, r"prepared .resize.: add --resize="),
        (None, {"resize": "short_side"}, "--crop_fraction=0.875"),
        (None, {"resize": "crop", "crop_fraction": 0.9}, "resize='crop' is unknown; it is direct or short_side"),
        (None, {"resize": "direct", "crop_fraction": 0.9}, "0.9 has no effect with resize=direct"),
        (CROPPED, {"resize": "direct"}, "--resize=direct: the weights were trained with resize=short_side"),
        (CROPPED, {"crop_fraction": 0.9}, "--crop_fraction=0.9: the weights were trained with crop_fraction=0.5"),
        ({"resize": ["direct"], "crop_fraction": 1}, {}, "resize=.* is unknown"),
        ({"resize": "short_side", "crop_fraction": "most"}, {}, "crop_fraction='most' must be a number above 0"),
        ({"resize": "short_side", "crop_fraction": [1]}, {}, "must be a number above 0, up to 1"),
        ({"resize": "short_side", "crop_fraction": float("nan")}, {}, "must be a number above 0, up to 1"),
        ({"resize": "short_side", "crop_fraction": 0}, {}, "must be a number above 0, up to 1"),
    ],
)
def test_preparations_that_nobody_knows(stored, options, words):
    with pytest.raises(ValueError, match=words):
        build_classifier(sample_weights(preprocessing=stored), **options)


def test_top_classes_of_equals_take_the_lower():
    probability = np.float32([[0.1, 0.4, 0.1, 0.4], [0.25] * 4, [0, 0, 0.1, 0.9]])
    assert top_classes(probability, 3).tolist() == [[1, 3, 0], [0, 1, 2], [3, 2, 0]]
    assert top_classes(probability, 9).shape == (3, 4)
