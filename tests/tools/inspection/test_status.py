"""The state of runs, read from their workdirs."""

import json
import shutil

import pytest

from tests import tiny
from tests.integration.commands import run, succeed
from tests.rejections import rejects
from vit_jax.tools.inspection.status import find_runs, read_status, seconds_left, total_steps
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.workdir import claim
from vit_jax.train.run_files import MAX_ERROR, write_error

LATER = 2e9


def read_last(workdir, name):
    """Return the last value of a metric that the run has written."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    values = [values[name] for values in map(json.loads, lines) if name in values]
    return values[-1]


@pytest.fixture
def workdir(tiny_run, tmp_path):
    return shutil.copytree(tiny_run.workdir, tmp_path / "runs" / "one")


def test_an_ended_run(workdir):
    found = read_status(workdir, LATER)

    assert found.state == "ended"
    assert found.step == 6
    assert found.total_steps == 6
    assert found.error is None
    assert found.train_loss == read_last(workdir, "train_loss")
    assert found.test_accuracy == read_last(workdir, "test_accuracy")
    assert found.checkpoint_step == 6
    assert found.goodput == read_last(workdir, "goodput")
    assert found.seconds_left is None
    assert found.seconds_since_written > 1e7


def test_a_run_is_running_while_its_lock_is_held(workdir):
    (workdir / "summary.json").unlink()
    assert read_status(workdir, LATER).state == "stopped"

    with WorkdirLock(workdir):
        assert read_status(workdir, LATER).state == "running"
    assert read_status(workdir, LATER).state == "stopped"


def test_a_run_that_a_sweep_has_paused(workdir):
    (workdir / "summary.json").unlink()
    (workdir / "pause.json").write_text("{}")

    assert read_status(workdir, LATER).state == "paused"


def test_an_ended_run_with_phases_has_a_known_length(workdir):
    config = json.loads((workdir / "config.json").read_text())
    config["phases"] = {"small": {"until": "2 steps"}}
    (workdir / "config.json").write_text(json.dumps(config))

    assert read_status(workdir, LATER).total_steps == 6

    (workdir / "summary.json").unlink()
    assert read_status(workdir, LATER).total_steps is None


def test_time_left_is_that_of_recent_lines():
    lines = []
    for step in range(5, 101, 5):
        lines.append({"step": step, "wall_seconds": 100.0 + 2 * step})

    lines[0]["wall_seconds"] = 0.0  # compiling

    assert seconds_left(lines, 300) == pytest.approx(2 * 200)
    assert seconds_left(lines[:1], 300) is None
    assert seconds_left(lines, None) is None


def test_length_of_a_run():
    config = {"global_batch": 50, "total": "3 epochs"}

    assert total_steps(config, 1000) == 60
    assert total_steps(config, None) is None
    assert total_steps(config | {"total": "7 steps"}, None) == 7


def test_the_error_that_ended_a_run_is_shown_until_it_starts_again(tmp_path):
    workdir = tmp_path / "run"
    with pytest.raises(RuntimeError), claim(str(workdir), tiny.config()):
        raise RuntimeError("the network | has gone")

    found = read_status(workdir, LATER)
    assert found.state == "stopped"
    assert found.step is None
    assert found.error == "RuntimeError: the network | has gone"
    assert "RuntimeError: the network" in succeed(["status", str(workdir)])

    with claim(str(workdir), tiny.config()):
        assert read_status(workdir, LATER).error is None


def test_a_diverged_run_names_the_step(workdir, monkeypatch):
    divergence = {"step": 5}
    monkeypatch.setattr(
        "vit_jax.tools.inspection.status.read_divergence", lambda folder: divergence
    )
    assert read_status(workdir, LATER).state == "ended"

    (workdir / "summary.json").unlink()
    found = read_status(workdir, LATER)

    assert found.state == "diverged"
    assert found.error == f"step 5 is not finite: vit-jax replay {workdir}"


OTHER_CONFIG = {
    "architecture": "vit",
    "norm_pix_loss": False,
    "auxiliary_loss": False,
    "error": 1,
    "metrics": {"a": "b"},
}


@pytest.fixture
def two_runs(workdir, tmp_path):
    """A folder with two runs, and weights of another program."""
    runs = tmp_path / "runs"
    other = shutil.copytree(workdir, runs / "deep" / "two")
    (runs / "weights").mkdir()
    (runs / "weights" / "config.json").write_text(json.dumps(OTHER_CONFIG))
    return runs, workdir, other


def test_runs_of_folders(two_runs):
    runs, workdir, other = two_runs

    assert find_runs([str(runs)]) == [other, workdir]
    assert find_runs([str(workdir), str(runs)]) == [workdir, other]
    with rejects("config.json"):
        find_runs([str(workdir / "checkpoints")])


def test_the_verb(two_runs):
    runs, workdir, other = two_runs
    # No run is running, so following ends at once.
    table = succeed(["status", str(runs), "--follow=9"])
    first, second = json.loads(
        succeed(
            [
                "status",
                str(workdir),
                str(other),
                "--json",
            ]
        )
    )

    assert table.splitlines()[0].split(" | ")[0].strip("| ") == "run"
    assert table.count("| ended ") == 2
    assert first["run"] == str(workdir)
    assert second["run"] == str(other)
    assert run(["status", str(workdir), "--follow=9", "--json"]).code == 2


def test_following_ends_with_the_run(workdir, monkeypatch):
    (workdir / "summary.json").unlink()
    lock = WorkdirLock(workdir)
    lock.__enter__()
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        lock.__exit__(None, None, None)

    monkeypatch.setattr("vit_jax.cli.run_reports.time.sleep", sleep)
    table = succeed(["status", str(workdir), "--follow=7"])

    assert slept == [7.0]
    assert "| running " in table
    assert "| stopped " in table


def test_a_damaged_error_file_is_an_error(workdir):
    (workdir / "summary.json").unlink()

    write_error(workdir, OSError("x" * 10_000))
    assert len(read_status(workdir, LATER).error) <= MAX_ERROR + 1  # an ellipsis

    (workdir / "error.json").write_text("[]")
    with rejects("error.json"):
        read_status(workdir, LATER)
