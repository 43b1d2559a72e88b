"""Workarounds for orbax: tracebacks, leaks of memory, programs compiled to save small arrays.

They need three modules of `orbax.checkpoint._src`: 0.12.8 has no public option for them. Of the
store of array metadata, `ArrayOptions.Saving` in `orbax.checkpoint.experimental.v1` has one, beside
`min_slice_bytes_for_replica_parallel`. V1 has none to skip the question about folders of a bucket
(`gcs_utils`), nor to count no bytes at each save (`tensorstore_utils`).
"""

import functools
import logging
import pathlib
import sys
import threading
import warnings
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

LEAST_SLICE_BYTES = 2**16


@functools.cache  # once in a process
def apply() -> None:
    """Silence errors that `CheckpointStore` raises anyway, and stop a leak of memory.

    Python prints an error in orbax's threads and coroutines with over a hundred lines of
    tracebacks. If one write of a checkpoint fails, orbax abandons the writes that have not begun,
    and Python warns of each.

    For its log orbax counts bytes by `tensorstore.experimental_collect_matching_metrics`, which
    loses about 3 kB at each call (tensorstore 0.1.86): 0.1 MB at each save.

    Orbax asks whether a bucket has folders, for which an account needs more than access to objects.
    Without the answer it treats all buckets as flat, which works with both kinds.
    """
    logging.getLogger("asyncio").addFilter(_is_retrieved)
    threading.excepthook = _ignore_orbax(threading.excepthook)
    sys.unraisablehook = _ignore_orbax(sys.unraisablehook)
    warnings.filterwarnings(
        "ignore", r"coroutine '.*serialize.*' was never awaited", RuntimeWarning
    )
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False
    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
        tensorstore_utils.get_tensorstore_raw_bytes = lambda *direction: 0


def build_array_handlers() -> ocp.type_handlers.TypeHandlerRegistry:
    """Return the handlers of arrays of orbax, with another rule for small arrays.

    With the handlers of orbax, devices that hold the same array share the work of saving it,
    however small it is: each copies a slice, and every slice is a program, so that eight devices
    compile for seconds at a small network's first save. Here one device saves an array whose slices
    would be smaller than `LEAST_SLICE_BYTES`.
    """
    handler = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=LEAST_SLICE_BYTES,
        array_metadata_store=array_metadata_store.Store(),  # the default of orbax's registry
    )
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, handler),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (np.number, ocp.type_handlers.ScalarHandler()),
    )


def list_keys(item: pathlib.Path) -> list[str]:
    """Return the keys of an item's arrays that a reader of orbax would find."""
    specification = tensorstore_utils.build_kvstore_tspec(str(item), use_ocdbt=True)
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    store = tensorstore.KvStore.open(specification, context=context).result()
    return [key.decode() for key in store.list().result()]


def _is_retrieved(record: logging.LogRecord) -> bool:
    """Return False for messages on errors of coroutines that nobody awaited."""
    return "exception was never retrieved" not in record.getMessage()


def _ignore_orbax(hook: Any) -> Any:
    """Return a hook of uncaught errors that ignores errors of orbax."""

    def report_others(report: Any) -> None:
        if not _is_of_orbax(report.exc_value, report.exc_traceback):
            hook(report)

    return report_others


def _is_of_orbax(error: BaseException | None, trace: TracebackType | None) -> bool:
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        # A read or write that ends after another one failed; its traceback begins in asyncio.
        return True
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("orbax."):
            return True
        trace = trace.tb_next
    return False
