"""Closed-form least squares against NumPy in float64, with constant feature and penalty."""

import numpy as np
import pytest

from vit_jax.evals import least_squares
from vit_jax.evals.least_squares import LeastSquares

TOLERANCE = 1e-4  # of scores of a few units, as the released evaluator would have them in float64


def sample_examples(num, width, num_classes, seed=0):
    """Return features, labels and 50 further features.

    Features have unequal scales, are correlated, and far from zero. Every class may occur.
    """
    rng = np.random.default_rng(seed)
    scales = np.logspace(0, -2, width) / width**0.5
    mixing = rng.normal(size=(width, width)) * scales
    offset = rng.normal(size=width)

    def sample_features(count):
        independent = rng.normal(size=(count, width))
        features = independent @ mixing + offset
        return features.astype(np.float32)

    features = sample_features(num)
    labels = rng.integers(0, num_classes, num)
    return features, labels, sample_features(50)


def compute_released_scores(feature, label, num_classes, test, l2):
    """Return scores by the steps of the released evaluator.

    It standardises, appends 100, and fits targets of 1 and -1 by ridge regression.
    """
    feature = feature.astype(np.float64)
    mean = feature.mean(axis=0)
    std = feature.std(axis=0) + 1e-5

    def prepare(part):
        standardised = (part - mean) / std
        constant = np.full(len(part), 100.0)
        return np.c_[standardised, constant]

    x = prepare(feature)
    one_hot = np.eye(num_classes)[label]
    targets = 2 * one_hot - 1
    penalty = l2 * np.eye(x.shape[1])
    weight = np.linalg.solve(x.T @ x + penalty, x.T @ targets)
    return prepare(test.astype(np.float64)) @ weight


PENALTIES = (1e-6, 1e-3, 1.0, 1024.0, 1e6)


def assert_equals_float64(feature, label, test, num_classes):
    """Compare scores and clear predictions for all penalties, from one summary."""
    summary = LeastSquares(feature, label, num_classes)

    for l2 in PENALTIES:
        classifier = summary.solve(l2)
        expected = compute_released_scores(
            feature,
            label,
            num_classes,
            test,
            l2,
        )

        scores = np.concatenate(list(classifier.iterate_scores(test)))
        difference = np.abs(scores - expected)
        assert difference.max() < TOLERANCE, l2

        *_, second, first = np.sort(expected, axis=1).T
        is_clear = first - second > 2 * TOLERANCE
        classes = classifier.predict(test)
        expected_classes = expected.argmax(axis=1)
        assert np.array_equal(classes[is_clear], expected_classes[is_clear])


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
    """The worst conditioned systems have about as many examples as numbers of a feature.

    Examples come in several chunks, of which the last is smaller.
    """
    monkeypatch.setattr(least_squares, "CHUNK", 256)
    feature, label, test = sample_examples(num, width, num_classes)

    assert_equals_float64(feature, label, test, num_classes)


def test_fits_more_features_than_images_with_a_small_penalty():
    """In float32 the factorisation lost this penalty, and most training images were wrong."""
    feature, label, _ = sample_examples(180, 182, 8)

    summary = LeastSquares(feature, label, 8)
    classifier = summary.solve(1e-6)

    assert np.array_equal(classifier.predict(feature), label)


def append_dependent_features(feature):
    """Append the negative sum of the features, and a constant."""
    constant = np.full(len(feature), 7.0)
    negative_sum = -feature.sum(axis=1)
    appended = np.c_[feature, negative_sum, constant]
    return appended.astype(np.float32)


def test_dependent_and_constant_features():
    """A layer norm makes features dependent, up to rounding."""
    feature, label, test = sample_examples(300, 32, 5)

    assert_equals_float64(
        append_dependent_features(feature),
        label,
        append_dependent_features(test),
        5,
    )


def test_too_little_memory_is_an_error_that_names_shots(monkeypatch):
    monkeypatch.setattr(least_squares, "memory_bytes", lambda: 2**18)
    feature, label, _ = sample_examples(900, 200, 40)
    rule = r"200 equations and 40 classes needs .* GiB.*Lower --shots="

    with pytest.raises(ValueError, match=rule):
        LeastSquares(feature, label, 40)
