"""Mean and standard deviation of each channel over the training images.

Images are read one after the other; memory holds one of each thread.
"""

import dataclasses
import logging

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.bands import choose_bands, name_wrong_bands
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.records import Source
from vit_jax.data.workers import map_in_threads

MOST_IMAGES = 4096
"""Number of images that are measured at most, evenly spaced over the split."""


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared differences from the mean, by channel, in float64."""

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both sets of values, by the formula of Chan et al. (1979)."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        difference = other.mean - self.mean
        mean = self.mean + difference * share
        squares = self.squares + other.squares + difference**2 * self.count * share
        return Moments(count, mean, squares)


def measure_bands(
    source: Source,
    config: InputConfig,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, over all pixels of the images.

    NaN and infinity do not count. A channel of one value has a standard deviation of 1. Unreadable images are
    skipped.

    Raises:
      ValueError: an image does not have the bands of the config.
    """
    count = min(len(source), MOST_IMAGES)
    indices = [number * len(source) // count for number in range(count)]
    zeros = np.zeros(config.channels)
    total = Moments(zeros, zeros, zeros)

    def measure(index: int) -> Moments:
        return _measure_image(source, index, config)

    for moments in map_in_threads(measure, indices, config.num_threads):
        total = total.merge(moments)

    std = np.sqrt(total.squares / np.maximum(total.count, 1))
    log = logging.getLogger(__name__)
    constant = np.flatnonzero(std == 0) + 1
    if len(constant):
        log.warning(
            "Channels without different values in %d training images: %s. "
            "Choose others with input.bands.",
            count,
            ", ".join(map(str, constant)),
        )
    std = np.where(std > 0, std, 1.0)
    log.info("Channels measured on %d images.", count)
    return tuple(map(_round, total.mean)), tuple(map(_round, std))


def _measure_image(source: Source, index: int, config: InputConfig) -> Moments:
    """Return the moments of one image; those of no values for an unreadable image."""
    zeros = np.zeros(config.channels)
    try:
        with name_wrong_bands(source.name_of, index):
            image_HWC = decode(
                source[index].image,
                config.max_image_megapixels,
                bands=choose_bands(config),
            )
    except UnreadableImage:
        return Moments(zeros, zeros, zeros)

    values_NC = image_HWC.reshape(-1, config.channels).astype(np.float64)
    is_counted_NC = np.isfinite(values_NC)
    count_C = is_counted_NC.sum(axis=0)
    mean_C = values_NC.sum(axis=0, where=is_counted_NC) / np.maximum(count_C, 1)
    squares_C = np.square(values_NC - mean_C).sum(axis=0, where=is_counted_NC)
    return Moments(count_C, mean_C, squares_C)


def _round(number: float) -> float:
    """Return a number with six digits, so that the stored text is short."""
    return float(f"{number:.6g}")
