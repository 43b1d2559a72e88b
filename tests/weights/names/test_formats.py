"""Names of released files against lists of them, and the way back from names and shapes to the network."""

import dataclasses

import pytest

from tests.weights.small_networks import NETWORKS
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.weights.names import FORMATS, require_standard, require_writable

WRITABLE = {
    "released": (
        "token",
        "mlp_head",
        "gap",
        "map",
        "sincos2d",
        "headless",
        "pooler",
        "deep",
        "hybrid",
        "root_hybrid",
    ),
    "bit": ("resnet",),
    "timm": ("token", "gap", "map", "headless", "deep", "hybrid", "root_hybrid", "resnet"),
    "huggingface": ("token", "gap", "headless", "pooler", "deep"),
}
TABLED = {
    "released": ("learned_2d",),
    "timm": ("sincos2d", "learned_2d"),
    "huggingface": ("sincos2d", "learned_2d"),
}
"""Besides these: saving makes a learned table of other positions before it asks a format."""
PAIRS = [(name, network) for name, networks in WRITABLE.items() for network in networks]


def published(name, image_size=(224, 224), **options):
    options = {"head": "linear", **options} if "ViT" in name else options
    return build_architecture(
        ModelConfig(name=name, **options),
        image_size=image_size,
        num_classes=1000,
    )


def shapes(a, format_name):
    return {entry.name: entry.shape for entry in FORMATS[format_name].make_entries(a)}


def test_the_released_vit():
    names = shapes(published("ViT-B/16", head="mlp"), "released")
    block = {
        **{f"LayerNorm_{number}/{leaf}": (768,) for number in (0, 2) for leaf in ("scale", "bias")},
        **{
            f"MultiHeadDotProductAttention_1/{name}/kernel": (768, 12, 64)
            for name in ("query", "key", "value")
        },
        **{
            f"MultiHeadDotProductAttention_1/{name}/bias": (12, 64)
            for name in ("query", "key", "value")
        },
        "MultiHeadDotProductAttention_1/out/kernel": (12, 64, 768),
        "MultiHeadDotProductAttention_1/out/bias": (768,),
        "MlpBlock_3/Dense_0/kernel": (768, 3072),
        "MlpBlock_3/Dense_0/bias": (3072,),
        "MlpBlock_3/Dense_1/kernel": (3072, 768),
        "MlpBlock_3/Dense_1/bias": (768,),
    }
    expected = {
        "cls": (1, 1, 768),
        "embedding/kernel": (16, 16, 3, 768),
        "embedding/bias": (768,),
        "Transformer/posembed_input/pos_embedding": (1, 197, 768),
        **{
            f"Transformer/encoderblock_{i}/{name}": shape
            for i in range(12)
            for name, shape in block.items()
        },
        "Transformer/encoder_norm/scale": (768,),
        "Transformer/encoder_norm/bias": (768,),
        "pre_logits/kernel": (768, 768),
        "pre_logits/bias": (768,),
        "head/kernel": (768, 1000),
        "head/bias": (1000,),
    }

    assert names == expected


def test_the_stem_of_the_released_hybrid():
    names = shapes(published("R50+ViT-B/16"), "released")
    expected = {
        "conv_root/kernel": (7, 7, 3, 64),
        "gn_root/scale": (1, 1, 1, 64),
        "gn_root/bias": (1, 1, 1, 64),
    }
    inputs = 64

    for block, (units, width) in enumerate([(3, 64), (4, 128), (9, 256)], start=1):
        for unit in range(1, units + 1):
            name = f"block{block}/unit{unit}"
            expected |= {
                f"{name}/conv1/kernel": (1, 1, inputs, width),
                f"{name}/conv2/kernel": (3, 3, width, width),
                f"{name}/conv3/kernel": (1, 1, width, 4 * width),
            }
            norms = {"gn1": width, "gn2": width, "gn3": 4 * width} | (
                {"gn_proj": 4 * width} if unit == 1 else {}
            )
            expected |= {
                f"{name}/{n}/{leaf}": (1, 1, 1, c)
                for n, c in norms.items()
                for leaf in ("scale", "bias")
            }

            if unit == 1:
                expected[f"{name}/conv_proj/kernel"] = (1, 1, inputs, 4 * width)

            inputs = 4 * width

    is_of_stem = {name for name in names if name.startswith(("conv_root", "gn_root", "block"))}
    assert {name: names[name] for name in is_of_stem} == expected
    assert names["embedding/kernel"] == (1, 1, 1024, 768)
    assert shapes(published("R+ViT-Ti/16"), "released")["embedding/kernel"] == (8, 8, 64, 192)


def test_big_transfer():
    names = shapes(published("R50x1"), "bit")
    expected = {
        "root_block/standardized_conv2d/kernel": (7, 7, 3, 64),
        "block1/unit01/a/proj/standardized_conv2d/kernel": (1, 1, 64, 256),
        "block1/unit01/a/group_norm/gamma": (64,),  # of what comes in
        "block2/unit01/a/group_norm/beta": (256,),
        "block3/unit06/b/standardized_conv2d/kernel": (3, 3, 256, 256),
        "block4/unit03/c/standardized_conv2d/kernel": (1, 1, 512, 2048),
        "group_norm/gamma": (2048,),
        "head/conv2d/kernel": (1, 1, 2048, 1000),
        "head/conv2d/bias": (1000,),
    }

    assert {name: names[f"resnet/{name}"] for name in expected} == expected
    assert len(names) == 1 + 16 * 9 + 4 + 4
    assert "resnet/block3/unit36/a/group_norm/gamma" in shapes(published("R152x2"), "bit")


@pytest.mark.parametrize(("name", "network"), PAIRS)
def test_a_format_tells_the_network_back(name, network):
    a = NETWORKS[network]
    names = shapes(a, name)
    canonical = FORMATS[name].find_canonical(names)

    assert set(canonical.values()) == names.keys()  # all but the prefix of a class of transformers
    assert name == "huggingface" or canonical.keys() == names.keys()

    others = [
        other
        for other, format_ in FORMATS.items()
        if other != name and format_.find_canonical(names) is not None
    ]

    assert others == []

    facts = FORMATS[name].find_facts({own: names[array] for own, array in canonical.items()})
    for field in (
        "family",
        "patch_size",
        "width",
        "depth",
        "mlp_dim",
        "units",
        "pool",
        "head",
        "num_classes",
    ):
        assert getattr(facts, field) == getattr(a, field), field

    assert facts.root_channels == (a.root_channels if a.has_resnet else 64)
    assert facts.num_heads in (a.num_heads, None)

    rows = (
        None if a.position_embedding != "learned_1d" or not a.has_transformer else a.sequence_length
    )

    assert facts.position_rows == rows


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_cannot_hold_is_refused(name):
    for network, a in NETWORKS.items():
        if network in (*WRITABLE[name], *TABLED.get(name, ())):
            require_writable(name, a)
            continue

        with pytest.raises(
            ValueError, match=f"The format {name} cannot hold .*vit_jax holds every network"
        ):
            require_writable(name, a)

    if name == "huggingface":
        with pytest.raises(ValueError, match=r"hidden layer.*norm='rms'"):  # all reasons
            require_writable(name, dataclasses.replace(NETWORKS["token"], head="mlp", norm="rms"))


@pytest.mark.parametrize("field", ["network", "block", "position_embedding", "pool", "head"])
def test_parts_of_ones_own_are_refused_in_formats_of_others(field):
    own = dataclasses.replace(NETWORKS["token"], **{field: "mine:Part"})
    require_standard(NETWORKS["token"], "timm")
    words = f"timm cannot hold ViT-custom/4, which has {field}='mine:Part': write vit_jax"

    with pytest.raises(ValueError, match=words):
        require_standard(own, "timm")
