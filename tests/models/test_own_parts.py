"""Blocks, positions, poolings and heads of a user, named in a config, held to plain loops.

Networks of a user are trained in tests/docs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from tests.models.small_models import (
    abstract,
    apply,
    embedded,
    filled,
    images,
)
from vit_jax.config import ModelConfig, build_architecture, from_dict


class ScaledPositions(nnx.Module):
    """One learned row, times the number of the token."""

    def __init__(self, architecture, *, rngs):
        shape = (1, 1, architecture.width)
        row = jax.random.normal(rngs.params(), shape)
        self.row = nnx.Param(row)
        self.length = architecture.sequence_length

    def __call__(self):
        position_S = jnp.arange(1.0 * self.length)
        return self.row[...] * position_S[None, :, None]


class ShortPositions(ScaledPositions):
    def __call__(self):
        return super().__call__()[:, :1]


class GatedBlock(nnx.Module):
    """x + gate * tanh(x W): no attention."""

    def __init__(self, architecture, *, rngs):
        width = architecture.width
        sample = jax.random.normal(rngs.params(), (width, width))
        self.novelty = nnx.Param(sample / 8)
        self.gate = nnx.Param(jnp.full((width,), 0.5))

    def __call__(self, x_BSD, drop_fraction, key):
        hidden_BSD = jnp.tanh(x_BSD @ self.novelty[...])
        return x_BSD + self.gate[...] * hidden_BSD


class MaxPooling(nnx.Module):
    """gain * the largest value of each channel."""

    def __init__(self, architecture, *, rngs):
        self.gain = nnx.Param(jnp.full((architecture.width,), 2.0))

    def __call__(self, x_BSD):
        return self.gain[...] * x_BSD.max(axis=1)


class NoPooling(MaxPooling):
    def __call__(self, x_BSD):
        return x_BSD


class QuadraticHead(nnx.Module):
    """Logits that are linear in squares."""

    def __init__(self, architecture, *, rngs):
        shape = (architecture.width, architecture.num_classes)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape))

    def __call__(self, pooled_BD):
        features_BD = jnp.square(pooled_BD.astype(jnp.float32))
        return features_BD @ self.kernel[...], features_BD


class LogitsAlone(QuadraticHead):
    def __call__(self, pooled_BD):
        return super().__call__(pooled_BD)[0]


class TransposedHead(QuadraticHead):
    def __call__(self, pooled_BD):
        logits_BK, features_BD = super().__call__(pooled_BD)
        return logits_BK.T, features_BD


def needs_more(architecture, classes, *, rngs):
    """Not a constructor of a part: it needs another argument."""


def small(name="ViT-mu/4", **references):
    values = {"name": name, "compute_dtype": "float32"}
    if name.startswith("ViT"):
        values["depth"] = 3
    for field, part in references.items():
        values[field] = f"{__name__}:{part}"

    config = from_dict(ModelConfig, values)
    return build_architecture(
        config,
        image_size=(8, 12),
        num_classes=5,
    )


def test_positions_are_added_and_a_block_is_stacked_and_run_in_order():
    architecture = small(block="GatedBlock", position_embedding="ScaledPositions")
    model = filled(architecture)
    x = images(architecture)
    blocks = model.encoder.blocks

    assert model.positions().shape == (1, 7, 32)
    assert blocks.novelty.shape == (3, 32, 32)

    output = apply(model, x, intermediates=("blocks",))
    token_BSD = embedded(model, x) + model.positions()

    for layer in range(3):
        hidden_BSD = np.tanh(token_BSD @ blocks.novelty[layer])
        token_BSD = token_BSD + blocks.gate[layer] * hidden_BSD
        assert_allclose(
            output.blocks_LBSD[layer],
            token_BSD,
            rtol=1e-4,
            atol=1e-4,
        )

    assert output.attention_LBTQS is None

    message = "GatedBlock has no method with_attention"
    with pytest.raises(ValueError, match=message):
        apply(model, x, intermediates=("attention",))


def test_positions_of_another_shape_are_rejected():
    architecture = small(position_embedding="ShortPositions")
    message = r"ShortPositions returns positions \(1, 1, 32\) for \(1, 7, 32\)"

    model = filled(architecture)
    x = images(architecture)

    with pytest.raises(ValueError, match=message):
        apply(model, x)


def test_a_pooling_and_a_head():
    """The pooling sees patches only, the head the pooled vector.

    Their parameters lie under "pooling" and "head".
    """
    architecture = small(pool="MaxPooling", head="QuadraticHead")
    model = filled(architecture)

    output = apply(model, images(architecture))
    pooled_BD = model.pooling.gain[...] * np.asarray(output.tokens_BND).max(axis=1)
    features_BD = pooled_BD**2

    assert model.class_token is None
    assert architecture.sequence_length == 6
    assert architecture.is_standard is False
    assert_allclose(output.pooled_BD, pooled_BD, rtol=1e-6)
    assert_allclose(output.features_BD, features_BD, rtol=1e-6)
    assert_allclose(
        output.logits_BK,
        features_BD @ model.head.kernel[...],
        rtol=1e-4,
    )


def test_a_resnet_has_a_custom_head():
    architecture = small("R14x0.5", head="QuadraticHead")

    model = filled(architecture)
    x = images(architecture)

    output = apply(model, x)

    assert_allclose(
        output.features_BD,
        np.square(output.pooled_BD),
        rtol=1e-6,
    )


def test_a_resnet_has_no_custom_pooling():
    message = r"config\.model\.pool='\S+:MaxPooling'.*Use gap or None"

    with pytest.raises(ValueError, match=message):
        small("R14x0.5", pool="MaxPooling")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"pool": "NoPooling"},
            r"config\.model\.pool: NoPooling returns .*\(2, 6, 32\).*must be \(2, 32\)",
        ),
        (
            {"head": "LogitsAlone"},
            r"config\.model\.head: LogitsAlone returns .*Return \(logits_BK, features_BD\)",
        ),
        (
            {"head": "TransposedHead"},
            r"config\.model\.head: TransposedHead returns .*\(5, 2\).*must be .*\(2, 5\)",
        ),
        (
            {"head": "needs_more"},
            r"config\.model\.head='\S+needs_more' cannot be called with \(architecture, rngs=...\)",
        ),
    ],
)
def test_a_pooling_or_head_of_another_form_is_rejected(part, words):
    architecture = small(**part)
    with pytest.raises(ValueError, match=words):
        apply(filled(architecture), images(architecture))


@pytest.mark.parametrize(
    "field",
    ["network", "block", "position_embedding", "pool", "head"],
)
def test_a_reference_to_nothing_names_its_field(field):
    message = f"config.model.{field}='{__name__}:Missing'.* has no 'Missing'"

    with pytest.raises(ValueError, match=message):
        abstract(small(**{field: "Missing"}))
