"""Reading every variant of foreign files, bit by bit, and reports of those that are not complete."""

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
    (write_npz if path.suffix == ".npz" else write_safetensors)(
        path,
        arrays,
        {},
    )
    return path


def list_released_arrays(a, style):
    """Return the arrays of a released file in a style that is read and not written."""
    apart = unstack(networks.parameters(a), a.num_heads)
    entries = make_entries(make_style_rules(style), list_unstacked_shapes(a))
    return {entry.name: entry.write(apart) for entry in entries}


def find_ignored(weights):
    """Return the statuses of arrays that were ignored."""
    ignored = {}
    for status in weights.statuses:
        if status.status.startswith("ignored"):
            ignored[status.name] = status.status
    return ignored


RELEASED = Style()

STATE_OF_OPTIMIZER = {
    "opt/0/count": np.ones((2, 3)),
    "opt/state/param_states/cls/grad_ema": np.ones((2, 3)),
}

BOOKKEEPING = {
    "epoch": np.ones(1),
    "state": np.ones(1),
    "chrono/accum_program_time": np.ones(1),
    "extra/accum_train_time": np.ones(1),
}

TEXT_TOWER = {
    "params/txt/head/bias": np.ones(3),
    "params/t": np.ones(1),
}


def list_extra_arrays(prefix):
    """Return the other arrays of a file with a prefix, and the reasons to ignore them."""
    if not prefix:
        return {}, {}

    arrays = STATE_OF_OPTIMIZER | BOOKKEEPING
    reasons = dict.fromkeys(STATE_OF_OPTIMIZER, "ignored (optimiser state)")
    reasons |= dict.fromkeys(BOOKKEEPING, "ignored (bookkeeping of training)")
    if prefix == "params/img/":
        arrays |= TEXT_TOWER
        reasons |= dict.fromkeys(TEXT_TOWER, "ignored (not part of this network)")
    return arrays, reasons


def add_prefix(prefix, arrays):
    return {f"{prefix}{name}": array for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("network", "style", "prefix"),
    [
        ("token", RELEASED, ""),
        ("mlp_head", RELEASED, ""),
        ("gap", RELEASED, ""),
        ("headless", RELEASED, ""),
        ("deep", RELEASED, ""),
        ("root_hybrid", RELEASED, ""),
        ("hybrid", RELEASED, "opt/target/"),
        ("deep", LINEN, "opt/target/"),
        ("hybrid", LINEN, ""),
        ("gap", STACKED, "params/"),
        ("map", STACKED, "params/"),
        ("mlp_head", STACKED, "params/"),
        ("sincos2d", STACKED, "params/"),
        ("deep", STACKED, "params/"),
        ("gap", BIG_VISION, "params/img/"),
        ("deep", BIG_VISION, "params/"),
        ("map", BIG_VISION, ""),
        ("deep", STACKED, ""),
    ],
)
def test_released_and_big_vision_files(network, style, prefix, tmp_path):
    a = NETWORKS[network]
    extra, reasons = list_extra_arrays(prefix)
    path = write(
        tmp_path,
        add_prefix(prefix, list_released_arrays(a, style)) | extra,
    )
    gelu = "exact" if a.gelu == "exact" else None
    format_name = "released" if style in (RELEASED, LINEN) else "big_vision"

    weights = load_weights(
        path,
        image_size=a.image_size,
        gelu=gelu,
    )

    assert weights.architecture == a
    assert_same(weights.parameters, networks.parameters(a))
    assert find_ignored(weights) == reasons
    assert weights.source == f"{path} ({format_name})"


def write_without_class_position(folder, is_timm):
    """Write positions of patches alone.

    big_vision folds the other one into the token, and some of timm's models have none.
    """
    if is_timm:
        arrays = arrays_of(SQUARE, "timm")
        table = "pos_embed"
        name = "w.safetensors"
    else:
        arrays = add_prefix("params/", list_released_arrays(SQUARE, STACKED))
        table = "params/pos_embedding"
        name = "w.npz"
    arrays[table] = arrays[table][:, 1:]
    return write(folder, arrays, name)


@pytest.mark.parametrize(
    ("is_timm", "gelu"),
    [(False, "tanh"), (True, "exact")],
)
def test_positions_of_patches_alone_stay_so(is_timm, gelu, tmp_path):
    path = write_without_class_position(tmp_path, is_timm)
    written = tmp_path / "written.npz"
    parameters = networks.parameters(SQUARE)
    parameters["positions/table"] = parameters["positions/table"][:, 1:]

    weights = load_weights(path, num_heads=2)
    save_weights(weights, written, "released")
    table = np.load(written)["Transformer/posembed_input/pos_embedding"]

    assert weights.architecture == dataclasses.replace(SQUARE, gelu=gelu, position_tokens="patches")
    assert_same(weights.parameters, parameters)
    assert not table[:, 0].any()


@pytest.mark.parametrize(
    ("format_name", "suffix", "dtype"),
    [
        ("released", ".npz", "bfloat16"),
        ("timm", ".safetensors", "bfloat16"),
        ("released", ".npz", "float64"),
    ],
)
def test_other_precisions_become_float32_and_are_reported(
    format_name,
    suffix,
    dtype,
    tmp_path,
):
    rounded = {}
    for name, array in networks.parameters(SQUARE).items():
        rounded[name] = array.astype("bfloat16").astype(np.float32)
    arrays = arrays_of(SQUARE, format_name, rounded)
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}

    weights = load_weights(write(tmp_path, arrays, f"w{suffix}"), num_heads=2)

    assert_same(weights.parameters, rounded)
    for status in weights.statuses:
        assert status.dtype == dtype
        assert status.status.endswith(", to float32")
    is_noted = any("rounded to float32" in note for note in weights.notes)
    assert is_noted == (dtype == "float64")


def test_numbers_that_are_not_finite_in_float32(tmp_path):
    arrays = arrays_of(SQUARE, "released")
    arrays["cls"] = arrays["cls"].astype(np.float64) + 1e300

    weights = load_weights(write(tmp_path, arrays))

    assert "WARNING: cls has values that are not finite in float32." in weights.notes


def test_whole_numbers_are_no_parameters(tmp_path):
    arrays = arrays_of(SQUARE, "released")
    arrays["head/bias"] = np.zeros(3, np.int32)
    message = "not of floating point: head/bias"

    with pytest.raises(ValueError, match=message):
        load_weights(write(tmp_path, arrays))


@pytest.mark.parametrize("prefix", ["resnet/", ""])
@pytest.mark.parametrize("has_numbers", [False, True])
def test_big_transfer_files(prefix, has_numbers, tmp_path):
    arrays = {}
    for number, (name, array) in enumerate(arrays_of(RESNET, "bit").items()):
        name = prefix + name.removeprefix("resnet/")
        if has_numbers:
            name = re.sub(r"(standardized_conv2d|group_norm)", rf"\1_{number}", name)
        arrays[name] = array

    weights = load_weights(write(tmp_path, arrays), image_size=RESNET.image_size)

    assert weights.architecture == RESNET
    assert_same(weights.parameters, networks.parameters(RESNET))


def rename_array(name, prefix, is_newer):
    """Return the name in a file of ViTModel, or of a newer transformers."""
    if name.startswith("vit."):
        name = prefix + name.removeprefix("vit.")
    if is_newer:
        for classic, newer in NEWER.items():
            name = name.replace(classic, newer)
    return name


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
    """A ViTModel has a pooler instead of a classifier; a classifier ignores a pooler."""
    a = dataclasses.replace(
        VIT,
        gelu="exact",
        layer_norm_epsilon=1e-12,
    )
    pooler = {
        "vit.pooler.dense.weight": np.ones((16, 16)),
        "vit.pooler.dense.bias": np.ones(16),
    }
    if not prefix:
        a = dataclasses.replace(a, num_classes=0, head="mlp")
        pooler = {}
    arrays = {}
    for name, array in arrays_of(a, "huggingface").items():
        arrays[rename_array(name, prefix, is_newer)] = array
    path = write(tmp_path, arrays | pooler, "w.safetensors")

    weights = load_weights(
        path,
        num_heads=2,
        image_size=VIT.image_size,
    )

    assert any("q_proj" in name for name in arrays) == is_newer
    assert weights.architecture == a
    assert_same(weights.parameters, networks.parameters(a))
    assert find_ignored(weights) == dict.fromkeys(pooler, "ignored (not part of this network)")


def test_missing_and_further_arrays_are_listed_at_once_and_no_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vit_jax.weights.formats.ArrayFile.read",
        lambda *_: pytest.fail("data was read"),
    )
    arrays = arrays_of(SQUARE, "released")
    arrays["Transformer/encoder_norm/scales"] = arrays.pop("Transformer/encoder_norm/scale")
    # Allowed below a prefix only.
    arrays["chrono/time"] = np.zeros((2, 3), np.float32)
    arrays["Transformer/encoderblock_1/LayerNorm_0/bias"] = np.zeros(5, np.float32)
    path = write(tmp_path, arrays)
    first_line = f"{path}: its arrays are not those of ViT-custom/4 in the format released:"
    near = "(nearest: Transformer/encoder_norm/scales)"
    bias = "Transformer/encoderblock_1/LayerNorm_0/bias"

    with pytest.raises(ValueError, match="not those of") as error:
        load_weights(path)

    message = str(error.value)
    assert message.startswith(first_line)
    assert f"missing: Transformer/encoder_norm/scale (16,) {near}" in message
    assert "left over: chrono/time (2, 3)" in message
    assert "left over: Transformer/encoder_norm/scales (16,)" in message
    assert f"shape: {bias} is (5,), the model has (16,)" in message


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
    a,
    format_name,
    suffix,
    kernel,
    renamed,
    tmp_path,
):
    arrays = arrays_of(a, format_name)
    arrays[renamed] = arrays.pop(kernel)
    shape = arrays[renamed].shape
    path = write(tmp_path, arrays, f"w{suffix}")
    options = {"image_size": a.image_size}
    if a.has_transformer:
        options["num_heads"] = 2

    with pytest.raises(ValueError, match="not those of") as error:
        load_weights(path, **options)

    lines = []
    for line in str(error.value).splitlines()[1:]:
        lines.append(line.strip())

    assert sorted(lines) == [
        f"left over: {renamed} {shape} (nearest: {kernel})",
        f"missing: {kernel} {shape} (nearest: {renamed})",
    ]


def test_class_names_are_taken_from_the_caller(tmp_path):
    path = write(tmp_path, arrays_of(SQUARE, "released"))

    assert load_weights(path, class_names=["a", "b", "c"]).class_names == ("a", "b", "c")

    message = r"class_names: must be 3 names, .*, not 2"
    with pytest.raises(ValueError, match=message):
        load_weights(path, class_names=["a", "b"])


def test_class_names_of_a_file_are_not_replaced(tmp_path):
    path = tmp_path / "w.npz"
    save_weights(
        weights_of(SQUARE, class_names=("x", "y", "z")),
        path,
        "released",
    )

    assert load_weights(path).class_names == ("x", "y", "z")
    with pytest.raises(ValueError, match="class_names: must not be set"):
        load_weights(path, class_names=["a", "b", "c"])


CONFIG = {
    "image_size": 15,
    "num_attention_heads": 2,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-6,
    "id2label": {
        "2": "c",
        "1": "b",
        "0": "a",
    },
}

PROCESSOR = {"size": 15, "image_mean": [0.4, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@pytest.fixture
def file_with_config(tmp_path):
    """A file of Hugging Face with an unusual name, and its configuration beside it."""
    file = write(tmp_path, arrays_of(SQUARE, "huggingface"), "weights.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return file


def test_a_config_in_a_folder_goes_with_its_one_file_of_any_name(file_with_config):
    weights = load_weights(file_with_config.parent)
    preprocessing = weights.preprocessing

    assert weights.architecture == SQUARE
    assert weights.class_names == ("a", "b", "c")
    # The size is the network's.
    assert preprocessing["image_size"] == [12, 12]
    assert preprocessing["resize"] == "direct"
    assert any("says 15x15 images" in note for note in weights.notes)
    normalisation = "The mean (0.4, 0.5, 0.5) and standard deviation"
    assert any(note.startswith(normalisation) for note in weights.notes)


def test_a_config_beside_a_file_is_not_read_and_noted(file_with_config):
    note = (
        "config.json beside it is not read, as it may be another file's: if not, give the folder."
    )

    weights = load_weights(file_with_config, num_heads=2)

    assert weights.architecture == dataclasses.replace(
        SQUARE,
        gelu="exact",
        layer_norm_epsilon=1e-12,
    )
    assert note in weights.notes


def test_a_file_that_states_everything_needs_no_config(file_with_config):
    save_weights(weights_of(SQUARE), file_with_config, "huggingface")

    assert not any("config.json" in note for note in load_weights(file_with_config).notes)


def test_a_folder_of_several_files_needs_the_usual_name(file_with_config):
    folder = file_with_config.parent
    save_weights(weights_of(SQUARE), file_with_config, "huggingface")
    save_weights(weights_of(SQUARE), folder / "b.safetensors", "timm")
    message = r"no model.safetensors \(.safetensors in it: b.safetensors, weights.safetensors\)"

    with pytest.raises(ValueError, match=message):
        load_weights(folder)

    file_with_config.rename(folder / "model.safetensors")
    assert load_weights(folder).source.endswith("model.safetensors (huggingface)")


def spread(parameters):
    """Return the parameters on eight devices, split where their first dimension allows."""
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.sharding.NamedSharding(
        mesh,
        jax.sharding.PartitionSpec("data"),
    )
    whole = jax.sharding.NamedSharding(
        mesh,
        jax.sharding.PartitionSpec(),
    )
    arrays = {}
    for name, array in parameters.items():
        is_split = array.ndim and array.shape[0] % 8 == 0
        arrays[name] = jax.device_put(array, split if is_split else whole)
    return arrays


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    """The workdir of a run on eight devices with a Polyak average, and its architecture."""
    folder = tmp_path_factory.mktemp("sharded")
    a = dataclasses.replace(VIT, head="mlp")
    model = spread(networks.parameters(a))
    older = jax.tree.map(jnp.zeros_like, model)
    average = jax.tree.map(lambda leaf: leaf + 1, model)
    metadata = describe(a, ("a", "b", "c"), {"resize": "direct"}, None)

    store = CheckpointStore(folder, keep_latest=2)
    store.save(3, {"model": older}, metadata=metadata, metrics={})
    store.save(
        5,
        {"model": model, "polyak": average},
        metadata=metadata,
        metrics={},
    )
    store.close()
    return folder, a


@pytest.mark.parametrize(
    ("polyak", "words"),
    [
        (True, "Polyak average of step 5"),
        (False, "parameters of step 5"),
    ],
)
def test_a_workdir_of_a_sharded_run(polyak, words, sharded_run):
    """The newest step is read into memory, and its average where there is one."""
    folder, a = sharded_run
    expected = {}
    for name, array in networks.parameters(a).items():
        expected[name] = array + np.float32(polyak)

    weights = load_weights(folder, polyak=polyak)

    assert weights.architecture == a
    assert weights.class_names == ("a", "b", "c")
    assert weights.preprocessing == {"resize": "direct"}
    assert_same(weights.parameters, expected)
    assert words in weights.source


def test_options_that_contradict_a_checkpoint_are_rejected(sharded_run):
    folder, _ = sharded_run
    message = "num_heads=4: must be 2, as the checkpoint states"

    with pytest.raises(ValueError, match=message):
        load_weights(folder, num_heads=4)


# From Hugging Face.


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Replace huggingface_hub, and return the list of its calls."""
    calls = []

    def snapshot_download(name, *, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        if name == "nobody/nothing":
            raise OSError("404")

        write_safetensors(
            tmp_path / "model.safetensors",
            arrays_of(SQUARE, "timm"),
            {},
        )
        return str(tmp_path)

    module = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


FETCHED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "preprocessor_config.json",
    "adapter_config.json",
]


def test_weights_of_a_repository(library):
    weights = load_weights("hf://owner/a-name_1.0", num_heads=2)
    load_weights("hf://owner/name@refs/pr/1", num_heads=2)

    assert weights.architecture.width == SQUARE.width
    assert library == [
        ("owner/a-name_1.0", None, FETCHED),
        ("owner/name", "refs/pr/1", FETCHED),
    ]


@pytest.mark.parametrize(
    "address",
    ["hf://name", "hf://a/b/c", "hf://", "hf://a/b@", "hf://a/b c"],
)
def test_malformed_addresses(address, library):
    message = "not an address of the form hf://owner/name"

    with pytest.raises(ValueError, match=message):
        load_weights(address)

    assert library == []


def test_a_repository_that_cannot_be_fetched_is_one_error(library):
    message = "hf://nobody/nothing cannot be fetched: 404"

    with pytest.raises(ValueError, match=message):
        load_weights("hf://nobody/nothing")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"needs huggingface_hub: .*pip install .*\[hub\]"

    with pytest.raises(ValueError, match=message):
        load_weights("hf://owner/name")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ViT-S/16",
            r"ViT-S/16: this is the name of a network.* `vit-jax models ViT-S/16 --weights",
        ),
        ("ViT-S/17", "ViT-S/17: there is no such file or folder"),
    ],
)
def test_the_name_of_a_network_is_no_weights(name, message):
    with pytest.raises(ValueError, match=message):
        load_weights(name)
