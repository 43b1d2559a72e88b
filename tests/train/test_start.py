"""Which checkpoints a run may go on from: those of its own network and data."""

import dataclasses
import types

import pytest

from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.checkpoint import CheckpointReader
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


def test_a_folder_without_checkpoints(tmp_path):
    run, nothing = runs.build(f"resume_from={tmp_path}"), CheckpointReader(tmp_path)
    with rejects(f"config.resume_from={str(tmp_path)!r}", "checkpoint"):
        start.start_state(run, nothing, {})
