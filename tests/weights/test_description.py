"""The metadata that weights carry, written and read, with the training data in them."""

import dataclasses
import json

import pytest

from tests.weights.small_networks import NETWORKS, RESNET, TRAINING, VIT
from vit_jax.weights.description import describe, parse_architecture, parse_training_data


def test_metadata_without_the_grid_and_class_tokens_is_read():
    metadata = describe(VIT, None, None, None)
    older = {"architecture": metadata["architecture"]}

    assert parse_architecture(older) == VIT


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
def test_metadata_that_contradicts_itself_is_rejected(a, wrong, words):
    metadata = describe(a, None, None, None) | wrong
    message = f"its metadata contradicts itself: {words}"

    with pytest.raises(ValueError, match=message):
        parse_architecture(metadata)


DATA = dataclasses.replace(
    TRAINING,
    test_split="val",
    classes=("cat",),
)
STORED = json.loads(json.dumps(dataclasses.asdict(DATA)))


def test_checkpoints_that_have_the_config_alone():
    metadata = {
        "config": {
            "data": "folder:/my/images",
            "seed": 3,
            "input": {
                "holdout_fraction": STORED["holdout_fraction"],
                "train_split": STORED["train_split"],
                "test_split": STORED["test_split"],
                "classes": STORED["classes"],
                "flip": True,
            },
            "total": "9 epochs",
        },
        "class_names": ["a"],
    }

    assert parse_training_data(metadata) == DATA


@pytest.mark.parametrize("is_multilabel", [False, True])
def test_stored_training_data_is_read(is_multilabel):
    expected = dataclasses.replace(DATA, is_multilabel=is_multilabel)
    stored = STORED
    if is_multilabel:
        stored = STORED | {"is_multilabel": True}

    assert parse_training_data({"training": stored}) == expected


REQUIRED = STORED.keys() - {"held_up_to", "is_multilabel", "lora_rank"}


@pytest.mark.parametrize(
    "value",
    [None, {}, True],
    ids=str,
)
@pytest.mark.parametrize("field", sorted(REQUIRED))
def test_required_fields_of_another_type_are_ignored(field, value):
    assert parse_training_data({"training": STORED | {field: value}}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("held_up_to", [1]),
        ("held_up_to", "ab"),
        ("held_up_to", {"cat": 3}),
        ("is_multilabel", None),
        ("is_multilabel", {}),
        ("is_multilabel", 1),
        ("lora_rank", "4"),
        ("lora_rank", {}),
        ("lora_rank", True),
        ("classes", ["cat", 2]),
    ],
    ids=str,
)
def test_optional_fields_of_another_type_are_ignored(field, value):
    assert parse_training_data({"training": STORED | {field: value}}) is None


def test_training_data_without_a_seed_is_ignored():
    stored = dict(STORED)
    del stored["seed"]

    assert parse_training_data({"training": stored}) is None


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"training": None},
        {"training": ["data"]},
        {"config": {"data": "digits"}},
        {"config": {"data": None, "seed": 0, "input": {}}},
    ],
)
def test_metadata_of_another_form_is_ignored(metadata):
    assert parse_training_data(metadata) is None
