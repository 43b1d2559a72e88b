"""Facts that are derived, assumed and asked for; any header gives a network or a ValueError."""

import dataclasses
import random
import re

import numpy as np
import pytest

from tests.weights.reference import networks
from tests.weights.small_networks import (
    HYBRID,
    NETWORKS,
    RESNET,
    SQUARE,
    VIT,
    weights_of,
)
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
    "timm": [
        "ViT-B/16",
        "ViT-S/16",
        "R50+ViT-B/16",
        "R26+ViT-S/32",
        "R+ViT-Ti/16",
        "R50x3",
    ],
    "huggingface": ["ViT-B/16", "ViT-L/32", "ViT-H/14"],
}
DEFAULTS = {
    "released": {"gelu": "tanh", "layer_norm_epsilon": 1e-6},
    "bit": {},
    "timm": {"gelu": "exact", "layer_norm_epsilon": 1e-6},
    "huggingface": {"gelu": "exact", "layer_norm_epsilon": 1e-12},
}


def build_headers(a, format_name):
    entries = FORMATS[format_name].make_entries(a)
    return {entry.name: StoredArray(entry.shape, FLOAT32) for entry in entries}


def as_read(a, format_name):
    """Return the architecture with the GELU form and the epsilons of the format."""
    details = {}
    if a.has_transformer:
        details.update(DEFAULTS[format_name])
    if a.has_resnet and format_name == "timm":
        details.update(networks.STEM_EPSILONS)
    return dataclasses.replace(a, **details)


PUBLISHED = [(format_name, name) for format_name, names in PAPER.items() for name in names]


@pytest.mark.parametrize(("format_name", "name"), PUBLISHED)
def test_published_networks_are_recognised_whole(format_name, name):
    options = {"head": "linear"} if "ViT" in name else {}
    config = ModelConfig(
        name=name,
        compute_dtype="float32",
        **options,
    )
    a = build_architecture(
        config,
        image_size=(224, 224),
        num_classes=1000,
    )
    a = as_read(a, format_name)
    given = {"image_size": (224, 224)} if a.family == "resnet" else {}

    known = recognise(build_headers(a, format_name), {}, options=given)

    assert known.architecture == a
    assert known.format == format_name
    assert not known.ignored
    assert not known.folded_rows


TOKEN = VIT
GAP = dataclasses.replace(VIT, pool="gap")
MAP = dataclasses.replace(VIT, pool="map")
TIMM_VIT = dataclasses.replace(VIT, gelu="exact")
NO_CLASSES = dataclasses.replace(TIMM_VIT, num_classes=0)
SIZE = {"image_size": (8, 12)}
NO_TABLE = NETWORKS["sincos2d"]
NO_POSITIONS = {"position_embedding": "none"}
OF_VIT = {
    "patch_size": (4, 4),
    "width": 16,
    "depth": 2,
    "mlp_dim": 24,
    "num_classes": 3,
}
GIVEN = {"image_size": (8, 12), "num_heads": 2}


@pytest.mark.parametrize(
    ("a", "format_name", "arguments", "expected"),
    [
        (TOKEN, "released", {"options": SIZE}, {}),
        (GAP, "released", {"options": SIZE}, {}),
        (MAP, "released", {"options": SIZE}, {}),
        (VIT, "released", {"options": {"image_size": [12, 8]}}, {"image_size": (12, 8)}),
        (
            VIT,
            "timm",
            {"options": GIVEN | {"num_heads": 8}},
            {"num_heads": 8, "gelu": "exact"},
        ),
        (NO_TABLE, "released", {"options": SIZE}, {}),
        (NO_TABLE, "released", {"options": SIZE | NO_POSITIONS}, NO_POSITIONS),
        # An option counts more than the configuration beside the file.
        (
            VIT,
            "timm",
            {"stated": GIVEN | {"gelu": "tanh", "num_heads": 8}, "options": {"num_heads": 2}},
            {},
        ),
        # Either the file or the configuration may have no head.
        (TIMM_VIT, "timm", {"stated": OF_VIT, "options": GIVEN}, {}),
        (TIMM_VIT, "timm", {"stated": OF_VIT | {"num_classes": 0}, "options": GIVEN}, {}),
        (NO_CLASSES, "timm", {"stated": OF_VIT, "options": GIVEN}, {}),
    ],
)
def test_facts_that_the_file_lacks_are_taken_from_options_and_configuration(
    a,
    format_name,
    arguments,
    expected,
):
    is_guess = a is NO_TABLE and not expected

    known = recognise(build_headers(a, format_name), {}, **arguments)

    assert known.architecture == dataclasses.replace(a, **expected)
    assert any("'sincos2d' is assumed" in text for text in known.assumptions) == is_guess


def test_a_border_that_no_patch_covers_is_noted():
    stated = {"image_size": (14, 15), "num_heads": 2}
    message = (
        "says 14x15 images, where patches of 4x4 pixels do not cover a border; "
        "vit_jax resizes the whole image to 12x12."
    )

    known = recognise(build_headers(SQUARE, "timm"), {}, stated=stated)
    (assumption,) = known.assumptions

    assert known.architecture == as_read(SQUARE, "timm")
    assert message in assumption


NOT_SQUARE = r"not a square grid of patches: give image_size.*multiples of 4 and 4"


@pytest.mark.parametrize(
    ("a", "format_name", "options", "words"),
    [
        (TOKEN, "released", {}, NOT_SQUARE),
        (GAP, "released", {}, NOT_SQUARE),
        (MAP, "released", {}, NOT_SQUARE),
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
            GIVEN | {"num_heads": 3},
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
            GIVEN | {"image_size": (14, 15)},
            r"\(14, 15\): must be a multiple .* such as 12,12",
        ),
        (
            SQUARE,
            "timm",
            GIVEN | {"image_size": (3, 15)},
            r"\(3, 15\): must be a multiple .* such as 4,12",
        ),
    ],
)
def test_options_that_are_missing_or_contradict_are_rejected(
    a,
    format_name,
    options,
    words,
):
    with pytest.raises(ValueError, match=words):
        recognise(build_headers(a, format_name), {}, options=options)


HYBRID_FIELDS = dataclasses.asdict(HYBRID)

OUT_OF_RANGE = "at most|make no hybrid|image"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"depth": 12, "width": 999},
            "width 999 there, 16 in the file; depth 12 there, 2 in the file. Take both",
        ),
        ({"mlp_dim": 25}, "mlp_dim 25 there, 24 in the file"),
        ({"num_classes": 10}, "num_classes 10 there, 3 in the file"),
        ({"patch_size": (4, 8)}, r"patch_size \(4, 8\) there, \(4, 4\) in the file"),
        ({"pool": "map"}, "pool map there, token in the file"),
    ],
)
def test_a_configuration_of_another_network_is_rejected(wrong, words):
    message = f"the configuration beside it .*{words}"

    with pytest.raises(ValueError, match=message):
        recognise(
            build_headers(VIT, "timm"),
            {},
            stated=OF_VIT | wrong,
            options=GIVEN,
        )


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"format_version": 2}, "of version 2, this program reads 1"),
        ({"format_version": True}, "of version True"),
        ({"architecture": []}, "no 'architecture' in it"),
        ({"architecture": {"depth": "many"}}, "stored description of the network"),
        ({"other": 1}, "no 'architecture' in it"),
        # Numbers that lie cost nothing.
        ({"architecture": HYBRID_FIELDS | {"depth": 10**15}}, OUT_OF_RANGE),
        ({"architecture": HYBRID_FIELDS | {"units": (1,) * 400}}, OUT_OF_RANGE),
        ({"architecture": HYBRID_FIELDS | {"units": (10**15,)}}, OUT_OF_RANGE),
        ({"architecture": HYBRID_FIELDS | {"units": (-3,)}}, OUT_OF_RANGE),
        (
            describe_weights(weights_of(SQUARE)),
            "gelu='exact': must be 'tanh', as the file's metadata",
        ),
    ],
)
def test_metadata_that_describes_nothing_or_something_else_is_rejected(metadata, words):
    with pytest.raises(ValueError, match=words):
        recognise(
            build_headers(HYBRID, "released"),
            metadata,
            options={"gelu": "exact"},
        )


def test_names_of_no_format_are_rejected_with_the_formats_that_are_known():
    message = (
        r"names of no known format \(conv\.weight, \.\.\.\)\. "
        r"Known are the released ViT.* docs/pretrained\.md"
    )

    with pytest.raises(ValueError, match=message):
        recognise({"conv.weight": StoredArray((16,), FLOAT32)}, {})


NAFLEX = "of a NaFlex model: .* take weights of SigLIP 2 for one resolution"

QUANTISED = "of a quantised network: "

BIAS_TABLE = "attention.attention.relative_position_bias.relative_position_bias_table"


@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
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
        (f"encoder.layer.0.{BIAS_TABLE}", "of .*BEiT: .*relative"),
        ("beit.encoder.layer.0.lambda_1", "of BEiT: "),
        ("encoder.layers.0.ls1", r"of InternViT .* such as timm's InternViT"),
        ("freqs", "of RoPE-ViT: it has learned or mixed rotary frequencies .* such as DINOv3"),
        ("rope.freqs", "of RoPE-ViT: "),
        ("vit.encoder.layer.0.output.dense.SCB", rf"{QUANTISED}.* take the file in float32"),
        ("vit.encoder.layer.0.output.dense.weight.absmax", QUANTISED),
        # Names of transformers, timm and big_vision.
        ("vision_model.embeddings.patch_embedding.weight", NAFLEX),
        ("embeds.proj.weight", NAFLEX),
        ("params/img/embedding/kernel", NAFLEX),
    ],
)
def test_families_that_are_not_read_are_rejected_in_words(
    name,
    words,
    format_name,
):
    """The file also has all arrays of a network that is read."""
    arrays = build_headers(VIT, format_name)
    arrays[name] = StoredArray((16, 16), FLOAT32)

    with pytest.raises(ValueError, match=f"the file is {words}") as error:
        recognise(arrays, {})

    assert f"({name}), which are not read: " in str(error.value)


def test_quantised_arrays_are_rejected_in_words():
    arrays = build_headers(VIT, "timm")
    name = "blocks.0.mlp.fc1.weight"
    arrays[name] = StoredArray(arrays[name].shape, np.dtype(np.int8))
    message = rf"quantised network: .* \({name}\), .* take the file in float32"

    with pytest.raises(ValueError, match=message):
        recognise(arrays, {})


def test_a_text_tower_alone_is_rejected_in_words():
    arrays = build_headers(VIT, "timm")
    text_tower = {f"text_model.{name}": array for name, array in arrays.items()}
    of_transformers = {"embeddings.token_embedding.weight": StoredArray((9, 16), FLOAT32)}

    with pytest.raises(
        ValueError, match=r"of a text tower alone, .* take the file with both towers"
    ):
        recognise(text_tower, {})
    with pytest.raises(ValueError, match="of a text tower alone"):
        recognise(of_transformers, {})


def damage_arrays(arrays, count, chance):
    """Change names and shapes of some arrays, in place."""
    for name in chance.sample(list(arrays), count):
        shape = list(arrays.pop(name).shape)
        # An array has no dimensions left after another took its name.
        if shape:
            shape[chance.randrange(len(shape))] = chance.choice([0, 1, 2, 7, 10**9])

        changed = chance.choice([name, name, name + "x", name.replace("1", "2"), name[1:]])
        rank = chance.randrange(5)
        arrays[changed] = StoredArray(tuple(shape[:rank]), FLOAT32)


def damage_metadata(metadata, chance):
    """Return no metadata, or metadata with an odd field or an odd architecture."""
    architecture = metadata["architecture"]
    odd_field = chance.choice(list(architecture))
    odd_fields = {**architecture, odd_field: chance.choice(ODD)}
    choices = [
        {},
        {},
        {**metadata, "architecture": odd_fields},
        {"architecture": chance.choice(ODD)},
    ]
    return chance.choice(choices)


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
    """The first headers and metadata are complete; the first five headers are."""
    chance = random.Random(0)
    a = {"bit": RESNET, "timm": HYBRID}.get(format_name, SQUARE)
    complete = describe_weights(weights_of(a))
    results = set()

    for number in range(100):
        arrays = build_headers(a, format_name)
        damage_arrays(arrays, min(number // 5, 2), chance)
        metadata = damage_metadata(complete, chance)
        if number == 0:
            metadata = complete
        options = {} if metadata else {"image_size": a.image_size}

        try:
            recognise(arrays, metadata, options=options)
            results.add("recognised")
        except ValueError:
            results.add("rejected")

    assert results == {"recognised", "rejected"}


POSSIBLE = {
    "architecture": "vit_base_patch16_224",
    "gelu": "exact",
    "group_norm_epsilon": 1e-6,
    "image_size": (8, 8),
    "layer_norm_epsilon": 1e-6,
    "num_heads": 4,
    "position_embedding": "sincos2d",
    "rope": "grid",
    "standardization_epsilon": 1e-6,
    "standardization_epsilon_added_to": "variance",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_a_possible_value_and_none(option):
    assert validate_options({option: POSSIBLE[option]})
    assert validate_options({option: None}) == {}


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
def test_every_option_has_an_impossible_value(option, wrong, words):
    message = f"^{re.escape(f'{option}={wrong!r}')}: {words}"

    with pytest.raises(ValueError, match=message):
        validate_options({option: wrong})
