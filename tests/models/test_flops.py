"""Multiply-adds counted from programs against formulas and cases worked by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.models import formulas
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models.flops import count_macs, forward_macs


@pytest.mark.parametrize(
    "options",
    [
        {
            "name": "ViT-S/16",
            "pool": "map",
            "head": "mlp",
        },
        {
            "name": "ViT-Ti/16",
            "remat": "full",
            "scan_unroll": 2,
        },
        {"name": "R26x1", "remat": "dots"},
        {"name": "R26x0.5", "residual_unit": "postactivation"},
        {"name": "R50+ViT-S/32"},
        {
            "name": "ViT-mu/16",
            "pool": "gap",
            "head": "mlp",
        },
        {"name": "ViT-mu/16", "num_classes": 0},
        {
            "name": "ViT-mu/16",
            "position_embedding": "relative",
        },
        {
            "name": "ViT-mu/16",
            "block": "axial",
            "depth": 2,
        },
        {
            "name": "ViT-mu/16",
            "block": "axial",
            "position_embedding": "relative",
            "pool": "map",
        },
        {
            "name": "ViT-mu/16",
            "registers": 2,
            "rope": "centred",
            "mlp": "swiglu",
            "pool": "token_gap",
            "layer_scale": 1.0,
        },
        {"name": "R26x1", "image_size": (75, 45)},  # odd maps are rounded up
    ],
    ids=lambda options: options["name"],
)
def test_programs_count_what_formulas_count(options):
    sizes = {
        "image_size": options.get("image_size", (96, 160)),
        "num_classes": options.get("num_classes", 10),
    }
    network = dict(options)
    for name in sizes:
        network.pop(name, None)
    config = ModelConfig(**network)
    architecture = build_architecture(config, **sizes)

    for count_padding in (True, False):
        expected = formulas.forward_macs(architecture, count_padding=count_padding)
        assert forward_macs(architecture, count_padding=count_padding) == expected


SQUARE = jnp.zeros((4, 4))


def multiply_repeatedly(x, times):
    return jax.lax.fori_loop(0, times, lambda _, x: x @ x, x)


def multiply_under_condition(x):
    return jax.lax.cond(
        x[0, 0] > 0,
        lambda x: x @ x @ x,
        lambda x: x @ x,
        x,
    )


def multiply_by_rows(x):
    multiply_row = jax.vmap(jnp.dot, (None, 0))
    return jax.vmap(multiply_row, (0, None))(x, x)


def subtract_in_a_loop(x):
    return jax.lax.while_loop(
        lambda x: x[0, 0] > 0,
        lambda x: x - 1,
        x,
    )


def sum_sines(x):
    return jnp.sin(x @ x).sum()


@pytest.mark.parametrize(
    ("function", "macs"),
    [
        (multiply_under_condition, 128),
        (lambda x: multiply_repeatedly(x, 5), 320),
        # relu is a function with a custom derivative.
        (lambda x: jax.nn.relu(x @ x), 64),
        (multiply_by_rows, 64),
        (subtract_in_a_loop, 0),
        (jax.grad(sum_sines), 192),
    ],
    ids=[
        "cond",
        "fori_loop",
        "relu",
        "vmap",
        "while_loop",
        "grad",
    ],
)
def test_by_hand(function, macs):
    assert count_macs(function, SQUARE) == macs


def test_a_product_in_a_loop_of_unknown_length_is_rejected():
    message = "while loop of unknown length cannot be counted"

    with pytest.raises(ValueError, match=message):
        count_macs(multiply_repeatedly, SQUARE, 5)


@pytest.mark.parametrize(
    ("dilation", "groups", "outputs", "inside"),
    [
        (1, 1, 12, 34),
        (2, 1, 10, 28),
        (1, 4, 12, 34),
    ],
)
def test_convolutions_with_dilation_and_groups(
    dilation,
    groups,
    outputs,
    inside,
):
    """A kernel of 3 over 12 values and one zero on either side: all but 2 products are inside."""
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1,),
        padding=[(1, 1)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )
    x = jnp.zeros((1, 12, 4))
    kernel = jnp.zeros((3, 4 // groups, 4))

    macs = count_macs(convolve, x, kernel)
    macs_inside = count_macs(
        convolve,
        x,
        kernel,
        count_padding=False,
    )

    assert macs == outputs * 3 * 16 // groups
    assert macs_inside == inside * 16 // groups
