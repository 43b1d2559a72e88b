"""Conversion of recipes, overrides and plain dictionaries into checked configs, and back."""

import dataclasses
import json

import pytest

from tests.rejections import rejects
from vit_jax.config import PretrainConfig, from_dict, load_recipe, to_dict, to_text
from vit_jax.config.networks import build_named_architecture, read_architecture
from vit_jax.config.parsing import flatten

DIGITS = "configs/digits.py"


def test_an_override_counts_more_than_the_recipes_argument():
    config = load_recipe(f"{DIGITS}:epochs=3", ["--config.total=4 epochs"])
    assert config.total == "4 epochs"


def test_a_later_override_counts_and_changes_nothing_else():
    overrides = ["--config.model.width=None", "--config.model.width=32"]
    config = load_recipe(f"{DIGITS}:epochs=3", overrides)
    before = flatten(to_dict(load()))
    after = flatten(to_dict(config))
    changed = {name for name in before if before[name] != after[name]}

    assert config.total == "3 epochs"
    assert config.model.width == 32
    assert changed == {"model.width", "total"}


def load(*overrides):
    return load_recipe(DIGITS, [f"--config.{override}" for override in overrides])


def get(config, name):
    return flatten(to_dict(config))[name]


# Overrides.


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=0x10", 16),
        ("data=None", None),
        ("model.width=None", None),
        ("model.pool=None", None),
        ("input.classes=('5', 'great white')", ("5", "great white")),
        ("input.image_size=(16, 24)", (16, 24)),
        ("input.image_size=64", (64, 64)),
        ("input.flip=true", True),
        ("input.num_workers=0", 0),  # None in the recipe
        ("optimizer.clip_global_norm=2", 2.0),
        ("model.network=mine.models:Net.build", "mine.models:Net.build"),
        ("optimizer.frozen=embedding/*,encoder/*/bias", ("embedding/*", "encoder/*/bias")),
        ("total=90epochs", "90 epochs"),
        ("total=20 step", "20 step"),
        ("optimizer.arguments.b1=0.95", 0.95),  # by the value: any type
        ("optimizer.arguments.dims=(1, 2)", (1, 2)),
        ("optimizer.arguments.mode=fan in", "fan in"),
        ("optimizer.learning_rate_multipliers.head/*=3", 3.0),
        ("evaluation.evaluators.v2.every=None", None),
    ],
)
def test_override(override, value):
    name = override.partition("=")[0]
    actual = get(load(override), name)

    assert (actual, type(actual)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.wdith=3", "did you mean model.width"),
        ("zzzz=3", "vit-jax show"),
        ("model=ViT-B/16", "section.*config.model.name=ViT-B/16"),
        ("model.width", "value"),
        ("seed=1.5", "=1.5.*int"),
        ("model.width=wide", "='wide'.*int or None"),
        ("input.mixup_alpha=nan", "=nan.*finite"),
        (f"input.mixup_alpha=1{'0' * 400}", "finite"),
        ("input.flip=maybe", "='maybe'.*true or false"),
        ("input.image_size=(1,2,3)", r"=\(1, 2, 3\).*\(int, int\)"),
        ("total=90", "'90'.*duration"),
        ("model.pool=max", "='max'.*'token', 'gap', 'map'.*package.module:name or None"),
        ("model.pool=cls", "did you mean 'token'"),
        ("optimizer.name=AdamW", "did you mean 'adam'"),
        ("optimizer.name=lion", "='lion'.*'adam', 'lamb', 'sgd'.*package.module:name"),
        ("model.network=resnet", "='resnet'.*package.module:name"),
        ("optimizer.arguments.x={1, 2}", r"=\{1, 2\}.*config.json"),
        ("optimizer.learning_rate_multipliers.head/*=fast", "='fast'.*float"),
        ("evaluation.evaluators.v2.spilt=x", "did you mean evaluation.evaluators.NAME.split"),
    ],
)
def test_bad_override(override, rule):
    with rejects(override.partition("=")[0], rule):
        load(override)


# Dictionaries and text.


NAMED = (
    "optimizer.name=optax:lion",
    "optimizer.arguments.b1=0.95",
    "optimizer.learning_rate_multipliers.embedding/*=0.1",
    "evaluation.evaluators.v2.split=test",
    "evaluation.evaluators.v2.every=3 steps",
    "evaluation.evaluators.v3.arguments.k=5",
)
ABSENT = ("model.width=None", "polyak.factor=0.99", "data=None")

ALL_FORMS = pytest.mark.parametrize(
    "overrides", [(), ABSENT, NAMED], ids=["recipe", "absent values", "named values"]
)


@ALL_FORMS
def test_round_trip(overrides):
    config = load(*overrides)
    values = to_dict(config)

    assert from_dict(PretrainConfig, values) == config
    assert from_dict(PretrainConfig, json.loads(json.dumps(values))) == config


@ALL_FORMS
def test_the_text_has_every_field_once_in_order(overrides):
    config = load(*overrides)
    values = flatten(to_dict(config))
    lines = to_text(config).splitlines()
    read = dict(line.split(": ", 1) for line in lines)

    assert list(read) == sorted(values)
    for name, text in read.items():
        assert json.loads(text) == json.loads(json.dumps(values[name]))


def test_missing_fields_are_those_without_a_default():
    values = to_dict(load())
    del values["total"], values["model"], values["seed"]

    with rejects("total, model") as error:
        from_dict(PretrainConfig, values)

    assert "seed" not in str(error.value)


def test_missing_fields_of_a_section():
    values = to_dict(load()) | {"model": {"width": 3}}
    with rejects("model.name"):
        from_dict(PretrainConfig, values)


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"model": {"name": "ViT-B/16", "widht": 3}}, "model.widht", "did you mean model.width"),
        ({"seed": True}, "config.seed=True", "int"),
        ({"total": 90}, "config.total=90", "duration.*'90 epochs'"),
        ({"polyak": 0.9}, "config.polyak=0.9", "section.*config.polyak.factor"),
        ({"optimizer": {"arguments": 3}}, "config.optimizer.arguments=3", "section"),
        (
            {"evaluation": {"every": "1 step", "evaluators": {"v2": {"splt": 3}}}},
            "evaluation.evaluators.v2.splt",
            "",
        ),
    ],
)
def test_wrong_names_and_types(fields, field, rule):
    with rejects(field, rule):
        from_dict(PretrainConfig, to_dict(load()) | fields)


@pytest.mark.parametrize("field", ["layer_norm_epsilon", "gelu", "depth"])
def test_a_long_value_is_not_printed_whole(field):
    values = dataclasses.asdict(build_named_architecture("ViT-mu/16"))
    values[field] = "x" * 10**5

    with pytest.raises(ValueError, match=f"architecture.{field}='xxx") as error:
        read_architecture(values)

    assert len(str(error.value)) < 1000


def test_a_command_line_builds_no_flags_for_its_overrides(monkeypatch):
    from absl import flags

    monkeypatch.setattr(
        flags,
        "FlagValues",
        lambda: pytest.fail("flags were built"),
    )
    config = load(
        "seed=0x10",
        "schedule.learning_rate=1e-3",
        "input.flip=f",
        "input.image_size=9",
    )

    assert config.seed == 16
    assert config.schedule.learning_rate == 1e-3
    assert config.input.flip is False
    assert config.input.image_size == (9, 9)
