"""Nearest neighbours against NumPy over all pairs, in several parts."""

import numpy as np
import pytest

from vit_jax.evals.features import Features
from vit_jax.evals.neighbours import (
    QUERIES,
    make_neighbour_measure,
    nearest,
    neighbour_accuracy,
    vote,
)


def features(num, seed, num_classes=5, width=16):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num).astype(np.int32)
    centres = np.random.default_rng(9).normal(size=(num_classes, width))
    found = (centres[labels] + 2 * rng.normal(size=(num, width))).astype(np.float32)

    return Features(found, labels, np.ones(num, bool), np.arange(num, dtype=np.uint64))


def by_hand(train, test, k, temperature):
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    similarity = (
        unit(test.feature_ND.astype(np.float64)) @ unit(train.feature_ND.astype(np.float64)).T
    )
    index = np.argsort(-similarity)[:, :k]
    weight = np.exp(np.take_along_axis(similarity, index, axis=1) / temperature)
    votes = np.einsum("qk,qkc->qc", weight, np.eye(5)[train.label_N[index]])

    return (votes.argmax(axis=1) == test.label_N).mean()


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_equals_numpy_over_all_pairs(temperature):
    train = features(130, 0)
    test = features(QUERIES + 41, 1)
    found = neighbour_accuracy(train, test, 5, neighbours=(1, 20, 50), temperature=temperature)

    assert found == pytest.approx({k: by_hand(train, test, k, temperature) for k in (1, 20, 50)})
    assert 0.2 < found[20] < 1


@pytest.mark.parametrize("keys_at_once", [1, 3, 4])
def test_the_greatest_come_first_and_of_equal_ones_the_lower_index(keys_at_once):
    keys = np.array([[0, 1], [1, 0], [2, 0], [1, 1]], np.float32)
    for k in (2, 4):
        ((similarity, index),) = nearest(
            keys,
            np.array([[3, 0]], np.float32),
            k,
            keys_at_once=keys_at_once,
        )

        assert index.tolist() == [[1, 2, 3, 0][:k]]
        assert similarity[0] == pytest.approx([1, 1, 2**-0.5, 0][:k])


def test_votes_are_weighted():
    similarity = np.array([[0.9, 0.8, 0.7]])
    label = np.array([[1, 0, 0]])

    assert vote(similarity, label, 2, temperature=0.05).tolist() == [1]  # 1 against e^-2 + e^-4
    assert vote(similarity, label, 2, temperature=1.0).tolist() == [0]


def test_too_few_images():
    train = features(12, 0)
    test = features(5, 1)

    assert list(neighbour_accuracy(train, test, 5)) == [10]

    with pytest.raises(ValueError, match="neighbours=20: must be at most 12, the readable"):
        neighbour_accuracy(train, test, 5, neighbours=(20,))
    with pytest.raises(ValueError, match=r"temperature=0\.0: must be a positive number"):
        neighbour_accuracy(train, test, 5, temperature=0.0)


def test_evaluator():
    train = features(60, 0)
    test = features(20, 1)
    measure = make_neighbour_measure(5, neighbours=(3,))

    expected = {"3nn_accuracy": neighbour_accuracy(train, test, 5, neighbours=(3,))[3]}
    assert dict(measure(train, test)) == expected
