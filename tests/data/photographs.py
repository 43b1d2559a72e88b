"""A synthetic set of photographs, and planted copies of images, by kind."""

from collections.abc import Callable, Mapping

import cv2
import numpy as np
from sklearn.datasets import load_sample_images

WINDOW = 140  # pixels of a crop of a real photograph


def photographs(count: int, seed: int = 0, sides: tuple[int, int] = (240, 480)) -> list[np.ndarray]:
    """Return images, uint8 (H, W, 3): clouds of noise, gradients and shaded shapes, all at random.

    Sides in pixels are from the first number up to the second.
    """
    return [_photograph(np.random.default_rng((seed, number)), sides) for number in range(count)]


def windows() -> list[np.ndarray]:
    """Return parts of the two photographs of scikit-learn that do not overlap: neighbours have sky or petals alike."""
    return [
        np.ascontiguousarray(image[top : top + WINDOW, left : left + WINDOW])
        for image in load_sample_images().images
        for top in range(0, image.shape[0] - WINDOW + 1, WINDOW)
        for left in range(0, image.shape[1] - WINDOW + 1, WINDOW)
    ]


def _photograph(rng: np.random.Generator, sides: tuple[int, int]) -> np.ndarray:
    height, width = (int(side) for side in rng.integers(*sides, 2))
    image = (
        _gradient(rng, height, width) + rng.uniform(20, 70) * _clouds(rng, height, width)[..., None]
    )

    for _ in range(rng.integers(3, 12)):
        mask = np.zeros((height, width), np.float32)
        centre = int(rng.integers(width)), int(rng.integers(height))
        axes = int(rng.integers(10, width // 2)), int(rng.integers(10, height // 2))

        if rng.random() < 0.5:
            cv2.ellipse(mask, centre, axes, float(rng.uniform(0, 180)), 0, 360, 1.0, -1)
        else:
            cv2.fillPoly(
                mask,
                [rng.integers(0, (width, height), (rng.integers(3, 6), 2)).astype(np.int32)],
                1.0,
            )

        mask = cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(0.5, 4)))[..., None]
        texture = rng.uniform(0, 40) * _clouds(rng, height, width)[..., None]
        image = image * (1 - mask) + mask * (_gradient(rng, height, width) + texture)

    return np.clip(image, 0, 255).astype(np.uint8)


def _gradient(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    corners = rng.uniform(0, 255, (2, 2, 3)).astype(np.float32)
    mean = corners.mean(axis=(0, 1))

    return cv2.resize(
        mean + 0.5 * (corners - mean),
        (width, height),
        interpolation=cv2.INTER_LINEAR,
    )


def _clouds(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return noise whose amplitude falls with the frequency, as in photographs; of variance 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]) + 1 / max(
        height,
        width,
    )
    spectrum = np.fft.rfft2(rng.standard_normal((height, width))) / frequency ** rng.uniform(1, 2)
    noise = np.fft.irfft2(spectrum, (height, width)).astype(np.float32)

    return (noise - noise.mean()) / noise.std()


def _jpeg(quality: int) -> Callable[[np.ndarray], np.ndarray]:
    def copy(image: np.ndarray) -> np.ndarray:
        return cv2.imdecode(
            cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, quality))[1],
            cv2.IMREAD_COLOR,
        )

    return copy


def _resize(scale: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda image: cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)


def _crop(share: float, place: float) -> Callable[[np.ndarray], np.ndarray]:
    """Keep a share of each side, from the corner (0) to the centre (0.5)."""

    def copy(image: np.ndarray) -> np.ndarray:
        height, width = (round(share * side) for side in image.shape[:2])
        top, left = (
            round(place * (side - kept))
            for side, kept in zip(image.shape, (height, width), strict=False)
        )

        return image[top : top + height, left : left + width]

    return copy


def _shift(factor: tuple[float, ...], offset: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda image: np.clip(image * np.array(factor) + offset, 0, 255).astype(np.uint8)


def _grey(image: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def _mirror(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[:, ::-1])


COPIES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    **{f"JPEG quality {quality}": _jpeg(quality) for quality in (95, 75, 50, 30)},
    "resized to 50 %": _resize(0.5),
    "resized to 200 %": _resize(2.0),
    "brighter, more contrast": _shift((1.2, 1.2, 1.2), 15),
    "darker, less contrast": _shift((0.7, 0.7, 0.7), 10),
    "colours shifted": _shift((1.15, 1.0, 0.8), 0),
    "grey": _grey,
    "mirrored": _mirror,
    "mirrored, JPEG 50, 50 %": lambda image: _jpeg(50)(_resize(0.5)(_mirror(image))),
    "crop of 95 %, centre": _crop(0.95, 0.5),
    "crop of 90 %, centre": _crop(0.9, 0.5),
    "crop of 90 %, corner": _crop(0.9, 0.0),
}
"""A change that makes a copy of an image; takes and returns uint8 (H, W, 3)."""
