"""Labelled images of tar archives, checked by threads, stored and listed in the order of the archives.

An archive holds an archive for each class, a folder for each class, or WebDataset samples.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.data.decoding.headers import count_stated_pixels
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.kinds.tar import (
    IMAGE_EXTENSIONS,
    LABEL_EXTENSIONS,
    MAX_LABEL_BYTES,
    SampleOrder,
    Stream,
    TarError,
    extension,
    is_mislabelled,
    label_of,
    members,
    open_tar,
    sample_key,
    samples,
)
from vit_jax.data.workers import count_cores
from vit_jax.text.printable import printable, shorten
from vit_jax.text.tables import to_csv
from vit_jax.tools.prepare.prepared import QUALITY, reduced
from vit_jax.tools.prepare.scatter import Scatter

TRAIN = "train"
VALIDATION = "validation"
UNREADABLE = "unreadable"
TINY = "tiny"
MISLABELLED = "mislabelled"
UNSAFE = "unsafe"
OTHER = "other"
UNLABELLED = "no class"
DAMAGED = "damaged archive"
MAX_ARCHIVE_CLASSES = 2**17
MAX_MEMBER_BYTES = 2**27

_MOST_LETTERS = 255  # of a class
_MOST_WITHOUT_IMAGE = 100_000  # members that are listed are kept until the next image
_MEMORY_BYTES = 2**29  # of images that are checked at a time, with their pixels
_OVERHEAD_BYTES = 2**13
_COMMIT_BYTES = 2**28  # repeating the work on this much after an interruption takes seconds

Class = str | int


class LabelledImage(NamedTuple):
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


Item = LabelledImage | Noted | Place


class _Content(NamedTuple):
    member: int
    content: Any  # bytes; of an archive a `Stream`


def read_images(
    archives: Sequence[str], place: Place, is_wanted: Callable[[Class], bool]
) -> Iterator[Item]:
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
    stream: Stream,
    prefix: str,
    first: int,
    is_wanted: Callable[[Class], bool],
    outer: str | None = None,
) -> Iterator[LabelledImage | Noted | int]:
    """Read one archive from a member on; `outer` is the name of the archive when it is inside another."""
    noted = collections.deque[tuple[int, Noted]]()  # with members; some are read before their turn
    last_key = None
    for is_tar, group in itertools.groupby(
        _entries(stream, prefix, first, noted), lambda entry: _is_tar(entry[0])
    ):
        if is_tar:
            for name, (member, content) in group:
                yield from _before(member, noted)
                yield member
                yield from _read_class(content, name, prefix, is_wanted, outer)
            continue
        for sample in samples(group, size_of=lambda content: len(content.content)):
            contents = (
                sample.image,
                *sample.labels.values(),
                *(content for _, content in sample.skipped),
            )
            member = min(content.member for content in contents)
            yield from _before(member, noted)
            if (key := sample_key(sample.name)) != last_key:
                yield member
            last_key = key
            source = prefix + sample.name
            for other, _ in sample.skipped:
                yield Noted(
                    prefix + other, OTHER, f"is in the sample of {sample.name}, which is read"
                )
            try:
                label, folder = _class_of(
                    sample.name, {k: v.content for k, v in sample.labels.items()}, outer
                )
            except ValueError as error:
                yield Noted(source, UNLABELLED, str(error))
                continue
            if is_wanted(label):
                yield LabelledImage(source, label, folder, sample.image.content)
            else:
                yield Noted(source, UNLABELLED, f"the class {label} is not wanted")
    yield from (note for _, note in noted)


def _read_class(
    part: Stream, name: str, prefix: str, is_wanted: Callable[[Class], bool], outer: str | None
) -> Iterator[LabelledImage | Noted]:
    """Read an archive inside an archive; images have its name as class unless files state theirs."""
    source = prefix + name
    label = os.path.basename(name)[: -len(".tar")]
    if outer is not None:
        yield Noted(source, OTHER, "is an archive in an archive of a class")
    elif not is_wanted(label):
        yield Noted(source, UNLABELLED, f"the class {label} is not wanted")
    else:
        try:
            for item in _read(part, f"{source}/", 0, is_wanted, name):
                if not isinstance(item, int):
                    yield item
        except (
            TarError
        ) as error:  # where the archive around it is damaged too, its next member is not found
            yield Noted(source, DAMAGED, str(error))


def _entries(
    stream: Stream, prefix: str, first: int, noted: collections.deque[tuple[int, Noted]]
) -> Iterator[tuple[str, _Content]]:
    """Yield names and contents of images, labels and archives; notes the other members."""
    order = SampleOrder(stream.name)
    for number, member in enumerate(members(stream)):
        kind = extension(member.name)
        problem = (OTHER, "is no image, label or archive")
        if kind in (*IMAGE_EXTENSIONS, *LABEL_EXTENSIONS) and not member.problem:
            order.see(member.name)
        if number < first:
            continue
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
            raise TarError(
                f"{stream.name}: {len(noted):,} members one after the other are no images. Remove them."
            )
    order.end()


def _before(member: int, noted: collections.deque[tuple[int, Noted]]) -> Iterator[Noted]:
    while noted and noted[0][0] < member:
        yield noted.popleft()[1]


def _class_of(name: str, labels: dict[str, bytes], outer: str | None) -> tuple[Class, str | None]:
    """Return the class of an image, and the folder that holds the folder or the archive of the class."""
    folder = None
    label = label_of(labels) if labels else None
    if label is None:
        folder, label = os.path.split(
            os.path.dirname(name) if outer is None else outer.removesuffix(".tar")
        )
    if isinstance(label, int):
        return label, folder
    label = label.strip()
    if label in ("", "."):
        raise ValueError("it has no .cls or .json file and is in no folder or archive of a class")
    if len(label) > _MOST_LETTERS or printable(label) != label:  # TFDS keeps one name a line
        raise ValueError(f"{shorten(printable(label), 80)} is no name of a class")
    return label, folder


def _is_tar(name: str) -> bool:
    return extension(name) == "tar"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one dataset.

    Attributes:
      seed: random seed of the order of records.
      classes: names of classes by number; empty: the sorted names in the archives.
      number_names: names of the classes whose numbers files state; empty: those of `classes`.
      skips_others: skip images of other classes than `classes`, which are an error otherwise.
      min_side: pixels; an image with a shorter side is skipped.
      min_class_images: a class with fewer images is skipped.
      holdout_per_class: images of each class, at most half of it, that are the split "validation".
      short_side: pixels to which longer short sides are reduced, as `prepared.reduced` does; None:
        no change.
      quality: JPEG quality of reduced images.
      shards: files of each split; None: one for each `tar_dataset.SHARD_BYTES` of the archives, and
        `tar_dataset.SHARDS_OF_STREAM` for the standard input.
    """

    seed: int = 0
    classes: tuple[str, ...] = ()
    number_names: tuple[str, ...] = ()
    skips_others: bool = False
    min_side: int = 32
    min_class_images: int = 1
    holdout_per_class: int = 0
    short_side: int | None = None
    quality: int = QUALITY
    shards: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return (TRAIN, VALIDATION) if self.holdout_per_class else (TRAIN,)


class _Checked(NamedTuple):
    """An image after its check: the file to store, if any, and the line to list, if any."""

    image: bytes | None
    sha256: bytes
    noted: Noted | None


def _check(labelled: LabelledImage, options: Options) -> _Checked:
    source, _, _, image = labelled
    try:
        height, width, _ = decode(image).shape
    except UnreadableImage as error:
        return _Checked(None, b"", Noted(source, UNREADABLE, str(error)))
    if min(height, width) < options.min_side:
        return _Checked(None, b"", Noted(source, TINY, f"{width} x {height} pixels"))
    noted = None
    if is_mislabelled(source, image):
        noted = Noted(
            source, MISLABELLED, f"begins with {image[:4].hex(' ')}; it is in the dataset"
        )
    smaller = (
        None if options.short_side is None else reduced(image, options.short_side, options.quality)
    )
    stored = image if smaller is None else smaller
    return _Checked(stored, hashlib.sha256(stored).digest(), noted)


def _with_checks(
    items: Iterable[Item], options: Options
) -> Generator[tuple[Item, _Checked | None]]:
    """Yield items in their order, images with their check; threads check images ahead, within `_MEMORY_BYTES`."""
    waiting = collections.deque[tuple[Item, int, concurrent.futures.Future[_Checked] | None]]()
    in_flight = 0
    pool = concurrent.futures.ThreadPoolExecutor(count_cores())
    try:
        for item in items:
            weight = _OVERHEAD_BYTES
            if isinstance(item, LabelledImage):
                weight += len(item.image) + 4 * count_stated_pixels(item.image)
            while waiting and (
                in_flight + weight > _MEMORY_BYTES
                or (first := waiting[0][2]) is None
                or first.done()
            ):
                oldest, freed, check = waiting.popleft()
                in_flight -= freed
                yield oldest, check.result() if check else None
            check = pool.submit(_check, item, options) if isinstance(item, LabelledImage) else None
            waiting.append((item, weight, check))
            in_flight += weight
        for item, _, check in waiting:
            yield item, check.result() if check else None
    finally:
        pool.shutdown(cancel_futures=True)


class Reading:
    """Stores and lists the images of archives in a scatter, which is committed from time to time."""

    def __init__(
        self, scatter: Scatter, options: Options, show: Callable[[int, Place], None]
    ) -> None:
        """Take `show`, called with the number of stored images at each place in the archives."""
        self._scatter = scatter
        self._options = options
        self._show = show
        state = scatter.state
        self._labels: dict[Class, int] = {
            label: number for number, (label, _) in enumerate(state["classes"])
        }
        self._counts = collections.Counter[str](state["counts"])
        self._wanted = {*options.classes}
        self._uncommitted = 0
        self._place = Place(*state["place"])

    def run(self, archives: Sequence[str]) -> None:
        """Read the rest of the archives; raises as `tar_dataset.prepare_tars`."""
        images = read_images(archives, self._place, self._is_wanted)
        with contextlib.closing(_with_checks(images, self._options)) as items:
            for item, checked in items:
                noted = item if isinstance(item, Noted) else checked and checked.noted
                if isinstance(item, Place):
                    self._place = item
                    if self._uncommitted >= _COMMIT_BYTES:
                        self._commit()
                    self._show(self._scatter.num_rows, item)
                elif isinstance(item, LabelledImage) and checked and checked.image is not None:
                    self._scatter.add(
                        item.source, self._number_of(item), checked.image, checked.sha256
                    )
                    self._uncommitted += len(checked.image)
                if noted is not None:
                    note(self._scatter, noted)
                    self._counts[noted.kind] += 1
        self._commit()

    def _commit(self) -> None:
        self._scatter.state |= {
            "place": [self._place.archive, self._place.member],
            "counts": self._counts,
        }
        self._scatter.commit()
        self._uncommitted = 0

    def _named(self, label: Class) -> Class:
        """Return the name of a class that files state by its number, where the names of numbers are known."""
        names = self._options.number_names or self._options.classes
        return names[label] if isinstance(label, int) and label < len(names) else label

    def _is_wanted(self, label: Class) -> bool:
        """Return True for a class of the list of classes, and for every class without a list.

        Raises:
          ValueError: it is another class, and others are not skipped.
        """
        if not self._wanted or self._named(label) in self._wanted:
            return True
        if self._options.skips_others:
            return False
        raise ValueError(
            f"class {label}: is not among the {len(self._wanted):,} of --classes=. Complete the list, or give "
            f"--other_classes=skip; remove {self._scatter.folder} before."
        )

    def _number_of(self, labelled: LabelledImage) -> int:
        """Return the number of a class in the order in which they come."""
        classes = self._scatter.state["classes"]
        folder = labelled.folder
        problem = ""
        label = self._named(labelled.label)
        number = self._labels.setdefault(label, len(classes))
        if number == MAX_ARCHIVE_CLASSES:
            problem = f"is of a {number + 1:,}th class. Give archives that state classes."
        elif number == len(classes):
            classes.append([label, folder])
            if isinstance(label, int) != isinstance(classes[0][0], int):
                problem = f"states class {label!r}, but others are names or numbers. Use one."
        elif folder is not None and folder != classes[number][1]:
            problem = (
                f"class {label} is in the folders {classes[number][1]!r} and {folder!r}, as if they were splits. Pack "
                "each split as an archive and prepare it under another name."
            )
        if problem:
            raise ValueError(f"{labelled.source}: {problem}")
        return number


def note(scatter: Scatter, noted: Noted) -> None:
    """List a file."""
    scatter.note(to_csv([noted]))
