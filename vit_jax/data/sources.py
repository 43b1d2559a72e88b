"""Open `config.data`: a kind of data such as "folder:PATH", or a reference "module:name"."""

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_jax.config.data_kinds import (
    HUB_SCHEME,
    KINDS,
    PREFIXES,
    REFERENCE_FORM,
    DataKind,
    find_kind,
    spell_quoted_forms,
)
from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.images import RANGE_OPTION
from vit_jax.data.exclusion import exclude
from vit_jax.data.kinds.in_memory import CachedSource
from vit_jax.data.records import Source
from vit_jax.data.subset import select
from vit_jax.imports.references import is_reference, resolve
from vit_jax.storage import is_address
from vit_jax.storage.files import mirror
from vit_jax.text.nearest import closest

if TYPE_CHECKING:
    from vit_jax.data.kinds.listing import Listing

_FILE = re.compile(r"[*?\[{#]|\.(csv|tar|parquet|npz)$")
"""Parts of an address that name a file or a pattern, not a folder."""


def open_source(
    data: str,
    split: str,
    config: InputConfig,
    seed: int,
    held_hashes: Mapping[str, str] | None = None,
    range_option: str = RANGE_OPTION,
    *,
    is_classified: bool = True,
) -> Source:
    """Open one split of a dataset.

    Args:
      data: text of one of the forms in `config.data_kinds.KINDS` (also "tfds:NAME/CONFIG",
        "tfds:NAME:VERSION"), or "package.module:name", which is called with (split, config, seed)
        and returns a `Source`.
      split: any split of the dataset; for TFDS and digits also a part of one, "train[:98%]"; for
        VTAB train800, val200, train800val200 or test.
      config: has the folder of TFDS data, classes and training examples to take or exclude, and the
        cache.
      seed: chooses the hold-out of files without splits, and the training examples.
      held_hashes: result of `subset.read_held_hashes` for such files when weights were trained on
        them.
      range_option: the option that warnings about files of more than 8 bits name.
      is_classified: False for files without a classifier, which may have one class and no training
        split.

    Raises:
      ValueError: the data does not exist, is not prepared, has no such split, or cannot be trained
        on; the classes or examples that the config chooses do not exist; a reference is no source.
    """
    kind = find_kind(data)
    if kind is None:
        from vit_jax.data.custom_sources import open_custom_source

        source = open_custom_source(_import_opener(data, "config.data"), data, split, config, seed)
    elif kind.is_listing:
        from vit_jax.data.kinds.listing import open_listing

        listing = _build_listing(kind, data)
        source = open_listing(
            listing,
            split,
            config,
            seed,
            held_hashes,
            range_option,
            is_classified=is_classified,
        )
    else:
        name = data.partition(":")[2]
        source = _load_opener(kind)(name, split, config.data_dir)

    is_training = split == config.train_split
    if is_training and config.exclude is not None:
        source = exclude(source, config.exclude, split)
    source = select(source, config, training=is_training, seed=seed)
    if config.cache_records:
        return CachedSource(source)
    return source


def find_listing(data: str) -> "Listing | None":
    """Return the list of images that "folder:PATH" and similar data name; None for other data."""
    kind = find_kind(data)
    if kind is None or not kind.is_listing:
        return None
    return _build_listing(kind, data)


def find_data_path(data: str, data_dir: str | None) -> Path | None:
    """Return the file or prepared folder that holds the data; None for digits and custom sources.

    Raises:
      ValueError: VTAB has no task of this name.
    """
    listing = find_listing(data)
    if listing is not None:
        return listing.path
    prefix, _, name = data.partition(":")
    if prefix not in ("tfds", "vtab") or not name:
        return None
    # Imported here, because tensorflow_datasets takes seconds to load.
    from vit_jax.data.kinds.tfds_source import tfds_folder
    from vit_jax.data.kinds.vtab_tasks import find_task

    dataset = re.split("[/:]", name)[0]
    if prefix == "vtab":
        dataset = find_task(name).dataset
    return tfds_folder(data_dir, dataset) / dataset


def normalize_data(data: str) -> str:
    """Return the text of a list of images with its real path or commit; other data unchanged."""
    if is_address(data.partition(":")[2]):
        return data.rstrip("/")
    listing = find_listing(data)
    if listing is None:
        return data
    return listing.address


def pin_data(data: str, stored: str | None = None) -> str:
    """Return data on the Hub with their commit; other data unchanged.

    `stored` are the data of an earlier run: its commit is used again if only this is missing.

    Raises:
      ValueError: the Hub does not have the data, or cannot be reached.
    """
    kind = find_kind(data)
    if kind is None or not kind.is_on_hub:
        return data
    from vit_jax.data.kinds.hub_parquet import pin_address

    return pin_address(data, stored)


def holds_out(data: str, config: InputConfig) -> bool:
    """Return True if `config.holdout_fraction` has an effect: the data are files without splits."""
    listing = find_listing(data)
    if listing is None:
        return False
    from vit_jax.data.kinds.listing import find_whole_splits

    whole = find_whole_splits(config)
    if not whole.test_split:
        return False
    return not (listing.exists() and listing.splits(whole.train_split, whole.test_split))


def require_known_data(data: str, field: str) -> None:
    """Raise ValueError, which names the field, for data of no known kind; no image is read."""
    kind = find_kind(data)
    if kind is None:
        _import_opener(data, field)
    elif kind.prefix == "vtab":
        from vit_jax.data.kinds.vtab_tasks import find_task

        find_task(data.partition(":")[2])
    elif kind.is_on_hub:
        from vit_jax.data.kinds.hub_parquet import parse_address

        parse_address(data.partition("#")[0])


def _build_listing(kind: DataKind, data: str) -> "Listing":
    name = data.partition(":")[2]
    listing: Listing = _load_opener(kind)(_find_path(kind, name))
    return listing


def _load_opener(kind: DataKind) -> Any:
    """Import the opener of a kind of data."""
    module, _, name = kind.opener.partition(":")
    return getattr(importlib.import_module(f"vit_jax.data.kinds.{module}"), name)


def _find_path(kind: DataKind, name: str) -> Path:
    """Return the path of a list of images; for gs:// it is in a mirror of the folder."""
    if not is_address(name):
        return Path(os.path.expanduser(name))
    words = name.rstrip("/").split("/")
    stop = len(words)
    if kind.prefix != "folder":
        for position in range(3, len(words)):
            if _FILE.search(words[position]):
                stop = position
                break
    folder = mirror("/".join(words[:stop]))
    return folder.joinpath(*words[stop:])


def _import_opener(data: str, field: str) -> Any:
    """Return the object that "package.module:name" names; raise ValueError for other data."""
    try:
        if not is_reference(data):
            allowed = f'{spell_quoted_forms()} and "{REFERENCE_FORM}"'
            raise ValueError(f"{field}={data!r}: unknown data; allowed are {allowed}.")
        return resolve(data, field)
    except ValueError as error:
        if data.partition(":")[0] == "imagenet":
            raise ValueError(
                f"{field}={data!r}: only `vit-jax evaluate` reads these sets. Give data with the "
                "classes of the training images, or evaluate the run: "
                f"vit-jax evaluate WORKDIR --data={data}.",
            ) from error
        near = _suggest_data(data)
        if near is None:
            raise
        raise ValueError(f"{error} Did you mean {near!r}?") from error


def _suggest_data(data: str) -> str | None:
    """Suggest data for a path without its kind, a misspelt kind or a name of TFDS."""
    path = Path(os.path.expanduser(data))
    for kind in KINDS:
        if kind.is_on_hub or not kind.is_listing:
            continue
        if _load_opener(kind)(path).exists():
            return f"{kind.prefix}:{data}"
    if data.startswith("hf://"):
        return data.replace("hf://", HUB_SCHEME, 1)
    prefix = data.partition(":")[0]
    for known in closest(prefix, PREFIXES):
        if known != prefix:
            return known
    if data.isidentifier():
        return f"tfds:{data}"
    return None
