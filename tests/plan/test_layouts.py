"""The default layouts are the recorded ones, and near the best layout that was compiled."""

import os

import pytest

from tests.plan import layouts


@pytest.mark.parametrize("network", layouts.NETWORKS)
def test_default_layouts_are_the_golden_ones(network):
    if os.environ.get("UPDATE_GOLDEN") == "1":
        layouts.store_defaults()
    recorded = layouts.load_defaults()
    assert recorded.keys() == {f"{name} {machine}" for name, machine in layouts.PAIRS}
    for machine in layouts.MACHINES:
        assert recorded[f"{network} {machine}"] == layouts.choose(network, machine)


def test_defaults_are_within_5_percent_of_the_best_compiled_layout_that_fits():
    rows = [line.split("|") for line in layouts.layouts_table().splitlines()]
    above = [float(row[-3].strip().removesuffix("%")) for row in rows if row[-3].strip().endswith("%")]
    assert len(above) >= 3, "or this proves nothing"
    assert max(above) <= 5


def test_extrapolation():
    layout = layouts.parse("B/16 h100:8 none unrolled /1 x2")
    assert layouts.parse(layout.name) == layout
    figures = {"2": {"ms": 5.0, "gib": 1.0}, "4": {"ms": 9.0, "gib": 1.5}}
    assert layouts.at_full_depth(layout, figures) == (25.0, 3.5)
    assert layouts.at_full_depth(layout, figures | {"12": {"ms": 24.0, "gib": 3.0}}) == (24.0, 3.0)
    assert layouts.at_full_depth(layout, {"2": figures["2"], "4": {"error": "too large"}}) is None
