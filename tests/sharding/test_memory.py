"""What policies keep, by hand; tests/tools/plan/test_record.py holds tiles, peaks and sums to XLA's."""

import pytest

from vit_jax.config import ModelConfig, build_architecture
from vit_jax.sharding.memory import kept_bytes

TOKENS = 12 * 8 * 197 * 768 * 2
MEANS = 12 * 8 * 197 * 4 * 4  # two of each norm
AXIAL = {"pool": "gap", "block": "axial"}  # 196 tokens, and two halves of a block
MAPS = 56**2 * (64 + 256 * 3) + 28**2 * 512 * 4 + 14**2 * 1024 * 6 + 7**2 * 2048 * 2


@pytest.mark.parametrize(
    ("name", "remat", "images", "model_shards", "num_bytes"),
    [
        ("ViT-B/16", "full", 8, 1, MEANS + TOKENS),  # the input of each block
        (
            "ViT-B/16",
            "attention",
            8,
            1,
            MEANS + TOKENS * 3,
        ),  # and what attention gives, its sum with the input
        ("ViT-B/16", "dots", 8, 1, MEANS + TOKENS * (3 + 3 + 4)),  # and query, key, value; hidden
        ("ViT-B/16", "dots", 8, 2, MEANS + TOKENS * 2 + TOKENS * (4 + 4) // 2),
        ("ViT-B/16 axial", "full", 8, 1, (2 * MEANS + TOKENS) * 196 // 197),
        ("ViT-B/16 axial", "attention", 8, 1, (2 * MEANS + TOKENS * 5) * 196 // 197),
        ("ViT-B/16 axial", "dots", 8, 1, (2 * MEANS + TOKENS * (1 + 2 * (1 + 4 + 4))) * 196 // 197),
        (
            "R50x1",
            "full",
            4,
            1,
            4 * 2 * (112**2 * 64 + MAPS),
        ),  # what the root gave, the inputs of the units
    ],
)
def test_what_policies_keep(name, remat, images, model_shards, num_bytes):
    name, *is_axial = name.split()
    config = ModelConfig(name=name, remat=remat, scan_unroll=1, **(AXIAL if is_axial else {}))
    architecture = build_architecture(config, image_size=(224, 224), num_classes=1000)

    assert kept_bytes(architecture, images, model_shards=model_shards, tiled=False) == num_bytes


@pytest.mark.parametrize(
    ("remat", "unroll", "arrays"),
    [
        (
            "none",
            None,
            1 + 4 + 4 + 4 * 3.4,
        ),  # input; tokens between; query, key, value, attention; hidden units
        ("dots", None, 1 + 4 + 4 + 4 * 2.7),
        ("dots", 1, 10),
        ("attention", None, 3),
    ],
)
def test_what_gpus_keep_outside_of_loops(remat, unroll, arrays):
    config = ModelConfig(name="ViT-B/16", remat=remat, scan_unroll=unroll)
    architecture = build_architecture(config, image_size=(224, 224), num_classes=1000)
    assert kept_bytes(architecture, 8, tiled=False) == pytest.approx(arrays * TOKENS, rel=0.01)
