"""Records in the order of a seeded hash of their names, with one pass over them and little memory.

Each record goes to one of several bucket files by its key, the hash. A journal keeps its key, label
and size. The sorted buckets, one after the other, are all records in the order of their keys. This
order depends on the seed and the names alone, not on the order in which records are added. Memory
holds 16 bytes for each record at the end, and no images.
"""

import fcntl
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from vit_jax.storage.files import (
    JsonObject,
    open_regular,
    read_bounded,
    read_json,
    write_atomically,
)

PROGRESS = "progress.json"
NOTES = "listed.csv"
_JOURNAL = "journal"
_LOCK = "lock"
_ROW = np.dtype([("key", "<u8"), ("label", "<u4"), ("size", "<u4")])
_HEADER = struct.Struct("<II32s")  # bytes of the name and of the image, SHA-256 of the image


class Stored(NamedTuple):
    """One record of a bucket."""

    name: str
    sha256: bytes
    image: bytes


class Scatter:
    """Buckets, journal and notes in one folder, to which records are appended.

    Opening a folder removes bytes that no commit has confirmed.

    Attributes:
      folder: folder of all files.
      num_buckets: number of bucket files.
      num_rows: number of added records.
      is_begun: True if the folder has a commit.
      state: JSON values of the caller, written by `commit` and read again on opening.
    """

    def __init__(
        self,
        folder: Path,
        num_buckets: int,
        seed: int,
        state: JsonObject,
    ) -> None:
        """Open an existing folder, and continue at its last commit.

        `state` is the state of a folder without a commit.

        Raises:
          ValueError: another process has it open, or its files are shorter than at the last commit.
        """
        self.folder = folder
        self.num_buckets = num_buckets
        self.state = state
        self._seed = b"%d/" % seed
        self._lock = open(folder / _LOCK, "wb")  # noqa: SIM115 - open as long as this object
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            committed = {_JOURNAL: 0, NOTES: 0}
            self.is_begun = (folder / PROGRESS).exists()
            if self.is_begun:
                progress = read_json(folder / PROGRESS)
                self.state = progress["state"]
                committed = progress["bytes"]
            for name, size in committed.items():
                self._shorten(folder / name, size)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"{folder}: another process is writing it. Wait for its end."
            ) from None
        except ValueError:
            self._lock.close()
            raise
        self._files = {name: open(folder / name, "ab") for name in committed}  # noqa: SIM115
        self.num_rows = committed[_JOURNAL] // _ROW.itemsize

    def shorten_buckets(self) -> None:
        """Remove bytes from the buckets that no commit has confirmed."""
        rows = self.rows()
        buckets = self.choose_buckets(rows["key"])
        sizes = np.bincount(buckets, rows["size"], self.num_buckets).astype(np.int64)
        for bucket, size in enumerate(sizes.tolist()):
            self._shorten(self.bucket(bucket), size)

    def _shorten(self, path: Path, size: int) -> None:
        """Truncate a file to its size at the last commit."""
        current = path.stat().st_size if path.exists() else 0
        if current < size:
            raise ValueError(
                f"{path}: has {current:,} bytes instead of {size:,}. "
                f"Remove {self.folder} and begin again."
            )
        if current > size:
            os.truncate(path, size)

    def close(self) -> None:
        """Close all files, without a commit."""
        for file in (*self._files.values(), self._lock):
            file.close()

    def bucket(self, number: int) -> Path:
        """Return the file of a bucket, which exists once it has a record."""
        return self.folder / f"bucket-{number:05d}"

    def choose_buckets(self, key: np.ndarray) -> np.ndarray:
        """Return the buckets of keys, uint64 (N,); larger keys have larger buckets."""
        return (key >> np.uint64(32)) * np.uint64(self.num_buckets) >> np.uint64(32)

    def add(
        self,
        name: str,
        label: int,
        image: bytes,
        sha256: bytes,
    ) -> None:
        """Append a record."""
        encoded = name.encode()
        digest = hashlib.blake2b(self._seed + encoded, digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        bucket = (key >> 32) * self.num_buckets >> 32

        header = _HEADER.pack(len(encoded), len(image), sha256)
        record = header + encoded + image
        with open(self.bucket(bucket), "ab", buffering=0) as file:
            file.write(record)

        row = struct.pack("<QII", key, label, len(record))
        self._files[_JOURNAL].write(row)
        self.num_rows += 1

    def note(self, line: str) -> None:
        """Append a line to the notes."""
        self._files[NOTES].write(line.encode())

    def commit(self) -> None:
        """Confirm all records and notes, and write the state."""
        for file in self._files.values():
            file.flush()
        committed = {name: file.tell() for name, file in self._files.items()}
        progress = json.dumps({"state": self.state, "bytes": committed})
        write_atomically(self.folder / PROGRESS, progress)

    def rows(self) -> np.ndarray:
        """Return key, label and size of records as they were added, a structured array (N,)."""
        self._files[_JOURNAL].flush()
        journal = read_bounded(self.folder / _JOURNAL, self.num_rows * _ROW.itemsize)
        return np.frombuffer(journal, _ROW)

    def open_bucket(self, number: int) -> BinaryIO:
        """Open a bucket for `read`; its file must exist."""
        return open_regular(self.bucket(number))

    def read(self, bucket: BinaryIO, offset: int, size: int) -> Stored:
        """Return a record of an open bucket.

        Raises:
          ValueError: the record is damaged.
        """
        content = os.pread(bucket.fileno(), size, offset)
        if len(content) == size:
            name_size, _, sha256 = _HEADER.unpack_from(content)
            name = content[_HEADER.size :][:name_size]
            image = content[_HEADER.size + name_size :]
            if hashlib.sha256(image).digest() == sha256:
                return Stored(name.decode(), sha256, image)
        raise ValueError(
            f"{self.folder}: a bucket is damaged at byte {offset:,}. "
            "Remove the folder and begin again."
        )


def remove_files(folder: Path) -> None:
    """Remove all files of a scatter except the notes."""
    for path in (folder / PROGRESS, folder / _JOURNAL, folder / _LOCK, *folder.glob("bucket-*")):
        path.unlink(missing_ok=True)


class Order(NamedTuple):
    """All records in the order of their keys.

    Attributes:
      label: uint32 (N,).
      offset: uint64 (N,), position in the bucket.
      size: uint32 (N,), bytes in the bucket.
      is_first: bool (N,), False for a repeated key.
      bounds: (num_buckets + 1,), number of the first record of each bucket.
    """

    label: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    is_first: np.ndarray
    bounds: np.ndarray


def sort_records(scatter: Scatter) -> Order:
    """Sort the records by key; among equal keys the record that was added first is first."""
    rows = scatter.rows()
    bucket = scatter.choose_buckets(rows["key"])
    offset = _find_offsets(bucket, rows["size"], scatter.num_buckets)

    order = np.argsort(rows["key"], kind="stable")
    key = rows["key"][order]
    bounds = np.searchsorted(bucket[order], np.arange(scatter.num_buckets + 1))
    is_first = np.ones(len(key), bool)
    is_first[1:] = key[1:] != key[:-1]
    return Order(
        rows["label"][order],
        offset[order],
        rows["size"][order],
        is_first,
        bounds,
    )


def _find_offsets(
    bucket: np.ndarray,
    size: np.ndarray,
    num_buckets: int,
) -> np.ndarray:
    """Return the position of each record in its bucket, uint64 (N,).

    Arguments are the bucket and the size of each record, in the order in which they were added.
    """
    order = np.argsort(bucket, kind="stable")
    sorted_bucket = bucket[order]
    sorted_size = size[order].astype(np.uint64)
    begin = np.cumsum(sorted_size) - sorted_size  # the buckets count as one file
    first_of_bucket = np.searchsorted(sorted_bucket, np.arange(num_buckets))
    begin_or_end = np.append(begin, 0).astype(np.uint64)  # empty buckets may be the last ones
    begin_of_bucket = begin_or_end[first_of_bucket]
    begin_of_its_bucket = begin_of_bucket[sorted_bucket.astype(np.int64)]
    offset = np.empty(len(size), np.uint64)
    offset[order] = begin - begin_of_its_bucket
    return offset
