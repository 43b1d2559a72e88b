import sys
import types

import pytest

from tests.integration import commands
from tests.train import small_runs as runs
from vit_jax.train.writers import JsonLines, Writers


def test_lines_after_the_restored_step_and_half_lines_go(tmp_path):
    first = JsonLines(tmp_path, 0)
    for step in (1, 2, 3):
        first.write(step, {"x": step / 2})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')  # the process was killed while it wrote
    second = JsonLines(tmp_path, 2)
    second.write(3, {"x": 9.0})
    second.close()
    assert commands.metrics(tmp_path) == [{"step": 1, "x": 0.5}, {"step": 2, "x": 1.0}, {"step": 3, "x": 9.0}]


def test_weights_and_biases_receives_config_and_metrics(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append(("log", step, metrics))

        def finish(self):
            calls.append(("finish",))

    def init(**options):
        calls.append(("init", options["project"], options["config"]["logging"]["every"], options["resume"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = runs.config("logging.every=1 steps", "logging.tensorboard=False", "logging.wandb_project=p")
    writers = Writers(tmp_path, config, 0, enabled=True)
    writers.write(3, {"x": 1.0})
    writers.close()
    assert calls == [("init", "p", "1 steps", "allow"), ("log", 3, {"x": 1.0}), ("finish",)]


def test_a_missing_package_is_named_before_any_file_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install .*\[wandb\]"):
        Writers(tmp_path, runs.config("logging.wandb_project=p"), 0, enabled=True)
    Writers(tmp_path, runs.config(), 0, enabled=False).write(1, {"x": 1.0})  # a process that does not write
    assert list(tmp_path.iterdir()) == []
