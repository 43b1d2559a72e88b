"""Runs that end early, by their evaluations or on request, and resume without a difference."""

import dataclasses
import math
import shutil

import pytest

from tests.integration import commands
from tests.tiny import LENGTH
from tests.train import small_runs as runs
from vit_jax.checkpoint import CheckpointReader
from vit_jax.config import StopEarlyConfig
from vit_jax.pytree import parameters_sha256
from vit_jax.train.early_stopping import EarlyStopping
from vit_jax.train.lifecycle.interruption import Interrupted
from vit_jax.train.pretrain import pretrain
from vit_jax.weights import load_weights

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.xdist_group("tiny"),
]

VALUES = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.9, 6: 0.2}
OPTIONS = [
    *LENGTH,
    "evaluation.every=6 steps",
    "evaluation.global_batch=360",
    "polyak.factor=None",
    "checkpoint.every=3 steps",
    "checkpoint.keep_latest=1",
    "checkpoint.best_metric=val_accuracy",
    f"evaluation.evaluators.val.kind={__name__}:TableEvaluator",
    "evaluation.evaluators.val.every=1 step",
]


class TableEvaluator:
    """An evaluator that reads its metric from a table, after the only batch of its split."""

    def __init__(self, split, run):
        self._split = split

    def run(self, state):
        with self._split.open_batches() as batches:
            assert len(list(batches)) == 1
        yield "accuracy", VALUES[int(state.step)]


SAME_RESULTS = (
    "steps",
    "best_step",
    "stopped_early",
    "parameters_sha256",
    "test_loss",
    "train_loss",
)


@pytest.fixture(scope="module")
def config(data_dir):
    return runs.config(
        *OPTIONS,
        "stop_early.patience=2",
        "logging.every=1 step",
        f"input.data_dir={data_dir}",
    )


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stopped")
    return pretrain(config, str(workdir)), workdir


def assert_same_end(summary, workdir, stopped):
    expected, expected_workdir = stopped
    for name in SAME_RESULTS:
        assert summary[name] == expected[name], name
    assert commands.curve(workdir) == commands.curve(expected_workdir)
    assert commands.checkpoint_steps(workdir) == [2, 4]


def read_digest(workdir):
    return parameters_sha256(load_weights(str(workdir)).parameters)


@pytest.mark.slow
def test_a_run_ends_early_and_other_verbs_take_the_best(stopped, config):
    summary, workdir = stopped

    assert summary["steps"] == 4
    assert summary["best_step"] == 2
    assert summary["stopped_early"] is True
    assert summary["val_accuracy"] == 0.5
    assert summary["images"] == 4 * config.global_batch
    assert commands.checkpoint_steps(workdir) == [2, 4]
    assert read_digest(workdir) == summary["parameters_sha256"]


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_more_patience(
    stopped,
    config,
    tmp_path,
    capsys,
):
    workdir = tmp_path / "copy"
    shutil.copytree(stopped[1], workdir)
    more_patience = dataclasses.replace(config, stop_early=StopEarlyConfig(patience=3))

    assert_same_end(pretrain(config, str(workdir)), workdir, stopped)
    out = capsys.readouterr().out
    assert "stopped early: val_accuracy has not improved for 2 evaluations, since step 2\n" in out
    assert ", at step 2, the best that is kept" in out

    summary = pretrain(more_patience, str(workdir))
    assert summary["steps"] == 6
    assert summary["best_step"] == 5
    assert summary["stopped_early"] is False


@pytest.mark.slow
def test_a_run_that_is_interrupted_in_evaluations_decides_the_same(
    stopped,
    config,
    tmp_path,
    monkeypatch,
):
    """It is interrupted in the evaluation of the best step, and in the last one.

    A request to end is looked for after each step and each batch of an evaluation.
    """
    for request, step in ((4, 2), (5, 4)):
        runs.interrupt(
            lambda: pretrain(config, str(tmp_path)),
            request,
            step,
            monkeypatch,
        )

    summary = pretrain(config, str(tmp_path))

    assert_same_end(summary, tmp_path, stopped)
    assert read_digest(tmp_path) == summary["parameters_sha256"]


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_end_is_on_disk_decides_the_same(
    stopped,
    config,
    tmp_path,
):
    workdir = tmp_path / "copy"
    shutil.copytree(stopped[1], workdir)
    shutil.rmtree(workdir / "checkpoints" / "4")
    (workdir / "summary.json").unlink()

    assert_same_end(pretrain(config, str(workdir)), workdir, stopped)


def build_config(metric, mode="auto", **stop_early):
    """Return a config that judges checkpoints by a metric and stops early."""
    config = runs.config()
    checkpoint = dataclasses.replace(
        config.checkpoint,
        best_metric=metric,
        best_mode=mode,
    )
    return dataclasses.replace(
        config,
        checkpoint=checkpoint,
        stop_early=StopEarlyConfig(**stop_early),
    )


def note_values(values, metric="test_loss", mode="auto", **stop_early):
    """Return early stopping after evaluations of these values, one a step.

    It is carried through the metadata of checkpoints.
    """
    config = build_config(metric, mode, **stop_early)
    metadata = {}

    for step, value in enumerate(values, 1):
        stopping = EarlyStopping(config, metadata)
        stopping.note(
            step,
            dict.fromkeys(("test_loss", "test_accuracy", metric), value),
        )
        metadata = stopping.metadata()

    return stopping


@pytest.mark.parametrize(
    ("values", "fields", "stops", "best"),
    [
        ([3, 2, 1], {"patience": 1}, False, 3),
        ([3, 2, 2.5], {"patience": 1}, True, 2),
        ([3, 2, 2.5, 1.9, 2.5], {"patience": 2}, False, 4),
        # No improvement; of equal ones the later is kept.
        ([3, 2, 2], {"patience": 1}, True, 3),
        ([3, 2.6], {"patience": 1, "min_delta": 0.5}, True, 2),
        # Small improvements add up.
        ([3, 2.6, 2.2], {"patience": 2, "min_delta": 0.5}, False, 3),
        ([math.nan, 2, math.nan, math.inf], {"patience": 2}, True, 2),
        ([3, 4, 5], {}, False, None),
    ],
)
def test_decisions_on_a_loss(values, fields, stops, best):
    stopping = note_values(values, **fields)

    assert bool(stopping.reason_to_stop()) is stops
    assert stopping.best_of([1, 2, 3, 4]) == best
    assert bool(stopping.metadata()) is bool(fields)


def test_of_accuracies_more_is_better():
    stopping = note_values(
        [0.1, 0.2, 0.15],
        "test_accuracy",
        patience=1,
    )

    assert stopping.reason_to_stop()
    assert stopping.best_of([1, 3]) == 3


def test_of_another_metric_nothing_is_known():
    metadata = note_values([0.1, 0.2, 0.15], "test_accuracy", patience=1).metadata()

    stopping = EarlyStopping(build_config("test_loss", patience=1), metadata)

    assert not stopping.reason_to_stop()


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("c_calibration_error", "auto"), ("c_ece", "min")],
)
def test_of_errors_less_is_better(metric, mode):
    stopping = note_values(
        [0.3, 0.1, 0.2],
        metric,
        mode,
        patience=1,
    )

    assert stopping.best_of([1, 2, 3]) == 2


@pytest.fixture(scope="module")
def interrupted_config(tiny_run):
    """The config of a run without a checkpoint at its first stop."""
    checkpoint = dataclasses.replace(tiny_run.config.checkpoint, every="4 steps")
    return dataclasses.replace(tiny_run.config, checkpoint=checkpoint)


# A request to end is looked for after each step and each batch of an evaluation.
@pytest.mark.parametrize(
    ("request_number", "step", "owes"),
    [
        (2, 2, False),
        (9, 6, True),
        (11, 6, True),
    ],
    ids=["a plain step", "the last step", "the last evaluation"],
)
def test_an_interrupted_run_goes_on_from_its_last_step(
    request_number,
    step,
    owes,
    interrupted_config,
    tiny_run,
    tmp_path,
    monkeypatch,
):
    def train():
        return pretrain(interrupted_config, str(tmp_path))

    runs.interrupt(train, request_number, step, monkeypatch)
    reader = CheckpointReader(tmp_path)

    assert max(reader.all_steps()) == step
    assert reader.metadata(step)["owes_evaluation"] is owes
    runs.assert_same_end(train(), tiny_run.summary)
    assert commands.curve(tmp_path) == commands.curve(tiny_run.workdir)


def test_an_owed_evaluation_may_be_interrupted_again(
    interrupted_config,
    tiny_run,
    tmp_path,
    monkeypatch,
):
    for request, message in ((5, "stopped after step 3 of 6"), (2, "stopped while evaluating")):
        runs.ask_to_end_at(request, monkeypatch)
        with pytest.raises(Interrupted, match=message):
            pretrain(interrupted_config, str(tmp_path))

    runs.ask_to_end_at(None, monkeypatch)
    summary = pretrain(interrupted_config, str(tmp_path))

    runs.assert_same_end(summary, tiny_run.summary)
    assert commands.curve(tmp_path) == commands.curve(tiny_run.workdir)
