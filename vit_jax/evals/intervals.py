"""Confidence intervals of fractions."""

import functools


@functools.cache
def wilson_interval(correct: float, images: float) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction (Wilson 1927).

    Unlike p ± 2 standard errors it stays within [0, 1] and is useful if all predictions are right,
    or none.

    Args:
      correct: 0 to `images`; a whole number up to rounding.
      images: more than 0, independent of each other: copies of an image or frames of a film make it
        too narrow.
    """
    from scipy.stats import binomtest  # takes a second to load

    test = binomtest(round(correct), round(images))
    interval = test.proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)
