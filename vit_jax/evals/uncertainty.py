"""Confidence intervals of accuracies, and the calibration of probabilities."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

NORMAL_QUANTILE = 1.959963984540054  # two-sided 95 %
BINS = 15


def wilson(correct: float, images: float) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction (Wilson 1927).

    Unlike p ± 2 standard errors it stays within [0, 1] and is useful if all predictions are right, or none.

    Args:
      correct: 0 to `images`.
      images: more than 0, independent of each other: copies of an image or frames of a film make it too narrow.
    """
    z2 = NORMAL_QUANTILE**2
    share = correct / images
    middle = (share + z2 / (2 * images)) / (1 + z2 / images)
    half = NORMAL_QUANTILE * math.sqrt(share * (1 - share) / images + z2 / (4 * images**2)) / (1 + z2 / images)
    return max(0.0, middle - half), min(1.0, middle + half)


class Bin(NamedTuple):
    """Predictions of similar confidence.

    Attributes:
      low, high: confidences above `low`, up to `high`.
      images: their number; the two below are 0 without any.
      confidence: their mean.
      accuracy: fraction of right predictions.
    """

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


class Calibration:
    """Counts by confidence, the probability of the predicted class, in bins of equal width (Guo et al., ICML 2017)."""

    def __init__(self) -> None:
        self._images, self._confidence, self._right = np.zeros((3, BINS))

    def add(self, confidence_N: np.ndarray, is_right_N: np.ndarray) -> None:
        """Count predictions with confidences in [0, 1]."""
        place_N = np.clip(np.ceil(confidence_N.astype(np.float64) * BINS).astype(int) - 1, 0, BINS - 1)
        self._images += np.bincount(place_N, minlength=BINS)
        self._confidence += np.bincount(place_N, confidence_N, BINS)
        self._right += np.bincount(place_N, is_right_N, BINS)

    @property
    def error(self) -> float:
        """Expected calibration error: mean over images of |accuracy - mean confidence| in the bin of the image."""
        return float(np.abs(self._right - self._confidence).sum() / self._images.sum())

    def bins(self) -> Iterator[Bin]:
        """Yield all bins from low confidence to high."""
        for number, images in enumerate(self._images):
            means = (float(sums[number] / max(images, 1)) for sums in (self._confidence, self._right))
            yield Bin(number / BINS, (number + 1) / BINS, int(images), *means)
