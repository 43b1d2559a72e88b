"""Patch dropout: the tokens that remain, the cost of a step, phases, and networks without tokens."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests import tiny
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.check import validate
from vit_jax.models import abstract_model
from vit_jax.models.flops import forward_macs
from vit_jax.models.positions import add_positions, find_kept_tokens
from vit_jax.train.phases import shrink_sequence
from vit_jax.train.step import sample_patches, step_keys
from vit_jax.train.step_memory import step_memory

HALF = "input.patch_dropout=0.5"
FIXED = "input.mixup_alpha=0.0"


def build(image_size=(8, 8), **options):
    """Return a network with patches of 2 x 2 pixels, and the same random parameters each time."""
    sizes = {"width": 8, "depth": 1, "mlp_dim": 8, "num_heads": 2}
    config = ModelConfig(name="ViT-mu/2", **sizes, **options)
    architecture = build_architecture(
        config,
        image_size=image_size,
        num_classes=3,
    )
    rng = np.random.default_rng(0)

    def sample(leaf):
        return jnp.asarray(
            0.3 * rng.normal(size=leaf.shape),
            leaf.dtype,
        )

    return jax.tree.map(sample, abstract_model(architecture))


def make_images():
    images = np.random.default_rng(1).normal(size=(2, 8, 8, 3))
    return jnp.asarray(images, jnp.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"registers": 2, "position_tokens": "patches", "rope": "centred", "pool": "map"},
        {"position_embedding": "learned_2d", "position_layers": "every"},
    ],
    ids=str,
)
def test_all_patches_are_the_whole_network(options):
    everything = jnp.tile(jnp.arange(16), (2, 1))

    model = build(**options)

    @jax.jit
    def run(images):
        return model(images, kept_BM=everything).logits_BK, model(images).logits_BK

    kept, whole = run(make_images())

    assert_allclose(kept, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"position_embedding": "sincos2d", "registers": 2, "position_layers": "shared"},
        {"position_embedding": "none", "rope": "index", "class_tokens": 2},
    ],
    ids=str,
)
def test_patches_of_a_corner_are_a_smaller_image(options):
    """Without learned positions the patches of the top left corner are an image of their own."""
    images = make_images()
    row, column = np.divmod(np.arange(16), 4)
    (corner,) = np.nonzero((row < 2) & (column < 3))

    model = build(**options)
    smaller = build((4, 6), **options)

    @jax.jit
    def run(images):
        attention = ("attention",)
        kept = model(
            images,
            kept_BM=jnp.tile(corner, (2, 1)),
            intermediates=attention,
        )
        return kept, smaller(images[:, :4, :6], intermediates=attention)

    kept, expected = run(images)

    assert_allclose(
        kept.logits_BK,
        expected.logits_BK,
        rtol=1e-5,
        atol=1e-6,
    )
    assert_allclose(
        kept.attention_LBTQS,
        expected.attention_LBTQS,
        rtol=1e-5,
        atol=1e-6,
    )
    assert kept.tokens_BND.shape == expected.tokens_BND.shape


def test_each_image_has_the_positions_of_its_patches():
    table = np.random.default_rng(0).normal(size=(1, 7, 4)).astype(np.float32)
    kept = np.array([[0, 3], [2, 4]])
    expected = np.zeros((2, 4, 4), np.float32)
    for image in range(2):
        for row, token in enumerate((0, 1, *(2 + kept[image]))):
            expected[image, row] = table[0, token]

    token_BS = find_kept_tokens(
        jnp.asarray(kept),
        prefix_length=2,
    )
    positions = add_positions(
        jnp.zeros((2, 4, 4)),
        lambda: jnp.asarray(table),
        token_BS,
    )

    assert_array_equal(positions, expected)


def test_every_patch_is_kept_equally_often():
    num_images = 4000
    kept_BM = np.asarray(sample_patches(jax.random.key(0), (num_images, 8), 3))
    shares = np.bincount(kept_BM.ravel(), minlength=8) / num_images

    assert (np.diff(kept_BM, axis=1) > 0).all()  # ascending, and therefore different
    # Six standard deviations of a share of 3/8.
    assert_allclose(
        shares,
        3 / 8,
        atol=6 * math.sqrt(15 / 64 / num_images),
    )


@pytest.mark.parametrize(
    ("fraction", "num_kept"),
    [
        (0.0, 16),
        (0.5, 8),
        (0.9, 2),
        (0.99, 1),
    ],
)
def test_number_of_kept_patches(fraction, num_kept):
    assert runs.build().architecture.count_kept_patches(fraction) == num_kept


def test_work_of_a_step_is_in_proportion_to_its_tokens():
    whole = runs.build(FIXED)
    half = runs.build(FIXED, HALF)
    a = half.architecture
    ratio = half.training_flops_per_image / whole.training_flops_per_image
    counted_ratio = count_step_flops(half) / count_step_flops(whole)

    assert half.forward_macs == whole.forward_macs  # evaluation sees all patches
    assert half.training_architecture.sequence_length == 8
    assert shrink_sequence(a, whole.config) == a
    assert forward_macs(a, num_kept=8) == forward_macs(half.training_architecture)
    assert ratio == pytest.approx(0.5, abs=0.05)
    # Besides matrix products, the update of all parameters.
    assert counted_ratio == pytest.approx(0.5, abs=0.1)


def count_step_flops(run):
    return run.trace_train_step().lower().cost_analysis()["flops"]


def test_each_step_has_other_patches():
    run = runs.build(FIXED, HALF)
    batch = runs.first_batch(run)
    first = run.step_parts.prepare_inputs(jnp.int32(0), batch).kept_BM
    again = run.step_parts.prepare_inputs(jnp.int32(0), batch).kept_BM
    second = run.step_parts.prepare_inputs(jnp.int32(1), batch).kept_BM

    assert_array_equal(first, again)
    assert (first != second).any()
    assert (first[0] != first[1]).any()
    assert first.shape == (16, 8)


def test_the_key_of_patches_is_none_of_mixing():
    """A key that is folded with i is that of part i of its split."""
    keys = step_keys(seed=0, steps_done=7)
    keys_of_mixing = jax.random.split(keys.mixing, 3)

    words = jax.random.key_data(keys.patches)
    words_of_mixing = jax.random.key_data(keys_of_mixing)

    assert not (words == words_of_mixing).all(axis=1).any()


def test_phases_compile_a_program_for_each_dropout():
    """Phases of the same sizes share a program; each step runs that of its phase."""
    run = runs.build(
        FIXED,
        "logging.every=1 step",
        "phases.most.until=2 steps",
        "phases.most.patch_dropout=0.75",
        "phases.none.until=4 steps",
        "phases.none.patch_dropout=0.0",
        "phases.again.until=6 steps",
        "phases.again.patch_dropout=0.75",
    )
    step = run.compile_train_step()

    assert len({id(executable) for _, executable in step.phases}) == 2
    assert step.select(1) is step.select(6)
    assert step.select(3) is step.select(20)
    assert step.select(2) is not step.select(3)
    assert run.training_flops(2) < 0.4 * run.training_flops_per_image * 32
    with rejects("step 21", "at most 20"):
        step.select(21)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (("model.block=axial", "model.pool=gap"), "all patches"),
        (("model.position_embedding=relative",), "relative"),
        (("objective.kind=masked_patch",), "masked_patch"),
        (("optimizer.trained=head",), "frozen features"),
    ],
)
def test_networks_that_need_all_patches(fields, rule):
    config = tiny.config(*fields, FIXED, HALF)
    with rejects("config.input.patch_dropout", rule):
        validate(config)
        runs.assemble_config(config)


def test_a_network_without_tokens():
    config = dataclasses.replace(
        tiny.config(FIXED, HALF),
        model=ModelConfig(name="R26x1"),
    )
    with rejects("config.input.patch_dropout=0.5", "R26x1, which has no tokens"):
        runs.assemble_config(config)


def test_a_phase_of_a_network_that_needs_all_patches():
    with rejects("config.phases.a.patch_dropout=0.5", "all patches"):
        runs.build(
            "model.block=axial",
            "model.pool=gap",
            "phases.a.until=5 steps",
            "phases.a.patch_dropout=0.5",
        )


def test_formulas_count_the_pixels_of_dropped_patches():
    sizes = {}
    for fields in ((FIXED,), (FIXED, HALF)):
        run = runs.build(*fields)
        sizes[fields] = step_memory(
            run.training_architecture,
            run.abstract_state,
            image_size=run.architecture.image_size,
            global_batch=run.config.global_batch,
            accumulation_steps=1,
            trained=None,
            tiled=False,
        )

    whole, half = sizes.values()
    assert half.batch == whole.batch > 0
    assert half.activations < whole.activations
