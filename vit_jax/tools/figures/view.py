"""The input images of figures, from a folder or a dataset, prepared for the network; batches."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from vit_jax.api import Model
from vit_jax.api.model import Images
from vit_jax.config.data_kinds import EMBEDDED
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import list_images
from vit_jax.data.records import Source, few
from vit_jax.data.subset import SubsetSource
from vit_jax.evals.runner import require_finite
from vit_jax.evals.splits import RELEASED, SplitChoice, open_split, reject_idle
from vit_jax.tools.figures.sheets import to_pixels

NUM_IMAGES = 128  # the number for the paper's mean attention distances


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The images of a figure, and the selection that a sheet shows.

    Attributes:
      images_NHWC: prepared, uint8 RGB or normalised bands; None without images.
      names: names of the images.
      shown: number of images of a sheet, evenly spread.
      heads: layer and head, both from 1, of the attention maps to draw; () for up to eight heads of
        the last layer.
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
        if self.images_NHWC is None or len(self.images_NHWC) == 0:
            raise ValueError("This figure needs images.")
        return self.images_NHWC

    @property
    def shown_indices(self) -> np.ndarray:
        """Numbers of the images of a sheet."""
        return spread(len(self.all_images), self.shown)

    @property
    def shown_images(self) -> np.ndarray:
        """The images of a sheet, as the network takes them."""
        return self.all_images[self.shown_indices]

    @property
    def shown_pixels(self) -> np.ndarray:
        """The images of a sheet, uint8 RGB."""
        return to_pixels(self.all_images)[self.shown_indices]


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to count - 1, evenly spread.

    Datasets are often sorted by class.
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def run_in_batches(
    model: Model,
    images_NHWC: np.ndarray,
    batch_size: int,
    run: Callable[[np.ndarray], dict[str, jax.Array]],
) -> dict[str, np.ndarray]:
    """Return the results of `run` on batches of at most `batch_size` images, joined.

    Raises:
      ValueError: a result is not finite.
    """
    batch_size = min(batch_size, len(images_NHWC))
    parts: dict[str, list[np.ndarray]] = {}
    for first in range(0, len(images_NHWC), batch_size):
        image_BHWC = images_NHWC[first : first + batch_size]
        num_missing = batch_size - len(image_BHWC)  # one shape, compiled once
        results = run(np.pad(image_BHWC, ((0, num_missing), (0, 0), (0, 0), (0, 0))))
        for name, array in results.items():
            rows = np.asarray(array)[: len(image_BHWC)]
            parts.setdefault(name, []).append(rows)

    return {name: require_finite_rows(model, np.concatenate(rows)) for name, rows in parts.items()}


def require_finite_rows(
    model: Model,
    rows: np.ndarray,
    first: int = 0,
) -> np.ndarray:
    """Return outputs of a network, one row for each image from number `first` on.

    Raises:
      ValueError: a row is not finite.
    """
    return require_finite(rows, model.source, lambda row: f"image {first + row}")


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
      split: split of the data; None for the test split.
      data_dir: folder of prepared TFDS datasets.
      num_images: largest number of images, evenly spread; unreadable ones are skipped with a note.

    Raises:
      ValueError: the images do not exist, none is readable, or an option has no effect on them.
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
    notes = list[str]()
    if unreadable:
        notes.append(f"{len(unreadable)} images cannot be read and are skipped: {few(unreadable)}.")
    return View(images_NHWC=np.stack(prepared), names=names, notes=tuple(notes))


def _open(
    images: str,
    split: str | None,
    data_dir: str | None,
    model: Model,
    num_images: int,
) -> Source:
    """Return a source of at most `num_images` of the images."""
    transform = model.require_transform()
    choice = SplitChoice(
        split=split,
        data_dir=data_dir,
        value_range=transform.value_range,
        bands=transform.bands,
    )
    is_data = images in (*RELEASED, *EMBEDDED) or ":" in images
    if is_data and not os.path.exists(os.path.expanduser(images)):
        source = open_split(images, split, choice, model.training)
        return SubsetSource(source, spread(len(source), num_images))

    reject_idle(f"files, --images={images}", choice, "split", "data_dir")

    paths = list_images([images])
    return Images([paths[index] for index in spread(len(paths), num_images)])
