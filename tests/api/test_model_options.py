"""Options of the Python API: known to type checkers, and the same as those of configs."""

import dataclasses
import re
import subprocess
import sys
import types
import typing

import pytest

import vit_jax
from tests.rejections import rejects
from tests.tiny import ROOT
from vit_jax.api import build, data, data_options, model_options
from vit_jax.config import InputConfig, ModelConfig
from vit_jax.config.rules import Reference
from vit_jax.weights import OPTIONS


def list_alternatives(hint):
    """Return the types of a union, and the values of literals; a reference is written as text."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = set()
        for one in typing.get_args(hint):
            alternatives |= list_alternatives(one)
        return alternatives
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return {str} if hint is Reference else {hint}


def test_options_of_create_model_are_the_fields_of_the_config():
    named = {"name", "compute_dtype"}
    fields = {field.name for field in dataclasses.fields(ModelConfig)} - named
    config_hints = typing.get_type_hints(ModelConfig)
    option_hints = typing.get_type_hints(model_options.ModelOptions)

    assert option_hints.keys() == fields
    for name, hint in option_hints.items():
        assert list_alternatives(hint) == list_alternatives(config_hints[name]), name


def test_options_of_open_data_are_the_fields_of_the_config():
    elsewhere = {"train_split", "test_split", "image_size", *data._OF_THE_STEP}
    fields = {field.name for field in dataclasses.fields(InputConfig)} - elsewhere
    config_hints = typing.get_type_hints(InputConfig)
    option_hints = typing.get_type_hints(data_options.DataOptions)

    assert option_hints.keys() == fields
    assert option_hints.pop("augmentations") == tuple[str, ...]  # references in the config
    for name, hint in option_hints.items():
        assert list_alternatives(hint) == list_alternatives(config_hints[name]), name


def test_options_of_load_model_are_those_of_its_two_steps():
    from_weights = set(build.from_weights.__kwdefaults__)
    elsewhere = {"num_classes", "image_size", "sharding", "data"}

    assert set(model_options.BuildOptions.__optional_keys__) == from_weights - elsewhere
    assert set(model_options.StatedOptions.__optional_keys__) == OPTIONS.keys() - elsewhere


def test_options_of_load_model_are_split():
    given = {
        "num_heads": 4,
        "compute_dtype": "bfloat16",
        "gelu": "exact",
        "resize": "direct",
    }

    build_options, stated = model_options.split_load_options(given)

    assert build_options == {"compute_dtype": "bfloat16", "resize": "direct"}
    assert stated == {"num_heads": 4, "gelu": "exact"}


@pytest.mark.parametrize(
    ("function", "error", "option", "meant"),
    [
        ("load_model", TypeError, "num_head", "num_heads"),
        ("load_model", TypeError, "num_classs", "num_classes"),
        ("create_model", ValueError, "num_classs", "num_classes"),
        ("create_model", ValueError, "detph", "depth"),
        ("open_data", ValueError, "batch_sise", "batch_size"),
        ("open_data", ValueError, "holdout_fracton", "holdout_fraction"),
    ],
)
def test_misspelt_options_are_rejected_before_a_file_is_read(
    function,
    error,
    option,
    meant,
):
    rule = rf"{function} has no option {option}=\. Did you mean '{meant}'\?"

    with pytest.raises(error, match=rule):
        getattr(vit_jax, function)("missing", **{option: 4})


@pytest.mark.parametrize("value", [None, -1, "10", True])
def test_the_number_of_classes_is_an_integer(value):
    with rejects("num_classes", "must be an integer from 0"):
        vit_jax.create_model("ViT-mu/2", num_classes=value)


PROGRAM = """
import vit_jax

model = vit_jax.create_model("ViT-B/16", depth=2, pool="gap", block="mine:Block")
vit_jax.load_model("w.npz", num_heads=4, resize="direct", compute_dtype="bfloat16")
vit_jax.create_model("ViT-B/16", detph=2)
vit_jax.create_model("ViT-B/16", gelu="exakt")
vit_jax.load_model("w.npz", num_head=4)
vit_jax.load_model("w.npz", resize="sideways")
text: str = model([]).logits_BK
vit_jax.open_data("digits", flip=False, batch_size=2)
vit_jax.open_data("digits", batch_sise=2)
vit_jax.open_data("digits", train_crop="non")
"""


@pytest.mark.slow
@pytest.mark.tools
def test_a_type_checker_finds_wrong_options(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", str(program)]

    checked = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    numbers = re.findall(r"program\.py:(\d+): error", checked.stdout)
    assert numbers == ["6", "7", "8", "9", "10", "12", "13"], checked.stdout
