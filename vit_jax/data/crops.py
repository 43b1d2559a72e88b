"""Random crops of training images.

TensorFlow samples the *height* of an inception crop uniformly and torchvision its *area*; the first
makes smaller crops (mean area 0.34 instead of 0.42 of a 500 x 375 photograph), and ViT was trained
with them.
"""

import math
from typing import NamedTuple

import cv2
import numpy as np

ASPECT_RATIOS = (3 / 4, 4 / 3)  # width / height
TF_ATTEMPTS = 100
TORCHVISION_ATTEMPTS = 10
SIMPLE_BORDER = 4  # pixels


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    """Return the view of an image (H, W, C) that a box selects."""
    bottom = box.top + box.height
    right = box.left + box.width
    return image[box.top : bottom, box.left : right]


def sample_inception_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    area_fraction: tuple[float, float],
    distribution: str = "tf",
) -> Box:
    """Sample a box with an aspect ratio of 3/4 to 4/3 and an area between two fractions.

    The distribution "tf" is the one of TensorFlow's `sample_distorted_bounding_box`: 100 failed
    attempts give the full image. "torchvision" is the one of `RandomResizedCrop`: 10 failed
    attempts give a central part.
    """
    smallest, largest = area_fraction
    areas = (smallest * height * width, largest * height * width)

    if distribution == "torchvision":
        return _sample_uniform_area(rng, height, width, areas)
    for _ in range(TF_ATTEMPTS):
        size = _sample_uniform_height(rng, height, width, areas)
        if size is not None:
            return _sample_place(rng, height, width, *size)
    return Box(0, 0, height, width)


def _sample_uniform_height(
    rng: np.random.Generator,
    height: int,
    width: int,
    areas: tuple[float, float],
) -> tuple[int, int] | None:
    """Return height and width of one attempt: aspect first, then a height between two limits."""
    smallest_area, largest_area = areas
    aspect = rng.uniform(*ASPECT_RATIOS)

    lowest = round(math.sqrt(smallest_area / aspect))
    highest = min(
        round(math.sqrt(largest_area / aspect)),
        height,
        int((width + 0.4999999) / aspect),
    )
    crop_height = lowest
    if lowest < highest:
        crop_height = int(rng.integers(lowest, highest + 1))
    crop_height = min(crop_height, highest)

    # Rounding may exceed the limits of the area by one row, which is corrected.
    if crop_height * round(crop_height * aspect) < smallest_area:
        crop_height += 1
    if crop_height * round(crop_height * aspect) > largest_area:
        crop_height -= 1
    crop_width = round(crop_height * aspect)

    fits = 0 < crop_height <= height and 0 < crop_width <= width
    if not fits:
        return None
    if not smallest_area <= crop_height * crop_width <= largest_area:
        return None
    return crop_height, crop_width


def _sample_uniform_area(
    rng: np.random.Generator,
    height: int,
    width: int,
    areas: tuple[float, float],
) -> Box:
    low, high = ASPECT_RATIOS
    log_low = math.log(low)
    log_high = math.log(high)

    for _ in range(TORCHVISION_ATTEMPTS):
        area = rng.uniform(*areas)
        aspect = math.exp(rng.uniform(log_low, log_high))
        crop_height = round(math.sqrt(area / aspect))
        crop_width = round(math.sqrt(area * aspect))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            return _sample_place(rng, height, width, crop_height, crop_width)

    crop_height = max(1, min(height, round(width / low)))
    crop_width = max(1, min(width, round(height * high)))
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return Box(top, left, crop_height, crop_width)


def _sample_place(
    rng: np.random.Generator,
    height: int,
    width: int,
    crop_height: int,
    crop_width: int,
) -> Box:
    """Sample a position uniformly, including the last one, which TF never samples."""
    # One after the other: an array of both gives the same numbers and takes longer.
    top = int(rng.integers(height - crop_height + 1))
    left = int(rng.integers(width - crop_width + 1))
    return Box(top, left, crop_height, crop_width)


def crop_randomly(
    rng: np.random.Generator,
    image: np.ndarray,
    size: tuple[int, int],
) -> np.ndarray:
    """Return a random part of `size` (height, width) of an image (H, W, C) that covers it."""
    height, width = image.shape[:2]
    return cut(image, _sample_place(rng, height, width, *size))


def crop_simply(
    rng: np.random.Generator,
    image: np.ndarray,
    size: tuple[int, int],
) -> np.ndarray:
    """Return a random part of `size` of an image that covers it, after mirroring its borders.

    Each border gets 4 mirrored pixels. Source: DeiT III (2204.07118), "simple random crop".
    """
    borders = (SIMPLE_BORDER,) * 4
    mirrored = cv2.copyMakeBorder(image, *borders, cv2.BORDER_REFLECT_101)
    return crop_randomly(rng, restore_channel(mirrored), size)


def shift_randomly(
    rng: np.random.Generator,
    image: np.ndarray,
    pixels: int,
) -> np.ndarray:
    """Move an image (H, W, C) by up to `pixels` in each direction; new pixels are 0."""
    height, width = image.shape[:2]
    # One after the other, which is faster than an array of both.
    top = int(rng.integers(2 * pixels + 1))
    left = int(rng.integers(2 * pixels + 1))
    borders = (pixels,) * 4
    padded = cv2.copyMakeBorder(
        image,
        *borders,
        cv2.BORDER_CONSTANT,
        value=0,
    )
    return cut(restore_channel(padded), Box(top, left, height, width))


def restore_channel(image: np.ndarray) -> np.ndarray:
    """Return (H, W, C) of an image whose single channel OpenCV has dropped."""
    if image.ndim == 2:
        return image[..., None]
    return image
