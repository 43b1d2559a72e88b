"""Find image files: by their names, in folders, and by the arguments of a command line.

Files and folders whose names start with a dot are skipped, and so are pipes, sockets and devices.
Links are followed, but no folder is walked twice and none that contains the start, so the walk ends
where links form a circle.
"""

import collections
import contextlib
import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.data.decoding import tiff
from vit_jax.data.decoding.headers import MAX_JPEG_SCANS
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import few
from vit_jax.storage.files import read_bounded, read_lines
from vit_jax.storage.gcs_client import NoAnswer
from vit_jax.text.nearest import closest

EXTENSIONS = (
    ".avif",
    ".bmp",
    ".dib",
    ".gif",
    ".jfif",
    ".jp2",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".pnm",
    ".ppm",
    ".pxm",
    ".ras",
    ".sr",
    ".tif",
    ".tiff",
    ".webp",
)
"""Names of files that are decoded; compared without regard to case."""


class Decoded(NamedTuple):
    """A format, the layouts that are decoded, and those that are rejected with a message."""

    format: str
    decoded: str
    rejected: str


DECODED = (
    Decoded(
        "JPEG",
        f"grey, colour, CMYK with Adobe's marker; progressive with up to {MAX_JPEG_SCANS} scans",
        "CMYK without the marker, 12 bits, lossless, JPEG-LS",
    ),
    Decoded("PNG", "all depths and colours; the default image of an animation", ""),
    Decoded("WebP", "lossy, lossless, animations (first image)", ""),
    Decoded("AVIF", "8, 10 and 12 bits, colour or grey; sequences (first image)", ""),
    Decoded(
        "TIFF",
        "1 to 4 bands; integers of 1 to 64 bits, floating point; grey, RGB, palette, CMYK, YCbCr; "
        "strips, tiles, separate planes, BigTIFF; compression "
        f"{', '.join(dict.fromkeys(tiff.COMPRESSIONS.values()))}",
        "5 or more bands, other compressions, signed 8 bits, complex numbers, Lab, YCbCr of more "
        "than 8 bits, volumes, missing tiles",
    ),
    Decoded(
        "JPEG 2000",
        "1 to 4 bands of 1 to 16 bits; grey, RGB, YCbCr, palette",
        "5 or more bands, signed values, CMYK, Lab",
    ),
    Decoded("GIF", "first image; transparent pixels show their colour of the palette", ""),
    Decoded("BMP", "1 to 32 bits, masks", "masks with gaps"),
    Decoded(
        "PBM, PGM, PPM, PAM",
        "text or binary, 1 to 16 bits",
        "PAM of 5 or more bands, or CMYK",
    ),
    Decoded(
        "Sun raster",
        "grey of 8 bits, colours of 24 or 32",
        "1 bit, colour maps, run lengths, RGB order",
    ),
)
"""Formats and layouts; `tests/data/test_image_matrix.py` decodes them."""
_TO_CONVERT = (
    ".heic",
    ".heif",
    ".hif",
    ".arw",
    ".cr2",
    ".cr3",
    ".dng",
    ".nef",
    ".orf",
    ".raf",
    ".raw",
    ".rw2",
)
"""Photos in formats that are not read."""

MAX_IMAGE_BYTES = 2**30
"""A larger image file is unreadable. An uncompressed 16-bit image of 170 megapixels is smaller."""
MAX_NAME_BYTES = 4096
"""Length of the longest path of Linux."""


def is_image(name: str) -> bool:
    """Return True if a file of this name is treated as an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def image_files(folder: str, others: collections.Counter[str] | None = None) -> list[str]:
    """Return the image files below an existing folder, at any depth, sorted.

    `others` counts other files by extension. A link that leads nowhere is listed, so that reading
    it names the file.

    Raises:
      ValueError: a folder cannot be read.
    """
    paths = []
    if others is None:
        others = collections.Counter()
    for _, files in walk(folder):
        for entry in files:
            if not entry.is_file(follow_symlinks=False) and is_special(entry.path):
                others["special (pipe, socket or device)"] += 1
            elif is_image(entry.name):
                paths.append(entry.path)
            else:
                others[os.path.splitext(entry.name)[1].lower() or "without extension"] += 1
    return sorted(paths)


def require_images(folder: str, others: collections.Counter[str] | None = None) -> list[str]:
    """Return the image files below a folder, at least one; arguments as for `image_files`.

    Raises:
      ValueError: a folder cannot be read, or there is no image.
    """
    skipped = collections.Counter[str]()
    paths = image_files(folder, skipped)
    if not paths:
        hint = " ".join([*describe_skipped(skipped), "Add images or remove the folder."])
        raise ValueError(
            f"Folder {folder!r} has no images (files named {' '.join(EXTENSIONS)}). {hint}",
        )
    if others is not None:
        others += skipped
    return paths


def describe_skipped(others: collections.Counter[str]) -> list[str]:
    """Return sentences about the files that `image_files` counts by extension."""
    lines = []
    rest = []
    for kind, count in sorted(others.items()):
        if kind in _TO_CONVERT:
            noun = "files are" if count > 1 else "file is"
            lines.append(f"{count:,} {kind} {noun} skipped: convert to JPEG or PNG.")
        else:
            rest.append((kind, count))
    if not rest:
        return lines

    rest.sort(key=lambda item: -item[1])
    total = sum(count for _, count in rest)
    noun = "file that is not an image is" if total == 1 else "files that are not images are"
    kinds = [f"{count:,} {kind}" for kind, count in rest]
    lines.append(f"{total:,} {noun} skipped: {few(kinds)}.")
    return lines


def walk(folder: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield an existing folder and those below it, at any depth, each once and with its files.

    Raises:
      ValueError: a folder cannot be read.
    """
    seen = set(map(_get_inode, Path(os.path.abspath(folder)).parents))
    pending = [folder]
    while pending:
        parent = pending.pop()
        with _explain_unreadable(parent):
            inode = _get_inode(parent)
        if inode not in seen:
            seen.add(inode)
            folders, files = list_folder(parent)
            yield parent, files
            pending += [entry.path for entry in reversed(folders)]


def list_folder(folder: str | Path) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the visible folders and files directly inside a folder, sorted by name.

    A link to a folder is a folder. A link that leads nowhere or to itself is a file.

    Raises:
      ValueError: the folder cannot be read.
    """
    with _explain_unreadable(folder), os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    visible.sort(key=lambda entry: entry.name)

    folders = list[os.DirEntry[str]]()
    files = list[os.DirEntry[str]]()
    for entry in visible:
        is_linked = entry.is_symlink() and os.path.isdir(entry.path)
        if is_linked or entry.is_dir(follow_symlinks=False):
            folders.append(entry)
        else:
            files.append(entry)
    return folders, files


def is_special(path: str) -> bool:
    """Return True for a path that is neither file nor folder: reading it may wait forever."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def read_file(path: str) -> bytes:
    """Return the bytes of an image file.

    Raises:
      UnreadableImage: the file was removed since it was listed, may not be read, is a pipe or a
        device, or is larger than `MAX_IMAGE_BYTES`.
      NoAnswer: the file is in a bucket that does not answer.
    """
    try:
        return read_bounded(path, MAX_IMAGE_BYTES)
    except NoAnswer:
        raise
    except OSError as error:
        raise UnreadableImage(f"The file cannot be opened ({error.strerror})") from error
    except ValueError as error:
        raise UnreadableImage(f"The file is not read: {error}") from error


def list_images(arguments: Sequence[str]) -> list[str]:
    """Return the image files that the arguments of a command line name, in their order, none twice.

    "-" stands for names on standard input, one a line of at most `MAX_NAME_BYTES`. A file may
    have any name. A folder stands for the image files below it. A pattern (`*`, `?`, `[…]`,
    `**` for folders at any depth) stands for the image files and folders that match it, sorted,
    unless a file has the name of the pattern itself.

    Raises:
      ValueError: no arguments, an argument without an image, a folder that cannot be read, or a
        line of standard input that is too long.
    """
    paths: dict[str, str] = {}
    for argument in arguments:
        named: Iterable[str] = [argument]
        if argument == "-":
            named = _read_names_on_input()
        for one in named:
            for path in _expand(one):
                folder, name = os.path.split(path)
                # Two ways to write one path have the same key.
                key = os.path.join(os.path.realpath(folder), name)
                paths.setdefault(key, path)
    if not paths:
        raise ValueError(
            "No images are named. Give files, folders or patterns such as 'photos/*.jpg', "
            "or - and names.",
        )
    return list(paths.values())


def _read_names_on_input() -> Iterator[str]:
    try:
        for line in read_lines(sys.stdin.buffer, MAX_NAME_BYTES):
            for name in line.splitlines():
                if name:
                    yield os.fsdecode(name)
    except ValueError as error:
        raise ValueError(
            f"- (names on standard input): {error}. Give one name of a file a line.",
        ) from None


def _expand(argument: str) -> list[str]:
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        return require_images(path)
    if os.path.lexists(path):
        return [path]
    if not glob.has_magic(path):
        raise ValueError(_describe_missing(argument, path))

    files = []
    matches = {match.removeprefix("./") for match in _glob_matches(path)}
    for match in sorted(matches):
        if os.path.isdir(match):
            files += image_files(match)
        else:
            files.append(match)
    files = list(filter(_is_readable_image, files))
    if not files:
        raise ValueError(_describe_missing(argument, path))
    return files


def _is_readable_image(file: str) -> bool:
    return is_image(os.path.basename(file)) and not is_special(file)


def _glob_matches(pattern: str) -> Iterator[str]:
    """Yield the matches of `glob.glob(pattern, recursive=True)`, without circles of links."""
    head, double_star, rest = f"/{pattern}/".partition("/**/")
    if not double_star:
        yield from glob.glob(pattern)
        return
    head = head[1:] or pattern[: pattern.startswith("/")]
    rest = rest.removesuffix("/")
    starts = [os.curdir]
    if head:
        starts = glob.glob(head)
    for start in starts:
        if rest and os.path.isdir(start):
            for folder, _ in walk(start):
                yield from _glob_matches(os.path.join(glob.escape(folder), rest))
        else:
            yield start


def _describe_missing(argument: str, path: str) -> str:
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if glob.has_magic(path):
        extensions = " ".join(EXTENSIONS)
        return f"No image matches the pattern {argument!r}; images are files named {extensions}."
    if not os.path.isdir(folder):
        return (
            f"There is no file, folder or pattern {argument!r}: "
            f"there is no folder {folder!r} either."
        )

    near = closest(name, os.listdir(folder), 3)
    nearest = f"Nothing in {folder!r} is similar."
    if near:
        nearest = f"Nearest in {folder!r}: {', '.join(map(repr, near))}."
    return f"There is no file or folder {argument!r}. {nearest}"


@contextlib.contextmanager
def _explain_unreadable(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"Folder {str(folder)!r} cannot be read ({error.strerror}). Allow it, or move it.",
        ) from error


def _get_inode(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
