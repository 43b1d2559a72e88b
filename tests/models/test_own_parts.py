"""Blocks and positions of the user's own, named in a config, against plain loops over their parameters.

Networks of one's own are trained in tests/docs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small_models import abstract, apply, filled, images
from vit_jax.config import ModelConfig, build_architecture, from_dict


class ScaledPositions(nnx.Module):
    """One learned row, times the number of the token."""

    def __init__(self, architecture, *, rngs):
        self.row = nnx.Param(jax.random.normal(rngs.params(), (1, 1, architecture.width)))
        self.length = architecture.sequence_length

    def __call__(self):
        return self.row[...] * jnp.arange(self.length, dtype=jnp.float32)[None, :, None]


class ShortPositions(ScaledPositions):
    def __call__(self):
        return super().__call__()[:, :1]


class GatedBlock(nnx.Module):
    """x + gate * tanh(x W): no attention."""

    def __init__(self, architecture, *, rngs):
        self.novelty = nnx.Param(jax.random.normal(rngs.params(), (architecture.width, architecture.width)) / 8)
        self.gate = nnx.Param(jnp.full((architecture.width,), 0.5))

    def __call__(self, x_BSD, drop_fraction, key):
        return x_BSD + self.gate[...] * jnp.tanh(x_BSD @ self.novelty[...])


def small(**references):
    parts = {field: f"{__name__}:{name}" for field, name in references.items()}
    config = from_dict(ModelConfig, {"name": "ViT-mu/4", "depth": 3, "compute_dtype": "float32"} | parts)
    return build_architecture(config, image_size=(8, 12), num_classes=5)


def test_positions_are_added_and_a_block_is_stacked_and_run_in_order():
    architecture = small(block="GatedBlock", position_embedding="ScaledPositions")
    model, x = filled(architecture), images(architecture)
    assert model.positions().shape == (1, 7, 32)
    assert model.encoder.blocks.novelty.shape == (3, 32, 32)
    output = apply(model, x, taps=("blocks",))
    token_BSD = np.concatenate([np.broadcast_to(model.class_token[...], (2, 1, 32)), model.embedding(x)], 1)
    token_BSD = token_BSD + model.positions()
    for layer, (weights, gate) in enumerate(zip(model.encoder.blocks.novelty, model.encoder.blocks.gate, strict=True)):
        token_BSD = token_BSD + gate * np.tanh(token_BSD @ weights)
        np.testing.assert_allclose(output.blocks_LBSD[layer], token_BSD, rtol=1e-4, atol=1e-4)
    assert output.attention_LBTQS is None
    with pytest.raises(ValueError, match="GatedBlock has no method with_attention"):
        apply(model, x, taps=("attention",))


def test_positions_of_another_shape_are_refused():
    architecture = small(position_embedding="ShortPositions")
    with pytest.raises(ValueError, match=r"ShortPositions returns positions \(1, 1, 32\) for \(1, 7, 32\)"):
        apply(filled(architecture), images(architecture))


@pytest.mark.parametrize("field", ["network", "block", "position_embedding"])
def test_a_reference_to_nothing_names_its_field(field):
    with pytest.raises(ValueError, match=f"config.model.{field}='{__name__}:Missing'.* has no 'Missing'"):
        abstract(small(**{field: "Missing"}))
