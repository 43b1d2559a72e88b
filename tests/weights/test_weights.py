"""Reading every variant of foreign files, bit by bit, and what is said of those that are not whole."""

import dataclasses
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights.reference import networks
from tests.weights.small_networks import (
    NETWORKS,
    RESNET,
    SQUARE,
    VIT,
    arrays_of,
    assert_same,
    weights_of,
)
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.weights import load_weights
from vit_jax.weights.description import describe
from vit_jax.weights.families.vision_transformer import LINEN_STYLE, Style, make_style_rules
from vit_jax.weights.formats import write_npz, write_safetensors
from vit_jax.weights.names import unstack
from vit_jax.weights.names.entry import make_entries
from vit_jax.weights.names.ours import list_unstacked_shapes
from vit_jax.weights.saving import save_weights

LINEN = dataclasses.replace(LINEN_STYLE, group_norm="")
BIG_VISION = dataclasses.replace(LINEN_STYLE, positions="pos_embedding")
STACKED = dataclasses.replace(BIG_VISION, is_stacked=True)


def write(tmp_path, arrays, name="w.npz"):
    path = tmp_path / name
    (write_npz if path.suffix == ".npz" else write_safetensors)(path, arrays, {})
    return path


def released_arrays(a, style):
    """The arrays of a released file in another style than we write."""
    apart = unstack(networks.parameters(a), a.num_heads)
    return {
        entry.name: entry.write(apart)
        for entry in make_entries(make_style_rules(style), list_unstacked_shapes(a))
    }


def prefixed(prefix, arrays):
    return {f"{prefix}{name}": array for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("network", "style", "prefix"),
    [
        *(
            (network, Style(), "")
            for network in ("token", "mlp_head", "gap", "headless", "deep", "root_hybrid")
        ),
        ("hybrid", Style(), "opt/target/"),
        ("deep", LINEN, "opt/target/"),
        ("hybrid", LINEN, ""),
        *(
            (network, STACKED, "params/")
            for network in ("gap", "map", "mlp_head", "sincos2d", "deep")
        ),
        ("gap", BIG_VISION, "params/img/"),
        ("deep", BIG_VISION, "params/"),
        ("map", BIG_VISION, ""),
        ("deep", STACKED, ""),
    ],
)
def test_released_and_big_vision_files(network, style, prefix, tmp_path):
    a = NETWORKS[network]
    optimiser = dict.fromkeys(
        ("opt/0/count", "opt/state/param_states/cls/grad_ema"),
        np.ones((2, 3)),
    )
    clock = dict.fromkeys(
        ("epoch", "state", "chrono/accum_program_time", "extra/accum_train_time"),
        np.ones(1),
    )
    others = (
        {"params/txt/head/bias": np.ones(3), "params/t": np.ones(1)}
        if prefix == "params/img/"
        else {}
    )
    extra = optimiser | clock | others if prefix else {}
    path = write(tmp_path, prefixed(prefix, released_arrays(a, style)) | extra)
    weights = load_weights(
        path,
        image_size=a.image_size,
        gelu="exact" if a.gelu == "exact" else None,
    )

    assert weights.architecture == a
    assert_same(weights.parameters, networks.parameters(a))

    ignored = {
        status.name: status.status
        for status in weights.statuses
        if status.status.startswith("ignored")
    }
    reasons = (
        (optimiser, "optimiser state"),
        (clock, "bookkeeping of training"),
        (others, "not part of this network"),
    )
    expected = {name: f"ignored ({why})" for names, why in reasons for name in names if prefix}

    assert ignored == expected
    assert weights.source == f"{path} ({'released' if style in (Style(), LINEN) else 'big_vision'})"


@pytest.mark.parametrize("is_timm", [False, True])
def test_positions_of_patches_alone_stay_so(is_timm, tmp_path):
    """big_vision folded it into the token, and some of timm's models have none."""
    arrays = (
        arrays_of(SQUARE, "timm")
        if is_timm
        else prefixed("params/", released_arrays(SQUARE, STACKED))
    )
    table = "pos_embed" if is_timm else "params/pos_embedding"
    arrays[table] = arrays[table][:, 1:]
    path = write(tmp_path, arrays, "w.safetensors" if is_timm else "w.npz")
    weights = load_weights(path, num_heads=2)
    gelu = "exact" if is_timm else "tanh"

    assert weights.architecture == dataclasses.replace(SQUARE, gelu=gelu, position_tokens="patches")

    expected = networks.parameters(SQUARE)
    expected["positions/table"] = expected["positions/table"][:, 1:]

    assert_same(weights.parameters, expected)

    written = tmp_path / "written.npz"
    save_weights(weights, written, "released")

    assert not np.load(written)["Transformer/posembed_input/pos_embedding"][:, 0].any()


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        (".npz", "bfloat16"),
        (".safetensors", "bfloat16"),
        (".npz", "float64"),
    ],
)
def test_other_precisions_become_float32_and_are_reported(suffix, dtype, tmp_path):
    exact = networks.parameters(SQUARE)
    parameters = {
        name: array.astype("bfloat16").astype(np.float32) for name, array in exact.items()
    }
    format_name = "released" if suffix == ".npz" else "timm"
    arrays = {
        name: array.astype(dtype)
        for name, array in arrays_of(SQUARE, format_name, parameters).items()
    }
    weights = load_weights(write(tmp_path, arrays, f"w{suffix}"), num_heads=2)

    assert_same(weights.parameters, parameters)
    assert {status.dtype for status in weights.statuses} == {dtype}
    assert all(status.status.endswith(", to float32") for status in weights.statuses)
    assert any("rounded to float32" in note for note in weights.notes) == (dtype == "float64")


def test_numbers_that_are_no_parameters(tmp_path):
    arrays = arrays_of(SQUARE, "released")
    arrays["cls"] = arrays["cls"].astype(np.float64) + 1e300
    weights = load_weights(write(tmp_path, arrays))

    assert "WARNING: cls has values that are not finite in float32." in weights.notes

    arrays["head/bias"] = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="not of floating point: head/bias"):
        load_weights(write(tmp_path, arrays))


@pytest.mark.parametrize("prefix", ["resnet/", ""])
@pytest.mark.parametrize("has_numbers", [False, True])
def test_big_transfer_files(prefix, has_numbers, tmp_path):
    arrays = {}
    for number, (name, array) in enumerate(arrays_of(RESNET, "bit").items()):
        name = prefix + name.removeprefix("resnet/")
        arrays[
            re.sub(r"(standardized_conv2d|group_norm)", rf"\1_{number}", name)
            if has_numbers
            else name
        ] = array

    weights = load_weights(write(tmp_path, arrays), image_size=RESNET.image_size)
    assert weights.architecture == RESNET
    assert_same(weights.parameters, networks.parameters(RESNET))


NEWER = {
    "encoder.layer": "layers",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("prefix", ["vit.", ""])
def test_hugging_face_files(prefix, is_newer, tmp_path):
    a = dataclasses.replace(VIT, gelu="exact", layer_norm_epsilon=1e-12)
    if not prefix:  # ViTModel: a pooler instead of a classifier
        a = dataclasses.replace(a, num_classes=0, head="mlp")

    arrays = arrays_of(a, "huggingface")
    extra = (
        {"vit.pooler.dense.weight": np.ones((16, 16)), "vit.pooler.dense.bias": np.ones(16)}
        if prefix
        else {}
    )

    for name, array in [(name, arrays.pop(name)) for name in list(arrays)]:
        name = prefix + name.removeprefix("vit.") if name.startswith("vit.") else name
        for classic, newer in NEWER.items() if is_newer else ():
            name = name.replace(classic, newer)

        arrays[name] = array

    assert any("q_proj" in name for name in arrays) == is_newer

    weights = load_weights(
        write(tmp_path, arrays | extra, "w.safetensors"),
        num_heads=2,
        image_size=VIT.image_size,
    )

    assert weights.architecture == a
    assert_same(weights.parameters, networks.parameters(a))

    ignored = {
        status.name
        for status in weights.statuses
        if status.status == "ignored (not part of this network)"
    }

    assert ignored == set(extra)  # the classifier does not see a pooler


def test_what_is_missing_and_left_over_is_listed_at_once_and_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vit_jax.weights.formats.ArrayFile.read",
        lambda *_: pytest.fail("data was read"),
    )
    arrays = arrays_of(SQUARE, "released")
    arrays["Transformer/encoder_norm/scales"] = arrays.pop("Transformer/encoder_norm/scale")
    arrays["chrono/time"] = np.zeros((2, 3), np.float32)  # allowed below a prefix only
    arrays["Transformer/encoderblock_1/LayerNorm_0/bias"] = np.zeros(5, np.float32)
    path = write(tmp_path, arrays)

    with pytest.raises(ValueError, match="not those of") as error:
        load_weights(path)

    text = str(error.value)
    assert text.startswith(
        f"{path}: its arrays are not those of ViT-custom/4 in the format released:"
    )

    near = "(nearest: Transformer/encoder_norm/scales)"
    assert f"missing: Transformer/encoder_norm/scale (16,) {near}" in text
    assert "left over: chrono/time (2, 3)" in text
    assert "left over: Transformer/encoder_norm/scales (16,)" in text
    assert "shape: Transformer/encoderblock_1/LayerNorm_0/bias is (5,), the model has (16,)" in text


@pytest.mark.parametrize(
    ("a", "format_name", "suffix", "kernel", "renamed"),
    [
        (SQUARE, "released", ".npz", "head/kernel", "head/weights"),
        (RESNET, "bit", ".npz", "resnet/head/conv2d/kernel", "resnet/head/conv2d/weights"),
        (SQUARE, "timm", ".safetensors", "head.weight", "head.weights"),
        (RESNET, "timm", ".safetensors", "head.fc.weight", "head.fc.weights"),
        (SQUARE, "huggingface", ".safetensors", "classifier.weight", "classifier.weights"),
    ],
)
def test_a_kernel_of_the_head_under_another_name_is_missed(
    a, format_name, suffix, kernel, renamed, tmp_path
):
    arrays = arrays_of(a, format_name)
    arrays[renamed] = arrays.pop(kernel)
    options = {"image_size": a.image_size} | ({"num_heads": 2} if a.has_transformer else {})

    with pytest.raises(ValueError, match="not those of") as error:
        load_weights(write(tmp_path, arrays, f"w{suffix}"), **options)

    shape = str(arrays[renamed].shape)
    lines = [
        f"missing: {kernel} {shape} (nearest: {renamed})",
        f"left over: {renamed} {shape} (nearest: {kernel})",
    ]
    listed = [line.strip() for line in str(error.value).splitlines()[1:]]

    assert sorted(listed) == sorted(lines)


def test_class_names_are_taken_from_the_caller(tmp_path):
    path = write(tmp_path, arrays_of(SQUARE, "released"))
    assert load_weights(path, class_names=["a", "b", "c"]).class_names == ("a", "b", "c")
    with pytest.raises(ValueError, match=r"class_names: must be 3 names, .*, not 2"):
        load_weights(path, class_names=["a", "b"])

    save_weights(weights_of(SQUARE, class_names=("x", "y", "z")), path, "released")
    assert load_weights(path).class_names == ("x", "y", "z")
    with pytest.raises(ValueError, match="class_names: must not be set"):
        load_weights(path, class_names=["a", "b", "c"])


def test_a_config_in_a_folder_goes_with_its_one_file_whatever_that_is_called(tmp_path):
    file = write(tmp_path, arrays_of(SQUARE, "huggingface"), "weights.safetensors")
    config = {
        "image_size": 15,
        "num_attention_heads": 2,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-6,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"id2label": {"2": "c", "1": "b", "0": "a"}})
    )
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": 15, "image_mean": [0.4, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})
    )
    weights = load_weights(tmp_path)

    assert (weights.architecture, weights.class_names) == (SQUARE, ("a", "b", "c"))

    # The size is the network's.
    expected = {"image_size": [12, 12], "resize": "direct"} | weights.preprocessing
    assert weights.preprocessing == expected
    assert any("says 15x15 images" in note for note in weights.notes)
    assert any(
        note.startswith("The mean (0.4, 0.5, 0.5) and standard deviation") for note in weights.notes
    )

    bare = load_weights(file, num_heads=2)
    assert bare.architecture == dataclasses.replace(SQUARE, gelu="exact", layer_norm_epsilon=1e-12)

    note = (
        "config.json beside it is not read, as it may be another file's: if not, give the folder."
    )

    assert note in bare.notes

    save_weights(weights_of(SQUARE), file, "huggingface")  # a file that tells everything needs none
    assert not any("config.json" in note for note in load_weights(file).notes)

    save_weights(weights_of(SQUARE), tmp_path / "b.safetensors", "timm")
    words = r"no model.safetensors \(.safetensors in it: b.safetensors, weights.safetensors\)"

    with pytest.raises(ValueError, match=words):
        load_weights(tmp_path)

    file.rename(tmp_path / "model.safetensors")
    assert load_weights(tmp_path).source.endswith("model.safetensors (huggingface)")


def test_a_workdir_of_a_sharded_run(tmp_path):
    """Saved from eight devices, read into memory; the newest step, and the average where there is one."""
    a = dataclasses.replace(VIT, head="mlp")
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = {
        name: jax.device_put(array, spread if array.ndim and array.shape[0] % 8 == 0 else whole)
        for name, array in networks.parameters(a).items()
    }
    average = jax.tree.map(lambda leaf: leaf + 1, arrays)
    metadata = describe(a, ("a", "b", "c"), {"resize": "direct"}, None)
    store = CheckpointStore(tmp_path, keep_latest=2)
    store.save(3, {"model": jax.tree.map(jnp.zeros_like, arrays)}, metadata=metadata, metrics={})
    store.save(5, {"model": arrays, "polyak": average}, metadata=metadata, metrics={})
    store.close()

    for polyak in (True, False):
        weights = load_weights(tmp_path, polyak=polyak)
        assert weights.architecture == a
        assert weights.class_names == ("a", "b", "c")
        assert weights.preprocessing == {"resize": "direct"}

        expected = {name: np.asarray(array) + np.float32(polyak) for name, array in arrays.items()}
        assert_same(weights.parameters, expected)
        assert ("Polyak average" if polyak else "parameters") + " of step 5" in weights.source

    with pytest.raises(ValueError, match="num_heads=4: must be 2, as the checkpoint states"):
        load_weights(tmp_path, num_heads=4)


# From Hugging Face.


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Stands in for huggingface_hub; the list of calls."""
    calls = []

    def snapshot_download(name, *, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        if name == "nobody/nothing":
            raise OSError("404")

        write_safetensors(tmp_path / "model.safetensors", arrays_of(SQUARE, "timm"), {})
        return str(tmp_path)

    monkeypatch.setitem(
        sys.modules,
        "huggingface_hub",
        types.SimpleNamespace(snapshot_download=snapshot_download),
    )
    return calls


def test_weights_of_a_repository(library):
    weights = load_weights("hf://owner/a-name_1.0", num_heads=2)
    assert weights.architecture.width == SQUARE.width

    load_weights("hf://owner/name@refs/pr/1", num_heads=2)
    expected = [("owner/a-name_1.0", None), ("owner/name", "refs/pr/1")]

    assert [call[:2] for call in library] == expected

    configurations = ["config.json", "preprocessor_config.json", "adapter_config.json"]
    assert library[0][2] == ["*.safetensors", "*.safetensors.index.json", *configurations]


@pytest.mark.parametrize("address", ["hf://name", "hf://a/b/c", "hf://", "hf://a/b@", "hf://a/b c"])
def test_malformed_addresses(address, library):
    with pytest.raises(ValueError, match="not an address of the form hf://owner/name"):
        load_weights(address)

    assert library == []


def test_what_cannot_be_fetched_is_one_error(library, monkeypatch):
    with pytest.raises(ValueError, match="hf://nobody/nothing cannot be fetched: 404"):
        load_weights("hf://nobody/nothing")

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"needs huggingface_hub: .*pip install .*\[hub\]"):
        load_weights("hf://owner/name")


def test_the_name_of_a_network_is_no_weights():
    with pytest.raises(
        ValueError,
        match=r"ViT-S/16: this is the name of a network.* `vit-jax models ViT-S/16 --weights",
    ):
        load_weights("ViT-S/16")

    with pytest.raises(ValueError, match="ViT-S/17: there is no such file or folder"):
        load_weights("ViT-S/17")
