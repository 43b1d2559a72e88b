"""The metadata that weights carry, written and read; the training data in it are of ours or of any file."""

import dataclasses
import json

import pytest

from tests.weights.small_networks import NETWORKS, RESNET, TRAINING, VIT
from vit_jax.weights.description import describe, parse_architecture, parse_training_data


def test_metadata_of_before_it_had_the_grid_and_class_tokens_is_read():
    assert (
        parse_architecture({"architecture": describe(VIT, None, None, None)["architecture"]}) == VIT
    )


@pytest.mark.parametrize(
    ("a", "wrong", "words"),
    [
        (
            VIT,
            {"grid": [3, 2]},
            r"grid is \[3, 2\], but ViT-custom/4 on images of \(8, 12\) has \[2, 3\]",
        ),
        (VIT, {"num_class_tokens": 0}, "num_class_tokens is 0, .* has 1"),
        (NETWORKS["gap"], {"num_class_tokens": 1}, "num_class_tokens is 1, .* has 0"),
        (RESNET, {"grid": None}, r"grid is None, .* has \[3, 3\]"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(a, wrong, words):
    with pytest.raises(ValueError, match=f"its metadata contradicts itself: {words}"):
        parse_architecture(describe(a, None, None, None) | wrong)


DATA = dataclasses.replace(TRAINING, test_split="val", classes=("cat",))
STORED = json.loads(json.dumps(dataclasses.asdict(DATA)))


def test_checkpoints_that_have_the_config_alone():
    inputs = {
        name: STORED[name] for name in ("holdout_fraction", "train_split", "test_split", "classes")
    }
    config = {
        "data": "folder:/my/images",
        "seed": 3,
        "input": inputs | {"flip": True},
        "total": "9 epochs",
    }

    assert parse_training_data({"config": config, "class_names": ["a"]}) == DATA
    assert parse_training_data({"training": STORED}) == DATA

    several = parse_training_data({"training": STORED | {"is_multilabel": True}})
    assert several == dataclasses.replace(DATA, is_multilabel=True)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"training": None},
        {"training": ["data"]},
        {"config": {"data": "digits"}},
        {"config": {"data": None, "seed": 0, "input": {}}},
        *(
            {"training": STORED | {name: wrong}}
            for name in STORED.keys() - {"held_up_to", "is_multilabel", "lora_rank"}
            for wrong in (None, {}, True)
        ),
        *({"training": STORED | {"held_up_to": wrong}} for wrong in ([1], "ab", {"cat": 3})),
        *({"training": STORED | {"is_multilabel": wrong}} for wrong in (None, {}, 1)),
        *({"training": STORED | {"lora_rank": wrong}} for wrong in ("4", {}, True)),
        {"training": STORED | {"classes": ["cat", 2]}},
        {"training": {name: value for name, value in STORED.items() if name != "seed"}},
    ],
)
def test_anything_else_is_as_if_it_were_not_there(metadata):
    assert parse_training_data(metadata) is None
