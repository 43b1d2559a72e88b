"""The state of runs, from their workdirs."""

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


@pytest.fixture
def workdir(tiny_run, tmp_path):
    return shutil.copytree(tiny_run.workdir, tmp_path / "runs" / "one")


def test_an_ended_run(workdir):
    found = read_status(workdir, LATER)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]

    assert (found.state, found.step, found.total_steps, found.error) == ("ended", 6, 6, None)
    assert found.train_loss == [line["train_loss"] for line in lines if "train_loss" in line][-1]
    assert (
        found.test_accuracy
        == [line["test_accuracy"] for line in lines if "test_accuracy" in line][-1]
    )
    assert (found.checkpoint_step, found.seconds_left) == (6, None)
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
    lines = [{"step": step, "wall_seconds": 100.0 + 2 * step} for step in range(5, 101, 5)]
    lines[0]["wall_seconds"] = 0.0  # compiling

    assert seconds_left(lines, 300) == pytest.approx(2 * 200)
    assert seconds_left(lines[:1], 300) is seconds_left(lines, None) is None


def test_length_of_a_run():
    config = {"global_batch": 50, "total": "3 epochs"}

    assert (total_steps(config, 1000), total_steps(config, None)) == (60, None)
    assert total_steps(config | {"total": "7 steps"}, None) == 7


def test_the_error_that_ended_a_run_is_shown_until_it_starts_again(tmp_path):
    workdir = tmp_path / "run"
    with pytest.raises(RuntimeError), claim(str(workdir), tiny.config()):
        raise RuntimeError("the network | has gone")

    found = read_status(workdir, LATER)
    assert (found.state, found.step, found.error) == (
        "stopped",
        None,
        "RuntimeError: the network | has gone",
    )
    assert "RuntimeError: the network" in succeed(["status", str(workdir)])

    with claim(str(workdir), tiny.config()):
        assert read_status(workdir, LATER).error is None


def test_a_diverged_run_names_the_step(workdir, monkeypatch):
    monkeypatch.setattr(
        "vit_jax.tools.inspection.status.read_divergence", lambda folder: {"step": 5}
    )
    assert read_status(workdir, LATER).state == "ended"

    (workdir / "summary.json").unlink()
    found = read_status(workdir, LATER)

    assert (found.state, found.error) == (
        "diverged",
        f"step 5 is not finite: vit-jax replay {workdir}",
    )


def test_the_verb(workdir, tmp_path):
    other = shutil.copytree(workdir, tmp_path / "runs" / "deep" / "two")
    (tmp_path / "runs" / "weights").mkdir()
    theirs = {
        "architecture": "vit",
        "norm_pix_loss": False,
        "auxiliary_loss": False,
        "error": 1,
        "metrics": {"a": "b"},
    }
    (tmp_path / "runs" / "weights" / "config.json").write_text(json.dumps(theirs))

    assert find_runs([str(tmp_path / "runs")]) == [other, workdir]
    assert find_runs([str(workdir), str(tmp_path / "runs")]) == [workdir, other]

    table = succeed(["status", str(tmp_path / "runs"), "--follow=9"])  # nothing runs: it ends
    assert table.splitlines()[0].split(" | ")[0].strip("| ") == "run"
    assert table.count("| ended ") == 2

    (first, second) = json.loads(succeed(["status", str(workdir), str(other), "--json"]))
    assert (first["run"], second["run"]) == (str(workdir), str(other))
    with rejects("config.json"):
        find_runs([str(tmp_path / "runs" / "one" / "checkpoints")])

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
    assert [state in table for state in ("| running ", "| stopped ")] == [True, True]


def test_a_damaged_error_file_is_an_error(workdir):
    (workdir / "summary.json").unlink()
    write_error(workdir, OSError("x" * 10_000))

    assert len(read_status(workdir, LATER).error) <= MAX_ERROR + 1  # an ellipsis

    (workdir / "error.json").write_text("[]")
    with rejects("error.json"):
        read_status(workdir, LATER)
