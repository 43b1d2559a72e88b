"""Intervals and calibration against worked values."""

import math

import numpy as np
import pytest

from vit_jax.evals.uncertainty import BINS, Calibration, wilson


def test_wilson_by_hand():
    """8 of 10: (0.8 + z²/20 ± z sqrt(0.16/10 + z²/400)) / (1 + z²/10) with z² = 3.841459."""
    assert wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    # Without a success the lower end is 0 and the upper one z²/(n + z²).
    assert wilson(0, 20) == pytest.approx((0, 3.841459 / 23.841459), abs=1e-6)
    assert wilson(20, 20) == pytest.approx((20 / 23.841459, 1), abs=1e-6)


@pytest.mark.parametrize(("right", "images"), [(1, 3), (7, 9), (30, 41), (4000, 5000)])
def test_the_ends_are_the_shares_that_a_normal_test_just_does_not_reject(right, images):
    for share in wilson(right, images):
        deviation = math.sqrt(share * (1 - share) / images)
        assert abs(right / images - share) / deviation == pytest.approx(1.959964, abs=1e-6)


def test_calibration_by_hand():
    """Bins of 1/15. Two answers of 0.62 and 0.66 share one (9/15 to 10/15), half of them right; 0.98 is wrong; 0.2 is
    the upper end of its bin (2/15 to 3/15) and right; 0.21 is in the next."""
    calibration = Calibration()
    calibration.add(np.array([0.62, 0.98, 0.2]), np.array([True, False, True]))
    calibration.add(np.array([0.66, 0.21]), np.array([False, False]))
    expected = (2 * abs(0.5 - 0.64) + 0.98 + (1 - 0.2) + 0.21) / 5
    assert calibration.error == pytest.approx(expected)
    filled = {round(one.high * BINS): one for one in calibration.bins() if one.images}
    assert {place: one.images for place, one in filled.items()} == {3: 1, 4: 1, 10: 2, 15: 1}
    assert (filled[10].confidence, filled[10].accuracy) == (pytest.approx(0.64), 0.5)
    assert [one.low for one in calibration.bins()] == [number / 15 for number in range(15)]


def test_confidence_at_the_ends_of_the_scale():
    """A probability of float32 may be 0, 1, or by rounding a little more."""
    calibration = Calibration()
    calibration.add(np.array([0.0, 1.0, np.nextafter(np.float32(1), np.float32(2))]), np.ones(3, bool))
    assert [one.images for one in calibration.bins()] == [1] + [0] * 13 + [2]
