"""Relative positions, positions in every block and axial blocks, held to loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.models.small_models import (
    FakeDevices,
    apply,
    assert_intermediates_change_nothing,
    assert_same_up_to_rounding,
    embedded,
    filled,
    images,
    layers_of,
)
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.kernels.devices import trace_for
from vit_jax.models import block as blocks
from vit_jax.models import mlp, norm

GRID = (2, 3)


def small(**options):
    defaults = {
        "name": "ViT-mu/4",
        "depth": 2,
        "compute_dtype": "float32",
    }
    config = ModelConfig(**defaults | options)
    return build_architecture(
        config,
        image_size=(8, 12),
        num_classes=5,
    )


def heads(layer, x, num_heads=2):
    """A projection in float64, (B, S, T, h)."""
    kernel = np.float64(layer.kernel[...])
    bias = np.float64(layer.bias[...])

    projected = np.float64(x) @ kernel + bias
    return projected.reshape(*x.shape[:2], num_heads, -1)


def compute_weights_by_loops(attention, x, key_of, sees):
    """Return the weights (B, T, S, S) of each query to the tokens that it sees, logit by logit."""
    query = heads(attention.query, x)
    key = heads(attention.key, x)
    batch, length, num_heads, head_dim = query.shape
    weights = np.zeros((batch, num_heads, length, length))

    for b, t, q in np.ndindex(batch, num_heads, length):
        logits = np.full(length, -np.inf)
        for s in range(length):
            if sees(q, s):
                seen_key = key[b, s, t] + key_of(q, s)
                logits[s] = query[b, q, t] @ seen_key
        exponentials = np.exp(logits / np.sqrt(head_dim))
        weights[b, t, q] = exponentials / exponentials.sum()

    return weights


def sees_all(query, key):
    return True


@functools.cache
def block_and_inputs(**options):
    architecture = small(**options)
    return architecture, filled(architecture), images(architecture)


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_relative_positions_add_the_product_of_query_and_offset(pool):
    _, model, x = block_and_inputs(position_embedding="relative", pool=pool)
    output = apply(
        model,
        x,
        intermediates=("attention", "blocks"),
    )
    # The index of the first patch.
    first = int(pool == "token")
    inputs = (embedded(model, x), output.blocks_LBSD[0])

    for layer, block in enumerate(layers_of(model.encoder.blocks)):
        table = np.float64(block.attention.positions.table[...])
        assert table.shape == (11 + 3 * first, 16)

        def key_of(query, key, table=table):
            # Three rows for a class token: as key, as query, as both.
            if query < first and key < first:
                return table[13]
            if key < first:
                return table[12]
            if query < first:
                return table[11]
            return table[query - key + 5]

        normed = block.attention_norm(inputs[layer])
        expected = compute_weights_by_loops(
            block.attention,
            normed,
            key_of,
            sees_all,
        )

        assert_allclose(
            output.attention_LBTQS[layer],
            expected,
            rtol=1e-4,
            atol=1e-6,
        )

    assert_intermediates_change_nothing(model, x, output)


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ("every", "learned_1d"),
        ("every", "learned_2d"),
        ("shared", "learned_1d"),
        ("shared", "sincos2d"),
    ],
)
def test_positions_are_added_to_the_input_of_every_block(layers, kind):
    _, model, x = block_and_inputs(position_layers=layers, position_embedding=kind)
    output = apply(model, x, intermediates=("blocks",))

    assert (model.positions is not None) == (layers == "shared")

    tokens = embedded(model, x)

    @jax.jit
    def run_block(block, x):
        return block(x, 0.0, None)

    for layer, block in enumerate(layers_of(model.encoder.blocks)):
        positions = model.positions if layers == "shared" else block.positions
        tokens = run_block(block, tokens + positions())
        assert_allclose(
            output.blocks_LBSD[layer],
            tokens,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize(
    ("layers", "name", "shape"),
    [
        ("every", "encoder/blocks/positions/table", (2, 1, 7, 32)),
        ("shared", "positions/table", (1, 7, 32)),
    ],
)
def test_tables_of_positions_of_blocks(layers, name, shape):
    _, model, _ = block_and_inputs(position_layers=layers, position_embedding="learned_1d")

    leaves = pytree.name_leaves(model)
    tables = [leaf for leaf in leaves if "positions/table" in leaf]

    assert tables == [name]
    assert leaves[name].shape == shape


CELL = [np.unravel_index(token, GRID) for token in range(6)]


def compute_weights_along(half, tokens, axis):
    """Return the weights (B, T, S, S) of each patch to those of its line along an axis."""
    table = np.float64(half.attention.positions.table[...])

    def key_of(query, key):
        offset = CELL[query][axis] - CELL[key][axis]
        return table[offset + GRID[axis] - 1]

    def is_in_line(query, key):
        return CELL[query][1 - axis] == CELL[key][1 - axis]

    return compute_weights_by_loops(
        half.attention,
        half.attention_norm(tokens),
        key_of,
        is_in_line,
    )


def run_half(half, tokens, weights):
    """Return the tokens after half of an axial block with these attention weights."""
    normed = half.attention_norm(tokens)
    attended = np.einsum(
        "btqs,bsth->bqth",
        weights,
        heads(half.attention.value, normed),
    )
    attended = jnp.float32(attended.reshape(tokens.shape))
    tokens = tokens + half.attention.out(attended)
    return tokens + half.mlp(half.mlp_norm(tokens))


def test_axial_attention_is_full_attention_with_all_but_a_line_masked():
    """First along rows, then along columns; relative positions are offsets within a line."""
    architecture, model, x = block_and_inputs(block="axial", position_embedding="relative")
    output = apply(
        model,
        x,
        intermediates=("attention", "blocks"),
    )

    assert architecture.pool == "gap"
    assert output.attention_LBTQS.shape == (4, 2, 2, 6, 6)

    tokens = model.embedding(x)
    attentions = iter(output.attention_LBTQS)
    stack = layers_of(model.encoder.blocks)
    for layer, block in enumerate(stack):
        for half, axis in ((block.rows, 1), (block.columns, 0)):
            weights = compute_weights_along(half, tokens, axis)
            assert_allclose(
                next(attentions),
                weights,
                rtol=1e-4,
                atol=1e-6,
            )
            tokens = run_half(half, tokens, weights)

        assert_allclose(
            output.blocks_LBSD[layer],
            tokens,
            rtol=1e-4,
            atol=1e-4,
        )

    assert_intermediates_change_nothing(model, x, output)


NEW = [
    {"position_embedding": "relative"},
    {"position_layers": "every"},
    {"position_layers": "shared", "position_embedding": "learned_2d"},
    {
        "block": "axial",
        "position_embedding": "relative",
        "pool": "map",
    },
]


@functools.cache
def gradient(**options):
    _, model, x = block_and_inputs(**options)

    def loss(model):
        output = model(x, dropout_key=jax.random.key(5))
        tokens = output.tokens_BND[:, :, :4]
        logits_loss = jnp.square(output.logits_BK).mean()
        return logits_loss + jnp.square(tokens).mean()

    return jax.jit(jax.grad(loss))(model)


@pytest.mark.newest
@pytest.mark.parametrize("options", NEW, ids=str)
def test_every_parameter_learns(options):
    """Also every row of a table: every token, offset and class token."""
    for name, leaf in pytree.name_leaves(gradient(**options)).items():
        # The bias of keys moves all logits of a query alike.
        if name.endswith("key/bias"):
            continue

        magnitude = np.abs(leaf)
        if "positions/" in name:
            assert magnitude.max(-1).min() > 0, name
        else:
            assert magnitude.max() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"remat": "dots"},
        {"scan_unroll": 2},
    ],
    ids=str,
)
def test_rematerialisation_and_unrolling_change_no_gradient(change):
    """One at a time: together they take XLA three times as long."""
    options = {
        "block": "axial",
        "position_embedding": "relative",
        "dropout_fraction": 0.1,
        "stochastic_depth_fraction": 0.2,
    }

    assert_same_up_to_rounding(
        gradient(**options),
        gradient(**options, **change),
    )


@pytest.mark.parametrize(
    "block",
    [None, pytest.param("axial", marks=pytest.mark.slow)],
)
def test_tokens_of_a_block_have_one_dimension_on_gpus(block, monkeypatch):
    """It changes no value and no gradient, with the same elements and examples dropped."""
    ranks = {}
    name_activation = blocks.checkpoint_name

    def record_rank(x, name):
        ranks.setdefault(name, x.ndim)
        return name_activation(x, name)

    for module in (blocks, mlp, norm):
        monkeypatch.setattr(module, "checkpoint_name", record_rank)

    options = {
        "block": block,
        "dropout_fraction": 0.1,
        "stochastic_depth_fraction": 0.5,
        "scan_unroll": 1,
    }
    gradients = []

    for platform, rank in (("gpu", 2), ("cpu", 3)):
        ranks.clear()
        devices = FakeDevices(platform=platform, compute_capability=None)
        with trace_for(devices):
            # Without the cache, which ignores the devices.
            gradients.append(gradient.__wrapped__(**options))

        for name in ("statistics", "middle", "hidden"):
            assert ranks[name] == rank

    assert_same_up_to_rounding(*gradients)


@pytest.mark.parametrize("block", [None, "axial"])
def test_the_kernel_computes_what_the_default_form_computes(block):
    _, model, x = block_and_inputs(block=block)
    _, model_with_kernel, _ = block_and_inputs(block=block, attention="pallas")

    logits = apply(model, x).logits_BK
    by_kernel = apply(model_with_kernel, x).logits_BK

    assert_allclose(by_kernel, logits, rtol=1e-4, atol=1e-5)
