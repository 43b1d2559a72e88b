"""Labelled images of tar archives, checked by threads and stored in the order of the archives.

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
    Sample,
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
from vit_jax.tools.prepare.prepared import QUALITY, reduce_image
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

_MOST_LETTERS = 255  # letters of a class name
_MOST_WITHOUT_IMAGE = 100_000  # notes in memory, which are kept until the next image
_MEMORY_BYTES = 2**29  # files and pixels of the images that threads check
_OVERHEAD_BYTES = 2**13  # bytes of an item that waits for its turn
_COMMIT_BYTES = 2**28  # seconds of work, which an interrupted command repeats
_READ_EXTENSIONS = (*IMAGE_EXTENSIONS, *LABEL_EXTENSIONS)

Class = str | int


class LabelledImage(NamedTuple):
    """An image of an archive.

    Attributes:
      source: its path in the archives.
      label: its class.
      folder: parent of the folder or the archive of the class; None if a file states the class.
      image: the content of the file.
    """

    source: str
    label: Class
    folder: str | None
    image: bytes


class Note(NamedTuple):
    """A line of the list of skipped and unusual members."""

    source: str
    kind: str
    detail: str


class Position(NamedTuple):
    """A position from which reading can continue: all members and archives before it are done.

    Attributes:
      archive: number of the archive, from 0.
      member: number of the member, from 0.
      num_bytes: number of bytes of the archive that were read.
    """

    archive: int
    member: int
    num_bytes: int = 0


Item = LabelledImage | Note | Position


class _Content(NamedTuple):
    member: int
    content: Any  # bytes, or the `Stream` of an archive


def read_images(
    archives: Sequence[str],
    position: Position,
    is_wanted: Callable[[Class], bool],
) -> Iterator[Item]:
    """Yield images and notes in the order of the archives, and positions to continue from.

    Args:
      archives: paths of tar files; with several, their names are a part of each source.
      position: from an earlier call, or (0, 0).
      is_wanted: returns True for classes whose images are read; may raise.

    Raises:
      TarError: an archive is damaged or truncated. A damaged archive inside another is listed.
    """
    for number, path in enumerate(archives[position.archive :], position.archive):
        first = position.member if number == position.archive else 0
        prefix = f"{os.path.basename(path)}/" if len(archives) > 1 else ""
        with open_tar(path) as stream:
            for item in _Archive(stream, prefix, is_wanted).read(first):
                if isinstance(item, int):
                    yield Position(number, item, stream.num_bytes)
                else:
                    yield item
            yield Position(number + 1, 0)


class _Archive:
    """Reads one archive; `outer` is its name if it is inside another one."""

    def __init__(
        self,
        stream: Stream,
        prefix: str,
        is_wanted: Callable[[Class], bool],
        outer: str | None = None,
    ) -> None:
        self._stream = stream
        self._prefix = prefix  # prefix of sources
        self._is_wanted = is_wanted
        self._outer = outer
        # Notes with the numbers of their members, some of which are read before their turn.
        self._notes = collections.deque[tuple[int, Note]]()

    def read(self, first: int) -> Iterator[LabelledImage | Note | int]:
        """Yield images and notes from member number `first` on, and members to continue from."""
        last_key = None
        entries = self._read_entries(first)
        for is_tar, group in itertools.groupby(entries, lambda entry: _is_tar(entry[0])):
            if is_tar:
                for name, (member, part) in group:
                    yield from self._pop_notes(member)
                    yield member
                    yield from self._read_class(part, name)
                continue
            for sample in samples(group, size_of=lambda entry: len(entry.content)):
                contents = [sample.image, *sample.labels.values()]
                contents += [content for _, content in sample.skipped]
                member = min(content.member for content in contents)
                yield from self._pop_notes(member)
                key = sample_key(sample.name)
                if key != last_key:
                    yield member
                last_key = key
                yield from self._read_sample(sample)
        for _, note in self._notes:
            yield note

    def _read_sample(self, sample: Sample[_Content]) -> Iterator[LabelledImage | Note]:
        """Yield the image of a sample, or the reason why it is skipped, after its other members."""
        source = self._prefix + sample.name
        for name, _ in sample.skipped:
            detail = f"is in the sample of {sample.name}, which is read"
            yield Note(self._prefix + name, OTHER, detail)
        labels = {name: content.content for name, content in sample.labels.items()}
        try:
            label, folder = _find_class(sample.name, labels, self._outer)
        except ValueError as error:
            yield Note(source, UNLABELLED, str(error))
            return
        if self._is_wanted(label):
            yield LabelledImage(source, label, folder, sample.image.content)
        else:
            yield Note(source, UNLABELLED, f"the class {label} is not wanted")

    def _read_class(
        self,
        part: Stream,
        name: str,
    ) -> Iterator[LabelledImage | Note]:
        """Read an archive inside this one; its name is the class of images without a label."""
        source = self._prefix + name
        label = os.path.basename(name)[: -len(".tar")]
        if self._outer is not None:
            yield Note(source, OTHER, "is an archive in an archive of a class")
            return
        if not self._is_wanted(label):
            yield Note(source, UNLABELLED, f"the class {label} is not wanted")
            return
        try:
            for item in _Archive(part, f"{source}/", self._is_wanted, name).read(0):
                if not isinstance(item, int):
                    yield item
        except TarError as error:
            # If this archive is damaged too, its next member raises an error.
            yield Note(source, DAMAGED, str(error))

    def _read_entries(self, first: int) -> Iterator[tuple[str, _Content]]:
        """Yield names and contents of images, labels and archives; keep notes of other members."""
        stream = self._stream
        order = SampleOrder(stream.name)
        for number, member in enumerate(members(stream)):
            is_read = extension(member.name) in _READ_EXTENSIONS
            if is_read and not member.problem:
                order.see(member.name)
            if number < first:
                continue
            if member.problem:
                self._keep_note(number, member.name, UNSAFE, member.problem)
            elif _is_tar(member.name):
                part = stream.part(member.size, f"{stream.name}/{member.name}")
                yield member.name, _Content(number, part)
            elif not is_read:
                self._keep_note(number, member.name, OTHER, "is no image, label or archive")
            elif member.size > _limit_size(member.name):
                self._keep_note(number, member.name, UNSAFE, f"has {member.size:,} bytes")
            else:
                yield member.name, _Content(number, stream.read(member.size))
        order.end()

    def _keep_note(
        self,
        member: int,
        name: str,
        kind: str,
        detail: str,
    ) -> None:
        """Keep a note of a member until all members before it have been yielded."""
        self._notes.append((member, Note(self._prefix + name, kind, detail)))
        if len(self._notes) > _MOST_WITHOUT_IMAGE:
            raise TarError(
                f"{self._stream.name}: {len(self._notes):,} members one after the other "
                "are no images. Remove them."
            )

    def _pop_notes(self, member: int) -> Iterator[Note]:
        """Yield the notes of members before this one."""
        while self._notes and self._notes[0][0] < member:
            yield self._notes.popleft()[1]


def _limit_size(name: str) -> int:
    """Return the largest size of a member with this name, in bytes."""
    return MAX_MEMBER_BYTES if extension(name) in IMAGE_EXTENSIONS else MAX_LABEL_BYTES


def _find_class(
    name: str,
    labels: dict[str, bytes],
    outer: str | None,
) -> tuple[Class, str | None]:
    """Return the class of an image, and the parent of the folder or the archive of the class.

    Raises:
      ValueError: the image has no class, or its class cannot be a name.
    """
    folder = None
    label = label_of(labels) if labels else None
    if label is None:
        class_path = os.path.dirname(name) if outer is None else outer.removesuffix(".tar")
        folder, label = os.path.split(class_path)
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
      number_names: names of the classes whose numbers files state; empty: as `classes`.
      skips_others: skip images of other classes than `classes`, which are an error otherwise.
      min_side: pixels; an image with a shorter side is skipped.
      min_class_images: a class with fewer images is skipped.
      holdout_per_class: number of images of each class in the split "validation", at most half of
        the class.
      short_side: pixels to which `prepared.reduce_image` reduces longer short sides; None: no
        change.
      quality: JPEG quality of reduced images.
      shards: number of files of each split; None: one for each `tar_dataset.SHARD_BYTES` of the
        archives, and `tar_dataset.SHARDS_OF_STREAM` for the standard input.
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


class _CheckResult(NamedTuple):
    """The result of the check of an image.

    Attributes:
      image: the file to store; None for a skipped image.
      sha256: digest of the file.
      note: a line to list; None without any.
    """

    image: bytes | None
    sha256: bytes
    note: Note | None


def _check(labelled: LabelledImage, options: Options) -> _CheckResult:
    """Decode an image, and reduce it if the options say so."""
    source = labelled.source
    image = labelled.image
    try:
        height, width, _ = decode(image).shape
    except UnreadableImage as error:
        return _CheckResult(None, b"", Note(source, UNREADABLE, str(error)))
    if min(height, width) < options.min_side:
        return _CheckResult(None, b"", Note(source, TINY, f"{width} x {height} pixels"))

    note = None
    if is_mislabelled(source, image):
        detail = f"begins with {image[:4].hex(' ')}; it is in the dataset"
        note = Note(source, MISLABELLED, detail)
    if options.short_side is not None:
        image = reduce_image(image, options.short_side, options.quality) or image
    return _CheckResult(image, hashlib.sha256(image).digest(), note)


class _Pending(NamedTuple):
    """An item that waits for its turn, and the check of an image."""

    item: Item
    num_bytes: int
    check: concurrent.futures.Future[_CheckResult] | None

    @property
    def is_done(self) -> bool:
        return self.check is None or self.check.done()

    def wait(self) -> tuple[Item, _CheckResult | None]:
        """Return the item with its result, when it is checked."""
        return self.item, None if self.check is None else self.check.result()


def _check_items(
    items: Iterable[Item],
    options: Options,
) -> Generator[tuple[Item, _CheckResult | None]]:
    """Yield items in their order, images with the result of their check.

    Threads check images ahead, within `_MEMORY_BYTES`.
    """
    queue = collections.deque[_Pending]()
    queued_bytes = 0
    pool = concurrent.futures.ThreadPoolExecutor(count_cores())
    try:
        for item in items:
            num_bytes = _OVERHEAD_BYTES
            if isinstance(item, LabelledImage):
                num_bytes += len(item.image) + 4 * count_stated_pixels(item.image)
            while queue and (queued_bytes + num_bytes > _MEMORY_BYTES or queue[0].is_done):
                oldest = queue.popleft()
                queued_bytes -= oldest.num_bytes
                yield oldest.wait()
            check = None
            if isinstance(item, LabelledImage):
                check = pool.submit(_check, item, options)
            queue.append(_Pending(item, num_bytes, check))
            queued_bytes += num_bytes
        for pending in queue:
            yield pending.wait()
    finally:
        pool.shutdown(cancel_futures=True)


class Reading:
    """Stores and lists the images of archives in a scatter, which is committed from time to time."""

    def __init__(
        self,
        scatter: Scatter,
        options: Options,
        show: Callable[[int, Position], None],
    ) -> None:
        """Take `show`, called with the number of stored images at each position in the archives."""
        self._scatter = scatter
        self._options = options
        self._show = show
        state = scatter.state
        self._labels = dict[Class, int]()
        for number, (label, _) in enumerate(state["classes"]):
            self._labels[label] = number
        self._counts = collections.Counter[str](state["counts"])
        self._wanted = set(options.classes)
        self._uncommitted_bytes = 0
        self._position = Position(*state["place"])

    def run(self, archives: Sequence[str]) -> None:
        """Read the rest of the archives; raises as `tar_dataset.prepare_tars`."""
        images = read_images(archives, self._position, self._is_wanted)
        with contextlib.closing(_check_items(images, self._options)) as items:
            for item, result in items:
                if isinstance(item, Position):
                    self._continue_from(item)
                elif isinstance(item, Note):
                    self._note(item)
                else:
                    assert result is not None  # every image is checked
                    self._store(item, result)
        self._commit()

    def _continue_from(self, position: Position) -> None:
        """Set the position of the next commit, and commit if enough images were stored."""
        self._position = position
        if self._uncommitted_bytes >= _COMMIT_BYTES:
            self._commit()
        self._show(self._scatter.num_rows, position)

    def _store(self, labelled: LabelledImage, result: _CheckResult) -> None:
        """Store an image unless it is skipped, and list the note of its check."""
        if result.image is not None:
            number = self._number_class(labelled)
            self._scatter.add(labelled.source, number, result.image, result.sha256)
            self._uncommitted_bytes += len(result.image)
        if result.note is not None:
            self._note(result.note)

    def _note(self, note: Note) -> None:
        write_note(self._scatter, note)
        self._counts[note.kind] += 1

    def _commit(self) -> None:
        self._scatter.state["place"] = [self._position.archive, self._position.member]
        self._scatter.state["counts"] = self._counts
        self._scatter.commit()
        self._uncommitted_bytes = 0

    def _find_name(self, label: Class) -> Class:
        """Return the name of a class that files state by number; the number if it has no name."""
        names = self._options.number_names or self._options.classes
        if isinstance(label, int) and label < len(names):
            return names[label]
        return label

    def _is_wanted(self, label: Class) -> bool:
        """Return True for a class of the list of classes, and for every class without a list.

        Raises:
          ValueError: it is another class, and others are not skipped.
        """
        if not self._wanted or self._find_name(label) in self._wanted:
            return True
        if self._options.skips_others:
            return False
        raise ValueError(
            f"class {label}: is not among the {len(self._wanted):,} of --classes=. "
            "Complete the list, or give --other_classes=skip; "
            f"remove {self._scatter.folder} before."
        )

    def _number_class(self, labelled: LabelledImage) -> int:
        """Return the number of a class, in the order of the first image of each class.

        Raises:
          ValueError: too many classes, names mixed with numbers, or a class in several folders.
        """
        classes = self._scatter.state["classes"]
        label = self._find_name(labelled.label)
        folder = labelled.folder
        number = self._labels.setdefault(label, len(classes))
        if number == MAX_ARCHIVE_CLASSES:
            raise ValueError(
                f"{labelled.source}: is of a {number + 1:,}th class. "
                "Give archives that state classes."
            )
        if number == len(classes):
            classes.append([label, folder])
            if isinstance(label, int) != isinstance(classes[0][0], int):
                raise ValueError(
                    f"{labelled.source}: states class {label!r}, "
                    "but others are names or numbers. Use one."
                )
            return number
        first_folder = classes[number][1]
        if folder is not None and folder != first_folder:
            raise ValueError(
                f"{labelled.source}: class {label} is in the folders {first_folder!r} "
                f"and {folder!r}, as if they were splits. "
                "Pack each split as an archive and prepare it under another name."
            )
        return number


def write_note(scatter: Scatter, note: Note) -> None:
    """Write a line of the list of skipped and unusual members."""
    scatter.note(to_csv([note]))
