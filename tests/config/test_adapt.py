"""From the network that weights are of to the one that is fine-tuned."""

import dataclasses

import pytest

from vit_jax.config import ModelConfig, adapt_architecture, build_architecture
from vit_jax.config.schema import AdaptConfig

# Reference sheet §1.3: dropout of fine-tuning in the released configs.
DROPOUT = {
    **dict.fromkeys(("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-B/8", "ViT-B/16", "ViT-B/32", "ViT-L/32"), 0.0),
    **dict.fromkeys(("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32", "R50+ViT-B/32", "R50+ViT-L/16"), 0.0),
    **dict.fromkeys(("R50x1", "R152x4"), 0.0),
    **dict.fromkeys(("ViT-L/16", "ViT-H/14", "R50+ViT-B/16", "R50+ViT-L/32"), 0.1),
}


def network(name, *, image_size=(224, 224), num_classes=1000, **options):
    """As pre-trained."""
    return build_architecture(ModelConfig(name=name, **options), image_size=image_size, num_classes=num_classes)


def adapted(a, *, image_size=(224, 224), num_classes=10, **options):
    return adapt_architecture(a, AdaptConfig(**options), image_size=image_size, num_classes=num_classes)


@pytest.mark.parametrize(("name", "dropout"), DROPOUT.items())
def test_dropout_is_that_of_the_released_configs(name, dropout):
    assert adapted(network(name)).dropout_fraction == dropout
    assert adapted(network(name), name=name).dropout_fraction == dropout


def test_dropout_goes_by_the_numbers_and_not_by_what_weights_are_called():
    large = network("ViT-L/16", dropout_fraction=0.3)
    assert adapted(dataclasses.replace(large, name="my network")).dropout_fraction == 0.1
    assert adapted(network("ViT-L/16", depth=23)).dropout_fraction == 0.0


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout_that_is_given_counts(dropout):
    assert adapted(network("ViT-L/16"), dropout_fraction=dropout).dropout_fraction == dropout


def test_what_changes_and_what_stays():
    a = network("ViT-B/16", head_bias_init=-10.0, gelu="exact", stochastic_depth_fraction=0.4, remat="full")
    b = adapted(a, image_size=(384, 320), num_classes=37, compute_dtype="float32", stochastic_depth_fraction=0.1)
    changes = {
        field.name: getattr(b, field.name)
        for field in dataclasses.fields(a)
        if getattr(a, field.name) != getattr(b, field.name)
    }
    assert changes == {
        "image_size": (384, 320),
        "num_classes": 37,
        "head": "linear",
        "head_bias_init": 0.0,
        "stochastic_depth_fraction": 0.1,
        "compute_dtype": "float32",
        "remat": "none",
    }
    assert b.grid == (24, 20)


@pytest.mark.parametrize(("head", "form"), [("zero", "linear"), ("zero_keep_hidden", "mlp"), ("keep", "mlp")])
def test_the_head(head, form):
    assert adapted(network("ViT-B/16"), head=head).head == form


def test_a_hidden_layer_that_is_not_there_cannot_be_kept():
    for a in (network("ViT-B/16", head="linear"), network("R50x1")):
        with pytest.raises(ValueError, match="no hidden layer to keep: use head='zero'"):
            adapted(a, head="zero_keep_hidden")
        assert adapted(a, head="keep").head == "linear"


def test_weights_of_another_network_are_refused_with_every_difference():
    with pytest.raises(ValueError, match=r"config.model.name='ViT-L/32', .* another network, ViT-B/16:") as error:
        adapted(network("ViT-B/16"), name="ViT-L/32")
    assert str(error.value).splitlines()[1:] == [
        "  width: there 768, ViT-L/32 has 1024",
        "  depth: there 12, ViT-L/32 has 24",
        "  mlp_dim: there 3072, ViT-L/32 has 4096",
        "  num_heads: there 12, ViT-L/32 has 16",
        "  patch_size: there (16, 16), ViT-L/32 has (32, 32)",
    ]


@pytest.mark.parametrize(
    ("weights", "name", "field"),
    [
        ("R50x1", "R50x2", "width_factor: there 1.0, R50x2 has 2.0"),
        ("R50x1", "R101x1", r"units: there \(3, 4, 6, 3\), R101x1 has \(3, 4, 23, 3\)"),
        ("R50+ViT-B/32", "R50+ViT-B/16", r"units: there \(3, 4, 6, 3\), R50\+ViT-B/16 has \(3, 4, 9\)"),
        ("ViT-B/16", "R50+ViT-B/16", "family: there vit, R50"),
        ("ViT-B/16", "R50x1", "family: there vit, R50x1 has resnet"),
    ],
)
def test_resnets_and_hybrids_are_told_apart(weights, name, field):
    with pytest.raises(ValueError, match=field):
        adapted(network(weights), name=name)


@pytest.mark.parametrize("name", ["ViT-B/16", "ViT-B/16x12", "R50x3", "R50+ViT-B/16", "R+ViT-Ti/16", "ViT-H/14"])
def test_weights_of_the_named_network_are_taken(name):
    a = network(name, image_size=(672, 672))
    assert adapted(dataclasses.replace(a, name="weights.npz"), image_size=(672, 672), name=name).units == a.units


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"'ViT-B16' is not a known model\. Nearest: ViT-B/16"):
        adapted(network("ViT-B/16"), name="ViT-B16")


@pytest.mark.parametrize(
    ("name", "image_size", "message"),
    [
        ("ViT-B/16", (384, 390), r"patches of 16 pixels, .* width of 390: use an input\.image_size of 384 or 400"),
        ("R+ViT-Ti/16", (390, 384), r"patches of 32 pixels, .* image height of 390: use .* 384 or 416"),
        ("ViT-B/32", (16, 32), r"image height of 16: use an input\.image_size of 32"),
    ],
)
def test_an_image_that_patches_do_not_divide(name, image_size, message):
    with pytest.raises(ValueError, match=message):
        adapted(network(name), image_size=image_size)


@pytest.mark.parametrize(
    ("name", "image_size", "grid"),
    [
        ("ViT-L/16", (512, 512), (32, 32)),
        ("ViT-H/14", (518, 518), (37, 37)),
        ("R50+ViT-B/16", (384, 256), (24, 16)),
        ("R+ViT-Ti/16", (384, 384), (12, 12)),
        ("R50x1", (481, 128), (16, 4)),
    ],
)
def test_any_other_resolution(name, image_size, grid):
    b = adapted(network(name), image_size=image_size)
    assert (b.grid, b.family, b.patch_size) == (grid, network(name).family, network(name).patch_size)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("R50x1", {"dropout_fraction": 0.1}, "R50x1 has no transformer: dropout and stochastic depth have no effect"),
        ("R50x1", {"stochastic_depth_fraction": 0.1}, "R50x1 has no transformer"),
        ("R50x1", {"position_resize": "bicubic"}, "position_resize='bicubic' has no effect: R50x1 has no learned"),
    ],
)
def test_an_option_without_effect_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        adapted(network(name), **options)


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos2d", "none"])
def test_only_learned_positions_are_resized(kind):
    a = network("ViT-B/16", position_embedding=kind)
    assert adapted(a).position_embedding == kind
    if kind.startswith("learned"):
        assert adapted(a, position_resize="lanczos3").position_embedding == kind
        return
    with pytest.raises(ValueError, match=r"ViT-B/16 has no learned positions\. Leave it at 'corners'"):
        adapted(a, position_resize="lanczos3")
