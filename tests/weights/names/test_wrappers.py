"""Networks below the prefixes of wrappers, and beside the state of training: read the same, and all else is named."""

import dataclasses

import numpy as np
import pytest

from tests.weights.small_networks import NETWORKS, SQUARE, arrays_of, assert_same, weights_of
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_safetensors
from vit_jax.weights.names import find_wrapping, is_network

TIMM = dataclasses.replace(SQUARE, gelu="exact")
OPTIONS = {"num_heads": 2}


def below(prefix, arrays):
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def load(tmp_path, arrays, **options):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, arrays, {})
    return load_weights(path, **{**OPTIONS, **options})


def other(arrays):
    """The arrays of another network of the same names."""
    return {name: array + 1 for name, array in arrays.items()}


PREFIXES = [
    "module.",
    "_orig_mod.",
    "model.",
    "backbone.",
    "student.",
    "teacher.",
    "state_dict.",
    "model.backbone.",
]
PREFIXES += [
    "module._orig_mod.",
    "state_dict.model.net.",
    "_orig_mod.module.",
    "teacher.backbone._fsdp_wrapped_module.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
def test_a_prefix_is_removed_and_named_once(prefix, format_name, tmp_path):
    arrays = arrays_of(SQUARE, format_name)
    weights = load(tmp_path, below(prefix, arrays))

    assert_same(weights.parameters, weights_of(SQUARE).parameters)

    expected = [
        f"The names of the network begin with {prefix!r} in the file; this prefix is removed."
    ]

    assert [note for note in weights.notes if "prefix" in note] == expected
    assert {status.name for status in weights.statuses} == set(below(prefix, arrays))


def test_names_of_wrappers_inside_names(tmp_path):
    arrays = {
        name.replace(".attn.", "._orig_mod.attn."): array
        for name, array in arrays_of(SQUARE, "timm").items()
    }
    weights = load(tmp_path, arrays)

    assert_same(weights.parameters, weights_of(SQUARE).parameters)
    assert sum("inside the network's names" in note for note in weights.notes) == 1
    assert {status.name for status in weights.statuses} == set(arrays)


def test_a_plain_file_has_no_note(tmp_path):
    weights = load(tmp_path, arrays_of(SQUARE, "timm"))
    assert not [note for note in weights.notes if "names" in note or "not read" in note]


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ("teacher.backbone.", "student.module.backbone."),
        ("state_dict_ema.", "state_dict."),
        ("target_encoder.module.", "encoder.module."),
        ("model_ema.module.", "model."),
    ],
)
def test_the_average_is_taken_before_the_trained_network(taken, left, tmp_path):
    arrays = arrays_of(SQUARE, "timm")
    state = {
        "epoch": np.int64([3]),
        "optimizer.state.0.exp_avg": np.ones(3),
        "dino_loss.center": np.ones((1, 4)),
    }
    file = {**below(left, other(arrays)), **below(taken, arrays), **state}
    weights = load(tmp_path, file)

    assert_same(weights.parameters, weights_of(SQUARE).parameters)

    (note,) = (note for note in weights.notes if "not read" in note)
    word = left.partition(".")[0]

    assert f"{word} ({len(arrays)}, another network of the file)" in note

    for part in ("epoch", "optimizer", "dino_loss"):
        assert f"{part} (1, state of training)" in note

    assert not note.startswith("WARNING")

    ignored = {status.name: status.status for status in weights.statuses if not status.ours}
    assert ignored.keys() == set(below(left, arrays)) | state.keys()
    assert ignored["epoch"] == "ignored (state of training)"


def test_heads_of_pre_training_and_of_classification(tmp_path):
    """The former are named; with the latter the network lacks its outputs, which is a warning."""
    headless = NETWORKS["headless"]
    arrays = below("teacher.backbone.", arrays_of(headless, "timm"))
    heads = {
        f"teacher.{name}.mlp.0.weight": np.ones((4, 16)) for name in ("dino_head", "ibot_head")
    }
    weights = load(tmp_path, arrays | heads, image_size=headless.image_size)

    assert_same(weights.parameters, weights_of(headless).parameters)

    (note,) = (note for note in weights.notes if "not read" in note)
    assert (
        "teacher.dino_head (1, a part of pre-training), teacher.ibot_head (1, a part of pre-training)"
        in note
    )

    arrays = below("model.backbone.", arrays_of(headless, "timm"))
    heads = {"model.head.weight": np.ones((5, 16)), "model.fc_norm.bias": np.ones(16)}
    weights = load(tmp_path, arrays | heads, image_size=headless.image_size)
    (note,) = (note for note in weights.notes if "not read" in note)

    assert note.startswith("WARNING: ")
    assert (
        "model.fc_norm (1, a head beside the network), model.head (1, a head beside the network)"
        in note
    )


def test_a_decoder_of_pre_training_beside_the_layers(tmp_path):
    names = (
        "decoder_embed.weight",
        "decoder_blocks.0.norm1.bias",
        "decoder_pos_embed",
        "mask_token",
    )
    arrays = arrays_of(SQUARE, "timm") | {name: np.ones((1, 2)) for name in names}
    weights = load(tmp_path, below("model.", arrays))

    assert_same(weights.parameters, weights_of(SQUARE).parameters)

    (note,) = (note for note in weights.notes if "not read" in note)
    assert "model.decoder_blocks (1, a part of pre-training)" in note
    assert {status.name for status in weights.statuses} == set(below("model.", arrays))


def test_unknown_parts_beside_the_network_are_an_error(tmp_path):
    arrays = below("model.", arrays_of(SQUARE, "timm")) | {"adapter_layers.down": np.ones(3)}
    with pytest.raises(
        ValueError,
        match=r"begin with 'model\.', and 1 arrays of unknown parts .* \(adapter_layers\.down\)",
    ):
        load(tmp_path, arrays)

    with pytest.raises(
        ValueError, match=r"left over: neck\.weight \(3,\)"
    ):  # below the prefix all must be known
        load(tmp_path, below("model.", arrays_of(SQUARE, "timm") | {"neck.weight": np.ones(3)}))


def test_several_networks_of_equal_standing_are_an_error(tmp_path):
    arrays = arrays_of(SQUARE, "timm")
    with pytest.raises(ValueError, match=r"several networks \(net\., student\.\)"):
        load(tmp_path, below("net.", arrays) | below("student.", arrays))

    with pytest.raises(ValueError, match=r"several networks \(teacher\., model_ema\.\)"):
        load(tmp_path, below("teacher.", arrays) | below("model_ema.", arrays))


def test_a_prefix_is_removed_before_a_network_is_rejected(tmp_path):
    arrays = arrays_of(SQUARE, "timm") | {"blocks.0.attn.q_norm.weight": np.ones(8)}
    with pytest.raises(ValueError, match="a ViT with qk-norm"):
        load(tmp_path, below("module.", arrays))

    with pytest.raises(ValueError, match="of BEiT: it has relative positions"):
        load(tmp_path, {"module.beit.embeddings.cls_token": np.ones((1, 1, 16))})

    with pytest.raises(ValueError, match=r"names of no known format \(wrapper\.blocks"):
        load(tmp_path, {"wrapper.blocks.0.attn.qkv.weight": np.ones((1, 16))})


def test_other_words_are_no_prefix():
    names = {f"swin.{name}" for name in arrays_of(SQUARE, "timm")}
    assert not is_network(names)
    assert find_wrapping(names, is_network).prefix == ""
