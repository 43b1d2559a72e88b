"""Adapters of PEFT: W + scale * B A, computed here by hand, under both generations of names of transformers."""

import json
import math
import re

import numpy as np
import pytest

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


def write_base(folder, a=SQUARE, format_name="huggingface", class_names=("x", "y", "z")):
    arrays = arrays_of(a, format_name)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", arrays, {})
    write_library_config(folder, format_name, a, class_names, None)

    return arrays


def write_adapter(folder, base, factors, config=(), others=()):
    """Write factors {layer: (A, B)}, and other arrays."""
    folder.mkdir(exist_ok=True)
    arrays = {f"base_model.model.{layer}.lora_A.weight": pair[0] for layer, pair in factors.items()}
    arrays |= {
        f"base_model.model.{layer}.lora_B.weight": pair[1] for layer, pair in factors.items()
    }
    write_safetensors(folder / "adapter_model.safetensors", {**arrays, **dict(others)}, {})
    text = json.dumps({**CONFIG, "base_model_name_or_path": str(base), **dict(config)})
    (folder / "adapter_config.json").write_text(text)

    return folder


def make_factors(outputs, inputs, rank=2, seed=0):
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(rank, *np.atleast_1d(inputs))).astype(np.float32)
    second = rng.normal(size=(outputs, rank)).astype(np.float32)

    return first, second.reshape(outputs, rank, *(1 for _ in first.shape[2:]))


def load_merged(folder, arrays, pairs, scale, format_name="huggingface"):
    """Load the base with kernels computed by hand: {array: (A, B)}."""
    merged = dict(arrays)
    for name, (first, second) in pairs.items():
        product = np.einsum(
            "or,r...->o...",
            second.reshape(second.shape[:2]).astype(float),
            first.astype(float),
        )
        merged[name] = (arrays[name] + scale * product).astype(np.float32)

    write_safetensors(folder / "model.safetensors", merged, {})
    expected = load_weights(folder)
    write_safetensors(folder / "model.safetensors", arrays, {})

    return expected


def assert_near(weights, expected):
    assert weights.architecture == expected.architecture
    assert weights.parameters.keys() == expected.parameters.keys()

    for name, array in expected.parameters.items():
        np.testing.assert_allclose(
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
def test_factors_are_merged(tmp_path, is_newer, options, scale):
    arrays = write_base(tmp_path / "base")
    pairs = {QUERY: make_factors(16, 16), DENSE: make_factors(24, 16, seed=1)}
    named = {NEWER[layer] if is_newer else layer: pair for layer, pair in pairs.items()}
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", named, options)
    kernels = {f"{layer}.weight": pair for layer, pair in pairs.items()}
    expected = load_merged(tmp_path / "base", arrays, kernels, scale)

    for source in (folder, folder / "adapter_model.safetensors"):
        weights = load_weights(source)
        assert_near(weights, expected)
        assert weights.class_names == ("x", "y", "z")
        assert weights.source == f"{folder} (huggingface)"

        (note,) = (note for note in weights.notes if "LoRA" in note)
        assert f"2 layers in {folder} are merged into the base {tmp_path / 'base'}" in note

    plain = load_weights(tmp_path / "base")
    name = "encoder/blocks/attention/query/kernel"

    assert np.abs(weights.parameters[name] - plain.parameters[name]).max() > 0.1


def test_ranks_and_scales_of_layers(tmp_path):
    arrays = write_base(tmp_path / "base")
    pairs = {QUERY: make_factors(16, 16, rank=3), DENSE: make_factors(24, 16)}
    config = {
        "rank_pattern": {"query": 3},
        "alpha_pattern": {"layer.1.attention.attention.query": 9},
    }
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", pairs, config)
    expected = load_merged(
        tmp_path / "base",
        arrays,
        {f"{layer}.weight": pair for layer, pair in pairs.items()},
        3.0,
    )

    assert_near(load_weights(folder), expected)

    write_adapter(folder, tmp_path / "base", pairs)
    with pytest.raises(
        ValueError, match=rf"adapter_model.*: its layer '{QUERY}' has the rank 3, .* r=2"
    ):
        load_weights(folder)


def test_a_base_of_timm_and_a_convolution(tmp_path):
    """Below the name of transformers' wrapper; the base is wrapped and in half precision."""
    arrays = write_base(tmp_path / "base", format_name="timm")
    pairs = {
        "patch_embed.proj": make_factors(16, (3, 4, 4)),
        "blocks.0.attn.qkv": make_factors(48, 16),
    }
    named = {f"timm_model.{layer}": pair for layer, pair in pairs.items()}
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", named)
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    single = {name: array.astype(np.float32) for name, array in halves.items()}
    expected = load_merged(
        tmp_path / "base",
        single,
        {f"{layer}.weight": pair for layer, pair in pairs.items()},
        3.0,
    )
    wrapped = {f"module.{name}": array for name, array in halves.items()}
    write_safetensors(tmp_path / "base/model.safetensors", wrapped, {})
    weights = load_weights(folder)

    assert_near(weights, expected)
    assert any("'module.'" in note for note in weights.notes)


@pytest.mark.parametrize(("classes", "base"), [(5, "token"), (3, "token"), (4, "pooler")])
def test_a_classifier_of_the_adapter(tmp_path, classes, base):
    """It replaces the base's, or is added to a base without one; only as many classes have the base's names."""
    a = NETWORKS[base]
    names = ("x", "y", "z") if a.num_classes else None
    write_base(tmp_path / "base", a, class_names=names)
    kernel = np.ones((classes, 16), np.float32)
    head = {
        "base_model.model.classifier.weight": kernel,
        "base_model.model.classifier.bias": kernel[:, 0] * 2,
    }
    pairs = {QUERY: make_factors(16, 16)}
    folder = write_adapter(
        tmp_path / "adapter",
        tmp_path / "base",
        pairs,
        {"modules_to_save": ["classifier"]},
        head,
    )
    weights = load_weights(folder)

    assert weights.architecture.num_classes == classes
    np.testing.assert_array_equal(weights.parameters["head/linear/kernel"], kernel.T)
    np.testing.assert_array_equal(weights.parameters["head/linear/bias"], np.full(classes, 2))

    is_named = names is not None and classes == len(names)
    assert weights.class_names == (names if is_named else None)

    expected = names is not None
    assert any("names are those of the base" in note for note in weights.notes) == expected


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
def test_other_methods_are_named_with_the_command_that_merges_them(tmp_path, changes, words):
    write_base(tmp_path / "base")
    folder = write_adapter(
        tmp_path / "adapter",
        tmp_path / "base",
        {QUERY: make_factors(16, 16)},
        changes,
    )

    with pytest.raises(
        ValueError, match=rf"adapter_config\.json: {words}.* \(of {tmp_path}/base\)"
    ) as caught:
        load_weights(folder)

    assert str(caught.value).endswith(f"{tmp_path}/base {folder} merged")


def test_factors_that_do_not_fit(tmp_path):
    base = tmp_path / "base"
    folder = tmp_path / "adapter"
    write_base(base)
    cases = {
        "no array in the base": {"vit.encoder.layer.7.output.dense": make_factors(16, 24)},
        r"shapes \(2, 16\) and \(23, 2\), and the base \(24, 16\)": {DENSE: make_factors(23, 16)},
        r"shapes \(2, 16\) and \(24, 3\)": {
            DENSE: (make_factors(24, 16)[0], make_factors(24, 16, rank=3)[1])
        },
    }

    for words, pairs in cases.items():
        with pytest.raises(ValueError, match=rf"adapter_model\.safetensors: .*{words}"):
            load_weights(write_adapter(folder, base, pairs))

    alone = {f"base_model.model.{QUERY}.lora_A.weight": np.ones((2, 16))}
    with pytest.raises(ValueError, match="one factor of two"):
        load_weights(write_adapter(folder, base, {}, others=alone))

    for name in (
        "base_model.model.x.lora_magnitude_vector",
        "base_model.model.x.lora_embedding_A",
        "other.weight",
    ):
        with pytest.raises(ValueError, match=rf"array '{re.escape(name)}' is of no part of LoRA"):
            load_weights(write_adapter(folder, base, {}, others={name: np.ones((2, 16))}))

    saved = {"base_model.model.vit.neck.weight": np.ones(3)}
    with pytest.raises(ValueError, match=r"left over: vit\.neck\.weight"):
        load_weights(write_adapter(folder, base, {QUERY: make_factors(16, 16)}, others=saved))


def test_the_base_is_a_folder_or_a_name_of_the_hub(tmp_path, monkeypatch):
    fetched = []

    def fetch(address):
        fetched.append(address)
        return tmp_path / ("adapter" if address == "hf://owner/adapter" else "base")

    monkeypatch.setattr("vit_jax.weights.hub.fetch", fetch)
    write_base(tmp_path / "base")
    pairs = {QUERY: make_factors(16, 16)}
    folder = write_adapter(tmp_path / "adapter", "google/vit", pairs)
    load_weights(folder)
    write_adapter(folder, "google/vit", pairs, {"revision": "v2"})
    load_weights("hf://owner/adapter")

    assert fetched == ["hf://google/vit", "hf://owner/adapter", "hf://google/vit@v2"]

    write_adapter(
        folder,
        tmp_path / "base",
        pairs,
    )  # a downloaded adapter opens no file of this machine

    with pytest.raises(
        ValueError, match=r"neither a name of the Hub nor a folder .* Set base_model_name_or_path"
    ):
        load_weights("hf://owner/adapter")

    for base in ("", None, 3, "a\nb"):
        write_adapter(folder, "", pairs, {"base_model_name_or_path": base})
        with rejects("base_model_name_or_path", "must name the base"):
            load_weights(folder)


def test_a_base_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    def fetch(address):
        raise ValueError(f"{address} cannot be fetched: 404")

    monkeypatch.setattr("vit_jax.weights.hub.fetch", fetch)
    folder = write_adapter(tmp_path / "adapter", "google/vit", {QUERY: make_factors(16, 16)})
    words = r"is a PEFT adapter of google/vit: hf://google/vit cannot be fetched: 404 .* set base_model_name_or_path"

    with pytest.raises(ValueError, match=words):
        load_weights(folder)

    write_adapter(folder, folder, {})
    with pytest.raises(ValueError, match="not a workdir or another adapter"):
        load_weights(folder)


def test_folders_of_adapters_that_are_not_whole(tmp_path):
    write_base(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", {QUERY: make_factors(16, 16)})
    (folder / "model.safetensors").write_bytes((tmp_path / "base/model.safetensors").read_bytes())

    with pytest.raises(ValueError, match=r"a network \(model\.safetensors\) and a PEFT adapter"):
        load_weights(folder)

    assert_same(
        load_weights(folder / "model.safetensors", num_heads=2).parameters,
        load_weights(tmp_path / "base").parameters,
    )

    (folder / "model.safetensors").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    with pytest.raises(
        ValueError, match=r"holds adapter_model\.bin, a PyTorch file, .*adapter_model\.safetensors "
    ):
        load_weights(folder)

    (folder / "adapter_model.bin").unlink()
    with pytest.raises(
        ValueError, match=r"no adapter_model\.safetensors\. Fetch the adapter again"
    ):
        load_weights(folder)
