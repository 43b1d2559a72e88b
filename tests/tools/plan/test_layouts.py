"""The default layouts are the recorded ones, and near the best layout that was compiled."""

import os

import pytest

from tests.tools.plan import layouts


def read_percentages():
    """Return the column "default above" of the table, in percent."""
    percentages = []
    for line in layouts.layouts_table().splitlines():
        cell = line.split("|")[-4].strip()
        if cell.endswith("%"):
            percentages.append(float(cell.removesuffix("%")))
    return percentages


@pytest.mark.parametrize("network", layouts.NETWORKS)
def test_default_layouts_are_the_golden_ones(network):
    if os.environ.get("UPDATE_GOLDEN") == "1":
        layouts.store_defaults()

    recorded = layouts.load_defaults()

    assert recorded.keys() == {f"{name} {machine}" for name, machine in layouts.PAIRS}
    for machine in layouts.MACHINES:
        assert recorded[f"{network} {machine}"] == layouts.choose(network, machine)


def test_defaults_are_within_5_percent_of_the_best_compiled_layout_that_fits():
    above = read_percentages()

    assert len(above) >= 3, "or this proves nothing"
    assert max(above) <= 5


def test_extrapolation_from_two_depths():
    layout = layouts.parse("B/16 v5e:4x4 none unrolled /1 x2")
    assert layouts.parse(layout.name) == layout

    two = {"ms": 5.0, "waits_ms": 1.0, "gib": 1.0}
    four = {"ms": 9.0, "waits_ms": 1.5, "gib": 1.5}
    expected = layouts.Estimate(
        core_ms=25.0 - 3.5,
        update_ms=None,
        ms=25.0,
        gib=3.5,
    )
    assert layouts.at_full_depth(layout, {"2": two, "4": four}) == expected

    twelve = {"ms": 24.0, "waits_ms": 4.0, "gib": 3.0}
    expected = layouts.Estimate(
        core_ms=20.0,
        update_ms=None,
        ms=24.0,
        gib=3.0,
    )
    assert layouts.at_full_depth(layout, {"2": two, "4": four, "12": twelve}) == expected

    gpus = layouts.parse("B/16 h100:8 none unrolled /1 x2")
    assert layouts.at_full_depth(gpus, {"2": two, "4": four}) is None

    failed = {"error": "too large"}
    assert layouts.at_full_depth(layout, {"2": two, "4": failed}) is None


def test_extrapolation_from_the_parts_of_one_depth():
    """Twelve layers take 12 times the time of one, and their update grows with the parameters."""
    layer = 12 * 768**2 + 13 * 768
    rest = (16 * 16 * 3 + 1) * 768 + 198 * 768 + 2 * 768 + 769 * 768 + 769 * 1000
    layout = layouts.parse("B/16 v5e:4x4 none unrolled /1 x1")
    parts = {
        "attention": 2.0,
        "mlp": 3.0,
        "norm": 1.0,
        "optimizer": 0.25,
        "head": 0.5,
        "other": 4.0,
    }
    one = {
        "ms": 12.0,
        "waits_ms": 1.0,
        "prefetch_ms": 0.25,
        "gib": 1.0,
        "parts_ms": parts,
    }

    actual = layouts.at_full_depth(layout, {"1": one})

    update_ms = 0.25 * (12 * layer + rest) / (layer + rest)
    layers_ms = 12 * (2 + 3 + 1 + 0.25)

    assert actual.update_ms == pytest.approx(update_ms, rel=1e-6)
    assert actual.core_ms == pytest.approx(layers_ms + 0.5 + 4 + actual.update_ms)
    assert actual.ms is None
    assert actual.gib is None


@pytest.mark.parametrize(
    "name",
    [
        "H/14 v5e:16x16 none unrolled /16 x1",
        "L/16 v5e:16x16 none unrolled /16 x1",
        "L/16 v5e:4x4 none unrolled /16 x4",
    ],
)
def test_one_layer_agrees_with_more(name):
    """The parts of one recorded layer agree with all 32 layers, or with two depths extrapolated."""
    layout = layouts.parse(name)
    figures = layouts.load()[name]
    assert len(figures) == 2

    from_one = layouts.at_full_depth(layout, {"1": figures["1"]})
    from_more = layouts.at_full_depth(layout, figures)

    assert from_one.core_ms == pytest.approx(from_more.core_ms, rel=0.03)
