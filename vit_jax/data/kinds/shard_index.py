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
from typing import NamedTuple

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
    get_suffix,
    label_of,
    members,
    rank_image,
    sample_key,
)
from vit_jax.data.records import few, read_file_state
from vit_jax.storage.files import (
    JsonObject,
    WriteError,
    cache_folder,
    is_mirrored,
    make_folder,
    measure_size,
    open_regular,
    parse_json,
    read_bounded,
    write_atomically,
)
from vit_jax.text.printable import printable

_FORM = 2
"""Number of the form of index files; files of another form are made again."""
_MOST_INDEX_BYTES = 2**30
_BLOCK = 512
_NUM_CHECKED = 8
"""Number of samples of a shard whose bytes are compared."""
_MOST_CHECKED_BYTES = 4096
"""Number of bytes of a member and its header that are compared."""
_SHA256_LETTERS = 64
_MOST_NOTED = 10
"""Number of names or suffixes in a note."""


class Selection(NamedTuple):
    """The members of a sample that are its label and its image, from "PATH#KEY#.SUFFIX".

    Attributes:
      key: the key of `.json` whose value is the label; "": chosen by `tar.label_of`.
      suffixes: suffixes of images, without the first dot; the first that a sample has is read. ():
        chosen by `tar.rank_image`.
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

    wrong_suffixes = list[str]()
    for suffix in suffixes:
        if extension(f"x.{suffix}") in ("", *LABEL_EXTENSIONS):
            wrong_suffixes.append(f".{suffix}")
    if wrong_suffixes:
        raise ValueError(
            f"#{text}: {few(wrong_suffixes)} is no suffix of images. "
            "Write one such as wds:PATH#.seg.png.",
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
      rows: a row of `_build_row_type` for each image.
      notes: facts that users are told.
    """

    rows: np.ndarray
    notes: Notes


def find_index(file: str, selection: Selection) -> Index:
    """Return the index of a shard, stored beside it or else in the user's cache folder.

    Raises:
      ValueError: see `read_index`; or the shard cannot be read.
    """
    try:
        return _find_cached_index(os.path.realpath(file), read_file_state(file), selection)
    except OSError as error:
        raise ValueError(f"{file}: the shard cannot be read ({error.strerror}).") from error


@functools.lru_cache(4096)  # the shards of a dataset are opened for each of its splits
def _find_cached_index(file: str, state: tuple[int, ...], selection: Selection) -> Index:
    about = {
        "form": _FORM,
        "state": [*state],
        "key": selection.key,
        "suffixes": [*selection.suffixes],
    }
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    places = [Path(f"{file}.index"), cache_folder("shards") / f"{digest}.index"]
    for place in places:
        index = _load_index(place, file, about)
        if index is not None:
            return index

    index, checks = read_index(file, selection)
    if read_file_state(file) != state:
        raise ValueError(f"{file}: the shard changed while it was read. Wait until it is complete.")
    _store_index(places, _serialize(index, about, checks))
    return index


def _store_index(places: Sequence[Path], content: bytes) -> None:
    """Write the file of an index to the first place that can be written."""
    for place in places:
        try:
            with make_folder(place.parent):
                write_atomically(place, content)
            return
        except WriteError as error:
            problem = error
    warn_once(f"Indices of shards are not kept, and are made again for each run: {problem}")


# A file of an index has the SHA-256 of the rest, a line of JSON, and the rows.


class Checks(NamedTuple):
    """Bytes of a shard that must not change.

    Attributes:
      ranges: offset and size of each range.
      sha256: the SHA-256 of all ranges.
    """

    ranges: list[tuple[int, int]]
    sha256: str


def _serialize(index: Index, about: JsonObject, checks: Checks) -> bytes:
    head = {
        "about": about,
        "num_rows": len(index.rows),
        "letters": [index.rows.dtype["name"].itemsize, index.rows.dtype["label"].itemsize],
        "checks": checks._asdict(),
        "notes": index.notes._asdict(),
    }
    content = json.dumps(head).encode() + b"\n" + index.rows.tobytes()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _load_index(place: Path, file: str, about: JsonObject) -> Index | None:
    """Return the index in a file; None if it is of another state of the shard, or damaged."""
    try:
        digest, _, content = read_bounded(place, _MOST_INDEX_BYTES).partition(b"\n")
    except (OSError, ValueError):
        return None
    if len(digest) != _SHA256_LETTERS:
        return None  # an earlier form
    if hashlib.sha256(content).hexdigest().encode() != digest:
        name = printable(str(place))
        logging.getLogger(__name__).warning(
            "%s does not have the recorded SHA-256 and is made again.",
            name,
        )
        return None
    try:
        return _parse_index(content, file, about)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _parse_index(content: bytes, file: str, about: JsonObject) -> Index | None:
    head, _, stored = content.partition(b"\n")
    stated = parse_json(head)
    if stated["about"] != about:
        return None
    rows = np.frombuffer(stored, _build_row_type(*stated["letters"]))
    if len(rows) != stated["num_rows"] or not _are_inside(rows, os.stat(file).st_size):
        return None

    checks = Checks(**stated["checks"])
    with open_regular(file) as opened:
        if _digest_ranges(opened, checks.ranges) != checks.sha256:
            return None
    return Index(rows, _parse_notes(stated["notes"]))


def _parse_notes(stated: JsonObject) -> Notes:
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


def _build_row_type(name_bytes: int, label_bytes: int) -> np.dtype:
    """Return the columns of an index: the name of the member, its offset and size, the label."""
    return np.dtype(
        [
            ("name", f"S{name_bytes:d}"),
            ("offset", "<i8"),
            ("size", "<i8"),
            ("label", f"S{label_bytes:d}"),
        ],
    )


# Reading shards.


class _Member(NamedTuple):
    """An image or a label of a sample.

    Attributes:
      name: its name in the shard.
      suffix: its name from the first dot on, in lower case.
      offset: first byte of its content.
      size: number of bytes of its content.
      value: the value of a label, as text.
      problem: the reason why a label has no value.
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

    images: list[_Member] = dataclasses.field(default_factory=list)
    labels: list[_Member] = dataclasses.field(default_factory=list)


class _Sample(NamedTuple):
    """The image and the label that are read of a group."""

    image: _Member
    label: _Member


def read_index(file: str, selection: Selection) -> tuple[Index, Checks]:
    """Read the headers of a shard, and the labels.

    Members of a sample may be apart; memory holds a few hundred bytes for each member.

    Args:
      file: an uncompressed tar.
      selection: the labels and images to read.

    Returns:
      The index, and the bytes of the shard to compare before the index is used again.

    Raises:
      OSError: an error of the system.
      ValueError: it is damaged or cut off; an image has no label, is no plain member, or has the
        name of another.
    """
    with open_regular(file) as opened:
        groups = _group_members(Stream(opened, file, measure_size(opened)), selection)
        try:
            samples, notes = _choose_members(groups.values(), selection)
        except ValueError as error:
            problem = str(error).rstrip(".")
            raise ValueError(f"{file}: {problem}. Repair the shard, or leave it out.") from error
        ranges = list[tuple[int, int]]()
        if not is_mirrored(file):
            ranges = _choose_checked_ranges(samples)
        checks = Checks(ranges, _digest_ranges(opened, ranges))
    return Index(_build_rows(samples), notes), checks


def _build_rows(samples: Sequence[_Sample]) -> np.ndarray:
    rows = list[tuple[bytes, int, int, bytes]]()
    name_bytes = 0
    label_bytes = 0
    for image, label in samples:
        name = image.name.encode()
        value = label.value.encode()
        name_bytes = max(name_bytes, len(name))
        label_bytes = max(label_bytes, len(value))
        rows.append((name, image.offset, image.size, value))
    return np.array(rows, _build_row_type(name_bytes, label_bytes))


def _choose_checked_ranges(samples: Sequence[_Sample]) -> list[tuple[int, int]]:
    """Return the headers of a few images, and the headers and contents of their labels."""
    numbers = np.linspace(0, len(samples) - 1, _NUM_CHECKED).astype(int)
    ranges = list[tuple[int, int]]()
    for number in np.unique(numbers).tolist():
        image, label = samples[number]
        label_bytes = min(_BLOCK + label.size, _MOST_CHECKED_BYTES)
        ranges.append((image.offset - _BLOCK, _BLOCK))
        ranges.append((label.offset - _BLOCK, label_bytes))
    return ranges


def _group_members(stream: Stream, selection: Selection) -> dict[str, _Group]:
    """Return the images and labels of a shard by their key, in the order of the first members."""
    groups = dict[str, _Group]()
    for member in members(stream):
        kind = extension(member.name)
        suffix = get_suffix(member.name)
        is_label = kind in LABEL_EXTENSIONS
        if not is_label and kind not in IMAGE_EXTENSIONS and suffix not in selection.suffixes:
            continue
        is_hidden = member.name.rpartition("/")[2].startswith(".")
        if is_hidden:  # macOS adds a "._NAME" for each NAME
            continue

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
            group.images.append(_Member(member.name, suffix, member.offset, member.size))
    return groups


def _read_label(stream: Stream, member: Member, kind: str, selection: Selection) -> _Member:
    """Return a label with its value, without the rest of a JSON text, which may be large."""
    part = _Member(member.name, get_suffix(member.name), member.offset, member.size)
    content = {kind: stream.read(member.size)}
    try:
        if selection.key:
            value = label_of(content, (selection.key,))
        else:
            value = label_of(content)
    except ValueError as error:
        return part._replace(problem=str(error))
    return part._replace(value=str(value))


def _choose_members(
    groups: Collection[_Group], selection: Selection
) -> tuple[list[_Sample], Notes]:
    """Return the image and the label of each sample.

    Raises:
      ValueError: there are no images; an image has no label, or several; two images have one name;
        a suffix is read in one sample and skipped in another.
    """
    kinds: tuple[str, ...] = LABEL_EXTENSIONS
    if selection.key:
        kinds = ("json",)
    _require_different_names(groups)

    samples = list[_Sample]()
    images_without_label = list[str]()
    labels_without_image = list[str]()
    read = dict[str, str]()
    skipped = dict[str, str]()
    num_several = 0
    for group in groups:
        labels = [label for label in group.labels if extension(label.name) in kinds]
        image, others = _choose_image(group.images, selection.suffixes)
        if image is None:
            if labels:
                labels_without_image.append(labels[0].name)
            continue
        if not labels:
            images_without_label.append(image.name)
            continue
        label = _choose_label(labels, kinds, image, selection.key)
        samples.append(_Sample(image, label))
        read.setdefault(image.suffix, image.name)
        for other in others:
            skipped.setdefault(other.suffix, other.name)
        num_several += bool(others)

    _require_labels(samples, images_without_label, kinds, selection)
    if not selection.suffixes:
        _require_one_order(read, skipped)
    if not num_several:
        read = {}
    notes = Notes(
        num_several=num_several,
        read=_list_suffixes(read),
        skipped=_list_suffixes(skipped),
        num_without=len(labels_without_image),
        without=tuple(labels_without_image[:_MOST_NOTED]),
    )
    return samples, notes


def _list_suffixes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first of these suffixes, with a dot."""
    suffixes = map(".{}".format, names)
    return tuple(itertools.islice(suffixes, _MOST_NOTED))


def _choose_image(
    images: Sequence[_Member],
    suffixes: Sequence[str],
) -> tuple[_Member | None, list[_Member]]:
    """Return the image of a sample to read, and the others."""
    if suffixes:
        wanted = [image for image in images if image.suffix in suffixes]
        wanted.sort(key=lambda image: suffixes.index(image.suffix))
    else:
        wanted = sorted(images, key=lambda image: rank_image(image.name))
    if not wanted:
        return None, []
    return wanted[0], [image for image in images if image is not wanted[0]]


def _choose_label(
    labels: Sequence[_Member],
    kinds: Sequence[str],
    image: _Member,
    key: str,
) -> _Member:
    """Return the label of a sample: of the first kind, `.cls` rather than `.x.cls`."""

    def order(label: _Member) -> tuple[int, bool]:
        kind = extension(label.name)
        return kinds.index(kind), label.suffix != kind

    first = min(map(order, labels))
    candidates = [label for label in labels if order(label) == first]
    if len(candidates) > 1:
        names = few([label.name for label in candidates])
        raise ValueError(
            f"{image.name!r} has several labels: {names}; names are equal up to the first dot",
        )
    (label,) = candidates
    if label.problem:
        hint = "; name the key of .json: wds:PATH#KEY"
        if key:
            hint = f" under the key {key!r}"
        raise ValueError(f"the label of {image.name!r} {label.problem}{hint}")
    return label


def _require_labels(
    samples: Sequence[_Sample],
    images_without_label: Sequence[str],
    kinds: Sequence[str],
    selection: Selection,
) -> None:
    """Raise ValueError for a shard with images that have no label, or without images."""
    if images_without_label:
        extensions = " or ".join(map(".{}".format, kinds))
        raise ValueError(
            f"{len(images_without_label):,} images have no label ({extensions}): "
            f"{few(images_without_label)}",
        )
    if not samples:
        suffixes = selection.suffixes or IMAGE_EXTENSIONS
        raise ValueError(f"it has no images, named {' '.join(map('.{}'.format, suffixes))}")


def _require_different_names(groups: Collection[_Group]) -> None:
    names = collections.Counter[str]()
    for group in groups:
        names.update(image.name for image in group.images)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ValueError(f"{len(repeated):,} images have the name of another: {few(repeated)}")


def _require_one_order(read: dict[str, str], skipped: dict[str, str]) -> None:
    """Raise ValueError for a suffix that is read in one sample and skipped in another.

    The image that is read may be a mask. Both dictionaries have the name of a member by suffix.
    """
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
    num_several = 0
    num_without = 0
    read = set[str]()
    skipped = set[str]()
    without = list[str]()
    for shard in notes:
        num_several += shard.num_several
        num_without += shard.num_without
        read.update(shard.read)
        skipped.update(shard.skipped)
        without += shard.without

    lines = list[str]()
    if num_several:
        other_suffixes = sorted(skipped)
        lines.append(
            f"{num_several:,} samples have several images: the first of {few(sorted(read))} is "
            f"read, and {few(other_suffixes)} are skipped. "
            f"To read others: wds:PATH#{other_suffixes[0]}.",
        )
    if num_without:
        shown = few(without[:_MOST_NOTED])
        lines.append(f"{num_without:,} labels have no image and are skipped: {shown}.")
    return lines
