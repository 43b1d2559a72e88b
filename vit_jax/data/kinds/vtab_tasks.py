"""The 19 tasks of VTAB-1k ("vtab:NAME"): dataset, version, labels, splits, augmentations.

Splits and labels are those of VTAB's public code (task_adaptation, data/clevr.py, kitti.py,
dsprites.py) and of the configs that the paper's authors published afterwards; the exceptions of
augmentation are Big Transfer's (App. F). `tfds_source` opens the tasks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vit_jax.data.decoding.images import decode
from vit_jax.data.records import few
from vit_jax.text.nearest import closest

FEWEST_OBJECTS = 3
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)
"""Distances in metres; an image without a vehicle is beyond the last one."""
NO_VEHICLE = 1000.0
NUM_VEHICLE_TYPES = 3
"""The first types of objects are car, van and truck."""

Objects = Mapping[str, Sequence[Any]]
"""Features of the objects of an image, by name, with a value for each object."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """Rules for the label and the image of a record; can be pickled.

    Attributes:
      feature: name of the feature with the label.
      label: returns the class of a decoded value; None: the value is the class.
      class_names: names of the classes; None: those of the feature, which is a ClassLabel.
      image: returns `Record.image` of a stored file; None: the file.
    """

    feature: str = "label"
    label: Callable[[Any], int] | None = None
    class_names: tuple[str, ...] | None = None
    image: Callable[[bytes], np.ndarray] | None = None


STORED = Labels()


def count_objects(objects: Objects) -> int:
    """Return the class of CLEVR-Count: class 0 is three objects, class 7 is ten."""
    return len(objects["size"]) - FEWEST_OBJECTS


def find_object_distance(objects: Objects) -> int:
    """Return the class of CLEVR-Distance: the range of the least third coordinate of objects."""
    depths = np.reshape(objects["pixel_coords"], (-1, 3))[:, 2]
    return _find_range(CLEVR_DISTANCES, depths.min())


def find_vehicle_distance(objects: Objects) -> int:
    """Return the class of KITTI-Distance: the range of the depth of the closest car, van or truck.

    The last class is images without one.
    """
    is_vehicle = np.asarray(objects["type"], np.int64) < NUM_VEHICLE_TYPES
    depths = np.reshape(objects["location"], (-1, 3))[is_vehicle, 2]
    return _find_range(KITTI_DISTANCES, depths.min(initial=NO_VEHICLE))


def build_bins(feature: str, num_values: int, num_bins: int, **others: Any) -> Labels:
    """Join neighbouring values of a ClassLabel without names to `num_bins` classes."""
    names = []
    for number in range(num_bins):
        first = _find_first_value(number, num_values, num_bins)
        last = _find_first_value(number + 1, num_values, num_bins) - 1
        names.append(f"{first}-{last}")
    find_bin = functools.partial(_find_bin, num_values=num_values, num_bins=num_bins)
    return Labels(feature, find_bin, tuple(names), **others)


def name_ranges(thresholds: Sequence[float]) -> tuple[str, ...]:
    """Return the names of the classes between thresholds: each is above one and up to the next."""
    return tuple(f"{low:g} to {high:g}" for low, high in itertools.pairwise(thresholds))


def mask_to_grey(file: bytes) -> np.ndarray:
    """Return a stored mask of zeros and ones as black and white, uint8 (H, W, 1)."""
    return decode(file)[..., :1] * np.uint8(255)


def _find_range(thresholds: Sequence[float], distance: float) -> int:
    """Return the number of the last threshold below the distance; -1, no class, without any."""
    return int(np.searchsorted(thresholds, distance)) - 1


def _find_bin(value: int, num_values: int, num_bins: int) -> int:
    return value * num_bins // num_values


def _find_first_value(number: int, num_values: int, num_bins: int) -> int:
    """Return the least value in a bin: number * num_values / num_bins, rounded up."""
    return -(-number * num_values // num_bins)


Group = Literal["natural", "specialized", "structured"]


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """A task on a dataset of TFDS.

    Attributes:
      name: the name in "vtab:NAME".
      group: tasks whose mean is reported.
      dataset: TFDS name, with a config if there are several.
      version: pattern of the versions with these splits; more after commas. The first is the one to
        prepare.
      num_classes: number of labels.
      val200: the 200 examples on which settings are compared. The 800 to train on are always the
        first of train.
      test: all test images.
      labels: rules for the labels of records.
      flip, crop: augmentations that training may use.
      manual: files that users download into one folder; "" if TFDS downloads them.
    """

    name: str
    group: Group
    dataset: str
    version: str
    num_classes: int
    val200: str = "validation[:200]"
    test: str = "test"
    labels: Labels = STORED
    flip: bool = True
    crop: bool = True
    manual: str = ""

    @property
    def splits(self) -> dict[str, str]:
        """TFDS splits by their names in the task."""
        train800 = "train[:800]"
        both = f"{train800}+{self.val200}"
        return {
            "train800": train800,
            "val200": self.val200,
            "train800val200": both,
            "test": self.test,
        }


_COUNTS = Labels("objects", count_objects, tuple(map(str, range(3, 11))))
_DISTANCES = Labels("objects", find_object_distance, name_ranges(CLEVR_DISTANCES))
_VEHICLES = Labels(
    "objects",
    find_vehicle_distance,
    ("up to 8 m", "8 to 20 m", "beyond 20 m", "no vehicle"),
)
_LOCATIONS = build_bins("label_x_position", 32, 16, image=mask_to_grey)
_ORIENTATIONS = build_bins("label_orientation", 40, 16, image=mask_to_grey)
_AZIMUTHS = Labels("label_azimuth")
_ELEVATIONS = Labels("label_elevation")
_NWPU = "NWPU-RESISC45, extracted from the archive of that name"
_RETINOPATHY = "train, test, sample and trainLabels.csv of Kaggle's diabetic-retinopathy-detection"
_BTGRAHAM = "diabetic_retinopathy_detection/btgraham-300"
_CLEVR = ("train[63000:63200]", "validation")
_SPRITES = ("train[589824:590024]", "train[663552:]")
_NORB = ("test[:200]", "test[50%:]")

# VTAB uses 3.*.* of Pets, which today's TFDS cannot prepare. In 4.0.0 the lists of images and their
# keys, by which TFDS orders them, are the same; a few damaged files were encoded again.
TASKS = (
    VtabTask("caltech101", "natural", "caltech101", "3.*.*", 102, "train[2754:2954]"),
    VtabTask("cifar100", "natural", "cifar100", "3.*.*", 100, "train[45000:45200]"),
    VtabTask("dtd", "natural", "dtd", "3.*.*", 47),
    VtabTask("flowers102", "natural", "oxford_flowers102", "2.*.*", 102),
    VtabTask("pets", "natural", "oxford_iiit_pet", "4.0.0,3.*.*", 37, "train[2944:3144]"),
    VtabTask("sun397", "natural", "sun397/tfds", "4.*.*", 397),
    VtabTask("svhn", "natural", "svhn_cropped", "3.*.*", 10, "train[65931:66131]"),
    VtabTask("camelyon", "specialized", "patch_camelyon", "2.*.*", 2),
    VtabTask(
        "eurosat",
        "specialized",
        "eurosat/rgb",
        "2.*.*",
        10,
        "train[16200:16400]",
        "train[21600:]",
    ),
    VtabTask(
        "resisc45",
        "specialized",
        "resisc45",
        "3.*.*",
        45,
        "train[18900:19100]",
        "train[25200:]",
        manual=_NWPU,
    ),
    VtabTask("retinopathy", "specialized", _BTGRAHAM, "3.*.*", 5, manual=_RETINOPATHY),
    VtabTask("clevr_count", "structured", "clevr", "3.*.*", 8, *_CLEVR, _COUNTS, crop=False),
    VtabTask("clevr_distance", "structured", "clevr", "3.*.*", 6, *_CLEVR, _DISTANCES, crop=False),
    VtabTask("dmlab", "structured", "dmlab", "2.0.1", 6, crop=False),
    VtabTask(
        "dsprites_location",
        "structured",
        "dsprites",
        "2.*.*",
        16,
        *_SPRITES,
        _LOCATIONS,
        flip=False,
        crop=False,
    ),
    VtabTask(
        "dsprites_orientation",
        "structured",
        "dsprites",
        "2.*.*",
        16,
        *_SPRITES,
        _ORIENTATIONS,
        flip=False,
    ),
    VtabTask("kitti_distance", "structured", "kitti", "3.1.0", 4, labels=_VEHICLES, crop=False),
    VtabTask(
        "smallnorb_azimuth",
        "structured",
        "smallnorb",
        "2.*.*",
        18,
        *_NORB,
        _AZIMUTHS,
        flip=False,
    ),
    VtabTask("smallnorb_elevation", "structured", "smallnorb", "2.*.*", 9, *_NORB, _ELEVATIONS),
)
"""In the order of the paper's Table 9."""


def find_task(name: str) -> VtabTask:
    """Return the task with this name.

    Raises:
      ValueError: there is none; the message has the nearest names.
    """
    for task in TASKS:
        if task.name == name:
            return task
    known = [task.name for task in TASKS]
    hint = f"Tasks: {', '.join(known)}."
    near = closest(name, known, 2)
    if near:
        hint = f"Nearest: {few(near)}."
    raise ValueError(f"VTAB has no task {name!r}. {hint}")
