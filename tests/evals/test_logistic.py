"""Logistic regression against scikit-learn's, and the search of its penalty."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.linear_model import LogisticRegression

from vit_jax.evals import logistic
from vit_jax.evals.logistic import PENALTIES, choose_penalty, fit_logistic

NUM = 150
WIDTH = 12
CLASSES = 4


def sample_examples():
    """Return features (NUM, WIDTH) of overlapping clusters, and their labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, NUM)
    centres = rng.normal(size=(CLASSES, WIDTH))
    noise = rng.normal(size=(NUM, WIDTH))
    features = centres[labels] + 2 * noise
    return features.astype(np.float32), labels


def compute_objective(weight, bias, features, labels, penalty):
    """Return the penalised loss in float64."""
    logits = features.astype(np.float64) @ weight + bias
    logits -= logits.max(axis=1, keepdims=True)
    label_logits = logits[np.arange(NUM), labels]
    losses = np.log(np.exp(logits).sum(axis=1)) - label_logits
    squared_norm = np.square(weight).sum()
    return losses.sum() + penalty / 2 * squared_norm


def fit_by_scikit_learn(features, labels, penalty):
    regression = LogisticRegression(
        C=1 / penalty,
        tol=1e-8,
        max_iter=2000,
    )
    return regression.fit(features.astype(np.float64), labels)


@pytest.fixture
def three_chunks(monkeypatch):
    """Examples are read in three chunks, of which the last is padded."""
    monkeypatch.setattr(logistic, "CHUNK", 64)


@pytest.mark.usefixtures("three_chunks")
@pytest.mark.parametrize("penalty", [1.0, 1000.0])
def test_reaches_the_minimum_of_scikit_learn(penalty):
    """The gradient's largest number is below 1e-5 a mean loss.

    So the value is that of the minimum to six digits.
    """
    features, labels = sample_examples()

    found = fit_logistic(features, labels, CLASSES, penalty)

    reference = fit_by_scikit_learn(features, labels, penalty)
    objective = compute_objective(
        found.weight_DK,
        found.bias_K,
        features,
        labels,
        penalty,
    )
    expected = compute_objective(
        reference.coef_.T,
        reference.intercept_,
        features,
        labels,
        penalty,
    )

    is_equal = found.predict(features) == reference.predict(features)
    assert objective == pytest.approx(expected, rel=1e-5)
    assert is_equal.mean() > 0.98
    assert 0 < found.iterations < logistic.MAX_ITERATIONS


@pytest.mark.parametrize("best", [3e-5, 0.7, 1e6])
def test_search_finds_the_best_penalty(best):
    """The penalty is found to half of the finest step.

    The coarse search begins with the largest penalty and ends two rises behind the best.
    """
    calls = []

    def compute_loss(penalty):
        calls.append(penalty)
        return abs(np.log(penalty / best))

    found, tried = choose_penalty(compute_loss)

    deviation = np.log10(found / best)
    assert abs(deviation) <= 1 / 16 + 1e-9
    assert len(calls) == len(tried) <= len(PENALTIES) + 8

    coarse = [penalty for penalty in tried if penalty in PENALTIES]
    assert coarse == list(PENALTIES[-len(coarse) :])
    assert coarse[0] <= max(best / 100, PENALTIES[0])


def test_equal_losses_prefer_the_larger_penalty():
    found, _ = choose_penalty(lambda penalty: 0.5)

    assert found == PENALTIES[-1]


@pytest.mark.usefixtures("three_chunks")
def test_probabilities_are_scikit_learns():
    features, labels = sample_examples()

    classifier = fit_logistic(features, labels, CLASSES, 10.0)
    found = classifier.log_probabilities(features)

    reference = fit_by_scikit_learn(features, labels, 10.0)
    expected = reference.predict_log_proba(features)

    assert_allclose(found, expected, atol=2e-3)


@pytest.mark.usefixtures("three_chunks")
def test_several_labels_are_fitted_one_against_the_rest():
    features, labels = sample_examples()
    label_columns = [
        labels == 0,
        labels < 2,
        features[:, 0] + features[:, 1] > 0,
    ]
    label_NK = np.stack(label_columns, axis=1).astype(np.int32)

    found = fit_logistic(features, label_NK, 3, 10.0)

    assert found.has_several_labels
    for k in range(3):
        reference = fit_by_scikit_learn(
            features,
            label_NK[:, k],
            10.0,
        )
        expected = reference.decision_function(features)
        assert_allclose(
            found.logits(features)[:, k],
            expected,
            atol=2e-3,
        )
