"""What is done to one record, for training and for testing: from stored bytes to uint8 pixels of the model's size.

Both transforms are values that can be pickled. They are pure: what is random comes from the generator given.
Nothing here scales values or mixes images; that is done in the train step, on the device.
"""

import dataclasses
from typing import Literal

import cv2
import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data import augment, crops, images
from vit_jax.data.sources import Record


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Decode, crop, flip, RandAugment; fields as in `InputConfig`."""

    image_size: tuple[int, int]
    crop: Literal["inception", "resize", "resize_short_side", "shift", "none"]
    crop_area_fraction: tuple[float, float]
    crop_distribution: Literal["tf", "torchvision"]
    shift_pixels: int
    flip: bool
    randaugment_layers: int
    randaugment_magnitude: int
    resize_pixels: int | None = None

    def __call__(self, record: Record, rng: np.random.Generator) -> np.ndarray:
        """Returns uint8 (height, width, 3), RGB; raises `UnreadableImage`."""
        image = self._crop(images.decode(record.image), rng)
        if self.flip and rng.random() < 0.5:
            image = cv2.flip(image, 1)
        if self.randaugment_layers:
            image = augment.randaugment(rng, image, self.randaugment_layers, self.randaugment_magnitude)
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
        if self.resize == "direct":  # as the released code's: a sample for each pixel, not an average
            return images.resize_bilinear(image, self.image_size)
        height, width = self.image_size
        covered = (round(height / self.crop_fraction), round(width / self.crop_fraction))
        return images.central_crop(images.resize_to_cover(image, covered), self.image_size)


def build_train_transform(config: InputConfig) -> TrainTransform:
    """The training transform of a config.

    Raises:
      ValueError: a value lies outside its range, or belongs to a crop or an augmentation that is off.
    """
    low, high = config.crop_area_fraction
    if not 0.0 < low <= high <= 1.0:
        raise ValueError(f"crop_area_fraction is {(low, high)}; give a smallest and a largest part, above 0, up to 1.")
    if config.shift_pixels < 0 or (config.shift_pixels > 0) != (config.train_crop == "shift"):
        raise ValueError(
            f'shift_pixels is {config.shift_pixels} with train_crop="{config.train_crop}"; give at least 1 with '
            'train_crop="shift" and 0 otherwise.'
        )
    layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
    if layers < 0 or magnitude < 0 or (magnitude and not layers):
        raise ValueError(f"randaugment_layers={layers}, randaugment_magnitude={magnitude}; give both, or 0 for both.")
    return TrainTransform(
        image_size=_checked_size(config),
        crop=config.train_crop,
        crop_area_fraction=(low, high),
        crop_distribution=config.crop_distribution,
        shift_pixels=config.shift_pixels,
        flip=config.flip,
        randaugment_layers=layers,
        randaugment_magnitude=magnitude,
        resize_pixels=_checked_resize_pixels(config),
    )


def build_evaluation_transform(config: InputConfig) -> EvaluationTransform:
    """The transform of every evaluation.

    Raises:
      ValueError: the size or test_crop_fraction lies outside its range.
    """
    if not 0.0 < config.test_crop_fraction <= 1.0:
        raise ValueError(f"test_crop_fraction is {config.test_crop_fraction}; give a part above 0, up to 1.")
    return EvaluationTransform(_checked_size(config), config.test_resize, config.test_crop_fraction)


def _checked_resize_pixels(config: InputConfig) -> int | None:
    pixels, resizes = config.train_resize_pixels, config.train_crop in ("resize", "resize_short_side")
    if resizes != (pixels is not None):
        raise ValueError(
            f'train_resize_pixels is {pixels} with train_crop="{config.train_crop}"; give a number with "resize" and '
            '"resize_short_side", and None otherwise.'
        )
    if pixels is not None and pixels < max(config.image_size):
        raise ValueError(
            f"train_resize_pixels is {pixels}, and a crop of image_size {tuple(config.image_size)} does not fit; give "
            f"at least {max(config.image_size)}."
        )
    return pixels


def _checked_size(config: InputConfig) -> tuple[int, int]:
    if len(config.image_size) != 2 or min(config.image_size) < 1:
        raise ValueError(f"image_size is {config.image_size}; give height and width in pixels, at least 1 each.")
    return (int(config.image_size[0]), int(config.image_size[1]))
