"""Bottleneck units by the kernel for TPUs: XLA's form is the oracle; interpreted on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small_models import Place, assert_same_up_to_rounding
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models import unit_kernel
from vit_jax.models.activations import placed_by
from vit_jax.models.resnet import Unit
from vit_jax.sharding import Placement, build_mesh


def unit(inputs, inner, *, stride=1, form="preactivation", dtype="float32"):
    """A unit with random parameters everywhere."""
    config = ModelConfig(name="R26x1", residual_unit=form, compute_dtype=dtype)
    a = build_architecture(config, image_size=(64, 64), num_classes=7)
    abstract = nnx.eval_shape(lambda: Unit(inputs, 4 * inner, stride, a, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.float32(1 + rng.normal(size=x.shape)), abstract)


def maps(*shape):
    return jnp.float32(np.random.default_rng(1).normal(size=shape))


def output_and_gradients(run, unit, x, gradient):
    def both(unit, x, gradient):
        out, differentiate = jax.vjp(run, unit, x)
        return out, *differentiate(gradient)

    with jax.default_matmul_precision("highest"):
        return jax.jit(both)(unit, x, gradient)


@pytest.mark.parametrize(
    ("form", "size", "inputs", "inner"),
    [
        ("preactivation", (3, 8), 256, 64),
        ("preactivation", (3, 7), 64, 64),
        ("preactivation", (4, 5), 512, 128),
        ("postactivation", (3, 8), 256, 64),
        ("postactivation", (3, 7), 64, 64),
    ],
    ids=["two taps in a tile", "shortcut", "one tap in a tile", "post-activation", "post-activation, shortcut"],
)
def test_values_and_gradients_are_those_of_xla(form, size, inputs, inner, monkeypatch):
    monkeypatch.setattr(unit_kernel, "ROWS", 16)  # several products, the last one with fewer rows
    operands = unit(inputs, inner, form=form), maps(2, *size, inputs), maps(2, *size, 4 * inner)
    expected = output_and_gradients(lambda unit, x: unit(x), *operands)
    found = output_and_gradients(Unit.by_kernel, *operands)
    for ours, xla in zip(found, expected, strict=True):
        assert_same_up_to_rounding(xla, ours)


def test_every_device_computes_its_images_and_gradients_of_kernels_are_summed():
    operands = unit(64, 64), maps(4, 3, 4, 64), maps(4, 3, 4, 256)
    whole = output_and_gradients(Unit.by_kernel, *operands)
    with placed_by(Placement(build_mesh(jax.devices()[:4]))):
        parts = output_and_gradients(lambda *x: Unit.by_kernel(*x), *operands)
    assert_same_up_to_rounding(whole, parts)


@pytest.mark.parametrize(
    ("kind", "size", "options", "is_taken"),
    [
        ("TPU v5 lite", 56, {}, True),
        ("TPU v4", 56, {}, False),  # too little vector memory
        ("NVIDIA H100 80GB HBM3", 56, {}, False),
        ("TPU v5 lite", 96, {}, False),
        ("TPU v5 lite", 56, {"dtype": "float32"}, False),
        ("TPU v5 lite", 56, {"stride": 2}, False),
        ("TPU v5 lite", 56, {"form": "postactivation"}, True),
    ],
)
def test_the_kernel_is_taken_where_it_fits(kind, size, options, is_taken):
    options = {"dtype": "bfloat16"} | options
    with placed_by(Place(platform="tpu", device_kind=kind, on_shards=lambda function, *_: function)):
        program = jax.make_jaxpr(lambda unit, x: unit(x))(unit(64, 64, **options), jnp.zeros((1, size, size, 64)))
    assert ("pallas_call" in str(program)) == is_taken
