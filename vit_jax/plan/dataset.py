"""Numbers of images and classes, for recipes whose data are not on this machine."""

import contextlib
import dataclasses
import pathlib

from vit_jax.config import RunConfig
from vit_jax.data.vtab_tasks import find_task


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The size of a training split, and the source of these numbers."""

    name: str
    num_examples: int
    num_classes: int
    source: str


IMAGENET = Dataset("ImageNet", 1_281_167, 1000, "ILSVRC-2012")
IMAGENET_21K = Dataset("ImageNet-21k", 14_197_122, 21_843, "14 million images, 21k classes (ViT, sec. 4.1)")
JFT = Dataset("JFT-300M", 303_000_000, 18_291, "303 million images (ViT, sec. 4.1), 18,291 classes (BiT, sec. 3.1)")

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


def choose_dataset(
    recipe: str, config: RunConfig, *, num_examples: int | None = None, num_classes: int | None = None
) -> Dataset:
    """The numbers to plan with: those given, else those of `config.data`, else those of the recipe's paper.

    The recipe is named as on the command line, "configs/pretrain_jft.py:ViT-H/14".

    Raises:
      ValueError: neither is known.
    """
    if config.data is None:
        known = _OF_RECIPE.get(pathlib.PurePath(recipe.partition(":")[0]).stem)
    else:
        known = _OF_DATA.get(config.data) or _vtab(config.data)
    if num_examples is not None and num_classes is not None:
        return Dataset(config.data or "given", num_examples, num_classes, "the command line")
    if known is None:
        known_names = f"{', '.join(_OF_DATA)}, and the recipes {', '.join(_OF_RECIPE)}"
        raise ValueError(
            f"{config.data or recipe}: numbers of images and classes are not known here. Add --num_examples=N and "
            f"--num_classes=N. Known: {known_names}."
        )
    if num_examples is None and num_classes is None:
        return known
    examples, classes = num_examples or known.num_examples, num_classes or known.num_classes
    return Dataset(known.name, examples, classes, f"{known.source}; some by the command line")


def known_examples(recipe: str, config: RunConfig) -> int | None:
    """Return the number of training images of a recipe without opening them; None if unknown."""
    inputs = config.input
    if inputs.train_examples is not None:
        return inputs.train_examples
    is_complete = not inputs.classes and inputs.train_examples_per_class is None
    if not is_complete or inputs.train_split not in ("train", "train800val200"):
        return None
    with contextlib.suppress(ValueError):
        return choose_dataset(recipe, config).num_examples
    return None


def _vtab(data: str) -> Dataset | None:
    kind, _, name = data.partition(":")
    return Dataset(data, 1000, find_task(name).num_classes, "VTAB-1k") if kind == "vtab" else None
