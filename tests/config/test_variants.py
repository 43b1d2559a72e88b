"""Names of models, and the numbers they stand for."""

import dataclasses
import json

import pytest

from tests.rejections import rejects
from vit_jax.config import VIT_SIZES, ModelConfig, build_architecture
from vit_jax.config.networks import read_architecture
from vit_jax.config.variants import MODEL_NAMES, list_models, parse_name


def build(name="ViT-B/16", image_size=(224, 224), num_classes=1000, **fields):
    return build_architecture(
        ModelConfig(name=name, **fields), image_size=image_size, num_classes=num_classes
    )


HEADS = {
    "mu": 2,
    "Ti": 3,
    "S": 6,
    "b": 6,
    "M": 8,
    "B": 12,
}  # no count of parameters would notice another number


@pytest.mark.parametrize("size", VIT_SIZES)
def test_name_stands_for_numbers(size):
    """The golden counts of parameters hold the other numbers of a size."""
    a = build(f"ViT-{size}/14")

    assert (a.num_heads, a.width % a.num_heads) == (HEADS.get(size, 16), 0)
    assert (a.patch_size, a.grid, a.sequence_length) == ((14, 14), (16, 16), 257)

    for pool, length in (("token", 7), ("gap", 6), ("map", 6)):
        a = build(f"{size}/16x8", image_size=(32, 24), pool=pool)
        assert (a.grid, a.sequence_length) == ((2, 3), length)


NEAREST = {
    "ViT-": ("ViT-X/16",),
    "ViT-So400m/14": ("ViT-So400/14",),
    "ViT-B/16, ": ("vit_base_patch16_224.augreg_in21k", "google/vit-base-patch16-224", "vit_b_16"),
    "ViT-Ti/16, ": ("vit_tiny_patch16_224", "deit_tiny_patch16_224"),
    "ViT-B/": ("vit-B/16", "ViT-B/0", "ViT-B/16x0"),
    "ViT-L/16": ("ViT-L16", "L-16"),
    "R50": ("R51", "ResNet50", "R50x0.0", "R050", "R50+", "R50x", "R"),
    r"R50\+ViT-": ("R50+B/0", "R50+ViT-B16", "R50+ViT-X/16", "R50x1-B/32"),
    r"R\d*\+ViT-": ("R+B/0", "R+Tiny/16"),
    "mu, Ti": ("",),
}


@pytest.mark.parametrize(
    ("nearest", "name"), [(nearest, name) for nearest in NEAREST for name in NEAREST[nearest]]
)
def test_unknown_name_offers_the_nearest(name, nearest):
    with rejects(f"model.name={name!r}", f"nearest.*{nearest}"):
        parse_name(name)


@pytest.mark.parametrize(("name", "width"), [("R50x1", 2048), ("R152x4", 8192), ("R14x0.5", 1024)])
def test_resnet_stands_for_numbers(name, width):
    a = build(name)
    channels = width // 32

    assert (a.family, a.has_transformer, a.has_resnet) == ("resnet", False, True)
    assert (a.width, a.map_channels, a.root_channels) == (width, width, channels)
    assert [a.stage_channels(stage) for stage in range(4)] == [
        width // 8,
        width // 4,
        width // 2,
        width,
    ]
    assert (a.depth, a.mlp_dim, a.num_heads) == (0, 0, 0)
    assert (a.pool, a.head, a.residual_unit) == ("gap", "linear", "preactivation")
    assert (a.map_size, a.grid, a.sequence_length) == ((7, 7), (7, 7), 49)
    assert build(name, image_size=(225, 8)).map_size == (8, 1)  # five halvings, each rounding up


@pytest.mark.parametrize(
    (
        "name",
        "units",
        "channels",
        "patch",
        "tokens",
    ),  # §2.3; tokens at 224 and at 384 without the class token
    [
        ("R+Ti/16", (), 64, 8, (49, 144)),
        ("R50+ViT-B/16", (3, 4, 9), 1024, 1, (196, 576)),
        ("R101x2+B/8", (3, 30), 1024, 1, (784, 2304)),
        ("R14x0.5+ViT-mu/4", (4,), 128, 1, (3136, 9216)),
        ("Rx2+Ti/8", (), 128, 4, (196, 576)),
        ("R50+B/64", (3, 4, 6, 3), 2048, 2, (9, 36)),
    ],
)
def test_hybrid_stands_for_numbers(name, units, channels, patch, tokens):
    for pixels, expected in zip(
        (192, 384) if name.endswith("64") else (224, 384), tokens, strict=True
    ):
        a = build(name, image_size=(pixels, pixels))

        assert (a.family, a.has_transformer, a.has_resnet) == ("hybrid", True, True)
        assert (a.units, a.map_channels, a.patch_size) == (units, channels, (patch, patch))
        assert a.map_size == (a.grid[0] * patch, a.grid[1] * patch)
        assert (a.sequence_length, a.pool, a.head) == (expected + 1, "token", "mlp")


def test_each_form_of_unit_has_its_constants():  # §2.1 and §2.3
    after = ("postactivation", 1e-6, 1e-5, "std")
    forms = {
        ("R50x1", None): ("preactivation", 1e-5, 1e-10, "variance"),
        ("R50x1", after[0]): after,
    }
    for (name, form), constants in {**forms, ("R50+B/16", None): after}.items():
        a = build(name, residual_unit=form)
        given = (
            a.residual_unit,
            a.group_norm_epsilon,
            a.standardization_epsilon,
            a.standardization_epsilon_added_to,
        )
        assert given == constants


TRANSFORMER_ONLY = {
    "width": 64,
    "depth": 2,
    "mlp_dim": 96,
    "num_heads": 4,
    "block": "axial",
    "gelu": "exact",
}
TRANSFORMER_ONLY |= {
    "position_embedding": "learned_2d",
    "position_layers": "every",
    "position_stddev": 0.1,
}
TRANSFORMER_ONLY |= {
    "dropout_fraction": 0.1,
    "stochastic_depth_fraction": 0.1,
    "layer_norm_epsilon": 1e-5,
}
RESNET_ONLY = {"residual_unit": "postactivation", "group_norm_epsilon": 1e-5}
RESNET_ONLY |= {"standardization_epsilon": 1e-8, "standardization_epsilon_added_to": "std"}
ONLY = {"transformer": TRANSFORMER_ONLY, "ResNet": RESNET_ONLY}


@pytest.mark.parametrize(("name", "part"), [("R50x1", "transformer"), ("ViT-B/16", "ResNet")])
def test_options_of_a_part_that_is_not_there_are_rejected(name, part):
    for field, value in ONLY[part].items():
        with rejects(f"config.model.{field}={value!r}", f"no effect.*{part}"):
            build(name, **{field: value})


@pytest.mark.parametrize("positions", ["sincos2d", "none"])
def test_a_spread_of_positions_that_are_not_learned_is_rejected(positions):
    assert build("ViT-B/16", position_stddev=0.051).position_stddev == 0.051
    with rejects("config.model.position_stddev=0.1", f"no effect.*{positions}"):
        build("ViT-B/16", position_embedding=positions, position_stddev=0.1)


def test_a_hybrid_has_use_for_all_options():
    given = {
        "compute_dtype": "float32",
        "head": "linear",
        "head_bias_init": -10.0,
        "pool": "gap",
        "remat": "full",
    }
    given |= TRANSFORMER_ONLY | RESNET_ONLY | {"scan_unroll": 2}
    a = build("R50+B/16", **given)

    assert {name: getattr(a, name) for name in given} == given


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"image_size": (8, 8)}, "name='ViT-B/16'.*height.*8.*image_size of 16"),
        ({"width": 770}, "width=770.*divisible by.*num_heads=12"),
        *(
            ({f: 0}, f"{f}=0.*at least 1")
            for f in ("width", "depth", "mlp_dim", "num_heads", "scan_unroll")
        ),
        ({"num_classes": -1}, "num_classes=-1.*negative"),
        *(({f: 0.0}, f"{f}=0.0.*positive") for f in ("layer_norm_epsilon", "position_stddev")),
        ({"name": "R50x0.3"}, "name='R50x0.3'.*multiple of 0.5"),
        ({"name": "R50+B/7"}, r"name='R50\+B/7'.*total downsampling.*4, 8, 16, 32"),
        ({"name": "R50+B/16x8"}, r"name='R50\+B/16x8'.*total downsampling"),
        ({"name": "R+B/15"}, r"name='R\+B/15'.*even"),
        (
            {"name": "R50+B/16", "image_size": (224, 230)},
            r"name='R50\+B/16'.*width.*230.*224 or 240",
        ),
        (
            {"width": 6, "num_heads": 1, "position_embedding": "sincos2d"},
            "='sincos2d'.*divisible by 4.*6",
        ),
        (
            {"width": 7, "num_heads": 1, "position_embedding": "learned_2d"},
            "='learned_2d'.*divisible by 2.*7",
        ),
        ({"block": "axial", "pool": "token"}, "pool='token'.*axial.*gap or map"),
        (
            {"position_embedding": "none", "position_layers": "shared"},
            "layers='shared'.*'none'.*'stem'",
        ),
        (
            {"position_embedding": "relative", "position_layers": "every"},
            "layers='every'.*relative.*'stem'",
        ),
        (
            {"position_embedding": "sincos2d", "position_layers": "every"},
            "layers='every'.*sincos2d.*'shared'",
        ),
        (
            {"position_embedding": "relative", "block": "mine:Block"},
            "embedding='relative'.*mine:Block",
        ),
        (
            {"position_embedding": "relative", "attention": "cudnn"},
            "attention='cudnn'.*relative.*auto or xla",
        ),
        ({"name": "R50", "pool": "token"}, "pool='token'.*gap"),
        (
            {"name": "R50+B/16", "residual_unit": "preactivation"},
            "residual_unit='preactivation'.*hybrid",
        ),
    ],
)
def test_numbers_that_do_not_fit(fields, rule):
    with rejects("model.", rule):
        build(**fields)


@pytest.mark.parametrize("name", ["ViT-B/16", "R50x0.5", "R50+ViT-L/16", "R+ViT-Ti/16"])
def test_architecture_survives_json(name):
    a = build(name, image_size=(224, 256), num_classes=0)

    assert a.num_classes == 0  # it ends in its features
    assert read_architecture(json.loads(json.dumps(dataclasses.asdict(a)))) == a


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"colour": 3}, "architecture.colour"),
        ({"name": None}, "must have.*architecture.name"),
        ({"units": None}, "units"),
        ({"family": "cnn"}, "architecture.family='cnn'"),
        ({"units": [3, 0]}, r"\(3, 0\).*no hybrid"),
        ({"width_factor": float("inf")}, "architecture.width_factor=inf.*finite"),
        ({"residual_unit": "preactivation"}, "preactivation.*no hybrid"),
        ({"family": "vit"}, "no vit"),
    ],
)
def test_stored_architecture_that_cannot_be(changes, rule):
    """None takes a field away."""
    values = json.loads(json.dumps(dataclasses.asdict(build("R50+ViT-B/16")))) | changes
    with rejects("stored description of the network", rule):
        read_architecture({name: value for name, value in values.items() if value is not None})


def test_listed_models_can_be_built_and_hold_every_size():
    assert len(set(MODEL_NAMES)) == len(MODEL_NAMES)
    assert {parse_name(name).size for name in MODEL_NAMES} == {*VIT_SIZES, None}
    for name in MODEL_NAMES:
        assert build(name).name == name


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("ViT-B/*", ["ViT-B/32", "ViT-B/16", "ViT-B/8"]),
        ("ViT-H", ["ViT-H/16", "ViT-H/14"]),
        ("vit-h/14", ["ViT-H/14"]),
        ("R50x[12]", ["R50x1", "R50x2"]),
        ("ViT-b/16", ["ViT-b/16"]),
        ("nothing", []),
        ("", list(MODEL_NAMES)),
    ],
)
def test_list_models(pattern, names):
    assert list_models(pattern) == names
