"""Whether a classifier is as often right as its probabilities say (Guo et al., ICML 2017)."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BINS = 15


class Bin(NamedTuple):
    """Answers of similar confidence.

    Attributes:
      low, high: confidences above `low`, up to `high`.
      images: how many there are; the two below are 0 without any.
      confidence: their mean.
      accuracy: the share that is right.
    """

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


class Calibration:
    """Counts by confidence, the probability of the first answer, in bins of equal width."""

    def __init__(self) -> None:
        self._images, self._confidence, self._right = np.zeros((3, BINS))

    def add(self, confidence_N: np.ndarray, is_right_N: np.ndarray) -> None:
        """Counts answers, of confidences in [0, 1]."""
        place_N = np.clip(np.ceil(confidence_N.astype(np.float64) * BINS).astype(int) - 1, 0, BINS - 1)
        self._images += np.bincount(place_N, minlength=BINS)
        self._confidence += np.bincount(place_N, confidence_N, BINS)
        self._right += np.bincount(place_N, is_right_N, BINS)

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over images of |accuracy - mean confidence| of an image's bin."""
        return float(np.abs(self._right - self._confidence).sum() / self._images.sum())

    def bins(self) -> Iterator[Bin]:
        """Every bin, from low confidence to high."""
        for number, images in enumerate(self._images):
            means = (float(sums[number] / max(images, 1)) for sums in (self._confidence, self._right))
            yield Bin(number / BINS, (number + 1) / BINS, int(images), *means)
