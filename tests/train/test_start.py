"""Which checkpoints a run may go on from: those of its own network and data."""

import dataclasses
import types

import pytest

from tests import tiny
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.checkpoint import CheckpointReader
from vit_jax.config.check import lengths
from vit_jax.train import start

FACTS = {"data": "folder:x", "num_examples": 160, "class_names": ["a", "b"], "global_batch": 16, "seed": 0}
FILES = {"train_files_sha256": "1" * 64, "test_files_sha256": "2" * 64}


def restore(stored, given):
    """The step of the state that a run with the facts `given` resumes from."""
    run = runs.build()
    metadata = {"architecture": dataclasses.asdict(run.architecture), **stored}
    items = {"progress": {"step": 5}, "model": None, "optimizer": None}
    store = types.SimpleNamespace(folder="run", metadata=lambda step: metadata, restore=lambda step, items_: items)
    return start.restore(run, store, 5, given).step


@pytest.mark.parametrize("stored", [FACTS, FACTS | FILES], ids=["before files were noted", "now"])
def test_the_same_data(stored):
    assert restore(stored, FACTS | FILES) == 5


def test_positions_added_elsewhere_are_of_another_network():
    """The parameters are the same. Checkpoints from before blocks could add positions do not say where."""
    there = dataclasses.asdict(runs.build().architecture)
    assert there.pop("position_layers") == "stem"
    assert restore(FACTS | {"architecture": there}, FACTS) == 5
    with rejects("position_layers", "'shared'.*'stem'"):
        restore(FACTS | {"architecture": there | {"position_layers": "shared"}}, FACTS)


@pytest.mark.parametrize("name", FACTS | FILES)
def test_other_data(name):
    other = 7 if isinstance((FACTS | FILES)[name], int) else "other"
    with rejects(f"{name}=", "config.init_from"):
        restore(FACTS | FILES, FACTS | FILES | {name: other})


def test_the_data_of_a_run_in_phases():
    """At step 5, 16 images a step have seen as many as two steps of 8, two of 24 and one of 16."""
    assert restore(FACTS | {"phases": [[2, 8], [4, 24]]}, FACTS) == 5
    assert restore(FACTS, FACTS | {"phases": [(2, 8), (4, 24)], "global_batch": 16}) == 5
    with rejects("phases=", "config.init_from"):
        restore(FACTS | {"phases": [[2, 8]]}, FACTS)


def test_a_folder_without_checkpoints(tmp_path):
    run, nothing = runs.build(f"resume_from={tmp_path}"), CheckpointReader(tmp_path)
    with rejects(f"config.resume_from={str(tmp_path)!r}", "checkpoint"):
        start.start_state(run, None, nothing, {})


WSD = ("schedule.decay=wsd", "schedule.warmup=2 steps", "schedule.cooldown=3 steps", "resume_from=trunk")


def continued(monkeypatch, *fields, trunk=(), stored=(2, 4, 6, 8, 10)):
    """The steps of a trunk of 10 steps that a run with these fields may continue."""
    config = dataclasses.asdict(tiny.config(*WSD, "total=10 steps", *trunk))
    metadata = {"config": config, "num_examples": 160}
    reader = types.SimpleNamespace(all_steps=lambda: list(stored), metadata=lambda step: metadata)
    monkeypatch.setattr(start, "CheckpointReader", lambda folder: reader)
    config = tiny.config(*WSD, *fields)
    return start.steps_to_continue(types.SimpleNamespace(config=config, steps=lengths(config, 160)))[1]


def test_a_branch_continues_what_comes_before_both_cooldowns(monkeypatch):
    assert continued(monkeypatch, "total=8 steps") == [2, 4]  # its own begins at 5
    assert continued(monkeypatch, "total=20 steps") == [2, 4, 6]  # the trunk's begins at 7
    assert continued(monkeypatch, "total=20 steps", trunk=("schedule.decay=constant",)) == [2, 4, 6, 8, 10]
    assert continued(monkeypatch, "total=20 steps", "resume_step=4") == [4]
    assert continued(monkeypatch, "total=20 steps", "schedule.decay=cosine") == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        (("total=20 steps", "resume_step=8"), "resume_from='trunk'", "before both cooldowns"),
        (("total=8 steps", "resume_step=6"), "resume_from='trunk'", "before both cooldowns"),
        (("total=20 steps", "schedule.learning_rate=0.1"), "resume_from='trunk'", "learning rates of this run"),
        (("total=20 steps", "schedule.warmup=3 steps"), "resume_from='trunk'", "learning rates of this run"),
        (("total=20 steps", "resume_step=5"), "resume_step=5", r"\[2, 4, 6, 8, 10\]"),
    ],
)
def test_a_branch_whose_rate_would_jump_is_rejected(monkeypatch, fields, field, rule):
    with rejects(f"config.{field}", rule):
        continued(monkeypatch, *fields)
