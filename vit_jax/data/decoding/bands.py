"""Images of any number of bands, with their values as stored.

Without a `BandChoice` an image is 8-bit RGB, which the module `images` makes of any file.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.crops import restore_channel
from vit_jax.data.decoding import rasters
from vit_jax.data.decoding.errors import WrongBands, require_numbers, spell_bands
from vit_jax.data.decoding.headers import TIFF_STARTS
from vit_jax.text.printable import printable

HALF_OF_8_BITS = 127.5
MOST_CHANNELS = 32
"""Channels of a network's input."""
_OPENCV_CHANNELS = 4
"""Most channels that all functions of OpenCV take."""
_EXACT = (np.uint8, np.uint16, np.float32)
"""Dtypes of bands; other numbers become float32."""


@dataclasses.dataclass(frozen=True)
class BandChoice:
    """The bands that a network reads, and their normalisation.

    Attributes:
      count: channels of the network.
      numbers: stored bands in this order, counted from 1; (): all.
      mean, std: a value v becomes (v - mean) / std, by channel; (): values stay as stored.
    """

    count: int
    numbers: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def scales_8_bits(self) -> bool:
        """True if 0 and 255 become -1 and 1, as in RGB."""
        return set(self.mean) == set(self.std) == {HALF_OF_8_BITS}

    def list_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the bands, also if all are read."""
        return self.numbers or tuple(range(1, self.count + 1))

    def set_range(self, low: float, high: float) -> Self:
        """Return the same bands, of which these values become -1 and 1."""
        mean = ((low + high) / 2,) * self.count
        std = ((high - low) / 2,) * self.count
        return dataclasses.replace(self, mean=mean, std=std)

    @classmethod
    def read(cls, stored: object) -> Self:
        """Return the choice in the metadata of weights.

        Raises:
          ValueError: its numbers do not belong together.
        """
        problem = ValueError(f"bands={stored!r}: must be count, numbers, mean and std of channels.")
        if not isinstance(stored, Mapping):
            raise problem
        if set(stored) != {"count", "numbers", "mean", "std"}:
            raise problem
        count = stored["count"]
        if type(count) is not int or not 1 <= count <= MOST_CHANNELS:
            raise problem

        numbers = stored["numbers"]
        mean = stored["mean"]
        std = stored["std"]
        for values in (numbers, mean, std):
            if not _are_numbers(values, count):
                raise problem
        for number in numbers:
            if type(number) is not int or number < 1:
                raise problem
        if len(mean) != len(std) or min(std, default=1) <= 0:
            raise problem
        return cls(count, tuple(numbers), tuple(mean), tuple(std))

    def decode(self, file: bytes) -> np.ndarray | None:
        """Return the chosen bands of a file as stored, (H, W, count); None if it is damaged.

        Raises:
          UnreadableImage: the layout is not supported.
          WrongBands: the file has other bands.
          cv2.error: the file states more pixels than OpenCV takes.
        """
        if file.startswith(TIFF_STARTS):
            from vit_jax.data.decoding import tiff_pages

            chosen = tiff_pages.decode_bands(file, self.numbers, MOST_CHANNELS)
            return dataclasses.replace(self, numbers=()).select(chosen)

        values = rasters.decode_bands(file)
        if values is None:
            return None
        try:
            return self.select(values)
        except WrongBands as error:
            if not rasters.is_decoded_as_rgb(file):
                raise
            raise WrongBands(f"{error} JPEG 2000 and AVIF are read as RGB: use TIFF.") from error

    def select(self, values_HWC: np.ndarray) -> np.ndarray:
        """Return the chosen bands of an array (H, W) or (H, W, bands), (H, W, count).

        The dtype is uint8, uint16 or float32, to which other numbers are converted. Colours of
        three equal bands count as one band, grey, where one is wanted.

        Raises:
          WrongBands: the array has other bands.
        """
        if values_HWC.ndim == 2:
            values_HWC = values_HWC[..., None]
        if values_HWC.ndim != 3 or values_HWC.dtype.kind not in "buif":
            raise WrongBands(
                f"it is an array {values_HWC.dtype} {values_HWC.shape}; give numbers (H, W, bands)."
            )

        if self.count == 1 and not self.numbers and _is_grey(values_HWC):
            values_HWC = values_HWC[..., :1]

        num_bands = values_HWC.shape[-1]
        if self.numbers:
            require_numbers(self.numbers, num_bands)
            values_HWC = values_HWC[..., np.subtract(self.numbers, 1)]
        elif num_bands != self.count:
            raise WrongBands(
                f"it has {spell_bands(num_bands)}, and the network takes {self.count}. Give files "
                f"of {spell_bands(self.count)}, or train with input.bands, which chooses bands, or "
                f"with input.channels={num_bands}."
            )

        if values_HWC.dtype not in _EXACT:
            values_HWC = values_HWC.astype(np.float32)
        return np.ascontiguousarray(values_HWC)

    def place(self, chosen_HWC: np.ndarray) -> np.ndarray:
        """Return an array of which `select` returns these chosen bands; other bands are 0."""
        if not self.numbers:
            return chosen_HWC
        height, width, _ = chosen_HWC.shape
        num_bands = max(self.numbers)
        values_HWC = np.zeros((height, width, num_bands), chosen_HWC.dtype)
        values_HWC[..., np.subtract(self.numbers, 1)] = chosen_HWC
        return values_HWC

    def complete(self, values_HWC: np.ndarray) -> np.ndarray:
        """Return values as float32; NaN and infinity, missing values, become the mean."""
        if values_HWC.dtype != np.float32:
            return values_HWC.astype(np.float32)

        is_missing_HWC = ~np.isfinite(values_HWC)
        if not is_missing_HWC.any():
            return values_HWC
        mean_C = np.zeros(self.count, np.float32)
        if self.mean:
            mean_C = np.asarray(self.mean, np.float32)
        return np.where(is_missing_HWC, mean_C, values_HWC)

    def normalise(self, values_HWC: np.ndarray) -> np.ndarray:
        """Return float32 values normalised by channel."""
        if not self.mean:
            return values_HWC
        mean_C = np.asarray(self.mean, np.float32)
        std_C = np.asarray(self.std, np.float32)
        return (values_HWC - mean_C) / std_C

    def restore(self, normalised_HWC: np.ndarray) -> np.ndarray:
        """Return the stored values of normalised channels, float32."""
        if not self.mean:
            return normalised_HWC.astype(np.float32)

        scaled_HWC = normalised_HWC * np.asarray(self.std)
        values_HWC = scaled_HWC + self.mean
        return values_HWC.astype(np.float32)


def read_bands(preprocessing: Mapping[str, Any] | None) -> BandChoice | None:
    """Return the bands that the preprocessing of weights states; None for RGB.

    Raises:
      ValueError: see `BandChoice.read`.
    """
    stored = (preprocessing or {}).get("bands")
    if stored is None:
        return None
    return BandChoice.read(stored)


def choose_bands(config: InputConfig) -> BandChoice | None:
    """Return the bands that a config reads as stored, and their normalisation; None for RGB."""
    if not config.reads_bands:
        return None
    bands = BandChoice(
        config.channels,
        config.bands,
        config.channel_mean,
        config.channel_std,
    )
    if config.value_range is not None:
        return bands.set_range(*config.value_range)
    return bands


def _are_numbers(values: object, count: int) -> bool:
    """Return True for an empty list, or one of this many finite numbers."""
    if not isinstance(values, list | tuple) or len(values) not in (0, count):
        return False
    for value in values:
        if type(value) not in (int, float):
            return False
    return bool(np.isfinite(values).all())


def _is_grey(values_HWC: np.ndarray) -> bool:
    """Return True for colours of three equal bands."""
    if values_HWC.shape[-1] != 3:
        return False
    return bool((values_HWC == values_HWC[..., :1]).all())


@contextlib.contextmanager
def name_wrong_bands(name_of: Callable[[int], str], index: int) -> Iterator[None]:
    """Name the record in the error of its bands."""
    try:
        yield
    except WrongBands as error:
        raise ValueError(f"{printable(name_of(index))}: {error}") from error


def apply_by_channels(
    operation: Callable[[np.ndarray], np.ndarray],
    image_HWC: np.ndarray,
) -> np.ndarray:
    """Apply a function of OpenCV, which may drop a single channel, or take four at most."""
    count = image_HWC.shape[-1]
    if count <= _OPENCV_CHANNELS:
        return restore_channel(operation(image_HWC))

    parts = []
    for first in range(0, count, _OPENCV_CHANNELS):
        end = first + _OPENCV_CHANNELS
        part_HWC = np.ascontiguousarray(image_HWC[..., first:end])
        changed_HWC = apply_by_channels(operation, part_HWC)
        parts.append(changed_HWC)
    return np.concatenate(parts, axis=-1)
