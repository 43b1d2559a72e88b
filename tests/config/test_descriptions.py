"""Descriptions of the fields of the schema."""

import ast
import dataclasses

import pytest

from vit_jax import cli
from vit_jax.config import FinetuneConfig, PretrainConfig, network_options, schema
from vit_jax.config.descriptions import describe_fields, read_sections
from vit_jax.config.parsing import list_field_paths

SECTIONS = read_sections()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_field_has_a_description(section):
    assert not [field.name for field in section.fields if not field.description.endswith(".")]


def test_a_field_without_a_string_below_it_has_no_description():
    source = """
class Config:
    "About."
    width: int
    "Pixels   of a side."
    depth: int
    x = 1
    "X."
"""
    assert describe_fields(ast.parse(source).body[0]) == {"width": "Pixels of a side.", "depth": ""}


def test_sections_hold_the_fields_of_all_runs():
    paths = {section.prefix + field.name for section in SECTIONS for field in section.fields}
    sections = {section.prefix.removesuffix(".").removesuffix(".NAME") for section in SECTIONS}
    known = {*list_field_paths(PretrainConfig), *list_field_paths(FinetuneConfig)}

    assert paths - sections == {path.removesuffix(".NAME") for path in known}


def test_types_and_defaults_are_those_of_the_schema():
    fields = {section.name: {field.name: field for field in section.fields} for section in SECTIONS}

    for name, default in (("total", None), ("seed", "0"), ("polyak", "PolyakConfig()")):
        assert fields["AnyRun"][name].default == default
    assert fields["ScheduleConfig"]["timescale"].default == "'10000 steps'"
    assert fields["OptimizerConfig"]["arguments"].default == "{}"
    assert fields["NetworkOptions"]["gelu"].type == "'tanh' | 'exact' | 'quick'"
    assert fields["OptimizerConfig"]["momentum"].description.endswith(" Needs name='sgd'.")
    assert fields["ModelConfig"]["depth"].description.startswith("Transformer: number of blocks.")
    assert fields["ModelConfig"]["depth"].type == "int >= 1 | None"
    assert fields["OptimizerConfig"]["beta1"].type == "float in [0, 1)"
    assert fields["OptimizerConfig"]["learning_rate_multipliers"].type == "Mapping[str, float > 0]"

    classes = [
        kind
        for module in (network_options, schema)
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    assert len(SECTIONS) == len(classes)


def test_the_help_of_show_describes_every_field(capsys):
    cli.main(["show", "--help"])
    text = "".join(capsys.readouterr().out.split())

    for section in SECTIONS:
        for field in section.fields:
            assert f"{section.prefix}{field.name}{field.description}[".replace(" ", "") in text
