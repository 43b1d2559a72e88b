"""Silences what Python prints of errors in orbax's background threads and coroutines.

`CheckpointStore` raises each such error once; the tracebacks around it, over a hundred lines where a disk is full, say
nothing more.
"""

import functools
import logging
import sys
import threading
from types import TracebackType
from typing import Any


@functools.cache  # once in a process
def silence() -> None:
    """Filters the hooks of threads and destructors, and asyncio's log."""
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    threading.excepthook = _without_orbax(threading.excepthook)
    sys.unraisablehook = _without_orbax(sys.unraisablehook)


def _without_orbax(hook: Any) -> Any:
    return lambda report: None if _is_of_orbax(report.exc_value, report.exc_traceback) else hook(report)


def _is_of_orbax(error: BaseException | None, trace: TracebackType | None) -> bool:
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return True  # a read or write that ends after another one failed; its traceback begins in asyncio
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("orbax."):
            return True
        trace = trace.tb_next
    return False
