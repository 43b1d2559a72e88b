"""ReaL: the validation images with every class that they show (Beyer et al., "Are we done with ImageNet?", 2020)."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vit_jax.data.listing import FileSource
from vit_jax.data.records import Source
from vit_jax.data.subset import SubsetSource
from vit_jax.files import expanded, read_json
from vit_jax.inference.imagenet import classes
from vit_jax.inference.imagenet.places import (
    ImageSet,
    column,
    filled,
    open_prepared,
    open_single,
    open_unpacked,
)

_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG$", re.IGNORECASE)


def open_real(
    one: ImageSet, validation: ImageSet, outputs: np.ndarray, data_dir: str | None, real: str | None
) -> tuple[Source, str, np.ndarray]:
    """Validation images with the outputs that are right for each; those without any are left out."""
    labels: list[Sequence[int] | None]  # None of a damaged record, which counts as unreadable
    if real is not None:
        source, where = open_single(validation, data_dir)
        labels, where = _labels_of_files(source, expanded(real)), f"{real} on {where}"
    else:
        prepared, where = open_prepared(one, data_dir, "original_label") or open_unpacked(one, data_dir)
        source = SubsetSource(prepared, np.arange(len(prepared)), classes.class_names())
        labels = list(column(prepared, "real_label"))
    kept = [number for number, some in enumerate(labels) if some is None or len(some)]
    if not kept:
        raise ValueError(f"{where}: no image has a label.")
    right = filled([outputs[np.asarray(() if labels[n] is None else labels[n], np.int64)] for n in kept])
    return SubsetSource(source, kept), where, right


def _labels_of_files(source: SubsetSource, path: Path) -> list[Sequence[int] | None]:
    """ReaL's labels of each record, by the number in the name of its file."""
    labels = read_json(path)
    if not isinstance(labels, list) or not all(map(_is_label_set, labels)):
        raise ValueError(f"{path}: it is no list of lists of classes, 0 to 999, one for each validation image.")
    found: list[Sequence[int] | None] = []
    for name in _file_names(source.source):
        match = _VALIDATION_FILE.search(name or "")
        number = int(match[1]) if match else 0
        if name is not None and not 1 <= number <= len(labels):
            raise ValueError(
                f"{name} has no place in {path}, whose {len(labels):,} lists are of ILSVRC2012_val_00000001.JPEG and "
                "so on, in the order of these names."
            )
        found.append(None if name is None else labels[number - 1])
    return found


def _is_label_set(some: object) -> bool:
    return isinstance(some, list) and all(type(label) is int and 0 <= label < classes.COUNT for label in some)


def _file_names(source: Source) -> Iterator[str | None]:
    if isinstance(source, FileSource):
        yield from map(source.name_of, range(len(source)))
    else:
        yield from (name if name is None else os.fsdecode(name) for name in column(source, "file_name"))
