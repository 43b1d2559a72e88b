"""A study in a process of its own, killed in the middle."""

import json

import pytest

from tests.integration import commands
from tests.studies.test_runs import words_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

FIELDS = [
    "--pools=token",
    "--learning_rates=0.001,0.01",
    "--config.total=8 steps",
    "--config.checkpoint.every=4 steps",
]


def results(folder):
    rows = json.loads((folder / "study.json").read_text())["rows"]
    return [(row["test_accuracy"], commands.summary(folder / row["folders"][0])["parameters_sha256"]) for row in rows]


def test_killed_in_the_middle_it_ends_with_the_same_results(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = commands.start(words_of(killed, *FIELDS))
    commands.wait_until(lambda: list(killed.glob("runs/*rate=0.01/checkpoints/*")), process)  # in the second run
    commands.kill(process)
    ended = {file: file.stat().st_mtime_ns for file in killed.glob("runs/*rate=0.001/*") if file.is_file()}
    out = commands.succeed(words_of(killed, *FIELDS))
    assert "learning_rate=0.001\n" not in out
    assert {file: file.stat().st_mtime_ns for file in ended} == ended
    commands.succeed(words_of(whole, *FIELDS))
    assert results(killed) == results(whole)
