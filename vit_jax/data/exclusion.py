"""Records to exclude from training: a file with their ids, which `vit-jax duplicates --write` makes."""

import hashlib
import json
import os
from collections.abc import Sequence

import numpy as np

from vit_jax.data.records import Source, WrappedSource, innermost
from vit_jax.data.subset import SubsetSource
from vit_jax.storage.files import expanded, read_bounded, read_json, write_atomically

MAX_BYTES = 2**30  # ten million ids of a hundred bytes
COMPARED = 16  # images that show whether places in a split are those of the same data


class ExcludingSource(SubsetSource):
    """Another source without some records, of which there are `num_excluded`."""

    def __init__(self, source: Source, is_excluded_N: np.ndarray) -> None:
        super().__init__(source, np.flatnonzero(~is_excluded_N))
        self.num_excluded = int(is_excluded_N.sum())


def write_exclusion(
    path: str | os.PathLike[str], split: str, source: Source, indices: Sequence[int]
) -> None:
    """Write the ids of records of a split."""
    ids = [os.fsdecode(source.key_of(index)) for index in indices]
    is_excluded_N = np.isin(np.arange(len(source)), indices)
    digest = _images_sha256(source, is_excluded_N)
    content = {"split": split, "records": len(source), "images_sha256": digest, "ids": ids}
    write_atomically(path, json.dumps(content, indent=0) + "\n")


def exclude(source: Source, file: str, split: str) -> ExcludingSource:
    """Return a source without the records that a file names.

    Raises:
      ValueError: the file cannot be read, names no record of the source, or names records by their
        place in another split or in other data.
    """
    try:
        stated = read_json(expanded(file), MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"config.input.exclude: {error}") from error
    is_valid = _is_exclusion(stated)
    ids = {os.fsencode(name) for name in stated["ids"]} if is_valid else set[bytes]()
    is_excluded_N = np.array([source.key_of(index) in ids for index in range(len(source))], bool)
    # As those of TFDS. A list that is written by hand has no digest.
    identifies_by_place = type(innermost(source)).key_of is Source.key_of
    if not is_valid:
        problem = (
            "must hold split, records and ids. Write it with vit-jax duplicates … --write=FILE."
        )
    elif identifies_by_place and (stated["split"], stated["records"]) != (split, len(source)):
        problem = (
            f"is of split {stated['split']!r} with {stated['records']:,} records, and {split!r} has {len(source):,}; "
            f"ids of these data are places in a split. Write it for --split='{split}'."
        )
    elif ids and not is_excluded_N.any():
        problem = f"none of its {len(ids):,} ids is a record of {split!r}. Give another file."
    elif (
        identifies_by_place
        and "images_sha256" in stated
        and stated["images_sha256"] != _images_sha256(source, is_excluded_N)  # reads the images
    ):
        problem = f"is of other data: other images have its places in {split!r}. Write it anew."
    else:
        return ExcludingSource(source, is_excluded_N)
    raise ValueError(f"config.input.exclude={file}: {problem}")


def num_excluded(source: Source) -> int:
    """Return the number of records that were excluded before parts of a source were chosen."""
    while isinstance(source, WrappedSource):
        if isinstance(source, ExcludingSource):
            return source.num_excluded
        source = source.source
    return 0


def exclusion_sha256(file: str) -> str:
    """Return the digest of a file of ids."""
    return hashlib.sha256(read_bounded(expanded(file), MAX_BYTES)).hexdigest()


def _images_sha256(source: Source, is_excluded_N: np.ndarray) -> str:
    """Return the digest of the first excluded images."""
    digest = hashlib.sha256()
    for index in np.flatnonzero(is_excluded_N)[:COMPARED].tolist():
        image = source[index].image
        digest.update(image if isinstance(image, bytes) else image.tobytes())
    return digest.hexdigest()


def _is_exclusion(stated: object) -> bool:
    kinds = {"split": str, "records": int, "ids": list}
    if not isinstance(stated, dict) or any(
        type(stated.get(name)) is not kind for name, kind in kinds.items()
    ):
        return False
    return all(isinstance(name, str) for name in stated["ids"])
