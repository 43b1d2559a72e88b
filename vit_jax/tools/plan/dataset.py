"""Numbers of images and classes, for recipes whose data are not on this machine."""

import dataclasses
import pathlib

from vit_jax.config import RunConfig
from vit_jax.data.kinds.vtab_tasks import find_task
from vit_jax.data.sources import find_data_path, open_source, require_known_data


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

_COMPLETE = ("train", "train800val200")
"""Splits whose images the tables count."""
_BY_DATA = {
    "digits": Dataset("digits", 1437, 10, "scikit-learn"),
    "fashion": Dataset("Fashion-MNIST", 60_000, 10, "its training split"),
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
    """Return the complete training split of `config.data`, or of the recipe's paper without data.

    None: its size is not in a table.

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
    """Return the training images and classes of a run, to plan with.

    Numbers of the command line come first, then the tables above for the part of the split that
    the run trains on, then the data on this machine.

    Raises:
      ValueError: one of the numbers is unknown.
    """
    if num_examples and num_classes:
        name = config.data or recipe
        return Dataset(name, num_examples, num_classes, "the command line")

    known = _find_sizes(recipe, config)
    if known is None:
        raise ValueError(
            f"{config.data or recipe}: numbers of images and classes are not known here. "
            "Add --num_examples=N and --num_classes=N. "
            f"Known: {', '.join(_BY_DATA)}, and the recipes {', '.join(_BY_RECIPE)}."
        )
    if num_examples is None and num_classes is None:
        return known
    return Dataset(
        known.name,
        num_examples or known.num_examples,
        num_classes or known.num_classes,
        f"{known.source}; some by the command line",
    )


def _find_sizes(recipe: str, config: RunConfig) -> Dataset | None:
    """Return the sizes by table, or of data on this machine; None without both."""
    known = find_dataset(recipe, config)
    num_examples = count_examples(recipe, config)
    if known is not None and num_examples is not None:
        return dataclasses.replace(known, num_examples=num_examples)
    if config.data is None or not _is_here(config):
        return None
    train = open_source(config.data, config.input.train_split, config.input, config.seed)
    return Dataset(config.data, len(train), train.num_classes, "on this machine")


def _is_here(config: RunConfig) -> bool:
    """Return whether the data is on this machine, or comes from the user's own code."""
    assert config.data is not None, "the caller checks it"
    require_known_data(config.data, "config.data")
    path = find_data_path(config.data, config.input.data_dir)
    return path is None or path.exists()


def count_examples(recipe: str, config: RunConfig) -> int | None:
    """Return the number of training images of a run by the tables; None if they do not say it.

    A run on opened data counts these images itself, and finds the same number.
    """
    inputs = config.input
    if inputs.train_examples is not None:
        return inputs.train_examples
    if inputs.classes or inputs.exclude or inputs.train_examples_per_class is not None:
        return None
    known = find_dataset(recipe, config)
    if known is None:
        return None
    return _count_part(inputs.train_split, known.num_examples)


def _count_part(split: str, num_examples: int) -> int | None:
    """Return the number of images in "train" or a part of it, as TFDS rounds; None for others."""
    if split in _COMPLETE:
        return num_examples
    name, bracket, _ = split.partition("[")
    if not bracket or name not in _COMPLETE:
        return None
    # Imported here, because tensorflow_datasets takes seconds to load.
    import tensorflow_datasets as tfds

    files = tfds.core.ShardedFileTemplate(dataset_name="data", data_dir="", filetype_suffix="x")
    info = tfds.core.SplitInfo(
        name=name,
        shard_lengths=[num_examples],
        num_bytes=0,
        filename_template=files,
    )
    try:
        return int(tfds.core.SplitDict([info])[split].num_examples)
    except ValueError:  # the run rejects this split
        return None
