"""Names of released files held to lists of them, and networks recognised by names and shapes."""

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
    "timm": (
        "token",
        "gap",
        "map",
        "headless",
        "deep",
        "hybrid",
        "root_hybrid",
        "resnet",
    ),
    "huggingface": (
        "token",
        "gap",
        "headless",
        "pooler",
        "deep",
    ),
}
# Networks that are written after their positions became a learned table.
TABLED = {
    "released": ("learned_2d",),
    "timm": ("sincos2d", "learned_2d"),
    "huggingface": ("sincos2d", "learned_2d"),
}
PAIRS = [(name, network) for name, networks in WRITABLE.items() for network in networks]


def build_published(name, **options):
    if "ViT" in name:
        options = {"head": "linear", **options}
    config = ModelConfig(name=name, **options)
    return build_architecture(
        config,
        image_size=(224, 224),
        num_classes=1000,
    )


BLOCK = {
    "LayerNorm_0/scale": (768,),
    "LayerNorm_0/bias": (768,),
    "MultiHeadDotProductAttention_1/query/kernel": (768, 12, 64),
    "MultiHeadDotProductAttention_1/query/bias": (12, 64),
    "MultiHeadDotProductAttention_1/key/kernel": (768, 12, 64),
    "MultiHeadDotProductAttention_1/key/bias": (12, 64),
    "MultiHeadDotProductAttention_1/value/kernel": (768, 12, 64),
    "MultiHeadDotProductAttention_1/value/bias": (12, 64),
    "MultiHeadDotProductAttention_1/out/kernel": (12, 64, 768),
    "MultiHeadDotProductAttention_1/out/bias": (768,),
    "LayerNorm_2/scale": (768,),
    "LayerNorm_2/bias": (768,),
    "MlpBlock_3/Dense_0/kernel": (768, 3072),
    "MlpBlock_3/Dense_0/bias": (3072,),
    "MlpBlock_3/Dense_1/kernel": (3072, 768),
    "MlpBlock_3/Dense_1/bias": (768,),
}


def list_shapes(a, format_name):
    return {entry.name: entry.shape for entry in FORMATS[format_name].make_entries(a)}


def test_the_released_vit():
    expected = {
        "cls": (1, 1, 768),
        "embedding/kernel": (16, 16, 3, 768),
        "embedding/bias": (768,),
        "Transformer/posembed_input/pos_embedding": (1, 197, 768),
        "Transformer/encoder_norm/scale": (768,),
        "Transformer/encoder_norm/bias": (768,),
        "pre_logits/kernel": (768, 768),
        "pre_logits/bias": (768,),
        "head/kernel": (768, 1000),
        "head/bias": (1000,),
    }
    for layer in range(12):
        for name, shape in BLOCK.items():
            expected[f"Transformer/encoderblock_{layer}/{name}"] = shape

    assert list_shapes(build_published("ViT-B/16", head="mlp"), "released") == expected


def list_shapes_of_unit(inputs, width, has_shortcut):
    """Return the released names and shapes of a bottleneck unit."""
    shapes = {
        "conv1/kernel": (1, 1, inputs, width),
        "conv2/kernel": (3, 3, width, width),
        "conv3/kernel": (1, 1, width, 4 * width),
    }
    channels = {
        "gn1": width,
        "gn2": width,
        "gn3": 4 * width,
    }
    if has_shortcut:
        shapes["conv_proj/kernel"] = (1, 1, inputs, 4 * width)
        channels["gn_proj"] = 4 * width

    for norm, count in channels.items():
        shapes[f"{norm}/scale"] = (1, 1, 1, count)
        shapes[f"{norm}/bias"] = (1, 1, 1, count)
    return shapes


def test_the_stem_of_the_released_hybrid():
    expected = {
        "conv_root/kernel": (7, 7, 3, 64),
        "gn_root/scale": (1, 1, 1, 64),
        "gn_root/bias": (1, 1, 1, 64),
    }
    inputs = 64
    for block, (units, width) in enumerate(
        [
            (3, 64),
            (4, 128),
            (9, 256),
        ],
        start=1,
    ):
        for unit in range(1, units + 1):
            shapes = list_shapes_of_unit(inputs, width, has_shortcut=unit == 1)
            for name, shape in shapes.items():
                expected[f"block{block}/unit{unit}/{name}"] = shape
            inputs = 4 * width

    shapes = list_shapes(build_published("R50+ViT-B/16"), "released")
    stem = {}
    for name, shape in shapes.items():
        if name.startswith(("conv_root", "gn_root", "block")):
            stem[name] = shape

    assert stem == expected
    assert shapes["embedding/kernel"] == (1, 1, 1024, 768)


def test_the_embedding_of_the_released_hybrid_with_a_root_alone():
    shapes = list_shapes(build_published("R+ViT-Ti/16"), "released")

    assert shapes["embedding/kernel"] == (8, 8, 64, 192)


def test_big_transfer():
    expected = {
        "resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 64),
        "resnet/block1/unit01/a/proj/standardized_conv2d/kernel": (1, 1, 64, 256),
        # The norm of the input.
        "resnet/block1/unit01/a/group_norm/gamma": (64,),
        "resnet/block2/unit01/a/group_norm/beta": (256,),
        "resnet/block3/unit06/b/standardized_conv2d/kernel": (3, 3, 256, 256),
        "resnet/block4/unit03/c/standardized_conv2d/kernel": (1, 1, 512, 2048),
        "resnet/group_norm/gamma": (2048,),
        "resnet/head/conv2d/kernel": (1, 1, 2048, 1000),
        "resnet/head/conv2d/bias": (1000,),
    }

    shapes = list_shapes(build_published("R50x1"), "bit")
    deeper = list_shapes(build_published("R152x2"), "bit")

    assert expected.items() <= shapes.items()
    assert len(shapes) == 1 + 16 * 9 + 4 + 4
    assert "resnet/block3/unit36/a/group_norm/gamma" in deeper


FACTS = (
    "family",
    "patch_size",
    "width",
    "depth",
    "mlp_dim",
    "units",
    "pool",
    "head",
    "num_classes",
)


@pytest.mark.parametrize(("name", "network"), PAIRS)
def test_names_are_those_of_one_format(name, network):
    shapes = list_shapes(NETWORKS[network], name)

    formats = []
    for each, format_ in FORMATS.items():
        if format_.find_canonical(shapes) is not None:
            formats.append(each)

    assert formats == [name]


@pytest.mark.parametrize(("name", "network"), PAIRS)
def test_a_network_is_recognised_by_names_and_shapes(name, network):
    a = NETWORKS[network]
    shapes = list_shapes(a, name)

    canonical = FORMATS[name].find_canonical(shapes)
    facts = FORMATS[name].find_facts({own: shapes[array] for own, array in canonical.items()})

    assert set(canonical.values()) == shapes.keys()
    # A class of transformers has a prefix.
    assert name == "huggingface" or canonical.keys() == shapes.keys()
    for field in FACTS:
        assert getattr(facts, field) == getattr(a, field), field
    assert facts.num_heads in (a.num_heads, None)
    if a.has_resnet:
        assert facts.root_channels == a.root_channels
    else:
        assert facts.root_channels == 64
    if a.has_transformer and a.position_embedding == "learned_1d":
        assert facts.position_rows == a.sequence_length
    else:
        assert facts.position_rows is None


@pytest.mark.parametrize("name", FORMATS)
def test_networks_that_a_format_cannot_hold_are_rejected(name):
    message = f"The format {name} cannot hold .*vit_jax holds every network"
    writable = (*WRITABLE[name], *TABLED.get(name, ()))

    for network, a in NETWORKS.items():
        if network in writable:
            require_writable(name, a)
            continue

        with pytest.raises(ValueError, match=message):
            require_writable(name, a)


def test_all_reasons_of_a_rejection_are_listed():
    a = dataclasses.replace(
        NETWORKS["token"],
        head="mlp",
        norm="rms",
    )

    with pytest.raises(ValueError, match=r"hidden layer.*norm='rms'"):
        require_writable("huggingface", a)


@pytest.mark.parametrize(
    "field",
    ["network", "block", "position_embedding", "pool", "head"],
)
def test_custom_parts_are_rejected_in_other_formats(field):
    custom = dataclasses.replace(NETWORKS["token"], **{field: "mine:Part"})
    message = f"timm cannot hold ViT-custom/4, which has {field}='mine:Part': write vit_jax"

    require_standard(NETWORKS["token"], "timm")
    with pytest.raises(ValueError, match=message):
        require_standard(custom, "timm")
