"""Parameter formulas against published counts and hand-worked cases.

`UPDATE_GOLDEN=1 pytest tests/cost` renews the golden rows whose source is "computed" and adds one for each new
size; rows that come from a publication are never rewritten.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import pytest

from tests.cost.parameter_formulas import GROUPS, count_parameters, parameter_groups
from tests.cost.tiny_networks import TINY_RESNET
from vit_jax.config import VIT_SIZES, Architecture, ModelConfig, build_architecture
from vit_jax.config.variants import RESNET_UNITS

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "parameter_counts.json"
COMPUTED = "computed"
Row = dict[str, Any]

# 2 x 3 patches of 4 x 4 pixels, width 8, one block with an MLP of 16.
TINY = Architecture(
    name="tiny", image_size=(8, 12), patch_size=(4, 4), num_classes=5, width=8, depth=1, mlp_dim=16, num_heads=2
)
TINY_BLOCK = 16 + 16 + 4 * 72 + (8 * 16 + 16) + (16 * 8 + 8)  # two norms, four projections, two dense layers

# 32 channels after the root; stages of 2 and 1 units with 32 and 64 inner channels, 128 and 256 outer ones.
TINY_CONVOLUTIONS = (
    (32 * 32 + 9 * 32 * 32 + 32 * 128 + 32 * 128)  # the last is the shortcut
    + (128 * 32 + 9 * 32 * 32 + 32 * 128)
    + (128 * 64 + 9 * 64 * 64 + 64 * 256 + 128 * 256)
)


def count_of(row: Row) -> int:
    """Our count for a golden row; a head of "none" means the backbone alone."""
    head = "linear" if row["head"] == "none" else row["head"]
    config = ModelConfig(name=row["name"], pool=row["pool"], head=head)
    return count_parameters(
        build_architecture(config, image_size=(row["image_size"],) * 2, num_classes=row["num_classes"])
    )


def golden_rows() -> list[Row]:
    rows = json.loads(GOLDEN.read_text())
    return renew(rows) if os.environ.get("UPDATE_GOLDEN") == "1" else rows


def renew(rows: list[Row]) -> list[Row]:
    """The rows with a new one for each size that has none, computed counts brought up to date, on disk too."""
    for name in sorted(expected_names() - {row["name"] for row in rows}):
        new = {"name": name, "image_size": 224, "num_classes": 1000, "pool": "token" if "/" in name else "gap"}
        rows.append({**new, "head": "linear", "parameters": 0, "source": COMPUTED})
    rows = [{**row, "parameters": count_of(row)} if row["source"] == COMPUTED else row for row in rows]
    GOLDEN.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n")
    return rows


def expected_names() -> set[str]:
    return {f"ViT-{size}/16" for size in VIT_SIZES} | {f"R{depth}x1" for depth in RESNET_UNITS}


ROWS = golden_rows()


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['name']}@{row['image_size']}-{row['pool']}-{row['head']}-{row['num_classes']}"
)
def test_golden_count(row: Row) -> None:
    assert count_of(row) == row["parameters"], f"{row['source']} disagrees"


def test_every_size_has_a_golden_count() -> None:
    missing = expected_names() - {row["name"] for row in ROWS}
    assert not missing, f"no golden count for {sorted(missing)}: run once with UPDATE_GOLDEN=1"


def test_golden_rows_are_distinct_and_mostly_published() -> None:
    keys = [tuple(value for name, value in row.items() if name not in ("parameters", "source")) for row in ROWS]
    assert len(set(keys)) == len(keys)
    assert sum(row["source"] != COMPUTED for row in ROWS) == 78  # a published row is never dropped or recomputed


def test_groups_of_a_tiny_network_by_hand() -> None:
    assert parameter_groups(TINY) == {
        "root": 0,
        "stages": 0,
        "patch_embedding": 48 * 8 + 8,
        "class_token": 8,
        "position_embedding": 7 * 8,
        "blocks": TINY_BLOCK,
        "final_norm": 16,
        "pooling": 0,
        "head": 8 * 5 + 5,
    }
    assert count_parameters(TINY) == 392 + 8 + 56 + TINY_BLOCK + 16 + 45


def test_groups_of_a_preactivation_resnet_by_hand() -> None:
    norms = 2 * ((32 + 32 + 32) + (128 + 32 + 32) + (128 + 64 + 64))  # the first norm sees the unit's input
    expected = {"root": 49 * 3 * 32, "stages": TINY_CONVOLUTIONS + norms, "final_norm": 2 * 256, "head": 256 * 5 + 5}
    assert parameter_groups(TINY_RESNET) == dict.fromkeys(GROUPS, 0) | expected


def test_groups_of_a_postactivation_resnet_by_hand() -> None:
    norms = 2 * ((32 + 32 + 128 + 128) + (32 + 32 + 128) + (64 + 64 + 256 + 256))  # the shortcut's is the last
    expected = {"root": 49 * 3 * 32 + 2 * 32, "stages": TINY_CONVOLUTIONS + norms, "head": 256 * 5 + 5}
    architecture = dataclasses.replace(TINY_RESNET, residual_unit="postactivation")
    assert parameter_groups(architecture) == dict.fromkeys(GROUPS, 0) | expected


def test_groups_of_a_hybrid_by_hand() -> None:
    """A map of 2 x 2 with 256 channels, cut into two patches of 1 x 2 cells."""
    stem = {"family": "hybrid", "units": (2, 1), "width_factor": 0.5, "image_size": (16, 12), "patch_size": (1, 2)}
    resnet = parameter_groups(dataclasses.replace(TINY_RESNET, residual_unit="postactivation"))
    assert parameter_groups(dataclasses.replace(TINY, **stem)) == {
        **parameter_groups(TINY),
        "root": resnet["root"],
        "stages": resnet["stages"],
        "patch_embedding": 2 * 256 * 8 + 8,
        "position_embedding": 3 * 8,
    }


@pytest.mark.parametrize(
    ("name", "residual_unit", "millions"),  # timm, results-imagenet.csv, with its 1000 classes
    [("R50x1", None, "25.55"), ("R152x4", None, "936.53"), ("R50x1", "postactivation", "25.56")],  # resnet50_gn
)
def test_resnets_of_timm(name: str, residual_unit: Any, millions: str) -> None:
    config = ModelConfig(name=name, residual_unit=residual_unit)
    architecture = build_architecture(config, image_size=(224, 224), num_classes=1000)
    assert f"{count_parameters(architecture) / 1e6:.2f}" == millions


@pytest.mark.parametrize(
    ("position_embedding", "pool", "expected"),
    [
        ("learned_1d", "token", 7 * 8),
        ("learned_1d", "gap", 6 * 8),
        ("learned_2d", "token", 2 * 4 + 3 * 4 + 8),
        ("learned_2d", "map", 2 * 4 + 3 * 4),
        ("sincos2d", "token", 0),
        ("none", "gap", 0),
    ],
)
def test_position_embedding(position_embedding: str, pool: str, expected: int) -> None:
    groups = parameter_groups(dataclasses.replace(TINY, position_embedding=position_embedding, pool=pool))
    assert groups["position_embedding"] == expected
    assert groups["class_token"] == (8 if pool == "token" else 0)


@pytest.mark.parametrize(("pool", "millions"), [("map", 428), ("gap", 412)])
def test_attention_pooling_of_siglip(pool: str, millions: int) -> None:
    """The image encoders of SigLIP So400m/14, by their model cards in timm."""
    row = {"name": "ViT-So400m/14", "image_size": 224, "num_classes": 0, "pool": pool, "head": "none"}
    assert round(count_of(row) / 1e6) == millions


def test_depth_pooling_and_heads_by_hand() -> None:
    def changed(**fields: Any) -> dict[str, int]:
        before = parameter_groups(TINY).items()
        return dict(parameter_groups(dataclasses.replace(TINY, **fields)).items() - before)

    assert changed(depth=3) == {"blocks": 3 * TINY_BLOCK}
    assert changed(pool="map")["pooling"] == 8 + 4 * (64 + 8) + 16 + (8 * 16 + 16) + (16 * 8 + 8)
    assert changed(head="mlp") == {"head": 72 + 45}
    assert changed(head="mlp", num_classes=0) == {"head": 72}
    assert changed(num_classes=0) == {"head": 0}
