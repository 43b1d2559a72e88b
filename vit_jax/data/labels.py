"""Images and labels of records of a TFDS dataset: the features "image" and "label", or computed from others.

The functions are those of VTAB (task_adaptation, data/clevr.py, kitti.py, dsprites.py), on NumPy arrays.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data.images import decode

FEWEST_OBJECTS = 3
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)  # metres; beyond the last is an image without a vehicle
NO_VEHICLE = 1000.0
NUM_VEHICLE_TYPES = 3  # car, van and truck are the first

Objects = Mapping[str, Sequence[Any]]
"""Features of the objects of an image, by name, with a value for each object."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """Rules for the label and the image of a record; can be pickled.

    Attributes:
      feature: from which the label is computed.
      label: takes the decoded value, returns a class; None: the value is the class.
      class_names: None: those of the feature, which is a ClassLabel.
      image: takes the stored file, returns `Record.image`; None: the file.
    """

    feature: str = "label"
    label: Callable[[Any], int] | None = None
    class_names: tuple[str, ...] | None = None
    image: Callable[[bytes], np.ndarray] | None = None


STORED = Labels()


def object_count(objects: Objects) -> int:
    """Return the class of CLEVR-Count: class 0 is three objects, the fewest of any image, and class 7 is ten."""
    return len(objects["size"]) - FEWEST_OBJECTS


def object_distance(objects: Objects) -> int:
    """Return the class of CLEVR-Distance: the range of the least third pixel coordinate of objects."""
    return _last_below(CLEVR_DISTANCES, np.reshape(objects["pixel_coords"], (-1, 3))[:, 2].min())


def vehicle_distance(objects: Objects) -> int:
    """Return the class of KITTI-Distance: the range of the depth of the closest car, van or truck; the last: none."""
    is_vehicle = np.asarray(objects["type"], np.int64) < NUM_VEHICLE_TYPES
    depths = np.reshape(objects["location"], (-1, 3))[is_vehicle, 2]
    return _last_below(KITTI_DISTANCES, depths.min(initial=NO_VEHICLE))


def bins(feature: str, num_values: int, num_bins: int, **others: Any) -> Labels:
    """Join neighbouring values of a ClassLabel without names to `num_bins` classes."""
    firsts = [-(-k * num_values // num_bins) for k in range(num_bins + 1)]  # of each class, and after the last
    names = tuple(f"{first}-{after - 1}" for first, after in itertools.pairwise(firsts))
    return Labels(feature, functools.partial(_bin, num_values=num_values, num_bins=num_bins), names, **others)


def ranges(thresholds: Sequence[float]) -> tuple[str, ...]:
    """Return the names of the classes between thresholds: each is above one and up to the next."""
    return tuple(f"{low:g} to {high:g}" for low, high in itertools.pairwise(thresholds))


def mask_to_grey(file: bytes) -> np.ndarray:
    """Return a stored mask of zeros and ones as black and white, uint8 (H, W, 1)."""
    return decode(file)[..., :1] * np.uint8(255)


def _last_below(thresholds: Sequence[float], distance: float) -> int:
    """Return the last threshold below the distance; -1, which is no class, without any."""
    return int(np.searchsorted(thresholds, distance)) - 1


def _bin(value: int, num_values: int, num_bins: int) -> int:
    return value * num_bins // num_values
