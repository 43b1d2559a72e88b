"""Lock a workdir for one run, also on network file systems; a crash does not leave it locked.

Not every network file system passes on locks of the system. The file names its owner instead, who
renews it. A lock is void when its owner on the same machine has ended, or an owner elsewhere has
not renewed it.

A lock appears complete, as a hard link that fails where there is one. No system call replaces a
file only if it has a known content: of two processes that find a void lock, the second could
replace the new lock of the first. Therefore a process first creates a claim, a lock whose name
follows from the void one. A process may end while it has a claim. Its claim is then a void lock,
and is replaced as one.

In a bucket the lock is an object. It is created, renewed and replaced only if it has the generation
that was seen, so that no claim is needed.
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
from typing import TYPE_CHECKING, Self

from vit_jax.storage.files import (
    JsonObject,
    is_in_bucket,
    parse_json,
    read_bounded,
    write_atomically,
)

if TYPE_CHECKING:
    from vit_jax.storage.buckets import BucketPath

FILE = "run.lock"
RENEWAL_SECONDS = 5.0
EXPIRY_SECONDS = 30.0  # without renewal, as another machine sees it; clocks need not agree
_MAX_BYTES = 2**16
_MAX_PID = 2**31
_NO_LOCK = b"not a lock"  # content of what is neither a file nor absent
# Errors of file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class WorkdirLost(RuntimeError):
    """The workdir was removed, replaced or taken over while a run used it."""


class WorkdirLock:
    """Context of the process that writes into a workdir.

    Args:
      folder: the workdir, which exists.
      enabled: False in the other processes of a run: does nothing.
      say: receives a line where the lock of another machine has to expire first.
      renewal_seconds, expiry_seconds: see the constants.

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
        if not self._enabled:
            return
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
            self._require_owner(_read_owner(self._path))

    def _require_owner(self, owner: JsonObject | None) -> None:
        """Raise WorkdirLost unless the lock, as it was read, is of this process."""
        workdir = repr(str(self.folder))
        if owner is None:
            raise WorkdirLost(
                f"workdir {workdir} was removed or replaced while the run used it, "
                "with all it holds. "
                "Restore the folder and start the same command again, or start anew."
            )
        if owner["token"] != self._owner["token"]:
            raise WorkdirLost(
                f"workdir {workdir} was taken over by process {owner['pid']} on {owner['host']} "
                f"at {owner['since']}, because this one did not renew its lock "
                f"for {self._expiry_seconds:.0f} s."
            )

    def _acquire(self, path: pathlib.Path) -> None:
        """Create the lock or claim `path`, or replace it if it is void.

        Raises:
          ValueError: another process has it.
        """
        while not self._create(path):
            content = _read_content(path)
            if content is None:  # released since
                continue
            self._require_void(content, path)
            if content == b"" and self._is_filled(path):
                continue
            if self._replace(path, content):
                return

    def _replace(self, path: pathlib.Path, void_content: bytes) -> bool:
        """Replace a void lock, or a void claim; return False if another process has replaced it."""
        claim = claim_of(path, void_content)
        self._acquire(claim)
        try:
            if _read_content(path) != void_content:
                return False
            # A rename also replaces a link or a pipe, which `write_atomically` would keep.
            self._write_beside(path).replace(path)
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _require_void(self, content: bytes, path: pathlib.Path) -> None:
        """Raise ValueError if the lock at `path`, with this content, is of a run that is alive."""
        owner = _parse_owner(content)
        if owner is None or self._is_void(owner, path):
            return
        raise ValueError(
            f"workdir {str(self.folder)!r} is used by another run: process {owner['pid']} on "
            f"{owner['host']}, since {owner['since']}. "
            "End that run first, or choose another workdir."
        )

    def _release(self) -> None:
        self._path.unlink()

    def _create(self, path: pathlib.Path) -> bool:
        """Create `path` with its content at once; return False if it exists."""
        complete = self._write_beside(path)
        try:
            os.link(complete, path)
        except FileExistsError:
            # A network file system may have lost the answer that the link was made.
            return complete.stat().st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_without_links(path, complete)
        finally:
            complete.unlink(missing_ok=True)
        return True

    def _write_beside(self, path: pathlib.Path) -> pathlib.Path:
        """Return a new file with the content of the lock in the folder of `path`."""
        complete = path.with_name(f".{FILE}.{uuid.uuid4().hex}")
        write_atomically(complete, self._text())
        return complete

    def _is_filled(self, path: pathlib.Path) -> bool:
        """Return whether an empty lock changes while this waits.

        Without hard links a lock is empty for a moment. A process that creates it may be as slow
        as one that renews it, or both would have the lock.
        """
        self._say(
            f"{path} is empty: waiting up to {self._expiry_seconds:.0f} s "
            "to see whether a run is writing it"
        )
        deadline = time.monotonic() + self._expiry_seconds
        while time.monotonic() < deadline:
            time.sleep(min(0.1, self._expiry_seconds / 10))
            if _read_content(path) != b"":
                return True
        return False

    def _is_void(self, owner: JsonObject, path: pathlib.Path) -> bool:
        """Return whether the owner of the lock at `path` is gone.

        The owner may be on another machine. Then this waits until the lock would have been renewed.
        """
        has_ended = _has_ended(owner)
        if has_ended is not None:
            return has_ended
        self._say(
            f"{path} is of process {owner['pid']} on {owner['host']}: "
            f"waiting up to {self._expiry_seconds:.0f} s to see whether that run is alive"
        )
        deadline = time.monotonic() + self._expiry_seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._expiry_seconds / 10))
            now = _read_owner(path)
            if now is None:
                return True
            if now != owner:
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
            # A full disk may have room again; the run sees a loss at its next check.
            with contextlib.suppress(OSError, WorkdirLost):
                self._renew()


class BucketLock(WorkdirLock):
    """The lock of a workdir in a bucket; arguments and errors as of `WorkdirLock`.

    `check` sends no request while the last renewal is recent: another machine takes over only what
    is not renewed.
    """

    _path: "BucketPath"  # type: ignore[assignment]
    _generation = 0
    _renewed = 0.0  # by the clock `time.monotonic`

    def check(self) -> None:
        """Check the lock; see `WorkdirLock.check`."""
        if not self._enabled:
            return
        if time.monotonic() - self._renewed <= self._expiry_seconds:
            return
        owner = None
        with contextlib.suppress(FileNotFoundError):
            content, _ = self._path.read_generation()
            owner = _parse_owner(content)
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
    if is_in_bucket(folder):
        return BucketLock(folder, enabled=enabled)
    return WorkdirLock(folder, enabled=enabled)


def is_abandoned(folder: pathlib.Path, now: float, expiry_seconds: float) -> bool:
    """Return whether nobody uses a folder that a process has locked, without waiting.

    The owner has ended on this machine, or neither the lock nor the folder was changed for
    `expiry_seconds` before `now`, a time by the clock of the file system.
    """
    owner = _read_owner(folder / FILE)
    if owner is not None:
        has_ended = _has_ended(owner)
        if has_ended is not None:
            return has_ended
    newest = 0.0
    for path in (folder, folder / FILE):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            newest = max(newest, path.stat().st_mtime)
    return now - newest > expiry_seconds


def claim_of(path: pathlib.Path, content: bytes) -> pathlib.Path:
    """Return the claim that a process needs before it replaces `path`, which has this content."""
    owner = _parse_owner(content)
    identity = content
    if owner is not None:
        identity = str(owner["token"]).encode()  # without the number of renewals
    return path.with_name(f".{FILE}.{hashlib.sha256(identity).hexdigest()[:32]}")


def _create_without_links(path: pathlib.Path, complete: pathlib.Path) -> bool:
    """Create `path` where there are no hard links: empty, then replaced by the complete file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    complete.replace(path)
    return True


def _read_owner(path: pathlib.Path) -> JsonObject | None:
    """Return the owner of a lock; None if there is none, or the file is not a lock."""
    content = _read_content(path)
    if content is None:
        return None
    return _parse_owner(content)


def _read_content(path: pathlib.Path) -> bytes | None:
    """Return the content of a file, `_NO_LOCK` for anything else at the path, None for nothing."""
    try:
        return read_bounded(path, _MAX_BYTES)
    except (OSError, ValueError):
        if os.path.lexists(path):
            return _NO_LOCK
        return None


def _parse_owner(content: bytes) -> JsonObject | None:
    """Return the owner that the content of a lock names; None if this module did not write it."""
    try:
        owner: JsonObject = parse_json(content)
        names = owner.keys()
    except (ValueError, AttributeError):
        return None
    if not {"token", "since", *_this_process()} <= names:
        return None
    pid = owner["pid"]
    if type(pid) is not int or not 0 < pid < _MAX_PID:
        return None
    return owner


def _has_ended(owner: JsonObject) -> bool | None:
    """Return whether the owner of a lock has ended; None if its processes are not visible here."""
    here = _this_process()
    for name in ("host", "boot", "namespace"):
        if owner[name] != here[name]:
            return None
    return _find_start(owner["pid"]) != owner["started"]


def _this_process() -> JsonObject:
    """Return what identifies this process on every machine."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    namespace = pathlib.Path("/proc/self/ns/pid")  # containers number their processes themselves
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _find_start(os.getpid()),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "namespace": os.readlink(namespace) if namespace.is_symlink() else "",
    }


def _find_start(pid: int) -> str | None:
    """Return when a process started, which tells it from a later process with its number.

    In clock ticks since the machine started; "" if the system does not say, None if the process has
    ended.
    """
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
    state = fields[0]
    if state in "ZX":  # a zombie has ended
        return None
    return fields[19]
