"""WebDataset tar shards ("wds:PATH"): images are read by the offsets of `shard_index`."""

import functools
import os
import re
from collections.abc import Sequence

import numpy as np

from vit_jax.data.decoding.depth import SURVEYED
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import MAX_IMAGE_BYTES
from vit_jax.data.kinds.listing import warn_once
from vit_jax.data.kinds.packed import Packed, PackedSource, read_class_names
from vit_jax.data.kinds.shard_index import (
    Index,
    describe_notes,
    find_index,
    parse_selection,
)
from vit_jax.data.records import few
from vit_jax.data.workers import map_in_threads
from vit_jax.storage.files import read_range
from vit_jax.storage.gcs_client import NoAnswer

CLASS_NAMES = ("classes.txt", "classnames.txt")
"""Files of names of classes, the second one in OpenCLIP's datasets."""
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_THREADS = 8
"""Number of threads that index shards; they mostly wait for a disk or a network."""


class ShardSource(PackedSource):
    """Images of tar shards, read by their offsets."""

    def __init__(
        self,
        files: Sequence[str],
        indices: list[np.ndarray],
        class_names: tuple[str, ...],
        labels: np.ndarray,
        root: str,
    ) -> None:
        super().__init__(files, list(map(len, indices)), class_names, labels, root)
        self._members = _join_column(indices, "name")
        self._offsets = _join_column(indices, "offset")
        self._sizes = _join_column(indices, "size")

    def image_of(self, index: int) -> bytes:
        """Return the file of a record's image.

        Raises:
          UnreadableImage: the shard was changed, or cannot be read.
          NoAnswer: the shard is in a bucket that does not answer.
        """
        shard, _ = self._place_of(index)
        offset = int(self._offsets[index])
        size = int(self._sizes[index])
        if not 0 <= size <= MAX_IMAGE_BYTES:
            raise UnreadableImage(
                f"It has {size:,} bytes, and must have 0 to {MAX_IMAGE_BYTES:,}",
            )

        try:
            image = read_range(self.files[shard], offset, size)
        except NoAnswer:
            raise
        except (OSError, ValueError) as error:
            raise UnreadableImage(f"The shard cannot be read ({error})") from error

        if len(image) < size:
            raise UnreadableImage(
                f"The shard ends after {len(image):,} of {size:,} bytes",
            )
        return image

    def key_of(self, index: int) -> bytes:
        """Return the names of the shard and of the member, which identify a record."""
        shard, _ = self._place_of(index)
        member = bytes(self._members[index])
        return b"%b/%b" % (self._names[shard], member)

    def list_surveyed(self) -> Sequence[int]:
        """Return the records whose names have an extension of formats of more than 8 bits."""
        suffixes = tuple(map(str.encode, SURVEYED))
        surveyed = []
        for index, name in enumerate(self._members.tolist()):
            if name.lower().endswith(suffixes):
                surveyed.append(index)
        return surveyed


def _join_column(indices: list[np.ndarray], column: str) -> np.ndarray:
    """Return a column of the indices of all shards."""
    return np.concatenate([index[column] for index in indices])


class Shards(Packed):
    """Tar shards.

    Names of classes are in a file beside them, one a line from number 0, or there are none.
    """

    kind = "wds"
    extension = ".tar"

    @functools.cached_property
    def names(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """Names of the classes in a file beside the shards; None without a file."""
        for name in CLASS_NAMES:
            path = os.path.join(self.root, name)
            if os.path.isfile(path):
                return read_class_names(path)
        return None

    def labels(self, files: Sequence[str]) -> np.ndarray:
        """Return the label of every record, int64 or text (N,).

        Raises:
          ValueError: some labels are numbers and others are names.
        """
        labels = _join_column(self._read_rows(files), "label")
        if all(map(_NUMBER.fullmatch, labels.tolist())):  # numpy would take "1_0" for a number too
            return labels.astype(np.int64)

        text = np.char.decode(labels, "utf-8")
        if self.names is None:
            self._require_one_kind(np.unique(text).tolist())
        return text

    def _require_one_kind(self, labels: Sequence[str]) -> None:
        """Raise ValueError for numbers among labels that are names."""
        numbers = list[str]()
        names = list[str]()
        for label in labels:
            if label.lstrip("-").isdecimal():
                numbers.append(label)
            else:
                names.append(label)

        if numbers:
            raise ValueError(
                f"{self.place(None)}: some labels are numbers ({few(numbers)}) and others are "
                f"names ({few(names)}). Use one kind.",
            )

    def records(
        self,
        files: Sequence[str],
        class_names: tuple[str, ...],
        labels: np.ndarray,
    ) -> ShardSource:
        return ShardSource(files, self._read_rows(files), class_names, labels, self.root)

    def _read_rows(self, files: Sequence[str]) -> list[np.ndarray]:
        """Return the rows of the index of each shard."""
        return [index.rows for index in self._find_indices(files)]

    def require(self) -> None:
        """Raise ValueError for missing shards or a wrong selection."""
        super().require()
        parse_selection(self.label)

    def _find_indices(self, files: Sequence[str]) -> list[Index]:
        """Return the index of each shard, and warn about members that are skipped."""
        selection = parse_selection(self.label)
        find = functools.partial(find_index, selection=selection)
        indices = list(map_in_threads(find, files, _THREADS))

        notes = [index.notes for index in indices]
        for line in describe_notes(notes):
            warn_once(f"{self.place(None)}: {line}")
        return indices
