"""Records to exclude from training: a file of ids that `vit-jax duplicates --write` makes."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.data.records import Source, WrappedSource, find_innermost
from vit_jax.data.subset import SubsetSource
from vit_jax.storage.files import expand_path, read_bounded, read_json, write_atomically

MAX_BYTES = 2**30
"""Size of ten million ids of a hundred bytes."""
COMPARED = 16
"""Number of images that are compared, to recognise other data by the same split."""


class ExcludingSource(SubsetSource):
    """Another source without `num_excluded` of its records."""

    def __init__(self, source: Source, is_excluded_N: np.ndarray) -> None:
        super().__init__(source, np.flatnonzero(~is_excluded_N))
        self.num_excluded = int(is_excluded_N.sum())


def write_exclusion(
    path: str | os.PathLike[str],
    split: str,
    source: Source,
    indices: Sequence[int],
) -> None:
    """Write the ids of records of a split."""
    ids = [os.fsdecode(source.key_of(index)) for index in indices]

    is_excluded_N = np.isin(np.arange(len(source)), indices)
    digest = _digest_images(source, is_excluded_N)
    content = {
        "split": split,
        "records": len(source),
        "images_sha256": digest,
        "ids": ids,
    }

    write_atomically(path, json.dumps(content, indent=0) + "\n")


def exclude(source: Source, file: str, split: str) -> ExcludingSource:
    """Return a source without the records that a file names.

    Raises:
      ValueError: the file cannot be read, names no record of the source, or names records by their
        place in another split or in other data.
    """
    try:
        stated = read_json(expand_path(file), MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"config.input.exclude: {error}") from error

    ids = set[bytes]()
    if _is_exclusion(stated):
        ids = set(map(os.fsencode, stated["ids"]))
    is_excluded_N = np.zeros(len(source), bool)
    for index in range(len(source)):
        is_excluded_N[index] = source.key_of(index) in ids

    problem = _find_problem(stated, source, split, is_excluded_N)
    if problem is not None:
        raise ValueError(f"config.input.exclude={file}: {problem}")
    return ExcludingSource(source, is_excluded_N)


def _find_problem(stated: Any, source: Source, split: str, is_excluded_N: np.ndarray) -> str | None:
    """Return the reason why the content of a file does not fit a split; None if it does."""
    if not _is_exclusion(stated):
        return "must hold split, records and ids. Write it with vit-jax duplicates … --write=FILE."

    # Records of TFDS, for example, have no other key than their place.
    identifies_by_place = type(find_innermost(source)).key_of is Source.key_of
    stated_split = stated["split"]
    stated_records = stated["records"]
    is_same_split = stated_split == split and stated_records == len(source)
    if identifies_by_place and not is_same_split:
        return (
            f"is of split {stated_split!r} with {stated_records:,} records, and {split!r} has "
            f"{len(source):,}; ids of these data are places in a split. "
            f"Write it for --split='{split}'."
        )

    ids = set(stated["ids"])
    if ids and not is_excluded_N.any():
        return f"none of its {len(ids):,} ids is a record of {split!r}. Give another file."

    # A list that is written by hand has no digest. The digest of the source reads its images.
    if not identifies_by_place or "images_sha256" not in stated:
        return None
    if stated["images_sha256"] != _digest_images(source, is_excluded_N):
        return f"is of other data: other images have its places in {split!r}. Write it anew."
    return None


def num_excluded(source: Source) -> int:
    """Return the number of records that were excluded before parts of a source were chosen."""
    while isinstance(source, WrappedSource):
        if isinstance(source, ExcludingSource):
            return source.num_excluded
        source = source.source
    return 0


def digest_exclusion(file: str) -> str:
    """Return the digest of a file of ids."""
    return hashlib.sha256(read_bounded(expand_path(file), MAX_BYTES)).hexdigest()


def _digest_images(source: Source, is_excluded_N: np.ndarray) -> str:
    """Return the digest of the first excluded images."""
    digest = hashlib.sha256()
    for index in np.flatnonzero(is_excluded_N)[:COMPARED].tolist():
        image = source[index].image
        if not isinstance(image, bytes):
            image = image.tobytes()
        digest.update(image)
    return digest.hexdigest()


def _is_exclusion(stated: object) -> bool:
    if not isinstance(stated, dict):
        return False
    kinds = {"split": str, "records": int, "ids": list}
    for name, kind in kinds.items():
        if type(stated.get(name)) is not kind:
            return False
    return all(isinstance(name, str) for name in stated["ids"])
