"""FLOP formulas against published tables, the paper's exaFLOPs, XLA's own count, and hand-worked cases."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.cost.tiny_networks import TINY_RESNET
from vit_jax.config import Architecture, ModelConfig, build_architecture
from vit_jax.cost.convolutions import Convolution
from vit_jax.cost.flops import exaflops, forward_macs, training_flops_per_image

JFT_IMAGES = 303e6

TINY = Architecture(
    name="tiny", image_size=(8, 12), patch_size=(4, 4), num_classes=5, width=8, depth=2, mlp_dim=16, num_heads=2
)


def named(name: str, image_size: int) -> Architecture:
    config = ModelConfig(name=name, head="linear")
    return build_architecture(config, image_size=(image_size, image_size), num_classes=1000)


@pytest.mark.parametrize(
    ("name", "image_size", "printed"),
    [
        ("Ti/16", 224, "1.25"),
        ("Ti/16", 384, "4.68"),
        ("S/32", 224, "1.14"),
        ("S/32", 384, "3.44"),
        ("S/16", 224, "4.60"),
        ("S/16", 384, "15.49"),
        ("B/32", 224, "4.41"),
        ("B/32", 384, "13.04"),
        ("B/16", 224, "17.56"),
        ("B/16", 384, "55.48"),
        ("B/8", 224, "78.15"),
        ("B/8", 384, "294.0"),
        ("L/32", 224, "15.38"),
        ("L/32", 384, "45.27"),
        ("L/16", 224, "61.55"),
        ("L/16", 384, "191.1"),
        ("L/16", 512, "362.0"),
        ("H/14", 224, "167.3"),
        ("H/14", 518, "1016.7"),
        ("g/14", 224, "267.0"),
        ("G/14", 224, "483.8"),
        ("R50x1", 224, "4.09"),
        ("R50x2", 224, "16.11"),
        ("R50x3", 224, "36.08"),
        ("R101x1", 224, "7.80"),
        ("R101x3", 224, "69.49"),
        ("R152x1", 224, "11.51"),
        ("R152x2", 224, "45.81"),
        ("R152x4", 224, "182.8"),
        ("R200x3", 224, "134.3"),
        ("R+Ti/16", 224, "0.43"),
        ("R+Ti/16", 384, "1.33"),
        ("R26+S/32", 224, "3.46"),
        ("R26+S/32", 384, "10.26"),
        ("R26+B/32", 224, "6.71"),
        ("R26+B/32", 384, "19.81"),
        ("R50+B/32", 224, "8.46"),
        ("R50+B/32", 384, "24.94"),
        ("R50+B/16", 224, "21.53"),
        ("R50+B/16", 384, "67.16"),
        ("R50+L/32", 224, "19.41"),
        ("R50+L/32", 384, "57.14"),
        ("R50+L/16", 224, "65.54"),
        ("R50+L/16", 384, "202.8"),
    ],
)
def test_gmacs_to_a_thousandth_of_the_table(name: str, image_size: int, printed: str) -> None:
    rounding = 0.5 * 10.0 ** -len(printed.partition(".")[2])  # coarser than a thousandth where few digits are printed
    allowed = max(1e-3 * float(printed), rounding)
    assert forward_macs(named(name, image_size)) / 1e9 == pytest.approx(float(printed), abs=allowed)


@pytest.mark.parametrize(
    ("name", "image_size", "gflops"),  # Scaling Vision Transformers, appendix table; its head and rounding differ
    [("B/32", 224, 8.7), ("B/16", 384, 111.3), ("L/16", 224, 122.9), ("g/14", 224, 533.1), ("G/14", 224, 965.3)],
)
def test_twice_the_macs_are_the_flops_of_scaling_vit(name: str, image_size: int, gflops: float) -> None:
    assert 2 * forward_macs(named(name, image_size)) / 1e9 == pytest.approx(gflops, rel=0.015)


@pytest.mark.parametrize(
    ("name", "epochs", "computed", "printed"),
    [
        ("B/32", 7, 56.1, 55),
        ("B/16", 7, 223.5, 224),
        ("L/32", 7, 195.8, 196),
        ("L/16", 7, 783.3, 783),
        ("L/16", 14, 1566.7, 1567),
        ("H/14", 14, 4258, 4262),
        ("R50x1", 7, 50.2, 50),
        ("R50x2", 7, 197.9, 199),
        ("R101x1", 7, 95.1, 96),
        ("R152x1", 7, 140.3, 141),
        ("R152x2", 7, 558, 563),
        ("R152x2", 14, 1117, 1126),
        ("R200x3", 14, 3289, 3306),
    ],
)
def test_exaflops_column_of_the_paper(name: str, epochs: int, computed: float, printed: int) -> None:
    value = exaflops(named(name, 224), epochs * JFT_IMAGES)
    assert value == pytest.approx(computed, abs=0.5)
    # Table 6 is measured by a compiler and rounded: every ResNet of it lies 0.5 to 0.9 % above its convolutions, and
    # B/32's 55 is 2 % below any count of matrix products.
    exceptions = {"B/32": 0.025} | dict.fromkeys(["R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R200x3"], 0.01)
    assert value == pytest.approx(printed, rel=exceptions.get(name, 0.003))


@pytest.mark.parametrize(
    ("name", "epochs", "printed"),
    [
        ("R50x1+B/32", 7, 106),
        ("R50x1+B/16", 7, 274),
        ("R50x1+L/32", 7, 246),
        ("R50x1+L/16", 14, 1668),
        ("R50x1+L/16", 7, 1668 / 2),  # the paper prints 859, which no count of half the epochs can give
    ],
)
def test_exaflops_of_hybrids(name: str, epochs: int, printed: float) -> None:
    assert exaflops(named(name, 224), epochs * JFT_IMAGES) == pytest.approx(printed, rel=0.006)


@pytest.mark.parametrize(("name", "printed"), [("R50x1", 50), ("R50x2", 199), ("R101x1", 96), ("R152x1", 141)])
def test_with_padding_resnets_come_out_too_dear(name: str, printed: int) -> None:
    value = 6 * forward_macs(named(name, 224)) * 7 * JFT_IMAGES / 1e18
    assert 1.03 < value / printed < 1.05


def test_macs_of_a_tiny_network_by_hand() -> None:
    embedding = 6 * 48 * 8
    block = 7 * (8 * 24) + 7 * (8 * 8) + 2 * (2 * 7 * 7 * 4) + 7 * (8 * 16) + 7 * (16 * 8)  # two heads of 4
    assert forward_macs(TINY) == embedding + 2 * block + 8 * 5


@pytest.mark.parametrize("residual_unit", ["preactivation", "postactivation"])
def test_macs_of_a_tiny_resnet_by_hand(residual_unit: str) -> None:
    first = 12 * (32 * 32 + 32 * 128 + 32 * 128)  # on 4 x 3: reduce, expand, shortcut
    second = 12 * (128 * 32 + 32 * 128)
    third = 12 * 128 * 64 + 4 * (64 * 256 + 128 * 256)  # the stride is on the 3 x 3 and on the shortcut
    ones = first + second + third + 256 * 5
    architecture = dataclasses.replace(TINY_RESNET, residual_unit=residual_unit)
    root, twice, strided = 8 * 6 * 49 * 3 * 32, 12 * 9 * 32 * 32, 4 * 9 * 64 * 64
    assert forward_macs(architecture) == ones + root + 2 * twice + strided
    # On a map: outputs along an axis of 16 see 4, 6, 7, 7, 7, 7, 7 and 5 of 7 pixels, or these in reverse; along 12
    # 4, 6, 7, 7, 7 and 5; along 4 with the 3 x 3 kernel 2, 3, 3, 2; along 3 2, 3, 2. With stride 2: 2, 3 and 2, 2.
    root, twice, strided = 50 * 36 * 3 * 32, 10 * 7 * 32 * 32, 5 * 4 * 64 * 64
    assert forward_macs(architecture, count_padding=False) == ones + root + 2 * twice + strided


def test_every_halving_rounds_up() -> None:
    """From 13 x 10 the root makes 7 x 5; after it the maps are those of 16 x 12."""
    odd = dataclasses.replace(TINY_RESNET, image_size=(13, 10))
    assert forward_macs(TINY_RESNET) - forward_macs(odd) == (8 * 6 - 7 * 5) * 49 * 3 * 32


def test_macs_of_a_tiny_hybrid_by_hand() -> None:
    """The root alone: its map of 4 x 3 is cut into 2 patches of 2 x 3 cells."""
    architecture = dataclasses.replace(
        TINY, family="hybrid", image_size=(16, 12), patch_size=(2, 3), units=(), width_factor=0.5
    )
    block = 3 * (4 * 64 + 2 * 128) + 2 * 9 * 8
    transformer = 2 * (2 * 3 * 32) * 8 + 2 * block + 8 * 5
    assert forward_macs(architecture) == 8 * 6 * 49 * 3 * 32 + transformer
    assert forward_macs(architecture, count_padding=False) == 50 * 36 * 3 * 32 + transformer


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("evenly", [True, False])
def test_xla_leaves_out_the_same_multiplications(kernel: int, stride: int, evenly: bool) -> None:
    """BiT pads both sides alike; the hybrids' "SAME" pads the odd zero after. On maps of even and odd length."""
    height, width, inputs, outputs = 12, 9, 2, 3
    padding = ((kernel // 2, kernel // 2),) * 2 if evenly else "SAME"

    def convolve(image: jax.Array, weights: jax.Array) -> jax.Array:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, weights, (stride,) * 2, padding, dimension_numbers=dimensions)

    shapes = ((1, height, width, inputs), (kernel, kernel, inputs, outputs))
    lowered = jax.jit(convolve).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    convolution = Convolution(kernel, stride, inputs, outputs, (height, width))
    assert lowered.out_info.shape[1:3] == convolution.output_size
    assert 2 * convolution.macs(count_padding=False) == lowered.cost_analysis()["flops"]
    assert (kernel == 1) == (convolution.macs(count_padding=False) == convolution.macs(count_padding=True))


def test_a_vit_has_no_padding() -> None:
    assert forward_macs(TINY, count_padding=False) == forward_macs(TINY)


def test_average_pooling_spares_the_class_token() -> None:
    block = 6 * 4 * 64 + 2 * 36 * 8 + 6 * 2 * 128
    assert forward_macs(dataclasses.replace(TINY, pool="gap")) == 6 * 48 * 8 + 2 * block + 8 * 5


def test_attention_pooling_by_hand() -> None:
    extra = 64 + 2 * 6 * 64 + 2 * 6 * 8 + 64 + 2 * 8 * 16  # query; keys, values; QK^T, AV; output; MLP on one token
    gap = forward_macs(dataclasses.replace(TINY, pool="gap"))
    assert forward_macs(dataclasses.replace(TINY, pool="map")) == gap + extra


def test_mlp_head_adds_a_square_layer() -> None:
    assert forward_macs(dataclasses.replace(TINY, head="mlp")) == forward_macs(TINY) + 64


def test_no_classes_no_classifier() -> None:
    assert forward_macs(dataclasses.replace(TINY, num_classes=0)) == forward_macs(TINY) - 8 * 5


@pytest.mark.parametrize("architecture", [TINY, TINY_RESNET], ids=["vit", "resnet"])
def test_training_is_six_flops_per_mac(architecture: Architecture) -> None:
    assert training_flops_per_image(architecture) == 6 * forward_macs(architecture, count_padding=False)


def test_negative_images_are_refused() -> None:
    with pytest.raises(ValueError, match="images=-1"):
        exaflops(TINY, -1)
