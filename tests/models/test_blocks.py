"""Relative positions, positions in every block and axial blocks, against loops over their parameters in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import (
    FakeDevices,
    apply,
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
    options = {"name": "ViT-mu/4", "depth": 2, "compute_dtype": "float32"} | options
    return build_architecture(ModelConfig(**options), image_size=(8, 12), num_classes=5)


def heads(layer, x, num_heads=2):
    """A projection in float64, (B, S, T, h)."""
    kernel = np.float64(layer.kernel[...])
    bias = np.float64(layer.bias[...])

    return (np.float64(x) @ kernel + bias).reshape(*x.shape[:2], num_heads, -1)


def weights_by_loops(attention, x, key_of, sees):
    """The weights (B, T, S, S), one logit after the other, of a query to the tokens that it sees."""
    query = heads(attention.query, x)
    key = heads(attention.key, x)
    batch, length, num_heads, head_dim = query.shape
    weights = np.zeros((batch, num_heads, length, length))

    for b, t, q in np.ndindex(batch, num_heads, length):
        seen = [s for s in range(length) if sees(q, s)]
        logits = [query[b, q, t] @ (key[b, s, t] + key_of(q, s)) / np.sqrt(head_dim) for s in seen]
        weights[b, t, q, seen] = np.exp(logits) / np.exp(logits).sum()

    return weights


@functools.cache
def block_and_inputs(**options):
    architecture = small(**options)
    return architecture, filled(architecture), images(architecture)


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_relative_positions_add_the_product_of_query_and_offset(pool):
    _, model, x = block_and_inputs(position_embedding="relative", pool=pool)
    output = apply(model, x, intermediates=("attention", "blocks"))
    first = int(pool == "token")  # the place of the first patch

    for layer, (block, entering) in enumerate(
        zip(
            layers_of(model.encoder.blocks),
            (embedded(model, x), output.blocks_LBSD[0]),
            strict=True,
        )
    ):
        table = np.float64(block.attention.positions.table[...])
        assert table.shape == (11 + 3 * first, 16)

        def key_of(query, key, table=table):
            if query < first or key < first:  # a class token: as query, as key, as both
                return table[11 + (query >= first) + 2 * (query < first and key < first)]
            return table[query - key + 5]

        expected = weights_by_loops(
            block.attention,
            block.attention_norm(entering),
            key_of,
            lambda *_: True,
        )

        np.testing.assert_allclose(output.attention_LBTQS[layer], expected, rtol=1e-4, atol=1e-6)

    np.testing.assert_allclose(apply(model, x).logits_BK, output.logits_BK, rtol=1e-5, atol=1e-6)


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

    assert hasattr(model, "positions") == (layers == "shared")

    tokens = embedded(model, x)
    run_block = jax.jit(lambda block, x: block(x, 0.0, None))

    for layer, block in enumerate(layers_of(model.encoder.blocks)):
        positions = model.positions if layers == "shared" else block.positions
        tokens = run_block(block, tokens + positions())
        np.testing.assert_allclose(output.blocks_LBSD[layer], tokens, rtol=1e-4, atol=1e-4)

    if kind == "learned_1d":
        shapes = {
            name: leaf.shape
            for name, leaf in pytree.named_leaves(model).items()
            if "positions/table" in name
        }
        every = {"encoder/blocks/positions/table": (2, 1, 7, 32)}
        shared = {"positions/table": (1, 7, 32)}

        assert shapes == (every if layers == "every" else shared)


def test_axial_attention_is_full_attention_with_all_but_a_line_masked():
    """First along rows, then along columns; relative positions are offsets within a line."""
    architecture, model, x = block_and_inputs(block="axial", position_embedding="relative")
    assert architecture.pool == "gap"

    output = apply(model, x, intermediates=("attention", "blocks"))
    assert output.attention_LBTQS.shape == (4, 2, 2, 6, 6)

    place = [np.unravel_index(token, GRID) for token in range(6)]
    tokens = model.embedding(x)
    attentions = iter(output.attention_LBTQS)

    for layer, block in enumerate(layers_of(model.encoder.blocks)):
        for half, axis in ((block.rows, 1), (block.columns, 0)):
            table = np.float64(half.attention.positions.table[...])
            norm = half.attention_norm(tokens)

            def key_of(query, key, table=table, axis=axis):
                return table[place[query][axis] - place[key][axis] + GRID[axis] - 1]

            def is_in_line(query, key, axis=axis):
                return place[query][1 - axis] == place[key][1 - axis]

            expected = weights_by_loops(half.attention, norm, key_of, is_in_line)
            np.testing.assert_allclose(next(attentions), expected, rtol=1e-4, atol=1e-6)

            mixture = np.einsum("btqs,bsth->bqth", expected, heads(half.attention.value, norm))
            tokens = tokens + half.attention.out(jnp.float32(mixture.reshape(tokens.shape)))
            tokens = tokens + half.mlp(half.mlp_norm(tokens))

        np.testing.assert_allclose(output.blocks_LBSD[layer], tokens, rtol=1e-4, atol=1e-4)

    np.testing.assert_allclose(apply(model, x).logits_BK, output.logits_BK, rtol=1e-5, atol=1e-6)


NEW = [
    {"position_embedding": "relative"},
    {"position_layers": "every"},
    {"position_layers": "shared", "position_embedding": "learned_2d"},
    {"block": "axial", "position_embedding": "relative", "pool": "map"},
]


@functools.cache
def gradient(**options):
    _, model, x = block_and_inputs(**options)

    def loss(model):
        output = model(x, dropout_key=jax.random.key(5))
        return jnp.square(output.logits_BK).mean() + jnp.square(output.tokens_BND[:, :, :4]).mean()

    return jax.jit(jax.grad(loss))(model)


@pytest.mark.newest
@pytest.mark.parametrize("options", NEW, ids=str)
def test_every_parameter_learns(options):
    """Rows of tables one by one: no token, offset or class token is left out."""
    for name, leaf in pytree.named_leaves(gradient(**options)).items():
        if not name.endswith("key/bias"):  # it moves all logits of a query alike
            assert (
                np.abs(leaf).max(-1).min() > 0 if "positions/" in name else np.abs(leaf).max() > 0
            ), name


@pytest.mark.slow
def test_rematerialisation_and_unrolling_change_no_gradient():
    options = {"block": "axial", "position_embedding": "relative", "dropout_fraction": 0.1}
    options["stochastic_depth_fraction"] = 0.2

    for change in (
        {"remat": "dots"},
        {"scan_unroll": 2},
    ):  # together they take XLA three times as long
        assert_same_up_to_rounding(gradient(**options), gradient(**options, **change))


@pytest.mark.parametrize("block", [None, pytest.param("axial", marks=pytest.mark.slow)])
def test_tokens_of_a_block_have_one_dimension_on_gpus(block, monkeypatch):
    """It changes no value and no gradient, with the same elements and examples dropped."""
    ranks = {}
    name_it = blocks.checkpoint_name

    def checkpoint_name(x, name):
        ranks.setdefault(name, x.ndim)
        return name_it(x, name)

    for module in (blocks, mlp, norm):
        monkeypatch.setattr(module, "checkpoint_name", checkpoint_name)

    options = {
        "block": block,
        "dropout_fraction": 0.1,
        "stochastic_depth_fraction": 0.5,
        "scan_unroll": 1,
    }
    gradients = []

    for platform, rank in (("gpu", 2), ("cpu", 3)):
        ranks.clear()
        with trace_for(FakeDevices(platform=platform, compute_capability=None)):
            gradients.append(gradient.__wrapped__(**options))  # the cache ignores the devices

        assert {ranks[name] for name in ("statistics", "middle", "hidden")} == {rank}

    assert_same_up_to_rounding(*gradients)


@pytest.mark.parametrize("block", [None, "axial"])
def test_the_kernel_computes_what_the_default_form_computes(block):
    _, model, x = block_and_inputs(block=block)
    _, by_kernel, _ = block_and_inputs(block=block, attention="pallas")

    np.testing.assert_allclose(
        apply(by_kernel, x).logits_BK,
        apply(model, x).logits_BK,
        rtol=1e-4,
        atol=1e-5,
    )
