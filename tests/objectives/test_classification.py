import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import Batch, ModelOutput
from vit_jax.config import ObjectiveConfig
from vit_jax.objectives.classification import Classification, build_classification


def prepared(objective, labels, mask):
    batch = Batch(
        None,
        jnp.zeros(len(labels), jnp.int32),
        mask,
    )  # classification needs neither pixels
    return objective.prepare(batch, labels, mask, None)  # nor random numbers


def sums(objective, logits, labels, mask=None):
    labels = jnp.asarray(labels, jnp.float32)
    mask = jnp.ones(labels.shape[0]) if mask is None else jnp.asarray(mask, jnp.float32)

    return objective.sums(
        ModelOutput(jnp.asarray(logits, jnp.float32)),
        prepared(objective, labels, mask),
    )


def test_sigmoid_loss_of_the_head_bias_is_the_paper_sheets_number():
    logits = np.full((1, 21843), -10.0)
    labels = np.eye(1, 21843)
    expected = pytest.approx(10.9916, abs=1e-3)

    assert float(sums(Classification("sigmoid"), logits, labels)["loss"]) == expected


def test_losses_equal_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 5))
    labels = rng.dirichlet(np.ones(5), size=4)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(labels * log_p).sum()

    assert float(sums(Classification("softmax"), logits, labels)["loss"]) == pytest.approx(
        expected, rel=1e-5
    )

    p = 1 / (1 + np.exp(-logits))
    expected = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).sum()

    assert float(sums(Classification("sigmoid"), logits, labels)["loss"]) == pytest.approx(
        expected, rel=1e-5
    )


def test_bce_takes_all_mixed_classes_for_present():
    logits = np.random.default_rng(0).normal(size=(2, 4))
    labels = [[0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    p = 1 / (1 + np.exp(-logits))
    expected = -(np.log(p[0, :2]).sum() + np.log(1 - p[0, 2:]).sum() + np.log(p[1, 2]))
    expected -= np.log(1 - p[1, [0, 1, 3]]).sum()

    assert float(sums(Classification("bce"), logits, labels)["loss"]) == pytest.approx(
        expected / 4, rel=1e-5
    )


def test_label_smoothing_spreads_evenly():
    targets = prepared(Classification("softmax", 0.1), jnp.eye(4), jnp.ones(4))
    np.testing.assert_allclose(targets.label_BK[0], [0.925, 0.025, 0.025, 0.025], rtol=1e-6)


def test_masked_examples_add_nothing():
    objective = Classification("softmax")
    logits = np.array([[2.0, 0.0], [0.0, 9.0]])
    labels = np.array([[1.0, 0.0], [1.0, 0.0]])
    masked = sums(objective, logits, labels, [1, 0])
    alone = sums(objective, logits[:1], labels[:1])

    for name in masked:
        assert float(masked[name]) == float(alone[name])

    assert float(masked["correct"]) == float(masked["weight"]) == 1.0


def margin(logits_BK, label_BK):
    return jnp.square(logits_BK - 2 * label_BK).sum(-1)


def mean_margin(logits_BK, label_BK):
    return margin(logits_BK, label_BK).mean()


def test_a_reference_is_the_loss_and_gives_the_gradient():
    """Logits 1 and 5 where 2 x label is 2 and 0: (1 - 2)**2 + 5**2, gradients -2 and 10; a masked example has none."""
    objective = build_classification(ObjectiveConfig(loss=f"{__name__}:margin"))
    logits = np.array([[1.0, 5.0], [7.0, 7.0]])
    labels = np.array([[1.0, 0.0], [1.0, 0.0]])
    value, gradient = jax.value_and_grad(lambda x: sums(objective, x, labels, [1, 0])["loss"])(
        jnp.float32(logits)
    )

    assert float(value) == pytest.approx(26.0)
    np.testing.assert_allclose(gradient, [[-2.0, 10.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (f"{__name__}:mean_margin", r"config\.objective\.loss returns shape \(\): must be \(2,\)"),
        ("math:pi", "config.objective.loss='math:pi' is float, not a function"),
        ("optax:no_such", "optax has no 'no_such'"),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        sums(build_classification(ObjectiveConfig(loss=loss)), np.zeros((2, 3)), np.eye(3)[:2])
