"""Options of the Python API: known to type checkers, and the same as those of configs."""

import dataclasses
import re
import subprocess
import sys
import types
import typing

import pytest

import vit_jax
from tests.tiny import ROOT
from vit_jax.api import build, model_options
from vit_jax.config import ModelConfig
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


def test_misspelt_options_are_rejected_before_a_file_is_read():
    with pytest.raises(TypeError, match=r"load_model has no option num_head=\. Did .* 'num_heads'"):
        vit_jax.load_model("missing", num_head=4)


PROGRAM = """
import vit_jax

model = vit_jax.create_model("ViT-B/16", depth=2, pool="gap", block="mine:Block")
vit_jax.load_model("w.npz", num_heads=4, resize="direct", compute_dtype="bfloat16")
vit_jax.create_model("ViT-B/16", detph=2)
vit_jax.create_model("ViT-B/16", gelu="exakt")
vit_jax.load_model("w.npz", num_head=4)
vit_jax.load_model("w.npz", resize="sideways")
text: str = model([]).logits_BK
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
    assert numbers == ["6", "7", "8", "9", "10"], checked.stdout
