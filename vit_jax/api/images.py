"""Images of the caller's as records, and how the images of a network are prepared."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.config.schema import INTERPOLATIONS
from vit_jax.config.validate import is_value_range
from vit_jax.data.files import read_file
from vit_jax.data.records import Source
from vit_jax.data.transforms import EvaluationTransform


class Images(Source):
    """Images as records without labels: paths, encoded files or pixels.

    Attributes:
      batch: the array (B, H, W, C), where the images are one.
    """

    class_names = ()

    def __init__(self, images: Any) -> None:
        """Takes one image, an array of images, or any iterable of images."""
        is_array = hasattr(images, "ndim")
        is_iterable = isinstance(images, Iterable) and not isinstance(images, (str, bytes, os.PathLike))
        is_many = images.ndim == 4 if is_array else is_iterable
        self.batch = images if is_array and is_many else None
        self._images: Any = images if is_array and is_many else list(images) if is_many else [images]
        if not len(self._images):
            raise ValueError("The list of images is empty; give at least one.")
        self.labels = np.zeros(len(self._images), np.int32)

    def image_of(self, index: int) -> bytes | np.ndarray:
        image = self._images[index]
        if isinstance(image, (str, os.PathLike)):
            return read_file(os.path.expanduser(os.fspath(image)))
        return image if isinstance(image, bytes) else np.asarray(image)

    def name_of(self, index: int) -> str:
        image = self._images[index]
        return os.fspath(image) if isinstance(image, (str, os.PathLike)) else f"image {index}"


def stored_transform(
    stored: Mapping[str, Any] | None,
    image_size: tuple[int, int],
    source: str,
    resize: str | None = None,
    crop_fraction: float | None = None,
    interpolation: str | None = None,
    exif_orientation: bool | None = None,
    value_range: tuple[float, float] | None = None,
) -> EvaluationTransform | None:
    """Return how images are prepared, as the weights (`stored`) or the caller state it; None where neither does.

    The caller may turn photographs upright, or give a range of values, against what the weights state: both depend on
    how files are stored.

    Raises:
      ValueError: another value is not allowed, contradicts the weights, or lacks the others.
    """
    known = {field: value for field, value in (stored or {}).items() if value is not None}
    given = {"resize": resize, "crop_fraction": crop_fraction, "interpolation": interpolation}
    for field, value in given.items():
        if value is None:
            continue
        if known.setdefault(field, value) != value:
            raise ValueError(f"{field}={value}: the weights were trained with {field}={known[field]}; leave it out.")
    if known.get("resize") == "direct":
        known.setdefault("crop_fraction", 1.0)
    if "resize" in known and "crop_fraction" in known:
        how = known["resize"], known["crop_fraction"], known.get("interpolation")
        transform = build_transform(*how, image_size, source)
        is_upright = known.get("exif_orientation") is True if exif_orientation is None else exif_orientation
        values = known.get("value_range") if value_range is None else value_range
        if values is not None and not is_value_range(values):
            raise ValueError(f"{source}: value_range={values!r} must be two finite numbers, low < high.")
        return dataclasses.replace(
            transform,
            exif_orientation=is_upright,
            value_range=None if values is None else (values[0], values[1]),
            library="timm" if known.get("resize_library") == "timm" else "huggingface",
        )
    if any(value is not None for value in (*given.values(), exif_orientation, value_range)):
        raise undescribed(source)
    return None


def undescribed(source: str) -> ValueError:
    """The error for weights that do not state how images are prepared."""
    return ValueError(
        f"{source} does not state how images are prepared: add --resize=direct (both sides to the network's size; in "
        'Python resize="direct") or --resize=short_side --crop_fraction=0.875 (the middle of the image).'
    )


def build_transform(
    resize: Any, fraction: Any, interpolation: Any, image_size: tuple[int, int], source: str
) -> EvaluationTransform:
    """Validate values that may come from a foreign file."""
    if resize not in ("direct", "short_side"):
        raise ValueError(f"{source}: resize={resize!r} is unknown; it is direct or short_side.")
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise ValueError(f"{source}: crop_fraction={fraction!r} must be a number above 0, up to 1.")
    if resize == "direct" and fraction != 1:
        raise ValueError(f"{source}: crop_fraction={fraction} has no effect with resize=direct; leave it out.")
    if interpolation not in (None, *INTERPOLATIONS):
        raise ValueError(
            f"{source}: interpolation={interpolation!r} is unknown; it is {' or '.join(INTERPOLATIONS)}, or not given."
        )
    return EvaluationTransform(image_size, resize, float(fraction), interpolation=interpolation)
