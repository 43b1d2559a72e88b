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
    "ImageNet-21k", 14_197_122, 21_843, "14 million images, 21k classes (ViT, sec. 4.1)"
)
JFT = Dataset(
    "JFT-300M",
    303_000_000,
    18_291,
    "303 million images (ViT, sec. 4.1), 18,291 classes (BiT, sec. 3.1)",
)

_OF_DATA = {
    "digits": Dataset("digits", 1437, 10, "scikit-learn"),
    "tfds:imagenet2012": IMAGENET,
    "tfds:imagenet1k": IMAGENET,  # this name and the next are those of docs/imagenet21k.md
    "tfds:imagenet21k": IMAGENET_21K,
    "tfds:imagenet21k_resized": IMAGENET_21K,
    "tfds:cifar10": Dataset("CIFAR-10", 50_000, 10, "its training split"),
    "tfds:cifar100": Dataset("CIFAR-100", 50_000, 100, "its training split"),
    "tfds:oxford_iiit_pet": Dataset("Oxford-IIIT Pets", 3_680, 37, "its training split"),
    "tfds:oxford_flowers102": Dataset("Oxford Flowers-102", 1_020, 102, "its training split"),
}
_OF_RECIPE = {
    "pretrain_imagenet1k": IMAGENET,
    "pretrain_imagenet21k": IMAGENET_21K,
    "pretrain_jft": JFT,
    "pretrain_s16_baseline": IMAGENET,
}


def known_dataset(recipe: str, config: RunConfig) -> Dataset | None:
    """Return the numbers of `config.data`, without data those of the recipe's paper; None if they are unknown.

    The recipe is named as on the command line, "configs/pretrain_jft.py:ViT-H/14".
    """
    if config.data is None:
        return _OF_RECIPE.get(pathlib.PurePath(recipe.partition(":")[0]).stem)
    kind, _, task = config.data.partition(":")
    if kind == "vtab":
        return Dataset(config.data, 1000, find_task(task).num_classes, "VTAB-1k")
    return _OF_DATA.get(config.data)


def choose_dataset(
    recipe: str,
    config: RunConfig,
    *,
    num_examples: int | None = None,
    num_classes: int | None = None,
) -> Dataset:
    """Return the numbers to plan with: those of `known_dataset`, or in their place those of the command line.

    Raises:
      ValueError: one of them is unknown.
    """
    known = known_dataset(recipe, config)
    if known is not None and num_examples is None and num_classes is None:
        return known
    examples = num_examples or (known and known.num_examples)
    classes = num_classes or (known and known.num_classes)
    if not examples or not classes:
        known_names = f"{', '.join(_OF_DATA)}, and the recipes {', '.join(_OF_RECIPE)}"
        raise ValueError(
            f"{config.data or recipe}: numbers of images and classes are not known here. Add --num_examples=N and "
            f"--num_classes=N. Known: {known_names}."
        )
    source = "" if known is None or (num_examples and num_classes) else f"{known.source}; some by "
    return Dataset(
        known.name if known else config.data or recipe,
        examples,
        classes,
        f"{source}the command line",
    )


def known_examples(recipe: str, config: RunConfig) -> int | None:
    """Return the number of training images of a recipe without opening them; None if unknown."""
    inputs = config.input
    known = known_dataset(recipe, config)
    if inputs.train_examples is not None:
        return inputs.train_examples
    is_complete = not inputs.classes and inputs.train_examples_per_class is None
    is_train = inputs.train_split in ("train", "train800val200")
    return known.num_examples if known is not None and is_complete and is_train else None
