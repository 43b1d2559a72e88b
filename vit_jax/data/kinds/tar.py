"""Tar archives of any origin, read forwards once: their members, and labelled images among them.

Nothing is written by a member's name. Damage ends in one error: Python's `tarfile` takes a damaged
header in the middle of an archive for its end, and reads extended headers of any size into memory;
so only its parser of a header is used.
"""

import collections
import contextlib
import gzip
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from vit_jax.data.kinds.image_files import MAX_NAME_BYTES
from vit_jax.data.records import MAX_CLASSES
from vit_jax.storage.files import measure_size, open_regular, parse_json
from vit_jax.text.printable import printable, shorten

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
LABEL_EXTENSIONS = ("cls", "json")
MAX_LABEL_BYTES = 2**20
STANDARD_INPUT = "-"

_BLOCK = 512
_CHUNK = 2**20
_MAX_HEADER_BYTES = 2**20
"""Size of a long name or of extended attributes."""
_MOST_AFTER_END = 2**20
"""Bytes behind the end: tar fills its last record, of 10 KiB by default, with zeros."""
_MOST_KEYS = 100_000
"""Number of incomplete samples that are remembered."""
_MOST_PENDING_BYTES = 2**28
"""Size of the images of a sample that wait for a label."""
_GZIP = b"\x1f\x8b"
_MOST_RATIO = 100
"""Ratio of compression; images hardly become smaller, and gzip reaches 1,032."""
_FREE_BYTES = 2**28
_EXTENDED_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Kinds of headers with the long name or extended attributes of the next member."""
_PAX = re.compile(rb"(\d{1,7}) ([^=]{1,1000})=")
_JSON_LABELS = ("class_id", "wnid", "synset", "class", "label")
_IMAGE_STARTS = ((b"\xff\xd8\xff", ("jpg", "jpeg")), (b"\x89PNG", ("png",)), (b"RIFF", ("webp",)))

T = TypeVar("T")


class TarError(ValueError):
    """An archive is damaged, cut off, or larger than its compressed size allows."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Stream:
    """A file that is read forwards, with exact reads.

    Attributes:
      name: name of the file, for messages.
      place: number of bytes that were read or skipped.
    """

    def __init__(
        self,
        file: _Readable,
        name: str,
        size: int | None = None,
        compressed: "_Counter | None" = None,
    ):
        """Take the size if it is known, and the compressed file that `file` is read from."""
        self.name = name
        self.place = 0
        self._file = file
        self._size = size
        self._compressed = compressed

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored file that were read."""
        if self._compressed is None:
            return self.place
        return self._compressed.count

    def read(self, size: int) -> bytes:
        """Return exactly this number of bytes.

        Raises:
          TarError: the file ends before, is damaged, or is a decompression bomb.
        """
        content = self.read_rest(size)
        if len(content) < size:
            raise self._cut_off()
        return content

    def read_rest(self, most: int) -> bytes:
        """Return the rest, at most `most` bytes."""
        if self._size is not None:
            most = min(most, self._size - self.place)

        content = b""
        block = b"\0"
        while len(content) < most and block:
            try:
                block = self._file.read(most - len(content))
            except (EOFError, OSError, zlib.error) as error:
                raise TarError(
                    f"{self.name}: cannot be read after byte {self.place:,} ({error}).",
                ) from error
            content = content + block if content else block
            self.place += len(block)
            self._require_plausible_size()
        return content

    def _require_plausible_size(self) -> None:
        """Raise TarError for more bytes than images can give when they are decompressed."""
        if self._compressed is None:
            return
        compressed_bytes = self._compressed.count
        if self.place > compressed_bytes * _MOST_RATIO + _FREE_BYTES:
            raise TarError(
                f"{self.name}: {compressed_bytes:,} compressed bytes give more than "
                f"{self.place:,}, which images never do. Check its origin.",
            )

    def skip(self, size: int) -> None:
        """Skip this number of bytes; raises as `read`."""
        if self._size is None:
            for _ in range(size // _CHUNK):
                self.read(_CHUNK)
            self.read(size % _CHUNK)
        elif self.place + size > self._size:
            raise self._cut_off()
        else:
            if isinstance(self._file, Stream):
                self._file.skip(size)
            else:
                self._file.seek(size, os.SEEK_CUR)  # type: ignore[attr-defined]  # a regular file
            self.place += size

    def part(self, size: int, name: str) -> "Stream":
        """Return the next bytes as a stream, which reads from this one."""
        return Stream(self, name, size)

    def _cut_off(self) -> TarError:
        return TarError(
            f"{self.name}: ends at byte {self.place:,} inside a member, "
            "without the end of an archive.",
        )


class _Counter:
    """Counts the compressed bytes that gzip reads."""

    def __init__(self, file: _Readable) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        self.count += len(content)
        return content


@contextlib.contextmanager
def open_tar(path: str) -> Iterator[Stream]:
    """Yield a tar file, plain or compressed by gzip, as a stream; "-" is the standard input.

    Raises:
      ValueError: it is no regular file; a pipe is read as "-".
      OSError: an error of the system.
    """
    if path == STANDARD_INPUT:
        yield _build_stream(sys.stdin.buffer, "standard input", None)
        return
    with open_regular(path) as file:
        yield _build_stream(file, path, measure_size(file))


def _build_stream(file: Any, name: str, size: int | None) -> Stream:
    """Return a buffered file as a stream, decompressed if it is compressed by gzip."""
    if file.peek(2)[:2] != _GZIP:
        return Stream(file, name, size)
    counter = _Counter(file)
    content = gzip.GzipFile(fileobj=counter, mode="rb")  # type: ignore[call-overload]
    return Stream(content, name, compressed=counter)


class Member(NamedTuple):
    """One member of an archive that is no folder.

    Attributes:
      name: its path, with "/" between folders; bytes that are not UTF-8 are escaped.
      offset: first byte of its content in the archive without compression.
      size: number of bytes of its content.
      problem: the reason why it must not be read; "" for a regular file with a path below the
        folder of the archive.
    """

    name: str
    offset: int
    size: int
    problem: str


def members(stream: Stream) -> Iterator[Member]:
    """Yield the members of an archive in their order, without folders.

    The stream is at the content of a member when it is yielded: `stream.read(member.size)` returns
    it, and the rest of it is skipped.

    Raises:
      TarError: the archive is damaged or cut off, has a header of more than 1 MiB, or other data
        behind its end.
    """
    extended: dict[str, bytes] = {}
    while (header := _read_header(stream)) is not None:
        if header.type in _EXTENDED_HEADERS:
            extended |= _read_extended_header(stream, header)
            continue

        if not header.isdir():
            offset = stream.place
            member = _describe_member(header, extended, offset)
            yield member
            end = offset + member.size + -member.size % _BLOCK
            stream.skip(end - stream.place)
        extended = {}

    if any(stream.read_rest(_MOST_AFTER_END)):  # another archive would be lost in silence
        raise TarError(
            f"{stream.name}: has other data behind its end, before byte {stream.place:,}. "
            "Give joined archives one by one.",
        )


def _read_extended_header(stream: Stream, header: tarfile.TarInfo) -> dict[str, bytes]:
    """Return the attributes that a header states for the next member."""
    at = stream.place - _BLOCK
    content = stream.read(header.size)
    stream.skip(-header.size % _BLOCK)
    if header.type == tarfile.GNUTYPE_LONGLINK:
        return {}
    if header.type == tarfile.GNUTYPE_LONGNAME:
        path, _, _ = content.partition(b"\0")
        return {"path": path}

    attributes = _parse_attributes(content)
    if attributes is None:
        raise TarError(f"{stream.name}: the extended header at byte {at:,} is damaged.")
    size = attributes.get("size", b"0")
    if not size.isdigit() or len(size) > 18:
        raise TarError(
            f"{stream.name}: the extended header at byte {at:,} states a size that is no number.",
        )
    if header.type == tarfile.XGLTYPE:
        return {}
    return attributes


def _describe_member(
    header: tarfile.TarInfo,
    extended: Mapping[str, bytes],
    offset: int,
) -> Member:
    """Return a member by its header and the attributes of the extended headers before it."""
    name = header.name
    if "path" in extended:
        name = extended["path"].decode("utf-8", "backslashreplace")

    size = 0
    if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES:
        size = int(extended.get("size", header.size))

    problem = _find_problem(name, header)
    if any(key.startswith("GNU.sparse") for key in extended):
        problem = "is a sparse file"
    return Member(shorten(name, MAX_NAME_BYTES), offset, size, problem)


def _read_header(stream: Stream) -> tarfile.TarInfo | None:
    """Return the header of a member, or an extended one; None at the end of the archive."""
    at = stream.place
    if at:
        block = stream.read(_BLOCK)
    else:
        block = stream.read_rest(_BLOCK)

    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")  # type: ignore[arg-type]
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros
        return None
    except tarfile.HeaderError as error:
        problem = f"the header at byte {at:,} is damaged" if at else "is no tar archive"
        raise TarError(f"{stream.name}: {problem} ({error}).") from error

    problem = ""
    if header.size < 0:
        problem = "states a negative size"
    if header.type in _EXTENDED_HEADERS and header.size > _MAX_HEADER_BYTES:
        problem = f"has {header.size:,} bytes, more than 1 MiB"
    elif header.type == tarfile.GNUTYPE_SPARSE:  # more headers follow
        problem = "is of a sparse file: pack it without --sparse"
    if problem:
        raise TarError(f"{stream.name}: the header at byte {at:,} {problem}.")
    return header


def _parse_attributes(content: bytes) -> dict[str, bytes] | None:
    """Return the attributes of a pax header, lines of "LENGTH NAME=VALUE"; None if damaged."""
    attributes = dict[str, bytes]()
    place = 0
    while place < len(content):
        match = _PAX.match(content, place)
        if match is None:
            return None
        end = place + int(match[1])
        if not match.end() < end <= len(content):
            return None

        name = match[2].decode("utf-8", "backslashreplace")
        attributes[name] = content[match.end() : end - 1]
        place = end
    return attributes


def _find_problem(name: str, header: tarfile.TarInfo) -> str:
    if header.issym() or header.islnk():
        return "is a link"
    if not header.isreg():
        return "is a device, a pipe or of an unknown kind"
    if len(name) > MAX_NAME_BYTES:
        return f"has a name of {len(name):,} characters"
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name.split("/"):
        return "has '..' in its path"
    if not name or "\0" in name:
        return "has no proper name"
    return ""


# Labelled images. The members of a WebDataset sample are neighbours with names that are equal up to
# the first dot of the last part.


class Sample(NamedTuple, Generic[T]):
    """One image and the files with its labels.

    Attributes:
      name: name of the image.
      image: its content, or any value in place of it.
      labels: by extension, "cls" and "json"; empty for an image that has its class by its folder or
        archive.
      skipped: names and contents of the sample's other images.
    """

    name: str
    image: T
    labels: Mapping[str, T]
    skipped: Sequence[tuple[str, T]] = ()


def extension(name: str) -> str:
    """Return the last extension in lower case, without the dot; "" for a hidden file."""
    return os.path.splitext(name)[1][1:].lower()


def sample_key(name: str) -> str:
    """Return the part of a name that the files of one sample share."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def get_suffix(name: str) -> str:
    """Return the part of a name behind the first dot of its last part, in lower case."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def rank_image(name: str) -> tuple[int, int, str]:
    """Return the rank of an image in its sample; the lowest is the image of the sample.

    Suffixes of one extension come first, as in `IMAGE_EXTENSIONS`: `.jpg` before `.png` before
    `.seg.jpg`.
    """
    suffix = get_suffix(name)
    kind = extension(name)
    place = len(IMAGE_EXTENSIONS)
    if kind in IMAGE_EXTENSIONS:
        place = IMAGE_EXTENSIONS.index(kind)
    return suffix.count("."), place, suffix


class SampleOrder:
    """A check that members of a sample are neighbours, among `_MOST_KEYS` incomplete samples."""

    def __init__(self, archive: str) -> None:
        """Take the name of the archive for messages."""
        self._archive = archive
        self._key: str | None = None
        self._kinds = set[str]()
        self._incomplete: dict[str, collections.OrderedDict[str, None]] = {
            "image": collections.OrderedDict(),
            "label": collections.OrderedDict(),
        }

    def see(self, name: str) -> None:
        """Take the next image or label; other members come between those of a sample."""
        key = sample_key(name)
        if key != self._key:
            self.end()
            self._key = key
            self._kinds = set()
        self._kinds.add("label" if extension(name) in LABEL_EXTENSIONS else "image")

    def end(self) -> None:
        """Take the end of the archive, or of a sample.

        Raises:
          TarError: the sample's image or label came earlier.
        """
        if self._key is None or len(self._kinds) > 1:
            return
        (kind,) = self._kinds
        other = "label" if kind == "image" else "image"
        if self._key in self._incomplete[other]:
            raise TarError(
                f"{self._archive}: image and label of {printable(self._key)!r} are apart. Pack the "
                "members of each sample one after the other (tar --sort=name), or train on the "
                "archive by wds:.",
            )
        keys = self._incomplete[kind]
        keys[self._key] = None
        if len(keys) > _MOST_KEYS:
            keys.popitem(last=False)


def samples(
    entries: Iterable[tuple[str, T]],
    size_of: Callable[[T], int] = lambda _: 0,
) -> Iterator[Sample[T]]:
    """Yield the images of an archive with their labels.

    Names and contents come in the order of the archive. Other files are skipped. The files of a
    sample follow each other, in any order. Of several images in a sample with labels the first by
    `rank_image` is yielded, and the others are in its `skipped`; without labels, each is yielded.

    Args:
      entries: names and contents of the archive.
      size_of: returns the bytes of a content. Images without a label are yielded when they have
        `_MOST_PENDING_BYTES`.

    Raises:
      TarError: a label follows images of its sample that were yielded before.
    """
    current: str | None = None
    images = list[tuple[str, T]]()
    labels = dict[str, T]()
    pending_bytes = 0
    is_begun = False
    for name, content in entries:
        key = sample_key(name)
        kind = extension(name)
        if key != current:
            yield from _complete_sample(images, labels)
            current = key
            images = []
            labels = {}
            pending_bytes = 0
            is_begun = False
        if kind in IMAGE_EXTENSIONS:
            images.append((name, content))
            pending_bytes += size_of(content)
        elif kind in LABEL_EXTENSIONS:
            if is_begun:
                raise TarError(
                    f"{printable(name)}: follows too many images of its sample. "
                    "Pack the label before them.",
                )
            labels.setdefault(kind, content)
        if pending_bytes > _MOST_PENDING_BYTES and not labels:
            yield from _complete_sample(images, labels)
            images = []
            pending_bytes = 0
            is_begun = True
    yield from _complete_sample(images, labels)


def _complete_sample(images: list[tuple[str, T]], labels: dict[str, T]) -> Iterator[Sample[T]]:
    """Yield the image of a sample with labels, or all images of a sample without."""
    if not labels:
        for name, content in images:
            yield Sample(name, content, {})
        return
    if not images:
        return

    chosen, content = min(images, key=lambda image: rank_image(image[0]))
    others = [image for image in images if image[0] != chosen]
    yield Sample(chosen, content, labels, others)


def label_of(labels: Mapping[str, bytes], keys: Sequence[str] = _JSON_LABELS) -> int | str:
    """Return the class that the files of a sample state: a number, or a name.

    A ".cls" file holds it as text. Without one it is the value of the first of these keys in a
    ".json" file.

    Raises:
      ValueError: they state none.
    """
    if "cls" in labels:
        value: object = labels["cls"].decode("utf-8", "backslashreplace").strip()
    else:
        value = _find_first(parse_json(labels["json"]), keys)

    if isinstance(value, str) and value.isdecimal() and value.isascii():
        value = int(value[: len(str(MAX_CLASSES)) + 1])
    if isinstance(value, str) and value and len(value) <= MAX_NAME_BYTES:
        return value
    if type(value) is int and 0 <= value < MAX_CLASSES:
        return value
    raise ValueError(f"states no class: {shorten(repr(value), 80)}")


def _find_first(stated: object, keys: Sequence[str]) -> object:
    """Return the value of the first of these keys in a JSON object; None without any."""
    if not isinstance(stated, dict):
        return None
    for key in keys:
        if key in stated:
            return stated[key]
    return None


def is_mislabelled(name: str, image: bytes) -> bool:
    """Return True for an image with the extension of another format."""
    kind = extension(name)
    return not any(image.startswith(start) and kind in kinds for start, kinds in _IMAGE_STARTS)
