"""Labelled images of tar archives: with an archive for each class, a folder for each class, or WebDataset samples."""

import collections
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.data.tar import (
    IMAGE_EXTENSIONS,
    LABEL_EXTENSIONS,
    MAX_LABEL_BYTES,
    Stream,
    TarError,
    extension,
    label_of,
    members,
    open_tar,
    sample_key,
    samples,
)
from vit_jax.files import printable, shortened

MAX_MEMBER_BYTES = 2**27
_MOST_LETTERS = 255  # of a class
_MOST_WITHOUT_IMAGE = 100_000  # members that are listed are kept until the next image
UNSAFE, OTHER, UNLABELLED, DAMAGED = "unsafe", "other", "no class", "damaged archive"

Class = str | int


class Found(NamedTuple):
    """An image of an archive.

    Attributes:
      source: its path in the archives.
      label: its class.
      folder: that holds the folder or the archive of the class; None if a file states the class.
      image: the file.
    """

    source: str
    label: Class
    folder: str | None
    image: bytes


class Noted(NamedTuple):
    """A line of the list of skipped and odd members."""

    source: str
    kind: str
    detail: str


class Place(NamedTuple):
    """A place to continue at: all members and archives before it are done.

    Attributes:
      archive: its number, from 0.
      member: the number of the member, from 0.
      num_bytes: bytes of the stored archive that were read.
    """

    archive: int
    member: int
    num_bytes: int = 0


Item = Found | Noted | Place


class _Content(NamedTuple):
    member: int
    content: Any  # bytes, or the stream of an archive


def read_images(archives: Sequence[str], place: Place, is_wanted: Callable[[Class], bool]) -> Iterator[Item]:
    """Yield the images of archives in their order, members to list, and places to continue at.

    Args:
      archives: paths of tar files; with several, their names are a part of each source.
      place: from a former call, or (0, 0).
      is_wanted: returns True for classes whose images are read; may raise.

    Raises:
      TarError: an archive is damaged or cut off; of an archive inside another it is listed instead.
    """
    for number, path in enumerate(archives[place.archive :], place.archive):
        first = place.member if number == place.archive else 0
        prefix = f"{os.path.basename(path)}/" if len(archives) > 1 else ""
        with open_tar(path) as stream:
            for item in _read(stream, prefix, first, is_wanted):
                yield Place(number, item, stream.num_bytes) if isinstance(item, int) else item
            yield Place(number + 1, 0)


def _read(
    stream: Stream, prefix: str, first: int, is_wanted: Callable[[Class], bool], outer: str | None = None
) -> Iterator[Found | Noted | int]:
    """Read one archive from a member on; `outer` is the name of the archive when it is inside another."""
    noted = collections.deque[tuple[int, Noted]]()  # with members; some are read before their turn
    last_key = None
    for is_tar, group in itertools.groupby(_entries(stream, prefix, first, noted), lambda entry: _is_tar(entry[0])):
        if is_tar:
            for name, (member, content) in group:
                yield from _before(member, noted)
                yield member
                yield from _read_class(content, name, prefix, is_wanted, outer)
            continue
        for sample in samples(group):
            contents = (sample.image, *sample.labels.values())
            member = min(content.member for content in contents)
            yield from _before(member, noted)
            if (key := sample_key(sample.name)) != last_key:
                yield member
            last_key, source = key, prefix + sample.name
            try:
                label, folder = _class_of(sample.name, {k: v.content for k, v in sample.labels.items()}, outer)
            except ValueError as error:
                yield Noted(source, UNLABELLED, str(error))
                continue
            if is_wanted(label):
                yield Found(source, label, folder, sample.image.content)
            else:
                yield Noted(source, UNLABELLED, f"the class {label} is not wanted")
    yield from (note for _, note in noted)


def _read_class(
    part: Stream, name: str, prefix: str, is_wanted: Callable[[Class], bool], outer: str | None
) -> Iterator[Found | Noted]:
    """Read an archive inside an archive; images have its name as class unless files state theirs."""
    source, label = prefix + name, os.path.basename(name)[: -len(".tar")]
    if outer is not None:
        yield Noted(source, OTHER, "is an archive in an archive of a class")
    elif not is_wanted(label):
        yield Noted(source, UNLABELLED, f"the class {label} is not wanted")
    else:
        try:
            for item in _read(part, f"{source}/", 0, is_wanted, name):
                if not isinstance(item, int):
                    yield item
        except TarError as error:  # where the archive around it is damaged too, its next member is not found
            yield Noted(source, DAMAGED, str(error))


def _entries(
    stream: Stream, prefix: str, first: int, noted: collections.deque[tuple[int, Noted]]
) -> Iterator[tuple[str, _Content]]:
    """Yield names and contents of images, labels and archives; notes the other members."""
    for number, member in enumerate(members(stream)):
        if number < first:
            continue
        kind, problem = extension(member.name), (OTHER, "is no image, label or archive")
        if member.problem:
            problem = UNSAFE, member.problem
        elif _is_tar(member.name):
            part = stream.part(member.size, f"{stream.name}/{member.name}")
            yield member.name, _Content(number, part)
            continue
        elif kind in (*IMAGE_EXTENSIONS, *LABEL_EXTENSIONS):
            if member.size <= (MAX_MEMBER_BYTES if kind in IMAGE_EXTENSIONS else MAX_LABEL_BYTES):
                yield member.name, _Content(number, stream.read(member.size))
                continue
            problem = UNSAFE, f"has {member.size:,} bytes"
        noted.append((number, Noted(prefix + member.name, *problem)))
        if len(noted) > _MOST_WITHOUT_IMAGE:
            raise TarError(f"{stream.name}: {len(noted):,} members one after the other are no images. Remove them.")


def _before(member: int, noted: collections.deque[tuple[int, Noted]]) -> Iterator[Noted]:
    while noted and noted[0][0] < member:
        yield noted.popleft()[1]


def _class_of(name: str, labels: dict[str, bytes], outer: str | None) -> tuple[Class, str | None]:
    """Return the class of an image, and the folder that holds the folder or the archive of the class."""
    folder, label = None, label_of(labels) if labels else None
    if label is None:
        folder, label = os.path.split(os.path.dirname(name) if outer is None else outer.removesuffix(".tar"))
    if isinstance(label, int):
        return label, folder
    label = label.strip()
    if label in ("", "."):
        raise ValueError("it has no .cls or .json file and is in no folder or archive of a class")
    if len(label) > _MOST_LETTERS or printable(label) != label:  # TFDS keeps one name a line
        raise ValueError(f"{shortened(printable(label), 80)} is no name of a class")
    return label, folder


def _is_tar(name: str) -> bool:
    return extension(name) == "tar"
