"""Numbers of images and classes, for recipes whose data are not on this machine."""

import dataclasses
import pathlib

from vit_jax.config import RunConfig
from vit_jax.data.kinds.vtab_tasks import find_task


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The size of a training split, and the source of these numbers."""

    name: str
    num_examples: int
    num_classes: int
    source: str


IMAGENET = Dataset("ImageNet", 1_281_167, 1000, "ILSVRC-2012")
IMAGENET_21K = Dataset(
    "ImageNet-21k",
    14_197_122,
    21_843,
    "14 million images, 21k classes (ViT, sec. 4.1)",
)
JFT = Dataset(
    "JFT-300M",
    303_000_000,
    18_291,
    "303 million images (ViT, sec. 4.1), 18,291 classes (BiT, sec. 3.1)",
)

_BY_DATA = {
    "digits": Dataset("digits", 1437, 10, "scikit-learn"),
    "tfds:imagenet2012": IMAGENET,
    "tfds:imagenet1k": IMAGENET,  # docs/imagenet21k.md uses this name and the next
    "tfds:imagenet21k": IMAGENET_21K,
    "tfds:imagenet21k_resized": IMAGENET_21K,
    "tfds:cifar10": Dataset("CIFAR-10", 50_000, 10, "its training split"),
    "tfds:cifar100": Dataset("CIFAR-100", 50_000, 100, "its training split"),
    "tfds:oxford_iiit_pet": Dataset("Oxford-IIIT Pets", 3_680, 37, "its training split"),
    "tfds:oxford_flowers102": Dataset("Oxford Flowers-102", 1_020, 102, "its training split"),
}
_BY_RECIPE = {
    "pretrain_imagenet1k": IMAGENET,
    "pretrain_imagenet21k": IMAGENET_21K,
    "pretrain_jft": JFT,
    "pretrain_s16_baseline": IMAGENET,
}


def find_dataset(recipe: str, config: RunConfig) -> Dataset | None:
    """Return the numbers of `config.data`, or of the recipe's paper without data.

    None: they are unknown.

    The recipe is named as on the command line, "configs/pretrain_jft.py:ViT-H/14".
    """
    if config.data is None:
        path, _, _ = recipe.partition(":")
        return _BY_RECIPE.get(pathlib.PurePath(path).stem)
    kind, _, task = config.data.partition(":")
    if kind == "vtab":
        return Dataset(config.data, 1000, find_task(task).num_classes, "VTAB-1k")
    return _BY_DATA.get(config.data)


def choose_dataset(
    recipe: str,
    config: RunConfig,
    *,
    num_examples: int | None = None,
    num_classes: int | None = None,
) -> Dataset:
    """Return the numbers to plan with; numbers of the command line replace those of `find_dataset`.

    Raises:
      ValueError: one of them is unknown.
    """
    known = find_dataset(recipe, config)
    if known is None:
        known = Dataset(config.data or recipe, 0, 0, "")
    elif num_examples is None and num_classes is None:
        return known

    source = "the command line"
    if known.source and not (num_examples and num_classes):
        source = f"{known.source}; some by the command line"
    dataset = Dataset(
        known.name,
        num_examples or known.num_examples,
        num_classes or known.num_classes,
        source,
    )
    if not dataset.num_examples or not dataset.num_classes:
        raise ValueError(
            f"{config.data or recipe}: numbers of images and classes are not known here. "
            "Add --num_examples=N and --num_classes=N. "
            f"Known: {', '.join(_BY_DATA)}, and the recipes {', '.join(_BY_RECIPE)}."
        )
    return dataset


def count_examples(recipe: str, config: RunConfig) -> int | None:
    """Return the number of training images of a recipe without opening them; None if unknown."""
    inputs = config.input
    if inputs.train_examples is not None:
        return inputs.train_examples
    if inputs.classes or inputs.train_examples_per_class is not None:
        return None
    if inputs.train_split not in ("train", "train800val200"):
        return None
    known = find_dataset(recipe, config)
    if known is None:
        return None
    return known.num_examples
