"""One run in one workdir: a lock file that a crash does not leave behind and that network file systems keep.

File locks of the system are not passed on by every network file system. The file names its owner instead, and the owner
renews it. On the same machine a lock is void when the owner's process has ended; elsewhere when it is not renewed.

A lock appears complete, as a hard link that fails where there is one. A void lock is replaced by the process that has
a second lock, a claim, whose name follows from the void one.

In a bucket the lock is an object. It is created, renewed and replaced only if it has the generation that was seen.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Self

from vit_jax.storage.buckets import BucketPath
from vit_jax.storage.files import JsonObject, parse_json, read_bounded, write_atomically

FILE = "run.lock"
RENEWAL_SECONDS = 5.0
EXPIRY_SECONDS = 30.0  # without renewal, as another machine sees it; clocks need not agree
_MAX_BYTES = 2**16
_NO_LINKS = {
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
}  # from file systems without hard links


class WorkdirLost(RuntimeError):
    """The workdir was removed, replaced or taken over while a run used it."""


class WorkdirLock:
    """Context of the process that writes into a workdir.

    Args:
      folder: the workdir, which exists.
      enabled: False in the other processes of a run: does nothing.
      say: receives a line where the lock of another machine has to expire first.
      renewal_seconds, expiry_seconds: as the constants.

    Raises:
      ValueError: on entry: another run uses the workdir; it is named.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        enabled: bool = True,
        say: Callable[[str], object] = print,
        renewal_seconds: float = RENEWAL_SECONDS,
        expiry_seconds: float = EXPIRY_SECONDS,
    ):
        self.folder = folder
        self._path = folder / FILE
        self._enabled = enabled
        self._say = say
        self._renewal_seconds = renewal_seconds
        self._expiry_seconds = expiry_seconds
        self._owner = {
            "token": uuid.uuid4().hex,
            **_this_process(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        self._renewals = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_renewing, name="workdir-lock", daemon=True
        )

    def __enter__(self) -> Self:
        if self._enabled:
            self._acquire(self._path)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._enabled:
            self._is_closing.set()
            self._thread.join()
            with contextlib.suppress(OSError, WorkdirLost):
                self.check()
                self._release()

    def check(self) -> None:
        """Call before writing into the workdir.

        Raises:
          WorkdirLost: it is not the folder any more that was locked, or another run has it.
        """
        if self._enabled:
            self._require_owner(_read(self._path))

    def _require_owner(self, owner: JsonObject | None) -> None:
        """Raise WorkdirLost unless the lock, as it was read, is of this process."""
        if owner is None:
            raise WorkdirLost(
                f"workdir {str(self.folder)!r} was removed or replaced while the run used it, with all it holds. "
                "Restore the folder and start the same command again, or start anew."
            )
        if owner["token"] != self._owner["token"]:
            raise WorkdirLost(
                f"workdir {str(self.folder)!r} was taken over by process {owner['pid']} on {owner['host']} at "
                f"{owner['since']}, because this one did not renew its lock for {self._expiry_seconds:.0f} s."
            )

    def _acquire(self, path: pathlib.Path) -> None:
        """Create the lock or claim `path`, or replace it if it is void; raise ValueError if another process has it."""
        while not self._create(path):
            content = _content(path)
            if content is None:  # released since
                continue
            self._require_void(content, path)
            if not content and self._is_filled(path):
                continue
            claim = claim_of(path, content)
            self._acquire(claim)  # only the process that has it replaces this content
            try:
                if _content(path) == content:
                    self._write_beside(path).replace(
                        path
                    )  # also a link or a pipe, which `write_atomically` would keep
                    return
            finally:
                claim.unlink(missing_ok=True)

    def _require_void(self, content: bytes, path: pathlib.Path) -> None:
        """Raise ValueError if the lock at `path`, with this content, is of a run that is alive."""
        if (other := _owner(content)) is not None and not self._is_void(other, path):
            raise ValueError(
                f"workdir {str(self.folder)!r} is used by another run: process {other['pid']} on {other['host']}, "
                f"since {other['since']}. End that run first, or choose another workdir."
            )

    def _release(self) -> None:
        self._path.unlink()

    def _create(self, path: pathlib.Path) -> bool:
        """Create `path` with its content at once; return False if it exists."""
        complete = self._write_beside(path)
        try:
            os.link(complete, path)
        except FileExistsError:
            return (
                complete.stat().st_nlink > 1
            )  # a network file system may have lost the first answer
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                return False
            complete.replace(path)
        finally:
            complete.unlink(missing_ok=True)
        return True

    def _write_beside(self, path: pathlib.Path) -> pathlib.Path:
        """Return a new file with the content of the lock in the folder of `path`."""
        complete = path.with_name(f".{FILE}.{uuid.uuid4().hex}")
        write_atomically(complete, self._text())
        return complete

    def _is_filled(self, path: pathlib.Path) -> bool:
        """Return whether an empty lock changes while this waits; without hard links a lock is empty for a moment."""
        for _ in range(10):
            time.sleep(min(1.0, self._expiry_seconds / 10) / 10)
            if _content(path) != b"":
                return True
        return False

    def _is_void(self, other: JsonObject, path: pathlib.Path) -> bool:
        """Return whether the owner of the lock at `path` is gone; may wait until the lock would have been renewed."""
        if (has_ended := _has_ended(other)) is not None:
            return has_ended
        self._say(
            f"{path} is of process {other['pid']} on {other['host']}: waiting up to {self._expiry_seconds:.0f} s "
            "to see whether that run is alive"
        )
        deadline = time.monotonic() + self._expiry_seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._expiry_seconds / 10))
            if (now := _read(path)) is None:
                return True
            if now != other:
                return False
        return True

    def _text(self) -> str:
        return json.dumps({**self._owner, "renewals": self._renewals}) + "\n"

    def _renew(self) -> None:
        self.check()
        self._renewals += 1
        write_atomically(self._path, self._text())

    def _keep_renewing(self) -> None:
        while not self._is_closing.wait(self._renewal_seconds):
            with contextlib.suppress(
                OSError, WorkdirLost
            ):  # a full disk may have room again; the run sees a loss
                self._renew()


class BucketLock(WorkdirLock):
    """The same for a workdir in a bucket; arguments and errors as of `WorkdirLock`.

    `check` sends no request while the last renewal is recent: another machine takes over only what is not renewed.
    """

    _path: BucketPath  # type: ignore[assignment]
    _generation = 0
    _renewed = 0.0  # by the clock `time.monotonic`

    def check(self) -> None:
        if self._enabled and time.monotonic() - self._renewed > self._expiry_seconds:
            owner = None
            with contextlib.suppress(FileNotFoundError):
                owner = _owner(self._path.read_generation()[0])
            self._require_owner(owner)

    def _acquire(self, path: pathlib.Path) -> None:
        generation = 0
        while True:
            with contextlib.suppress(FileExistsError):
                self._write(generation)
                return
            generation = 0
            with contextlib.suppress(FileNotFoundError):  # released since
                content, generation = self._path.read_generation()
                self._require_void(content, path)

    def _write(self, generation: int) -> None:
        began = time.monotonic()
        self._generation = self._path.write_bytes(self._text().encode(), generation)
        self._renewed = began

    def _renew(self) -> None:
        self._renewals += 1
        try:
            self._write(self._generation)
        except (FileExistsError, FileNotFoundError):  # taken over, or removed: let `check` see
            self._renewed = -math.inf

    def _release(self) -> None:
        self._path.unlink(generation=self._generation)


def lock_of(folder: pathlib.Path, *, enabled: bool = True) -> WorkdirLock:
    """Return the lock of a workdir in a file system or a bucket; see `WorkdirLock`."""
    return (BucketLock if isinstance(folder, BucketPath) else WorkdirLock)(folder, enabled=enabled)


def is_abandoned(folder: pathlib.Path, now: float, expiry_seconds: float) -> bool:
    """Return whether nobody uses a folder that a process has locked, without waiting.

    The owner has ended on this machine, or neither the lock nor the folder was changed for `expiry_seconds` before
    `now`, a time by the clock of the file system.
    """
    owner = _read(folder / FILE)
    if owner is not None and (has_ended := _has_ended(owner)) is not None:
        return has_ended
    newest = 0.0
    for path in (folder, folder / FILE):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            newest = max(newest, path.stat().st_mtime)
    return now - newest > expiry_seconds


def _has_ended(owner: JsonObject) -> bool | None:
    """Return whether the owner of a lock has ended; None if its processes are not visible from this one."""
    here = _this_process()
    if any(owner[name] != here[name] for name in ("host", "boot", "namespace")):
        return None
    return bool(_started(owner["pid"]) != owner["started"])


def claim_of(path: pathlib.Path, content: bytes) -> pathlib.Path:
    """Return the claim that a process needs before it replaces `path`, which has this content."""
    owner = _owner(content)
    name = (
        content if owner is None else str(owner["token"]).encode()
    )  # without the number of renewals
    return path.with_name(f".{FILE}.{hashlib.sha256(name).hexdigest()[:32]}")


def _read(path: pathlib.Path) -> JsonObject | None:
    """Return the owner of a lock; None if there is none, or the file is not a lock."""
    content = _content(path)
    return None if content is None else _owner(content)


def _content(path: pathlib.Path) -> bytes | None:
    """Return the content of a file, or a word for one that is no lock; None if there is no file."""
    try:
        return read_bounded(path, _MAX_BYTES)
    except (OSError, ValueError):
        return b"not a lock" if os.path.lexists(path) else None


def _owner(content: bytes) -> JsonObject | None:
    """Return the owner that the content of a lock names; None if it was not written by this module."""
    try:
        owner = parse_json(content)
        is_complete = {"token", "since", *_this_process()} <= owner.keys()
        return (
            owner
            if is_complete and type(owner["pid"]) is int and 0 < owner["pid"] < 2**31
            else None
        )
    except (ValueError, AttributeError):
        return None


def _this_process() -> JsonObject:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    namespace = pathlib.Path("/proc/self/ns/pid")  # containers have process numbers of their own
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "namespace": os.readlink(namespace) if namespace.is_symlink() else "",
    }


def _started(pid: int) -> str | None:
    """Return an identity of a process beyond its number; "" if the system has none, None if it ended."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except OSError:
        return None
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return (
        None if fields[0] in "ZX" else fields[19]
    )  # a zombie has ended; clock ticks since the machine started
