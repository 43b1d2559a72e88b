"""The client of Google Cloud Storage: one for each process, with time limits and repetition.

Requests that fail with a status of 408, 429 or 5xx, or get no reply, are repeated for up to
`RETRY_SECONDS` since the first failure of any request of the process, but for at least
`LATER_RETRY_SECONDS`. A reply ends this silence.
"""

import atexit
import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT_SECONDS = (10.0, 60.0)
"""Time limits of a connection, and of the wait for the next piece of a reply."""
RETRY_SECONDS = 120.0
LATER_RETRY_SECONDS = 2.0
"""Time limit of a request that begins when others have waited for `RETRY_SECONDS`."""
NO_SUCH_OBJECT = "there is no such object or bucket"
_CONNECTIONS = 64
"""Connections that a process keeps open; further threads open one for each request."""
_MOST_REASON_LETTERS = 200


class NoAnswer(OSError):
    """Cloud Storage does not answer; the state of the object is not known."""


@functools.cache
def set_up_libraries() -> None:
    """Give orbax's libraries the endpoint, time limits and kind of bucket that `get_client` uses.

    orbax finds and commits checkpoints through etils and gcsfs and writes arrays through
    tensorstore. Folders that are objects (hierarchical namespaces) are not used: gcsfs would
    ask for the kind of each bucket by gRPC.
    """
    # Where TensorFlow is installed, etils would use its file system.
    os.environ.setdefault("EPATH_USE_TF", "false")
    import gcsfs  # noqa: I001  # first, so that an error names it
    import aiohttp
    import fsspec
    from google.cloud import storage  # noqa: F401

    connect_seconds, read_seconds = TIMEOUT_SECONDS
    limits = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=read_seconds)
    options: dict[str, Any] = {"requests_timeout": limits, "use_listings_cache": False}
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        options["token"] = "anon"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    fsspec.config.conf["gcs"] = options | fsspec.config.conf.get("gcs", {})
    fsspec.register_implementation("gcs", gcsfs.core.GCSFileSystem, clobber=True)

    # gcsfs logs exceptions that it also raises.
    logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)


@functools.cache
def get_client() -> Any:
    """Return the client of this process, for all threads."""
    set_up_libraries()
    import requests.adapters

    client = _create_client()
    for scheme in ("https://", "http://"):
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS)
        client._http.mount(scheme, adapter)
    client._http.hooks["response"].append(_release_connection)
    atexit.register(client.close)
    return client


def _create_client() -> Any:
    import google.auth
    from google.cloud import storage

    try:
        return storage.Client()
    except google.auth.exceptions.DefaultCredentialsError:
        return storage.Client.create_anonymous_client()  # it can read public buckets
    except OSError:
        return storage.Client(project="none")  # a project is only needed to create buckets


def _release_connection(reply: Any, **options: Any) -> None:
    """Read the content of a failed reply, so that its connection closes at once."""
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
        """Note a reply."""
        self._began = None

    def remaining_seconds(self) -> float:
        """Return the time during which a request that begins now is repeated."""
        if self._began is None:
            return RETRY_SECONDS
        waited_seconds = self._clock() - self._began
        return max(LATER_RETRY_SECONDS, RETRY_SECONDS - waited_seconds)


_silence = _Silence()


def request_options() -> dict[str, Any]:
    """Return the arguments `timeout` and `retry` of a request that begins now."""
    connect_seconds, read_seconds = TIMEOUT_SECONDS
    remaining = _silence.remaining_seconds()
    timeout = (min(connect_seconds, remaining), min(read_seconds, remaining))
    return {"timeout": timeout, "retry": _repeat}


def _repeat(request: Callable[[], T]) -> Callable[[], T]:
    """Return a request that is repeated while the service does not answer."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    retry = DEFAULT_RETRY.with_timeout(_silence.remaining_seconds())
    repeated: Callable[[], T] = retry(request, on_error=_silence.begin)
    return repeated


def client_errors() -> Any:
    """Return the module of the client's exceptions."""
    from google.api_core import exceptions

    return exceptions


@contextlib.contextmanager
def raise_system_errors(path: object) -> Iterator[None]:
    """Raise errors of the client as the corresponding errors of the system, with this path."""
    import requests
    from google.auth.exceptions import GoogleAuthError, InvalidOperation, RefreshError
    from google.cloud.storage.exceptions import DataCorruption

    errors = client_errors()
    name = str(path)
    try:
        yield
        _silence.end()
    except errors.NotFound as error:
        _silence.end()
        raise FileNotFoundError(errno.ENOENT, NO_SUCH_OBJECT, name) from error
    except (errors.Forbidden, errors.Unauthorized) as error:
        _silence.end()
        reason = (
            f"access is denied ({error.code}): the account needs the role "
            "roles/storage.objectUser on the bucket"
        )
        raise PermissionError(errno.EACCES, reason, name) from error
    except errors.PreconditionFailed as error:
        _silence.end()
        reason = "another process has written it meanwhile"
        raise FileExistsError(errno.EEXIST, reason, name) from error
    except (RefreshError, InvalidOperation) as error:  # anonymous requests raise the second
        reason = (
            f"there are no valid credentials ({_describe(error)}): "
            "run `gcloud auth application-default login`"
        )
        raise PermissionError(errno.EACCES, reason, name) from error
    except (
        errors.GoogleAPIError,
        GoogleAuthError,
        DataCorruption,
        requests.RequestException,
    ) as error:
        reason = f"Cloud Storage does not answer ({_describe(error)})"
        raise NoAnswer(errno.EIO, reason, name) from error


def _describe(error: BaseException) -> str:
    """Return the status of the last reply, or the first line of the error."""
    cause = error.__cause__ or error  # an error after the last repetition has the cause
    reply = getattr(cause, "response", None)
    code = getattr(cause, "code", None) or getattr(reply, "status_code", None)
    if code:
        return f"status {code}"
    first_line = str(cause).strip().partition("\n")[0][:_MOST_REASON_LETTERS]
    return first_line or type(cause).__name__
