"""Exit codes of a run, on which launchers act; `train/README.md` has a table of them."""

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn

from vit_jax.storage.files import clean_up
from vit_jax.text.printable import printable_lines

FAILED = 1  # an error that may occur again: a full disk, a loss that is not finite, a bug
MISUSED = 2  # the user has to change something: an option, the data, the workdir
PREEMPTED = 75  # ended by a signal, saved; sysexits.h: "temporary failure, try again"
LOST = 76  # another process was lost, hangs or did not join: start all of them again
STOPPED = 130  # Ctrl-C twice: at once, without saving


def find_exit_code(error: BaseException) -> int:
    """Return the exit code of a run that ends with this error."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "exit_code", STOPPED)  # `cli.stop.Terminated` has a code
    if isinstance(error, ValueError):
        return MISUSED
    return FAILED


def say(message: str) -> None:
    """Print a line to the log in one write."""
    sys.stdout.flush()
    os.write(2, f"vit-jax: {printable_lines(message)}\n".encode(errors="replace"))


def leave_at_once(exit_code: int) -> NoReturn:
    """End the process and its workers without waiting for anything."""
    for child in multiprocessing.active_children():
        child.kill()
    clean_up()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code)
