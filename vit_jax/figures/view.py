"""The images that pictures are drawn of: some of a folder or a dataset, prepared as the network takes them."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from vit_jax.api import Model
from vit_jax.api.model import Images
from vit_jax.data.image_files import list_images
from vit_jax.data.images import UnreadableImage
from vit_jax.data.records import Source, few
from vit_jax.data.subset import SubsetSource
from vit_jax.evals.runner import require_finite
from vit_jax.evals.splits import RELEASED, SplitChoice, open_split

NUM_IMAGES = 128  # over which the paper averages


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The images of a figure, and the choice among them.

    Attributes:
      images_NHWC: uint8, prepared; None where there are none.
      names: of the images.
      shown: how many of them a sheet has, spread evenly.
      heads: layer and head, both from 1, whose attention is drawn; () for up to eight heads of the last layer.
      notes: what readers of the pictures should know.
    """

    images_NHWC: np.ndarray | None = None
    names: Sequence[str] = ()
    shown: int = 8
    heads: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_images(self) -> np.ndarray:
        """The images; ValueError where there are none."""
        if self.images_NHWC is None or not len(self.images_NHWC):
            raise ValueError("This picture needs images.")
        return self.images_NHWC

    @property
    def shown_indices(self) -> np.ndarray:
        """Numbers of the images that sheets have."""
        return spread(len(self.all_images), self.shown)

    @property
    def shown_images(self) -> np.ndarray:
        """The images that sheets have."""
        return self.all_images[self.shown_indices]


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to count - 1, evenly spread: datasets are often sorted by class."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def finite(model: Model, array: np.ndarray) -> np.ndarray:
    """Return the outputs of a network, a row for each image. Raise ValueError if they are not finite."""
    return require_finite(array, model.source, "image {}".format)


def read_view(
    model: Model, given: str, *, split: str | None = None, data_dir: str | None = None, num_images: int = NUM_IMAGES
) -> View:
    """Read and prepare images.

    Args:
      model: says how images are prepared.
      given: an image, a folder of images at any depth or a pattern; or data as in a recipe, "digits", "tfds:NAME".
      split: of data; None for the one to test on.
      data_dir: where TFDS keeps prepared datasets.
      num_images: at most so many, evenly spread; those that cannot be read are left out with a note.

    Raises:
      ValueError: there are no such images, none can be read, or an option has no effect on them.
    """
    transform = model.require_transform()
    source = _open(given, split, data_dir, model, num_images)
    images, names, unreadable = list[np.ndarray](), list[str](), list[str]()
    for index in range(len(source)):
        try:
            images.append(transform(source[index]))
            names.append(source.name_of(index))
        except UnreadableImage as error:
            unreadable.append(f"{source.name_of(index)} ({error})")
    if not images:
        raise ValueError(f"--images={given}: none of {len(source)} images can be read: {few(unreadable)}.")
    notes = [f"{len(unreadable)} images cannot be read and are left out: {few(unreadable)}."] if unreadable else []
    return View(images_NHWC=np.stack(images), names=names, notes=tuple(notes))


def _open(given: str, split: str | None, data_dir: str | None, model: Model, num_images: int) -> Source:
    is_data = given in (*RELEASED, "digits") or ":" in given
    if is_data and not os.path.exists(os.path.expanduser(given)):
        choice = SplitChoice(data_dir=data_dir, value_range=model.require_transform().value_range)
        source = open_split(given, split, choice, model.training)
        return SubsetSource(source, spread(len(source), num_images))
    if idle := [f"--{name}" for name, value in (("split", split), ("data_dir", data_dir)) if value is not None]:
        raise ValueError(f"{', '.join(idle)}: without effect on files, --images={given}; leave it out.")
    paths = list_images([given])
    return Images([paths[index] for index in spread(len(paths), num_images)])
