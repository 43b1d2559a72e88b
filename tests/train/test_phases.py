"""Phases with other images: positions, steps, data and durations, each against an independent computation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.adaptation import set_image_size
from vit_jax.config.check import validate
from vit_jax.config.lengths import Clock, Phase, convert_lengths
from vit_jax.models import build_model
from vit_jax.train.inputs import open_train_batches
from vit_jax.train.resizing import make_resize

TWO = (
    "phases.small.until=4 steps",
    "phases.small.image_size=4",
    "phases.small.global_batch=8",
    "phases.wide.until=10 steps",
    "phases.wide.image_size=8,6",
)
SIZES = {"width": 8, "depth": 2, "mlp_dim": 8, "num_heads": 2}


def networks(**options):
    """A network for 4 x 4 patches with random parameters, and its shapes for 2 x 3."""
    config = ModelConfig(name="ViT-mu/2", **SIZES, **options)
    large = build_architecture(config, image_size=(8, 8), num_classes=3)
    small = set_image_size(large, (4, 6))
    model = build_model(large, jax.random.key(0))

    return model, jax.eval_shape(lambda: build_model(small, jax.random.key(0)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position_tokens": "patches"},
        {"position_layers": "every"},
        {"position_embedding": "learned_2d"},
        {"position_embedding": "sincos2d"},
        {"position_embedding": "relative"},
        {"pool": "gap", "block": "axial", "position_embedding": "relative"},
        {"rope": "centred", "position_embedding": "none"},
    ],
    ids=str,
)
def test_a_network_sees_images_of_another_size(options):
    """Every learned position has a part in those of the smaller images; all else is unchanged."""
    model, small = networks(**options)
    view = make_resize(model, small, (4, 4), (2, 3))
    image = jax.ShapeDtypeStruct((2, 4, 6, 3), jnp.float32)
    expected = (2, 3)

    assert (
        jax.eval_shape(lambda model, image: view(model)(image), model, image).logits_BK.shape
    ) == expected

    before = pytree.named_leaves(model)
    after = pytree.named_leaves(view(model))
    gradients = jax.grad(
        lambda model: sum(x.sum() for x in pytree.named_leaves(view(model)).values())
    )(model)

    for name, gradient in pytree.named_leaves(gradients).items():
        assert (np.asarray(gradient) > 0).all(), name
        assert "positions" in name or after[name] is before[name]


def test_positions_are_averages_over_the_cells_that_they_cover():
    """From 4 x 4 to 2 x 2 with an antialiased triangle: weights 1, 3, 3, 1 of eighths inside, cut at the border."""
    config = ModelConfig(name="ViT-mu/2", **SIZES)
    large = build_architecture(config, image_size=(8, 8), num_classes=3)
    model = build_model(large, jax.random.key(0))
    small = jax.eval_shape(lambda: build_model(set_image_size(large, (4, 4)), jax.random.key(0)))
    table = np.asarray(model.positions.table[...])[0]
    found = np.asarray(make_resize(model, small, (4, 4), (2, 2))(model).positions.table[...])[0]
    weights = np.array([[3, 3, 1, 0], [0, 1, 3, 3]]) / 7
    expected = np.einsum("Hh,Ww,hwD->HWD", weights, weights, table[1:].reshape(4, 4, -1)).reshape(
        4,
        -1,
    )

    np.testing.assert_array_equal(found[0], table[0])  # of the class token
    np.testing.assert_allclose(found[1:], expected, rtol=1e-5, atol=1e-7)


def test_durations_count_the_examples_of_each_phase():
    clock = Clock(16, 160, total_steps=100, earlier=((10, 8), (30, 32)))  # 80, then 640 examples
    expected = [5, 10, 30, 35, 50]

    assert [
        clock.to_steps(text)
        for text in ("40 examples", "0.5 epochs", "720 examples", "5 epochs", "50 steps")
    ] == expected

    config = tiny.config(
        *TWO,
        "total=2 epochs",
        "schedule.warmup=0.25 epochs",
        "evaluation.every=1 epochs",
    )
    steps = convert_lengths(config, 160)

    assert steps.phases == (Phase(4, (4, 4), 8), Phase(10, (8, 6), 16))

    expected = (4 + (320 - 32) // 16, 4 + 8 // 16, 10)
    assert (steps.total, steps.warmup, steps.evaluate_every) == expected

    half = tiny.config("phases.a.until=0.5 fraction", "phases.a.global_batch=32", "total=8 epochs")
    expected = (20, 20 + 40)

    assert (
        convert_lengths(half, 160).phases[0].last_step,
        convert_lengths(half, 160).total,
    ) == expected


def test_images_and_flops_of_each_phase():
    run = runs.build(*TWO)
    whole = runs.build()
    small, wide = (run.select_phase(step) for step in (4, 5))
    expected = [(4, 4), (4, 4), (8, 6), (8, 6), (8, 8)]

    assert [
        run.select_phase(step).architecture.image_size for step in (1, 4, 5, 10, 11)
    ] == expected
    assert [run.images(step) for step in (0, 3, 4, 6, 20)] == [0, 24, 32, 64, 32 + 16 * 16]

    flops = [part.training_flops_per_image for part in (small, wide, run)]
    assert flops == sorted(flops)
    assert flops[2] == whole.training_flops_per_image
    assert run.training_flops(12) == 32 * flops[0] + 96 * flops[1] + 32 * flops[2]
    assert whole.training_flops(12) == 12 * 16 * flops[2]


def test_batches_go_on_where_the_phase_before_ended():
    """The images of all steps are those of one run, and a start in any phase sees the same."""
    run = runs.build(*TWO, "input.flip=False", "input.shift_pixels=0", "input.train_crop=none")
    source = tiny.source(40)

    def batches(start_step):
        with open_train_batches(run, source, start_step) as (placed, _):
            return [(np.asarray(batch.image_BHWC), np.asarray(batch.label_B)) for batch in placed]

    seen = batches(0)
    assert [image.shape for image, _ in seen] == [(8, 4, 4, 3)] * 4 + [(16, 8, 6, 3)] * 6 + [
        (16, 8, 8, 3)
    ] * 10

    plain = runs.build("input.flip=False", "input.shift_pixels=0", "input.train_crop=none")
    with open_train_batches(plain, source, 0) as (placed, _):
        expected = np.concatenate([np.asarray(batch.label_B) for batch in placed])

    labels = np.concatenate([label for _, label in seen])
    assert np.array_equal(labels, expected[: len(labels)])

    for start in (3, 4, 7, 10, 15, 20):
        for found, wanted in zip(batches(start), seen[start:], strict=True):
            assert all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        (("phases.a.until=5 steps",), "phases.a", "no effect"),
        (("phases.a.until=5 steps", "phases.a.image_size=0"), "phases.a.image_size", "at least 1"),
        (("phases.a.until=20 steps", "phases.a.image_size=4"), "phases", "step 20 of 20"),
        ((*TWO, "phases.wide.until=4 steps"), "phases.wide.until", "after step 4"),
        ((*TWO, "phases.small.until=0 steps"), "phases.small.until", "after step 0"),
        (("phases.a.until=5 steps", "phases.a.image_size=5"), "phases", "4 or 6"),
        (
            ("phases.a.until=5 steps", "phases.a.global_batch=9"),
            "phases.a.global_batch=9",
            "divisible by 2",
        ),
    ],
)
def test_phases_that_cannot_work(fields, field, rule):
    with rejects(f"config.{field}", rule):
        validate(tiny.config(*fields))
        runs.build(*fields, devices=2)


@pytest.mark.slow
def test_one_phase_is_another_run():
    """A step of an earlier phase is that of a run with its sizes, where no position depends on the size."""
    rope = (
        "model.position_embedding=none",
        "model.rope=centred",
        "model.pool=gap",
        "logging.every=1 steps",
    )
    run = runs.build(*rope, "phases.a.until=5 steps", "phases.a.image_size=4")
    alone = runs.build(*rope, "input.image_size=4")
    state = run.init_state()
    expected = alone.init_state()

    for batch in runs.batches(alone, 3):
        batch = jax.device_put(batch, run.batch_sharding)
        state, metrics = run.select_phase(1).train_step(state, batch)
        expected, wanted = alone.train_step(expected, batch)

        assert {name: float(x) for name, x in metrics.items()} == {
            name: float(x) for name, x in wanted.items()
        }

    found, wanted = (pytree.named_leaves(each.model) for each in (state, expected))
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert dataclasses.replace(run.select_phase(1).config, phases={}) == alone.config
