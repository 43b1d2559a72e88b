"""Arithmetic agrees with all compiled steps, also with those that its rates were not fitted to."""

import functools

import pytest

from tests.tools.plan import calibration
from vit_jax.tools.plan.arithmetic import _GPU, ERROR, RATES

ROWS = calibration.load()
SMALLEST_GIB = 0.1  # below, a program's instructions are most of its memory
LEFT_OUT = {
    "GPU": 0.2,
    "TPU v5e": 0.25,
    "TPU v5p": 0.15,
    "TPU v6e": 0.2,
}
"""Largest errors of rows that the rates were not fitted to. Single rows decide the rate of a part,
such as `stacks`: these are excluded."""
SAMPLES = (
    "B/16 dots v5e:2x2",
    "R50x1 dots",
    "B/16 v5p:2x2x4 none unrolled /16 x4",
    "B/16 v6e:4x4 none unrolled /16 x1",
    "B/16 on a100-80gb:8",
    "pretrain_jft:R50x1 on h100:8",
)


@pytest.mark.parametrize("name", ROWS)
def test_time_and_memory_are_within_the_stated_error(name):
    row = ROWS[name]
    assert row["arithmetic_ms"] == pytest.approx(row["compiled_ms"], rel=ERROR)
    if (row["compiled_gib"] or 0) > SMALLEST_GIB:
        assert row["arithmetic_gib"] == pytest.approx(row["compiled_gib"], rel=ERROR)


@pytest.fixture(scope="module")
def compare():
    """Return a function that compares the step of a name, once."""
    steps = {step.name: step for step in calibration.list_compiled()}
    assert steps.keys() == ROWS.keys()

    return functools.cache(lambda name: calibration.compare(steps[name]))


@pytest.mark.parametrize("name", SAMPLES)
def test_stored_rows_are_those_of_the_present_arithmetic(name, compare):
    assert compare(name) == ROWS[name]


@pytest.mark.slow
def test_all_stored_rows_are_those_of_the_present_arithmetic(compare):
    assert {name: compare(name) for name in ROWS} == ROWS


@pytest.mark.parametrize("platform", calibration.FITTED)
def test_rows_are_predicted_without_being_fitted(platform):
    names = calibration.FITTED[platform]
    rows = calibration.select(platform, "transformer")
    common = [row for row in rows if not row["parts"]["stacks"]]
    errors = calibration.leave_out(
        common,
        [name for name in names if name != "stacks"],
    )

    assert len(common) > len(names)
    assert max(map(abs, errors)) < LEFT_OUT[platform]


@pytest.mark.parametrize("platform", calibration.FITTED)
def test_the_rates_are_near_those_of_a_fit(platform):
    """The rates are rounded, and the least-squares fit is the reference."""
    rows = calibration.select(platform, "transformer")
    fitted = calibration.fit(rows, calibration.FITTED[platform])
    used = RATES.get(platform, _GPU)

    for name, rate in fitted.items():
        by_rates = getattr(used, calibration.PARTS[name])
        share = max(row["parts"][name] * 1e3 / row["compiled_ms"] for row in rows)
        assert share * abs(by_rates - rate) < 0.08
