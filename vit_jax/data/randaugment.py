"""RandAugment of AugReg: 16 operations on uint8 (H, W, 3) by OpenCV and lookup tables.

Source: "How to train your ViT" (2106.10270) and its released code. The quirks of the TF original
are kept: Posterize and Solarize weaken as the magnitude grows, magnitude 0 is not "off", and
Contrast takes the number of pixels / 256 for the mean grey. In "wrapping" arithmetic, Solarize's
threshold and Posterize's shift are bytes as in the original, so that Solarize begins again at 0
from magnitude 10 on. Unlike the original, blends round to the nearest level.
"""

from collections.abc import Callable, Mapping

import cv2
import numpy as np

from vit_jax.data.augment import convert_to_grey

GREY = (128, 128, 128)
LEVELS = np.arange(256)

Operation = Callable[[np.random.Generator, np.ndarray, float], np.ndarray]
"""Takes random numbers, an image uint8 (H, W, 3) and magnitude / 10; returns an image of the same
shape."""


def apply_randaugment(
    rng: np.random.Generator,
    image: np.ndarray,
    layers: int,
    magnitude: float,
    arithmetic: str = "wrapping",
) -> np.ndarray:
    """Apply `layers` operations of a magnitude, 0 to 10 or more, each sampled uniformly.

    `arithmetic` is "wrapping" or "saturating". Takes and returns uint8 (H, W, 3), RGB; the image is
    not modified.
    """
    for choice in rng.integers(len(OPERATIONS), size=layers):
        operation = OPERATIONS[choice]
        if arithmetic == "saturating":
            operation = SATURATING.get(operation, operation)
        image = operation(rng, image, magnitude / 10)
    return image


def autocontrast(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Stretch each channel to 0 to 255; a channel of one value stays."""
    low = image.min(axis=(0, 1)).astype(int)
    high = image.max(axis=(0, 1)).astype(int)
    span = np.maximum(high - low, 1)

    levels = LEVELS[:, None]
    stretched = np.clip((levels - low) * 255 // span, 0, 255)
    table = np.where(high > low, stretched, levels)
    return _look_up(image, table)


def equalize(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Flatten the histogram of each channel, by the rule of PIL's ImageOps."""
    tables = [_build_equalizing_table(image, channel) for channel in range(3)]
    return _look_up(image, np.stack(tables, axis=1))


def invert(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Return 255 minus every value."""
    return cv2.bitwise_not(image)


def rotate(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Turn by 30 degrees x strength about the centre."""
    height, width = image.shape[:2]
    centre = ((width - 1) / 2, (height - 1) / 2)
    degrees = _choose_sign(rng, 30.0 * strength)
    matrix = cv2.getRotationMatrix2D(centre, degrees, 1.0)
    return _warp(image, matrix)


def posterize(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Keep the highest int(4 x strength) bits, at least one.

    These are all bits at magnitude 20, and again one above 22.
    """
    dropped_bits = (8 - int(4 * strength)) % 256  # a byte
    shift = min(dropped_bits, 7)  # the most that TF takes
    return _look_up(image, LEVELS >> shift << shift)


def solarize(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Invert values from int(256 x strength) modulo 256 on: at magnitudes 0, 10 and 20 all."""
    threshold = int(256 * strength) % 256
    table = np.where(threshold > LEVELS, LEVELS, 255 - LEVELS)
    return _look_up(image, table)


def posterize_saturating(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Keep the highest int(4 x strength) bits: none at 0, all from magnitude 20 on."""
    shift = max(8 - int(4 * strength), 0)
    return _look_up(image, LEVELS >> shift << shift)


def solarize_saturating(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Invert values from int(256 x strength) on: from magnitude 10 on none."""
    threshold = int(256 * strength)
    table = np.where(threshold > LEVELS, LEVELS, 255 - LEVELS)
    return _look_up(image, table)


def color(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Blend from grey to the image, and beyond to stronger colours."""
    return _blend(convert_to_grey(image), image, strength)


def contrast(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Blend from an even grey of (number of pixels) / 256, 196 at 224 x 224, to the image."""
    height, width = image.shape[:2]
    grey = min(height * width // 256, 255)
    return _look_up(image, _blend_levels(grey, strength))


def brightness(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Blend from black to the image and beyond."""
    return _look_up(image, _blend_levels(0, strength))


def sharpness(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Blend from a smoothed image, except its outermost pixels, to the image and beyond."""
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32)
    kernel /= 13
    filtered = cv2.filter2D(image, -1, kernel)
    smooth = image.copy()
    smooth[1:-1, 1:-1] = filtered[1:-1, 1:-1]
    return _blend(smooth, image, strength)


def cutout(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Cover a square of 2 x int(40 x strength) pixels around a random point with grey."""
    half = int(40 * strength)
    row, column = map(int, rng.integers(image.shape[:2]))
    top = max(row - half, 0)
    left = max(column - half, 0)

    image = image.copy()
    image[top : row + half, left : column + half] = GREY
    return image


def solarize_add(
    rng: np.random.Generator,
    image: np.ndarray,
    strength: float,
) -> np.ndarray:
    """Add int(110 x strength) to values below 128."""
    added = int(110 * strength)
    brighter = np.minimum(LEVELS + added, 255)
    table = np.where(LEVELS < 128, brighter, LEVELS)
    return _look_up(image, table)


Matrix = list[list[float]]


def _make_move(build_matrix: Callable[[float], Matrix], most: float) -> Operation:
    """Return an operation that moves pixels by the matrix of `most` x strength, either way."""

    def move(rng: np.random.Generator, image: np.ndarray, strength: float) -> np.ndarray:
        matrix = build_matrix(_choose_sign(rng, most * strength))
        return _warp(image, np.array(matrix))

    return move


def _shear_rows(slope: float) -> Matrix:
    """Move each row by its distance from the top."""
    return [[1, slope, 0], [0, 1, 0]]


def _shear_columns(slope: float) -> Matrix:
    """Move each column by its distance from the left."""
    return [[1, 0, 0], [slope, 1, 0]]


def _move_right(pixels: float) -> Matrix:
    return [[1, 0, pixels], [0, 1, 0]]


def _move_down(pixels: float) -> Matrix:
    return [[1, 0, 0], [0, 1, pixels]]


shear_x = _make_move(_shear_rows, most=0.3)
shear_y = _make_move(_shear_columns, most=0.3)
translate_x = _make_move(_move_right, most=100.0)  # at every image size
translate_y = _make_move(_move_down, most=100.0)

OPERATIONS: tuple[Operation, ...] = (
    autocontrast,
    equalize,
    invert,
    rotate,
    posterize,
    solarize,
    color,
    contrast,
    brightness,
    sharpness,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
    cutout,
    solarize_add,
)
SATURATING: Mapping[Operation, Operation] = {
    posterize: posterize_saturating,
    solarize: solarize_saturating,
}


def _choose_sign(rng: np.random.Generator, value: float) -> float:
    if rng.random() < 0.5:
        return value
    return -value


def _compute_weight(strength: float) -> float:
    """Return the weight of the image: 0 is the degenerate image, 1 the original.

    A larger weight exaggerates their difference.
    """
    return 1.8 * strength + 0.1


def _blend(degenerate: np.ndarray, image: np.ndarray, strength: float) -> np.ndarray:
    factor = _compute_weight(strength)
    return cv2.addWeighted(
        image,
        factor,
        degenerate,
        1 - factor,
        0,
    )


def _blend_levels(degenerate: int, strength: float) -> np.ndarray:
    difference = LEVELS - degenerate
    blended = degenerate + _compute_weight(strength) * difference
    return np.clip(np.rint(blended), 0, 255)


def _warp(image: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Resample by nearest neighbour, grey outside.

    The matrix maps pixels of the result to pixels of the image.
    """
    size = (image.shape[1], image.shape[0])
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(
        image,
        matrix,
        size,
        flags=flags,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=GREY,
    )


def _look_up(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Look up values in a table (256,) for all channels or (256, 3) for each."""
    return cv2.LUT(image, table.astype(np.uint8).reshape(1, 256, -1))


def _build_equalizing_table(image: np.ndarray, channel: int) -> np.ndarray:
    counts = cv2.calcHist([image], [channel], None, [256], [0, 256])
    counts = counts.astype(np.int64).ravel()
    highest_level = np.flatnonzero(counts)[-1]
    step = (counts.sum() - counts[highest_level]) // 255
    if step == 0:
        return LEVELS

    below = np.cumsum(counts) - counts
    levels = (below + step // 2) // step
    return np.minimum(levels, 255)
