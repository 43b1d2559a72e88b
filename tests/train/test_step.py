"""The training step: accumulation, masks, weights, metrics, averages and frozen parameters."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.tiny import MIXUP
from tests.train import small_runs as runs
from vit_jax import pytree
from vit_jax.arrays import Targets, normalise
from vit_jax.train.step import (
    LossInputs,
    accumulate_gradients,
    average_gradients,
    split_batch,
    weigh_examples,
)


def assert_trees_close(actual, expected, atol):
    def check(leaf, expected_leaf):
        exact = np.float64(expected_leaf)
        difference = np.float64(leaf) - exact
        assert np.abs(difference).max() <= atol

    jax.tree.map(check, actual, expected)


@pytest.mark.newest
@pytest.mark.parametrize(
    "masked",
    [
        (),
        (0, 5, 6),
    ],
)
def test_accumulation_equals_the_large_batch_of_one_device(masked):
    """Masked examples are spread unevenly over the micro-batches, with mixup, over devices."""
    accumulated = runs.build(MIXUP, "optimizer.accumulation_steps=4", devices=2)

    state, curve = runs.train(runs.build(MIXUP), 4, masked=masked)
    accumulated_state, accumulated_curve = runs.train(
        accumulated,
        4,
        masked=masked,
    )

    assert_allclose(
        runs.losses(accumulated_curve),
        runs.losses(curve),
        rtol=1e-5,
    )
    assert_trees_close(
        accumulated_state.model,
        state.model,
        atol=1e-5,
    )


def take_step(run, batch):
    """Return the state and the metrics after one step from the start."""
    return run.train_step(
        run.init_state(),
        jax.device_put(batch, run.batch_sharding),
    )


@pytest.mark.slow
def test_masked_examples_do_not_change_the_step():
    """Other pixels and labels in masked rows leave every metric and parameter as they are."""
    run = runs.build()
    (batch,) = runs.batches(run, 1, masked=(3, 4))
    image = batch.image_BHWC.copy()
    label = batch.label_B.copy()
    image[3:5] = 255 - image[3:5]
    label[3:5] = (label[3:5] + 1) % 10
    changed = dataclasses.replace(
        batch,
        image_BHWC=image,
        label_B=label,
    )

    state, metrics = take_step(run, batch)
    changed_state, changed_metrics = take_step(run, changed)

    loss = float(metrics["train_loss"])
    assert float(changed_metrics["train_loss"]) == loss
    jax.tree.map(assert_array_equal, state, changed_state)


@pytest.mark.slow
def test_a_batch_without_readable_images_does_no_harm():
    run = runs.build("optimizer.weight_decay=0.0")
    before = jax.device_get(run.init_state().model)

    state, curve = runs.train(run, 1, masked=range(16))

    assert runs.losses(curve) == [0.0]
    assert_trees_close(state.model, before, atol=0)


@pytest.mark.slow
def test_class_weights_count_in_proportion():
    """With weights of two to one the images of a class count as if they were there twice."""
    weights = "4" + 9 * ",2"
    run = runs.build(
        f"objective.class_weights={weights}",
        "input.mixup_alpha=0.0",
    )
    plain = runs.build("input.mixup_alpha=0.0")
    (batch,) = runs.batches(plain, 1)

    model = plain.init_state().evaluated_model()
    image = normalise(batch.image_BHWC, jnp.float32)
    loss_B = optax.softmax_cross_entropy_with_integer_labels(
        model(image).logits_BK,
        batch.label_B,
    )
    weight_B = 1 + (batch.label_B == 0)
    expected = np.average(loss_B, weights=weight_B)

    _, metrics = take_step(run, batch)

    assert 0 in batch.label_B
    train_loss = float(metrics["train_loss"])
    assert train_loss == pytest.approx(expected, rel=1e-5)


SIGMOID = ("model.head_bias_init=-10.0", "objective.loss=sigmoid")


@pytest.mark.parametrize(
    ("options", "expected", "tolerance"),
    [
        ((), math.log(10), 1e-6),
        (SIGMOID, 10.0000454 + 9 * 4.5399e-5, 1e-4),
    ],
)
def test_initial_loss(options, expected, tolerance):
    run = runs.build("input.mixup_alpha=0.0", *options)

    _, curve = runs.train(run, 1)

    first = curve[0]

    assert first["train_loss"] == pytest.approx(expected, abs=tolerance)


@pytest.mark.slow
def test_a_step_is_a_function_of_seed_and_step():
    options = (MIXUP, "model.dropout_fraction=0.2", "model.stochastic_depth_fraction=0.2")

    def compute_losses(*seed):
        run = runs.build(*options, *seed)
        _, curve = runs.train(run, 4)
        return runs.losses(curve)

    first = compute_losses()
    again = compute_losses()
    other = compute_losses("seed=1")

    assert again == first
    assert other != first


def compute_norm(tree):
    total = 0.0
    for leaf in jax.tree.leaves(tree):
        total += np.square(np.float64(leaf)).sum()
    return math.sqrt(total)


SHORT = ("input.mixup_alpha=0.0", "total=7 steps")


def test_metrics_norms_and_learning_rate():
    run = runs.build(*SHORT, "logging.every=1 steps")
    model = jax.device_get(run.init_state().model)
    norm = compute_norm(model)

    _, curve = runs.train(run, 7)
    first = curve[0]
    warm = curve[5]
    peak = run.config.schedule.learning_rate

    # Step 0 has learning rate 0.
    assert first["parameter_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["learning_rate"] == 0.0
    assert first["update_norm"] == 0.0
    assert warm["learning_rate"] == pytest.approx(peak, rel=1e-6)
    assert warm["update_norm"] > 0


def test_norms_of_sums_over_rows_are_the_same():
    norms = dataclasses.replace(runs.build(*SHORT).step_parts.norms, sums_rows_first=True)
    keys = jax.random.split(jax.random.key(0), 3)
    tree = {
        "kernel": jax.random.normal(keys[0], (2, 5, 300)),
        "bias": jax.random.normal(keys[1], (7,), jnp.bfloat16),
        "temperature": jax.random.normal(keys[2], ()),
    }

    norm = norms.compute(tree)

    assert float(norm) == pytest.approx(compute_norm(tree), rel=1e-5)


def test_the_norm_of_the_update_is_computed_where_it_is_logged():
    """It is logged after every third step and the last. Logged values ignore the interval."""
    _, every = runs.train(
        runs.build(*SHORT, "logging.every=1 steps"),
        7,
    )
    _, third = runs.train(
        runs.build(*SHORT, "logging.every=3 steps"),
        7,
    )
    steps_with_norm = []

    for step, metrics in enumerate(third, start=1):
        expected = every[step - 1]
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            if math.isfinite(value):
                assert value == pytest.approx(expected[name], rel=1e-6)
            else:
                assert name == "update_norm"
        if math.isfinite(metrics["update_norm"]):
            steps_with_norm.append(step)

    assert len(third) == len(every)
    assert steps_with_norm == [3, 6, 7]


@pytest.mark.slow
def test_the_polyak_average_is_evaluated():
    run = runs.build("polyak.factor=0.5", "polyak.bias_correction=False")
    state = run.init_state()
    expected = jax.device_get(state.model)

    def average(old, new):
        return (old + new) / 2

    for batch in runs.batches(run, 3):
        on_device = jax.device_put(batch, run.batch_sharding)
        state, _ = run.train_step(state, on_device)
        model = jax.device_get(state.model)
        expected = jax.tree.map(average, expected, model)

    batch = runs.first_batch(run)
    image = (jnp.float32(batch.image_BHWC) - 127.5) / 127.5
    predicted_B = expected(image).logits_BK.argmax(-1)
    num_correct = (predicted_B == batch.label_B).sum()

    sums, _ = run.evaluation_step(state, batch)

    assert_trees_close(state.evaluated_model(), expected, atol=1e-6)
    assert float(sums["correct"]) == float(num_correct)


@pytest.mark.newest
def test_bfloat16_compute_keeps_float32_parameters():
    rounded_run = runs.build("model.compute_dtype=bfloat16")

    state, curve = runs.train(rounded_run, 3)
    _, exact_curve = runs.train(runs.build(), 3)
    rounded = runs.losses(curve)
    exact = runs.losses(exact_curve)

    for leaf in jax.tree.leaves(state.model):
        assert leaf.dtype == jnp.float32
    assert_allclose(rounded, exact, rtol=2e-2)
    assert rounded != exact


def fill_model(abstract_model):
    """Return random parameters everywhere.

    A head that starts at zero hands no gradient to the backbone.
    """
    rng = np.random.default_rng(0)

    def sample(leaf):
        return jnp.float32(0.2 * rng.normal(size=leaf.shape))

    return jax.tree.map(sample, abstract_model)


FROZEN = (
    "optimizer.trained=head",
    "input.mixup_alpha=0.0",
    "model.head=mlp",
    "model.depth=1",
)


@pytest.mark.slow
def test_a_frozen_backbone_has_the_features_of_evaluation_no_gradient_and_stays_to_the_bit():
    """The weights bring a dropout; there is weight decay, and a Polyak average."""
    config = runs.config(
        *FROZEN,
        "polyak.factor=0.9",
        "optimizer.weight_decay=0.3",
    )
    run = runs.assemble_config(
        config,
        devices=2,
        dropout_fraction=0.5,
        stochastic_depth_fraction=0.5,
    )
    batches = []
    for batch in runs.batches(run, 3):
        batches.append(jax.device_put(batch, run.batch_sharding))

    model = fill_model(run.abstract_state.model)
    state = run.start_from(model)
    before = pytree.name_leaves(jax.device_get(state.model))

    @jax.jit
    @jax.value_and_grad
    def compute_loss(model):
        """Return the loss without dropout, with gradients of all parameters."""
        batch = batches[0]
        image = normalise(batch.image_BHWC, "float32")
        loss_B = optax.softmax_cross_entropy_with_integer_labels(
            model(image).logits_BK,
            batch.label_B,
        )
        return loss_B.mean()

    loss, gradients = compute_loss(state.model)
    norm_of_head = float(optax.tree.norm(gradients.head))
    # A gradient of the backbone would show.
    assert optax.tree.norm(gradients) > 1.005 * norm_of_head

    state, metrics = run.train_step(state, batches[0])
    train_loss = float(metrics["train_loss"])
    gradient_norm = float(metrics["gradient_norm"])

    assert train_loss == pytest.approx(float(loss), rel=1e-5)
    assert gradient_norm == pytest.approx(norm_of_head, rel=1e-4)

    for batch in batches[1:]:
        state, _ = run.train_step(state, batch)

    for model in (state.model, state.polyak):
        after = pytree.name_leaves(jax.device_get(model))
        for name, leaf in after.items():
            is_same = leaf.tobytes() == before[name].tobytes()
            is_head = name.startswith("head/")
            assert is_same != is_head, name


@pytest.mark.newest
def test_the_compiled_step_takes_leaves_and_gives_what_the_step_of_states_gives():
    run = runs.build("model.dropout_fraction=0.1", devices=2)
    batch = runs.first_batch(run)
    leaves = pytree.name_leaves(run.init_state())

    expected, metrics = run.train_step(run.init_state(), batch)
    new_leaves, same_metrics = run.compile_train_step()(leaves, batch)
    state = run.state_from(new_leaves)

    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(
        assert_array_equal,
        (state, same_metrics),
        (expected, metrics),
    )


def squared_error(model, inputs):
    """Return the sum of squared errors of a linear model over the examples that count."""
    images, targets, _, _ = inputs
    predicted = images @ model["kernel"]
    errors = (predicted - targets.label_BK) * targets.mask_B
    loss = jnp.square(errors).sum()
    sums = {
        "loss": loss,
        "weight": targets.mask_B.sum(),
    }

    return loss, sums


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_gradients_of_micro_batches_are_those_of_the_batch(num_micro_batches):
    rng = np.random.default_rng(0)
    images = np.float32(rng.normal(size=(8, 3)))
    label = np.float32(rng.normal(size=8))
    kernel = np.float32(rng.normal(size=3))
    mask = np.ones(8, np.float32)
    mask[[1, 4]] = 0

    errors = (images @ kernel - label) * mask
    loss = np.square(errors).sum()
    gradient = 2 * errors @ images

    inputs = LossInputs(
        jnp.asarray(images),
        Targets(jnp.asarray(label), jnp.asarray(mask)),
        kept_BM=None,
        dropout_key=jax.random.key(0),
    )
    gradients, sums = accumulate_gradients(
        squared_error,
        {"kernel": jnp.asarray(kernel)},
        inputs,
        num_micro_batches,
    )
    means, _ = average_gradients(gradients, sums)

    assert float(sums["weight"]) == 6
    assert_allclose(sums["loss"], loss, rtol=1e-5)
    assert_allclose(gradients["kernel"], gradient, rtol=1e-4)
    assert_allclose(means["kernel"], gradient / 6, rtol=1e-4)


def test_a_micro_batch_has_every_nth_example():
    targets = Targets(None, jnp.arange(6.0))
    expected = [
        [0, 2, 4],
        [1, 3, 5],
    ]
    inputs = LossInputs(
        jnp.arange(6),
        targets,
        kept_BM=jnp.arange(6),
        dropout_key=jax.random.key(0),
    )

    images, split_targets, kept, keys = split_batch(inputs, 2)

    assert images.tolist() == expected
    assert split_targets.mask_B.tolist() == expected
    assert kept.tolist() == expected
    assert keys.shape == (2,)


def test_weights_of_examples_have_a_mean_of_one_over_the_classes():
    class_weights = (1.0, 2.0, 3.0)

    weight_B = weigh_examples(jnp.eye(3), class_weights)

    assert_allclose(weight_B, [0.5, 1.0, 1.5])


def test_a_batch_without_weight_has_no_gradient():
    zero_gradients = {"kernel": jnp.zeros(2)}
    zero_sums = {"weight": jnp.float32(0)}

    gradients, sums = average_gradients(zero_gradients, zero_sums)

    assert float(sums["weight"]) == 1
    assert gradients["kernel"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.25, 4.0),
        (0.0, 1.0),
        (2.0, 0.5),
    ],
)
def test_gradients_are_means_also_for_small_weights(weight, expected):
    sums = {"loss": jnp.float32(0), "weight": jnp.float32(weight)}

    gradients, _ = average_gradients(jnp.ones(2), sums)

    assert_array_equal(gradients, np.full(2, expected, np.float32))
