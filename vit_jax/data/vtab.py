"""The 19 tasks of VTAB-1k ("vtab:NAME"): dataset, version, labels, splits and augmentations of each.

Splits and labels are those of VTAB's public code and of the configs that the paper's authors published afterwards; the
exceptions of augmentation are Big Transfer's (App. F). `tfds_source` opens them.
"""

import dataclasses
import difflib
from typing import Literal

from vit_jax.data.labels import (
    CLEVR_DISTANCES,
    STORED,
    Labels,
    bins,
    mask_to_grey,
    object_count,
    object_distance,
    ranges,
    vehicle_distance,
)
from vit_jax.data.records import few

Group = Literal["natural", "specialized", "structured"]


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """A task on a dataset of TFDS.

    Attributes:
      name: as in "vtab:NAME".
      group: over whose tasks a mean is taken.
      dataset: TFDS name, with a config if there are several.
      version: pattern of versions that the splits hold for; more after commas. The first is the one to prepare.
      num_classes: number of labels.
      val200: the 200 examples on which settings are compared. The 800 to train on are always the first of train.
      test: all test images.
      labels: how a record is labelled.
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
        return {"train800": train800, "val200": self.val200, "train800val200": both, "test": self.test}


_COUNTS = Labels("objects", object_count, tuple(map(str, range(3, 11))))
_DISTANCES = Labels("objects", object_distance, ranges(CLEVR_DISTANCES))
_VEHICLES = Labels("objects", vehicle_distance, ("up to 8 m", "8 to 20 m", "beyond 20 m", "no vehicle"))
_LOCATIONS = bins("label_x_position", 32, 16, image=mask_to_grey)
_ORIENTATIONS = bins("label_orientation", 40, 16, image=mask_to_grey)
_AZIMUTHS, _ELEVATIONS = Labels("label_azimuth"), Labels("label_elevation")
_NWPU = "NWPU-RESISC45, extracted from the archive of that name"
_RETINOPATHY = "train, test, sample and trainLabels.csv of Kaggle's diabetic-retinopathy-detection"
_BTGRAHAM = "diabetic_retinopathy_detection/btgraham-300"
_CLEVR = ("train[63000:63200]", "validation")
_SPRITES = ("train[589824:590024]", "train[663552:]")
_NORB = ("test[:200]", "test[50%:]")

# VTAB uses 3.*.* of Pets, which today's TFDS cannot prepare. In 4.0.0 the lists of images and their keys, by which TFDS
# orders them, are the same; a few damaged files were encoded anew.
TASKS = (
    VtabTask("caltech101", "natural", "caltech101", "3.*.*", 102, "train[2754:2954]"),
    VtabTask("cifar100", "natural", "cifar100", "3.*.*", 100, "train[45000:45200]"),
    VtabTask("dtd", "natural", "dtd", "3.*.*", 47),
    VtabTask("flowers102", "natural", "oxford_flowers102", "2.*.*", 102),
    VtabTask("pets", "natural", "oxford_iiit_pet", "4.0.0,3.*.*", 37, "train[2944:3144]"),
    VtabTask("sun397", "natural", "sun397/tfds", "4.*.*", 397),
    VtabTask("svhn", "natural", "svhn_cropped", "3.*.*", 10, "train[65931:66131]"),
    VtabTask("camelyon", "specialized", "patch_camelyon", "2.*.*", 2),
    VtabTask("eurosat", "specialized", "eurosat/rgb", "2.*.*", 10, "train[16200:16400]", "train[21600:]"),
    VtabTask("resisc45", "specialized", "resisc45", "3.*.*", 45, "train[18900:19100]", "train[25200:]", manual=_NWPU),
    VtabTask("retinopathy", "specialized", _BTGRAHAM, "3.*.*", 5, manual=_RETINOPATHY),
    VtabTask("clevr_count", "structured", "clevr", "3.*.*", 8, *_CLEVR, _COUNTS, crop=False),
    VtabTask("clevr_distance", "structured", "clevr", "3.*.*", 6, *_CLEVR, _DISTANCES, crop=False),
    VtabTask("dmlab", "structured", "dmlab", "2.0.1", 6, crop=False),
    VtabTask("dsprites_location", "structured", "dsprites", "2.*.*", 16, *_SPRITES, _LOCATIONS, flip=False, crop=False),
    VtabTask("dsprites_orientation", "structured", "dsprites", "2.*.*", 16, *_SPRITES, _ORIENTATIONS, flip=False),
    VtabTask("kitti_distance", "structured", "kitti", "3.1.0", 4, labels=_VEHICLES, crop=False),
    VtabTask("smallnorb_azimuth", "structured", "smallnorb", "2.*.*", 18, *_NORB, _AZIMUTHS, flip=False),
    VtabTask("smallnorb_elevation", "structured", "smallnorb", "2.*.*", 9, *_NORB, _ELEVATIONS),
)
"""In the order of the paper's Table 9."""


def find_task(name: str) -> VtabTask:
    """Return the task with this name; ValueError with the nearest names if there is none."""
    known = {task.name: task for task in TASKS}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2)
        hint = f"Nearest: {few(near)}." if near else f"Tasks: {', '.join(known)}."
        raise ValueError(f"VTAB has no task {name!r}. {hint}")
    return known[name]
