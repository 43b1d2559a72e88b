"""Logistic regression against scikit-learn's, and the search of its penalty."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from vit_jax.evals import logistic
from vit_jax.evals.logistic import PENALTIES, choose_penalty, fit_logistic

NUM = 150
WIDTH = 12
CLASSES = 4


def examples():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, NUM)

    return (rng.normal(size=(CLASSES, WIDTH))[labels] + 2 * rng.normal(size=(NUM, WIDTH))).astype(
        np.float32
    ), labels


def objective(weight, bias, features, labels, penalty):
    logits = features.astype(np.float64) @ weight + bias
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(NUM), labels]

    return losses.sum() + penalty / 2 * np.square(weight).sum()


@pytest.mark.parametrize("penalty", [1.0, 1000.0])
def test_reaches_the_minimum_of_scikit_learn(penalty, monkeypatch):
    monkeypatch.setattr(logistic, "CHUNK", 64)  # three parts, the last padded
    features, labels = examples()
    found = fit_logistic(features, labels, CLASSES, penalty)
    reference = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=2000).fit(
        features.astype(np.float64),
        labels,
    )

    expected = objective(reference.coef_.T, reference.intercept_, features, labels, penalty)
    # The gradient's largest number is below 1e-5 a mean loss: the value is that of the minimum to
    # six digits.
    assert objective(found.weight_DK, found.bias_K, features, labels, penalty) == pytest.approx(
        expected,
        rel=1e-5,
    )
    assert (found.predict(features) == reference.predict(features)).mean() > 0.98
    assert 0 < found.iterations < logistic.MAX_ITERATIONS


@pytest.mark.parametrize("best", [3e-5, 0.7, 1e6])
def test_search_finds_the_best_penalty(best):
    calls = []

    def loss(penalty):
        calls.append(penalty)
        return abs(np.log(penalty / best))

    found, tried = choose_penalty(loss)

    assert abs(np.log10(found / best)) <= 1 / 16 + 1e-9  # half of the finest step
    assert len(calls) == len(tried) <= len(PENALTIES) + 8

    coarse = [penalty for penalty in tried if penalty in PENALTIES]

    assert coarse == [*PENALTIES[-len(coarse) :]]  # the largest, down to two rises behind the best
    assert coarse[0] <= max(best / 100, PENALTIES[0])


def test_of_equal_losses_the_larger_penalty():
    assert choose_penalty(lambda penalty: 0.5)[0] == PENALTIES[-1]


def test_probabilities_are_scikit_learns(monkeypatch):
    monkeypatch.setattr(logistic, "CHUNK", 64)
    features, labels = examples()
    found = fit_logistic(features, labels, CLASSES, 10.0).log_probabilities(features)
    reference = LogisticRegression(C=0.1, tol=1e-8, max_iter=2000).fit(
        features.astype(np.float64),
        labels,
    )

    np.testing.assert_allclose(found, reference.predict_log_proba(features), atol=2e-3)


def test_several_labels_are_fitted_one_against_the_rest(monkeypatch):
    monkeypatch.setattr(logistic, "CHUNK", 64)
    features, labels = examples()
    several = np.stack(
        [labels == 0, labels < 2, features[:, 0] + features[:, 1] > 0],
        axis=1,
    ).astype(np.int32)
    found = fit_logistic(features, several, 3, 10.0)

    assert found.has_several_labels

    for number in range(3):
        reference = LogisticRegression(C=0.1, tol=1e-8, max_iter=2000).fit(
            features,
            several[:, number],
        )
        expected = reference.decision_function(features)
        np.testing.assert_allclose(found.logits(features)[:, number], expected, atol=2e-3)
