"""Several files with an index are read as one; an index and shards that differ are one error."""

import json

import numpy as np
import pytest

from tests.weights.formats.samples import assert_read, read_all
from tests.weights.small_networks import (
    SQUARE,
    VIT,
    arrays_of,
    assert_same,
    weights_of,
)
from vit_jax.weights import load_weights
from vit_jax.weights.formats import open_arrays, sharded, write_npz, write_safetensors
from vit_jax.weights.library_config import write_library_config

ARRAYS = {f"blocks.{number}.weight": np.arange(number, dtype=np.float32) for number in range(7)}


def split(folder, arrays, count, stem="model"):
    """Write arrays into shards, each `count`-th into one; return the index."""
    folder.mkdir(exist_ok=True)
    names = sorted(arrays)
    weight_map = {}

    for number in range(count):
        shard = f"{stem}-{number + 1:05}-of-{count:05}.safetensors"
        names_of_shard = names[number::count]
        arrays_of_shard = {name: arrays[name] for name in names_of_shard}
        write_safetensors(folder / shard, arrays_of_shard, {})
        weight_map |= dict.fromkeys(names_of_shard, shard)

    index = folder / f"{stem}.safetensors.index.json"
    write_index(index, weight_map)
    return index


def write_index(index, weight_map):
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    index.write_text(json.dumps(content))


@pytest.fixture
def index(tmp_path):
    return split(tmp_path, ARRAYS, 2)


def read_weight_map(index):
    return json.loads(index.read_text())["weight_map"]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_arrays_of_shards_are_those_of_one_file(tmp_path, count):
    assert_read(split(tmp_path, ARRAYS, count), ARRAYS, {})


@pytest.mark.parametrize("a", [VIT, SQUARE], ids=["wide", "square"])
@pytest.mark.parametrize("format_name", ["huggingface", "timm"])
def test_a_folder_with_its_configuration(tmp_path, a, format_name):
    """The index decides although another file is there; either of folder and index is a source."""
    index = split(tmp_path, arrays_of(a, format_name), 4)
    write_library_config(tmp_path, format_name, a, ("x", "y", "z"), None)
    write_safetensors(
        tmp_path / "consolidated.safetensors",
        {"x": np.zeros(1)},
        {},
    )

    for source in (tmp_path, index):
        weights = load_weights(source)
        assert_same(weights.parameters, weights_of(a).parameters)
        assert weights.class_names == ("x", "y", "z")
        assert weights.source == f"{index} ({format_name})"


def test_an_index_of_any_name_in_a_folder(tmp_path):
    split(tmp_path, arrays_of(SQUARE, "timm"), 2, stem="backbone.fp32")

    assert load_weights(tmp_path, num_heads=2).architecture.width == SQUARE.width


def test_several_indices_of_other_names_in_a_folder(tmp_path):
    split(tmp_path, arrays_of(SQUARE, "timm"), 2, stem="backbone.fp32")
    split(tmp_path, arrays_of(SQUARE, "timm"), 2, stem="other")

    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_weights(tmp_path)


def test_a_missing_shard_is_named(index):
    index.with_name("model-00002-of-00002.safetensors").unlink()
    message = r"index\.json: .* not in its folder: model-00002-of-00002\.safetensors\."

    with pytest.raises(ValueError, match=message):
        read_all(index)


def test_a_shard_that_the_index_does_not_name(tmp_path):
    index = split(tmp_path, ARRAYS, 3)
    weight_map = {}
    for name, shard in read_weight_map(index).items():
        if "-00003-of-" not in shard:
            weight_map[name] = shard
    write_index(index, weight_map)
    message = r"not in the index: model-00003-of-00003\.safetensors\. Fetch all"

    with pytest.raises(ValueError, match=message):
        read_all(index)


def test_a_shard_of_another_save_does_no_harm(index):
    write_safetensors(
        index.with_name("model-00003-of-00003.safetensors"),
        {"x": np.zeros(1)},
        {},
    )
    assert_read(index, ARRAYS, {})


def test_arrays_that_differ_are_listed(index):
    weight_map = read_weight_map(index)
    first, second, *_ = sorted(weight_map)
    first_shard = weight_map.pop(first)
    second_shard = weight_map[second]
    write_index(index, weight_map | {"nowhere": second_shard})
    assert first_shard != second_shard

    words = rf"nowhere is not in {second_shard}, |{first} of {first_shard} is not in the index"
    with pytest.raises(ValueError, match=words) as caught:
        read_all(index)

    assert "nowhere" in str(caught.value)
    assert f"{first} of " in str(caught.value)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "..\\a.safetensors",
        "..",
        3,
        None,
        "a.npz",
    ],
)
def test_an_index_names_no_file_outside_its_folder(tmp_path, shard):
    index = split(tmp_path / "folder", ARRAYS, 1)
    write_safetensors(tmp_path / "model.safetensors", ARRAYS, {})
    write_index(index, read_weight_map(index) | {"x": shard})
    message = r"array 'x' is in .*: must be the name of a \.safetensors file in the folder"

    with pytest.raises(ValueError, match=message):
        read_all(index)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": ["a"]}',
        "{",
        '{"weight_map": 3}',
    ],
)
def test_an_index_without_a_map(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    message = r"index\.json.*(no weight_map|not readable JSON)"

    with pytest.raises(ValueError, match=message):
        read_all(path)


def test_a_shard_of_another_kind_is_named(index):
    shard = index.with_name("model-00001-of-00002.safetensors")
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = r"'model-00001-of-00002\.safetensors': this is a git-lfs pointer"

    with pytest.raises(ValueError, match=message):
        read_all(index)


def test_a_shard_of_another_format(index):
    write_npz(
        index.with_name("model-00001-of-00002.safetensors"),
        {"x": np.zeros(1)},
        {},
    )
    message = "the index and its shards differ"

    with pytest.raises(ValueError, match=message):
        read_all(index)


def test_an_index_of_pickles_has_the_command(tmp_path):
    index = tmp_path / "pytorch_model.bin.index.json"
    first = "pytorch_model-00001-of-00002.bin"
    second = "pytorch_model-00002-of-00002.bin"
    write_index(index, {"a": second, "b": first})
    paths = f"{tmp_path}/model.safetensors {tmp_path}/{first} {tmp_path}/{second}"
    message = "index of PyTorch files, which runs code"

    with pytest.raises(ValueError, match=message) as caught:
        read_all(index)

    assert str(caught.value).endswith(paths)


def test_the_number_of_shards_is_bounded(index, monkeypatch):
    monkeypatch.setattr(sharded, "MAX_SHARDS", 1)
    message = "2 shards are more than the 1 allowed"

    with pytest.raises(ValueError, match=message):
        read_all(index)


def test_the_number_of_arrays_is_bounded(index, monkeypatch):
    monkeypatch.setattr(sharded.stored, "MAX_ARRAYS", 1)
    message = "arrays are more than the 1 allowed"

    with pytest.raises(ValueError, match=message):
        read_all(index)


def test_one_shard_alone(tmp_path):
    split(tmp_path, arrays_of(SQUARE, "timm"), 2)
    message = r"is one of several shards\. Give its folder"

    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path / "model-00001-of-00002.safetensors")


def test_shards_without_an_index(tmp_path):
    split(tmp_path, arrays_of(SQUARE, "timm"), 2).unlink()
    message = r"holds shards .* no index \(model\.safetensors\.index\.json\)"

    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path)


def test_the_files_are_closed(index):
    with open_arrays(index) as file:
        name = next(iter(file.arrays))

    with pytest.raises(ValueError, match="index"):
        file.read(name)
