"""The config that `--config=` names: recipes of the project and of users, and configs as JSON."""

import dataclasses
import json
import pathlib
import re
import sys

import pytest

from tests.rejections import rejects
from tests.tiny import ROOT
from vit_jax import config as config_package
from vit_jax.config import ScheduleConfig, derive, load_recipe, to_dict
from vit_jax.config.parsing import flatten
from vit_jax.config.recipes import COUNTERPARTS
from vit_jax.config.specification import load_studies, store_config

DIGITS = "configs/digits.py"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(name, text):
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write_file


# Files and names.


@pytest.mark.parametrize("name", [DIGITS, "digits"])
def test_recipe_is_found_from_any_folder(write, name):
    write("digits", "of another program")

    assert load_recipe(name).data == "digits"
    assert load_recipe(f"{name}:epochs=3").total == "3 epochs"


def test_a_recipe_in_the_home_folder(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("mine.py", "from configs.digits import get_config\n")

    assert load_recipe("~/mine.py:epochs=3").total == "3 epochs"


WRONG = f"load_recipe({DIGITS!r}), global_batch='many'"


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("configs/digit.py", None, "'configs/digit.py'.*Did you mean digits"),
        ("nowhere/at_all.txt", None, "'nowhere/at_all.txt'.*one of digits, "),
        ("", None, "no recipe ''"),
        (".", None, "'.': it is a folder"),
        ("mine", "x = 1", "'mine'. Use mine.py"),
        ("gs://bucket/mine.py:tiny", "", "--config=gs://bucket/mine.py:tiny.*address of a bucket"),
        ("mine.py", "x = 1", "mine.py.*get_config"),
        ("mine.py", "get_config = 1", "mine.py.*get_config"),
        ("mine.py", "def get_config(_): return {}", "mine.py.*PretrainConfig.*dict"),
        (
            "mine.py",
            f"def get_config(_): return dataclasses.replace({WRONG})",
            "config.global_batch='many'.*int",
        ),
    ],
)
def test_invalid_recipes(write, path, source, rule):
    write("mine.py", f"import dataclasses\nfrom vit_jax.config import load_recipe\n{source}\n")

    with rejects("", rule):
        load_recipe(path)


@pytest.mark.parametrize("path", ["vit_i1k:variant=B/16", "big_vision/configs/vit_i1k.py"])
def test_a_name_of_big_vision_has_the_recipe_of_the_migration_page(path):
    with rejects("vit_i1k", r"--config=pretrain_augreg:B/16,data=i1k \(docs/migration.md\)"):
        load_recipe(path)


def test_a_workdir_is_not_a_recipe_but_its_config_is(write):
    write("runs/a/config.json", json.dumps(to_dict(load_recipe("digits"))))

    with rejects("'runs/a'", "use runs/a/config.json"):
        load_recipe("runs/a")
    assert load_recipe("runs/a/config.json") == load_recipe("digits")


# Calls and errors of a user's file.


@pytest.mark.parametrize("parameter", ["", "arg=None", "arg=''", "arg", "*, seed=0"])
def test_forms_of_get_config(write, parameter):
    write(
        "mine.py",
        f"""
from vit_jax.config import load_recipe

def get_config({parameter}):
    return load_recipe("digits")
""",
    )

    assert load_recipe("mine.py") == load_recipe("digits")


@pytest.mark.parametrize(
    ("source", "specification", "message"),
    [
        ("def get_config(): return x", "mine.py", "mine.py, line 1: NameError: name 'x'"),
        (
            "def get_config(): return 1",
            "mine.py:tiny",
            "mine.py:tiny: get_config takes no argument",
        ),
        ("def get_config(a=None): return {}[a]", "mine.py", "mine.py, line 1: KeyError: None."),
        ("import nowhere", "mine.py", "line 1: ModuleNotFoundError.*PYTHONPATH"),
        ("import big_vision.configs.x", "mine.py", "line 1: Module.*x.py beside the recipe"),
        ("from configs.digit import y", "mine.py", "line 1: Module.*vit-jax recipes"),
        ("x = 1\ndef get_config(:", "mine.py", "mine.py, line 2: SyntaxError"),
        ("def get_config(a): b, c = a.split(',')", "mine.py", "line 1: .*If it needs a.*mine.py:A"),
        ("def get_config(): raise ValueError('a\\nb')", "mine.py", "mine.py, line 1: a b."),
        ("def get_config(): raise OSError('no')", "mine.py", "mine.py, line 1: OSError: no."),
    ],
)
def test_an_error_in_a_file_is_one_line(
    write,
    source,
    specification,
    message,
):
    write("mine.py", source + "\n")

    with rejects("", message) as caught:
        load_recipe(specification)
    assert "\n" not in str(caught.value)


def test_the_line_is_in_the_recipe_not_in_what_it_calls(write):
    write(
        "mine.py",
        """
from vit_jax.config import ModelConfig

def get_config(argument=""):
    return ModelConfig(name="ViT-B/61x")
""",
    )

    with rejects("mine.py, line 5: model.name='ViT-B/61x'"):
        load_recipe("mine.py")


def test_a_shipped_recipe_rejects_its_argument_in_its_words():
    with pytest.raises(ValueError, match=r"^examples=0: "):
        load_recipe("pretrain_own:ViT-Ti/16,examples=0")


# Modules beside a recipe.


def test_a_recipe_imports_shipped_recipes_and_modules_beside_it(write):
    write("a/configs/common.py", "LENGTH = '3 epochs'\n")
    write("b/configs/common.py", "LENGTH = '4 epochs'\n")
    source = """
import dataclasses
import big_vision.configs.common as common
from configs.digits import get_config as build_digits

def get_config(argument=""):
    from vit_jax.configs import common as again
    assert again.LENGTH == common.LENGTH
    return dataclasses.replace(build_digits(argument), total=common.LENGTH)
"""
    write("a/configs/x.py", source)
    write("b/configs/deep/x.py", source)

    assert load_recipe("a/configs/x.py").total == "3 epochs"
    assert load_recipe("b/configs/deep/x.py").total == "4 epochs"
    assert "big_vision" not in sys.modules
    assert "vit_jax.configs" not in sys.modules


# JSON.


def read_back(write, config):
    return load_recipe(write("config.json", json.dumps(to_dict(config))))


@pytest.mark.parametrize("name", ["digits", "finetune:any,own", "pretrain_deit3:H/14,data=i21k"])
def test_json_is_the_same_config(write, name):
    assert read_back(write, load_recipe(name)) == load_recipe(name)


def test_overrides_of_json(write):
    write("config.json", json.dumps(to_dict(load_recipe("digits"))))

    config = load_recipe("config.json", ["--config.model.width=96"])

    assert config == derive(load_recipe("digits"), {"model.width": 96})
    assert load_studies("config.json") == {}


def test_a_run_stores_requested_values_beside_resolved_ones(write):
    requested = derive(load_recipe("digits"), {"model.remat": "auto", "model.width": 96})
    run = derive(requested, {"model.remat": "full", "sharding.parameters": "fsdp"})
    stored = store_config(run, requested)

    assert stored["model"]["remat"] == "full"
    assert stored["requested"] == {"model.remat": "auto", "sharding.parameters": "auto"}
    assert load_recipe(write("config.json", json.dumps(stored))) == requested
    assert "requested" not in store_config(run, run)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "not readable JSON"),
        ("[]", "must be the config of a run"),
        ('{"architectures": []}', "must be the config of a run"),
        ('{"data": null}', "must have values of"),
        ('{"data": null, "architectures": []}', "no field 'architectures'"),
        ('{"data": null, "requested": 1}', "requested must be an object"),
        ('{"data": null, "requested": {"nothing": 1}}', "no field 'nothing'"),
        ('{"data": null, "model": {"name": 3}}', "model.name=3|must have values"),
    ],
)
def test_invalid_json(write, text, rule):
    write("config.json", text)

    with rejects("config.json", rule):
        load_recipe("config.json")


def test_a_missing_json_and_an_argument_are_rejected(write):
    with rejects("nothing.json", "No such file"):
        load_recipe("nothing.json")
    write("config.json", json.dumps(to_dict(load_recipe("digits"))))
    with rejects("config.json:ViT-B/16", "takes no argument"):
        load_recipe("config.json:ViT-B/16")


# Changes in Python.


def test_derive_changes_these_fields_only():
    config = load_recipe("digits")
    schedule = ScheduleConfig(
        learning_rate=1,
        warmup="5 steps",
        decay="constant",
    )
    derived = derive(
        config,
        {
            "model.width": 96,
            "input.image_size": 32,
            "total": "20 epochs",
            "schedule": schedule,
            "config.evaluation.evaluators.real.split": "test",
            "optimizer.learning_rate_multipliers": {"head/*": 2},
        },
    )
    before = flatten(to_dict(config))
    after = flatten(to_dict(derived))
    changed = {name for name in after if before.get(name) != after[name]}

    assert derived.input.image_size == (32, 32)
    assert derived.schedule == dataclasses.replace(schedule, learning_rate=1.0)
    assert derived.evaluation.evaluators["real"].split == "test"
    assert changed == {
        "model.width",
        "input.image_size",
        "total",
        "schedule.learning_rate",
        "schedule.warmup",
        "schedule.decay",
        *(
            name
            for name in changed
            if name.startswith(
                ("evaluation.evaluators.real.", "optimizer.learning_rate_multipliers.")
            )
        ),
    }
    assert config == load_recipe("digits")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model.widht": 8}, "'model.widht'.*model.width"),
        ({"model.patch_size": 8}, "'model.patch_size'.*model.name"),
        ({"model.width": "96"}, "config.model.width='96'.*int"),
        ({"model": {"width": 96}}, "config.model.*section"),
        ({"total": 20}, "config.total=20.*duration"),
    ],
)
def test_wrong_changes(changes, rule):
    with rejects("", rule):
        derive(load_recipe("digits"), changes)


def test_public_names():
    assert config_package.derive is derive


# Pages.


def test_the_recipe_of_the_page_works(write):
    page = (ROOT / "docs" / "custom_recipes.md").read_text()
    source = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]

    config = load_recipe(write("my/recipe.py", source))

    assert config == derive(
        load_recipe("pretrain_own:ViT-Ti/16"),
        {"data": "folder:/data/birds", "model.width": 128, "total": "50 epochs"},
    )


def test_the_commands_of_migration_work():
    page = (ROOT / "docs" / "migration.md").read_text()
    commands = re.findall(r"`vit-jax \w+ --config=(\S+)(.*?)`", page)

    assert len(commands) == 5
    assert {recipe for recipe, _ in commands} == {*COUNTERPARTS.values()}
    for recipe, words in commands:
        load_recipe(recipe, re.findall(r"--config\.\S+", words))
