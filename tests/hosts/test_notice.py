"""The preemption notice: read from a server in the place of Compute Engine's, and converted to one SIGTERM."""

import http.server
import signal
import threading

import pytest

from vit_jax.hosts import notice
from vit_jax.hosts.notice import MAX_FAILURES, Notice


@pytest.fixture
def killed(monkeypatch):
    """Signals that were sent, and an event that one was."""
    signals = []
    event = threading.Event()
    monkeypatch.setattr(notice, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(notice, "RESPONSE_SECONDS", 120)
    monkeypatch.setattr(
        "vit_jax.hosts.notice.os.kill",
        lambda _, number: (signals.append(number), event.set()),
    )

    return signals, event


def scripted(*values):
    """A notice whose reads are scripted, and those that are left."""
    left = list(values)

    def read(_):
        value = left.pop(0)
        if isinstance(value, OSError):
            raise value
        return value

    return Notice(read), left


def test_the_notice_of_a_server_becomes_one_sigterm(
    killed,
    tmp_path,
    monkeypatch,
):
    signals, event = killed
    values = {"preempted": "FALSE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"

            self.send_response(200)
            self.end_headers()
            self.wfile.write(values[self.path.removeprefix("/instance/")].encode())

        def log_message(self, *_):
            pass

    product = tmp_path / "product_name"
    product.write_text("Google Compute Engine\n")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.01},
            daemon=True,
        ).start()
        monkeypatch.setattr(
            notice,
            "METADATA",
            f"http://127.0.0.1:{server.server_port}/instance",
        )
        monkeypatch.setattr(notice, "PRODUCT", product)
        Notice().start()

        assert event.wait(120)

        server.shutdown()

    assert signals == [signal.SIGTERM]


def test_polling_goes_on_until_the_notice(killed):
    failures = [OSError("refused")] * (MAX_FAILURES - 1)
    watch, left = scripted(
        "FALSE",
        "NONE",
        *failures,
        "FALSE",
        "NONE",
        *failures,
        "TRUE",
        "never read",
    )
    watch.poll()

    assert killed[0] == [signal.SIGTERM]
    assert left == ["never read"]


def test_without_access_polling_ends(killed):
    watch, left = scripted(*[OSError("refused")] * MAX_FAILURES, "TRUE")
    watch.poll()

    assert killed[0] == []
    assert left == ["TRUE"]


def test_after_the_end_of_a_run_nothing_is_sent(killed):
    watch, left = scripted("TRUE")
    watch.stop()
    watch.poll()

    assert killed[0] == []
    assert left == ["TRUE"]


def test_elsewhere_nothing_is_polled(monkeypatch, tmp_path):
    monkeypatch.setattr(
        threading,
        "Thread",
        lambda **_: pytest.fail("a thread was started"),
    )
    (tmp_path / "product_name").write_text("Standard PC\n")

    for name in ("product_name", "missing"):
        monkeypatch.setattr(notice, "PRODUCT", tmp_path / name)
        Notice().start()
