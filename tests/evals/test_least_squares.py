"""Closed-form least squares against NumPy in float64, with the constant feature and the penalty written out."""

import numpy as np
import pytest

from vit_jax.evals import least_squares
from vit_jax.evals.least_squares import LeastSquares

TOLERANCE = 1e-4  # of scores of a few units, as the released evaluator would have them in float64


def examples(num, width, num_classes, seed=0):
    """Features of unequal scale, correlated, and far from zero; labels in which every class may occur."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(width, width)) / width**0.5 * np.logspace(0, -2, width)
    offset = rng.normal(size=width)
    draw = lambda count: (rng.normal(size=(count, width)) @ mixing + offset).astype(np.float32)  # noqa: E731

    return draw(num), rng.integers(0, num_classes, num), draw(50)


def released_scores(feature, label, num_classes, test, l2):
    """The steps of the released evaluator: standardise, append 100, targets of 1 and -1, ridge regression."""
    feature = feature.astype(np.float64)
    test = test.astype(np.float64)
    mean = feature.mean(axis=0)
    std = feature.std(axis=0) + 1e-5
    x, y = (np.c_[(part - mean) / std, np.full(len(part), 100.0)] for part in (feature, test))
    weight = np.linalg.solve(
        x.T @ x + l2 * np.eye(x.shape[1]),
        x.T @ (2 * np.eye(num_classes)[label] - 1),
    )

    return y @ weight


PENALTIES = (1e-6, 1e-3, 1.0, 1024.0, 1e6)


def assert_equals_float64(feature, label, test, num_classes):
    """For all penalties, from one summary."""
    summary = LeastSquares(feature, label, num_classes)
    for l2 in PENALTIES:
        classifier = summary.solve(l2)
        expected = released_scores(feature, label, num_classes, test, l2)
        scores = np.concatenate(list(classifier.scores(test)))

        assert np.abs(scores - expected).max() < TOLERANCE, l2

        first, second = np.sort(expected, axis=1)[:, :-3:-1].T
        clear = first - second > 2 * TOLERANCE

        assert np.array_equal(classifier.predict(test)[clear], expected.argmax(axis=1)[clear])


@pytest.mark.parametrize(
    ("num", "width", "num_classes"),
    [
        (900, 64, 7),
        (40, 64, 7),
        (64, 64, 200),
        (65, 64, 7),
        (66, 64, 7),
        (90, 89, 5),
        (89, 90, 5),
        (1, 8, 2),
    ],
)
def test_equals_float64(num, width, num_classes, monkeypatch):
    """Also where there are about as many examples as numbers of a feature, the worst conditioned systems."""
    monkeypatch.setattr(least_squares, "CHUNK", 256)  # several parts, the last one smaller
    feature, label, test = examples(num, width, num_classes)

    assert_equals_float64(feature, label, test, num_classes)


def test_fits_more_features_than_images_with_a_small_penalty():
    """In float32 the factorisation lost this penalty, and most training images were wrong."""
    feature, label, _ = examples(180, 182, 8)
    assert np.array_equal(LeastSquares(feature, label, 8).solve(1e-6).predict(feature), label)


def test_dependent_and_constant_features():
    """A layer norm makes features dependent, up to rounding."""
    feature, label, test = examples(300, 32, 5)
    dependent = [
        np.c_[part, -part.sum(axis=1), np.full(len(part), 7.0)].astype(np.float32)
        for part in (feature, test)
    ]

    assert_equals_float64(dependent[0], label, dependent[1], 5)


def test_too_little_memory_says_how_much_and_what_to_lower(monkeypatch):
    monkeypatch.setattr(least_squares, "memory_bytes", lambda: 2**18)
    feature, label, _ = examples(900, 200, 40)

    with pytest.raises(
        ValueError,
        match=r"matrix of 200 x 200 and 40 classes needs .* GiB.*Lower --shots=",
    ):
        LeastSquares(feature, label, 40)
