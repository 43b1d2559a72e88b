"""The machine's word that it will be taken away, from a server that stands in for Compute Engine's."""

import http.server
import signal
import threading

import pytest

from vit_jax.hosts import notice
from vit_jax.hosts.notice import Notice


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """What the metadata say; a path that is missing is refused. Also the notice that asks there, and what it kills."""
    says, asked, killed, heard = {}, [], [], threading.Event()

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            asked.append(self.path)
            found = self.path.removeprefix("/instance/") in says
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(says.get(self.path.removeprefix("/instance/"), "").encode())

        def log_message(self, *_):
            pass

    def kill(process, number):
        killed.append(number)
        heard.set()

    monkeypatch.setattr(notice, "POLL_SECONDS", 0.02)
    monkeypatch.setattr("vit_jax.hosts.notice.os.kill", kill)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    product = tmp_path / "product_name"
    product.write_text("Google Compute Engine\n")
    watch = Notice(f"http://127.0.0.1:{server.server_port}/instance", product)
    yield watch, says, asked, killed, heard, product
    watch.stop()
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "word"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_the_notice_becomes_one_sigterm(machine, name, word):
    watch, says, asked, killed, heard, _ = machine
    says |= {"preempted": "FALSE", "maintenance-event": "NONE"}
    watch.start()
    assert not heard.wait(0.2)
    assert len(asked) > 2
    says[name] = word
    assert heard.wait(10)
    assert not heard.clear()
    assert not heard.wait(0.1)
    assert killed == [signal.SIGTERM]


def test_who_may_not_ask_stops_asking(machine):
    watch, _, asked, killed, heard, _ = machine
    watch.start()
    assert not heard.wait(0.5)
    assert len(asked) == notice.MAX_FAILURES
    assert killed == []


def test_elsewhere_nobody_is_asked(machine):
    watch, says, asked, _, heard, product = machine
    says["preempted"] = "TRUE"
    product.write_text("Standard PC\n")
    watch.start()
    product.unlink()
    watch.start()
    assert not heard.wait(0.1)
    assert asked == []


def test_after_its_end_a_run_gets_no_signal(machine):
    watch, says, _, killed, heard, _ = machine
    watch.start()
    watch.stop()
    says["preempted"] = "TRUE"
    assert not heard.wait(0.2)
    assert killed == []
