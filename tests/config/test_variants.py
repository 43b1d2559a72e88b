"""Names of models, and the numbers they stand for."""

import pytest

from vit_jax.config import VIT_SIZES, ModelConfig, build_architecture
from vit_jax.config.variants import parse_name

# Reference sheet §1.1: width, layers, MLP dimension, heads; "b" is half of B in every hidden dimension.
SIZES = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "b": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}


def build(name="ViT-B/16", image_size=(224, 224), num_classes=1000, **fields):
    return build_architecture(ModelConfig(name=name, **fields), image_size=image_size, num_classes=num_classes)


def test_table_of_sizes():
    assert {name: tuple(vars(size).values()) for name, size in VIT_SIZES.items()} == SIZES


@pytest.mark.parametrize("size", SIZES)
def test_name_stands_for_numbers(size):
    a = build(f"ViT-{size}/14")
    assert (a.width, a.depth, a.mlp_dim, a.num_heads) == SIZES[size]
    assert (a.patch_size, a.grid, a.sequence_length) == ((14, 14), (16, 16), 257)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("ViT-B/16", ("B", (16, 16))),
        ("B/16", ("B", (16, 16))),
        ("ViT-g-opt/14", ("g-opt", (14, 14))),
        ("ViT-Ti/16x8", ("Ti", (16, 8))),
    ],
)
def test_parse_name(name, parsed):
    assert parse_name(name) == parsed


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ViT-X/16", "ViT-"),
        ("ViT-So400/14", "ViT-So400m/14"),
        ("vit-B/16", "ViT-B/16"),
        ("ViT-L16", "ViT-L/16"),
        ("L-16", "ViT-L/16"),
        ("", "A name is ViT-SIZE/PATCH with SIZE one of mu, Ti"),
    ],
)
def test_unknown_name_offers_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"model\.name='{name}' is not a known model\. Nearest: .*{nearest}"):
        parse_name(name)


def test_a_number_beside_the_name_replaces_the_row():
    a = build("ViT-B/16", width=64, depth=2, mlp_dim=96, num_heads=4)
    assert (a.width, a.depth, a.mlp_dim, a.num_heads) == (64, 2, 96, 4)


def test_every_other_field_is_taken_over():
    given = {"pool": "map", "head": "linear", "dropout_fraction": 0.1, "gelu": "exact", "scan_unroll": 2}
    a = build(**given, compute_dtype="float32", position_embedding="sincos2d", head_bias_init=-10.0, remat="full")
    assert {name: getattr(a, name) for name in given} == given
    assert (a.compute_dtype, a.position_embedding, a.head_bias_init, a.remat) == ("float32", "sincos2d", -10.0, "full")


@pytest.mark.parametrize(("pool", "length"), [("token", 7), ("gap", 6), ("map", 6)])
def test_sequence_of_an_image_that_is_no_square(pool, length):
    a = build("B/16x8", image_size=(32, 24), pool=pool)
    assert (a.grid, a.sequence_length) == ((2, 3), length)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": (225, 224)}, "do not divide the image height of 225: use an input.image_size of 224 or 240"),
        ({"image_size": (224, 230)}, "do not divide the image width of 230: use an input.image_size of 224 or 240"),
        ({"image_size": (8, 8)}, "image height of 8: use an input.image_size of 16, or another patch size"),
        ({"name": "ViT-B/0"}, "patches of 0 pixels"),
        ({"width": 770}, "model.width=770 is not divisible by model.num_heads=12"),
        ({"num_heads": 5}, "model.width=768 is not divisible by model.num_heads=5"),
        ({"width": 0}, "model.width=0: must be at least 1"),
        ({"depth": -1}, "model.depth=-1: must be at least 1"),
        ({"mlp_dim": 0}, "model.mlp_dim=0"),
        ({"num_heads": 0}, "model.num_heads=0"),
        ({"scan_unroll": 0}, "model.scan_unroll=0"),
        ({"num_classes": 0}, "model.num_classes=0"),
        ({"width": 6, "num_heads": 1, "position_embedding": "sincos2d"}, "needs a width divisible by 4, not 6"),
        ({"width": 7, "num_heads": 1, "position_embedding": "learned_2d"}, "needs an even width, not 7"),
    ],
)
def test_numbers_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        build(**fields)
