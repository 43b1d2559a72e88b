"""Google Cloud Storage by address: `gs://BUCKET/NAME` as a path, writes with preconditions, reads of ranges.

A bucket has objects and no folders: a folder is what names before a "/" have in common, and exists while an object is
below it. An object is written as a whole or not at all. Each version of it has a number, its generation; a write that
names the generation which it replaces fails if another process has written in between.

Requests that fail with a status of 408, 429 or 5xx, or get no reply, are repeated for up to `RETRY_SECONDS` since the
first failure of any request of the process, but for `LATER_RETRY_SECONDS`. An answer ends this time of silence.
"""

import atexit
import concurrent.futures
import contextlib
import errno
import fnmatch
import functools
import io
import logging
import os
import pathlib
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

SCHEME = "gs://"
TIMEOUT_SECONDS = (10.0, 60.0)  # to connect, and between two pieces of a reply
RETRY_SECONDS = 120.0
LATER_RETRY_SECONDS = (
    2.0  # of a request that begins when the others have waited for `RETRY_SECONDS`
)
READ_AHEAD_BYTES = 2**20
_NOTHING = "there is no such object or bucket"
_CONNECTIONS = (
    64  # kept open by a process; more threads than this open a connection for each request
)
_THREADS = 16
_PLACEHOLDER = 0o200  # permissions of a file of a mirror whose content is in the bucket: nobody reads it as zeros


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the address of a bucket or object: gs://..."""
    return os.fspath(path).startswith(SCHEME)


class NoAnswer(OSError):
    """Cloud Storage does not answer; this says nothing about an object."""


class Status(NamedTuple):
    """Facts of an object, by the names of `os.stat_result` where it has them; a folder has size and time 0."""

    st_mode: int
    st_size: int
    st_mtime: float
    generation: int


class BucketPath(pathlib.PurePosixPath):
    """A path of an object or folder in a bucket, with the methods of `pathlib.Path` that a run needs.

    Methods raise the errors that `pathlib.Path` raises: FileNotFoundError (no object, no bucket), PermissionError (403,
    no credentials), FileExistsError (a precondition failed), and `NoAnswer` (after `RETRY_SECONDS`).
    """

    __slots__ = ()

    def __str__(self) -> str:
        is_full = self.parts[:1] == (SCHEME.rstrip("/"),)  # and not what `relative_to` returns
        return SCHEME + "/".join(self.parts[1:]) if is_full else super().__str__()

    @property
    def bucket(self) -> str:
        return "".join(self.parts[1:2])

    @property
    def key(self) -> str:
        """The name of the object in its bucket."""
        return "/".join(self.parts[2:])

    def absolute(self) -> "BucketPath":
        return self

    def stat(self) -> Status:
        if self.key:
            with contextlib.suppress(FileNotFoundError), _system_errors(self):
                blob = self.blob()
                blob.reload(**_options())
                return _status(blob)
        if self.is_dir():
            return Status(stat.S_IFDIR, 0, 0.0, 0)
        raise FileNotFoundError(errno.ENOENT, _NOTHING, str(self))

    def exists(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(self.stat())
        return False

    def is_file(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(self.stat().st_mode)
        return False

    def is_dir(self) -> bool:
        with contextlib.suppress(FileNotFoundError), _system_errors(self):
            return not self.key or any(self._listed(max_results=1))
        return False

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator["BucketPath"]:
        """Yield the objects and folders directly inside."""
        with _system_errors(self):
            blobs = self._listed(delimiter="/")
            names = [blob.name for blob in blobs if not blob.name.endswith("/")] + sorted(
                blobs.prefixes
            )
        yield from (type(self)(f"{SCHEME}{self.bucket}/{name}") for name in names)

    def objects(self) -> Iterator[tuple["BucketPath", Status]]:
        """Yield every object below the folder, at any depth, with its facts: a request for each 1,000 of them."""
        with _system_errors(self):
            for blob in self._listed():
                if not blob.name.endswith("/"):  # which marks a folder
                    yield type(self)(f"{SCHEME}{self.bucket}/{blob.name}"), _status(blob)

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yield objects and folders by a pattern of one part, or several; without `**`."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatch.fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else (path,)

    def rglob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yield objects at any depth whose name matches a pattern of one part."""
        return (path for path, _ in self.objects() if fnmatch.fnmatchcase(path.name, pattern))

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
        """Return the content of an object, checked by its CRC32C, and the generation that has it."""
        with _system_errors(self):
            blob = self.blob()
            content: bytes = blob.download_as_bytes(checksum="auto", **_options())
            return content, int(blob.generation)

    def write_bytes(self, content: bytes, generation: int | None = None) -> int:
        """Replace the object; return its new generation.

        Args:
          content: of the object.
          generation: the one to replace, 0 for a new object; None: the one that there is when the write begins.

        Raises:
          FileExistsError: the object has another generation.
        """
        if generation is None:
            generation = self._generation()
        with _system_errors(self):
            blob = self.blob()
            failed = _exceptions().PreconditionFailed
            try:
                blob.upload_from_string(
                    content,
                    "application/octet-stream",
                    if_generation_match=generation,
                    checksum="auto",
                    **_options(),
                )
                return int(blob.generation)
            except failed:  # also if the reply to a first request was lost
                stored, generation = self.read_generation()
                if stored != content:
                    raise
                return generation

    def write_text(self, text: str) -> None:  # for orbax
        self.write_bytes(text.encode())

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists while an object is in it."""

    def rmdir(self) -> None:
        """Do nothing, as `mkdir`."""

    def unlink(self, missing_ok: bool = False, generation: int | None = None) -> None:
        options = _options() | ({"if_generation_match": generation} if generation else {})
        with contextlib.suppress(*[FileNotFoundError] * missing_ok), _system_errors(self):
            self.blob().delete(**options)

    def rename(self, target: "BucketPath") -> "BucketPath":
        """Copy the objects below a folder to another folder of the bucket or of another one, and remove them here.

        It is not atomic: until all are copied, nothing is removed.
        """
        names = [path.relative_to(self) for path, _ in self.objects()]
        _in_threads(lambda name: (self / name)._copy(target / name), names)
        self.rmtree()
        return target

    def rmtree(self) -> None:
        """Remove every object below the folder."""
        _in_threads(lambda path: path.unlink(missing_ok=True), [path for path, _ in self.objects()])

    def blob(self) -> Any:
        """Return the client's object."""
        return _client().bucket(self.bucket).blob(self.key)

    def _copy(self, target: "BucketPath") -> None:
        token = None
        with _system_errors(self):
            while (
                token := target.blob().rewrite(self.blob(), token=token, **_options())[0]
            ) is not None:
                pass

    def _generation(self) -> int:
        try:
            return self.stat().generation
        except FileNotFoundError:
            return 0

    def _listed(self, **options: Any) -> Any:
        prefix = f"{self.key}/" if self.key else ""
        return _client().list_blobs(self.bucket, prefix=prefix, **options, **_options())


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
        self._place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}[whence]
        )
        return self._place

    def readinto(self, buffer: Any) -> int:
        end = min(self._place + len(buffer), self.size)
        if end <= self._place:
            return 0
        options = {"start": self._place, "end": end - 1, "if_generation_match": self.generation}
        with _system_errors(self.path):
            content = self.path.blob().download_as_bytes(**options, **_options())
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


# Mirrors: names, sizes and generations of a bucket's objects in a folder of this machine.


def mirror(address: BucketPath, root: pathlib.Path, whole: tuple[str, ...] = ()) -> pathlib.Path:
    """Create or update a folder with a placeholder for each object below an address; return it.

    A placeholder has the name and size of its object, no content (it takes no space), and no permission to read; its
    time of change is the object's generation in microseconds. `open_remote` reads it from the bucket.

    Args:
      address: of a folder.
      root: of all mirrors on this machine.
      whole: ends of names whose objects are downloaded.

    Raises:
      OSError: the bucket cannot be listed, or the folder cannot be written.
    """
    folder = root / address.bucket / address.key
    objects = {
        folder / path.relative_to(address): (path, status) for path, status in address.objects()
    }
    if not objects:
        raise FileNotFoundError(errno.ENOENT, "there is no object below this address", str(address))
    changed = [local for local, (_, status) in objects.items() if not _is_current(local, status)]
    _in_threads(lambda local: _store(*objects[local], local, local.name.endswith(whole)), changed)
    for local in folder.rglob("*"):
        is_ours = local.is_file() and (
            _is_placeholder(local) or local.name.endswith(whole or ("\0",))
        )
        if (
            is_ours and local not in objects and not local.name.startswith(".")
        ):  # another process may be writing it
            local.unlink(missing_ok=True)
    return folder


def fetch(path: BucketPath, root: pathlib.Path) -> pathlib.Path:
    """Download an object into the folder of the mirrors, unless it is there already; return the file."""
    local = root / path.bucket / path.key
    status = path.stat()
    if not _is_current(local, status) or _is_placeholder(local):
        _store(path, status, local)
    return local


def _is_current(local: pathlib.Path, status: Status) -> bool:
    return local.exists() and local.stat().st_mtime_ns == status.generation * 1000


def _store(path: BucketPath, status: Status, local: pathlib.Path, is_whole: bool = True) -> None:
    """Write an object or its placeholder, completely or not at all."""
    local.parent.mkdir(parents=True, exist_ok=True)
    temporary = local.with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.touch(0o600)
        if is_whole:
            with _system_errors(path):
                path.blob().download_to_filename(
                    temporary, if_generation_match=status.generation, **_options()
                )
        else:
            os.truncate(temporary, status.st_size)
            temporary.chmod(_PLACEHOLDER)
        os.utime(temporary, ns=(status.generation * 1000,) * 2)
        temporary.replace(local)
    finally:
        temporary.unlink(missing_ok=True)


def open_remote(path: str | os.PathLike[str], root: pathlib.Path) -> io.BufferedReader | None:
    """Open what is in a bucket: an address, or a placeholder of a mirror below `root`; None for other files."""
    if isinstance(path, BucketPath):
        return path.open_ranges()
    text = os.fspath(path)
    if not text.startswith(f"{root}/") or not _is_placeholder(pathlib.Path(text)):
        return None
    status = os.stat(text)
    address = BucketPath(SCHEME + text[len(str(root)) + 1 :])
    return io.BufferedReader(
        Ranges(address, status.st_size, status.st_mtime_ns // 1000), READ_AHEAD_BYTES
    )


def _is_placeholder(path: pathlib.Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == _PLACEHOLDER


# The client.


def open_address(address: str) -> BucketPath:
    """Return the path of an address, with everything set up that reads and writes it, orbax and tensorstore included.

    Raises:
      ValueError: there is no bucket in it.
      ImportError: the libraries are not installed.
    """
    path = BucketPath(address)
    if not address.removeprefix(SCHEME).partition("/")[0]:
        raise ValueError(f"{address}: must name a bucket. Write gs://BUCKET/FOLDER.")
    if ".." in path.parts:
        raise ValueError(
            f"{address}: must not have '..' in it; a bucket has no folders to go up to."
        )
    _set_up()
    return path


@functools.cache
def _set_up() -> None:
    """Make the libraries of orbax use the same endpoint, time limits and kind of bucket as `_client`.

    orbax finds and commits checkpoints through etils and gcsfs and writes arrays through tensorstore. Folders as
    objects of their own (hierarchical namespaces) are not used: gcsfs would ask for the kind of each bucket by gRPC.
    """
    os.environ.setdefault(
        "EPATH_USE_TF", "false"
    )  # where TensorFlow is installed, etils would use its file system
    import gcsfs  # noqa: I001  # first: errors name it
    import aiohttp
    import fsspec
    from google.cloud import storage  # noqa: F401

    connect, read = TIMEOUT_SECONDS
    limits = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=read)
    options: dict[str, Any] = {"requests_timeout": limits, "use_listings_cache": False}
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        options["token"] = "anon"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    fsspec.config.conf["gcs"] = options | fsspec.config.conf.get("gcs", {})
    fsspec.register_implementation("gcs", gcsfs.core.GCSFileSystem, clobber=True)
    logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)  # it is raised, too


@functools.cache
def _client() -> Any:
    """Return a client of this process, for all threads."""
    _set_up()
    import google.auth
    import requests.adapters
    from google.cloud import storage

    try:
        client = storage.Client()
    except google.auth.exceptions.DefaultCredentialsError:  # public buckets can be read without any
        client = storage.Client.create_anonymous_client()
    except OSError:  # a project is only needed to create buckets
        client = storage.Client(project="none")
    client._http.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS))
    client._http.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS))
    client._http.hooks["response"].append(_release)
    atexit.register(client.close)
    return client


def _release(reply: Any, **options: Any) -> None:
    """Read a reply that reports a failure: a download keeps its connection until the garbage collector finds it."""
    if not reply.ok:
        _ = reply.content


class _Silence:
    """The time since which no request of this process was answered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None

    def begin(self, error: Exception | None = None) -> None:
        """Note a request that failed and is repeated."""
        if self._began is None:
            self._began = self._clock()

    def end(self) -> None:
        """Note an answer."""
        self._began = None

    def remaining_seconds(self) -> float:
        """Return how long a request that begins now is repeated."""
        if self._began is None:
            return RETRY_SECONDS
        return max(LATER_RETRY_SECONDS, RETRY_SECONDS - (self._clock() - self._began))


_silence = _Silence()


def _repeat(request: Callable[[], T]) -> Callable[[], T]:
    """Return a request that is repeated while the service does not answer."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    retry = DEFAULT_RETRY.with_timeout(_silence.remaining_seconds())
    repeated: Callable[[], T] = retry(request, on_error=_silence.begin)
    return repeated


def _options() -> dict[str, Any]:
    connect, read = TIMEOUT_SECONDS
    remaining = _silence.remaining_seconds()
    return {"timeout": (min(connect, remaining), min(read, remaining)), "retry": _repeat}


def _exceptions() -> Any:
    from google.api_core import exceptions

    return exceptions


@contextlib.contextmanager
def _system_errors(path: BucketPath) -> Iterator[None]:
    """Raise errors of the client as the errors of the system that they correspond to."""
    import requests
    from google.auth.exceptions import GoogleAuthError, InvalidOperation, RefreshError
    from google.cloud.storage.exceptions import DataCorruption

    failures = _exceptions()
    try:
        yield
        _silence.end()
    except failures.NotFound as error:
        _silence.end()
        raise FileNotFoundError(errno.ENOENT, _NOTHING, str(path)) from error
    except (failures.Forbidden, failures.Unauthorized) as error:
        _silence.end()
        reason = f"access is denied ({error.code}): the account needs the role roles/storage.objectUser on the bucket"
        raise PermissionError(errno.EACCES, reason, str(path)) from error
    except failures.PreconditionFailed as error:
        _silence.end()
        raise FileExistsError(
            errno.EEXIST, "another process has written it meanwhile", str(path)
        ) from error
    except (RefreshError, InvalidOperation) as error:  # the second of anonymous requests
        reason = f"there are no valid credentials ({_reason(error)}): run `gcloud auth application-default login`"
        raise PermissionError(errno.EACCES, reason, str(path)) from error
    except (
        failures.GoogleAPIError,
        GoogleAuthError,
        DataCorruption,
        requests.RequestException,
    ) as error:
        raise NoAnswer(
            errno.EIO, f"Cloud Storage does not answer ({_reason(error)})", str(path)
        ) from error


def _reason(error: BaseException) -> str:
    """Return the status of the last reply, or the first line of what was raised instead."""
    cause = error.__cause__ or error  # after the last try, the cause
    code = getattr(cause, "code", None) or getattr(
        getattr(cause, "response", None), "status_code", None
    )
    return (
        f"status {code}"
        if code
        else str(cause).strip().partition("\n")[0][:200] or type(cause).__name__
    )


def _status(blob: Any) -> Status:
    return Status(stat.S_IFREG, int(blob.size), blob.updated.timestamp(), int(blob.generation))


def _in_threads(action: Callable[[T], object], items: Iterable[T]) -> None:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(action, items))
