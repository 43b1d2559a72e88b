"""Where a set of images is: as TFDS has prepared it, or as its archive unpacks."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.folder import Folder
from vit_jax.data.listing import WHOLE, FileSource, open_listing
from vit_jax.data.records import Source, few
from vit_jax.data.subset import SubsetSource
from vit_jax.files import expanded
from vit_jax.inference.imagenet import classes

AS_IT_IS = InputConfig(train_split="train", test_split="test", image_size=(1, 1))  # how a folder is read: all of it


class Absent(ValueError):
    """A set is not there; the message says how it comes there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """One of the sets.

    Attributes:
      name: after "imagenet:".
      dataset: of TFDS; "" where it has none.
      split: of that.
      folders: as the archive unpacks, below data_dir, with a sub-folder for each class.
      images: that were released.
      subset: the letter of `classes.members` whose classes it has; "" for all.
      manual: what TFDS cannot download itself.
    """

    name: str
    images: int
    dataset: str = ""
    split: str = "test"
    folders: tuple[str, ...] = ()
    subset: str = ""
    manual: str = ""


def open_single(one: ImageSet, data_dir: str | None) -> tuple[SubsetSource, str]:
    """Images with one label each, numbered as `classes`, and where they are."""
    source, where = open_prepared(one, data_dir) or open_unpacked(one, data_dir)
    known = classes.numbers_by_id() | {str(number): number for number in range(classes.COUNT)}  # V2's folders
    its_own = set(classes.members(one.subset).tolist()) if isinstance(source, FileSource) else set(known.values())
    if unknown := [name for name in source.class_names if known.get(name) not in its_own]:
        raise ValueError(f"{where} has classes that imagenet:{one.name} does not have: {few(unknown)}.")
    numbers = np.array([known[name] for name in source.class_names])
    return SubsetSource(source, np.arange(len(source)), classes.class_names(), numbers), where


def open_prepared(one: ImageSet, data_dir: str | None, label_key: str = "label") -> tuple[Source, str] | None:
    """A set that TFDS has prepared; None where it has not."""
    from vit_jax.data import tfds_source  # here, because tensorflow_datasets takes seconds to load

    try:
        return tfds_source.open_tfds(one.dataset, one.split, data_dir, label_key), f"tfds:{one.dataset}"
    except tfds_source.NotPrepared:
        return None


def open_unpacked(one: ImageSet, data_dir: str | None) -> tuple[Source, str]:
    """The folder of an unpacked archive; `Absent` says how either form is made."""
    for path in [expanded(data_dir) / folder for folder in one.folders] if data_dir else []:
        if path.is_dir():
            return open_listing(Folder(path), WHOLE, AS_IT_IS, seed=0), f"folder:{path}"
    ways = []
    if one.dataset:
        place = f" --data_dir={data_dir}" if data_dir else ""
        ways.append(f"vit-jax prepare {one.dataset}{place}{one.manual}")
    if one.folders:
        ways.append(f"unpack its archive, so that {' or '.join(one.folders)} is in the folder of --data_dir=")
    else:
        ways.append("give --real=real.json, for the images of imagenet:validation")
    raise Absent("; or ".join(ways))


def column(source: Source, key: str) -> Iterator[Any]:
    """One feature of every record of TFDS, as `TfdsSource.column`."""
    from vit_jax.data.tfds_source import TfdsSource

    assert isinstance(source, TfdsSource)
    return source.column(key)


def filled(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one array, filled with -1."""
    filled = np.full((len(rows), max(map(len, rows))), -1)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return filled
