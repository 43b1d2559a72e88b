"""Adapters of PEFT: W + scale * B A by hand, under both generations of names of transformers."""

import json
import math
import re

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.rejections import rejects
from tests.weights.small_networks import NETWORKS, SQUARE, arrays_of, assert_same
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_safetensors
from vit_jax.weights.library_config import write_library_config

QUERY = "vit.encoder.layer.1.attention.attention.query"
DENSE = "vit.encoder.layer.0.intermediate.dense"
NEWER = {QUERY: "vit.layers.1.attention.q_proj", DENSE: "vit.layers.0.mlp.fc1"}
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["query"],
    "loftq_config": {},
}


def write_base(
    folder,
    a=SQUARE,
    format_name="huggingface",
    class_names=("x", "y", "z"),
):
    arrays = arrays_of(a, format_name)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", arrays, {})
    write_library_config(folder, format_name, a, class_names, None)

    return arrays


def write_adapter(
    folder,
    base,
    factors,
    config=(),
    others=(),
):
    """Write factors {layer: (A, B)}, and other arrays."""
    folder.mkdir(exist_ok=True)
    arrays = {}
    for layer, (first, second) in factors.items():
        arrays[f"base_model.model.{layer}.lora_A.weight"] = first
        arrays[f"base_model.model.{layer}.lora_B.weight"] = second
    write_safetensors(
        folder / "adapter_model.safetensors",
        {**arrays, **dict(others)},
        {},
    )

    fields = {
        **CONFIG,
        "base_model_name_or_path": str(base),
        **dict(config),
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def sample_factors(outputs, inputs, rank=2, seed=0):
    """Return A (rank, *inputs) and B (outputs, rank, 1 for each further dimension of the inputs)."""
    rng = np.random.default_rng(seed)
    inputs = np.atleast_1d(inputs)
    first = rng.normal(size=(rank, *inputs)).astype(np.float32)
    second = rng.normal(size=(outputs, rank)).astype(np.float32)
    further = [1] * (len(inputs) - 1)
    return first, second.reshape(outputs, rank, *further)


def multiply_factors(first, second):
    """Return the product B A in float64."""
    matrix = second.reshape(second.shape[:2]).astype(float)
    return np.einsum("or,r...->o...", matrix, first.astype(float))


def load_merged(folder, arrays, pairs, scale):
    """Load the base with kernels computed by hand, of factors {layer: (A, B)}."""
    merged = dict(arrays)
    for layer, (first, second) in pairs.items():
        name = f"{layer}.weight"
        product = multiply_factors(first, second)
        merged[name] = (arrays[name] + scale * product).astype(np.float32)

    write_safetensors(folder / "model.safetensors", merged, {})
    expected = load_weights(folder)
    write_safetensors(folder / "model.safetensors", arrays, {})
    return expected


@pytest.fixture
def base(tmp_path):
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path):
    return tmp_path / "adapter"


def assert_near(weights, expected):
    assert weights.architecture == expected.architecture
    assert weights.parameters.keys() == expected.parameters.keys()

    for name, array in expected.parameters.items():
        assert_allclose(
            weights.parameters[name],
            array,
            rtol=1e-6,
            atol=1e-6,
            err_msg=name,
        )


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 3.0), ({"use_rslora": True}, 6 / math.sqrt(2))],
)
def test_factors_are_merged(base, adapter, is_newer, options, scale):
    arrays = write_base(base)
    pairs = {
        QUERY: sample_factors(16, 16),
        DENSE: sample_factors(24, 16, seed=1),
    }
    expected = load_merged(base, arrays, pairs, scale)
    plain = load_weights(base)
    kernel = "encoder/blocks/attention/query/kernel"
    if is_newer:
        pairs = {NEWER[layer]: pair for layer, pair in pairs.items()}
    write_adapter(adapter, base, pairs, options)

    for source in (adapter, adapter / "adapter_model.safetensors"):
        weights = load_weights(source)
        (note,) = [note for note in weights.notes if "LoRA" in note]
        assert_near(weights, expected)
        assert weights.class_names == ("x", "y", "z")
        assert weights.source == f"{adapter} (huggingface)"
        assert f"2 layers in {adapter} are merged into the base {base}" in note
        assert np.abs(weights.parameters[kernel] - plain.parameters[kernel]).max() > 0.1


def test_ranks_and_scales_of_layers(base, adapter):
    arrays = write_base(base)
    pairs = {
        QUERY: sample_factors(16, 16, rank=3),
        DENSE: sample_factors(24, 16),
    }
    config = {
        "rank_pattern": {"query": 3},
        "alpha_pattern": {"layer.1.attention.attention.query": 9},
    }
    write_adapter(adapter, base, pairs, config)

    assert_near(
        load_weights(adapter),
        load_merged(base, arrays, pairs, 3.0),
    )


def test_ranks_that_differ_from_the_config_are_rejected(base, adapter):
    write_base(base)
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16, rank=3)})
    message = rf"adapter_model.*: its layer '{QUERY}' has the rank 3, .* r=2"

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)


def test_a_base_of_timm_and_a_convolution(base, adapter):
    """The names are below that of transformers' wrapper; the base is wrapped, in half precision."""
    arrays = write_base(base, format_name="timm")
    pairs = {
        "patch_embed.proj": sample_factors(16, (3, 4, 4)),
        "blocks.0.attn.qkv": sample_factors(48, 16),
    }
    halves = {}
    for name, array in arrays.items():
        halves[name] = array.astype(np.float16)

    single = {}
    for name, array in halves.items():
        single[name] = array.astype(np.float32)

    wrapped = {f"module.{name}": array for name, array in halves.items()}
    expected = load_merged(base, single, pairs, 3.0)
    write_adapter(
        adapter,
        base,
        {f"timm_model.{layer}": pair for layer, pair in pairs.items()},
    )
    write_safetensors(base / "model.safetensors", wrapped, {})

    weights = load_weights(adapter)

    assert_near(weights, expected)
    assert any("'module.'" in note for note in weights.notes)


@pytest.mark.parametrize(
    ("classes", "network", "class_names"),
    [
        (5, "token", None),
        (3, "token", ("x", "y", "z")),
        (4, "pooler", None),
    ],
)
def test_a_classifier_of_the_adapter(
    base,
    adapter,
    classes,
    network,
    class_names,
):
    """It replaces the base's, or is added to a base without one.

    Only as many classes have the base's names.
    """
    a = NETWORKS[network]
    has_names = a.num_classes > 0
    write_base(
        base,
        a,
        class_names=("x", "y", "z") if has_names else None,
    )
    kernel = np.ones((classes, 16), np.float32)
    head = {
        "base_model.model.classifier.weight": kernel,
        "base_model.model.classifier.bias": kernel[:, 0] * 2,
    }
    pairs = {QUERY: sample_factors(16, 16)}
    write_adapter(
        adapter,
        base,
        pairs,
        {"modules_to_save": ["classifier"]},
        head,
    )

    weights = load_weights(adapter)
    is_noted = any("names of the base are kept" in note for note in weights.notes)

    assert weights.architecture.num_classes == classes
    assert_array_equal(weights.parameters["head/linear/kernel"], kernel.T)
    assert_array_equal(weights.parameters["head/linear/bias"], np.full(classes, 2))
    assert weights.class_names == class_names
    assert is_noted == has_names


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3', which is not read"),
        ({"peft_type": None}, "peft_type='None'"),
        ({"use_dora": True}, "use_dora='True'"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias='True'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"target_parameters": ["a"]}, "target_parameters="),
        ({"an_option_of_tomorrow": 3}, "an_option_of_tomorrow='3'"),
        ({"alpha_pattern": {"(a+)+": 3}}, r"alpha_pattern=.*\(a\+\)\+"),
        ({"lora_alpha": None}, "lora_alpha='None'"),
        ({"r": 0}, "r='0'"),
        ({"r": True}, "r='True'"),
        ({"lora_alpha": float("inf")}, "lora_alpha='inf'"),
    ],
)
def test_other_methods_are_named_with_the_command_that_merges_them(
    base,
    adapter,
    changes,
    words,
):
    write_base(base)
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16)}, changes)
    message = rf"adapter_config\.json: {words}.* \(of {base}\)"

    with pytest.raises(ValueError, match=message) as caught:
        load_weights(adapter)

    assert str(caught.value).endswith(f"{base} {adapter} merged")


A_OF_RANK_2, _ = sample_factors(24, 16)


_, B_OF_RANK_3 = sample_factors(24, 16, rank=3)


@pytest.mark.parametrize(
    ("layer", "factors", "words"),
    [
        (
            "vit.encoder.layer.7.output.dense",
            sample_factors(16, 24),
            "no array in the base",
        ),
        (
            DENSE,
            sample_factors(23, 16),
            r"shapes \(2, 16\) and \(23, 2\), and the base \(24, 16\)",
        ),
        (
            DENSE,
            (A_OF_RANK_2, B_OF_RANK_3),
            r"shapes \(2, 16\) and \(24, 3\)",
        ),
    ],
    ids=["layer", "outputs", "ranks"],
)
def test_factors_that_do_not_fit(layer, factors, words, base, adapter):
    write_base(base)
    write_adapter(adapter, base, {layer: factors})
    message = rf"adapter_model\.safetensors: .*{words}"

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)


NO_PART = "array '{}' is of no part of LoRA"

MAGNITUDE = "base_model.model.x.lora_magnitude_vector"

EMBEDDING = "base_model.model.x.lora_embedding_A"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"base_model.model.{QUERY}.lora_A.weight", "one factor of two"),
        (MAGNITUDE, NO_PART.format(MAGNITUDE)),
        (EMBEDDING, NO_PART.format(EMBEDDING)),
        ("other.weight", NO_PART.format("other.weight")),
    ],
)
def test_arrays_that_are_no_factors(name, words, base, adapter):
    write_base(base)
    write_adapter(adapter, base, {}, others={name: np.ones((2, 16))})

    with pytest.raises(ValueError, match=re.escape(words)):
        load_weights(adapter)


def test_saved_parts_that_the_network_lacks(base, adapter):
    write_base(base)
    saved = {"base_model.model.vit.neck.weight": np.ones(3)}
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16)}, others=saved)
    message = r"left over: vit\.neck\.weight"

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)


@pytest.fixture
def fetched(base, adapter, monkeypatch):
    """Replace downloads of the Hub, and return the list of addresses."""
    addresses = []

    def fetch(address):
        addresses.append(address)
        return adapter if address == "hf://owner/adapter" else base

    monkeypatch.setattr("vit_jax.weights.hub.fetch", fetch)
    return addresses


def test_the_base_is_a_name_of_the_hub(base, adapter, fetched):
    write_base(base)
    pairs = {QUERY: sample_factors(16, 16)}

    write_adapter(adapter, "google/vit", pairs)
    load_weights(adapter)
    write_adapter(adapter, "google/vit", pairs, {"revision": "v2"})
    load_weights("hf://owner/adapter")

    assert fetched == ["hf://google/vit", "hf://owner/adapter", "hf://google/vit@v2"]


def test_a_downloaded_adapter_opens_no_folder_of_this_machine(
    base,
    adapter,
    fetched,
):
    write_base(base)
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16)})
    message = r"neither a name of the Hub nor a folder .* Set base_model_name_or_path"

    with pytest.raises(ValueError, match=message):
        load_weights("hf://owner/adapter")


@pytest.mark.parametrize("name", ["", None, 3, "a\nb"])
def test_a_base_without_a_name_is_rejected(name, adapter):
    pairs = {QUERY: sample_factors(16, 16)}
    write_adapter(adapter, "", pairs, {"base_model_name_or_path": name})

    with rejects("base_model_name_or_path", "must name the base"):
        load_weights(adapter)


def test_a_base_that_cannot_be_fetched_is_named(adapter, monkeypatch):
    def fetch(address):
        raise ValueError(f"{address} cannot be fetched: 404")

    monkeypatch.setattr("vit_jax.weights.hub.fetch", fetch)
    write_adapter(adapter, "google/vit", {QUERY: sample_factors(16, 16)})
    message = (
        r"is a PEFT adapter of google/vit: hf://google/vit cannot be fetched: 404 "
        r".* set base_model_name_or_path"
    )

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)


def test_an_adapter_is_no_base(adapter):
    write_adapter(adapter, adapter, {})
    message = "not a workdir or another adapter"

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)


def test_a_folder_of_a_network_and_an_adapter_is_rejected(base, adapter):
    write_base(base)
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16)})
    file = adapter / "model.safetensors"
    file.write_bytes((base / "model.safetensors").read_bytes())
    expected = load_weights(base)
    message = r"a network \(model\.safetensors\) and a PEFT adapter"

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)

    assert_same(load_weights(file, num_heads=2).parameters, expected.parameters)


def test_a_pickled_adapter_is_rejected(base, adapter):
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16)})
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    message = r"holds adapter_model\.bin, a PyTorch file, .*adapter_model\.safetensors "

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)


def test_an_adapter_without_arrays_is_rejected(base, adapter):
    write_adapter(adapter, base, {QUERY: sample_factors(16, 16)})
    (adapter / "adapter_model.safetensors").unlink()
    message = r"no adapter_model\.safetensors\. Fetch the adapter again"

    with pytest.raises(ValueError, match=message):
        load_weights(adapter)
