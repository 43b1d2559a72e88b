"""Bytes that policies keep, by hand.

tests/tools/plan/test_record.py holds tiles, peaks and sums to XLA's.
"""

import pytest

from vit_jax.config import ModelConfig, build_architecture
from vit_jax.sharding.memory import count_kept_bytes

TOKENS = 12 * 8 * 197 * 768 * 2
# Two means of each norm.
MEANS = 12 * 8 * 197 * 4 * 4
# 196 tokens, and two halves of a block.
AXIAL = {"pool": "gap", "block": "axial"}


def build(name, **options):
    config = ModelConfig(name=name, **options)
    return build_architecture(
        config,
        image_size=(224, 224),
        num_classes=1000,
    )


MAPS = sum(
    [
        56**2 * (64 + 256 * 3),
        28**2 * 512 * 4,
        14**2 * 1024 * 6,
        7**2 * 2048 * 2,
    ]
)


@pytest.mark.parametrize(
    ("remat", "model_shards", "num_bytes"),
    [
        # The input of each block.
        ("full", 1, MEANS + TOKENS),
        # And the attention output, and its sum with the input.
        ("attention", 1, MEANS + TOKENS * 3),
        # And query, key and value, and the hidden units.
        ("dots", 1, MEANS + TOKENS * (3 + 3 + 4)),
        ("dots", 2, MEANS + TOKENS * 2 + TOKENS * (4 + 4) // 2),
    ],
)
def test_bytes_that_policies_keep(remat, model_shards, num_bytes):
    architecture = build("ViT-B/16", remat=remat, scan_unroll=1)

    kept = count_kept_bytes(
        architecture,
        8,
        model_shards=model_shards,
        tiled=False,
    )

    assert kept == num_bytes


@pytest.mark.parametrize(
    ("remat", "num_bytes"),
    [
        ("full", 2 * MEANS + TOKENS),
        ("attention", 2 * MEANS + TOKENS * 5),
        ("dots", 2 * MEANS + TOKENS * (1 + 2 * (1 + 4 + 4))),
    ],
)
def test_bytes_that_policies_keep_of_axial_blocks(remat, num_bytes):
    architecture = build(
        "ViT-B/16",
        remat=remat,
        scan_unroll=1,
        **AXIAL,
    )

    kept = count_kept_bytes(
        architecture,
        8,
        model_shards=1,
        tiled=False,
    )

    assert kept == num_bytes * 196 // 197


def test_a_resnet_keeps_the_map_of_the_root_and_the_inputs_of_units():
    architecture = build("R50x1", remat="full", scan_unroll=1)
    num_bytes = 4 * 2 * (112**2 * 64 + MAPS)

    kept = count_kept_bytes(
        architecture,
        4,
        model_shards=1,
        tiled=False,
    )

    assert kept == num_bytes


@pytest.mark.parametrize(
    ("remat", "unroll", "arrays"),
    [
        # Input; tokens between; query, key, value and attention; hidden units.
        ("none", None, 1 + 4 + 4 + 4 * 3.4),
        ("dots", None, 1 + 4 + 4 + 4 * 2.7),
        ("dots", 1, 10),
        ("attention", None, 3),
    ],
)
def test_bytes_that_gpus_keep_outside_of_loops(remat, unroll, arrays):
    architecture = build(
        "ViT-B/16",
        remat=remat,
        scan_unroll=unroll,
    )

    num_bytes = count_kept_bytes(architecture, 8, tiled=False)

    assert num_bytes == pytest.approx(arrays * TOKENS, rel=0.01)


@pytest.mark.parametrize(
    ("gelu", "arrays"),
    [
        # Input; tokens between; query, key, value and attention; hidden units.
        ("tanh", 1 + 1 + 4 + 4),
        # And the activated units.
        ("exact", 1 + 1 + 4 + 4 + 4),
    ],
)
def test_bytes_that_tpus_keep_outside_of_loops(gelu, arrays):
    architecture = build(
        "ViT-B/16",
        remat="none",
        gelu=gelu,
    )

    num_bytes = count_kept_bytes(architecture, 8, tiled=True)

    assert num_bytes == pytest.approx(arrays * TOKENS, rel=0.03)
