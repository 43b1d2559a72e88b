"""WebDataset tar shards ("wds:PATH"): each shard is indexed once by `tar`, and images are read by their offsets."""

import collections
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.buckets import NoAnswer
from vit_jax.data.depth import SURVEYED
from vit_jax.data.image_files import MAX_IMAGE_BYTES
from vit_jax.data.images import UnreadableImage
from vit_jax.data.listing import warn_once
from vit_jax.data.packed import Packed, PackedSource, read_class_names
from vit_jax.data.records import few
from vit_jax.data.tar import (
    IMAGE_EXTENSIONS,
    LABEL_EXTENSIONS,
    MAX_LABEL_BYTES,
    Sample,
    Stream,
    TarError,
    extension,
    label_of,
    members,
    samples,
)
from vit_jax.data.workers import in_threads
from vit_jax.files import (
    WriteError,
    cache_folder,
    make_folder,
    open_regular,
    parse_json,
    printable,
    read_bounded,
    read_range,
    size_of,
    write_atomically,
)

CLASS_NAMES = ("classes.txt", "classnames.txt")  # the second is of OpenCLIP's datasets
_FORM = 1  # of index files; another number never reads them
_MOST_INDEX_BYTES = 2**30
_THREADS = 8  # that index shards, mostly waiting for a disk or a network


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
        super().__init__(files, [*map(len, indices)], class_names, labels, root)
        self._members, self._offsets, self._sizes = (
            np.concatenate([index[column] for index in indices]) for column in ("name", "offset", "size")
        )

    def image_of(self, index: int) -> bytes:
        (shard, _), offset, size = self._place_of(index), int(self._offsets[index]), int(self._sizes[index])
        if not 0 <= size <= MAX_IMAGE_BYTES:
            raise UnreadableImage(f"It has {size:,} bytes, and must have 0 to {MAX_IMAGE_BYTES:,}")
        try:
            image = read_range(self.files[shard], offset, size)
        except NoAnswer:
            raise
        except (OSError, ValueError) as error:
            raise UnreadableImage(f"The shard cannot be read ({error})") from error
        if len(image) < size:
            raise UnreadableImage(f"The shard ends after {len(image):,} of {size:,} bytes")
        return image

    def key_of(self, index: int) -> bytes:
        return b"%b/%b" % (self._names[self._place_of(index)[0]], bytes(self._members[index]))

    def surveyed(self) -> Sequence[int]:
        suffixes = tuple(map(str.encode, SURVEYED))
        return [index for index, name in enumerate(self._members.tolist()) if name.lower().endswith(suffixes)]


class Shards(Packed):
    """Tar shards. Names of classes are in a file beside them, one a line from number 0, or there are none."""

    kind, extension = "wds", ".tar"

    @functools.cached_property
    def names(self) -> tuple[str, ...] | None:  # type: ignore[override]
        paths = (os.path.join(self.root, name) for name in CLASS_NAMES)
        return next((read_class_names(path) for path in paths if os.path.isfile(path)), None)

    def labels(self, files: Sequence[str]) -> np.ndarray:
        labels = np.concatenate([index["label"] for index in self._indices(files)])
        try:
            return labels.astype(np.int64)
        except ValueError:
            pass
        text = np.char.decode(labels, "utf-8")
        names = np.unique(text).tolist() if self.names is None else []
        if numbers := [name for name in names if name.lstrip("-").isdecimal()]:
            others = few([name for name in names if name not in numbers])
            raise ValueError(
                f"{self.place(None)}: some labels are numbers ({few(numbers)}) and others are names ({others}). Use "
                "one kind."
            )
        return text

    def records(self, files: Sequence[str], class_names: tuple[str, ...], labels: np.ndarray) -> ShardSource:
        return ShardSource(files, self._indices(files), class_names, labels, self.root)

    def _indices(self, files: Sequence[str]) -> list[np.ndarray]:
        return list(in_threads(functools.partial(_index_of, label=self.label), files, _THREADS))


def _index_of(file: str, label: str) -> np.ndarray:
    """Return the index of a shard, stored beside it or, if that cannot be written, in the user's cache folder."""
    try:
        status = os.stat(file)
        return _valid_index(os.path.realpath(file), label, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"{file}: the shard cannot be read ({error.strerror}).") from error


@functools.lru_cache(4096)  # the shards of a dataset are opened for each of its splits
def _valid_index(file: str, label: str, size: int, mtime: int) -> np.ndarray:
    about = {"form": _FORM, "size": size, "mtime_ns": mtime, "label": label}
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    places = [Path(f"{file}.index"), cache_folder("shards") / f"{digest}.index"]
    for place in places:
        if (index := _load(place, about)) is not None:
            return index
    index = read_index(file, label)
    head = json.dumps({"about": about, "letters": [index.dtype["name"].itemsize, index.dtype["label"].itemsize]})
    for place in places:
        try:
            with make_folder(place.parent):
                write_atomically(place, head.encode() + b"\n" + index.tobytes())
            return index
        except WriteError as error:
            problem = error
    warn_once(f"Indices of shards are not kept, and are made again for each run: {problem}")
    return index


def _load(place: Path, about: dict[str, Any]) -> np.ndarray | None:
    """Return the index in a file; None if it is of another state of the shard, or damaged."""
    try:
        head, _, content = read_bounded(place, _MOST_INDEX_BYTES).partition(b"\n")
        stated = parse_json(head)
        return np.frombuffer(content, _dtype(*stated["letters"])) if stated["about"] == about else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _dtype(name: int, label: int) -> np.dtype:
    """Return the columns of an index: for each image the name of its member, offset, size, and label."""
    return np.dtype([("name", f"S{name:d}"), ("offset", "<i8"), ("size", "<i8"), ("label", f"S{label:d}")])


def read_index(file: str, key: str = "") -> np.ndarray:
    """Read the headers of a shard, and the labels.

    Args:
      file: an uncompressed tar.
      key: of `.json`, whose value is the label; "": as `tar.label_of`.

    Returns:
      An array with a row for each image, of `_dtype`.

    Raises:
      OSError: the system refuses.
      ValueError: it is damaged or cut off; an image has no label, is no plain member, or has the name of another.
    """
    with open_regular(file) as opened:
        images = list(samples(_entries(Stream(opened, file, size_of(opened)))))
    names, kinds = [sample.name for sample in images], ("json",) if key else LABEL_EXTENSIONS
    bare = [sample.name for sample in images if sample.labels.keys().isdisjoint(kinds)]
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    problem = f"it has no images, named {' '.join(f'.{kind}' for kind in IMAGE_EXTENSIONS)}" if not images else ""
    if bare:
        problem = f"{len(bare):,} images have no label ({' or '.join(f'.{kind}' for kind in kinds)}): {few(bare)}"
    elif repeated:
        problem = f"{len(repeated):,} images have the name of another: {few(repeated)}"
    labels = list[bytes]()
    try:
        labels += (_label_of(sample, key) for sample in images if not problem)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{file}: {problem.rstrip('.')}. Repair the shard, or leave it out.")
    encoded = [name.encode() for name in names]
    index = np.empty(len(images), _dtype(max(map(len, encoded)), max(map(len, labels))))
    index["name"], index["label"] = encoded, labels
    index["offset"], index["size"] = [one.image.offset for one in images], [one.image.size for one in images]
    return index


class _Entry(NamedTuple):
    """A member of a sample; with its content if it is a label."""

    offset: int
    size: int
    content: bytes = b""


def _entries(stream: Stream) -> Iterator[tuple[str, _Entry]]:
    for member in members(stream):
        kind = extension(member.name)
        if kind not in (*IMAGE_EXTENSIONS, *LABEL_EXTENSIONS):
            continue
        if member.problem or (kind in LABEL_EXTENSIONS and member.size > MAX_LABEL_BYTES):
            problem = member.problem or f"has {member.size:,} bytes"
            raise TarError(f"{stream.name}: member {printable(member.name)!r} {problem}. Repair the shard.")
        content = stream.read(member.size) if kind in LABEL_EXTENSIONS else b""
        yield member.name, _Entry(member.offset, member.size, content)


def _label_of(sample: Sample[_Entry], key: str) -> bytes:
    contents = {kind: entry.content for kind, entry in sample.labels.items() if not key or kind == "json"}
    try:
        return str(label_of(contents, (key,)) if key else label_of(contents)).encode()
    except ValueError as error:
        hint = f" under the key {key!r}" if key else "; name the key of .json: wds:PATH#KEY"
        raise ValueError(f"the label of {sample.name!r} {error}{hint}") from error
