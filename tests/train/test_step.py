import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import small_runs as runs
from vit_jax import pytree
from vit_jax.arrays import Targets, normalise
from vit_jax.train.step import accumulate_gradients, divide_by_weight, split_batch, weigh_examples


def assert_trees_close(a, b, atol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float64),
            np.asarray(y, np.float64),
            rtol=0,
            atol=atol,
        )


@pytest.mark.newest
@pytest.mark.parametrize("masked", [(), (0, 5, 6)])
def test_accumulation_equals_the_large_batch_of_one_device(masked):
    """Also where examples are masked unevenly over the micro-batches, with mixup, and spread over devices."""
    accumulated = runs.build("optimizer.accumulation_steps=4", devices=2)
    one, four = (runs.train(run, 4, masked=masked) for run in (runs.build(), accumulated))

    np.testing.assert_allclose(runs.losses(four[1]), runs.losses(one[1]), rtol=1e-5)
    assert_trees_close(four[0].model, one[0].model, atol=1e-5)


@pytest.mark.slow
def test_masked_examples_do_not_change_the_step():
    """Other pixels and labels in masked rows leave every metric and parameter as they are."""
    run = runs.build()
    (batch,) = runs.batches(run, 1, masked=(3, 4))
    image = batch.image_BHWC.copy()
    label = batch.label_B.copy()
    image[[3, 4]] = 255 - image[[3, 4]]
    label[[3, 4]] = (label[[3, 4]] + 1) % 10
    (state_a, metrics_a), (state_b, metrics_b) = (
        run.train_step(run.init_state(), jax.device_put(b, run.batch_sharding))
        for b in (batch, dataclasses.replace(batch, image_BHWC=image, label_B=label))
    )

    assert float(metrics_a["train_loss"]) == float(metrics_b["train_loss"])

    for x, y in zip(jax.tree.leaves(state_a), jax.tree.leaves(state_b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_batch_without_readable_images_does_no_harm():
    run = runs.build("optimizer.weight_decay=0.0")
    before = jax.device_get(run.init_state().model)
    state, curve = runs.train(run, 1, masked=range(16))

    assert runs.losses(curve) == [0.0]
    assert_trees_close(state.model, before, atol=0)


@pytest.mark.slow
def test_class_weights_count_in_proportion():
    """Two of one class to one of the others: as if its images were there twice."""
    weights = ",".join(["4"] + ["2"] * 9)
    run = runs.build(f"objective.class_weights={weights}", "input.mixup_alpha=0.0")
    plain = runs.build("input.mixup_alpha=0.0")
    (batch,) = runs.batches(plain, 1)
    model = plain.init_state().evaluated_model()
    loss_B = optax.softmax_cross_entropy_with_integer_labels(
        np.asarray(model(normalise(batch.image_BHWC, jnp.float32)).logits_BK),
        batch.label_B,
    )
    expected = np.average(loss_B, weights=np.where(batch.label_B == 0, 2, 1))

    assert 0 in batch.label_B

    _, metrics = run.train_step(run.init_state(), jax.device_put(batch, run.batch_sharding))
    assert float(metrics["train_loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "expected", "tolerance"),
    [
        ((), math.log(10), 1e-6),
        (
            ("model.head_bias_init=-10.0", "objective.loss=sigmoid"),
            10.0000454 + 9 * 4.5399e-5,
            1e-4,
        ),
    ],
)
def test_initial_loss(options, expected, tolerance):
    _, curve = runs.train(runs.build("input.mixup_alpha=0.0", *options), 1)
    assert curve[0]["train_loss"] == pytest.approx(expected, abs=tolerance)


@pytest.mark.slow
def test_a_step_is_a_function_of_seed_and_step():
    options = ("model.dropout_fraction=0.2", "model.stochastic_depth_fraction=0.2")
    first, again, other = (
        runs.losses(runs.train(runs.build(*options, *seed), 4)[1]) for seed in ((), (), ("seed=1",))
    )

    assert first == again
    assert first != other


SHORT = ("input.mixup_alpha=0.0", "total=7 steps")


def test_metrics_norms_and_learning_rate():
    run = runs.build(*SHORT, "logging.every=1 steps")
    before = jax.device_get(run.init_state().model)
    _, curve = runs.train(run, 1)
    norm = math.sqrt(
        sum(float(np.square(np.float64(leaf)).sum()) for leaf in jax.tree.leaves(before))
    )

    assert curve[0]["parameter_norm"] == pytest.approx(norm, rel=1e-5), "step 0 has learning rate 0"
    assert curve[0]["learning_rate"] == curve[0]["update_norm"] == 0.0

    _, curve = runs.train(run, 7)
    assert curve[5]["learning_rate"] == pytest.approx(run.config.schedule.learning_rate, rel=1e-6)
    assert curve[5]["update_norm"] > 0


def test_the_norm_of_the_update_is_computed_where_it_is_logged():
    """After every third step and the last. Logged values do not depend on the interval."""
    (_, every), (_, third) = (
        runs.train(runs.build(*SHORT, f"logging.every={n} steps"), 7) for n in (1, 3)
    )

    assert [
        step for step, metrics in enumerate(third, 1) if math.isfinite(metrics["update_norm"])
    ] == [3, 6, 7]

    for expected, metrics in zip(every, third, strict=True):
        logged = {name: value for name, value in metrics.items() if math.isfinite(value)}
        assert set(expected) - set(logged) <= {"update_norm"}
        assert logged == pytest.approx({name: expected[name] for name in logged}, rel=1e-6)


@pytest.mark.slow
def test_polyak_average_is_what_is_evaluated():
    run = runs.build("polyak.factor=0.5", "polyak.bias_correction=False")
    state = run.init_state()
    models = []

    for batch in runs.batches(run, 3):
        state, _ = run.train_step(state, jax.device_put(batch, run.batch_sharding))
        models.append(jax.device_get(state.model))

    initial = jax.device_get(run.init_state().model)
    expected = jax.tree.map(
        lambda a, b, c, d: 0.125 * a + 0.125 * b + 0.25 * c + 0.5 * d,
        initial,
        *models,
    )

    assert_trees_close(state.evaluated_model(), expected, atol=1e-6)

    batch = runs.first_batch(run)
    sums = run.evaluation_step(state, batch)
    logits = expected((jnp.float32(batch.image_BHWC) - 127.5) / 127.5).logits_BK

    assert float(sums["correct"]) == float((logits.argmax(-1) == batch.label_B).sum())


@pytest.mark.newest
def test_bfloat16_compute_keeps_float32_parameters():
    state, curve = runs.train(runs.build("model.compute_dtype=bfloat16"), 3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.model)} == {jnp.dtype("float32")}

    _, exact = runs.train(runs.build(), 3)
    np.testing.assert_allclose(runs.losses(curve), runs.losses(exact), rtol=2e-2)
    assert runs.losses(curve) != runs.losses(exact)


FROZEN = ("optimizer.trained=head", "input.mixup_alpha=0.0", "model.head=mlp", "model.depth=1")


@pytest.mark.slow
def test_a_frozen_backbone_has_the_features_of_evaluation_no_gradient_and_stays_to_the_bit():
    """Also where the weights bring their own dropout; under weight decay, and in the Polyak average too."""
    decayed = runs.config(*FROZEN, "polyak.factor=0.9", "optimizer.weight_decay=0.3")
    run = runs.assemble_config(
        decayed,
        devices=2,
        dropout_fraction=0.5,
        stochastic_depth_fraction=0.5,
    )
    first, *others = (jax.device_put(batch, run.batch_sharding) for batch in runs.batches(run, 3))
    rng = np.random.default_rng(
        0
    )  # also in the head, which else starts at zero and hands no gradient to the backbone
    state = run.state_of(
        jax.tree.map(
            lambda x: jnp.float32(0.2 * rng.normal(size=x.shape)),
            run.abstract_state.model,
        )
    )
    before = pytree.named_leaves(jax.device_get(state.model))

    def mean_loss(model):
        log_probability_BK = jax.nn.log_softmax(
            model(normalise(first.image_BHWC, "float32")).logits_BK
        )
        return -jnp.take_along_axis(log_probability_BK, first.label_B[:, None], 1).mean()

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(
        state.model
    )  # without dropout, of all parameters
    head = optax.tree.norm(gradients.head)

    assert optax.tree.norm(gradients) > 1.005 * head  # a gradient of the backbone would show

    state, metrics = run.train_step(state, first)
    assert float(metrics["train_loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["gradient_norm"]) == pytest.approx(float(head), rel=1e-4)

    for batch in others:
        state, _ = run.train_step(state, batch)

    for model in (state.model, state.polyak):
        for name, leaf in pytree.named_leaves(jax.device_get(model)).items():
            assert (leaf.tobytes() == before[name].tobytes()) == (not name.startswith("head/")), (
                name
            )


@pytest.mark.newest
def test_the_compiled_step_takes_leaves_and_gives_what_the_step_of_states_gives():
    run = runs.build("model.dropout_fraction=0.1", devices=2)
    batch = runs.first_batch(run)
    expected, metrics = run.train_step(run.init_state(), batch)
    leaves, same_metrics = run.compile_train_step()(pytree.named_leaves(run.init_state()), batch)
    state = run.state_from(leaves)

    assert jax.tree.structure(state) == jax.tree.structure(expected)

    jax.tree.map(np.testing.assert_array_equal, (state, same_metrics), (expected, metrics))


def squared_error(model, images, targets, key):
    """Return the sum of squared errors of a linear model over the examples that count."""
    errors = (images @ model["kernel"] - targets.label_BK) * targets.mask_B
    loss = jnp.square(errors).sum()

    return loss, {"loss": loss, "weight": targets.mask_B.sum()}


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_gradients_of_micro_batches_are_those_of_the_batch(num_micro_batches):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 3)).astype(np.float32)
    label = rng.normal(size=8).astype(np.float32)
    mask = np.array([1, 0, 1, 1, 0, 1, 1, 1], np.float32)
    kernel = rng.normal(size=3).astype(np.float32)
    sums, gradients = accumulate_gradients(
        squared_error,
        {"kernel": jnp.asarray(kernel)},
        jnp.asarray(images),
        Targets(jnp.asarray(label), jnp.asarray(mask)),
        jax.random.key(0),
        num_micro_batches,
    )
    errors = (images @ kernel - label) * mask

    assert float(sums["weight"]) == 6
    np.testing.assert_allclose(sums["loss"], np.square(errors).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradients["kernel"], 2 * errors @ images, rtol=1e-4)

    _, means = divide_by_weight(sums, gradients)
    np.testing.assert_allclose(means["kernel"], 2 * errors @ images / 6, rtol=1e-4)


def test_a_micro_batch_has_every_nth_example():
    targets = Targets(None, jnp.arange(6.0))
    images, split_targets, keys = split_batch(jnp.arange(6), targets, jax.random.key(0), 2)

    assert images.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert split_targets.mask_B.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert keys.shape == (2,)


def test_weights_of_examples_have_a_mean_of_one_over_the_classes():
    label_BK = jnp.eye(3)
    np.testing.assert_allclose(weigh_examples(label_BK, (1.0, 2.0, 3.0)), [0.5, 1.0, 1.5])


def test_a_batch_without_weight_has_no_gradient():
    sums, gradients = divide_by_weight({"weight": jnp.float32(0)}, {"kernel": jnp.zeros(2)})
    assert float(sums["weight"]) == 1
    assert gradients["kernel"].tolist() == [0, 0]
