"""The transforms of one record, for training and for testing: from stored bytes to uint8 pixels of the model's size.

Both are values that can be pickled, and pure: random numbers come from the generator given. Nothing here scales
values or mixes images; the train step does so, on the device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data import augment, crops, images
from vit_jax.data.records import Record
from vit_jax.references import resolve

Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Takes an image uint8 (H, W, 3), which it may write into; returns one of the same shape and dtype."""


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Decode, crop, flip, RandAugment, a user's own augmentations; fields as in `InputConfig`.

    An augmentation is a reference "package.module:name", resolved once in each process, or a callable that can be
    pickled to workers.
    """

    image_size: tuple[int, int]
    crop: Literal["inception", "resize", "resize_short_side", "shift", "none"]
    crop_area_fraction: tuple[float, float]
    crop_distribution: Literal["tf", "torchvision"]
    shift_pixels: int
    flip: bool
    randaugment_layers: int
    randaugment_magnitude: int
    resize_pixels: int | None = None
    augmentations: tuple[str | Augmentation, ...] = ()

    def __call__(self, record: Record, rng: np.random.Generator) -> np.ndarray:
        """Returns uint8 (height, width, 3), RGB.

        Raises:
          UnreadableImage: the record's.
          ValueError: an augmentation returned something else than such an image.
        """
        image = self._crop(images.decode(record.image), rng)
        if self.flip and rng.random() < 0.5:
            image = cv2.flip(image, 1)
        if self.randaugment_layers:
            image = augment.randaugment(rng, image, self.randaugment_layers, self.randaugment_magnitude)
        for augmentation in self.augmentations:
            image = _apply(augmentation, image, rng)
        return image

    def _crop(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.crop == "inception":
            height, width = image.shape[:2]
            box = crops.sample_inception_box(rng, height, width, self.crop_area_fraction, self.crop_distribution)
            return images.resize_bilinear(crops.cut(image, box), self.image_size)
        if self.resize_pixels is not None:
            square = (self.resize_pixels, self.resize_pixels)
            resize = images.resize_bilinear if self.crop == "resize" else images.resize_to_cover
            return crops.random_crop(rng, resize(image, square), self.image_size)
        image = images.resize_bilinear(image, self.image_size)
        return crops.random_shift(rng, image, self.shift_pixels) if self.crop == "shift" else image


@dataclasses.dataclass(frozen=True)
class EvaluationTransform:
    """Decode and resize, the same for every pass; fields as in `InputConfig`."""

    image_size: tuple[int, int]
    resize: Literal["short_side", "direct"]
    crop_fraction: float

    def __call__(self, record: Record) -> np.ndarray:
        """Returns uint8 (height, width, 3), RGB; raises `UnreadableImage`."""
        image = images.decode(record.image)
        if self.resize == "direct":  # as the released code does: a sample for each pixel, not an average
            return images.resize_bilinear(image, self.image_size)
        height, width = self.image_size
        covered = (round(height / self.crop_fraction), round(width / self.crop_fraction))
        return images.central_crop(images.resize_to_cover(image, covered), self.image_size)


def build_train_transform(config: InputConfig) -> TrainTransform:
    """The training transform of a valid config.

    Raises:
      ValueError: an augmentation cannot be imported or called.
    """
    for reference in config.augmentations:
        _resolved(reference)
    return TrainTransform(
        image_size=config.image_size,
        crop=config.train_crop,
        crop_area_fraction=config.crop_area_fraction,
        crop_distribution=config.crop_distribution,
        shift_pixels=config.shift_pixels,
        flip=config.flip,
        randaugment_layers=config.randaugment_layers,
        randaugment_magnitude=config.randaugment_magnitude,
        resize_pixels=config.train_resize_pixels,
        augmentations=config.augmentations,
    )


def build_evaluation_transform(config: InputConfig) -> EvaluationTransform:
    """The transform of every evaluation, of a valid config."""
    return EvaluationTransform(config.image_size, config.test_resize, config.test_crop_fraction)


@functools.cache
def _resolved(reference: str) -> Augmentation:
    augmentation = resolve(reference, "config.input.augmentations")
    if not callable(augmentation):
        raise ValueError(
            f"config.input.augmentations: {reference!r} is {type(augmentation).__name__}; give a function of an image "
            "and a numpy Generator."
        )
    return augmentation


def _apply(augmentation: str | Augmentation, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    function = _resolved(augmentation) if isinstance(augmentation, str) else augmentation
    result = function(image.copy(), rng)  # a copy, because the image may be part of the stored record
    if not isinstance(result, np.ndarray) or (result.dtype, result.shape) != (image.dtype, image.shape):
        is_array = isinstance(result, np.ndarray)
        found = f"{result.dtype} {result.shape}" if is_array else type(result).__name__
        raise ValueError(f"The augmentation {augmentation!r} returned {found}; return uint8 {image.shape}.")
    return result
