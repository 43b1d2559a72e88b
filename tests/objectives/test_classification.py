"""Losses and counts of classification, held to NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from vit_jax.arrays import Batch, ModelOutput
from vit_jax.config import ObjectiveConfig
from vit_jax.objectives.classification import Classification, build_classification


def prepare_targets(objective, labels, mask):
    """Return the targets of a batch; classification needs neither pixels nor random numbers."""
    count = len(labels)
    batch = Batch(
        image_BHWC=None,
        label_B=jnp.zeros(count, jnp.int32),
        mask_B=mask,
    )
    return objective.prepare(batch, labels, mask, None)


def compute_sums(
    objective,
    logits,
    labels,
    mask=None,
):
    labels = jnp.float32(labels)
    if mask is None:
        mask = jnp.ones(len(labels))
    else:
        mask = jnp.asarray(mask, jnp.float32)

    output = ModelOutput(jnp.float32(logits))
    targets = prepare_targets(objective, labels, mask)
    return objective.sums(output, targets)


def compute_loss(kind, logits, labels):
    objective = Classification(kind)
    sums = compute_sums(objective, logits, labels)
    return float(sums["loss"])


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def test_sigmoid_loss_of_the_head_bias_is_the_paper_sheets_number():
    logits = np.full((1, 21843), -10.0)
    labels = np.eye(1, 21843)

    loss = compute_loss("sigmoid", logits, labels)

    assert loss == pytest.approx(10.9916, abs=1e-3)


@pytest.fixture
def soft_example():
    """Logits (4, 5) and labels that are a distribution over the classes."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 5))
    labels = rng.dirichlet(np.ones(5), size=4)
    return logits, labels


def test_the_softmax_loss_equals_numpy(soft_example):
    logits, labels = soft_example
    weights = np.exp(logits)
    probability = weights / weights.sum(-1, keepdims=True)
    likelihood = labels * np.log(probability)
    expected = -likelihood.sum()

    loss = compute_loss("softmax", logits, labels)

    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_sigmoid_loss_equals_numpy(soft_example):
    logits, labels = soft_example
    probability = sigmoid(logits)
    log_present = np.log(probability)
    log_absent = np.log(1 - probability)
    likelihood = labels * log_present + (1 - labels) * log_absent
    expected = -likelihood.sum()

    loss = compute_loss("sigmoid", logits, labels)

    assert loss == pytest.approx(expected, rel=1e-5)


def test_bce_takes_all_mixed_classes_for_present():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4))
    labels = [
        [0.7, 0.3, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0],
    ]
    is_present = np.array(
        [
            [1, 1, 0, 0],
            [0, 0, 1, 0],
        ],
        bool,
    )
    probability = sigmoid(logits)
    likelihood = np.where(is_present, probability, 1 - probability)
    expected = -np.log(likelihood).sum() / 4

    loss = compute_loss("bce", logits, labels)

    assert loss == pytest.approx(expected, rel=1e-5)


def test_label_smoothing_spreads_evenly():
    objective = Classification("softmax", 0.1)
    expected = [0.925, 0.025, 0.025, 0.025]

    targets = prepare_targets(
        objective,
        jnp.eye(4),
        jnp.ones(4),
    )

    assert_allclose(targets.label_BK[0], expected, rtol=1e-6)


def test_masked_examples_add_nothing():
    objective = Classification("softmax")
    logits = np.diag([2.0, 9.0])
    labels = np.zeros((2, 2))
    labels[:, 0] = 1

    masked = compute_sums(
        objective,
        logits,
        labels,
        mask=[1, 0],
    )
    alone = compute_sums(
        objective,
        logits[:1],
        labels[:1],
    )

    assert masked.keys() == alone.keys()
    for name, value in masked.items():
        assert float(value) == float(alone[name])
    assert float(masked["correct"]) == 1.0
    assert float(masked["weight"]) == 1.0


def margin(logits_BK, label_BK):
    return jnp.square(logits_BK - 2 * label_BK).sum(-1)


def mean_margin(logits_BK, label_BK):
    return margin(logits_BK, label_BK).mean()


def test_a_reference_is_the_loss_and_gives_the_gradient():
    """Logits 1 and 5 where 2 x label is 2 and 0 have the loss (1 - 2)**2 + 5**2.

    The gradients are -2 and 10; a masked example has none.
    """
    config = ObjectiveConfig(loss=f"{__name__}:margin")
    objective = build_classification(config)
    labels = np.zeros((2, 2))
    labels[:, 0] = 1
    logits = jnp.array(
        [
            [1.0, 5.0],
            [7.0, 7.0],
        ]
    )

    def compute_masked_loss(logits):
        sums = compute_sums(
            objective,
            logits,
            labels,
            mask=[1, 0],
        )
        return sums["loss"]

    differentiate = jax.value_and_grad(compute_masked_loss)
    loss, gradient = differentiate(logits)

    assert float(loss) == pytest.approx(26.0)
    counted, masked = gradient
    assert_allclose(counted, [-2.0, 10.0])
    assert not masked.any()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            f"{__name__}:mean_margin",
            r"config\.objective\.loss returns shape \(\): must be \(3,\)",
        ),
        (
            "math:pi",
            "config.objective.loss='math:pi' is float, not a function",
        ),
        ("optax:no_such", "optax has no 'no_such'"),
    ],
)
def test_what_is_no_loss_is_rejected(loss, message):
    config = ObjectiveConfig(loss=loss)
    logits = np.zeros((3, 3))
    labels = np.eye(3)

    def build_and_compute():
        objective = build_classification(config)
        compute_sums(objective, logits, labels)

    with pytest.raises(ValueError, match=message):
        build_and_compute()
