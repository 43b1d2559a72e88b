"""Bottleneck units by the kernel for TPUs: XLA's form is the oracle; interpreted on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small_models import FakeDevices, assert_same_up_to_rounding
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.kernels import unit_sizes
from vit_jax.kernels.devices import trace_for
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
    ("form", "size", "inputs", "inner", "stride"),
    [
        ("preactivation", (3, 8), 256, 64, 1),
        ("preactivation", (3, 7), 64, 64, 1),
        ("preactivation", (4, 5), 512, 128, 1),
        ("preactivation", (6, 12), 128, 128, 2),
        ("postactivation", (3, 8), 256, 64, 1),
        ("postactivation", (3, 7), 64, 64, 1),
        pytest.param("postactivation", (6, 12), 128, 128, 2, marks=pytest.mark.slow),
    ],
    ids=[
        *("two taps in a tile", "shortcut", "one tap in a tile", "stride"),
        *("post-activation", "post-activation, shortcut", "post-activation, stride"),
    ],
)
def test_values_and_gradients_are_those_of_xla(form, size, inputs, inner, stride, monkeypatch):
    monkeypatch.setattr(unit_sizes, "ROWS", 16)  # several products, the last one with fewer rows
    out_size = [side // stride for side in size]
    operands = (
        unit(inputs, inner, stride=stride, form=form),
        maps(2, *size, inputs),
        maps(2, *out_size, 4 * inner),
    )
    expected = output_and_gradients(lambda unit, x: unit(x), *operands)
    found = output_and_gradients(Unit.compute_by_kernel, *operands)

    for ours, xla in zip(found, expected, strict=True):
        assert_same_up_to_rounding(xla, ours)


def test_every_device_computes_its_images_and_gradients_of_kernels_are_summed():
    operands = unit(64, 64), maps(4, 3, 4, 64), maps(4, 3, 4, 256)
    whole = output_and_gradients(Unit.compute_by_kernel, *operands)

    with trace_for(Placement(build_mesh(jax.devices()[:4]))):
        parts = output_and_gradients(lambda *x: Unit.compute_by_kernel(*x), *operands)

    assert_same_up_to_rounding(whole, parts)


@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
def test_rounding_to_bfloat16_costs_as_little_as_by_xla(form):
    def outputs(run, dtype):
        operands = maps(1, 6, 8, 128), maps(1, 3, 4, 512)
        found = output_and_gradients(
            run,
            unit(128, 128, stride=2, form=form, dtype=dtype),
            *(x.astype(dtype) for x in operands),
        )

        return [np.float32(x) for x in jax.tree.leaves(found)]

    exact = outputs(lambda unit, x: unit(x), "float32")
    by_kernel, by_xla = (
        np.array(
            [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, exact, strict=True)]
        )
        for found in (
            outputs(Unit.compute_by_kernel, "bfloat16"),
            outputs(lambda unit, x: unit(x), "bfloat16"),
        )
    )

    np.testing.assert_array_less(by_kernel, 1.2 * by_xla + 0.02)


@pytest.mark.parametrize(
    ("kind", "size", "options", "is_taken"),
    [
        ("TPU v5 lite", 56, {}, True),
        ("TPU v4", 56, {}, False),  # too little vector memory
        ("NVIDIA H100 80GB HBM3", 56, {}, False),
        ("TPU v5 lite", 96, {}, False),
        ("TPU v5 lite", 56, {"dtype": "float32"}, False),
        ("TPU v5 lite", 56, {"stride": 2}, False),  # 64 channels are no complete tiles
        ("TPU v5 lite", 56, {"stride": 2, "inputs": 128, "inner": 128}, True),
        (
            "TPU v5 lite",
            55,
            {"stride": 2, "inputs": 128, "inner": 128},
            False,
        ),  # its planes differ in size
        ("TPU v5 lite", 56, {"form": "postactivation"}, True),
    ],
)
def test_the_kernel_is_taken_where_it_fits(kind, size, options, is_taken):
    options = {"dtype": "bfloat16", "inputs": 64, "inner": 64} | options
    with trace_for(
        FakeDevices(platform="tpu", device_kind=kind, map_shards=lambda function, *_: function)
    ):
        program = jax.make_jaxpr(lambda unit, x: unit(x))(
            unit(**options),
            jnp.zeros((1, size, size, options["inputs"])),
        )

    assert ("pallas_call" in str(program)) == is_taken
