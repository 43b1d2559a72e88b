"""Names of models, and the numbers they stand for."""

import dataclasses
import json

import pytest

from tests.rejections import rejects
from vit_jax.config import VIT_SIZES, ModelConfig, build_architecture
from vit_jax.config.networks import read_architecture
from vit_jax.config.variants import MODEL_NAMES, list_models, parse_name


def build(
    name="ViT-B/16",
    image_size=(224, 224),
    num_classes=1000,
    **fields,
):
    config = ModelConfig(name=name, **fields)
    return build_architecture(
        config,
        image_size=image_size,
        num_classes=num_classes,
    )


# No count of parameters would notice another number of heads.
HEADS = {
    "mu": 2,
    "Ti": 3,
    "S": 6,
    "b": 6,
    "M": 8,
    "B": 12,
}


@pytest.mark.parametrize("size", VIT_SIZES)
def test_name_stands_for_numbers(size):
    """The golden counts of parameters hold the other numbers of a size."""
    a = build(f"ViT-{size}/14")

    assert a.num_heads == HEADS.get(size, 16)
    assert a.width % a.num_heads == 0
    assert a.patch_size == (14, 14)
    assert a.grid == (16, 16)
    assert a.sequence_length == 257


@pytest.mark.parametrize("size", VIT_SIZES)
@pytest.mark.parametrize(
    ("pool", "length"),
    [
        ("token", 7),
        ("gap", 6),
        ("map", 6),
    ],
)
def test_patches_and_images_need_not_be_square(size, pool, length):
    a = build(f"{size}/16x8", image_size=(32, 24), pool=pool)

    assert a.grid == (2, 3)
    assert a.sequence_length == length


NEAREST = {
    "ViT-X/16": "ViT-",
    "ViT-So400/14": "ViT-So400m/14",
    "vit_base_patch16_224.augreg_in21k": "ViT-B/16, ",
    "google/vit-base-patch16-224": "ViT-B/16, ",
    "vit_b_16": "ViT-B/16, ",
    "vit_tiny_patch16_224": "ViT-Ti/16, ",
    "deit_tiny_patch16_224": "ViT-Ti/16, ",
    "vit-B/16": "ViT-B/",
    "ViT-B/0": "ViT-B/",
    "ViT-B/16x0": "ViT-B/",
    "ViT-L16": "ViT-L/16",
    "L-16": "ViT-L/16",
    "R51": "R50",
    "ResNet50": "R50",
    "R50x0.0": "R50",
    "R050": "R50",
    "R50+": "R50",
    "R50x": "R50",
    "R": "R50",
    "R50+B/0": r"R50\+ViT-",
    "R50+ViT-B16": r"R50\+ViT-",
    "R50+ViT-X/16": r"R50\+ViT-",
    "R50x1-B/32": r"R50\+ViT-",
    "R+B/0": r"R\d*\+ViT-",
    "R+Tiny/16": r"R\d*\+ViT-",
    "": "mu, Ti",
}


@pytest.mark.parametrize("name", NEAREST)
def test_unknown_name_offers_the_nearest(name):
    nearest = NEAREST[name]

    with rejects(f"model.name={name!r}", f"nearest.*{nearest}"):
        parse_name(name)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("R50x1", 2048),
        ("R152x4", 8192),
        ("R14x0.5", 1024),
    ],
)
def test_resnet_stands_for_numbers(name, width):
    a = build(name)
    channels = [a.stage_channels(stage) for stage in range(4)]

    assert a.width == width
    assert a.map_channels == width
    assert a.root_channels == width // 32
    assert channels == [width // 8, width // 4, width // 2, width]
    assert a.map_size == (7, 7)
    assert a.grid == (7, 7)
    assert a.sequence_length == 49
    # Each of five halvings rounds up.
    odd = build(name, image_size=(225, 8))
    assert odd.map_size == (8, 1)


@pytest.mark.parametrize("name", ["R50x1", "R152x4", "R14x0.5"])
def test_resnet_has_no_transformer(name):
    a = build(name)

    assert a.family == "resnet"
    assert not a.has_transformer
    assert a.has_resnet
    assert (a.depth, a.mlp_dim, a.num_heads) == (0, 0, 0)
    assert a.pool == "gap"
    assert a.head == "linear"
    assert a.residual_unit == "preactivation"


# §2.3 of the paper.
@pytest.mark.parametrize(
    ("name", "units", "channels", "patch", "downsampling"),
    [
        ("R+Ti/16", (), 64, 8, 32),
        ("R50+ViT-B/16", (3, 4, 9), 1024, 1, 16),
        ("R101x2+B/8", (3, 30), 1024, 1, 8),
        ("R14x0.5+ViT-mu/4", (4,), 128, 1, 4),
        ("Rx2+Ti/8", (), 128, 4, 16),
        ("R50+B/64", (3, 4, 6, 3), 2048, 2, 64),
    ],
)
@pytest.mark.parametrize("pixels", [192, 384])
def test_hybrid_stands_for_numbers(
    name,
    units,
    channels,
    patch,
    downsampling,
    pixels,
):
    """The tokens do not include the class token."""
    a = build(name, image_size=(pixels, pixels))

    rows, columns = a.grid
    tokens = (pixels // downsampling) ** 2

    assert a.family == "hybrid"
    assert a.has_transformer
    assert a.has_resnet
    assert a.units == units
    assert a.map_channels == channels
    assert a.patch_size == (patch, patch)
    assert a.map_size == (rows * patch, columns * patch)
    assert a.sequence_length == tokens + 1
    assert a.pool == "token"
    assert a.head == "mlp"


# §2.1 and §2.3 of the paper
@pytest.mark.parametrize(
    ("name", "form", "unit", "norm_epsilon", "epsilon", "added_to"),
    [
        ("R50x1", None, "preactivation", 1e-5, 1e-10, "variance"),
        ("R50x1", "postactivation", "postactivation", 1e-6, 1e-5, "std"),
        ("R50+B/16", None, "postactivation", 1e-6, 1e-5, "std"),
    ],
)
def test_each_form_of_unit_has_its_constants(
    name,
    form,
    unit,
    norm_epsilon,
    epsilon,
    added_to,
):
    a = build(name, residual_unit=form)

    assert a.residual_unit == unit
    assert a.group_norm_epsilon == norm_epsilon
    assert a.standardization_epsilon == epsilon
    assert a.standardization_epsilon_added_to == added_to


TRANSFORMER_ONLY = {
    "width": 64,
    "depth": 2,
    "mlp_dim": 96,
    "num_heads": 4,
    "block": "axial",
    "gelu": "exact",
    "position_embedding": "learned_2d",
    "position_layers": "every",
    "position_stddev": 0.1,
    "dropout_fraction": 0.1,
    "stochastic_depth_fraction": 0.1,
    "layer_norm_epsilon": 1e-5,
}
RESNET_ONLY = {
    "residual_unit": "postactivation",
    "group_norm_epsilon": 1e-5,
    "standardization_epsilon": 1e-8,
    "standardization_epsilon_added_to": "std",
}
ONLY = {"transformer": TRANSFORMER_ONLY, "ResNet": RESNET_ONLY}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("R50x1", "transformer"),
        ("ViT-B/16", "ResNet"),
    ],
)
def test_options_of_a_part_that_is_not_there_are_rejected(name, part):
    for field, value in ONLY[part].items():
        with rejects(f"config.model.{field}={value!r}", f"no effect.*{part}"):
            build(name, **{field: value})


@pytest.mark.parametrize("positions", ["sincos2d", "none"])
def test_a_spread_of_positions_that_are_not_learned_is_rejected(positions):
    with rejects("config.model.position_stddev=0.1", f"no effect.*{positions}"):
        build(
            "ViT-B/16",
            position_embedding=positions,
            position_stddev=0.1,
        )


def test_a_spread_of_learned_positions():
    a = build("ViT-B/16", position_stddev=0.051)

    assert a.position_stddev == 0.051


def test_a_hybrid_has_use_for_all_options():
    options = {
        "compute_dtype": "float32",
        "head": "linear",
        "head_bias_init": -10.0,
        "pool": "gap",
        "remat": "full",
        "scan_unroll": 2,
        **TRANSFORMER_ONLY,
        **RESNET_ONLY,
    }
    a = build("R50+B/16", **options)

    for name, value in options.items():
        assert getattr(a, name) == value


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"image_size": (8, 8)}, "name='ViT-B/16'.*height.*8.*image_size of 16"),
        ({"width": 770}, "width=770.*divisible by.*num_heads=12"),
        ({"num_classes": -1}, "num_classes=-1.*negative"),
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


@pytest.mark.parametrize(
    "field",
    [
        "width",
        "depth",
        "mlp_dim",
        "num_heads",
        "scan_unroll",
    ],
)
def test_sizes_are_at_least_1(field):
    with rejects(f"model.{field}=0", "at least 1"):
        build(**{field: 0})


@pytest.mark.parametrize("field", ["layer_norm_epsilon", "position_stddev"])
def test_numbers_that_must_be_positive(field):
    with rejects(f"model.{field}=0.0", "positive"):
        build(**{field: 0.0})


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("R50x0.3", "multiple of 0.5"),
        ("R50+B/7", "total downsampling.*4, 8, 16, 32"),
        ("R50+B/16x8", "total downsampling"),
        ("R+B/15", "even"),
    ],
)
def test_numbers_of_names_that_do_not_fit(name, rule):
    with rejects(f"model.name={name!r}", rule):
        build(name)


def store(a):
    """Return an architecture as checkpoints store it in JSON."""
    text = json.dumps(dataclasses.asdict(a))
    return json.loads(text)


@pytest.mark.parametrize("name", ["ViT-B/16", "R50x0.5", "R50+ViT-L/16", "R+ViT-Ti/16"])
def test_architecture_survives_json(name):
    a = build(name, image_size=(224, 256), num_classes=0)

    restored = read_architecture(store(a))

    assert restored == a
    assert a.num_classes == 0  # it ends in its features


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
    """None removes a field."""
    stored = store(build("R50+ViT-B/16"))
    changed = stored | changes
    values = {name: value for name, value in changed.items() if value is not None}

    with rejects("stored description of the network", rule):
        read_architecture(values)


def test_listed_models_can_be_built_and_hold_every_size():
    assert len(set(MODEL_NAMES)) == len(MODEL_NAMES)

    sizes = set()
    for name in MODEL_NAMES:
        sizes.add(parse_name(name).size)
        assert build(name).name == name

    assert sizes == {*VIT_SIZES, None}


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
