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
    for field in section.fields:
        assert field.description.endswith("."), field.name


CONFIG_SOURCE = """
class Config:
    "About."
    width: int
    "Pixels   of a side."
    depth: int
    x = 1
    "X."
"""


def test_a_field_without_a_string_below_it_has_no_description():
    (config,) = ast.parse(CONFIG_SOURCE).body
    assert describe_fields(config) == {"width": "Pixels of a side.", "depth": ""}


def test_sections_hold_the_fields_of_all_runs():
    prefixes = {section.prefix.removesuffix(".").removesuffix(".NAME") for section in SECTIONS}
    paths = set()
    for section in SECTIONS:
        paths.update(section.prefix + field.name for field in section.fields)
    known = {*list_field_paths(PretrainConfig), *list_field_paths(FinetuneConfig)}

    assert paths - prefixes == {path.removesuffix(".NAME") for path in known}


def get_field(section_name, name):
    (section,) = (section for section in SECTIONS if section.name == section_name)
    (field,) = (field for field in section.fields if field.name == name)
    return field


@pytest.mark.parametrize(
    ("section", "name", "default"),
    [
        ("AnyRun", "total", None),
        ("AnyRun", "seed", "0"),
        ("AnyRun", "polyak", "PolyakConfig()"),
        ("ScheduleConfig", "timescale", "'10000 steps'"),
        ("OptimizerConfig", "arguments", "{}"),
    ],
)
def test_defaults_are_those_of_the_schema(section, name, default):
    assert get_field(section, name).default == default


@pytest.mark.parametrize(
    ("section", "name", "type"),
    [
        ("NetworkOptions", "gelu", "'tanh' | 'exact' | 'quick'"),
        ("ModelConfig", "depth", "int >= 1 | None"),
        ("OptimizerConfig", "beta1", "float in [0, 1)"),
        ("OptimizerConfig", "learning_rate_multipliers", "Mapping[str, float > 0]"),
    ],
)
def test_types_are_those_of_the_schema(section, name, type):
    assert get_field(section, name).type == type


def test_descriptions_name_the_part_and_the_needed_option():
    depth = get_field("ModelConfig", "depth").description
    momentum = get_field("OptimizerConfig", "momentum").description

    assert depth.startswith("Transformer: number of blocks.")
    assert momentum.endswith(" Needs name='sgd'.")


def test_every_class_of_the_schema_is_a_section():
    classes = []
    for module in (network_options, schema):
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__:
                classes.append(kind)

    assert len(SECTIONS) == len(classes)


def test_the_help_of_show_describes_every_field(capsys):
    cli.main(["show", "--help"])
    text = "".join(capsys.readouterr().out.split())

    for section in SECTIONS:
        for field in section.fields:
            expected = f"{section.prefix}{field.name}{field.description}["
            assert expected.replace(" ", "") in text
