"""Kinds of data: messages, help texts and openers come from one row for each kind."""

import importlib
import inspect

import pytest

from vit_jax.config.data_kinds import KINDS, find_kind, infer_data, spell_descriptions
from vit_jax.config.descriptions import read_sections
from vit_jax.data.kinds.listing import Listing


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.prefix)
def test_a_row_names_its_opener_and_recognises_its_example(kind):
    module_name, _, name = kind.opener.partition(":")
    module = importlib.import_module(f"vit_jax.data.kinds.{module_name}")
    opener = getattr(module, name)
    if kind.is_listing:
        assert issubclass(opener, Listing)
        assert opener.kind == kind.prefix
    else:
        parameters = list(inspect.signature(opener).parameters)
        assert parameters[:3] == ["name", "split", "data_dir"]

    assert find_kind(kind.example) is kind


@pytest.mark.parametrize(
    "data", ["", "digits:", "digits:1", "folder:", "folder", "folders:x", "my.code:f"]
)
def test_other_texts_name_no_kind(data):
    assert find_kind(data) is None


@pytest.mark.parametrize(
    ("files", "text", "data"),
    [
        (["photos/cat/1.png"], "photos", "folder:photos"),
        (["photos/cat/1.png", "photos/labels.tar"], "photos", "folder:photos"),
        (["shards/0.tar", "shards/1.tar"], "shards", "wds:shards"),
        (["beans/data/train-0.parquet", "beans/README.md"], "beans", "parquet:beans"),
        ([], "labels.csv", "csv:labels.csv"),
        ([], "labels.csv#comma", "csv:labels.csv#comma"),
        ([], "shards/*.tar", "wds:shards/*.tar"),
        (["photos/cat/1.png"], "folder:photos", "folder:photos"),
        ([], "digits", "digits"),
        ([], "tfds:cifar10", "tfds:cifar10"),
        ([], "missing", "missing"),
        ([], "my.code:f", "my.code:f"),
    ],
)
def test_the_kind_of_a_path(tmp_path, monkeypatch, files, text, data):
    monkeypatch.chdir(tmp_path)
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    assert infer_data(text) == data


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.prefix)
def test_the_schema_and_messages_list_every_kind(kind):
    fields = {}
    for section in read_sections():
        for field in section.fields:
            fields[field.name] = field

    assert f'"{kind.form}"' in fields["data"].description
    assert f"{kind.form} ({kind.description})" in spell_descriptions()
