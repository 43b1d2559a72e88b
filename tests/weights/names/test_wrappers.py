"""Networks below the prefixes of wrappers, and beside the state of training."""

import dataclasses
import re

import numpy as np
import pytest

from tests.columns import list_column
from tests.weights.small_networks import (
    NETWORKS,
    SQUARE,
    arrays_of,
    assert_same,
    weights_of,
)
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_safetensors
from vit_jax.weights.names import find_wrapping, is_network

TIMM = dataclasses.replace(SQUARE, gelu="exact")
OPTIONS = {"num_heads": 2}


def add_prefix(prefix, arrays):
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def load(tmp_path, arrays, **options):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, arrays, {})
    return load_weights(path, **{**OPTIONS, **options})


def change_values(arrays):
    """Return the arrays of another network of the same names."""
    return {name: array + 1 for name, array in arrays.items()}


def find_notes(weights, words):
    return [note for note in weights.notes if words in note]


def find_names(weights):
    return set(list_column(weights.statuses, "name"))


PREFIXES = [
    "module.",
    "_orig_mod.",
    "model.",
    "backbone.",
    "student.",
    "teacher.",
    "state_dict.",
    "model.backbone.",
    "module._orig_mod.",
    "state_dict.model.net.",
    "_orig_mod.module.",
    "teacher.backbone._fsdp_wrapped_module.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
def test_a_prefix_is_removed_and_named_once(prefix, format_name, tmp_path):
    arrays = add_prefix(prefix, arrays_of(SQUARE, format_name))
    note = f"The names of the network begin with {prefix!r} in the file; this prefix is removed."

    weights = load(tmp_path, arrays)

    assert_same(weights.parameters, weights_of(SQUARE).parameters)
    assert find_notes(weights, "prefix") == [note]
    assert find_names(weights) == set(arrays)


def test_names_of_wrappers_inside_names(tmp_path):
    arrays = {}
    for name, array in arrays_of(SQUARE, "timm").items():
        arrays[name.replace(".attn.", "._orig_mod.attn.")] = array

    weights = load(tmp_path, arrays)

    assert_same(weights.parameters, weights_of(SQUARE).parameters)
    assert len(find_notes(weights, "inside the network's names")) == 1
    assert find_names(weights) == set(arrays)


def test_a_plain_file_has_no_note(tmp_path):
    weights = load(tmp_path, arrays_of(SQUARE, "timm"))

    assert not find_notes(weights, "names")
    assert not find_notes(weights, "not read")


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ("teacher.backbone.", "student.module.backbone."),
        ("state_dict_ema.", "state_dict."),
        ("target_encoder.module.", "encoder.module."),
        ("model_ema.module.", "model."),
    ],
)
def test_the_average_is_taken_before_the_trained_network(
    taken,
    left,
    tmp_path,
):
    arrays = arrays_of(SQUARE, "timm")
    trained = add_prefix(left, change_values(arrays))
    state = {
        "epoch": np.int64([3]),
        "optimizer.state.0.exp_avg": np.ones(3),
        "dino_loss.center": np.ones((1, 4)),
    }
    word = left.partition(".")[0]

    weights = load(
        tmp_path,
        {
            **trained,
            **add_prefix(taken, arrays),
            **state,
        },
    )
    (note,) = find_notes(weights, "not read")
    ignored = {}
    for status in weights.statuses:
        if not status.ours:
            ignored[status.name] = status.status

    assert_same(weights.parameters, weights_of(SQUARE).parameters)
    assert f"{word} ({len(arrays)}, another network of the file)" in note
    for part in ("epoch", "optimizer", "dino_loss"):
        assert f"{part} (1, state of training)" in note
    assert not note.startswith("WARNING")
    assert ignored.keys() == trained.keys() | state.keys()
    assert ignored["epoch"] == "ignored (state of training)"


HEADLESS = NETWORKS["headless"]


def test_heads_of_pre_training_are_named(tmp_path):
    arrays = add_prefix("teacher.backbone.", arrays_of(HEADLESS, "timm"))
    heads = {
        "teacher.dino_head.mlp.0.weight": np.ones((4, 16)),
        "teacher.ibot_head.mlp.0.weight": np.ones((4, 16)),
    }

    weights = load(tmp_path, arrays | heads, image_size=HEADLESS.image_size)
    (note,) = find_notes(weights, "not read")

    assert_same(weights.parameters, weights_of(HEADLESS).parameters)
    assert "teacher.dino_head (1, a part of pre-training), " in note
    assert ", teacher.ibot_head (1, a part of pre-training)" in note


def test_without_a_head_of_classification_the_network_lacks_its_outputs(tmp_path):
    arrays = add_prefix("model.backbone.", arrays_of(HEADLESS, "timm"))
    heads = {
        "model.head.weight": np.ones((5, 16)),
        "model.fc_norm.bias": np.ones(16),
    }

    weights = load(tmp_path, arrays | heads, image_size=HEADLESS.image_size)
    (note,) = find_notes(weights, "not read")

    assert note.startswith("WARNING: ")
    assert "model.fc_norm (1, a head beside the network), " in note
    assert ", model.head (1, a head beside the network)" in note


def test_a_decoder_of_pre_training_beside_the_layers(tmp_path):
    decoder = {
        "decoder_embed.weight": np.ones((1, 2)),
        "decoder_blocks.0.norm1.bias": np.ones((1, 2)),
        "decoder_pos_embed": np.ones((1, 2)),
        "mask_token": np.ones((1, 2)),
    }
    arrays = add_prefix("model.", arrays_of(SQUARE, "timm") | decoder)

    weights = load(tmp_path, arrays)
    (note,) = find_notes(weights, "not read")

    assert_same(weights.parameters, weights_of(SQUARE).parameters)
    assert "model.decoder_blocks (1, a part of pre-training)" in note
    assert find_names(weights) == set(arrays)


def test_unknown_parts_beside_the_network_are_an_error(tmp_path):
    arrays = add_prefix("model.", arrays_of(SQUARE, "timm"))
    message = r"begin with 'model\.', and 1 arrays of unknown parts .* \(adapter_layers\.down\)"

    with pytest.raises(ValueError, match=message):
        load(tmp_path, arrays | {"adapter_layers.down": np.ones(3)})


def test_unknown_parts_below_the_prefix_are_an_error(tmp_path):
    arrays = arrays_of(SQUARE, "timm") | {"neck.weight": np.ones(3)}
    message = r"left over: neck\.weight \(3,\)"

    with pytest.raises(ValueError, match=message):
        load(tmp_path, add_prefix("model.", arrays))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("net.", "student."),
        ("teacher.", "model_ema."),
    ],
)
def test_several_networks_of_equal_standing_are_an_error(
    first,
    second,
    tmp_path,
):
    arrays = arrays_of(SQUARE, "timm")
    message = re.escape(f"several networks ({first}, {second})")

    with pytest.raises(ValueError, match=message):
        load(
            tmp_path,
            add_prefix(first, arrays) | add_prefix(second, arrays),
        )


def test_a_prefix_is_removed_before_a_network_is_rejected(tmp_path):
    arrays = arrays_of(SQUARE, "timm") | {"blocks.0.attn.q_norm.weight": np.ones(8)}
    beit = {"module.beit.embeddings.cls_token": np.ones((1, 1, 16))}
    unknown = {"wrapper.blocks.0.attn.qkv.weight": np.ones((1, 16))}

    with pytest.raises(ValueError, match="a ViT with qk-norm"):
        load(tmp_path, add_prefix("module.", arrays))

    message = "of BEiT: it has relative positions"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, beit)
    with pytest.raises(ValueError, match=r"names of no known format \(wrapper\.blocks"):
        load(tmp_path, unknown)


def test_other_words_are_no_prefix():
    names = {f"swin.{name}" for name in arrays_of(SQUARE, "timm")}
    assert not is_network(names)
    assert find_wrapping(names, is_network).prefix == ""
