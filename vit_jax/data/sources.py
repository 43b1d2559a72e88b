"""Open `config.data`: "digits", "tfds:NAME", "vtab:TASK", a list of images (`LISTINGS`) or "module:name"."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.exclusion import exclude
from vit_jax.data.kinds.folder import Folder
from vit_jax.data.kinds.in_memory import CachedSource
from vit_jax.data.kinds.listing import RANGE_OPTION, Listing, open_listing, whole_splits
from vit_jax.data.kinds.parquet import Parquet
from vit_jax.data.kinds.shards import Shards
from vit_jax.data.kinds.table import Table
from vit_jax.data.kinds.vtab_tasks import find_task
from vit_jax.data.records import Source, checked_labels, few
from vit_jax.data.subset import select
from vit_jax.imports.references import is_reference, resolve
from vit_jax.storage.buckets import is_address
from vit_jax.storage.files import mirror
from vit_jax.text.nearest import closest

LISTINGS: Mapping[str, Callable[[Path], Listing]] = {
    "folder": Folder,
    "wds": Shards,
    "parquet": Parquet,
    "csv": Table,
}
"""Lists of images by their kind, "folder" in "folder:PATH"."""
_FILE = re.compile(r"[*?\[{#]|\.(csv|tar|parquet)$")  # in a part of an address that is no folder


def listing_of(data: str) -> Listing | None:
    """Return the list of images in "folder:PATH", "csv:FILE", "wds:PATH" and "parquet:PATH"; None for other data."""
    kind, _, name = data.partition(":")
    return LISTINGS[kind](_path_of(kind, name)) if kind in LISTINGS and name else None


def _path_of(kind: str, name: str) -> Path:
    """Return the path in "kind:PATH"; of gs:// that in a mirror of the folder, up to the first pattern or file."""
    if not is_address(name):
        return Path(os.path.expanduser(name))
    words = name.rstrip("/").split("/")
    is_file = (
        i > 2 and kind != "folder" and _FILE.search(word) is not None
        for i, word in enumerate(words)
    )
    stop = next((i for i, is_end in enumerate(is_file) if is_end), len(words))
    return mirror("/".join(words[:stop])).joinpath(*words[stop:])


def path_of(data: str, data_dir: str | None) -> Path | None:
    """Return the file, or the folder of a prepared dataset, that holds the data; None for digits and custom sources.

    Raises:
      ValueError: VTAB has no task of this name.
    """
    if (listing := listing_of(data)) is not None:
        return listing.path
    kind, _, name = data.partition(":")
    if kind not in ("tfds", "vtab") or not name:
        return None
    from vit_jax.data.kinds.tfds_source import (
        tfds_folder,  # here, because tensorflow_datasets takes seconds to load
    )

    dataset = find_task(name).dataset if kind == "vtab" else re.split("[/:]", name)[0]
    return tfds_folder(data_dir, dataset) / dataset


def located(data: str) -> str:
    """Return one text for all ways to write the path of a list of images; other data unchanged."""
    if is_address(data.partition(":")[2]):
        return data.rstrip("/")
    listing = listing_of(data)
    return (
        data
        if listing is None
        else f"{data.partition(':')[0]}:{os.path.realpath(listing.path)}{listing.suffix}"
    )


def holds_out(data: str, config: InputConfig) -> bool:
    """Return True if `config.holdout_fraction` has an effect: the data are files without splits."""
    if (listing := listing_of(data)) is None:
        return False
    named = whole_splits(config)
    return bool(named.test_split) and not (
        listing.exists() and listing.splits(named.train_split, named.test_split)
    )


def open_source(
    data: str,
    split: str,
    config: InputConfig,
    seed: int,
    held_then: Mapping[str, str] | None = None,
    range_option: str = RANGE_OPTION,
    *,
    is_classified: bool = True,
) -> Source:
    """Open one split of a dataset.

    Args:
      data: "digits", "tfds:NAME" (also "tfds:NAME/CONFIG", "tfds:NAME:VERSION"), "vtab:TASK", "folder:PATH",
        "wds:PATH", "parquet:PATH", "csv:FILE", or "package.module:name", which is called with (split, config, seed) and
        returns a `Source`.
      split: any split of the dataset; for TFDS and digits also a part of one, "train[:98%]"; for VTAB train800, val200,
        train800val200 or test.
      config: has the folder of TFDS data, classes and training examples to take or exclude, and the cache.
      seed: chooses the hold-out of files without splits, and the training examples.
      held_then: `subset.held_up_to` of such files when weights were trained on them.
      range_option: the option that warnings about files of more than 8 bits name.
      is_classified: False for files without a classifier, which may have one class and no training split.

    Raises:
      ValueError: the data does not exist, is not prepared, has no such split, or cannot be trained on; the classes
        or examples that the config chooses do not exist; a reference is no source.
    """
    if (listing := listing_of(data)) is not None:
        opened = open_listing(
            listing, split, config, seed, held_then, range_option, is_classified=is_classified
        )
    else:
        opened = _open_other(data, split, config, seed)
    is_training = split == config.train_split
    if is_training and config.exclude is not None:
        opened = exclude(opened, config.exclude, split)
    source = select(opened, config, training=is_training, seed=seed)
    return CachedSource(source) if config.cache_records else source


def _open_other(data: str, split: str, config: InputConfig, seed: int) -> Source:
    kind, _, name = data.partition(":")
    if data == "digits" or (kind in ("tfds", "vtab") and name):
        from vit_jax.data.kinds import (
            tfds_source,  # here, because tensorflow_datasets takes seconds to load
        )

        if data == "digits":
            return tfds_source.open_digits(split, config.data_dir)
        open_named = tfds_source.open_vtab if kind == "vtab" else tfds_source.open_tfds
        return open_named(name, split, config.data_dir)
    opener = _resolve_opener(data, "config.data")
    if not callable(opener):
        raise ValueError(
            f"config.data={data!r} is {type(opener).__name__}; give a function of (split, config, seed)."
        )
    return _validated(opener(split, config, seed), data, split)


def require_known_data(data: str, field: str) -> None:
    """Raise ValueError, which names the field, for data of no known kind; no image is read."""
    kind, _, name = data.partition(":")
    if kind == "vtab" and name:
        find_task(name)
    elif data != "digits" and not (name and kind in ("tfds", *LISTINGS)):
        _resolve_opener(data, field)


def _resolve_opener(data: str, field: str) -> Any:
    """Return what "package.module:name" names; raise ValueError, which names the field, for other data."""
    kind = data.partition(":")[0]
    try:
        if not is_reference(data):
            raise ValueError(
                f'{field}={data!r}: unknown data; allowed are "digits", "tfds:NAME", "vtab:TASK", "folder:PATH", '
                '"csv:FILE", "wds:PATH", "parquet:PATH" and "package.module:name".'
            )
        return resolve(data, field)
    except ValueError as error:
        if kind == "imagenet":
            raise ValueError(
                f"{field}={data!r}: only `vit-jax evaluate` reads these sets. Give data with the classes of the "
                f"training images, or evaluate the run: vit-jax evaluate WORKDIR --data={data}."
            ) from error
        path = Path(os.path.expanduser(data))
        near = [f"{known}:{data}" for known, listed in LISTINGS.items() if listed(path).exists()]
        near += [
            known for known in closest(kind, ["digits", "tfds", "vtab", *LISTINGS]) if known != kind
        ]
        near += [f"tfds:{data}"] if data.isidentifier() else []
        raise ValueError(f"{error} Did you mean {near[0]!r}?" if near else str(error)) from error


def _validated(source: object, data: str, split: str) -> Source:
    """Return the source of the user's code after checks: parts, class names, labels and the first image."""
    members = (
        "class_names",
        "num_classes",
        "labels",
        "label_shape",
        "__len__",
        "__getitem__",
        "name_of",
        "key_of",
    )
    try:
        if missing := [name for name in members if not hasattr(source, name)]:
            kind = type(source).__name__
            raise ValueError(f"{kind} has no {few(missing)}; return a vit_jax.data.records.Source.")
        source = cast(Source, source)
        names = source.class_names
        labels = source.labels
        shape = (len(source), *source.label_shape)
        if (
            not isinstance(names, tuple)
            or not 2 <= len({*names}) == len(names) == source.num_classes
        ):
            raise ValueError(
                f"class_names is {names!r}; give a tuple of at least two different names."
            )
        is_array = isinstance(labels, np.ndarray)
        if (
            not len(source)
            or not is_array
            or labels.shape != shape
            or not np.issubdtype(labels.dtype, np.integer)
        ):
            kind = f"{labels.dtype} {labels.shape}" if is_array else type(labels).__name__
            raise ValueError(
                f"labels are {kind} of {len(source)} records; give an array of {' x '.join(map(str, shape))} integers, "
                f"one for each record{' and class' if source.is_multilabel else ''}, of at least one record."
            )
        checked_labels(source)
        with contextlib.suppress(UnreadableImage):  # counted while training
            decode(source[0].image)
    except ValueError as error:
        raise ValueError(f"config.data={data!r}, split {split!r}: {error}") from error
    return source
