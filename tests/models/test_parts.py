"""Parts of current pre-trained ViTs, each one option of the model.

Values are compared in weights/test_families.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.models.small_models import (
    FakeDevices,
    abstract,
    apply,
    assert_same_up_to_rounding,
    filled,
    images,
)
from vit_jax import pytree
from vit_jax.config import Architecture, ModelConfig, build_architecture
from vit_jax.kernels import dispatch
from vit_jax.kernels.devices import trace_for
from vit_jax.models.positions import RotaryPositions, compute_rotary_angles

SMALL = Architecture(
    name="small",
    image_size=(16, 24),
    patch_size=(8, 8),
    num_classes=3,
    width=32,
    depth=2,
    mlp_dim=24,
    num_heads=2,
)
EVERYTHING = dataclasses.replace(
    SMALL,
    registers=2,
    class_tokens=2,
    position_tokens="patches",
    rope="centred",
    layer_scale=0.5,
    mlp="swiglu_norm",
    norm="rms",
    embedding_norm="tokens",
    attention_norm=True,
    patch_bias=False,
    qkv_bias="query_value",
    pool="token_gap",
)


def gradient(architecture):
    x = images(architecture)

    def loss(model):
        output = model(x, dropout_key=jax.random.key(0))
        return jnp.square(output.logits_BK - 1).mean()

    return jax.jit(jax.grad(loss))(filled(architecture))


def test_every_parameter_of_every_part_is_trained():
    for name, leaf in pytree.name_leaves(gradient(EVERYTHING)).items():
        assert np.abs(leaf).max() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "dots"},
        {"remat": "full"},
        {"scan_unroll": 2},
    ],
)
def test_rematerialisation_and_unrolling_change_no_gradient_of_parts(changes):
    changed = dataclasses.replace(EVERYTHING, **changes)

    assert_same_up_to_rounding(gradient(EVERYTHING), gradient(changed))


def test_the_kernel_for_tpus_takes_rotary_positions():
    x = images(EVERYTHING)
    model = filled(EVERYTHING)
    with_kernel = dataclasses.replace(EVERYTHING, attention="pallas")
    model_with_kernel = filled(with_kernel)
    devices = FakeDevices(
        platform="cpu",
        map_shards=lambda function, *_: function,
    )

    logits = apply(model, x).logits_BK
    with trace_for(devices):
        by_kernel = apply(model_with_kernel, x).logits_BK

    assert_allclose(
        logits,
        by_kernel,
        rtol=0,
        atol=1e-5 * np.abs(logits).max(),
    )


def test_pooling_reads_class_tokens_and_patches_but_no_registers():
    model = filled(EVERYTHING)
    x = images(EVERYTHING)

    output = apply(model, x)
    mean_of_patches = output.tokens_BND.mean(axis=1)

    assert output.tokens_BND.shape == (2, 6, 32)
    assert output.pooled_BD.shape == (2, 3 * 32)
    assert_allclose(
        output.pooled_BD[:, 64:],
        mean_of_patches,
        rtol=0,
        atol=1e-5,
    )


def read_pairs(heads, kind):
    """Return the pairs of values of each head as complex numbers."""
    if kind == "centred":
        return heads[..., :8] + 1j * heads[..., 8:]
    return heads[..., ::2] + 1j * heads[..., 1::2]


@pytest.mark.parametrize("kind", ["centred", "grid", "index"])
def test_rotary_positions_turn_pairs_of_patches_alone(kind):
    architecture = dataclasses.replace(
        SMALL,
        rope=kind,
        registers=1,
    )
    num_heads = architecture.num_heads
    shape = (2, architecture.sequence_length, architecture.width)
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=shape))
    heads = x.reshape(*shape[:2], num_heads, -1)
    angles_Np = compute_rotary_angles(
        kind,
        architecture.grid,
        16,
        has_class_token=True,
    )
    rotation_N1p = np.exp(1j * angles_Np)[:, None]
    pairs = read_pairs(heads[:, 2:], kind)
    expected = pairs * rotation_N1p

    rotate = RotaryPositions(architecture)
    turned = np.asarray(rotate(jnp.asarray(x), num_heads))
    turned = turned.reshape(heads.shape)

    assert_array_equal(turned[:, :2], heads[:, :2])
    assert_allclose(
        read_pairs(turned[:, 2:], kind),
        expected,
        rtol=0,
        atol=1e-5,
    )


def sum_weighted(turn, x):
    """Return a sum of the results of `turn` to which each value contributes differently."""
    turned = turn(x).astype(jnp.float32)
    weights = jnp.arange(turned.size, dtype=jnp.float32).reshape(turned.shape)
    return (turned * jnp.cos(weights)).sum()


@pytest.mark.parametrize("kind", ["centred", "grid", "index"])
@pytest.mark.parametrize("token_BS", [None, [[0, 1, 3, 4], [0, 1, 2, 5]]], ids=["all", "kept"])
def test_products_turn_pairs_of_bfloat16_to_the_same_values(
    monkeypatch,
    kind,
    token_BS,
):
    rotate = RotaryPositions(dataclasses.replace(SMALL, rope=kind, registers=1))
    length = SMALL.sequence_length + 1
    if token_BS is not None:
        token_BS = jnp.asarray(token_BS)
        length = 4
    x = jax.random.normal(jax.random.key(0), (2, length, SMALL.width), jnp.bfloat16)
    differentiate = jax.grad(lambda x: sum_weighted(turn, x))

    def turn(x):
        return rotate(x, SMALL.num_heads, token_BS)

    expected = turn(x)
    expected_gradient = differentiate(x)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    products = str(jax.make_jaxpr(turn)(x)).count("dot_general")

    assert products == 1
    assert_array_equal(turn(x), expected)
    gradient = np.asarray(differentiate(x), np.float32)
    assert_allclose(
        gradient,
        np.asarray(expected_gradient, np.float32),
        rtol=0.02,
        atol=0.02,
    )


@pytest.mark.parametrize(
    ("width", "dtype", "device"),
    [
        (4096, "bfloat16", "tpu"),
        (1024, "float32", "tpu"),
        (1024, "bfloat16", "gpu"),
    ],
)
def test_other_pairs_are_turned_without_products(
    monkeypatch,
    width,
    dtype,
    device,
):
    monkeypatch.setattr(dispatch, "platform", lambda: device)

    assert not dispatch.turns_pairs_by_products(width, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("kind", "frequency", "expected"),
    [
        ("centred", 2 * np.pi, [[-0.5, -0.75], [0.5, 0.75]]),
        ("grid", 1.0, [[0, 0], [8, 12]]),
        ("index", 1.0, [[1, 1], [4, 2]]),
    ],
    ids=["centred", "grid", "index"],
)
def test_coordinates_of_rotary_positions(kind, frequency, expected):
    """The first frequency is 2 pi of half the image, or 1 of a patch.

    Columns come first if counted by index.
    """
    angles_Np = compute_rotary_angles(kind, (2, 4), 8, has_class_token=True)
    coordinates = angles_Np[:, [0, 2]] / frequency

    assert_allclose(coordinates[[0, 7]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"class_tokens": 0}, "class_tokens=0: pool='token' needs a class token"),
        ({"registers": -1}, "registers=-1: must not be negative"),
        (
            {"registers": 2, "pool": "gap", "block": "axial"},
            "class token or register has no place",
        ),
        (
            {"registers": 2, "position_embedding": "learned_2d"},
            "has a place for one class token alone",
        ),
        ({"layer_scale": -0.1}, "layer_scale=-0.1: must not be negative"),
        (
            {
                "rope": "grid",
                "width": 12,
                "num_heads": 2,
                "position_embedding": "none",
            },
            "divisible by 4",
        ),
        ({"rope": "grid", "position_embedding": "relative"}, "have no rotary positions"),
        ({"position_tokens": "patches", "pool": "gap"}, "position_tokens='patches': needs"),
        (
            {"position_tokens": "patches", "position_embedding": "none"},
            "position_tokens='patches': needs",
        ),
        (
            {"final_norm": "pooled", "pool": "map"},
            "final_norm='pooled': the pooled features of pool='map'",
        ),
        ({"pool_num_heads": 3, "pool": "map"}, "pool_num_heads=3: must divide the width"),
        ({"pool_num_heads": 2}, "needs pool=map"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(options, words):
    config = ModelConfig(name="ViT-mu/16", **options)

    with pytest.raises(ValueError, match=words):
        build_architecture(
            config,
            image_size=(32, 32),
            num_classes=3,
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("registers", 1),
        ("layer_scale", 0.1),
        ("rope", "grid"),
        ("qkv_bias", "none"),
    ],
)
def test_a_resnet_has_no_parts_of_transformers(field, value):
    config = ModelConfig(name="R26x1", **{field: value})
    message = f"{field}=.* has no effect on R26x1, without a Transformer"

    with pytest.raises(ValueError, match=message):
        build_architecture(
            config,
            image_size=(32, 32),
            num_classes=3,
        )


def is_scale_of_no_norm(name):
    return "scale" in name.rpartition("/")[2] and "norm" not in name


def test_the_papers_network_has_no_parts():
    assert SMALL.modern_options == {}
    assert EVERYTHING.modern_options.keys() >= {"registers", "rope", "mlp", "norm"}

    names = pytree.name_leaves(abstract(SMALL))
    assert not list(filter(is_scale_of_no_norm, names))
