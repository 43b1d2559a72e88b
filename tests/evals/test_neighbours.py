"""Nearest neighbours against NumPy over all pairs, in several parts."""

import numpy as np
import pytest

from vit_jax.evals.features import Features
from vit_jax.evals.neighbours import (
    QUERIES,
    find_nearest,
    make_neighbour_measure,
    neighbour_accuracy,
    vote,
)


def sample_features(num, seed, num_classes=5, width=16):
    """Return features of overlapping clusters, one for each class."""
    centres_rng = np.random.default_rng(9)
    centres = centres_rng.normal(size=(num_classes, width))
    rng = np.random.default_rng(seed)
    labels = rng.integers(
        num_classes,
        size=num,
        dtype=np.int32,
    )
    noise = rng.normal(size=(num, width))
    features = centres[labels] + 2 * noise

    return Features(
        features.astype(np.float32),
        labels,
        np.ones(num, bool),
        np.arange(num, dtype=np.uint64),
    )


@pytest.fixture
def sides():
    """Features of 12 training images and 5 test images."""
    train = sample_features(12, 0)
    test = sample_features(5, 1)
    return train, test


def normalise_rows(features):
    features = features.astype(np.float64)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return features / norms


def measure_by_hand(train, test, k, temperature):
    """Return the accuracy of k nearest neighbours over all pairs, in float64."""
    keys = normalise_rows(train.feature_ND)
    queries = normalise_rows(test.feature_ND)
    similarity = queries @ keys.T
    order = np.argsort(-similarity)
    index = order[:, :k]
    nearest = np.take_along_axis(similarity, index, axis=1)
    weight = np.exp(nearest / temperature)

    labels = train.label_N[index]
    one_hot = np.eye(5)[labels]
    votes = np.einsum("qk,qkc->qc", weight, one_hot)
    predicted = votes.argmax(axis=1)
    is_right = predicted == test.label_N

    return is_right.mean()


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_equals_numpy_over_all_pairs(temperature):
    train = sample_features(130, 0)
    test = sample_features(QUERIES + 41, 1)

    found = neighbour_accuracy(
        train,
        test,
        5,
        neighbours=(1, 20, 50),
        temperature=temperature,
    )

    assert list(found) == [1, 20, 50]
    for k, accuracy in found.items():
        expected = measure_by_hand(train, test, k, temperature)
        assert accuracy == pytest.approx(expected)
    assert 0.2 < found[20] < 1


@pytest.mark.parametrize("keys_at_once", [1, 3, 4])
@pytest.mark.parametrize("k", [2, 4])
def test_nearest_are_sorted_by_similarity_then_by_index(k, keys_at_once):
    keys = np.float32(
        [
            [0, 1],
            [1, 0],
            [2, 0],
            [1, 1],
        ]
    )
    query = np.float32([[3, 0]])

    ((similarity, index),) = find_nearest(
        keys,
        query,
        k,
        keys_at_once=keys_at_once,
    )

    nearest = [1, 2, 3, 0]
    similarities = [1, 1, 2**-0.5, 0]

    assert index.tolist() == [nearest[:k]]
    assert similarity[0] == pytest.approx(similarities[:k])


def test_votes_are_weighted():
    """At the temperature 0.05 one vote of weight 1 beats e^-2 + e^-4."""
    similarity = np.array([[0.9, 0.8, 0.7]])
    label = np.array([[1, 0, 0]])

    (cold,) = vote(
        similarity,
        label,
        2,
        temperature=0.05,
    )
    (warm,) = vote(
        similarity,
        label,
        2,
        temperature=1.0,
    )

    assert cold == 1
    assert warm == 0


def test_numbers_of_neighbours_beyond_the_images_are_not_measured(sides):
    found = neighbour_accuracy(*sides, 5)

    assert list(found) == [10]


def test_too_few_images(sides):
    with pytest.raises(ValueError, match="neighbours=20: must be at most 12, the readable"):
        neighbour_accuracy(*sides, 5, neighbours=(20,))


def test_a_temperature_must_be_positive(sides):
    with pytest.raises(ValueError, match=r"temperature=0\.0: must be a positive number"):
        neighbour_accuracy(*sides, 5, temperature=0.0)


def test_evaluator():
    train = sample_features(60, 0)
    test = sample_features(20, 1)
    measure = make_neighbour_measure(5, neighbours=(3,))

    found = dict(measure(train, test))

    accuracy = neighbour_accuracy(train, test, 5, neighbours=(3,))
    assert found == {"3nn_accuracy": accuracy[3]}
