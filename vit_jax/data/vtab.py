"""The 19 tasks of VTAB-1k ("vtab:NAME"): dataset, version, label and splits of each, and what its training leaves out.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabTask:
    """A task on a dataset of TFDS.

    Attributes:
      name: as in "vtab:NAME".
      dataset: its TFDS name, with a config where there are several.
      version: that the splits hold for, or a pattern, and further ones after commas; the first is what to prepare.
      num_classes: of the labels.
      val200: the 200 examples that settings are chosen on. The 800 to train on are always the first of train.
      test: all test images.
      labels: how a record is labelled.
      flip, crop: whether images are mirrored, and cropped, in training.
      manual: what has to be downloaded by hand into one folder; "" where TFDS downloads.
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
        """The splits of the task in TFDS's words."""
        train800 = "train[:800]"
        both = f"{train800}+{self.val200}"
        return {"train800": train800, "val200": self.val200, "train800val200": both, "test": self.test}


TASKS = (
    VtabTask(
        name="caltech101",
        group="natural",
        dataset="caltech101",
        version="3.*.*",
        num_classes=102,
        val200="train[2754:2954]",
    ),
    VtabTask(
        name="cifar100",
        group="natural",
        dataset="cifar100",
        version="3.*.*",
        num_classes=100,
        val200="train[45000:45200]",
    ),
    VtabTask(name="dtd", group="natural", dataset="dtd", version="3.*.*", num_classes=47),
    VtabTask(name="flowers102", group="natural", dataset="oxford_flowers102", version="2.*.*", num_classes=102),
    # VTAB says 3.*.*, which today's TFDS cannot prepare. In 4.0.0 the lists of images and their keys, by which TFDS
    # orders them, are the same; a few damaged files were encoded anew.
    VtabTask(
        name="pets",
        group="natural",
        dataset="oxford_iiit_pet",
        version="4.0.0,3.*.*",
        num_classes=37,
        val200="train[2944:3144]",
    ),
    VtabTask(name="sun397", group="natural", dataset="sun397/tfds", version="4.*.*", num_classes=397),
    VtabTask(
        name="svhn",
        group="natural",
        dataset="svhn_cropped",
        version="3.*.*",
        num_classes=10,
        val200="train[65931:66131]",
    ),
    VtabTask(name="camelyon", group="specialized", dataset="patch_camelyon", version="2.*.*", num_classes=2),
    VtabTask(
        name="eurosat",
        group="specialized",
        dataset="eurosat/rgb",
        version="2.*.*",
        num_classes=10,
        val200="train[16200:16400]",
        test="train[21600:]",
    ),
    VtabTask(
        name="resisc45",
        group="specialized",
        dataset="resisc45",
        version="3.*.*",
        num_classes=45,
        val200="train[18900:19100]",
        test="train[25200:]",
        manual="NWPU-RESISC45, extracted from the archive of that name",
    ),
    VtabTask(
        name="retinopathy",
        group="specialized",
        dataset="diabetic_retinopathy_detection/btgraham-300",
        version="3.*.*",
        num_classes=5,
        manual="train, test, sample and trainLabels.csv of Kaggle's diabetic-retinopathy-detection",
    ),
    VtabTask(
        name="clevr_count",
        group="structured",
        dataset="clevr",
        version="3.*.*",
        num_classes=8,
        val200="train[63000:63200]",
        test="validation",
        labels=Labels("objects", object_count, tuple(map(str, range(3, 11)))),
        crop=False,
    ),
    VtabTask(
        name="clevr_distance",
        group="structured",
        dataset="clevr",
        version="3.*.*",
        num_classes=6,
        val200="train[63000:63200]",
        test="validation",
        labels=Labels("objects", object_distance, ranges(CLEVR_DISTANCES)),
        crop=False,
    ),
    VtabTask(name="dmlab", group="structured", dataset="dmlab", version="2.0.1", num_classes=6, crop=False),
    VtabTask(
        name="dsprites_location",
        group="structured",
        dataset="dsprites",
        version="2.*.*",
        num_classes=16,
        val200="train[589824:590024]",
        test="train[663552:]",
        labels=bins("label_x_position", 32, 16, image=mask_to_grey),
        flip=False,
        crop=False,
    ),
    VtabTask(
        name="dsprites_orientation",
        group="structured",
        dataset="dsprites",
        version="2.*.*",
        num_classes=16,
        val200="train[589824:590024]",
        test="train[663552:]",
        labels=bins("label_orientation", 40, 16, image=mask_to_grey),
        flip=False,
    ),
    VtabTask(
        name="kitti_distance",
        group="structured",
        dataset="kitti",
        version="3.1.0",
        num_classes=4,
        labels=Labels("objects", vehicle_distance, ("up to 8 m", "8 to 20 m", "beyond 20 m", "no vehicle")),
        crop=False,
    ),
    VtabTask(
        name="smallnorb_azimuth",
        group="structured",
        dataset="smallnorb",
        version="2.*.*",
        num_classes=18,
        val200="test[:200]",
        test="test[50%:]",
        labels=Labels("label_azimuth"),
        flip=False,
    ),
    VtabTask(
        name="smallnorb_elevation",
        group="structured",
        dataset="smallnorb",
        version="2.*.*",
        num_classes=9,
        val200="test[:200]",
        test="test[50%:]",
        labels=Labels("label_elevation"),
    ),
)
"""In the order of the paper's Table 9."""


def find_task(name: str) -> VtabTask:
    """The task of this name; raises ValueError, which names the nearest."""
    known = {task.name: task for task in TASKS}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2)
        hint = f"Nearest: {few(near)}." if near else f"Tasks: {', '.join(known)}."
        raise ValueError(f"VTAB has no task {name!r}. {hint}")
    return known[name]
