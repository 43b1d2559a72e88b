"""A synthetic set of photographs, and planted copies of images, by kind."""

import cv2
import numpy as np
from sklearn.datasets import load_sample_images

from vit_jax.data.crops import Box, cut

WINDOW = 140  # pixels of a crop of a real photograph


def photographs(count, seed=0, sides=(240, 480)):
    """Return images, uint8 (H, W, 3), of random clouds of noise, gradients and shaded shapes.

    Sides in pixels are from the first number up to the second.
    """
    images = []
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        images.append(_make_photograph(rng, sides))
    return images


def windows():
    """Return disjoint parts of the two photographs of scikit-learn.

    Neighbours are hard to tell apart: they show the same sky or petals.
    """
    parts = []
    for image in load_sample_images().images:
        height, width = image.shape[:2]
        for top in range(0, height - WINDOW + 1, WINDOW):
            for left in range(0, width - WINDOW + 1, WINDOW):
                box = Box(top, left, WINDOW, WINDOW)
                part = cut(image, box)
                parts.append(np.ascontiguousarray(part))
    return parts


def _make_photograph(rng, sides):
    size = rng.integers(*sides, 2).tolist()
    image = _make_gradient(rng, *size)
    contrast = rng.uniform(20, 70)
    image = image + contrast * _make_clouds(rng, *size)

    for _ in range(rng.integers(3, 12)):
        mask = _draw_shape(rng, *size)
        contrast = rng.uniform(0, 40)
        texture = contrast * _make_clouds(rng, *size)
        shape = _make_gradient(rng, *size) + texture
        image = image * (1 - mask) + mask * shape

    return np.clip(image, 0, 255).astype(np.uint8)


def _draw_shape(rng, height, width):
    """Return the mask (H, W, 1) of a random ellipse or polygon with soft borders."""
    mask = np.zeros((height, width), np.float32)
    size = np.array([width, height])
    centre = rng.integers(size).tolist()
    axes = rng.integers(10, size // 2).tolist()

    if rng.random() < 0.5:
        angle = float(rng.uniform(0, 180))
        cv2.ellipse(
            mask,
            centre,
            axes,
            angle,
            startAngle=0,
            endAngle=360,
            color=1.0,
            thickness=-1,
        )
    else:
        num_corners = rng.integers(3, 6)
        corners = rng.integers(0, size, (num_corners, 2))
        cv2.fillPoly(mask, [corners.astype(np.int32)], 1.0)

    softness = float(rng.uniform(0.5, 4))
    soft_mask = cv2.GaussianBlur(mask, (0, 0), softness)
    return soft_mask[..., None]


def _make_gradient(rng, height, width):
    """Return colours (H, W, 3) between four random ones at the corners."""
    corners = rng.uniform(0, 255, (2, 2, 3)).astype(np.float32)
    mean = corners.mean(axis=(0, 1))
    softer_corners = mean + 0.5 * (corners - mean)

    return cv2.resize(
        softer_corners,
        (width, height),
        interpolation=cv2.INTER_LINEAR,
    )


def _make_clouds(rng, height, width):
    """Return noise (H, W, 1) of variance 1 whose amplitude falls with the frequency.

    Photographs have such spectra.
    """
    row_frequency = np.fft.fftfreq(height)[:, None]
    column_frequency = np.fft.rfftfreq(width)[None]
    frequency = np.hypot(row_frequency, column_frequency) + 1 / max(height, width)

    white_noise = rng.standard_normal((height, width))
    white_spectrum = np.fft.rfft2(white_noise)
    spectrum = white_spectrum / frequency ** rng.uniform(1, 2)
    noise = np.fft.irfft2(spectrum, (height, width)).astype(np.float32)

    clouds = (noise - noise.mean()) / noise.std()
    return clouds[..., None]


def _make_jpeg_copy(quality):
    def copy(image):
        _, encoded = cv2.imencode(
            ".jpg",
            image,
            (cv2.IMWRITE_JPEG_QUALITY, quality),
        )
        return cv2.imdecode(encoded, cv2.IMREAD_COLOR)

    return copy


def _make_resized_copy(scale):
    def copy(image):
        return cv2.resize(
            image,
            None,
            fx=scale,
            fy=scale,
            interpolation=cv2.INTER_CUBIC,
        )

    return copy


def _make_crop(share, place):
    """Keep a share of each side, from the corner (0) to the centre (0.5)."""

    def copy(image):
        height, width = image.shape[:2]
        kept_height = round(share * height)
        kept_width = round(share * width)
        top = round(place * (height - kept_height))
        left = round(place * (width - kept_width))

        box = Box(top, left, kept_height, kept_width)
        return cut(image, box)

    return copy


def _make_shifted_copy(
    factor,
    offset,
):
    """Multiply the channels by factors and add an offset, in grey levels."""

    def copy(image):
        shifted = image * np.array(factor) + offset
        return np.clip(shifted, 0, 255).astype(np.uint8)

    return copy


def _remove_colour(image):
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB)


def _mirror(image):
    return np.ascontiguousarray(image[:, ::-1])


def _mirror_and_shrink(image):
    half = _make_resized_copy(0.5)(_mirror(image))
    return _make_jpeg_copy(50)(half)


# Changes that make a copy of an image; each takes and returns uint8 (H, W, 3).
COPIES = {
    "JPEG quality 95": _make_jpeg_copy(95),
    "JPEG quality 75": _make_jpeg_copy(75),
    "JPEG quality 50": _make_jpeg_copy(50),
    "JPEG quality 30": _make_jpeg_copy(30),
    "resized to 50 %": _make_resized_copy(0.5),
    "resized to 200 %": _make_resized_copy(2.0),
    "brighter, more contrast": _make_shifted_copy((1.2, 1.2, 1.2), 15),
    "darker, less contrast": _make_shifted_copy((0.7, 0.7, 0.7), 10),
    "colours shifted": _make_shifted_copy((1.15, 1.0, 0.8), 0),
    "grey": _remove_colour,
    "mirrored": _mirror,
    "mirrored, JPEG 50, 50 %": _mirror_and_shrink,
    "crop of 95 %, centre": _make_crop(0.95, 0.5),
    "crop of 90 %, centre": _make_crop(0.9, 0.5),
    "crop of 90 %, corner": _make_crop(0.9, 0.0),
}
