"""Antialiased resizing: equal to Pillow's within one grey level, to torchvision's within two.

Legend: H W height and width, K old pixels under the filter of a new one.
"""

import functools
from typing import Literal

import cv2
import numpy as np
import scipy.sparse

from vit_jax.config.schema import Interpolation
from vit_jax.config.sizes import RGB_CHANNELS

_RADIUS = {"bilinear": 1, "bicubic": 2}
_BAND = 128
"""Number of columns in float32 at a time, so that large photographs need little memory."""

Library = Literal["huggingface", "timm"]
"""The library whose order of passes and rounding of crops are used.

"huggingface" is torchvision on tensors, "timm" is Pillow and torchvision.
"""


def resize(
    image: np.ndarray,
    size: tuple[int, int],
    interpolation: Interpolation,
    library: Library = "huggingface",
) -> np.ndarray:
    """Resize to `size` (height, width) in two passes, each rounded to 8 bits if the image has 8.

    Args:
      image: uint8 or float32 (H, W, C).
      size: height and width of the result.
      interpolation: the filter; where an image shrinks, it widens with the scale (antialiasing).
      library: timm resizes rows first if an image loses more than twice as many rows as columns.
    """
    height, width = image.shape[:2]
    new_height, new_width = size
    if (height, width) == tuple(size):
        return image

    lost_rows = height - new_height
    lost_columns = width - new_width

    if library == "timm" and lost_rows > 0 and lost_rows > 2 * lost_columns:
        with_new_rows = _resize_rows(image, new_height, interpolation)
        return _resize_columns(with_new_rows, new_width, interpolation)

    with_new_columns = _resize_columns(image, new_width, interpolation)
    return _resize_rows(with_new_columns, new_height, interpolation)


def find_covering_size(
    old: tuple[int, ...],
    least: tuple[int, int],
) -> tuple[int, int]:
    """Return the size of the smallest image of the shape of `old` that covers `least`.

    For a square, the rule is torchvision's and Hugging Face's, which rounds the long side down. For
    other rectangles it is timm's, which rounds both sides to the nearest.
    """
    height, width = old
    least_height, least_width = least
    if least_height != least_width:
        ratio = min(height / least_height, width / least_width)
        covering_height = round(height / ratio)
        covering_width = round(width / ratio)
        return covering_height, covering_width

    side = least_height
    if height <= width:
        return side, int(side * width / height)
    return int(side * height / width), side


def _resize_columns(
    image: np.ndarray,
    new: int,
    interpolation: Interpolation,
) -> np.ndarray:
    resized = _resize_rows(_transpose(image), new, interpolation)
    return _transpose(resized)


def _transpose(image: np.ndarray) -> np.ndarray:
    """Exchange rows and columns; OpenCV is faster, but not for all numbers of channels."""
    if image.dtype == np.uint8 and image.shape[-1] == RGB_CHANNELS:
        return cv2.transpose(image)
    return np.ascontiguousarray(image.swapaxes(0, 1))


def _resize_rows(
    image: np.ndarray,
    new: int,
    interpolation: Interpolation,
) -> np.ndarray:
    height, width, channels = image.shape

    weights = _make_weights(height, new, interpolation)

    resized = np.empty((new, width, channels), image.dtype)

    for left in range(0, width, _BAND):
        band = image[:, left : left + _BAND]
        band = band.reshape(height, -1).astype(np.float32)
        pixels = weights @ band
        if image.dtype == np.uint8:
            pixels += 0.5  # halves are rounded up
            np.clip(pixels, 0, 255, out=pixels)
        resized[:, left : left + _BAND] = pixels.reshape(new, -1, channels)
    return resized


@functools.lru_cache(maxsize=64)
def _make_weights(
    old: int,
    new: int,
    interpolation: Interpolation,
) -> scipy.sparse.csr_array:
    """Return the weights (new, old) of the old pixels in the new ones."""
    stretch = max(old / new, 1.0)
    centre_H = (np.arange(new) + 0.5) * (old / new)
    reach = _RADIUS[interpolation] * stretch

    first_H = (centre_H - reach + 0.5).astype(int)
    first_H = np.maximum(first_H, 0)
    end_H = (centre_H + reach + 0.5).astype(int)
    end_H = np.minimum(end_H, old)

    most_places = (end_H - first_H).max()
    place_HK = first_H[:, None] + np.arange(most_places)
    offset_HK = place_HK + 0.5 - centre_H[:, None]
    distance_HK = np.abs(offset_HK) / stretch

    weight_HK = _evaluate_filter(distance_HK, interpolation)
    weight_HK[place_HK >= end_H[:, None]] = 0.0
    weight_HK /= weight_HK.sum(axis=1, keepdims=True)

    starts = np.arange(0, weight_HK.size + 1, weight_HK.shape[1])
    columns = np.minimum(place_HK, old - 1).ravel()

    weights = weight_HK.ravel().astype(np.float32)
    return scipy.sparse.csr_array(
        (weights, columns, starts),
        shape=(new, old),
    )


def _evaluate_filter(
    distance: np.ndarray,
    interpolation: Interpolation,
) -> np.ndarray:
    """Return the triangle, or Keys' cubic with a slope of -0.5, at distances from 0."""
    if interpolation == "bilinear":
        return np.maximum(1.0 - distance, 0.0)

    inner = (1.5 * distance - 2.5) * distance**2
    inner += 1.0
    outer = (2.5 - 0.5 * distance) * distance - 4.0
    outer = outer * distance + 2.0
    beyond_one = np.where(distance < 2.0, outer, 0.0)
    return np.where(distance < 1.0, inner, beyond_one)
