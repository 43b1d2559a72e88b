"""Recipes, overrides and plain dictionaries into checked configs, and back."""

import json
import pathlib
import re

import pytest

from vit_jax.config import PretrainConfig, from_dict, load_recipe, to_dict, to_text
from vit_jax.config.load import flatten

DIGITS = "configs/digits.py"


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
        ("optimizer.arguments.b1=0.95", 0.95),  # by the value: any type
        ("optimizer.arguments.dims=(1, 2)", (1, 2)),
        ("optimizer.arguments.mode=fan in", "fan in"),
        ("optimizer.learning_rate_multipliers.head/*=3", 3.0),
        ("evaluation.evaluators.v2.every=None", None),
    ],
)
def test_override(override, value):
    name = override.partition("=")[0]
    found = get(load(override), name)
    assert (found, type(found)) == (value, type(value))


def test_what_counts_last():
    """A later override, and an override rather than the recipe's argument; they change nothing else."""
    config = load_recipe(f"{DIGITS}:epochs=3", ["--config.model.width=None", "--config.model.width=32"])
    assert (config.total, config.model.width) == ("3 epochs", 32)
    assert load_recipe(f"{DIGITS}:epochs=3", ["--config.total=4 epochs"]).total == "4 epochs"
    before, changed = flatten(to_dict(load())), flatten(to_dict(config))
    assert {name for name in before if before[name] != changed[name]} == {"model.width", "total"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.wdith=3",
            r"There is no field 'model.wdith' in the config. Did you mean model.width or model.depth.*\?$",
        ),
        ("zzzz=3", "no field 'zzzz' in the config. `vit-jax show --config=RECIPE` prints all fields.$"),
        ("epochs=90", r"There is no field 'epochs' in the config. Did you mean total=\"N epochs\"\?$"),
        ("model.batch_size=8", r"Did you mean global_batch\?$"),
        ("model=ViT-B/16", "config.model is a section: set one of its fields, such as config.model.name=ViT-B/16.$"),
        ("model.width", "--config.model.width needs a value: --config.model.width=VALUE"),
        ("seed=1.5", "config.seed='1.5' has the wrong type: int is needed"),
        ("model.width=wide", "config.model.width='wide' has the wrong type: int or None is needed"),
        ("input.mixup_alpha=nan", "config.input.mixup_alpha=nan is not allowed: a finite number is needed"),
        ("input.flip=maybe", "config.input.flip='maybe' has the wrong type: bool is needed"),
        ("input.image_size=(1,2,3)", r"image_size=\(1, 2, 3\) has the wrong type: a tuple \(int, int\) is needed"),
        ("model.pool=max", "config.model.pool='max' is not allowed: one of 'token', 'gap', 'map' or None is needed"),
        ("total=90", "config.total: '90' is not a duration: write a number and a unit"),
        ("model.pool=cls", "one of 'token', 'gap', 'map' or None is needed. Did you mean 'token'?"),
        ("optimizer.name=AdamW", "a reference package.module:name is needed. Did you mean 'adam'?"),
        ("optimizer.name=lion", "name='lion' is not allowed: one of 'adam', 'sgd' or a reference package.module:name"),
        ("model.network=resnet", "config.model.network='resnet' has the wrong type: a reference package.module:name"),
        ("optimizer.arguments.x={1, 2}", r"config.optimizer.arguments.x=\{1, 2\} cannot be written to config.json"),
        ("optimizer.learning_rate_multipliers.head/*=fast", "'fast' has the wrong type: float is needed"),
        ("evaluation.evaluators.v2.spilt=x", "no field 'evaluation.evaluators.v2.spilt' .* evaluation.evaluators.NAME"),
    ],
)
def test_bad_override(override, message):
    with pytest.raises(ValueError, match=message):
        load(override)


# Recipe files.


@pytest.mark.parametrize("name", [DIGITS, "digits"])
def test_recipe_is_found_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("digits").write_text("of another program")
    assert load_recipe(name).data == "digits"
    assert load_recipe(f"{name}:epochs=3").total == "3 epochs"


WRONG = f"load_recipe({DIGITS!r}), global_batch='many'"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("configs/digit.py", None, r"There is no recipe 'configs/digit\.py'\. Did you mean digits\?"),
        ("nowhere/at_all.txt", None, r"no recipe 'nowhere/at_all\.txt'\. Give the path of a file, or one of digits, "),
        ("", None, "There is no recipe ''"),
        ("mine.py", "x = 1", r"mine\.py is not a recipe: it defines no get_config\(argument\)"),
        ("mine.py", "def get_config(_): return {}", "get_config returned dict, not a dataclass such as PretrainConfig"),
        ("mine.py", f"def get_config(_): return dataclasses.replace({WRONG})", "batch='many' has the wrong type"),
    ],
)
def test_what_is_no_recipe(tmp_path, monkeypatch, path, source, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text(f"import dataclasses\nfrom vit_jax.config import load_recipe\n{source}\n")
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


# Dictionaries and text.


NAMED = (
    "optimizer.name=optax:lion",
    "optimizer.arguments.b1=0.95",
    "optimizer.learning_rate_multipliers.embedding/*=0.1",
    "evaluation.evaluators.v2.split=test",
    "evaluation.evaluators.v2.every=3 steps",
    "evaluation.evaluators.v3.arguments.k=5",
)


@pytest.mark.parametrize("overrides", [(), ("model.width=None", "polyak.factor=0.99", "data=None"), NAMED])
def test_round_trip(overrides):
    config = load(*overrides)
    assert from_dict(PretrainConfig, to_dict(config)) == config
    assert from_dict(PretrainConfig, json.loads(json.dumps(to_dict(config)))) == config
    read = dict(line.split(": ", 1) for line in to_text(config).splitlines())  # every field once, in order
    assert list(read) == sorted(flatten(to_dict(config)))
    assert {name: json.loads(value) for name, value in read.items()} == json.loads(json.dumps(flatten(to_dict(config))))


def test_missing_fields_are_those_without_a_default():
    values = to_dict(load())
    del values["total"], values["model"], values["seed"]
    message = "These fields have no default and must be given: total, model."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_dict(PretrainConfig, values)
    with pytest.raises(ValueError, match=r"must be given: model\.name\.$"):
        from_dict(PretrainConfig, to_dict(load()) | {"model": {"width": 3}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sed": 1}, r"no field 'sed' in the config\. Did you mean seed"),
        (
            {"model": {"name": "ViT-B/16", "widht": 3}},
            r"no field 'model\.widht' in the config. Did you mean model\.width",
        ),
        ({"seed": True}, "config.seed=True has the wrong type: int is needed"),
        ({"total": 90}, "config.total=90 has the wrong type: a duration such as '500 steps' or '90 epochs' is needed"),
        ({"polyak": 0.9}, "config.polyak=0.9 is not a section of fields, such as config.polyak.factor"),
        ({"optimizer": {"arguments": 3}}, "config.optimizer.arguments=3 .*: a section of names and values is needed"),
        ({"optimizer": {"arguments": {"f": print}}}, "config.optimizer.arguments.f=.* cannot be written"),
        ({"evaluation": {"every": "1 step", "evaluators": {"v2": {"splt": "x"}}}}, "no field 'evaluation.evaluators"),
    ],
)
def test_wrong_names_and_types(fields, message):
    with pytest.raises(ValueError, match=message):
        from_dict(PretrainConfig, to_dict(load()) | fields)
