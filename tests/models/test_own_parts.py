"""Networks, blocks and positions of the user's own, named in a config, against plain loops over their parameters."""

import numpy as np
import pytest

from tests.models import own_parts
from tests.models.small_models import abstract, apply, filled, images
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture, from_dict
from vit_jax.models.flops import forward_macs

HERE = "tests.models.own_parts"


def small(**options):
    config = from_dict(ModelConfig, {"name": "ViT-mu/4", "depth": 3, "compute_dtype": "float32"} | options)
    return build_architecture(config, image_size=(8, 12), num_classes=5)


def test_a_block_is_stacked_and_run_in_order():
    architecture = small(block=f"{HERE}:GatedBlock")
    model, x = filled(architecture), images(architecture)
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


def test_positions_of_ones_own_are_added():
    architecture = small(position_embedding=f"{HERE}:ScaledPositions")
    model, x = filled(architecture), images(architecture)
    without = small(position_embedding="none")
    plain = pytree.from_named_leaves(abstract(without), pytree.named_leaves(model))
    assert model.positions().shape == (1, 7, 32)
    assert not np.allclose(apply(model, x).logits_BK, apply(plain, x).logits_BK)
    with pytest.raises(ValueError, match=r"ShortPositions returns positions \(1, 1, 32\) for \(1, 7, 32\)"):
        apply(filled(small(position_embedding=f"{HERE}:ShortPositions")), x)


def test_a_network_of_ones_own():
    architecture = small(network=f"{HERE}:MeanColour")
    model, x = filled(architecture), images(architecture)
    assert isinstance(model, own_parts.MeanColour)
    output = apply(model, x)
    assert output.logits_BK.shape == (2, 5)
    assert output.tokens_BND is None
    assert forward_macs(model, architecture) == 5 * 3 * 3 + 3 * 5


@pytest.mark.parametrize("field", ["network", "block", "position_embedding"])
def test_a_reference_to_nothing_names_its_field(field):
    with pytest.raises(ValueError, match=f"config.model.{field}='{HERE}:Missing'.* has no 'Missing'"):
        abstract(small(**{field: f"{HERE}:Missing"}))
