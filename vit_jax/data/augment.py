"""Augmentations beside RandAugment: ThreeAugment, colour jitter and random erasing.

All take and return uint8 (H, W, 3), RGB; `erase` also float32 (H, W, C). The image is not modified
unless the docstring says so.
"""

import math

import cv2
import numpy as np

BLUR_PIXELS = (0.1, 2.0)
"""Least and largest standard deviation of the blur of ThreeAugment."""
SOLARIZE_FROM = 128
ERASED_AREA = (0.02, 1 / 3)
"""Least and largest fraction of the image that is erased."""
ERASED_ASPECT = 1 / 0.3
"""Largest ratio of the longer side of the erased rectangle to the shorter one."""
ERASING_ATTEMPTS = 10
_LEVELS = np.arange(256, dtype=np.float32)
_SOLARIZED = np.where(
    _LEVELS < SOLARIZE_FROM,
    _LEVELS,
    255 - _LEVELS,
).astype(np.uint8)


def apply_three_augment(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Return the image in grey, solarized or blurred, each with equal chance.

    Source: DeiT III (2204.07118), section 3.
    """
    match int(rng.integers(3)):
        case 0:
            return convert_to_grey(image)
        case 1:
            return cv2.LUT(image, _SOLARIZED)
        case _:
            return cv2.GaussianBlur(
                image,
                (0, 0),
                rng.uniform(*BLUR_PIXELS),
                borderType=cv2.BORDER_REPLICATE,
            )


def convert_to_grey(image: np.ndarray) -> np.ndarray:
    """Return the luma (0.299 R + 0.587 G + 0.114 B) in all three channels."""
    luma = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return cv2.cvtColor(luma, cv2.COLOR_GRAY2RGB)


def rotate_90_randomly(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Rotate a square image by 0, 90, 180 or 270 degrees; it may be returned itself."""
    height, width = image.shape[:2]
    assert height == width, "config.run_rules.check_rotation"
    quarter_turns = int(rng.integers(4))
    if quarter_turns == 0:
        return image
    return np.ascontiguousarray(np.rot90(image, quarter_turns))


def jitter_colors(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Blend with black, the image's mean luma and grey, in random order, as `ColorJitter` does.

    Each blend is factor * image + (1 - factor) * other, with the factor uniform in [1 - strength, 1
    + strength]. Source: torchvision.
    """
    for operation in rng.permutation(3):
        factor = rng.uniform(1 - strength, 1 + strength)
        match operation:
            case 0:
                image = _blend_with_level(image, 0.0, factor)
            case 1:
                mean_luma = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean()
                image = _blend_with_level(image, mean_luma, factor)
            case _:
                grey = convert_to_grey(image)
                image = cv2.addWeighted(image, factor, grey, 1 - factor, 0)
    return image


def _blend_with_level(
    image: np.ndarray,
    level: float,
    factor: float,
) -> np.ndarray:
    """Return factor * image + (1 - factor) * level."""
    blended = np.rint(level + factor * (_LEVELS - level))
    table = np.clip(blended, 0, 255).astype(np.uint8)
    return cv2.LUT(image, table)


def erase(
    rng: np.random.Generator,
    image: np.ndarray,
) -> np.ndarray:
    """Replace a random rectangle by uniform noise. Writes into the image.

    The noise has all values of 8 bits, or of normalised channels those from -1 to 1.

    Source: Random Erasing (1708.04896), with the largest area of timm (1/3; the paper has 0.4).
    """
    height, width = image.shape[:2]

    for _ in range(ERASING_ATTEMPTS):
        area = rng.uniform(*ERASED_AREA) * height * width
        aspect = ERASED_ASPECT ** rng.uniform(-1, 1)  # height / width
        rows = round(math.sqrt(area * aspect))
        columns = round(math.sqrt(area / aspect))
        if not (0 < rows < height and 0 < columns < width):
            continue

        top = int(rng.integers(height - rows + 1))
        left = int(rng.integers(width - columns + 1))
        shape = (rows, columns, image.shape[-1])
        noise: np.ndarray
        if image.dtype == np.uint8:
            noise = rng.integers(256, size=shape, dtype=np.uint8)
        else:
            noise = rng.uniform(-1, 1, size=shape)
        image[top : top + rows, left : left + columns] = noise
        break
    return image
