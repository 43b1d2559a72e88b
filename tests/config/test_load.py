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


@pytest.fixture
def write(tmp_path):
    """Writes a recipe file and returns its path."""

    def write_recipe(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write_recipe


# Overrides.


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=3", 3),
        ("seed=0x10", 16),
        ("data=folder:/a=b,c", "folder:/a=b,c"),
        ("data=None", None),
        ("total=7 epochs", "7 epochs"),
        ("model.name=ViT-B/16", "ViT-B/16"),
        ("model.pool=map", "map"),
        ("model.width=96", 96),
        ("model.width=None", None),
        ("model.pool=None", None),
        ("model.residual_unit=postactivation", "postactivation"),  # None in the recipe
        ("input.classes=5,6,7", ("5", "6", "7")),
        ("input.classes=('5', 'great white')", ("5", "great white")),
        ("schedule.drop_at_fraction=0.5", (0.5,)),
        ("input.image_size=16,24", (16, 24)),
        ("input.image_size=(16, 24)", (16, 24)),
        ("input.crop_area_fraction=(0.1,1)", (0.1, 1.0)),
        ("input.flip=true", True),
        ("input.cache_records=False", False),
        ("input.mixup_alpha=0", 0.0),
        ("input.num_workers=0", 0),  # None in the recipe
        ("input.data_dir=/data/tfds", "/data/tfds"),
        ("optimizer.clip_global_norm=None", None),
        ("optimizer.clip_global_norm=2", 2.0),
        ("polyak.factor=0.9999", 0.9999),
        ("schedule.learning_rate=3e-4", 3e-4),
        ("model.network=mine.models:Net.build", "mine.models:Net.build"),
        ("model.position_embedding=mine:rotary", "mine:rotary"),
        ("optimizer.name=optax:lion", "optax:lion"),
        ("optimizer.frozen=embedding/*,encoder/*/bias", ("embedding/*", "encoder/*/bias")),
        ("optimizer.arguments.b1=0.95", 0.95),  # by the value: any type
        ("optimizer.arguments.nesterov=True", True),
        ("optimizer.arguments.mask=None", None),
        ("optimizer.arguments.dims=(1, 2)", (1, 2)),
        ("optimizer.arguments.mode=fan in", "fan in"),
        ("optimizer.learning_rate_multipliers.embedding/*=0.1", 0.1),
        ("optimizer.learning_rate_multipliers.head/*=3", 3.0),
        ("evaluation.evaluators.v2.split=test", "test"),
        ("evaluation.evaluators.v2.every=None", None),
        ("evaluation.evaluators.v2.arguments.k=5", 5),
    ],
)
def test_override(override, value):
    name = override.partition("=")[0]
    found = get(load(override), name)
    assert (found, type(found)) == (value, type(value))


def test_overrides_change_nothing_else():
    changed = flatten(to_dict(load("model.width=96", "total=7 epochs")))
    before = flatten(to_dict(load()))
    assert {name for name in before if before[name] != changed[name]} == {"model.width", "total"}


def test_later_override_wins():
    assert load("total=5 epochs", "seed=1", "total=7 epochs").total == "7 epochs"
    assert load("model.width=None", "model.width=32").model.width == 32
    assert load("model.width=32", "model.width=None").model.width is None


def test_argument_and_override():
    assert load_recipe(f"{DIGITS}:epochs=3").total == "3 epochs"
    assert load_recipe(f"{DIGITS}:epochs=3", ["--config.total=4 epochs"]).total == "4 epochs"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.wdith=3", "There is no field 'model.wdith' in the config. Nearest: model.width"),
        ("model.learning_rate=3", "no field 'model.learning_rate' in the config. Nearest: schedule.learning_rate"),
        ("width=3", "no field 'width' in the config. Nearest: model.width"),
        ("zzzz=3", "no field 'zzzz' in the config. Fields here: checkpoint.best_metric, checkpoint.every"),
        ("model.name.first=3", "no field 'model.name.first' in the config. Nearest: model.name"),
        ("model=ViT-B/16", "config.model is a section; set one of its fields: model.name, model.network"),
        ("model", "config.model is a section"),
        ("model.width", "--config.model.width needs a value: --config.model.width=VALUE"),
        ("seed=1.5", "config.seed='1.5' has the wrong type: int is needed"),
        ("seed=None", "config.seed='None' has the wrong type: int is needed"),
        ("global_batch=1e3", "config.global_batch='1e3' has the wrong type: int is needed"),
        ("model.width=wide", "config.model.width='wide' has the wrong type: int or None is needed"),
        ("schedule.learning_rate=high", "config.schedule.learning_rate='high' has the wrong type: float is needed"),
        ("input.mixup_alpha=nan", "config.input.mixup_alpha=nan is not allowed: a finite number is needed"),
        ("optimizer.clip_global_norm=inf", "config.optimizer.clip_global_norm=inf is not allowed: a finite number"),
        ("optimizer.clip_global_norm=x", "config.optimizer.clip_global_norm='x' has the wrong type: float or None"),
        ("input.flip=maybe", "config.input.flip='maybe' has the wrong type: bool is needed"),
        ("input.image_size=16", r"config.input.image_size=\(16,\) has the wrong type: a tuple \(int, int\) is needed"),
        ("input.image_size=16,16,3", r"has the wrong type: a tuple \(int, int\) is needed"),
        ("input.image_size=16,16.5", "config.input.image_size=16.5 has the wrong type: int is needed"),
        ("model.pool=max", "config.model.pool='max' is not allowed: one of 'token', 'gap', 'map' or None is needed"),
        ("model.pool=3", "config.model.pool='3' is not allowed: one of 'token', 'gap', 'map' or None is needed"),
        ("schedule.drop_at_fraction=0.5,late", "has the wrong type: values of type float with commas between them"),
        ("schedule.drop_at_fraction=nan", "a finite number is needed"),
        ("total=90", "config.total: '90' is not a duration: write a number and a unit"),
        ("total=None", "config.total: 'None' is not a duration"),
        ("schedule.warmup=2 fraction", "config.schedule.warmup: '2 fraction' is not a duration"),
        ("optimizer.name=lion", "name='lion' is not allowed: one of 'adam', 'sgd' or a reference package.module:name"),
        ("model.network=resnet", "config.model.network='resnet' has the wrong type: a reference package.module:name"),
        ("optimizer.arguments=b1", "config.optimizer.arguments is a section; .*: optimizer.arguments.NAME"),
        ("optimizer.arguments.x={1, 2}", r"config.optimizer.arguments.x=\{1, 2\} cannot be written to config.json"),
        ("optimizer.learning_rate_multipliers.head/*=fast", "'fast' has the wrong type: float is needed"),
        ("evaluation.evaluators.v2=test", "is a section; set one of its fields: evaluation.evaluators.v2.kind, "),
        ("evaluation.evaluators.v2.spilt=x", "no field 'evaluation.evaluators.v2.spilt' .* evaluation.evaluators.NAME"),
        ("evaluation.evaluators.v2.every=90", "config.evaluation.evaluators.v2.every: '90' is not a duration"),
        ("evaluation.evaluators.v2.kind=fewshot", "kind='fewshot' is not allowed: one of 'classification' or a ref"),
    ],
)
def test_bad_override(override, message):
    with pytest.raises(ValueError, match=message):
        load(override)


# Recipe files.


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("configs/digit.py", r"There is no recipe 'configs/digit\.py'\. Did you mean digits\?"),
        (
            "nowhere/at_all.txt",
            r"There is no recipe 'nowhere/at_all\.txt'\. Give the path of a file, or one of digits, ",
        ),
        ("", "There is no recipe ''"),
    ],
)
def test_missing_recipe(path, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


@pytest.mark.parametrize("name", [DIGITS, "digits"])
def test_recipe_is_found_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(name).data == "digits"
    assert load_recipe(f"{name}:epochs=3").total == "3 epochs"


def test_a_file_that_is_no_python_hides_no_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("digits").write_text("of another program")
    assert load_recipe("digits").data == "digits"


def test_recipe_without_get_config(write):
    with pytest.raises(ValueError, match=r"mine\.py is not a recipe: it defines no get_config\(argument\)"):
        load_recipe(write("x = 1\n"))


def test_recipe_that_returns_something_else(write):
    with pytest.raises(ValueError, match=r"get_config returned dict, not a dataclass such as PretrainConfig"):
        load_recipe(write("def get_config(argument):\n    return {}\n"))


def test_values_of_a_recipe_are_checked_without_overrides(write):
    source = "import dataclasses\nfrom vit_jax.config import load_recipe\n"
    source += "def get_config(argument):\n"
    source += f"    return dataclasses.replace(load_recipe({DIGITS!r}), global_batch='many')\n"
    with pytest.raises(ValueError, match=r"config\.global_batch='many' has the wrong type: int is needed"):
        load_recipe(write(source))


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


def test_text_holds_every_field_once_and_can_be_read_back():
    config = load("data=folder:a: b")
    lines = to_text(config).splitlines()
    read = {name: json.loads(value) for name, value in (line.split(": ", 1) for line in lines)}
    assert lines == sorted(lines)
    assert len(read) == len(lines)
    assert read == json.loads(json.dumps(flatten(to_dict(config))))


def values_with(**fields):
    return to_dict(load()) | fields


def test_fields_with_defaults_may_be_left_out():
    values = to_dict(load())
    del values["sharding"], values["seed"]
    assert from_dict(PretrainConfig, values) == load()


def test_unknown_field():
    with pytest.raises(ValueError, match=r"no field 'sed' in the config\. Nearest: seed"):
        from_dict(PretrainConfig, values_with(sed=1))
    model = {"name": "ViT-B/16", "widht": 3}
    with pytest.raises(ValueError, match=r"no field 'model\.widht' in the config. Nearest: model\.width"):
        from_dict(PretrainConfig, values_with(model=model))


def test_missing_fields_are_those_without_a_default():
    values = to_dict(load())
    del values["total"], values["model"], values["seed"]
    message = "These fields have no default and must be given: total, model."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_dict(PretrainConfig, values)
    with pytest.raises(ValueError, match=r"must be given: model\.name\.$"):
        from_dict(PretrainConfig, values_with(model={"width": 3}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": True}, "config.seed=True has the wrong type: int is needed"),
        ({"seed": None}, "config.seed=None has the wrong type: int is needed"),
        ({"total": 90}, "config.total=90 has the wrong type: a duration such as '500 steps' or '90 epochs' is needed"),
        ({"data": 3}, "config.data=3 has the wrong type: str or None is needed"),
        ({"polyak": {"factor": False}}, "config.polyak.factor=False has the wrong type: float or None is needed"),
        ({"polyak": {"bias_correction": 1}}, "config.polyak.bias_correction=1 has the wrong type: bool is needed"),
        ({"polyak": 0.9}, "config.polyak=0.9 is not a section; its fields: factor, start, bias_correction"),
        ({"optimizer": {"arguments": 3}}, "config.optimizer.arguments=3 .*: a section of names and values is needed"),
        ({"optimizer": {"arguments": {"f": print}}}, "config.optimizer.arguments.f=.* cannot be written"),
        ({"optimizer": {"learning_rate_multipliers": {"a": "x"}}}, r"learning_rate_multipliers.a='x' has the wrong"),
        ({"evaluation": {"every": "1 step", "evaluators": {"v2": {"splt": "x"}}}}, "no field 'evaluation.evaluators"),
    ],
)
def test_wrong_type(fields, message):
    with pytest.raises(ValueError, match=message):
        from_dict(PretrainConfig, values_with(**fields))
