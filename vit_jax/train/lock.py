"""One run in one workdir: a lock file that a crash does not leave behind and that network file systems keep.

File locks of the system are not passed on by every network file system. The file names its owner instead, and the owner
renews it. On the same machine a lock is void when the owner's process has ended; elsewhere when it is not renewed.
"""

import contextlib
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from vit_jax.files import read_json, write_atomically

FILE = "run.lock"
MAX_BYTES = 2**16
RENEWAL_SECONDS = 5.0
EXPIRY_SECONDS = 30.0  # without renewal, as another machine sees it; clocks need not agree


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
        self.folder, self._path, self._enabled, self._say = folder, folder / FILE, enabled, say
        self._renewal_seconds, self._expiry_seconds = renewal_seconds, expiry_seconds
        self._owner = {"token": uuid.uuid4().hex, **_this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._renewals = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="workdir-lock", daemon=True)

    def __enter__(self) -> Self:
        if self._enabled:
            if (other := _read(self._path)) is not None and not self._is_void(other):
                raise ValueError(
                    f"workdir {str(self.folder)!r} is used by another run: process {other['pid']} on {other['host']}, "
                    f"since {other['since']}. End that run first, or choose another workdir."
                )
            self._renew()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._is_closing.set()
            self._thread.join()
            with contextlib.suppress(OSError, WorkdirLost):
                self.check()
                self._path.unlink()

    def check(self) -> None:
        """Call before writing into the workdir.

        Raises:
          WorkdirLost: it is not the folder any more that was locked, or another run has it.
        """
        if not self._enabled:
            return
        found = _read(self._path)
        if found is None:
            raise WorkdirLost(
                f"workdir {str(self.folder)!r} was removed or replaced while the run used it, with all it holds. "
                "Restore the folder and start the same command again, or start anew."
            )
        if found["token"] != self._owner["token"]:
            raise WorkdirLost(
                f"workdir {str(self.folder)!r} was taken over by process {found['pid']} on {found['host']} at "
                f"{found['since']}, because this one did not renew its lock for {self._expiry_seconds:.0f} s."
            )

    def _is_void(self, other: dict[str, Any]) -> bool:
        """Whether the owner of a lock is gone; may wait until the lock would have been renewed."""
        if (has_ended := _has_ended(other)) is not None:
            return has_ended
        self._say(
            f"{self._path} is of process {other['pid']} on {other['host']}: waiting up to {self._expiry_seconds:.0f} s "
            "to see whether that run is alive"
        )
        deadline = time.monotonic() + self._expiry_seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._expiry_seconds / 10))
            if (now := _read(self._path)) is None:
                return True
            if now != other:
                return False
        return True

    def _renew(self) -> None:
        write_atomically(self._path, json.dumps({**self._owner, "renewals": self._renewals}) + "\n")
        self._renewals += 1

    def _keep_renewing(self) -> None:
        while not self._is_closing.wait(self._renewal_seconds):
            try:
                self.check()
                self._renew()
            except (OSError, WorkdirLost):  # a full disk may have room again; what is lost the run will see
                continue


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
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return now - newest > expiry_seconds


def _has_ended(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner of a lock has ended; None if its processes are not visible from this one."""
    here = _this_process()
    if any(owner[name] != here[name] for name in ("host", "boot", "namespace")):
        return None
    return bool(_started(owner["pid"]) != owner["started"])


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """The owner of a lock; None if there is none, or none that can be read: such a file was not written by us."""
    try:
        owner = read_json(path, MAX_BYTES)
        return owner if {"token", "since", *_this_process()} <= owner.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _this_process() -> dict[str, Any]:
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
    """What tells a process from others that have had its number, "" where the system does not say; None if it ended."""
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
    return None if fields[0] in "ZX" else fields[19]  # a zombie has ended; clock ticks since the machine started
