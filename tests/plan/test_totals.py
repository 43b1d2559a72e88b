"""A whole recipe from one step, by hand."""

import pytest

from vit_jax.config import ModelConfig, build_architecture
from vit_jax.plan.topology import parse_topology
from vit_jax.plan.totals import run_totals

H14 = build_architecture(ModelConfig(name="ViT-H/14"), image_size=(224, 224), num_classes=18291)


def totals(topology, **changes):
    arguments = {"steps": 864_000, "global_batch": 4096, "step_seconds": 0.1, "price_per_chip_hour": 1.5} | changes
    return run_totals(H14, parse_topology(topology), **arguments)


def test_a_day_on_a_pod():
    total = totals("v5p:8x8x8")
    assert total.days == pytest.approx(1.0)
    assert total.chip_hours == pytest.approx(512 * 24)
    assert total.core_days == pytest.approx(1024)  # two TensorCores a chip
    assert total.price == pytest.approx(512 * 24 * 1.5)
    assert total.images == 864_000 * 4096
    assert total.images_per_second == pytest.approx(40_960)


def test_mfu_is_useful_arithmetic_by_peak():
    total = totals("v5e:16x16")
    useful = total.exaflops * 1e18 / (total.days * 86400)
    assert total.mfu == pytest.approx(useful / (256 * 197e12))
    # the same share of the peak of TPU v3 cores, 61.5 TFLOP/s each
    assert total.mfu == pytest.approx(useful / (total.tpu_v3_core_days / total.days * 61.5e12))


def test_no_price_and_no_cores():
    total = totals("h100:8", price_per_chip_hour=None)
    assert total.price is None
    assert total.core_days == pytest.approx(8)


def test_the_paper_counts_2500_core_days_for_h14_on_jft():
    """At the 32 % that 4,262 exaFLOPs in 2,500 TPUv3-core-days are."""
    steps = round(14 * 303e6 / 4096)
    seconds = 4262e18 / steps / (0.32 * 256 * 197e12)
    total = totals("v5e:16x16", steps=steps, step_seconds=seconds)
    assert total.tpu_v3_core_days == pytest.approx(2500, rel=0.03)
