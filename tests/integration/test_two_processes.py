"""Two real processes on this machine train as one, and notice when they do not share a workdir."""

import pytest

from tests.integration import commands
from tests.integration.commands import finish, spoken
from tests.integration.launchers import explicit

pytestmark = pytest.mark.processes
OPTIONS = ("total=10 steps", "checkpoint.every=5 steps", "evaluation.every=10 steps", "logging.every=1 steps")


def test_two_processes_of_two_devices_train_as_one_of_four(command, tmp_path):
    results = finish(command.start_all(tmp_path / "two", explicit(2), *OPTIONS, devices=2))
    assert [code for *_, code in results] == [0, 0], results
    assert spoken(results[1][0]) == [], "only the first process speaks"
    one = command.run(tmp_path / "one", *OPTIONS, devices=4)
    assert one.returncode == 0, one.stderr
    curves = [
        [line["train_loss"] for line in commands.metrics(tmp_path / name) if "train_loss" in line]
        for name in ("two", "one")
    ]
    assert len(curves[0]) == 10
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    summaries = [commands.summary(tmp_path / name) for name in ("two", "one")]
    assert summaries[0]["num_processes"] == 2
    assert summaries[0]["test_accuracy"] == summaries[1]["test_accuracy"]
    assert summaries[0]["test_loss"] == pytest.approx(summaries[1]["test_loss"], rel=1e-4)


def test_a_workdir_that_is_not_shared_is_noticed(command, tmp_path):
    processes = [command.start(tmp_path / name, *OPTIONS, **own) for name, own in zip("ab", explicit(2), strict=True)]
    results = finish(processes)
    for _, err, code in results:
        assert code == 2, err
        assert "is not the same folder in every process" in err


def test_half_a_set_of_variables_is_an_error(command, tmp_path):
    result = command.run(tmp_path, *OPTIONS, VIT_JAX_NUM_PROCESSES="2")
    assert result.returncode == 2
    assert "VIT_JAX_COORDINATOR, VIT_JAX_PROCESS_ID" in result.stderr


def test_a_workdir_that_the_first_process_refuses_ends_both(command, tmp_path):
    (tmp_path / "file").write_text("")
    results = finish(command.start_all(tmp_path / "file" / "run", explicit(2), *OPTIONS))
    assert [code for *_, code in results] == [2, 2], results
    assert "cannot be written" in results[0][1]
