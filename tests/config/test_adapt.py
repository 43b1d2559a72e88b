"""The network that is fine-tuned, from the network of the weights."""

import dataclasses

import pytest

from tests.rejections import rejects
from vit_jax.config import ModelConfig, adapt_architecture, build_architecture
from vit_jax.config.adaptation import FINETUNE_DROPOUT
from vit_jax.config.networks import read_architecture
from vit_jax.config.schema import AdaptConfig


def build_network(
    name,
    *,
    image_size=(224, 224),
    num_classes=1000,
    **options,
):
    """Return the network of pre-training."""
    model = ModelConfig(name=name, **options)
    return build_architecture(
        model,
        image_size=image_size,
        num_classes=num_classes,
    )


def adapt(a, *, image_size=(224, 224), num_classes=10, **options):
    """Return the network that is fine-tuned."""
    config = AdaptConfig(**options)
    return adapt_architecture(
        a,
        config,
        image_size=image_size,
        num_classes=num_classes,
    )


@pytest.mark.parametrize(
    "name", ["ViT-Ti/16", "ViT-B/16", "ViT-L/32", "R50x3", "R+ViT-Ti/16", "R50+ViT-L/16"]
)
def test_dropout_is_that_of_the_released_configs(name):
    for known in (*FINETUNE_DROPOUT, name):
        expected = 0.0 if known == name else 0.1
        a = build_network(known)
        assert adapt(a).dropout_fraction == expected
        assert adapt(a, name=known).dropout_fraction == expected

        # The numbers decide, not the name.
        renamed = dataclasses.replace(a, name="my network")
        assert adapt(renamed).dropout_fraction == expected

        # Files of AugReg have no hidden layer in the head.
        augreg = dataclasses.replace(a, head="linear")
        assert adapt(augreg).dropout_fraction == 0.0
        assert adapt(augreg, name=known).dropout_fraction == 0.0

        if a.has_transformer:
            assert adapt(a, dropout_fraction=0.2).dropout_fraction == 0.2


def test_what_changes_and_what_stays():
    a = build_network(
        "ViT-B/16",
        head_bias_init=-10.0,
        gelu="exact",
        stochastic_depth_fraction=0.4,
        remat="full",
    )
    b = adapt(
        a,
        image_size=(384, 320),
        num_classes=37,
        compute_dtype="float32",
        stochastic_depth_fraction=0.1,
    )
    before = dataclasses.asdict(a)
    after = dataclasses.asdict(b)
    changed = {name: value for name, value in after.items() if before[name] != value}

    assert b.grid == (24, 20)
    assert changed == {
        "image_size": (384, 320),
        "num_classes": 37,
        "head": "linear",
        "head_bias_init": 0.0,
        "stochastic_depth_fraction": 0.1,
        "compute_dtype": "float32",
        "remat": "none",
    }


@pytest.mark.parametrize(
    ("head", "form"),
    [
        ("zero", "linear"),
        ("zero_keep_hidden", "mlp"),
        ("keep", "mlp"),
    ],
)
def test_the_head_changes_or_stays(head, form):
    assert adapt(build_network("ViT-B/16"), head=head).head == form


def test_weights_of_another_network_are_rejected_with_every_difference():
    with rejects("config.model.name='ViT-L/32'", "ViT-B/16") as error:
        adapt(build_network("ViT-B/16"), name="ViT-L/32")

    assert str(error.value).splitlines()[1:] == [
        "  width: there 768, ViT-L/32 has 1024",
        "  depth: there 12, ViT-L/32 has 24",
        "  mlp_dim: there 3072, ViT-L/32 has 4096",
        "  num_heads: there 12, ViT-L/32 has 16",
        "  patch_size: there (16, 16), ViT-L/32 has (32, 32)",
    ]


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("R50x2", "width_factor: there 1.0"),
        ("R101x1", r"units: there \(3, 4,"),
        ("ViT-B/16", "family: there resnet"),
    ],
)
def test_weights_of_a_resnet_are_rejected_for_another_network(name, difference):
    with rejects(f"config.model.name={name!r}", difference):
        adapt(build_network("R50x1"), name=name)


SINCOS = {"position_embedding": "sincos2d"}


@pytest.mark.parametrize(
    ("a", "options", "rule"),
    [
        (
            build_network("R50x1"),
            {"dropout_fraction": 0.1},
            "dropout_fraction=0.1.*no effect.*Transformer.*Use 0",
        ),
        (
            build_network("R50x1"),
            {"stochastic_depth_fraction": 0.1},
            "stochastic_depth_fraction=0.1.*no effect.*Transformer.*Use 0",
        ),
        (
            build_network("R50x1"),
            {"position_resize": "bicubic"},
            "position_resize='bicubic'.*no effect.*Use corners",
        ),
        (
            build_network("ViT-B/16", **SINCOS),
            {"position_resize": "lanczos3"},
            "position_resize='lanczos3'.*no effect",
        ),
        (
            build_network("R50x1"),
            {"head": "zero_keep_hidden"},
            "head='zero_keep_hidden'.*hidden layer.*Use zero",
        ),
    ],
)
def test_an_option_without_effect_is_rejected(a, options, rule):
    adapt(build_network("ViT-B/16", position_embedding="learned_2d"), **options)
    with rejects("config.model", rule):
        adapt(a, **options)


def test_pooling_and_the_last_norm_change_and_class_tokens_stay():
    a = build_network("ViT-B/16", registers=4)
    mae = adapt(a, pool="gap", final_norm="pooled")

    assert mae.pool == "gap"
    assert mae.final_norm == "pooled"
    assert mae.num_class_tokens == 1
    assert mae.sequence_length == 201
    assert adapt(mae, pool="token", final_norm="tokens") == adapt(a)
    assert adapt(a, pool="token_gap").feature_width == 2 * a.width


def test_attention_pooling_stays_or_changes_to_the_mean():
    siglip = build_network("ViT-B/16", pool="map", pool_num_heads=4)
    gap = adapt(siglip, pool="gap")

    assert adapt(siglip, pool="map") == adapt(siglip)
    assert gap.pool == "gap"
    assert gap.pool_num_heads is None
    assert gap.class_tokens is None


@pytest.mark.parametrize(
    ("a", "options", "rule"),
    [
        (
            build_network("R50x1"),
            {"pool": "token"},
            "pool='token'.*no effect.*no built-in transformer",
        ),
        (build_network("ViT-B/16"), {"pool": "map"}, "pool='map'.*no attention pooling.*gap"),
        (
            build_network("ViT-B/16", pool="map"),
            {"pool": "token_gap"},
            "pool='token_gap'.*no class token.*gap",
        ),
        (
            build_network("ViT-B/16", pool="map"),
            {"final_norm": "pooled"},
            "final_norm='pooled'.*pool=gap",
        ),
        (
            build_network("ViT-B/16"),
            {"pool": "gap", "head": "keep"},
            "head='keep'.*must be zero.*'pool': 'gap'",
        ),
        (
            build_network("ViT-B/16"),
            {"rope_rescale": True},
            "rope_rescale=True.*no effect.*Use False",
        ),
    ],
)
def test_a_pooling_that_the_weights_do_not_allow_is_rejected(
    a,
    options,
    rule,
):
    with rejects("model", rule):
        adapt(a, **options)


def test_only_rotary_positions_that_count_patches_have_a_grid_to_be_scaled_to():
    a = build_network(
        "ViT-B/16",
        rope="index",
        position_embedding="none",
    )
    scaled = adapt(a, image_size=(384, 384), rope_rescale=True)
    scaled_again = adapt(
        scaled,
        image_size=(448, 448),
        rope_rescale=True,
    )

    assert adapt(a, image_size=(384, 384)).rope_grid is None
    # The grid is always that of pre-training.
    assert scaled.rope_grid == (14, 14)
    assert scaled_again.rope_grid == (14, 14)
    assert read_architecture(dataclasses.asdict(scaled)) == scaled


def test_relative_positions_are_resized_and_have_no_kernel():
    a = build_network("ViT-B/16", position_embedding="relative")

    assert adapt(a, image_size=(384, 384), position_resize="bicubic").grid == (24, 24)
    with rejects("attention='pallas'", "relative positions"):
        adapt(a, attention="pallas")


def test_a_border_that_no_patch_covers_is_dropped_only_where_it_is_named():
    a = build_network("ViT-H/14")
    with rejects("model.name='ViT-H/14'", "384.*378 or 392.*model.uncovered_border=drop"):
        adapt(a, image_size=(384, 384))

    b = adapt(a, image_size=(384, 384), uncovered_border="drop")
    assert b.image_size == (384, 384)
    assert b.grid == (27, 27)
    assert b.sequence_length == 730
    assert read_architecture(dataclasses.asdict(b)) == b
    # Weights of such a network keep their grid.
    assert adapt(b, image_size=(384, 384)).grid == (27, 27)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("ViT-H/14", (13, 28)),
        ("R50+ViT-B/16", (230, 224)),
    ],
)
def test_borders_that_cannot_be_dropped(name, size):
    height, _ = size
    with rejects(f"model.name={name!r}", f"height.*{height}"):
        adapt(
            build_network(name),
            image_size=size,
            uncovered_border="drop",
        )
