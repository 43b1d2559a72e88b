"""Sets of correct classes: images that show several classes, of which each prediction may be any.

ReaL (Beyer et al., "Are we done with ImageNet?", 2020) has them for the validation images of
ImageNet.

Legend: N images, S correct classes of an image.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.records import Source
from vit_jax.data.subset import SubsetSource
from vit_jax.storage.files import expand_path, read_json

FILE_ENDING = ".json"
_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG$", re.IGNORECASE)
LabelSet = Sequence[int] | None
"""The correct classes of a record; None for a damaged record, which counts as unreadable."""


class CorrectImages(NamedTuple):
    """Images with at least one correct class, and these classes, (N, S), filled with -1."""

    source: Source
    correct_NS: np.ndarray


def open_label_sets(source: Source, text: str) -> CorrectImages:
    """Return the images of a split that have a correct class, with these classes.

    Args:
      source: the split.
      text: a JSON file, see `read_label_file`, or the name of a feature of a dataset of TFDS.

    Raises:
      ValueError: the file does not fit the split, there is no such feature, or no image has a
        class.
    """
    if text.endswith(FILE_ENDING):
        label_sets = read_label_file(source, expand_path(text), source.num_classes)
    else:
        label_sets = _read_feature(source, text)
    return keep_labelled(source, label_sets, text)


def keep_labelled(source: Source, label_sets: Sequence[LabelSet], name: str) -> CorrectImages:
    """Return the images with a correct class; `name` is the origin of the sets, for messages."""
    kept = []
    correct = []
    for number, label_set in enumerate(label_sets):
        if label_set is None:
            label_set = ()
        elif len(label_set) == 0:
            continue
        kept.append(number)
        correct.append(np.asarray(label_set, np.int64))
    if not kept:
        raise ValueError(f"{name}: no image has a label.")
    return CorrectImages(SubsetSource(source, kept), stack_rows(correct))


def stack_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows of different lengths as one array, filled with -1."""
    stacked = np.full((len(rows), max(map(len, rows))), -1)
    for row, values in zip(stacked, rows, strict=True):
        row[: len(values)] = values
    return stacked


def read_label_file(source: Source, path: Path, num_classes: int) -> list[LabelSet]:
    """Return the label set of each record from a JSON file.

    The file is a list with a list of classes for each image: of ImageNet's validation images by the
    number in the name of the file, of others in the order of the split.

    Raises:
      ValueError: other content, or another number of lists than images.
    """
    label_sets = read_json(path)
    is_list = isinstance(label_sets, list)
    if not is_list or not all(_is_label_set(labels, num_classes) for labels in label_sets):
        raise ValueError(
            f"{path}: must be a list of lists of classes, 0 to {num_classes - 1}, one for each "
            "image."
        )
    names = list(_list_file_names(source))
    if any(name is not None and _VALIDATION_FILE.search(name) for name in names):
        return _match_by_number(label_sets, names, path)
    if len(label_sets) != len(source):
        raise ValueError(
            f"{path}: has {len(label_sets):,} lists, must have {len(source):,}, one for each image "
            "of the split in its order."
        )
    return label_sets


def _match_by_number(
    label_sets: list[LabelSet],
    names: Sequence[str | None],
    path: Path,
) -> list[LabelSet]:
    """Return the label set of each record by the number in the name of its file."""
    matched: list[LabelSet] = []
    for name in names:
        if name is None:
            matched.append(None)
            continue
        match = _VALIDATION_FILE.search(name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(label_sets):
            raise ValueError(
                f"{name} has no place in {path}, whose {len(label_sets):,} lists are of "
                "ILSVRC2012_val_00000001.JPEG and so on, in the order of these names."
            )
        matched.append(label_sets[number - 1])
    return matched


def _is_label_set(labels: object, num_classes: int) -> bool:
    if not isinstance(labels, list):
        return False
    return all(type(label) is int and 0 <= label < num_classes for label in labels)


def _list_file_names(source: Source) -> Iterator[str | None]:
    """Yield the name of the file of each record; None for a damaged record."""
    if "file_name" not in list_features(source):
        yield from map(source.name_of, range(len(source)))
        return
    for name in read_column(source, "file_name"):
        yield None if name is None else os.fsdecode(name)


def _read_feature(source: Source, name: str) -> list[LabelSet]:
    """Return a feature of every record of TFDS, which has several classes."""
    features = list_features(source)
    if name not in features:
        known = ", ".join(features) or "no features: the data are not of TFDS"
        raise ValueError(
            f"{name}: must be a JSON file (NAME{FILE_ENDING}), or a feature of the data, which has "
            f"{known}."
        )
    label_sets = list(read_column(source, name))
    for label_set in label_sets:
        if label_set is not None and np.ndim(label_set) != 1:
            raise ValueError(f"{name}: must be a feature with a list of classes for each image.")
    return label_sets


def list_features(source: Source) -> tuple[str, ...]:
    """Return the names of the features of a dataset of TFDS; () for other sources."""
    module = sys.modules.get("vit_jax.data.kinds.tfds_source")  # loading it takes seconds
    if module is None or not isinstance(source, module.TfdsSource):
        return ()
    return source.feature_names


def read_column(source: Source, key: str) -> Iterator[Any]:
    """Yield one feature of every record of a dataset of TFDS."""
    from vit_jax.data.kinds.tfds_source import TfdsSource

    assert isinstance(source, TfdsSource)
    return source.column(key)
