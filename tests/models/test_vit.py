"""Vision Transformers: shapes, intermediates, gradients, dropout and initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from numpy.testing import assert_allclose, assert_array_equal

from tests.models.small_models import (
    FakeDevices,
    abstract,
    apply,
    assert_same_up_to_rounding,
    embedded,
    filled,
    find_equations,
    images,
    layers_of,
)
from vit_jax import pytree
from vit_jax.config import Architecture, ModelConfig, build_architecture
from vit_jax.kernels.devices import trace_for
from vit_jax.models import build_model
from vit_jax.models.dropout import drop_examples


def small(
    image_size=(16, 8),
    num_classes=10,
    **options,
) -> Architecture:
    defaults = {
        "name": "ViT-mu/4",
        "depth": 2,
        "compute_dtype": "float32",
    }
    config = ModelConfig(**defaults | options)
    return build_architecture(
        config,
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
def test_shapes_and_dtypes_for_any_height_and_width(
    pool,
    positions,
    head,
    dtype,
):
    architecture = small(
        image_size=(24, 8),
        pool=pool,
        position_embedding=positions,
        head=head,
        compute_dtype=dtype,
    )
    model = filled(architecture)
    length = 12 + (pool == "token")

    output = apply(
        model,
        images(architecture),
        intermediates=("blocks", "attention"),
    )

    assert output.logits_BK.shape == (2, 10)
    assert output.tokens_BND.shape == (2, 6 * 2, 32)
    assert output.features_BD.shape == (2, 32)
    assert output.pooled_BD.shape == (2, 32)
    assert output.blocks_LBSD.shape == (2, 2, length, 32)
    assert output.attention_LBTQS.shape == (2, 2, 2, length, length)
    sums = output.attention_LBTQS.sum(-1)
    assert output.logits_BK.dtype == jnp.float32
    assert output.attention_LBTQS.dtype == jnp.float32
    assert output.tokens_BND.dtype == dtype
    assert output.blocks_LBSD.dtype == dtype
    assert_allclose(sums, 1.0, rtol=1e-5)
    for leaf in jax.tree.leaves(model):
        assert leaf.dtype == jnp.float32


def test_patch_embedding_equals_a_convolution():
    architecture = small(name="ViT-mu/4x2", image_size=(16, 12))
    embedding = filled(architecture).embedding
    x = images(architecture)
    map_BHWD = jax.lax.conv_general_dilated(
        x,
        embedding.kernel[...],
        (4, 2),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    patches_BND = map_BHWD.reshape(2, -1, 32)
    expected = patches_BND + embedding.bias[...]

    assert architecture.grid == (4, 6)
    assert_allclose(embedding(x), expected, atol=1e-5)


def test_a_border_that_no_patch_covers_is_ignored():
    architecture = small(name="ViT-mu/4x2", image_size=(16, 12))
    embedding = filled(architecture).embedding
    x = images(architecture)

    larger = jnp.pad(
        x,
        ((0, 0), (0, 3), (0, 1), (0, 0)),
        constant_values=jnp.nan,
    )

    assert_array_equal(embedding(larger), embedding(x))


def compute_attention_weights(attention, normed):
    """Return the attention weights of two heads in float64, by definition."""

    def project(layer):
        kernel = np.float64(layer.kernel[...])
        projected = normed @ kernel + layer.bias[...]
        return projected.reshape(*normed.shape[:2], 2, -1)

    query = project(attention.query)
    key = project(attention.key)
    products = np.einsum("bqth,bsth->btqs", query, key)
    logits = products / np.sqrt(query.shape[-1])
    return scipy.special.softmax(logits, axis=-1)


def test_intermediates_are_the_blocks_one_after_the_other():
    """The forward passes are compared with the libraries' in tests/weights/test_reference_logits."""
    architecture = small(
        head="mlp",
        remat="full",
        scan_unroll=2,
    )
    model = filled(architecture)
    x = images(architecture)
    output = apply(
        model,
        x,
        intermediates=("blocks", "attention"),
    )
    tokens = embedded(model, x) + model.positions()

    @jax.jit
    def run_block(block, x):
        return block(x, 0.0, None)

    blocks = layers_of(model.encoder.blocks)
    for layer, block in enumerate(blocks):
        normed = np.float64(block.attention_norm(tokens))
        weights = compute_attention_weights(block.attention, normed)
        assert_allclose(
            output.attention_LBTQS[layer],
            weights,
            rtol=1e-4,
            atol=1e-5,
        )

        tokens = run_block(block, tokens)
        assert_allclose(
            output.blocks_LBSD[layer],
            tokens,
            rtol=1e-4,
            atol=1e-4,
        )

    normed = model.encoder.norm(tokens)
    pooled = normed[:, 0]
    logits, _ = model.head(pooled)

    assert_allclose(
        output.pooled_BD,
        pooled,
        rtol=1e-4,
        atol=1e-4,
    )
    assert_allclose(
        output.logits_BK,
        logits,
        rtol=1e-4,
        atol=1e-4,
    )


def count_outputs(intermediates=None):
    """Return the numbers of outputs of the scan over blocks and of the program."""
    architecture = small(dropout_fraction=0.1, remat="dots")
    model = abstract(architecture)
    x = images(architecture)
    options = {"dropout_key": jax.random.key(0)}
    if intermediates is not None:
        options["intermediates"] = intermediates

    def run(model, x):
        return model(x, **options)

    program = jax.make_jaxpr(run)(model, x)
    (scan,) = find_equations(program, "scan")
    num_outputs = len(program.jaxpr.outvars)
    return len(scan.outvars), num_outputs


@pytest.mark.parametrize(
    ("intermediates", "expected"),
    [
        (None, (1, 5)),
        ((), (1, 5)),
        (("blocks",), (2, 6)),
        (("attention",), (2, 6)),
        (("blocks", "attention"), (3, 7)),
    ],
)
def test_intermediates_not_asked_for_add_nothing_to_the_program(intermediates, expected):
    """The scan carries the tokens and returns no more; every intermediate adds one output to it."""
    assert count_outputs(intermediates) == expected


@pytest.mark.parametrize(
    "intermediates",
    [
        "blocks",
        ("stages",),
        ("blocks", "block"),
    ],
)
def test_unknown_intermediates_are_rejected(intermediates):
    message = "give a tuple of names that this network has: blocks, attention"

    with pytest.raises(ValueError, match=message):
        count_outputs(intermediates)


@pytest.mark.newest
@pytest.mark.parametrize(
    "change",
    [
        {"remat": "dots"},
        {"remat": "full", "scan_unroll": 2},
    ],
    ids=str,
)
def test_rematerialisation_and_unrolling_change_no_gradient(change):
    plain = small(dropout_fraction=0.1)
    changed = small(dropout_fraction=0.1, **change)

    assert_same_up_to_rounding(gradient(plain), gradient(changed))


@pytest.mark.parametrize(
    ("platform", "options", "unroll"),
    [
        ("tpu", {}, 3),
        ("tpu", {"remat": "dots"}, 3),
        ("tpu", {"remat": "attention"}, 1),
        ("tpu", {"remat": "full"}, 1),
        (
            "tpu",
            {"remat": "full", "scan_unroll": 3},
            3,
        ),
        ("tpu", {"scan_unroll": 1}, 1),
        ("gpu", {"remat": "dots"}, 3),
        ("gpu", {"remat": "full"}, 1),
        ("cpu", {"remat": "dots"}, 1),
    ],
)
def test_blocks_are_in_no_loop_on_accelerators_unless_little_is_kept(
    platform,
    options,
    unroll,
):
    architecture = small(depth=3, **options)
    model = abstract(architecture)
    x = images(architecture)

    def compute_logits(model, x):
        return model(x).logits_BK

    devices = FakeDevices(
        platform=platform,
        compute_capability=None,
        num_devices=2,  # on one TPU no scan is left
    )
    with trace_for(devices):
        program = jax.make_jaxpr(compute_logits)(model, x)
    (loop,) = find_equations(program, "scan")

    assert loop.params["unroll"] == unroll


@functools.cache
def gradient(architecture):
    x = images(architecture)
    key = jax.random.key(5)

    @jax.jit
    @jax.grad
    def differentiate(model):
        output = model(x, dropout_key=key)
        return jnp.square(output.logits_BK).mean()

    return differentiate(filled(architecture))


def test_dropout_needs_a_key_and_is_a_function_of_it():
    architecture = small(dropout_fraction=0.5)
    model = filled(architecture)
    x = images(architecture)

    def compute_logits(seed):
        key = jax.random.key(seed)
        output = apply(model, x, dropout_key=key)
        return output.logits_BK

    plain = apply(model, x).logits_BK
    first = compute_logits(seed=0)
    again = compute_logits(seed=0)
    other = compute_logits(seed=1)

    assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, plain)


def test_stochastic_depth_drops_whole_examples():
    branch = jnp.ones((1000, 3, 4))

    key = jax.random.key(0)
    kept = drop_examples(
        branch,
        0.25,
        key,
        site=0,
        batch=1000,
    )
    example = kept[:, :1, :1]
    values = np.unique(example)

    # An example is kept or dropped as a whole.
    assert (kept == example).all()
    assert_allclose(values, [0.0, 1 / 0.75], rtol=1e-6)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.1)


def test_stochastic_depth_spares_the_first_block():
    architecture = small(depth=1, stochastic_depth_fraction=0.9)
    model = filled(architecture)
    x = images(architecture)

    trained = apply(model, x, dropout_key=jax.random.key(1))
    evaluated = apply(model, x)

    assert_allclose(
        trained.logits_BK,
        evaluated.logits_BK,
        rtol=1e-5,
    )


def check_initial_value(name, leaf):
    if name in STANDARD_DEVIATIONS:
        expected = pytest.approx(STANDARD_DEVIATIONS[name], rel=0.05)
        assert float(leaf.std()) == expected, name
    elif name.endswith("scale"):
        assert (leaf == 1).all(), name
    elif name == "head/linear/bias":
        assert (leaf == -10).all(), name
    elif name.endswith("bias") or name in ZEROS:
        assert (leaf == 0).all(), name


STANDARD_DEVIATIONS = {
    "positions/table": 0.02,
    "encoder/blocks/mlp/expand/bias": 1e-6,
    "encoder/blocks/mlp/contract/bias": 1e-6,
    "embedding/kernel": 768**-0.5,
}
ZEROS = ("class_token", "head/linear/kernel")


@functools.partial(jax.jit, static_argnums=0)
def initialise(architecture):
    return build_model(architecture, jax.random.key(0))


def test_the_spread_of_initial_positions_is_chosen():
    architecture = small(position_stddev=0.5, width=256)

    model = initialise(architecture)
    table = model.positions.table[...]

    assert float(table.std()) == pytest.approx(0.5, rel=0.05)


def test_initial_values():
    """Attention kernels are Xavier uniform as one matrix; the head gives its bias for any image."""
    architecture = small(
        name="ViT-Ti/16",
        image_size=(64, 64),
        head_bias_init=-10.0,
    )
    model = initialise(architecture)
    expected = abstract(architecture)

    assert jax.tree.structure(model) == jax.tree.structure(expected)
    for name, leaf in pytree.name_leaves(model).items():
        check_initial_value(name, leaf)

    limit = (6 / (192 + 192)) ** 0.5
    attention = model.encoder.blocks.attention
    for projection in (
        attention.query,
        attention.key,
        attention.value,
        attention.out,
    ):
        first, second = projection.kernel[...]
        largest = float(jnp.abs(first).max())
        assert 0.99 * limit < largest <= limit
        # Layers must not start alike.
        assert not np.array_equal(first, second)

    output = apply(model, images(architecture))
    assert output.logits_BK.tolist() == 2 * [10 * [-10.0]]
