"""Calibration: how often predictions of each confidence are right (Guo et al., ICML 2017).

Legend: N predictions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BINS = 15


class Bin(NamedTuple):
    """Predictions with confidences above `low`, up to `high`.

    Mean confidence and accuracy are 0 without images.
    """

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


class Calibration:
    """Counts by confidence, the probability of the predicted class, in bins of equal width."""

    def __init__(self) -> None:
        self._images = np.zeros(BINS)
        self._confidence = np.zeros(BINS)
        self._right = np.zeros(BINS)

    def add(self, confidence_N: np.ndarray, is_right_N: np.ndarray) -> None:
        """Count predictions with confidences in [0, 1]."""
        upper_end_N = np.ceil(confidence_N.astype(np.float64) * BINS).astype(int)
        bin_N = np.clip(upper_end_N - 1, 0, BINS - 1)
        self._images += np.bincount(bin_N, minlength=BINS)
        self._confidence += np.bincount(bin_N, confidence_N, BINS)
        self._right += np.bincount(bin_N, is_right_N, BINS)

    @property
    def error(self) -> float:
        """Expected calibration error.

        The mean over images of |accuracy - mean confidence| in the bin of the image.
        """
        return float(np.abs(self._right - self._confidence).sum() / self._images.sum())

    def bins(self) -> Iterator[Bin]:
        """Yield all bins from low confidence to high."""
        for number, images in enumerate(self._images):
            divisor = max(images, 1)
            yield Bin(
                low=number / BINS,
                high=(number + 1) / BINS,
                images=int(images),
                confidence=float(self._confidence[number] / divisor),
                accuracy=float(self._right[number] / divisor),
            )
