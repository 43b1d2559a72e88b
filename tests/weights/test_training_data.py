"""The training data in metadata, of ours and of anybody's."""

import dataclasses
import json

import pytest

from vit_jax.weights.training_data import TrainingData, stored_training_data

DATA = TrainingData(
    data="folder:/my/images",
    seed=3,
    holdout_fraction=0.2,
    train_split="train",
    test_split="val",
    classes=("cat", "dog"),
)
STORED = json.loads(json.dumps(dataclasses.asdict(DATA)))


def test_what_is_written_is_read():
    assert stored_training_data({"training": STORED}) == DATA


def test_checkpoints_that_have_the_config_alone():
    inputs = {name: STORED[name] for name in ("holdout_fraction", "train_split", "test_split", "classes")}
    config = {"data": "folder:/my/images", "seed": 3, "input": inputs | {"flip": True}, "total": "9 epochs"}
    assert stored_training_data({"config": config, "class_names": ["a"]}) == DATA


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"training": None},
        {"training": ["data"]},
        {"config": {"data": "digits"}},
        {"config": {"data": None, "seed": 0, "input": {}}},
        *({"training": STORED | {name: wrong}} for name in STORED for wrong in (None, {}, True)),
        {"training": STORED | {"classes": ["cat", 2]}},
        {"training": {name: value for name, value in STORED.items() if name != "seed"}},
    ],
)
def test_anything_else_is_as_if_it_were_not_there(metadata):
    assert stored_training_data(metadata) is None
