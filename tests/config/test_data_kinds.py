"""Kinds of data: messages, help texts and openers come from one row for each kind."""

import importlib
import inspect

import pytest

from vit_jax.config.data_kinds import KINDS, find_kind, spell_descriptions
from vit_jax.config.descriptions import read_sections
from vit_jax.data.kinds.listing import Listing


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.prefix)
def test_a_row_names_its_opener_and_recognises_its_example(kind):
    module, _, name = kind.opener.partition(":")
    opener = getattr(importlib.import_module(f"vit_jax.data.kinds.{module}"), name)
    if kind.is_listing:
        assert issubclass(opener, Listing)
        assert opener.kind == kind.prefix
    else:
        assert list(inspect.signature(opener).parameters)[:3] == ["name", "split", "data_dir"]

    assert find_kind(kind.example) is kind


@pytest.mark.parametrize(
    "data", ["", "digits:", "digits:1", "folder:", "folder", "folders:x", "my.code:f"]
)
def test_other_texts_name_no_kind(data):
    assert find_kind(data) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.prefix)
def test_the_schema_and_messages_list_every_kind(kind):
    fields = {field.name: field for section in read_sections() for field in section.fields}

    assert f'"{kind.form}"' in fields["data"].description
    assert f"{kind.form} ({kind.description})" in spell_descriptions()
