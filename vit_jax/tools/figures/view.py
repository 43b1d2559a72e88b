"""The input images of figures: some of a folder or a dataset, prepared for the network; batches of them."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from vit_jax.api import Model
from vit_jax.api.model import Images
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import list_images
from vit_jax.data.records import Source, few
from vit_jax.data.subset import SubsetSource
from vit_jax.evals.runner import require_finite
from vit_jax.evals.splits import RELEASED, SplitChoice, open_split, reject_idle

NUM_IMAGES = 128  # over which the paper averages


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The images of a figure, and the choice among them.

    Attributes:
      images_NHWC: uint8, prepared; None without images.
      names: of the images.
      shown: number of images of a sheet, evenly spread.
      heads: layer and head, both from 1, whose attention is drawn; () for up to eight heads of the
        last layer.
      notes: remarks for readers of the figures.
    """

    images_NHWC: np.ndarray | None = None
    names: Sequence[str] = ()
    shown: int = 8
    heads: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_images(self) -> np.ndarray:
        """The images; ValueError if there are none."""
        if self.images_NHWC is None or not len(self.images_NHWC):
            raise ValueError("This figure needs images.")
        return self.images_NHWC

    @property
    def shown_indices(self) -> np.ndarray:
        """Numbers of the images of a sheet."""
        return spread(len(self.all_images), self.shown)

    @property
    def shown_images(self) -> np.ndarray:
        """The images of a sheet."""
        return self.all_images[self.shown_indices]


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to count - 1, evenly spread: datasets are often sorted by class."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def in_batches(
    model: Model,
    images_NHWC: np.ndarray,
    size: int,
    run: Callable[[np.ndarray], dict[str, jax.Array]],
) -> dict[str, np.ndarray]:
    """Return the results of `run` on at most `size` images at a time, joined; raise ValueError if one is not finite."""
    size = min(size, len(images_NHWC))
    batches = []
    for first in range(0, len(images_NHWC), size):
        image_BHWC = images_NHWC[first : first + size]
        missing = size - len(image_BHWC)  # one shape, compiled once
        results = run(np.pad(image_BHWC, ((0, missing), (0, 0), (0, 0), (0, 0))))
        batches.append(
            {name: np.asarray(array)[: len(image_BHWC)] for name, array in results.items()}
        )
    return {
        name: finite(model, np.concatenate([batch[name] for batch in batches]))
        for name in batches[0]
    }


def finite(model: Model, array: np.ndarray, first: int = 0) -> np.ndarray:
    """Return the outputs of a network, one row an image from `first` on.

    Raise ValueError if one is not finite.
    """
    return require_finite(array, model.source, lambda row: f"image {first + row}")


def read_view(
    model: Model,
    images: str,
    *,
    split: str | None = None,
    data_dir: str | None = None,
    num_images: int = NUM_IMAGES,
) -> View:
    """Read and prepare images.

    Args:
      model: prepares the images.
      images: an image, a folder of images at any depth or a pattern; or data as in a recipe,
        "digits", "tfds:NAME".
      split: of data; None for the one to test on.
      data_dir: where TFDS keeps prepared datasets.
      num_images: largest number, evenly spread; unreadable ones are skipped with a note.

    Raises:
      ValueError: there are no such images, none can be read, or an option has no effect on them.
    """
    transform = model.require_transform()
    source = _open(images, split, data_dir, model, num_images)
    prepared = list[np.ndarray]()
    names = list[str]()
    unreadable = list[str]()
    for index in range(len(source)):
        try:
            prepared.append(transform(source[index]))
            names.append(source.name_of(index))
        except UnreadableImage as error:
            unreadable.append(f"{source.name_of(index)} ({error})")
    if not prepared:
        raise ValueError(
            f"--images={images}: none of {len(source)} images can be read: {few(unreadable)}."
        )
    notes = (
        [f"{len(unreadable)} images cannot be read and are left out: {few(unreadable)}."]
        if unreadable
        else []
    )
    return View(images_NHWC=np.stack(prepared), names=names, notes=tuple(notes))


def _open(
    images: str, split: str | None, data_dir: str | None, model: Model, num_images: int
) -> Source:
    transform = model.require_transform()
    choice = SplitChoice(split=split, data_dir=data_dir, value_range=transform.value_range)
    is_data = images in (*RELEASED, "digits") or ":" in images
    if is_data and not os.path.exists(os.path.expanduser(images)):
        source = open_split(images, split, choice, model.training)
        return SubsetSource(source, spread(len(source), num_images))
    reject_idle(f"files, --images={images}", choice, "split", "data_dir")
    paths = list_images([images])
    return Images([paths[index] for index in spread(len(paths), num_images)])
