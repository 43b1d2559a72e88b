"""Launchers' variables, played to real processes of this machine, which find each other by them and train.

Those of SLURM and Open MPI are played in `test_failures.py`.
"""

import socket

import pytest

from tests.integration import commands
from tests.integration.commands import finish, spoken
from tests.integration.launchers import explicit, jobset

pytestmark = pytest.mark.processes
OPTIONS = ("total=6 steps", "checkpoint.every=6 steps", "evaluation.every=6 steps", "logging.every=1 steps")


def test_two_processes_of_a_jobset_find_each_other_and_train(command, tmp_path):
    results = finish(command.start_all(tmp_path, jobset(2), *OPTIONS))
    assert [code for *_, code in results] == [0, 0], results
    assert spoken(results[0][0])[0].startswith("2 processes by Kubernetes JobSet, the first at ")
    assert spoken(results[1][0]) == []
    assert [err for _, err, _ in results] == ["", ""]
    assert commands.summary(tmp_path)["num_processes"] == 2


def test_a_process_whose_others_do_not_come_says_so(command, tmp_path):
    first, second = explicit(2)
    (process,) = command.start_all(tmp_path, [second], *OPTIONS, VIT_JAX_JOIN_SECONDS="2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 76
    assert f"finds nobody at {first['VIT_JAX_COORDINATOR']}, where process 0 should be" in err
    assert len(err.splitlines()) == 1
    (process,) = command.start_all(tmp_path, [first], *OPTIONS, VIT_JAX_JOIN_SECONDS="2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 76
    assert "sees others missing" in err
    assert "Not all processes came within 2 s" in err


def test_a_port_that_is_taken_is_not_waited_for_in_silence(command, tmp_path):
    environment = explicit(2)[0]
    with socket.socket() as other:
        port = environment["VIT_JAX_COORDINATOR"].rpartition(":")[2]
        other.bind(("", int(port)))
        other.listen()
        (process,) = command.start_all(tmp_path, [environment], *OPTIONS, VIT_JAX_JOIN_SECONDS="2")
        _, err = process.communicate(timeout=120)
    assert process.returncode == 76
    assert f"waits for port {port}, which another program still holds" in err
