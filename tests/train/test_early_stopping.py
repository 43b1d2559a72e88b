"""Runs that end when evaluations stop improving, or when asked to end, and resume as if nothing had happened."""

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

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("tiny")]

VALUES = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.9, 6: 0.2}
OPTIONS = [
    *LENGTH,
    "evaluation.every=6 steps",
    "evaluation.global_batch=360",
    "polyak.factor=None",
    "checkpoint.every=3 steps",
    "checkpoint.keep_latest=1",
    "checkpoint.best_metric=val_accuracy",
]
OPTIONS += [
    f"evaluation.evaluators.val.kind={__name__}:Told",
    "evaluation.evaluators.val.every=1 step",
]


class Told:
    """An evaluator that finds what the table says of a step, once it has seen the only batch of its split."""

    def __init__(self, split, run):
        self._split = split

    def run(self, state):
        with self._split.open_batches() as batches:
            assert len(list(batches)) == 1
        yield "accuracy", VALUES[int(state.step)]


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
    for name in (
        "steps",
        "best_step",
        "stopped_early",
        "parameters_sha256",
        "test_loss",
        "train_loss",
    ):
        assert summary[name] == stopped[0][name], name

    assert commands.curve(workdir) == commands.curve(stopped[1])
    assert commands.checkpoint_steps(workdir) == [2, 4]


@pytest.mark.slow
def test_it_ends_and_other_verbs_take_the_best(stopped, config):
    summary, workdir = stopped
    expected = [4, 2, True, 0.5]

    assert [
        summary[name] for name in ("steps", "best_step", "stopped_early", "val_accuracy")
    ] == expected
    assert summary["images"] == 4 * config.global_batch
    assert commands.checkpoint_steps(workdir) == [2, 4]
    assert parameters_sha256(load_weights(str(workdir)).parameters) == summary["parameters_sha256"]


@pytest.mark.slow
def test_it_has_ended_until_it_may_be_more_patient(stopped, config, tmp_path, capsys):
    workdir = tmp_path / "copy"
    shutil.copytree(stopped[1], workdir)

    assert_same_end(pretrain(config, str(workdir)), workdir, stopped)

    out = capsys.readouterr().out
    assert "stopped early: val_accuracy has not improved for 2 evaluations, since step 2\n" in out
    assert ", at step 2, the best that is kept" in out

    more = dataclasses.replace(config, stop_early=StopEarlyConfig(patience=3))
    summary = pretrain(more, str(workdir))

    assert [summary[name] for name in ("steps", "best_step", "stopped_early")] == [6, 5, False]


@pytest.mark.slow
def test_interrupted_in_evaluations_it_decides_the_same(stopped, config, tmp_path, monkeypatch):
    """In that of the best step, and in the last; a question follows each step and each batch of an evaluation."""
    for question, step in ((4, 2), (5, 4)):
        runs.interrupt(lambda: pretrain(config, str(tmp_path)), question, step, monkeypatch)

    summary = pretrain(config, str(tmp_path))
    assert_same_end(summary, tmp_path, stopped)
    assert parameters_sha256(load_weights(str(tmp_path)).parameters) == summary["parameters_sha256"]


@pytest.mark.slow
def test_killed_before_its_end_was_on_disk_it_decides_the_same(stopped, config, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(stopped[1], workdir)
    shutil.rmtree(workdir / "checkpoints" / "4")
    (workdir / "summary.json").unlink()

    assert_same_end(pretrain(config, str(workdir)), workdir, stopped)


def noted(values, metric="test_loss", mode="auto", **fields):
    """Early stopping after evaluations of these values, by step, carried through the metadata of checkpoints."""
    config = runs.config()
    keeping = dataclasses.replace(config.checkpoint, best_metric=metric, best_mode=mode)
    config = dataclasses.replace(config, checkpoint=keeping)
    config = dataclasses.replace(config, stop_early=StopEarlyConfig(**fields))
    metadata = {}

    for step, value in enumerate(values, 1):
        stopping = EarlyStopping(config, metadata)
        stopping.note(step, dict.fromkeys(("test_loss", "test_accuracy", metric), value))
        metadata = stopping.metadata()

    return stopping


@pytest.mark.parametrize(
    ("values", "fields", "stops", "best"),
    [
        ([3, 2, 1], {"patience": 1}, False, 3),
        ([3, 2, 2.5], {"patience": 1}, True, 2),
        ([3, 2, 2.5, 1.9, 2.5], {"patience": 2}, False, 4),
        ([3, 2, 2], {"patience": 1}, True, 3),  # no improvement; of equal ones the later is kept
        ([3, 2.6], {"patience": 1, "min_delta": 0.5}, True, 2),
        (
            [3, 2.6, 2.2],
            {"patience": 2, "min_delta": 0.5},
            False,
            3,
        ),  # little by little it improves
        ([math.nan, 2, math.nan, math.inf], {"patience": 2}, True, 2),
        ([3, 4, 5], {}, False, None),
    ],
)
def test_decisions_on_a_loss(values, fields, stops, best):
    stopping = noted(values, **fields)
    assert bool(stopping.reason_to_stop()) is stops
    assert stopping.best_of([1, 2, 3, 4]) == best
    assert bool(stopping.metadata()) is bool(fields)


def test_of_accuracies_more_is_better_and_of_another_metric_nothing_is_known():
    stopping = noted([0.1, 0.2, 0.15], "test_accuracy", patience=1)
    assert stopping.reason_to_stop()
    assert stopping.best_of([1, 3]) == 3

    other = dataclasses.replace(runs.config(), stop_early=StopEarlyConfig(patience=1))
    other = dataclasses.replace(
        other,
        checkpoint=dataclasses.replace(other.checkpoint, best_metric="test_loss"),
    )

    assert not EarlyStopping(other, stopping.metadata()).reason_to_stop()


@pytest.mark.parametrize(("metric", "mode"), [("c_calibration_error", "auto"), ("c_ece", "min")])
def test_of_errors_less_is_better(metric, mode):
    assert noted([0.3, 0.1, 0.2], metric, mode, patience=1).best_of([1, 2, 3]) == 2


@pytest.fixture(scope="module")
def interrupted_config(tiny_run):
    checkpoint = dataclasses.replace(
        tiny_run.config.checkpoint,
        every="4 steps",
    )  # none at the first stop
    return dataclasses.replace(tiny_run.config, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("question", "step", "owes"),  # one question follows each step and each batch of an evaluation
    [(2, 2, False), (9, 6, True), (11, 6, True)],
    ids=["a plain step", "the last step", "the last evaluation"],
)
def test_goes_on_from_where_it_was_asked(
    question, step, owes, interrupted_config, tiny_run, tmp_path, monkeypatch
):
    runs.interrupt(lambda: pretrain(interrupted_config, str(tmp_path)), question, step, monkeypatch)
    reader = CheckpointReader(tmp_path)

    assert max(reader.all_steps()) == step
    assert reader.metadata(step)["owes_evaluation"] is owes
    runs.assert_same_end(pretrain(interrupted_config, str(tmp_path)), tiny_run.summary)
    assert commands.curve(tmp_path) == commands.curve(tiny_run.workdir)


def test_an_evaluation_that_is_owed_may_be_broken_off_again(
    interrupted_config, tiny_run, tmp_path, monkeypatch
):
    for question, message in ((5, "stopped after step 3 of 6"), (2, "stopped while evaluating")):
        runs.ask_to_end_at(question, monkeypatch)
        with pytest.raises(Interrupted, match=message):
            pretrain(interrupted_config, str(tmp_path))

    runs.ask_to_end_at(None, monkeypatch)
    runs.assert_same_end(pretrain(interrupted_config, str(tmp_path)), tiny_run.summary)
    assert commands.curve(tmp_path) == commands.curve(tiny_run.workdir)
