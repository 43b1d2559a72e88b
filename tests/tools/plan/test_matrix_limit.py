"""The cycles of matrix units, against the arithmetic of a network and against a case worked by
hand.
"""

import pytest

from tests.tools.plan import matrix_limit
from tests.tools.plan.matrix_limit import GIB, MACHINE, TILE, TUNING, UNITS, limit
from vit_jax.config import ModelConfig
from vit_jax.config.networks import build_architecture
from vit_jax.models.flops import forward_macs
from vit_jax.tools.plan.arithmetic import ERROR
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.topology import parse_topology


@pytest.mark.parametrize("name", ["R50x1", "R50+ViT-B/16", "ViT-B/16"])
def test_padding_only_adds_to_the_arithmetic(name):
    model = ModelConfig(name=name, head="linear")
    architecture = build_architecture(
        model,
        image_size=(224, 224),
        num_classes=1000,
    )
    # 2.9 instead of 3, because images have no gradient.
    least = 2.9 * 64 * forward_macs(architecture) / (UNITS * TILE**2)

    assert least < limit(architecture, 64) < 1.5 * least


def test_a_case_worked_by_hand():
    """One block of width 128 reads 8 images of 16 tokens, so one row of tiles is enough."""
    model = ModelConfig(
        name="ViT-mu/4",
        width=128,
        depth=1,
        mlp_dim=256,
        num_heads=1,
        pool="gap",
        head="linear",
    )
    architecture = build_architecture(
        model,
        image_size=(16, 16),
        num_classes=10,
    )

    rows = 8 * 16
    # Forward, weights: one tile of rows, and 48 rows of weights; no gradient of images
    embedding = rows + 48
    projections = 4 * (rows + rows + 128)
    mlp = 2 * (2 * rows + 2 * rows + 256)
    attention = 8 * (16 + 16 + 16) + 8 * (16 + 16 + 16)  # for each image
    head = 8 + 8 + 10
    expected = (embedding + projections + mlp + attention + head) / UNITS

    assert limit(architecture, 8) == expected


@pytest.mark.parametrize("case", TUNING, ids=[case.name for case in TUNING])
def test_the_automatic_layout_of_fine_tuning_fits_as_arithmetic_says(case):
    row = matrix_limit.load()[case.name]
    plan = make_plan(
        case.load(MACHINE),
        parse_topology(MACHINE),
        case.find_dataset(MACHINE),
        network=case.find_network(MACHINE),
        can_compile=False,
    )

    assert plan.memory.total / GIB == pytest.approx(row["gib"], rel=ERROR)
    assert plan.run.training_architecture.remat == "none"
    assert row["gib"] * GIB < plan.usable_bytes
