"""SIGTERM and Ctrl-C end every verb in order.

Temporary files are removed, one line is printed, no process is left. Both raise an exception in the
main thread, so that every context is left. During its steps a run has its own handlers, which save
first: `train.interruption`.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NoReturn

SECOND_AFTER = 5.0  # seconds: launchers often send a signal twice, to the group and to the process


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived. It is treated as Ctrl-C everywhere, apart from the exit code."""

    exit_code = 75  # hosts.exits.PREEMPTED: the package `hosts` imports JAX, and help must be fast


Hook = Callable[["sys.UnraisableHookArgs"], object]

_asked_at: float | None = None  # when the first SIGTERM arrived
_raised = threading.Event()  # a handler has raised its exception
_is_sent_again = threading.Event()  # by `_send_again`, perhaps more than once


@contextlib.contextmanager
def end_in_order() -> Iterator[None]:
    """Raise `Terminated` in this context when SIGTERM arrives, also for an error that follows from it."""
    global _asked_at
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    _asked_at = None
    _raised.clear()
    hook = sys.unraisablehook
    on_sigterm = signal.getsignal(signal.SIGTERM)
    on_sigint = signal.getsignal(signal.SIGINT)
    sys.unraisablehook = again = _send_again(hook)
    take_sigterm()
    if on_sigint is signal.default_int_handler:  # ignored by programs in a shell's background
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if _asked_at is None:
            raise
        raise Terminated from error
    finally:
        if _count_processes() == 1:  # with several, JAX has it since they joined
            signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGINT, on_sigint)
        if sys.unraisablehook is again:
            sys.unraisablehook = hook


def take_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in the main thread."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    global _asked_at
    now = time.monotonic()
    if _asked_at is None:
        _asked_at = now
        _raised.set()
        raise Terminated
    if now - _asked_at > SECOND_AFTER:  # the clean-up may hang; until then it is not disturbed
        leave(Terminated(), "stopped at once by a second SIGTERM")


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _raised.is_set() and _is_sent_again.is_set():
        return
    _raised.set()
    raise KeyboardInterrupt


def _send_again(hook: Hook) -> Hook:
    """Return a hook that sends a signal again if its exception was raised in a callback, where Python drops it.

    One of JAX's runs at every garbage collection.
    """

    def handle(report: "sys.UnraisableHookArgs") -> None:
        global _asked_at
        if not issubclass(report.exc_type, KeyboardInterrupt):  # the exception itself may be None
            hook(report)
            return
        _asked_at = None
        _raised.clear()
        number = signal.SIGINT
        if issubclass(report.exc_type, Terminated):
            number = signal.SIGTERM
        threading.Thread(target=send, args=(number,), daemon=True).start()

    def send(number: int) -> None:
        """Send a signal when the main thread has left the hook, which would drop the exception again.

        A signal that arrives just before a system call does not end that call, so it is sent until
        its handler runs.
        """
        main_thread = threading.main_thread().ident or 0
        while _runs_in(main_thread, handle.__code__):
            time.sleep(0.01)
        _is_sent_again.set()
        while not _raised.is_set():
            os.kill(os.getpid(), number)
            _raised.wait(0.1)
        time.sleep(0.1)  # for a signal that was sent as the handler ran
        _is_sent_again.clear()

    return handle


def _runs_in(thread: int, code: CodeType) -> bool:
    """Return True while a function with this code is on the stack of a thread."""
    frames = walk_stack(sys._current_frames().get(thread))
    return any(frame.f_code is code for frame, _ in frames)


def _count_processes() -> int:
    """Return how many processes the verb has; `hosts` may be not imported, or in part."""
    this_process = _find_process()
    if this_process is None:
        return 1
    return this_process.num_processes


def _find_process() -> Any:
    """Return this process among those of the verb, None before `hosts` is imported."""
    this_process = getattr(sys.modules.get("vit_jax.hosts"), "this_process", None)
    if this_process is None:
        return None
    return this_process()


def leave(error: KeyboardInterrupt, words: str = "") -> NoReturn:
    """Print one line and end the process, its workers and the other processes of the verb.

    A normal exit during an import or a compilation may crash.
    """
    exit_code = 128 + signal.SIGINT
    usual = "stopped"
    if isinstance(error, Terminated):
        exit_code = Terminated.exit_code
        usual = "stopped by SIGTERM; repeat the command"
    print(f"vit-jax: {words or usual}", file=sys.stderr, flush=True)

    this_process = _find_process()
    if this_process is not None:
        this_process.leave(exit_code)
    os._exit(exit_code)


@contextlib.contextmanager
def join_processes() -> Iterator[None]:
    """Join the other processes, if there are any; an error or a signal in one of them ends all."""
    from vit_jax import hosts

    with hosts.ends_together():
        hosts.start()
        if hosts.this_process().num_processes > 1:
            take_sigterm()  # JAX's preemption service has it since they joined, and only notes it
        yield
