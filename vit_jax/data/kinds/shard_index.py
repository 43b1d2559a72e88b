"""Indices of tar shards: the images of each shard with their places and labels.

An index is a file beside its shard, or in the user's cache folder. It is used while its digest is
right, the shard has the size and times of the index (in a bucket: the generation), and a sample of
members has the recorded bytes.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.kinds.listing import warn_once
from vit_jax.data.kinds.tar import (
    IMAGE_EXTENSIONS,
    LABEL_EXTENSIONS,
    MAX_LABEL_BYTES,
    Member,
    Stream,
    TarError,
    extension,
    image_order,
    label_of,
    members,
    sample_key,
    suffix_of,
)
from vit_jax.data.records import few, read_file_state
from vit_jax.storage.files import (
    WriteError,
    cache_folder,
    is_mirrored,
    make_folder,
    open_regular,
    parse_json,
    read_bounded,
    size_of,
    write_atomically,
)
from vit_jax.text.printable import printable

_FORM = 2  # of index files; files of another form are made again
_MOST_INDEX_BYTES = 2**30
_BLOCK = 512
_NUM_CHECKED = 8  # samples of a shard whose bytes are compared
_MOST_CHECKED_BYTES = 4096  # of one member and its header
_SHA256_LETTERS = 64


class Selection(NamedTuple):
    """The members of a sample that are its label and its image, from "PATH#KEY#.SUFFIX".

    Attributes:
      key: of `.json`, whose value is the label; "": as `tar.label_of`.
      suffixes: of images, without the first dot; the first that a sample has is read. (): as
        `tar.image_order`.
    """

    key: str = ""
    suffixes: tuple[str, ...] = ()


def parse_selection(text: str) -> Selection:
    """Return the parts of "KEY#.SUFFIX#.SUFFIX", all of them optional.

    Raises:
      ValueError: there are two keys, or a suffix is of a label.
    """
    keys = list[str]()
    suffixes = list[str]()
    for part in filter(None, text.split("#")):
        if part.startswith("."):
            suffixes.append(part[1:].lower())
        else:
            keys.append(part)
    if len(keys) > 1:
        raise ValueError(
            f"#{text}: must have one key of .json, and has {few(keys, repr)}. "
            "Write wds:PATH#KEY#.SUFFIX.",
        )

    labels = list[str]()
    for suffix in suffixes:
        if extension(f"x.{suffix}") in ("", *LABEL_EXTENSIONS):
            labels.append(f".{suffix}")
    if labels:
        raise ValueError(
            f"#{text}: {few(labels)} is no suffix of images. Write one such as wds:PATH#.seg.png.",
        )
    return Selection("".join(keys), tuple(suffixes))


class Notes(NamedTuple):
    """Facts about a shard that users are told.

    Attributes:
      num_several: samples with several images.
      read: suffixes of the images that are read in these samples, at most ten.
      skipped: suffixes of the others, at most ten.
      num_without: samples that have a label and no image.
      without: names of their labels, at most ten.
    """

    num_several: int = 0
    read: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    num_without: int = 0
    without: tuple[str, ...] = ()


class Index(NamedTuple):
    """The images of a shard.

    Attributes:
      rows: one for each image, of `_row_type`.
      notes: facts that users are told.
    """

    rows: np.ndarray
    notes: Notes


def find_index(file: str, selection: Selection) -> Index:
    """Return the index of a shard, stored beside it or else in the user's cache folder.

    Raises:
      ValueError: as `read_index`, or the shard cannot be read.
    """
    try:
        return _find_valid(os.path.realpath(file), read_file_state(file), selection)
    except OSError as error:
        raise ValueError(f"{file}: the shard cannot be read ({error.strerror}).") from error


@functools.lru_cache(4096)  # the shards of a dataset are opened for each of its splits
def _find_valid(file: str, state: tuple[int, ...], selection: Selection) -> Index:
    about = {
        "form": _FORM,
        "state": [*state],
        "key": selection.key,
        "suffixes": [*selection.suffixes],
    }
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    places = [Path(f"{file}.index"), cache_folder("shards") / f"{digest}.index"]
    for place in places:
        index = _load(place, file, about)
        if index is not None:
            return index

    index, checks = read_index(file, selection)
    if read_file_state(file) != state:
        raise ValueError(f"{file}: the shard changed while it was read. Wait until it is complete.")
    _keep(places, _to_bytes(index, about, checks))
    return index


def _keep(places: Sequence[Path], content: bytes) -> None:
    """Write the file of an index to the first place that can be written."""
    for place in places:
        try:
            with make_folder(place.parent):
                write_atomically(place, content)
            return
        except WriteError as error:
            problem = error
    warn_once(f"Indices of shards are not kept, and are made again for each run: {problem}")


# Files of indices: the SHA-256 of the rest; a line of JSON; the rows.


class Checks(NamedTuple):
    """Bytes of a shard that must be as they were.

    Attributes:
      ranges: place and size of each.
      sha256: of all of them.
    """

    ranges: list[tuple[int, int]]
    sha256: str


def _to_bytes(index: Index, about: dict[str, Any], checks: Checks) -> bytes:
    head = {
        "about": about,
        "num_rows": len(index.rows),
        "letters": [index.rows.dtype["name"].itemsize, index.rows.dtype["label"].itemsize],
        "checks": checks._asdict(),
        "notes": index.notes._asdict(),
    }
    content = json.dumps(head).encode() + b"\n" + index.rows.tobytes()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _load(place: Path, file: str, about: dict[str, Any]) -> Index | None:
    """Return the index in a file; None if it is of another state of the shard, or damaged."""
    try:
        digest, _, content = read_bounded(place, _MOST_INDEX_BYTES).partition(b"\n")
    except (OSError, ValueError):
        return None
    if len(digest) != _SHA256_LETTERS:
        return None  # of an earlier form
    if hashlib.sha256(content).hexdigest().encode() != digest:
        name = printable(str(place))
        logging.getLogger(__name__).warning(
            "%s does not have the recorded SHA-256 and is made again.",
            name,
        )
        return None
    try:
        return _parse(content, file, about)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _parse(content: bytes, file: str, about: dict[str, Any]) -> Index | None:
    head, _, stored = content.partition(b"\n")
    stated = parse_json(head)
    if stated["about"] != about:
        return None
    rows = np.frombuffer(stored, _row_type(*stated["letters"]))
    if len(rows) != stated["num_rows"] or not _are_inside(rows, os.stat(file).st_size):
        return None

    checks = Checks(**stated["checks"])
    with open_regular(file) as opened:
        if _digest_ranges(opened, checks.ranges) != checks.sha256:
            return None
    return Index(rows, _parse_notes(stated["notes"]))


def _parse_notes(stated: dict[str, Any]) -> Notes:
    return Notes(
        num_several=stated["num_several"],
        read=tuple(stated["read"]),
        skipped=tuple(stated["skipped"]),
        num_without=stated["num_without"],
        without=tuple(stated["without"]),
    )


def _are_inside(rows: np.ndarray, num_bytes: int) -> bool:
    offsets = rows["offset"]
    sizes = rows["size"]
    ends = offsets + sizes
    is_inside = (offsets >= 0) & (sizes >= 0) & (ends <= num_bytes)
    return bool(is_inside.all())


def _digest_ranges(opened: io.BufferedReader, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for offset, size in ranges:
        opened.seek(offset)
        digest.update(opened.read(size))
    return digest.hexdigest()


def _row_type(name: int, label: int) -> np.dtype:
    """Return the columns of an index: for each image the name of its member, offset, size, and label."""
    return np.dtype(
        [("name", f"S{name:d}"), ("offset", "<i8"), ("size", "<i8"), ("label", f"S{label:d}")],
    )


# Reading shards.


class _Part(NamedTuple):
    """An image or a label of a sample.

    Attributes:
      name: of the member.
      suffix: its name from the first dot on, in lower case.
      offset: of its content.
      size: of its content.
      value: of a label, as text.
      problem: of a label without a value.
    """

    name: str
    suffix: str
    offset: int
    size: int
    value: str = ""
    problem: str = ""


@dataclasses.dataclass
class _Group:
    """The members of a shard that share a key, wherever they are in it."""

    images: list[_Part] = dataclasses.field(default_factory=list)
    labels: list[_Part] = dataclasses.field(default_factory=list)


class _Chosen(NamedTuple):
    image: _Part
    label: _Part


def read_index(file: str, selection: Selection) -> tuple[Index, Checks]:
    """Read the headers of a shard, and the labels.

    Members of a sample may be apart; memory holds a few hundred bytes for each member.

    Args:
      file: an uncompressed tar.
      selection: of labels and images.

    Returns:
      The index, and the bytes of the shard to compare before the index is used again.

    Raises:
      OSError: the system refuses.
      ValueError: it is damaged or cut off; an image has no label, is no plain member, or has the
        name of another.
    """
    with open_regular(file) as opened:
        groups = _group_members(Stream(opened, file, size_of(opened)), selection)
        try:
            chosen, notes = _choose_all(groups.values(), selection)
        except ValueError as error:
            problem = str(error).rstrip(".")
            raise ValueError(f"{file}: {problem}. Repair the shard, or leave it out.") from error
        ranges = [] if is_mirrored(file) else _ranges_of(chosen)
        checks = Checks(ranges, _digest_ranges(opened, ranges))
    return Index(_build_rows(chosen), notes), checks


def _build_rows(chosen: Sequence[_Chosen]) -> np.ndarray:
    names = [one.image.name.encode() for one in chosen]
    labels = [one.label.value.encode() for one in chosen]
    longest_name = max(map(len, names))
    longest_label = max(map(len, labels))

    rows = np.empty(len(chosen), _row_type(longest_name, longest_label))
    rows["name"] = names
    rows["offset"] = [one.image.offset for one in chosen]
    rows["size"] = [one.image.size for one in chosen]
    rows["label"] = labels
    return rows


def _ranges_of(chosen: Sequence[_Chosen]) -> list[tuple[int, int]]:
    """Return the headers of a few images, and the headers and contents of their labels."""
    numbers = np.linspace(0, len(chosen) - 1, _NUM_CHECKED).astype(int)
    ranges = list[tuple[int, int]]()
    for number in np.unique(numbers).tolist():
        image, label = chosen[number]
        label_bytes = min(_BLOCK + label.size, _MOST_CHECKED_BYTES)
        ranges.append((image.offset - _BLOCK, _BLOCK))
        ranges.append((label.offset - _BLOCK, label_bytes))
    return ranges


def _group_members(stream: Stream, selection: Selection) -> dict[str, _Group]:
    """Return the images and labels of a shard by their key, in the order in which the keys come."""
    groups = dict[str, _Group]()
    for member in members(stream):
        kind = extension(member.name)
        suffix = suffix_of(member.name)
        is_label = kind in LABEL_EXTENSIONS
        if not is_label and kind not in IMAGE_EXTENSIONS and suffix not in selection.suffixes:
            continue
        if member.name.rpartition("/")[2].startswith("."):
            continue  # hidden, as in folders: macOS adds a "._NAME" for each NAME
        problem = member.problem
        if is_label and member.size > MAX_LABEL_BYTES:
            problem = problem or f"has {member.size:,} bytes"
        if problem:
            raise TarError(
                f"{stream.name}: member {printable(member.name)!r} {problem}. Repair the shard.",
            )
        group = groups.setdefault(sample_key(member.name), _Group())
        if is_label:
            group.labels.append(_read_label(stream, member, kind, selection))
        else:
            group.images.append(_Part(member.name, suffix, member.offset, member.size))
    return groups


def _read_label(stream: Stream, member: Member, kind: str, selection: Selection) -> _Part:
    """Return a label with its value alone: a JSON text may be large."""
    part = _Part(member.name, suffix_of(member.name), member.offset, member.size)
    content = {kind: stream.read(member.size)}
    try:
        if selection.key:
            value = label_of(content, (selection.key,))
        else:
            value = label_of(content)
    except ValueError as error:
        return part._replace(problem=str(error))
    return part._replace(value=str(value))


def _choose_all(groups: Collection[_Group], selection: Selection) -> tuple[list[_Chosen], Notes]:
    """Return the image and the label of each sample.

    Raises:
      ValueError: there are no images; an image has no label, or several; two images have one name;
        a suffix is read in one sample and skipped in another.
    """
    kinds = ("json",) if selection.key else LABEL_EXTENSIONS
    chosen = list[_Chosen]()
    bare = list[str]()
    without = list[str]()
    read = dict[str, str]()
    skipped = dict[str, str]()
    num_several = 0
    _require_different_names(groups)
    for group in groups:
        labels = [label for label in group.labels if extension(label.name) in kinds]
        image, others = _choose_image(group.images, selection.suffixes)
        if image is None:
            without += [label.name for label in labels[:1]]
        elif not labels:
            bare.append(image.name)
        else:
            chosen.append(_Chosen(image, _choose_label(labels, kinds, image, selection.key)))
            read.setdefault(image.suffix, image.name)
            for other in others:
                skipped.setdefault(other.suffix, other.name)
            num_several += bool(others)

    _require_labels(chosen, bare, kinds, selection)
    if not selection.suffixes:
        _require_one_order(read, skipped)
    with_several = [f".{suffix}" for suffix in read] if num_several else []
    passed = [f".{suffix}" for suffix in skipped]
    return chosen, Notes(
        num_several,
        tuple(with_several[:10]),
        tuple(passed[:10]),
        len(without),
        tuple(without[:10]),
    )


def _choose_image(
    images: Sequence[_Part],
    suffixes: Sequence[str],
) -> tuple[_Part | None, list[_Part]]:
    """Return the image of a sample to read, and the others."""
    if suffixes:
        wanted = [image for image in images if image.suffix in suffixes]
        wanted.sort(key=lambda image: suffixes.index(image.suffix))
    else:
        wanted = sorted(images, key=lambda image: image_order(image.name))
    if not wanted:
        return None, []
    return wanted[0], [image for image in images if image is not wanted[0]]


def _choose_label(labels: Sequence[_Part], kinds: Sequence[str], image: _Part, key: str) -> _Part:
    """Return the label of a sample: of the first kind, `.cls` rather than `.x.cls`."""
    kind = next(kind for kind in kinds if any(extension(label.name) == kind for label in labels))
    of_kind = [label for label in labels if extension(label.name) == kind]
    plain = [label for label in of_kind if label.suffix == kind] or of_kind
    if len(plain) > 1:
        names = few([label.name for label in plain])
        raise ValueError(
            f"{image.name!r} has several labels: {names}; names are equal up to the first dot",
        )
    if plain[0].problem:
        hint = f" under the key {key!r}" if key else "; name the key of .json: wds:PATH#KEY"
        raise ValueError(f"the label of {image.name!r} {plain[0].problem}{hint}")
    return plain[0]


def _require_labels(
    chosen: Sequence[_Chosen],
    bare: Sequence[str],
    kinds: Sequence[str],
    selection: Selection,
) -> None:
    if bare:
        extensions = " or ".join(f".{kind}" for kind in kinds)
        raise ValueError(f"{len(bare):,} images have no label ({extensions}): {few(bare)}")
    if not chosen:
        extensions = " ".join(f".{suffix}" for suffix in selection.suffixes or IMAGE_EXTENSIONS)
        raise ValueError(f"it has no images, named {extensions}")


def _require_different_names(groups: Collection[_Group]) -> None:
    names = collections.Counter[str]()
    for group in groups:
        names.update(image.name for image in group.images)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ValueError(f"{len(repeated):,} images have the name of another: {few(repeated)}")


def _require_one_order(read: dict[str, str], skipped: dict[str, str]) -> None:
    """Reject an image that is read for want of a better one: it may be a mask."""
    both = [suffix for suffix in read if suffix in skipped]
    if both:
        suffix = both[0]
        raise ValueError(
            f"{read[suffix]!r} is the only image of its sample, but {skipped[suffix]!r} is not the "
            "first one of its sample. Name the suffixes to read, in their order: "
            f"wds:PATH#.{suffix}",
        )


def describe_notes(notes: Sequence[Notes]) -> list[str]:
    """Return sentences about the shards of a dataset."""
    lines = list[str]()
    num_several = sum(one.num_several for one in notes)
    if num_several:
        read = _join(one.read for one in notes)
        skipped = _join(one.skipped for one in notes)
        lines.append(
            f"{num_several:,} samples have several images: the first of {few(read)} is read, and "
            f"{few(skipped)} are skipped. To read others: wds:PATH#{skipped[0]}.",
        )
    num_without = sum(one.num_without for one in notes)
    if num_without:
        without = list(itertools.chain.from_iterable(one.without for one in notes))
        lines.append(f"{num_without:,} labels have no image and are skipped: {few(without[:10])}.")
    return lines


def _join(suffixes: Iterable[Sequence[str]]) -> list[str]:
    """Return the different suffixes of all shards, sorted."""
    return sorted({*itertools.chain.from_iterable(suffixes)})
