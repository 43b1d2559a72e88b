"""What is derived, assumed and asked for, and that whatever headers say, nothing but a ValueError comes of it."""

import dataclasses
import random
import re

import numpy as np
import pytest

from tests.weights.reference import networks
from tests.weights.small_networks import HYBRID, NETWORKS, RESNET, SQUARE, VIT, weights_of
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.weights import OPTIONS
from vit_jax.weights.formats import StoredArray
from vit_jax.weights.names import FORMATS
from vit_jax.weights.recognise import recognise, validate_options
from vit_jax.weights.saving import describe_weights

FLOAT32 = np.dtype(np.float32)
PAPER = {
    "released": [
        "ViT-B/16",
        "ViT-B/32",
        "ViT-L/16",
        "ViT-H/14",
        "R50+ViT-B/16",
        "R50+ViT-L/32",
        "R26+ViT-S/32",
    ],
    "bit": ["R50x1", "R101x3", "R152x4"],
    "timm": ["ViT-B/16", "ViT-S/16", "R50+ViT-B/16", "R26+ViT-S/32", "R+ViT-Ti/16", "R50x3"],
    "huggingface": ["ViT-B/16", "ViT-L/32", "ViT-H/14"],
}
DEFAULTS = {
    "released": {"gelu": "tanh", "layer_norm_epsilon": 1e-6},
    "bit": {},
    "timm": {"gelu": "exact", "layer_norm_epsilon": 1e-6},
    "huggingface": {"gelu": "exact", "layer_norm_epsilon": 1e-12},
}


def headers(a, format_name):
    return {
        entry.name: StoredArray(entry.shape, FLOAT32)
        for entry in FORMATS[format_name].make_entries(a)
    }


def as_read(a, format_name):
    """With the format's own GELU form and epsilons."""
    details = DEFAULTS[format_name] if a.has_transformer else {}
    details = details | (networks.STEM_EPSILONS if a.has_resnet and format_name == "timm" else {})

    return dataclasses.replace(a, **details)


@pytest.mark.parametrize(
    ("format_name", "name"),
    [(f, name) for f, names in PAPER.items() for name in names],
)
def test_published_networks_are_recognised_whole(format_name, name):
    head = {"head": "linear"} if "ViT" in name else {}
    a = build_architecture(ModelConfig(name=name, **head), image_size=(224, 224), num_classes=1000)
    a = as_read(dataclasses.replace(a, compute_dtype="float32"), format_name)
    options = {"image_size": (224, 224)} if a.family == "resnet" else {}
    known = recognise(headers(a, format_name), {}, options=options)

    assert known.architecture == a
    assert known.format == format_name
    assert not known.ignored
    assert not known.folded_rows


POOLS = [dataclasses.replace(VIT, pool=pool) for pool in ("token", "gap", "map")]
TIMM_VIT = dataclasses.replace(VIT, gelu="exact")
NO_TABLE = NETWORKS["sincos2d"]
NO_POSITIONS = {"position_embedding": "none"}
OF_VIT = {"patch_size": (4, 4), "width": 16, "depth": 2, "mlp_dim": 24, "num_classes": 3}
SAID = {"image_size": (8, 12), "num_heads": 2}


@pytest.mark.parametrize(
    ("a", "format_name", "arguments", "expected"),
    [
        *((a, "released", {"options": {"image_size": (8, 12)}}, {}) for a in POOLS),
        (VIT, "released", {"options": {"image_size": [12, 8]}}, {"image_size": (12, 8)}),
        (VIT, "timm", {"options": SAID | {"num_heads": 8}}, {"num_heads": 8, "gelu": "exact"}),
        (NO_TABLE, "released", {"options": {"image_size": (8, 12)}}, {}),
        (NO_TABLE, "released", {"options": {"image_size": (8, 12)} | NO_POSITIONS}, NO_POSITIONS),
        # What is given counts more than what is stated beside the file; of the head, one of the two
        # may have none.
        (
            VIT,
            "timm",
            {"stated": SAID | {"gelu": "tanh", "num_heads": 8}, "options": {"num_heads": 2}},
            {},
        ),
        (TIMM_VIT, "timm", {"stated": OF_VIT, "options": SAID}, {}),
        (TIMM_VIT, "timm", {"stated": OF_VIT | {"num_classes": 0}, "options": SAID}, {}),
        (
            dataclasses.replace(TIMM_VIT, num_classes=0),
            "timm",
            {"stated": OF_VIT, "options": SAID},
            {},
        ),
    ],
)
def test_what_the_file_does_not_tell_is_taken_from_what_is_said(
    a, format_name, arguments, expected
):
    known = recognise(headers(a, format_name), {}, **arguments)
    assert known.architecture == dataclasses.replace(a, **expected)

    is_guess = a is NO_TABLE and not expected
    assert any("'sincos2d' is assumed" in text for text in known.assumptions) == is_guess


def test_a_border_that_no_patch_covers_is_left_out_and_told():
    known = recognise(headers(SQUARE, "timm"), {}, stated={"image_size": (14, 15), "num_heads": 2})
    assert known.architecture == as_read(SQUARE, "timm")

    said = "says 14x15 images, where patches of 4x4 pixels do not cover a border; ours show all of the image in 12x12."
    assert [said in text for text in known.assumptions] == [True]


@pytest.mark.parametrize(
    ("a", "format_name", "options", "words"),
    [
        *(
            (
                a,
                "released",
                {},
                r"not a square grid of patches: give image_size.*multiples of 4 and 4",
            )
            for a in POOLS
        ),
        (
            VIT,
            "released",
            {"image_size": (16, 12)},
            r"\(16, 12\) has 12 patches of 4x4 pixels, .* positions for 6",
        ),
        (
            VIT,
            "timm",
            {"image_size": (8, 12)},
            "width 16, depth 2 and mlp_dim 24: give num_heads, a divisor of 16",
        ),
        (
            VIT,
            "timm",
            SAID | {"num_heads": 3},
            "num_heads=3: must divide the width. Give a divisor of 16",
        ),
        (NO_TABLE, "released", {}, "does not state the image size, .*: give image_size"),
        (SQUARE, "released", {"num_heads": 4}, "num_heads=4: must be 2, as the file states"),
        (
            SQUARE,
            "released",
            {"position_embedding": "sincos2d"},
            "'sincos2d': must be 'learned_1d', as the file",
        ),
        (
            SQUARE,
            "released",
            {"group_norm_epsilon": 1e-5},
            "group_norm_epsilon=1e-05: .* no effect on a vit",
        ),
        (
            SQUARE,
            "timm",
            SAID | {"image_size": (14, 15)},
            r"\(14, 15\): must be a multiple .* such as 12,12",
        ),
        (
            SQUARE,
            "timm",
            SAID | {"image_size": (3, 15)},
            r"\(3, 15\): must be a multiple .* such as 4,12",
        ),
    ],
)
def test_options_that_are_missing_or_contradict_are_refused(a, format_name, options, words):
    with pytest.raises(ValueError, match=words):
        recognise(headers(a, format_name), {}, options=options)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"depth": 12, "width": 999},
            "width 999 there, 16 in the file; depth 12 there, 2 in the file. Bring both",
        ),
        ({"mlp_dim": 25}, "mlp_dim 25 there, 24 in the file"),
        ({"num_classes": 10}, "num_classes 10 there, 3 in the file"),
        ({"patch_size": (4, 8)}, r"patch_size \(4, 8\) there, \(4, 4\) in the file"),
        ({"pool": "map"}, "pool map there, token in the file"),
    ],
)
def test_a_configuration_of_another_network_is_refused(wrong, words):
    with pytest.raises(ValueError, match=f"the configuration beside it .*{words}"):
        recognise(headers(VIT, "timm"), {}, stated=OF_VIT | wrong, options=SAID)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"format_version": 2}, "of version 2, this program reads 1"),
        ({"format_version": True}, "of version True"),
        ({"architecture": []}, "no 'architecture' in it"),
        ({"architecture": {"depth": "many"}}, "stored description of the network"),
        ({"other": 1}, "no 'architecture' in it"),
        *(  # numbers that lie cost nothing
            ({"architecture": dataclasses.asdict(HYBRID) | changes}, "at most|make no hybrid|image")
            for changes in (
                {"depth": 10**15},
                {"units": (1,) * 400},
                {"units": (10**15,)},
                {"units": (-3,)},
            )
        ),
        (
            describe_weights(weights_of(SQUARE)),
            "gelu='exact': must be 'tanh', as the file's metadata",
        ),
    ],
)
def test_metadata_that_describes_nothing_or_something_else_is_refused(metadata, words):
    with pytest.raises(ValueError, match=words):
        recognise(headers(HYBRID, "released"), metadata, options={"gelu": "exact"})


def test_names_of_no_format_are_refused_with_those_that_are_known():
    words = r"names of no known format \(conv\.weight, \.\.\.\)\. Known are the released ViT.* docs/pretrained\.md"
    with pytest.raises(ValueError, match=words):
        recognise({"conv.weight": StoredArray((16,), FLOAT32)}, {})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks.0.attn.q_norm.weight", "of a ViT with qk-norm: it has norms of queries and keys"),
        (
            "blocks.0.attn.relative_position_bias_table",
            "of Swin, BEiT .*: it has relative positions .* take weights",
        ),
        (
            "embeddings.cls_register_token",
            "of C-RADIO in .* names of memory: .* save it by save_pretrained",
        ),
        ("head.output_proj.weight", "of AIMv2 with attention pooling"),
        (
            "vit.embeddings.detection_tokens",
            "of a detector .*: it has tokens or heads for boxes .*such as DeiT",
        ),
        ("bbox_predictor.layers.0.weight", "of a detector .* take weights for classification"),
        (
            "encoder.layer.0.attention.attention.relative_position_bias.relative_position_bias_table",
            "of .*BEiT: .*relative",
        ),
        ("beit.encoder.layer.0.lambda_1", "of BEiT: "),
        ("encoder.layers.0.ls1", r"of InternViT .* such as timm's InternViT"),
        ("freqs", "of RoPE-ViT: it has learned or mixed rotary frequencies .* such as DINOv3"),
        ("rope.freqs", "of RoPE-ViT: "),
        (
            "vit.encoder.layer.0.output.dense.SCB",
            "of a quantised network: .* take the file in float32",
        ),
        ("vit.encoder.layer.0.output.dense.weight.absmax", "of a quantised network: "),
        *(
            (name, "of a NaFlex model: .* take weights of SigLIP 2 for one resolution")
            for name in (
                "vision_model.embeddings.patch_embedding.weight",  # transformers
                "embeds.proj.weight",  # timm
                "params/img/embedding/kernel",  # big_vision
            )
        ),
    ],
)
def test_families_that_are_not_read_are_refused_in_words(name, words):
    """Although all arrays of a network that is read are there."""
    for format_name in ("timm", "huggingface"):
        with pytest.raises(ValueError, match=f"the file is {words}") as error:
            recognise(headers(VIT, format_name) | {name: StoredArray((16, 16), FLOAT32)}, {})

        assert f"({name}), which are not read: " in str(error.value)


def test_quantised_arrays_and_a_text_tower_alone_are_refused_in_words():
    arrays = headers(VIT, "timm")
    name = "blocks.0.mlp.fc1.weight"
    words = rf"quantised network: .* \({name}\), .* take the file in float32"

    with pytest.raises(ValueError, match=words):
        recognise(arrays | {name: StoredArray(arrays[name].shape, np.dtype(np.int8))}, {})

    with pytest.raises(
        ValueError, match=r"of a text tower alone, .* take the file with both towers"
    ):
        recognise({f"text_model.{name}": array for name, array in arrays.items()}, {})

    with pytest.raises(ValueError, match=r"of a text tower alone"):  # a text model of transformers
        recognise({"embeddings.token_embedding.weight": StoredArray((9, 16), FLOAT32)}, {})


ODD = [
    0,
    -1,
    1,
    2,
    3,
    10**12,
    2**70,
    None,
    "x",
    [],
    {},
    True,
    1.5,
    float("inf"),
    [1, 2],
    "sincos2d",
    "resnet",
    "map",
]


@pytest.mark.parametrize("format_name", FORMATS)
def test_any_headers_and_metadata_give_a_network_or_a_value_error(format_name):
    chance = random.Random(0)
    a = {"bit": RESNET, "timm": HYBRID}.get(format_name, SQUARE)
    metadata = describe_weights(weights_of(a))
    outcomes = set()

    for number in range(100):
        arrays = headers(a, format_name)
        for name in chance.sample(list(arrays), min(number // 5, 2)):  # the first five as they are
            shape = list(arrays.pop(name).shape)
            if shape:  # it may have lost all when another took its name
                shape[chance.randrange(len(shape))] = chance.choice([0, 1, 2, 7, 10**9])

            changed = chance.choice([name, name, name + "x", name.replace("1", "2"), name[1:]])
            arrays[changed] = StoredArray(tuple(shape[: chance.randrange(5)]), FLOAT32)

        fields = {
            **metadata["architecture"],
            chance.choice(list(metadata["architecture"])): chance.choice(ODD),
        }
        odd = chance.choice(
            [{}, {}, {**metadata, "architecture": fields}, {"architecture": chance.choice(ODD)}]
        )
        odd = odd if number else metadata

        try:
            recognise(arrays, odd, options={} if odd else {"image_size": a.image_size})
            outcomes.add("recognised")
        except ValueError:
            outcomes.add("refused")

    assert outcomes == {"recognised", "refused"}


@pytest.mark.parametrize(
    ("option", "wrong", "words"),
    [
        *((name, "foo", "must be ") for name in OPTIONS),
        ("layer_norm_epsilon", float("nan"), "must be a number above 0, such as 1e-6"),
        ("standardization_epsilon", -1e-6, "must be a number above 0"),
        ("num_heads", 0, "must be a divisor of the network's width"),
        ("image_size", (0, 8), "must be height and width in pixels, such as 224,224"),
        ("image_size", [8], "must be height and width"),
    ],
)
def test_every_option_has_a_possible_and_an_impossible_value(option, wrong, words):
    """That none is let through unchecked, and none is always refused."""
    possible = {
        "image_size": (8, 8),
        "num_heads": 4,
        "gelu": "exact",
        "position_embedding": "sincos2d",
    }
    possible |= {
        "architecture": "vit_base_patch16_224",
        "rope": "grid",
        "standardization_epsilon_added_to": "variance",
    }

    assert validate_options({option: possible.get(option, 1e-6)})
    assert validate_options({option: None}) == {}
    with pytest.raises(ValueError, match=f"^{re.escape(f'{option}={wrong!r}')}: {words}"):
        validate_options({option: wrong})
