"""Phases with other images: positions, steps, data and durations, held to independent computations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests import tiny
from tests.columns import list_column
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

LARGE = (8, 8)


def build_vit(**options):
    config = ModelConfig(
        name="ViT-mu/2",
        **SIZES,
        **options,
    )
    return build_architecture(
        config,
        image_size=LARGE,
        num_classes=3,
    )


def abstract(architecture):
    def build():
        return build_model(architecture, jax.random.key(0))

    return jax.eval_shape(build)


TWO = (
    "phases.small.until=4 steps",
    "phases.small.image_size=4",
    "phases.small.global_batch=8",
    "phases.wide.until=10 steps",
    "phases.wide.image_size=8,6",
)
SIZES = {
    "width": 8,
    "depth": 2,
    "mlp_dim": 8,
    "num_heads": 2,
}


def networks(small_size, **options):
    """Return a network for 4 x 4 patches with random parameters, and the shapes for smaller images."""
    architecture = build_vit(**options)
    small = set_image_size(architecture, small_size)
    model = build_model(architecture, jax.random.key(0))
    return model, abstract(small)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position_tokens": "patches"},
        {"position_layers": "every"},
        {"position_embedding": "learned_2d"},
        {"position_embedding": "sincos2d"},
        {"position_embedding": "relative"},
        {
            "pool": "gap",
            "block": "axial",
            "position_embedding": "relative",
        },
        {"rope": "centred", "position_embedding": "none"},
    ],
    ids=str,
)
def test_a_network_sees_images_of_another_size(options):
    """Every learned position has a part in those of the smaller images; all else is unchanged."""
    model, small = networks((4, 6), **options)
    view = make_resize(model, small, (4, 4), (2, 3))
    image = jnp.zeros((2, 4, 6, 3))

    def run(model, image):
        return view(model)(image)

    def sum_parameters(model):
        leaves = jax.tree.leaves(view(model))
        return sum(leaf.sum() for leaf in leaves)

    output = jax.eval_shape(run, model, image)
    gradients = jax.grad(sum_parameters)(model)
    before = pytree.name_leaves(model)
    after = pytree.name_leaves(view(model))

    assert output.logits_BK.shape == (2, 3)
    for name, gradient in pytree.name_leaves(gradients).items():
        assert gradient.min() > 0, name
        assert "positions" in name or after[name] is before[name]


def test_positions_are_averages_over_the_cells_that_they_cover():
    """From 4 x 4 to 2 x 2 an antialiased triangle has the weights 1, 3, 3, 1 of eighths.

    It is cut at the border.
    """
    model, small = networks((4, 4))
    table = np.asarray(model.positions.table[...])[0]
    patches = table[1:].reshape(4, 4, -1)
    sevenths = np.array(
        [
            [3, 3, 1, 0],
            [0, 1, 3, 3],
        ]
    )
    expected = np.einsum(
        "Hh,Ww,hwD->HWD",
        sevenths / 7,
        sevenths / 7,
        patches,
    )

    resize = make_resize(model, small, (4, 4), (2, 2))
    resized = resize(model)
    actual = resized.positions.table[0]

    # The row of the class token stays.
    assert_array_equal(actual[0], table[0])
    assert_allclose(
        actual[1:],
        expected.reshape(4, -1),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        ("40 examples", 5),
        ("0.5 epochs", 10),
        ("720 examples", 30),
        ("5 epochs", 35),
        ("50 steps", 50),
    ],
)
def test_durations_count_the_examples_of_each_phase(duration, steps):
    """The earlier phases have 80 and 640 examples."""
    clock = Clock(16, 160, total_steps=100, earlier=((10, 8), (30, 32)))

    assert clock.to_steps(duration) == steps


def test_lengths_of_a_run_with_phases():
    config = tiny.config(
        *TWO,
        "total=2 epochs",
        "schedule.warmup=0.25 epochs",
        "evaluation.every=1 epochs",
    )

    steps = convert_lengths(config, 160)

    small, wide = steps.earlier_phases

    assert small == Phase(4, (4, 4), 8)
    assert wide == Phase(10, (8, 6), 16)
    assert steps.total == 4 + (320 - 32) // 16
    assert steps.warmup == 4 + 8 // 16
    assert steps.evaluate_every == 10


def test_a_phase_that_ends_at_a_fraction_of_the_run():
    config = tiny.config(
        "phases.a.until=0.5 fraction",
        "phases.a.global_batch=32",
        "total=8 epochs",
    )

    steps = convert_lengths(config, 160)

    assert steps.earlier_phases[0].last_step == 20
    assert steps.total == 20 + 40


@pytest.fixture(scope="module")
def two_phases():
    return runs.build(*TWO)


def test_images_of_each_phase(two_phases):
    sizes = {}
    for step in (1, 4, 5, 10, 11):
        sizes[step] = two_phases.select_phase(step).architecture.image_size

    assert sizes == {
        1: (4, 4),
        4: (4, 4),
        5: (8, 6),
        10: (8, 6),
        11: (8, 8),
    }
    assert two_phases.images(0) == 0
    assert two_phases.images(3) == 24
    assert two_phases.images(4) == 32
    assert two_phases.images(6) == 64
    assert two_phases.images(20) == 32 + 16 * 16


def test_flops_of_each_phase(two_phases):
    whole = runs.build()
    small = two_phases.select_phase(4).training_flops_per_image
    wide = two_phases.select_phase(5).training_flops_per_image
    large = two_phases.training_flops_per_image

    assert small <= wide <= large
    assert large == whole.training_flops_per_image
    assert two_phases.training_flops(12) == 32 * small + 96 * wide + 32 * large
    assert whole.training_flops(12) == 12 * 16 * large


PLAIN_IMAGES = ("input.flip=False", "input.shift_pixels=0", "input.train_crop=none")


def read_batches(run, source, start_step):
    """Return the images and labels of all steps after one."""
    batches = []
    with open_train_batches(run, source, start_step) as (placed, _):
        for batch in placed:
            image = np.asarray(batch.image_BHWC)
            label = np.asarray(batch.label_B)
            batches.append((image, label))
    return batches


def test_batches_go_on_where_the_phase_before_ended():
    """The images of all steps are those of one run, and a start in any phase sees the same."""
    run = runs.build(*TWO, *PLAIN_IMAGES)
    source = tiny.source(40)
    plain_run = runs.build(*PLAIN_IMAGES)
    small = [(8, 4, 4, 3)] * 4
    wide = [(16, 8, 6, 3)] * 6
    large = [(16, 8, 8, 3)] * 10

    batches = read_batches(run, source, 0)
    plain_batches = read_batches(plain_run, source, 0)
    shapes = [image.shape for image, _ in batches]
    labels = np.concatenate(list_column(batches, 1))
    plain_labels = np.concatenate(list_column(plain_batches, 1))

    assert shapes == [*small, *wide, *large]
    assert_array_equal(labels, plain_labels[: len(labels)])
    for start in (3, 4, 7, 10, 15, 20):
        later = read_batches(run, source, start)
        for found, expected in zip(later, batches[start:], strict=True):
            image, label = expected
            assert_array_equal(found[0], image)
            assert_array_equal(found[1], label)


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        (("phases.a.until=5 steps",), "phases.a", "no effect"),
        (
            ("phases.a.until=5 steps", "phases.a.image_size=0"),
            "phases.a.image_size",
            "at least 1",
        ),
        (
            ("phases.a.until=20 steps", "phases.a.image_size=4"),
            "phases",
            "step 20 of 20",
        ),
        (
            (*TWO, "phases.wide.until=4 steps"),
            "phases.wide.until",
            "after step 4",
        ),
        (
            (*TWO, "phases.small.until=0 steps"),
            "phases.small.until",
            "after step 0",
        ),
        (
            ("phases.a.until=5 steps", "phases.a.image_size=5"),
            "phases",
            "4 or 6",
        ),
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
    """A step of an earlier phase is that of a run with its sizes.

    No position depends on the size here.
    """
    fields = (
        "model.position_embedding=none",
        "model.rope=centred",
        "model.pool=gap",
        "logging.every=1 steps",
    )
    run = runs.build(
        *fields,
        "phases.a.until=5 steps",
        "phases.a.image_size=4",
    )
    alone = runs.build(*fields, "input.image_size=4")
    phase = run.select_phase(1)
    state = run.init_state()
    expected_state = alone.init_state()

    for batch in runs.batches(alone, 3):
        batch = jax.device_put(batch, run.batch_sharding)
        state, metrics = phase.train_step(state, batch)
        expected_state, expected_metrics = alone.train_step(expected_state, batch)
        assert jax.device_get(metrics) == jax.device_get(expected_metrics)

    model = pytree.name_leaves(state.model)
    for name, expected in pytree.name_leaves(expected_state.model).items():
        assert_array_equal(model[name], expected, err_msg=name)
    assert dataclasses.replace(phase.config, phases={}) == alone.config
