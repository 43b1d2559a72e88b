"""The transforms of one record for training and evaluation, from stored bytes to uint8 pixels.

Both can be pickled, and are pure: random numbers come from the generator of the caller. The train
step scales and mixes.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np

from vit_jax.config.schema import InputConfig, Interpolation
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.data import augment, crops, randaugment, resampling
from vit_jax.data.decoding import images
from vit_jax.data.decoding.bands import BandChoice, choose_bands
from vit_jax.data.decoding.depth import ValueRange
from vit_jax.data.records import Record
from vit_jax.imports.references import explain_call, resolve

_UNREDUCED = (2**31, 2**31)
"""A size for which no JPEG is decoded at a fraction of its size."""

Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Takes an image uint8 (H, W, 3), which it may write into; returns one of the same shape and
dtype."""


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Decode, crop, flip and augment a record.

    Augmentations are RandAugment, ThreeAugment, colour jitter, user-defined functions and random
    erasing. References to user-defined augmentations are resolved once in each process.

    Raises:
      ValueError: an augmentation cannot be imported or called.
    """

    config: InputConfig

    def __post_init__(self) -> None:
        for reference in self.config.augmentations:
            _import_augmentation(reference)

    @property
    def image_size(self) -> tuple[int, int]:
        return self.config.pixels

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return *self.config.pixels, self.config.channels

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.config.pixel_dtype)

    @functools.cached_property
    def bands(self) -> BandChoice | None:
        """The bands to read; None: RGB."""
        return choose_bands(self.config)

    def __call__(self, record: Record, rng: np.random.Generator) -> np.ndarray:
        """Return uint8 (height, width, 3), RGB, or float32; errors as `plan` and its function."""
        return self.plan(record, rng)()

    def plan(
        self,
        record: Record,
        rng: np.random.Generator,
        out: np.ndarray | None = None,
    ) -> Callable[[], np.ndarray]:
        """Choose the crop by the header of a file; decode nothing yet.

        Returns:
          A function that returns uint8 (height, width, 3), RGB: a new array, or `out`, which may
          also hold intermediate results. It raises `UnreadableImage`, and ValueError if an
          augmentation returns another shape or dtype. With bands it returns them normalised, in
          float32, and may raise `WrongBands`.

        Raises:
          UnreadableImage: the record cannot be decoded.
        """
        if self.bands is not None:
            out = None  # OpenCV writes only into some arrays of other numbers of channels
        crop = self._plan_crop(record.image, rng, out)
        return functools.partial(self._finish, crop, rng, out)

    def _finish(
        self,
        crop: Callable[[], np.ndarray],
        rng: np.random.Generator,
        out: np.ndarray | None,
    ) -> np.ndarray:
        """Crop, flip and augment an image.

        The order of random numbers is part of a run's reproducibility.
        """
        config = self.config
        image = crop()
        if config.flip and rng.random() < 0.5:
            image = _flip(image, 1, out)
        if config.vertical_flip and rng.random() < 0.5:
            image = _flip(image, 0, out)
        if config.rotate90:
            image = augment.rotate_90_randomly(rng, image)
        if config.randaugment_layers:
            image = randaugment.apply_randaugment(
                rng,
                image,
                config.randaugment_layers,
                config.randaugment_magnitude,
                config.randaugment_arithmetic,
            )
        if config.three_augment:
            image = augment.apply_three_augment(rng, image)
        if config.color_jitter:
            image = augment.jitter_colors(rng, image, config.color_jitter)
        for reference in config.augmentations:
            image = _apply_custom(reference, image, rng)
        if self.bands is not None:
            image = self.bands.normalise(image)
        if config.erasing_fraction and rng.random() < config.erasing_fraction:
            if image is not out:
                image = image.copy()  # it may be the stored record
            image = augment.erase(rng, image)
        return image

    def _plan_crop(
        self,
        stored: bytes | np.ndarray,
        rng: np.random.Generator,
        out: np.ndarray | None,
    ) -> Callable[[], np.ndarray]:
        config = self.config
        if config.train_crop != "inception":
            return functools.partial(self._crop, stored, rng)

        def choose(height: int, width: int) -> crops.Box:
            return crops.sample_inception_box(
                rng,
                height,
                width,
                config.crop_area_fraction,
                config.crop_distribution,
            )

        megapixels = config.max_image_megapixels
        is_upright = config.exif_orientation
        values = config.value_range
        bands = self.bands
        size = config.pixels if config.train_interpolation is None else _UNREDUCED
        decode = images.plan_crop(stored, choose, size, megapixels, is_upright, values, bands)
        if bands is not None:
            return lambda: self._resize(bands.complete(decode()), config.pixels)
        if config.train_interpolation is not None:
            return lambda: self._resize(decode(), config.pixels)
        return lambda: images.resize_bilinear(decode(), config.pixels, out)

    def _crop(self, stored: bytes | np.ndarray, rng: np.random.Generator) -> np.ndarray:
        config = self.config
        crop = config.train_crop
        pixels = config.train_resize_pixels
        image = images.decode(
            stored,
            config.max_image_megapixels,
            config.exif_orientation,
            config.value_range,
            self.bands,
        )
        if self.bands is not None:
            image = self.bands.complete(image)
        if pixels is not None:
            resize = self._resize if crop == "resize" else self._cover
            resized = resize(image, (pixels, pixels))
            return crops.crop_randomly(rng, resized, config.pixels)
        if crop == "simple":
            covering = self._cover(image, config.pixels)
            return crops.crop_simply(rng, covering, config.pixels)

        image = self._resize(image, config.pixels)
        if crop == "shift":
            return crops.shift_randomly(rng, image, config.shift_pixels)
        return image

    def _resize(self, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return the image with this height and width."""
        interpolation = self.config.train_interpolation
        if interpolation is None:
            return images.resize_bilinear(image, size)
        return resampling.resize(image, size, interpolation, "timm")

    def _cover(self, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return the smallest image of the same shape that covers this height and width."""
        if self.config.train_interpolation is None:
            return images.resize_to_cover(image, size)
        return self._resize(image, resampling.find_covering_size(image.shape[:2], size))


@dataclasses.dataclass(frozen=True)
class EvaluationTransform:
    """Decode and resize, the same for every pass; fields as in `InputConfig`.

    With "direct_crop" both sides are resized, as with "direct", to a larger image, of which the
    middle is kept. With `interpolation` the filter and the arithmetic are those of `library`.
    `bands` are read as stored and normalised; None: RGB.
    """

    image_size: tuple[int, int]
    resize: Literal["short_side", "direct", "direct_crop"]
    crop_fraction: float
    max_image_megapixels: float = InputConfig.max_image_megapixels
    exif_orientation: bool = False
    value_range: ValueRange | None = None
    interpolation: Interpolation | None = None
    library: resampling.Library = "huggingface"
    bands: BandChoice | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        channels = RGB_CHANNELS if self.bands is None else self.bands.count
        return *self.image_size, channels

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.bands is None else np.float32)

    def __call__(self, record: Record) -> np.ndarray:
        """Return uint8 (height, width, 3), RGB; with bands float32 (height, width, channels).

        Raises:
          UnreadableImage: the record cannot be decoded.
          WrongBands: the record does not have the bands.
        """
        image = images.decode(
            record.image,
            self.max_image_megapixels,
            self.exif_orientation,
            self.value_range,
            self.bands,
        )
        if self.bands is None:
            return self._resize_and_crop(image)
        prepared = self._resize_and_crop(self.bands.complete(image))
        return self.bands.normalise(prepared)

    def _resize_and_crop(self, image: np.ndarray) -> np.ndarray:
        if self.interpolation is not None:
            size = self._choose_resized_size(image)
            resized = resampling.resize(image, size, self.interpolation, self.library)
            return images.crop_centre(resized, self.image_size, to_even=self.library == "timm")
        if self.resize == "direct":  # the released code takes a sample for each pixel, no average
            return images.resize_bilinear(image, self.image_size)

        height, width = self.image_size
        covered = (
            round(height / self.crop_fraction),
            round(width / self.crop_fraction),
        )
        if self.resize == "short_side":
            resized = images.resize_to_cover(image, covered)
        else:
            resized = images.resize_bilinear(image, covered)
        return images.crop_centre(resized, self.image_size)

    def _choose_resized_size(self, image: np.ndarray) -> tuple[int, int]:
        """Return the size before the crop."""
        if self.resize == "direct":
            return self.image_size
        height, width = self.image_size
        covered = (
            math.floor(height / self.crop_fraction),
            math.floor(width / self.crop_fraction),
        )
        if self.resize == "direct_crop":
            return covered
        return resampling.find_covering_size(image.shape[:2], covered)


def build_evaluation_transform(config: InputConfig) -> EvaluationTransform:
    """Build the transform of every evaluation of a valid config."""
    assert config.test_resize != "weights", "train.starting_weights sets it"
    return EvaluationTransform(
        image_size=config.pixels,
        resize=config.test_resize,
        crop_fraction=config.test_crop_fraction,
        max_image_megapixels=config.max_image_megapixels,
        exif_orientation=config.exif_orientation,
        value_range=config.value_range,
        interpolation=config.test_interpolation,
        library=config.test_resize_library,
        bands=choose_bands(config),
    )


def build_fewshot_transform(
    image_size: tuple[int, int],
    max_image_megapixels: float = InputConfig.max_image_megapixels,
    exif_orientation: bool = False,
    value_range: ValueRange | None = None,
    bands: BandChoice | None = None,
) -> EvaluationTransform:
    """Build the transform of the released few-shot evaluator: 224 of 256 pixels, in proportion."""
    return EvaluationTransform(
        image_size,
        "direct_crop",
        224 / 256,
        max_image_megapixels,
        exif_orientation,
        value_range,
        bands=bands,
    )


@functools.cache
def _import_augmentation(reference: str) -> Augmentation:
    augmentation = resolve(reference, "config.input.augmentations")
    if not callable(augmentation):
        kind = type(augmentation).__name__
        raise ValueError(
            f"config.input.augmentations={reference}: must be a function of (image, rng). "
            f"It is {kind}.",
        )
    return augmentation


def check_augmentations(config: InputConfig, record: Record) -> None:
    """Apply the user's augmentations once, to a record of the training split.

    Raises:
      ValueError: one of them cannot be imported or explain_call, or returns another shape or dtype.
    """
    if config.augmentations:
        words = f"config.input.augmentations={','.join(config.augmentations)}"
        with contextlib.suppress(images.UnreadableImage), explain_call(words, "(image, rng)"):
            TrainTransform(config)(record, np.random.default_rng(0))


def _apply_custom(reference: str, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Apply a user's function to a copy, because the image may be part of the stored record."""
    result = _import_augmentation(reference)(image.copy(), rng)
    kind = type(result).__name__
    if isinstance(result, np.ndarray):
        if result.dtype == image.dtype and result.shape == image.shape:
            return result
        kind = f"{result.dtype} {result.shape}"
    raise ValueError(
        f"The augmentation {reference} returned {kind}; return {image.dtype} {image.shape}."
    )


def _flip(image: np.ndarray, axis: int, out: np.ndarray | None) -> np.ndarray:
    """Return the mirrored image, in the same memory if this is `out`; axis 1 is left to right."""
    if image.dtype != np.uint8:
        return np.ascontiguousarray(np.flip(image, axis))
    return cv2.flip(image, axis, dst=image if image is out else None)
