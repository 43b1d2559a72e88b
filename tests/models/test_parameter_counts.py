"""Parameters of networks: published counts (golden/parameter_counts.json) and counts by hand.

`UPDATE_GOLDEN=1` renews the golden rows whose source is "computed" and adds one for each new size;
rows that come from a publication are never rewritten.
"""

import dataclasses
import json
import os
import pathlib

import pytest

from tests.columns import list_column
from tests.models.small_models import abstract, size
from vit_jax.config import VIT_SIZES, Architecture, ModelConfig, build_architecture
from vit_jax.config.sizes import RESNET_UNITS

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "parameter_counts.json"
COMPUTED = "computed"

# 2 x 3 patches of 4 x 4 pixels, width 8, one block with an MLP of 16.
TINY = Architecture(
    name="tiny",
    image_size=(8, 12),
    patch_size=(4, 4),
    num_classes=5,
    width=8,
    depth=1,
    mlp_dim=16,
    num_heads=2,
)
TINY_MLP = (8 * 16 + 16) + (16 * 8 + 8)
TINY_NORM = 2 * 8
TINY_PROJECTION = 8 * 8 + 8
TINY_BLOCK = 2 * TINY_NORM + 4 * TINY_PROJECTION + TINY_MLP
TINY_PATCHES = 48 * 8 + 8
TINY_CLASS_TOKEN = 8
TINY_POSITIONS = 7 * 8
TINY_HEAD = 8 * 5 + 5
TINY_COUNT = TINY_PATCHES + TINY_CLASS_TOKEN + TINY_POSITIONS + TINY_BLOCK + TINY_NORM + TINY_HEAD


def count_unit(inputs, inner, outputs, has_shortcut=False):
    """Count the convolutions of a unit: 1 x 1, 3 x 3, 1 x 1, and the shortcut."""
    count = inputs * inner + 9 * inner * inner + inner * outputs
    if has_shortcut:
        count += inputs * outputs
    return count


# 32 channels after the root; stages of 2 and 1 units with 32 and 64 inner channels, 128 and 256
# outer ones.
POSTACTIVATION = {
    "family": "resnet",
    "units": (2, 1),
    "width_factor": 0.5,
    "image_size": (16, 12),
    "patch_size": (1, 1),
}
PREACTIVATION = POSTACTIVATION | {"residual_unit": "preactivation"}
NO_TRANSFORMER = {
    "width": 256,
    "depth": 0,
    "mlp_dim": 0,
    "num_heads": 0,
    "pool": "gap",
}
CONVOLUTIONS = (
    49 * 3 * 32
    + count_unit(32, 32, 128, has_shortcut=True)
    + count_unit(128, 32, 128)
    + count_unit(128, 64, 256, has_shortcut=True)
)
NORMS_BEFORE = 2 * (
    (32 + 32 + 32) + (128 + 32 + 32) + (128 + 64 + 64) + 256  # behind the last stage
)
NORMS_AFTER = 2 * (
    32  # of the root
    + (32 + 32 + 128 + 128)
    + (32 + 32 + 128)
    + (64 + 64 + 256 + 256)
)
RESNET_HEAD = 256 * 5 + 5


def count_parameters(row):
    """Count the parameters of a golden row.

    A head of "none" means the backbone alone, which is built with no classes.
    """
    head = row["head"]
    if head == "none":
        head = "linear"
    config = ModelConfig(
        name=row["name"],
        pool=row["pool"],
        head=head,
    )

    side = row["image_size"]
    architecture = build_architecture(
        config,
        image_size=(side, side),
        num_classes=row["num_classes"],
    )
    return size(abstract(architecture))


def build_row(name):
    return {
        "name": name,
        "image_size": 224,
        "num_classes": 1000,
        "pool": "token" if "/" in name else "gap",
        "head": "linear",
        "parameters": 0,
        "source": COMPUTED,
    }


def update_golden_rows(rows):
    known = set(list_column(rows, "name"))
    for name in sorted(list_expected_names() - known):
        rows.append(build_row(name))
    for row in rows:
        if row["source"] == COMPUTED:
            row["parameters"] = count_parameters(row)

    lines = ["  " + json.dumps(row) for row in rows]
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read_golden_rows():
    rows = json.loads(GOLDEN.read_text())
    if os.environ.get("UPDATE_GOLDEN") == "1":
        update_golden_rows(rows)
    return rows


def list_expected_names():
    vits = {f"ViT-{size}/16" for size in VIT_SIZES}
    resnets = {f"R{depth}x1" for depth in RESNET_UNITS}
    return vits | resnets


ROWS = read_golden_rows()
NAMES = set(list_column(ROWS, "name"))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_golden_counts(name):
    for row in ROWS:
        if row["name"] == name:
            assert count_parameters(row) == row["parameters"], row


def test_golden_rows_are_complete():
    missing = sorted(list_expected_names() - NAMES)

    assert not missing, f"no golden count for {missing}: run once with UPDATE_GOLDEN=1"


def test_golden_rows_are_distinct():
    networks = set()
    for row in ROWS:
        network = row | {"parameters": None, "source": None}
        networks.add(tuple(network.values()))

    assert len(networks) == len(ROWS)


def test_no_published_row_is_dropped_or_recomputed():
    sources = list_column(ROWS, "source")

    assert len(sources) - sources.count(COMPUTED) == 78


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, 0),
        ({"depth": 3}, 2 * TINY_BLOCK),
        # The class token and its position.
        ({"pool": "gap"}, -2 * 8),
        # A query attends to all tokens, then an MLP.
        (
            {"pool": "map"},
            -2 * 8 + 8 + 4 * TINY_PROJECTION + TINY_NORM + TINY_MLP,
        ),
        ({"head": "mlp"}, TINY_PROJECTION),
        (
            {"head": "mlp", "num_classes": 0},
            TINY_PROJECTION - TINY_HEAD,
        ),
        ({"num_classes": 0}, -TINY_HEAD),
        # Half a vector for rows and for columns.
        (
            {"position_embedding": "learned_2d"},
            (2 * 4 + 3 * 4 + 8) - TINY_POSITIONS,
        ),
        (
            {"position_embedding": "learned_2d", "pool": "gap"},
            (2 * 4 + 3 * 4) - TINY_POSITIONS - TINY_CLASS_TOKEN,
        ),
        ({"position_embedding": "sincos2d"}, -TINY_POSITIONS),
        ({"position_embedding": "none"}, -TINY_POSITIONS),
        # Offsets, and a class token's, have a head's length.
        (
            {"position_embedding": "relative"},
            (11 + 3) * 4 - TINY_POSITIONS,
        ),
        (
            {"position_embedding": "relative", "pool": "gap", "depth": 2},
            TINY_BLOCK + 2 * 11 * 4 - TINY_POSITIONS - TINY_CLASS_TOKEN,
        ),
        (
            {"position_layers": "every", "depth": 3},
            2 * (TINY_BLOCK + TINY_POSITIONS),
        ),
        (
            {"position_layers": "shared", "depth": 3},
            2 * TINY_BLOCK,
        ),
        ({"registers": 3}, 3 * (8 + 8)),  # with positions
        (
            {"registers": 3, "position_tokens": "patches"},
            3 * 8 - 8,
        ),
        ({"pool": "gap", "class_tokens": 1}, 0),
        ({"pool": "token_gap"}, 8 * 5),
        ({"class_tokens": 2}, 2 * 8 + 8 * 5),
        ({"layer_scale": 0.1}, 2 * 8),
        ({"mlp": "swiglu"}, 8 * 16 + 16),
        ({"mlp": "swiglu_norm"}, 8 * 16 + 16 + 2 * 16),
        ({"embedding_norm": "tokens"}, 2 * 8),
        (
            {"final_norm": "pooled", "pool": "gap", "class_tokens": 1},
            0,
        ),
        ({"final_norm": "none"}, -TINY_NORM),
        ({"attention_norm": True}, TINY_NORM),
        ({"norm": "rms"}, -3 * 8),
        (
            {"patch_bias": False, "qkv_bias": "query_value"},
            -8 - 8,
        ),
        (
            {"qkv_bias": "none", "linear_bias": False},
            -3 * 8 - 8 - 16 - 8,
        ),
        (
            {"rope": "grid", "position_embedding": "none"},
            -TINY_POSITIONS,
        ),
        (
            {"block": "axial", "pool": "gap", "depth": 3},
            5 * TINY_BLOCK - 2 * 8,
        ),
        # Rows of 3 and columns of 2.
        (
            {"block": "axial", "pool": "gap", "position_embedding": "relative"},
            TINY_BLOCK - 2 * 8 + (5 + 3) * 4 - 6 * 8,
        ),
        (
            PREACTIVATION | NO_TRANSFORMER,
            CONVOLUTIONS + NORMS_BEFORE + RESNET_HEAD - TINY_COUNT,
        ),
        (
            POSTACTIVATION | NO_TRANSFORMER,
            CONVOLUTIONS + NORMS_AFTER + RESNET_HEAD - TINY_COUNT,
        ),
        # A map of 2 x 2 with 256 channels, cut into two patches of 1 x 2 cells.
        (
            POSTACTIVATION | {"family": "hybrid", "patch_size": (1, 2)},
            CONVOLUTIONS + NORMS_AFTER + (2 * 256 * 8 + 8) + 3 * 8 - TINY_PATCHES - TINY_POSITIONS,
        ),
    ],
)
def test_by_hand(changes, difference):
    architecture = dataclasses.replace(TINY, **changes)

    count = size(abstract(architecture))

    assert count == TINY_COUNT + difference


# timm: resnet50_gn of results-imagenet.csv; model cards of SigLIP.
@pytest.mark.parametrize(
    ("options", "num_classes", "millions"),
    [
        ({"name": "R50x1", "residual_unit": "postactivation"}, 1000, 25.56),
        ({"name": "ViT-So400m/14", "pool": "map", "head": "linear"}, 0, 428),
        ({"name": "ViT-So400m/14", "pool": "gap", "head": "linear"}, 0, 412),
    ],
)
def test_counts_of_timm(options, num_classes, millions):
    architecture = build_architecture(
        ModelConfig(**options),
        image_size=(224, 224),
        num_classes=num_classes,
    )
    decimals = 2 if millions < 100 else 0

    count = size(abstract(architecture)) / 1e6

    assert round(count, decimals) == millions
