import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import (
    FakeDevices,
    abstract,
    apply,
    assert_same_up_to_rounding,
    embedded,
    filled,
    images,
    layers_of,
)
from vit_jax import pytree
from vit_jax.config import Architecture, ModelConfig, build_architecture
from vit_jax.kernels.devices import trace_for
from vit_jax.models import build_model
from vit_jax.models.dropout import drop_examples


def small(image_size=(16, 8), num_classes=10, **options) -> Architecture:
    options = {"name": "ViT-mu/4", "depth": 2, "compute_dtype": "float32"} | options
    return build_architecture(
        ModelConfig(**options),
        image_size=image_size,
        num_classes=num_classes,
    )


@pytest.mark.parametrize(
    ("pool", "positions", "head", "dtype"),
    [
        ("token", "learned_1d", "mlp", "float32"),
        ("token", "learned_2d", "linear", "bfloat16"),
        ("gap", "sincos2d", "mlp", "bfloat16"),
        ("gap", "learned_2d", "linear", "float32"),
        ("map", "none", "linear", "float32"),
        ("map", "learned_1d", "mlp", "bfloat16"),
    ],
)
def test_shapes_and_dtypes_for_any_height_and_width(pool, positions, head, dtype):
    options = {"pool": pool, "position_embedding": positions, "head": head, "compute_dtype": dtype}
    architecture = small(image_size=(24, 8), **options)
    model = filled(architecture)
    output = apply(model, images(architecture), intermediates=("blocks", "attention"))
    length = 12 + (pool == "token")

    assert output.logits_BK.shape == (2, 10)
    assert output.tokens_BND.shape == (2, 6 * 2, 32)
    assert output.features_BD.shape == output.pooled_BD.shape == (2, 32)
    assert output.blocks_LBSD.shape == (2, 2, length, 32)
    assert output.attention_LBTQS.shape == (2, 2, 2, length, length)
    assert output.logits_BK.dtype == output.attention_LBTQS.dtype == jnp.float32
    assert output.tokens_BND.dtype == output.blocks_LBSD.dtype == jnp.dtype(dtype)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
    np.testing.assert_allclose(output.attention_LBTQS.sum(-1), 1.0, rtol=1e-5)


def test_patch_embedding_equals_a_convolution():
    architecture = small(name="ViT-mu/4x2", image_size=(16, 12))
    assert architecture.grid == (4, 6)

    embedding = filled(architecture).embedding
    x = images(architecture)
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(
        x,
        embedding.kernel[...],
        (4, 2),
        "VALID",
        dimension_numbers=numbers,
    )

    np.testing.assert_allclose(
        embedding(x),
        expected.reshape(2, -1, 32) + embedding.bias[...],
        atol=1e-5,
    )

    larger = jnp.pad(
        x,
        ((0, 0), (0, 3), (0, 1), (0, 0)),
        constant_values=jnp.nan,
    )  # a border that no patch covers

    np.testing.assert_array_equal(embedding(larger), embedding(x))


def test_taps_are_the_blocks_one_after_the_other():
    """The forward passes are compared with the libraries' in tests/weights/test_reference_logits."""
    architecture = small(head="mlp", remat="full", scan_unroll=2)
    model = filled(architecture)
    x = images(architecture)
    output = apply(model, x, intermediates=("blocks", "attention"))
    tokens = embedded(model, x) + model.positions()
    run_block = jax.jit(lambda block, x: block(x, 0.0, None))

    for layer, block in enumerate(layers_of(model.encoder.blocks)):
        normed = np.float64(block.attention_norm(tokens))
        query, key = (
            (normed @ np.float64(project.kernel[...]) + project.bias[...]).reshape(
                *normed.shape[:2],
                2,
                -1,
            )
            for project in (block.attention.query, block.attention.key)
        )
        logits = np.einsum("bqth,bsth->btqs", query, key) / np.sqrt(query.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)

        np.testing.assert_allclose(output.attention_LBTQS[layer], weights, rtol=1e-4, atol=1e-5)

        tokens = run_block(block, tokens)
        np.testing.assert_allclose(output.blocks_LBSD[layer], tokens, rtol=1e-4, atol=1e-4)

    pooled = model.encoder.norm(tokens)[:, 0]
    np.testing.assert_allclose(output.pooled_BD, pooled, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(output.logits_BK, model.head(pooled)[0], rtol=1e-4, atol=1e-4)


def test_intermediates_not_asked_for_add_nothing_to_the_program():
    """The scan over blocks carries the tokens and returns no more; every intermediate adds one output to it."""
    architecture = small(dropout_fraction=0.1, remat="dots")
    arguments = (
        abstract(architecture),
        jax.ShapeDtypeStruct((2, *architecture.image_size, 3), "float32"),
    )

    def outputs_of_scan(**options):
        jaxpr = jax.make_jaxpr(lambda model, x: model(x, dropout_key=jax.random.key(0), **options))(
            *arguments
        )
        (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]

        return len(scan.outvars), len(jaxpr.jaxpr.outvars)

    assert outputs_of_scan() == outputs_of_scan(intermediates=()) == (1, 5)
    assert (
        outputs_of_scan(intermediates=("blocks",))
        == outputs_of_scan(intermediates=("attention",))
        == (2, 6)
    )
    assert outputs_of_scan(intermediates=("blocks", "attention")) == (3, 7)

    for intermediates in ("blocks", ("stages",), ("blocks", "block")):
        with pytest.raises(
            ValueError, match="give a tuple of names that this network has: blocks, attention"
        ):
            outputs_of_scan(intermediates=intermediates)


@pytest.mark.newest
@pytest.mark.parametrize(
    "change",
    [{"remat": "dots"}, {"remat": "full", "scan_unroll": 2}],
    ids=str,
)
def test_rematerialisation_and_unrolling_change_no_gradient(change):
    assert_same_up_to_rounding(
        *(gradient(small(dropout_fraction=0.1, **options)) for options in ({}, change))
    )


@pytest.mark.parametrize(
    ("platform", "options", "unroll"),
    [
        ("tpu", {}, 3),
        ("tpu", {"remat": "dots"}, 3),
        ("tpu", {"remat": "attention"}, 1),
        ("tpu", {"remat": "full"}, 1),
        ("tpu", {"remat": "full", "scan_unroll": 3}, 3),
        ("tpu", {"scan_unroll": 1}, 1),
        ("gpu", {"remat": "dots"}, 3),
        ("gpu", {"remat": "full"}, 1),
        ("cpu", {"remat": "dots"}, 1),
    ],
)
def test_blocks_are_in_no_loop_on_accelerators_unless_little_is_kept(platform, options, unroll):
    architecture = small(depth=3, **options)
    with trace_for(FakeDevices(platform=platform, compute_capability=None)):
        program = jax.make_jaxpr(lambda model, x: model(x).logits_BK)(
            abstract(architecture),
            images(architecture),
        )

    (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    assert loop.params["unroll"] == unroll


@functools.cache
def gradient(architecture):
    def loss(model):
        return jnp.square(
            model(images(architecture), dropout_key=jax.random.key(5)).logits_BK
        ).mean()

    return jax.jit(jax.grad(loss))(filled(architecture))


def test_dropout_needs_a_key_and_is_a_function_of_it():
    architecture = small(dropout_fraction=0.5)
    model = filled(architecture)
    x = images(architecture)
    plain = apply(model, x).logits_BK
    first, again, other = (
        apply(model, x, dropout_key=jax.random.key(seed)).logits_BK for seed in (0, 0, 1)
    )

    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, plain)


def test_stochastic_depth_spares_the_first_block_and_drops_whole_examples():
    branch = jnp.ones((1000, 3, 4))
    kept = drop_examples(branch, 0.25, jax.random.key(0))
    per_example = np.unique(np.asarray(kept).reshape(1000, -1), axis=1)

    assert per_example.shape == (1000, 1), "an example is kept or dropped as a whole"
    np.testing.assert_allclose(np.unique(kept), [0.0, 1 / 0.75], rtol=1e-6)
    assert abs(float(kept.mean()) - 1.0) < 0.1

    architecture = small(depth=1, stochastic_depth_fraction=0.9)
    model = filled(architecture)
    x = images(architecture)
    trained = apply(model, x, dropout_key=jax.random.key(1))

    np.testing.assert_allclose(trained.logits_BK, apply(model, x).logits_BK, rtol=1e-5)


STANDARD_DEVIATIONS = {
    "positions/table": 0.02,
    "encoder/blocks/mlp/expand/bias": 1e-6,
    "encoder/blocks/mlp/contract/bias": 1e-6,
    "embedding/kernel": (1 / 768) ** 0.5,
}


def test_the_spread_of_initial_positions_is_chosen():
    architecture = small(position_stddev=0.5, width=256)
    table = jax.jit(lambda: build_model(architecture, jax.random.key(0)).positions.table[...])()
    assert float(table.std()) == pytest.approx(0.5, rel=0.05)


def test_initial_values():
    """Attention kernels are Xavier uniform as one matrix; the head gives its bias for any image."""
    architecture = small(name="ViT-Ti/16", image_size=(64, 64), head_bias_init=-10.0)
    model = jax.jit(lambda: build_model(architecture, jax.random.key(0)))()

    assert jax.tree.structure(model) == jax.tree.structure(abstract(architecture))

    for name, leaf in pytree.named_leaves(model).items():
        if name in STANDARD_DEVIATIONS:
            assert float(leaf.std()) == pytest.approx(STANDARD_DEVIATIONS[name], rel=0.05), name
        elif name.endswith("scale"):
            assert (leaf == 1).all(), name
        elif name.endswith("bias") or name in ("class_token", "head/linear/kernel"):
            assert (leaf == (-10 if name == "head/linear/bias" else 0)).all(), name

    limit = (6 / (192 + 192)) ** 0.5
    attention = model.encoder.blocks.attention

    for projection in (attention.query, attention.key, attention.value, attention.out):
        kernel = projection.kernel[...]
        assert 0.99 * limit < float(jnp.abs(kernel).max()) <= limit
        assert not np.array_equal(kernel[0], kernel[1]), "layers must not start alike"

    logits = apply(model, images(architecture)).logits_BK
    np.testing.assert_array_equal(logits, np.full((2, 10), -10.0, np.float32))
