"""A run that is asked to end, at a step or in an evaluation, goes on as if nothing had happened."""

import dataclasses
import itertools

import pytest

from tests.integration import commands
from vit_jax.checkpoint import CheckpointReader
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.pretrain import pretrain

STOPS = {  # the question that is answered yes: one follows each step and each batch of an evaluation
    2: ("a plain step", 2, False),
    9: ("the last step", 6, True),
    11: ("the last evaluation", 6, True),
}
pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("tiny")]


@pytest.fixture(scope="module")
def config(tiny_run):
    checkpoint = dataclasses.replace(tiny_run.config.checkpoint, every="4 steps")  # none at the first stop
    return dataclasses.replace(tiny_run.config, checkpoint=checkpoint)


def ask_to_end_at(question, monkeypatch):
    """The run hears of its end when it asks for the n-th time, as it would after a signal."""
    count = itertools.count(1)
    monkeypatch.setattr(Interruption, "is_requested", lambda self: next(count) == question)


@pytest.mark.parametrize("question", STOPS, ids=[where.replace(" ", "_") for where, *_ in STOPS.values()])
def test_goes_on_from_where_it_was_asked(question, config, tiny_run, tmp_path, monkeypatch):
    _, step, owes = STOPS[question]
    ask_to_end_at(question, monkeypatch)
    with pytest.raises(Interrupted, match=f"stopped after step {step} of 6, which is saved"):
        pretrain(config, str(tmp_path))
    reader = CheckpointReader(tmp_path)
    assert max(reader.all_steps()) == step
    assert reader.metadata(step)["owes_evaluation"] is owes
    ask_to_end_at(None, monkeypatch)
    summary = pretrain(config, str(tmp_path))
    assert commands.curve(tmp_path) == commands.curve(tiny_run.workdir)
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "train_loss"):
        assert summary[name] == tiny_run.summary[name], name


def test_an_evaluation_that_is_owed_may_be_broken_off_again(config, tiny_run, tmp_path, monkeypatch):
    ask_to_end_at(5, monkeypatch)
    with pytest.raises(Interrupted, match="stopped after step 3 of 6"):
        pretrain(config, str(tmp_path))
    ask_to_end_at(2, monkeypatch)
    with pytest.raises(Interrupted, match="stopped while evaluating"):
        pretrain(config, str(tmp_path))
    ask_to_end_at(None, monkeypatch)
    assert pretrain(config, str(tmp_path))["parameters_sha256"] == tiny_run.summary["parameters_sha256"]
    assert commands.curve(tmp_path) == commands.curve(tiny_run.workdir)
