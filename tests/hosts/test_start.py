"""The start of a run of one process, errors that all share, and the service that stands beside the first process."""

import importlib.util
import json
import subprocess
import sys
import time
import types

import jax
import pytest

from tests.integration.launchers import reserve_port
from vit_jax import hosts
from vit_jax.hosts.cluster import ProcessInfo
from vit_jax.hosts.join import start_service, tell_service


@pytest.fixture
def fresh(monkeypatch):
    """A second copy of the module, as in a new process that no launcher started."""
    monkeypatch.setenv("VIT_JAX_NUM_PROCESSES", "1")
    spec = importlib.util.find_spec("vit_jax.hosts")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    return module


def test_one_process_does_not_join(fresh, capsys):
    fresh.start()

    assert fresh.this_process().process_id == 0
    assert fresh.this_process().num_processes == 1
    assert fresh.is_first()

    fresh.wait_for_all("alone")

    assert capsys.readouterr().out == ""


class Service:
    """The coordination service's client, for one of two processes; the other is there at once."""

    def __init__(self):
        self.barriers = []
        self.said = {}

    def wait_at_barrier(self, name, timeout_in_ms):
        self.barriers.append((name, timeout_in_ms))

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.said
        self.said |= {key: value, key[:-1] + "1": json.dumps(f"{json.loads(value)} of the other")}

    def key_value_dir_get(self, key):
        return [
            (name, value)
            for name, value in reversed(self.said.items())
            if name.startswith(f"{key}/")
        ]


@pytest.fixture
def service(monkeypatch):
    """That of the first of two processes."""
    service = Service()
    monkeypatch.setattr(
        hosts,
        "global_state",
        types.SimpleNamespace(client=service),
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    return service


def test_processes_wait_for_each_other_by_the_service_whose_time_limit_is_ours(
    service,
    monkeypatch,
):
    """A collective would begin with connections, for which Gloo waits no longer than 30 s."""
    monkeypatch.setattr(hosts, "multihost_utils", None)
    hosts.wait_for_all("here")
    hosts.wait_for_all("here")

    assert hosts.gather("") == ["", " of the other"]
    assert min(limit for _, limit in service.barriers) >= 3600_000


def test_gathered_values_do_not_fill_the_service(service):
    """A value that one process is slow to read is not overwritten: all read it before the next one."""
    for number in range(10):
        assert hosts.gather(f"{number}") == [f"{number}", f"{number} of the other"]
        assert {f'"{n}"' for n in range(max(0, number - 1), number + 1)} <= set(
            service.said.values()
        )

    assert len(service.said) == 4
    assert len(set(service.barriers)) == 1


def test_cpus_connect_when_all_processes_are_there(fresh, service):
    fresh.multihost_utils = types.SimpleNamespace(
        process_allgather=lambda _: service.barriers.append("collective")
    )
    fresh.global_state = types.SimpleNamespace(
        client=service,
        process_id=0,
        num_processes=2,
    )
    fresh.PeerMonitor = lambda *_, **__: types.SimpleNamespace(start=lambda: None)
    fresh.atexit = types.SimpleNamespace(register=lambda *_: None)
    fresh.start()
    fresh.start()  # has no effect
    (here, limit), (compiled, _), collective = service.barriers

    assert limit >= 3600_000
    assert collective == "collective"

    expected = ("vit_jax/devices", "vit_jax/compiled")
    assert (here, compiled) == expected, "compiling takes long on a busy machine"


@pytest.mark.parametrize("seconds", ["4", "100", "soon"])
def test_an_invalid_time(fresh, monkeypatch, seconds):
    monkeypatch.setenv("VIT_JAX_LOST_SECONDS", seconds)
    with pytest.raises(ValueError, match=f"VIT_JAX_LOST_SECONDS={seconds}: give 5 to 90"):
        fresh.start()


def test_errors_are_reported_unless_all_processes_raise_them(monkeypatch):
    heard = []
    monkeypatch.setattr(hosts.this_process(), "fail", heard.append)

    with pytest.raises(KeyError), hosts.ends_together(KeyError):
        raise KeyError("all")

    assert heard == []

    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"), hosts.ends_together(KeyError):
        raise error

    assert heard == [error]


def process_info():
    return ProcessInfo(
        launcher="test",
        coordinator=f"127.0.0.1:{reserve_port()}",
        num_processes=2,
        process_id=0,
    )


def test_the_service_continues_after_the_first_process_for_the_given_time():
    service = start_service(process_info())

    assert service is not None

    tell_service(service, 60)
    tell_service(service, 1)
    began = time.monotonic()
    service.stdin.close()

    assert service.wait(timeout=300) == 0
    assert time.monotonic() - began > 0.9  # at least, however busy the machine


def test_a_jaxlib_that_has_no_such_service(monkeypatch):
    """Then JAX starts its own, in the first process."""
    popen = subprocess.Popen

    def without(words, **options):
        program = (
            "import sys; sys.modules['jaxlib'] = None; sys.argv = sys.argv[1:]; import runpy; "
        )
        program += "runpy.run_path(sys.argv[0], run_name='__main__')"

        return popen([words[0], "-c", program, *words[2:]], **options)

    monkeypatch.setattr(subprocess, "Popen", without)

    assert start_service(process_info()) is None


def test_an_address_that_cannot_be_listened_on(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/echo")  # prints something else than ready
    with pytest.raises(ValueError, match="The first process cannot listen on"):
        start_service(process_info())
