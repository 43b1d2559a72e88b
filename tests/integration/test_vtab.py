"""Sweeps of the verb vtab in processes of their own: killed in the middle, and of several processes."""

import json

import pytest

from tests.integration import commands
from tests.integration.launchers import explicit
from tests.transfer.vtab.small_suite import begun, files_of_runs, make_weights, words_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return make_weights(tmp_path_factory.mktemp("weights") / "random")


@pytest.fixture(scope="module")
def swept(weights, tmp_path_factory):
    """The workdir of an uninterrupted sweep."""
    folder = tmp_path_factory.mktemp("sweep") / "vtab"
    commands.succeed(words_of(weights, folder, tasks="bright"))
    return folder


def accuracies(folder):
    return [(t["task"], t["test_accuracy"]) for t in json.loads((folder / "results.json").read_text())["tasks"]]


def hashes(folder):
    return [json.loads(path.read_text())["parameters_sha256"] for path in sorted(folder.glob("*/*/*/summary.json"))]


def test_killed_in_the_middle_it_ends_with_the_same_parameters(swept, weights, tmp_path):
    words = words_of(weights, tmp_path, tasks="bright")
    process = commands.start(words)
    commands.wait_until(lambda: list(tmp_path.glob("*/trials/*0.2*/config.json")), process)  # the second run has begun
    commands.kill(process)
    done = {file: time for file, time in files_of_runs(tmp_path).items() if (file.parent / "summary.json").exists()}
    ended = len([file for file in done if file.name == "summary.json"])
    assert ended in (1, 2)  # on a busy machine the second may end before the signal comes
    out = commands.succeed(words)
    assert [run[1:3] for run in begun(out)] == [("trial", "0.0001"), ("trial", "0.2"), ("final run", "0.2")][ended:]
    assert files_of_runs(tmp_path).items() >= done.items()
    assert hashes(tmp_path) == hashes(swept)
    assert (tmp_path / "results.md").read_text() == (swept / "results.md").read_text()


def test_two_processes_make_one_sweep(swept, weights, tmp_path):
    words = words_of(weights, tmp_path, tasks="bright")
    first, second = commands.finish(commands.start_all(words, explicit(2), devices=2))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert commands.spoken(second.out) == []
    assert len(begun(first.out)) == 3
    assert (tmp_path / "results.md").read_text() in first.out
    assert accuracies(tmp_path) == accuracies(swept)
