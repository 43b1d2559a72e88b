"""Parts of current pre-trained ViTs, each one option of the model.

Values are compared in weights/test_families.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from vit_jax.kernels.devices import trace_for
from vit_jax.models.positions import RotaryPositions, rotary_angles

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


def gradient(a):
    def loss(model):
        output = model(images(a), dropout_key=jax.random.key(0))
        return jnp.square(output.logits_BK - 1).mean()

    return jax.jit(jax.grad(loss))(filled(a))


def test_every_parameter_of_every_part_is_trained():
    for name, leaf in pytree.named_leaves(gradient(EVERYTHING)).items():
        assert np.abs(leaf).max() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"remat": "dots"}, {"remat": "full"}, {"scan_unroll": 2}])
def test_rematerialisation_and_unrolling_change_no_gradient_of_parts(changes):
    assert_same_up_to_rounding(
        gradient(EVERYTHING),
        gradient(dataclasses.replace(EVERYTHING, **changes)),
    )


def test_the_kernel_for_tpus_takes_rotary_positions():
    model = filled(EVERYTHING)
    kernel = filled(dataclasses.replace(EVERYTHING, attention="pallas"))
    logits = apply(model, images(EVERYTHING)).logits_BK

    with trace_for(FakeDevices(platform="cpu", map_shards=lambda function, *_: function)):
        other = apply(kernel, images(EVERYTHING)).logits_BK

    np.testing.assert_allclose(logits, other, rtol=0, atol=1e-5 * np.abs(logits).max())


def test_pooling_reads_class_tokens_and_patches_but_no_registers():
    model = filled(EVERYTHING)
    output = apply(model, images(EVERYTHING))

    assert output.tokens_BND.shape == (2, 6, 32)
    assert output.pooled_BD.shape == (2, 3 * 32)
    np.testing.assert_allclose(
        output.pooled_BD[:, 64:],
        output.tokens_BND.mean(axis=1),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", ["centred", "grid", "index"])
def test_rotary_positions_turn_pairs_of_patches_alone(kind):
    a = dataclasses.replace(SMALL, rope=kind, registers=1)
    x = np.random.default_rng(0).normal(size=(2, a.sequence_length, a.width)).astype(np.float32)
    turned = np.asarray(RotaryPositions(a)(jnp.asarray(x), a.num_heads)).reshape(
        *x.shape[:2],
        a.num_heads,
        -1,
    )
    heads = x.reshape(turned.shape)

    np.testing.assert_array_equal(turned[:, :2], heads[:, :2])

    angles_Np = rotary_angles(kind, a.grid, 16, has_class_token=True)[:, None]
    half = (
        (heads[..., :8], heads[..., 8:])
        if kind == "centred"
        else (heads[..., ::2], heads[..., 1::2])
    )
    pairs = (half[0] + 1j * half[1])[:, 2:] * np.exp(1j * angles_Np)
    parts = (
        np.concatenate([pairs.real, pairs.imag], -1)
        if kind == "centred"
        else np.stack([pairs.real, pairs.imag], -1)
    )

    np.testing.assert_allclose(turned[:, 2:], parts.reshape(turned[:, 2:].shape), rtol=0, atol=1e-5)


def test_coordinates_of_rotary_positions():
    """The first frequency is 2 pi of half the image, or 1 of a patch; columns come first if counted by index."""
    frequencies = {"centred": 2 * np.pi, "grid": 1.0, "index": 1.0}
    first = {
        kind: rotary_angles(kind, (2, 4), 8, has_class_token=True)[:, [0, 2]] / frequency
        for kind, frequency in frequencies.items()
    }

    np.testing.assert_allclose(first["centred"][[0, 7]], [[-0.5, -0.75], [0.5, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(first["grid"][[0, 7]], [[0, 0], [8, 12]], rtol=1e-6)
    np.testing.assert_allclose(first["index"][[0, 7]], [[1, 1], [4, 2]], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"class_tokens": 0}, "class_tokens=0: pool='token' needs a class token"),
        ({"registers": -1}, "registers=-1: must not be negative"),
        ({"registers": 2, "pool": "gap", "block": "axial"}, "class token or register has no place"),
        (
            {"registers": 2, "position_embedding": "learned_2d"},
            "has a place for one class token alone",
        ),
        ({"layer_scale": -0.1}, "layer_scale=-0.1: must not be negative"),
        (
            {"rope": "grid", "width": 12, "num_heads": 2, "position_embedding": "none"},
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
    with pytest.raises(ValueError, match=words):
        build_architecture(
            ModelConfig(name="ViT-mu/16", **options),
            image_size=(32, 32),
            num_classes=3,
        )


def test_a_resnet_has_no_such_parts():
    for options in ({"registers": 1}, {"layer_scale": 0.1}, {"rope": "grid"}, {"qkv_bias": "none"}):
        with pytest.raises(
            ValueError,
            match=f"{next(iter(options))}=.* has no effect on R26x1, without a Transformer",
        ):
            build_architecture(
                ModelConfig(name="R26x1", **options),
                image_size=(32, 32),
                num_classes=3,
            )


def test_the_papers_network_has_no_parts():
    assert SMALL.modern_options == {}
    assert EVERYTHING.modern_options.keys() >= {"registers", "rope", "mlp", "norm"}

    names = pytree.named_leaves(abstract(SMALL)).keys()
    assert not [name for name in names if "scale" in name.rpartition("/")[2] and "norm" not in name]
