"""Memory by formula: tiles as XLA lays them, what policies keep, where the peak is; tests/plan holds sums to XLA's."""

import pytest

from vit_jax.config import ModelConfig, build_architecture
from vit_jax.cost.memory import kept_bytes, padded_bytes, passing_bytes


def architecture(name="ViT-B/16", remat="full", **changes):
    config = ModelConfig(name=name, remat=remat, **changes)
    return build_architecture(config, image_size=(224, 224), num_classes=1000)


@pytest.mark.parametrize(
    ("shape", "itemsize", "num_bytes"),
    [
        ((), 4, 4),
        ((768,), 4, 1024 * 4),  # a vector fills whole registers, a short one a part
        ((1500,), 4, 2048 * 4),
        ((64,), 4, 128 * 4),
        ((12, 768, 12, 64), 4, 12 * 768 * 12 * 64 * 4),  # 768 along the lanes, 64 along the rows: nothing is wasted
        ((32, 5, 16, 80), 4, 32 * 5 * 16 * 128 * 4),  # 80 is the longest that the lanes can get
        ((2, 32, 56, 56, 32, 8), 4, 2 * 32 * 56 * 128 * 32 * 8 * 4),
        ((1, 1, 768), 4, 768 * 4),  # few rows have small tiles
        ((3, 768), 4, 4 * 768 * 4),
        ((12, 100), 4, 16 * 128 * 4),
    ],
)
def test_tiles(shape, itemsize, num_bytes):
    assert padded_bytes(shape, itemsize) == num_bytes


def test_full_keeps_the_input_of_each_block():
    assert kept_bytes(architecture(), 8, tiled=False) == 12 * 8 * 197 * 768 * 2


def test_dots_keeps_what_the_projections_gave():
    per_token = (3 + 1 + 1 + 4) * 768 * 2  # query, key, value; output and input; hidden
    assert kept_bytes(architecture(remat="dots"), 8, tiled=False) == 12 * 8 * 197 * per_token


def test_a_resnet_keeps_the_inputs_of_its_units():
    maps = 56**2 * (64 + 256 * 2) + 56**2 * 256 + 28**2 * 512 * 3 + 28**2 * 512 + 14**2 * 1024 * 5
    maps += 14**2 * 1024 + 7**2 * 2048 * 2
    root = 112**2 * 64
    assert kept_bytes(architecture("R50x1"), 4, tiled=False) == 4 * (maps + root) * 2


def test_model_shards_divide_heads_and_hidden_units_only():
    a = architecture(remat="dots")
    tokens = 12 * 8 * 197 * 768 * 2
    assert kept_bytes(a, 8, tiled=False) - kept_bytes(a, 8, model_shards=2, tiled=False) == tokens * (3 + 4) // 2


def test_the_peak_of_a_resnet_is_not_at_its_last_layer():
    a = architecture("R50x1", remat="dots")
    passing = passing_bytes(a, images=8, gradient_bytes=0, layer_parameters=0, tiled=False)
    assert passing["activations"] < kept_bytes(a, 8, tiled=False)
