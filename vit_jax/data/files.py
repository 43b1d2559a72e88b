"""Image files: which files are images, by their names; how folders of them are walked; what a command line names.

Skipped are files and folders whose names start with a dot, and pipes, sockets and devices. Links are followed, but no
folder is walked twice and none that contains the start, so the walk ends where links form a circle.
"""

import collections
import contextlib
import difflib
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vit_jax.data.images import UnreadableImage
from vit_jax.data.records import few
from vit_jax.files import read_bounded, read_lines

EXTENSIONS = (
    *(".avif", ".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm"),
    *(".png", ".pnm", ".ppm", ".pxm", ".ras", ".sr", ".tif", ".tiff", ".webp"),
)
"""What OpenCV decodes to 8 bits; compared without regard to case."""
_TO_CONVERT = (".heic", ".heif", ".hif", ".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".raw", ".rw2")
"""Photos in formats that are not read."""

MAX_IMAGE_BYTES = 2**30
"""A larger image file is unreadable. An uncompressed 16-bit image of 170 megapixels is smaller."""
MAX_NAME_BYTES = 4096  # Linux has no longer paths


def is_image(name: str) -> bool:
    """Whether a file of this name is treated as an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def image_files(folder: str, others: collections.Counter[str] | None = None) -> list[str]:
    """Image files below an existing folder, at any depth, sorted; `others` counts what else is there, by extension.

    A link that leads nowhere is listed, so that its name is told when it is read.

    Raises:
      ValueError: a folder cannot be read.
    """
    found, others = [], collections.Counter() if others is None else others
    for parent in walk_folders(folder):
        for entry in entries_of(parent):
            if is_folder(entry) or entry.name.startswith("."):
                continue
            if not entry.is_file(follow_symlinks=False) and is_special(entry.path):
                others["special (pipe, socket or device)"] += 1
            elif is_image(entry.name):
                found.append(entry.path)
            else:
                others[os.path.splitext(entry.name)[1].lower() or "without extension"] += 1
    return sorted(found)


def describe_skipped(others: collections.Counter[str]) -> list[str]:
    """Return sentences about the files that `image_files` counts by extension; none without such files."""
    convert = sorted(kind for kind in others if kind in _TO_CONVERT)
    lines = [
        f"{_files(others[kind], kind)} {'is' if others[kind] == 1 else 'are'} skipped: convert to JPEG or PNG."
        for kind in convert
    ]
    rest = sorted(((n, kind) for kind, n in others.items() if kind not in convert), key=lambda x: (-x[0], x[1]))
    if rest:
        count = sum(n for n, _ in rest)
        are = "file that is not an image is" if count == 1 else "files that are not images are"
        lines.append(f"{count:,} {are} skipped: {few([f'{n:,} {kind}' for n, kind in rest])}.")
    return lines


def _files(count: int, kind: str) -> str:
    return f"{count:,} {kind} file{'s' * (count != 1)}"


def walk_folders(folder: str) -> Iterator[str]:
    """The folder and those below it, at any depth, each once; `folder` must exist.

    Raises:
      ValueError: a folder cannot be read.
    """
    seen = {_inode(parent) for parent in Path(os.path.abspath(folder)).parents}
    waiting = [folder]
    while waiting:
        parent = waiting.pop()
        with _told(parent):
            inode = _inode(parent)
        if inode not in seen:
            seen.add(inode)
            yield parent
            inside = (entry for entry in entries_of(parent) if is_folder(entry) and not entry.name.startswith("."))
            waiting += sorted((entry.path for entry in inside), reverse=True)


def entries_of(folder: str | Path) -> list[os.DirEntry[str]]:
    """What is directly inside a folder.

    Raises:
      ValueError: it cannot be read.
    """
    with _told(folder), os.scandir(folder) as entries:
        return list(entries)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; no for a link that leads nowhere or to itself."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def is_special(path: str) -> bool:
    """Whether it exists and is neither a file nor a folder: reading it may wait for ever."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def read_file(path: str) -> bytes:
    """Return the bytes of an image file.

    Raises:
      UnreadableImage: the file was removed since it was listed, may not be read, is a pipe or a device, or is larger
        than `MAX_IMAGE_BYTES`.
    """
    try:
        return read_bounded(path, MAX_IMAGE_BYTES)
    except OSError as error:
        raise UnreadableImage(f"The file cannot be opened ({error.strerror})") from error
    except ValueError as error:
        raise UnreadableImage(f"The file is not read: {error}") from error


def list_images(arguments: Sequence[str]) -> list[str]:
    """Image files that the arguments of a command line name, in their order, none twice.

    "-" stands for names on standard input, one a line of at most `MAX_NAME_BYTES`. A file is used whatever its name. A
    folder means the image files below it, and a pattern (`*`, `?`, `[…]`, `**` for folders at any depth) the image
    files and folders that match it, sorted. An existing file with the name of the pattern itself comes first.

    Raises:
      ValueError: no arguments, one without an image (the message gives the nearest names that exist), a folder that
        cannot be read, or a line of standard input that is too long.
    """
    if not arguments:
        raise ValueError("No images are given; name files, folders or patterns such as 'photos/*.jpg'.")
    found: dict[str, str] = {}
    for argument in arguments:
        for path in (path for one in (_names_on_input() if argument == "-" else [argument]) for path in _expand(one)):
            folder, name = os.path.split(path)
            found.setdefault(os.path.join(os.path.realpath(folder), name), path)  # equal for two ways to write one path
    if not found:
        raise ValueError("-: standard input must name at least one image, one name a line.")
    return list(found.values())


def _names_on_input() -> Iterator[str]:
    try:
        for line in read_lines(sys.stdin.buffer, MAX_NAME_BYTES):
            yield from (os.fsdecode(name) for name in line.splitlines() if name)
    except ValueError as error:
        raise ValueError(f"- (names on standard input): {error}. Give one name of a file a line.") from None


def _expand(argument: str) -> list[str]:
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        others = collections.Counter[str]()
        files = image_files(path, others)
        if not files:
            found = " ".join(["", *describe_skipped(others)])
            raise ValueError(f"Folder {argument!r} has no images (files named {' '.join(EXTENSIONS)}).{found}")
        return files
    if os.path.lexists(path):
        return [path]
    matches = sorted({match.removeprefix("./") for match in _matches(path)}) if glob.has_magic(path) else []
    files = [file for match in matches for file in (image_files(match) if os.path.isdir(match) else [match])]
    files = [file for file in files if is_image(os.path.basename(file)) and not is_special(file)]
    if not files:
        raise ValueError(_nothing(argument, path))
    return files


def _matches(pattern: str) -> Iterator[str]:
    """As `glob.glob(pattern, recursive=True)`, but it ends where links form a circle."""
    head, double_star, rest = f"/{pattern}/".partition("/**/")
    if not double_star:
        yield from glob.glob(pattern)
        return
    head, rest = head[1:] or pattern[: pattern.startswith("/")], rest.removesuffix("/")
    for start in glob.glob(head) if head else [os.curdir]:
        if rest and os.path.isdir(start):
            for folder in walk_folders(start):
                yield from _matches(os.path.join(glob.escape(folder), rest))
        else:
            yield start


def _nothing(argument: str, path: str) -> str:
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    if glob.has_magic(path):
        return f"No image matches the pattern {argument!r}; images are files named {' '.join(EXTENSIONS)}."
    if not os.path.isdir(folder):
        return f"There is no file, folder or pattern {argument!r}: there is no folder {folder!r} either."
    near = difflib.get_close_matches(name, os.listdir(folder), n=3)
    nearest = f"Nearest in {folder!r}: {', '.join(map(repr, near))}." if near else f"Nothing in {folder!r} is similar."
    return f"There is no file or folder {argument!r}. {nearest}"


@contextlib.contextmanager
def _told(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"Folder {str(folder)!r} cannot be read ({error.strerror}): allow it, or move the folder away."
        ) from error


def _inode(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
