"""Google Cloud Storage: `gs://BUCKET/NAME` as a path, writes with preconditions, reads of ranges.

A bucket has objects and no folders: a folder is the common begin of names up to a "/", and exists
while an object is below it. An object is written as a whole or not at all. Each version of it has a
number, its generation. A write that names the generation to replace fails if another process has
written in between.
"""

import concurrent.futures
import contextlib
import errno
import fnmatch
import io
import os
import pathlib
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from vit_jax.storage import SCHEME
from vit_jax.storage.gcs_client import (
    NO_SUCH_OBJECT,
    client_errors,
    get_client,
    raise_system_errors,
    request_options,
    set_up_libraries,
)

T = TypeVar("T")

READ_AHEAD_BYTES = 2**20
_THREADS = 16


def open_address(address: str) -> "BucketPath":
    """Return the path of an address, and set up all libraries that read and write it.

    Raises:
      ValueError: there is no bucket in it.
      ImportError: the libraries are not installed.
    """
    path = BucketPath(address)
    bucket = address.removeprefix(SCHEME).partition("/")[0]
    if not bucket:
        raise ValueError(f"{address}: must name a bucket. Write gs://BUCKET/FOLDER.")
    if ".." in path.parts:
        raise ValueError(
            f"{address}: must not have '..' in it; a bucket has no folders to go up to."
        )
    set_up_libraries()
    return path


class Status(NamedTuple):
    """Facts of an object, by the names of `os.stat_result`; a folder has size and time 0."""

    st_mode: int
    st_size: int
    st_mtime: float
    generation: int


class BucketPath(pathlib.PurePosixPath):
    """A path of an object or folder in a bucket, with methods of `pathlib.Path`.

    Methods raise the errors that `pathlib.Path` raises: FileNotFoundError (no object, no bucket),
    PermissionError (403, no credentials), FileExistsError (a precondition failed), and `NoAnswer`
    (no reply in time).
    """

    __slots__ = ()

    def __str__(self) -> str:
        is_address = self.parts[:1] == (SCHEME.rstrip("/"),)
        if not is_address:  # the result of `relative_to`
            return super().__str__()
        return SCHEME + "/".join(self.parts[1:])

    @property
    def bucket(self) -> str:
        return "".join(self.parts[1:2])

    @property
    def key(self) -> str:
        """The name of the object in its bucket."""
        return "/".join(self.parts[2:])

    def absolute(self) -> "BucketPath":
        return self

    # Facts.

    def stat(self) -> Status:
        if self.key:
            with contextlib.suppress(FileNotFoundError), raise_system_errors(self):
                blob = self.blob()
                blob.reload(**request_options())
                return _read_status(blob)
        if self.is_dir():
            return Status(stat.S_IFDIR, 0, 0.0, 0)
        raise FileNotFoundError(errno.ENOENT, NO_SUCH_OBJECT, str(self))

    def exists(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(self.stat())
        return False

    def is_file(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(self.stat().st_mode)
        return False

    def is_dir(self) -> bool:
        with contextlib.suppress(FileNotFoundError), raise_system_errors(self):
            return not self.key or any(self._list_blobs(max_results=1))
        return False

    def is_symlink(self) -> bool:
        return False

    # Listing.

    def iterdir(self) -> Iterator["BucketPath"]:
        """Yield the objects and folders directly inside."""
        with raise_system_errors(self):
            blobs = self._list_blobs(delimiter="/")
            names = [blob.name for blob in blobs if not blob.name.endswith("/")]
            names += sorted(blobs.prefixes)
        for name in names:
            yield self._find(name)

    def objects(self) -> Iterator[tuple["BucketPath", Status]]:
        """Yield every object below the folder, at any depth, with its facts.

        It takes a request for each 1,000 objects.
        """
        with raise_system_errors(self):
            for blob in self._list_blobs():
                is_marker_of_folder = blob.name.endswith("/")
                if not is_marker_of_folder:
                    yield self._find(blob.name), _read_status(blob)

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yield objects and folders by a pattern of one part, or several; without `**`."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if not fnmatch.fnmatchcase(path.name, first):
                continue
            if rest:
                yield from path.glob(rest)
            else:
                yield path

    def rglob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yield objects at any depth whose name matches a pattern of one part."""
        return (path for path, _ in self.objects() if fnmatch.fnmatchcase(path.name, pattern))

    def _find(self, key: str) -> "BucketPath":
        """Return the path of another object of the bucket."""
        return type(self)(f"{SCHEME}{self.bucket}/{key}")

    def _list_blobs(self, **options: Any) -> Any:
        prefix = ""
        if self.key:
            prefix = f"{self.key}/"
        return get_client().list_blobs(self.bucket, prefix=prefix, **options, **request_options())

    # Reading.

    def open_ranges(self) -> io.BufferedReader:
        """Open an object for reads in ranges, all of one generation."""
        status = self.stat()
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        return io.BufferedReader(Ranges(self, status.st_size, status.generation), READ_AHEAD_BYTES)

    def read_bytes(self) -> bytes:
        return self.read_generation()[0]

    def read_text(self) -> str:  # for orbax
        return self.read_generation()[0].decode()

    def read_generation(self) -> tuple[bytes, int]:
        """Return the content of an object, checked by its CRC32C, and its generation."""
        with raise_system_errors(self):
            blob = self.blob()
            content: bytes = blob.download_as_bytes(checksum="auto", **request_options())
            return content, int(blob.generation)

    # Writing.

    def write_bytes(self, content: bytes, generation: int | None = None) -> int:
        """Replace the object; return its new generation.

        Args:
          content: content of the object.
          generation: the generation to replace, 0 for a new object; None: the generation when the
            write begins.

        Raises:
          FileExistsError: the object has another generation.
        """
        if generation is None:
            generation = self._read_generation_number()
        with raise_system_errors(self):
            try:
                return self._upload(content, generation)
            except client_errors().PreconditionFailed:
                # Either another process has written, or the reply to a first request was lost.
                stored, generation = self.read_generation()
                if stored != content:
                    raise
                return generation

    def _upload(self, content: bytes, generation: int) -> int:
        """Write the object if it has this generation; return the new one."""
        blob = self.blob()
        blob.upload_from_string(
            content,
            "application/octet-stream",
            if_generation_match=generation,
            checksum="auto",
            **request_options(),
        )
        return int(blob.generation)

    def write_text(self, text: str) -> None:  # for orbax
        self.write_bytes(text.encode())

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists while an object is in it."""

    def rmdir(self) -> None:
        """Do nothing, as `mkdir`."""

    def unlink(self, missing_ok: bool = False, generation: int | None = None) -> None:
        """Remove the object, if it has this generation; None: any generation."""
        options = request_options()
        if generation:
            options["if_generation_match"] = generation
        try:
            with raise_system_errors(self):
                self.blob().delete(**options)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: "BucketPath") -> "BucketPath":
        """Move the objects below this folder to another folder, also of another bucket.

        It is not atomic: all are copied before one is removed.
        """
        names = [path.relative_to(self) for path, _ in self.objects()]
        run_in_threads(lambda name: (self / name)._copy(target / name), names)
        self.rmtree()
        return target

    def rmtree(self) -> None:
        """Remove every object below the folder."""
        paths = [path for path, _ in self.objects()]
        run_in_threads(lambda path: path.unlink(missing_ok=True), paths)

    def blob(self) -> Any:
        """Return the client's object."""
        return get_client().bucket(self.bucket).blob(self.key)

    def _copy(self, target: "BucketPath") -> None:
        token = None
        with raise_system_errors(self):
            while True:
                reply = target.blob().rewrite(self.blob(), token=token, **request_options())
                token = reply[0]
                if token is None:
                    return

    def _read_generation_number(self) -> int:
        try:
            return self.stat().generation
        except FileNotFoundError:
            return 0


def _read_status(blob: Any) -> Status:
    return Status(stat.S_IFREG, int(blob.size), blob.updated.timestamp(), int(blob.generation))


class Ranges(io.RawIOBase):
    """An object as a file: each read is a request for a range."""

    def __init__(self, path: BucketPath, size: int, generation: int):
        self.path = path
        self.size = size
        self.generation = generation
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}
        self._place = origins[whence] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        end = min(self._place + len(buffer), self.size)
        if end <= self._place:
            return 0
        span = {"start": self._place, "end": end - 1}
        with raise_system_errors(self.path):
            content = self.path.blob().download_as_bytes(
                **span, if_generation_match=self.generation, **request_options()
            )
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def run_in_threads(action: Callable[[T], object], items: Iterable[T]) -> None:
    """Call a function with each item in several threads; the first error is raised."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(action, items))
