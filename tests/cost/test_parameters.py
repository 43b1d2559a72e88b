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

from vit_jax.config.variants import VIT_SIZES, Architecture, parse_name
from vit_jax.cost.parameters import count_parameters, parameter_groups

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "parameter_counts.json"
COMPUTED = "computed"
Row = dict[str, Any]

# 2 x 3 patches of 4 x 4 pixels, width 8, one block with an MLP of 16.
TINY = Architecture(
    name="tiny", image_size=(8, 12), patch_size=(4, 4), num_classes=5, width=8, depth=1, mlp_dim=16, num_heads=2
)
TINY_BLOCK = 16 + 16 + 4 * 72 + (8 * 16 + 16) + (16 * 8 + 8)  # two norms, four projections, two dense layers


def count_of(row: Row) -> int:
    """Our count for a golden row; a head of "none" means the backbone alone."""
    size_name, patch_size = parse_name(row["name"])
    backbone = row["head"] == "none"
    architecture = Architecture(
        name=row["name"],
        image_size=(row["image_size"], row["image_size"]),
        patch_size=patch_size,
        num_classes=1 if backbone else row["num_classes"],
        pool=row["pool"],
        head="linear" if backbone else row["head"],
        **dataclasses.asdict(VIT_SIZES[size_name]),
    )
    groups = parameter_groups(architecture)
    return sum(groups.values()) - (groups["head"] if backbone else 0)


def golden_rows() -> list[Row]:
    rows = json.loads(GOLDEN.read_text())
    return renew(rows) if os.environ.get("UPDATE_GOLDEN") == "1" else rows


def renew(rows: list[Row]) -> list[Row]:
    """The rows with a new one for each size that has none, computed counts brought up to date, on disk too."""
    for size_name in sorted(VIT_SIZES.keys() - {parse_name(row["name"])[0] for row in patch_16(rows)}):
        new = {"name": f"ViT-{size_name}/16", "image_size": 224, "num_classes": 1000, "pool": "token"}
        rows.append({**new, "head": "linear", "parameters": 0, "source": COMPUTED})
    rows = [{**row, "parameters": count_of(row)} if row["source"] == COMPUTED else row for row in rows]
    GOLDEN.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n")
    return rows


def patch_16(rows: list[Row]) -> list[Row]:
    return [row for row in rows if parse_name(row["name"])[1] == (16, 16)]


ROWS = golden_rows()


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['name']}@{row['image_size']}-{row['pool']}-{row['head']}-{row['num_classes']}"
)
def test_golden_count(row: Row) -> None:
    assert count_of(row) == row["parameters"], f"{row['source']} disagrees"


def test_every_size_has_a_golden_count() -> None:
    missing = VIT_SIZES.keys() - {parse_name(row["name"])[0] for row in patch_16(ROWS)}
    assert not missing, f"no golden count at patch 16 for {sorted(missing)}: run once with UPDATE_GOLDEN=1"


def test_golden_rows_are_distinct_and_mostly_published() -> None:
    keys = [tuple(value for name, value in row.items() if name not in ("parameters", "source")) for row in ROWS]
    assert len(set(keys)) == len(keys)
    assert sum(row["source"] != COMPUTED for row in ROWS) == 38  # a published row is never dropped or recomputed


def test_groups_of_a_tiny_network_by_hand() -> None:
    assert parameter_groups(TINY) == {
        "patch_embedding": 48 * 8 + 8,
        "class_token": 8,
        "position_embedding": 7 * 8,
        "blocks": TINY_BLOCK,
        "final_norm": 16,
        "pooling": 0,
        "head": 8 * 5 + 5,
    }
    assert count_parameters(TINY) == 392 + 8 + 56 + TINY_BLOCK + 16 + 45


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


def test_attention_pooling_by_hand() -> None:
    groups = parameter_groups(dataclasses.replace(TINY, pool="map"))
    assert groups["pooling"] == 8 + 4 * (64 + 8) + 16 + (8 * 16 + 16) + (16 * 8 + 8)


@pytest.mark.parametrize(("pool", "millions"), [("map", 428), ("gap", 412)])
def test_attention_pooling_of_siglip(pool: str, millions: int) -> None:
    """The image encoders of SigLIP So400m/14, by their model cards in timm."""
    row = {"name": "ViT-So400m/14", "image_size": 224, "num_classes": 0, "pool": pool, "head": "none"}
    assert round(count_of(row) / 1e6) == millions


def test_depth_multiplies_only_blocks() -> None:
    deeper = parameter_groups(dataclasses.replace(TINY, depth=3))
    assert deeper == {**parameter_groups(TINY), "blocks": 3 * TINY_BLOCK}


def test_mlp_head_adds_a_layer_of_the_width() -> None:
    assert parameter_groups(dataclasses.replace(TINY, head="mlp"))["head"] == 72 + 45


@pytest.mark.parametrize("field", ["pool", "position_embedding", "head"])
def test_unknown_choice_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}='nonsense'.*use "):
        count_parameters(dataclasses.replace(TINY, **{field: "nonsense"}))
