"""Bottleneck units by the kernel for TPUs: XLA's form is the oracle; interpreted on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_less

from tests.models.small_models import FakeDevices, assert_same_up_to_rounding
from tests.models.test_attention import distances
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.kernels import unit_sizes
from vit_jax.kernels.devices import trace_for
from vit_jax.models.resnet import Unit
from vit_jax.sharding import Placement, build_mesh


def unit(
    inputs,
    inner,
    *,
    stride=1,
    form="preactivation",
    dtype="float32",
):
    """A unit with random parameters everywhere."""
    config = ModelConfig(
        name="R26x1",
        residual_unit=form,
        compute_dtype=dtype,
    )
    architecture = build_architecture(
        config,
        image_size=(64, 64),
        num_classes=7,
    )
    rng = np.random.default_rng(0)

    def build():
        return Unit(
            inputs,
            4 * inner,
            stride,
            architecture,
            rngs=nnx.Rngs(0),
        )

    def fill(leaf):
        return jnp.float32(1 + rng.normal(size=leaf.shape))

    return jax.tree.map(fill, nnx.eval_shape(build))


def run_by_xla(unit, x):
    return unit(x)


def maps(*shape):
    rng = np.random.default_rng(1)
    return jnp.float32(rng.normal(size=shape))


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
        pytest.param(
            "postactivation",
            (6, 12),
            128,
            128,
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "two taps in a tile",
        "shortcut",
        "one tap in a tile",
        "stride",
        "post-activation",
        "post-activation, shortcut",
        "post-activation, stride",
    ],
)
def test_values_and_gradients_are_those_of_xla(
    form,
    size,
    inputs,
    inner,
    stride,
    monkeypatch,
):
    # Several products, the last one with fewer rows.
    monkeypatch.setattr(unit_sizes, "ROWS", 16)
    out_size = [side // stride for side in size]
    operands = (
        unit(inputs, inner, stride=stride, form=form),
        maps(2, *size, inputs),
        maps(2, *out_size, 4 * inner),
    )

    by_xla = output_and_gradients(run_by_xla, *operands)
    by_kernel = output_and_gradients(Unit.compute_by_kernel, *operands)

    for expected, actual in zip(by_xla, by_kernel, strict=True):
        assert_same_up_to_rounding(expected, actual)


def test_every_device_computes_its_images_and_gradients_of_kernels_are_summed():
    operands = (
        unit(64, 64),
        maps(4, 3, 4, 64),
        maps(4, 3, 4, 256),
    )
    placement = Placement(build_mesh(jax.devices()[:4]))

    whole = output_and_gradients(Unit.compute_by_kernel, *operands)
    with trace_for(placement):
        # A new function: JAX caches traces by function, whatever the devices.
        parts = output_and_gradients(
            lambda *x: Unit.compute_by_kernel(*x),
            *operands,
        )

    assert_same_up_to_rounding(whole, parts)


@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
def test_rounding_to_bfloat16_costs_as_little_as_by_xla(form):
    def compute(run, dtype):
        operands = (
            unit(128, 128, stride=2, form=form, dtype=dtype),
            maps(1, 6, 8, 128).astype(dtype),
            maps(1, 3, 4, 512).astype(dtype),
        )
        results = output_and_gradients(run, *operands)
        return [np.float32(leaf) for leaf in jax.tree.leaves(results)]

    exact = compute(run_by_xla, "float32")

    def measure_errors(run):
        rounded = compute(run, "bfloat16")
        return np.array(distances(rounded, exact))

    by_kernel = measure_errors(Unit.compute_by_kernel)
    by_xla = measure_errors(run_by_xla)

    assert_array_less(by_kernel, 1.2 * by_xla + 0.02)


LARGER = {
    "stride": 2,
    "inputs": 128,
    "inner": 128,
}


@pytest.mark.parametrize(
    ("kind", "size", "options", "is_taken"),
    [
        ("TPU v5 lite", 56, {}, True),
        # Too little vector memory.
        ("TPU v4", 56, {}, False),
        ("NVIDIA H100 80GB HBM3", 56, {}, False),
        ("TPU v5 lite", 96, {}, False),
        ("TPU v5 lite", 56, {"dtype": "float32"}, False),
        # 64 channels are no complete tiles.
        ("TPU v5 lite", 56, {"stride": 2}, False),
        ("TPU v5 lite", 56, LARGER, True),
        # Its planes differ in size.
        ("TPU v5 lite", 55, LARGER, False),
        ("TPU v5 lite", 56, {"form": "postactivation"}, True),
    ],
)
def test_the_kernel_is_taken_where_it_fits(kind, size, options, is_taken):
    defaults = {
        "dtype": "bfloat16",
        "inputs": 64,
        "inner": 64,
    }
    options = defaults | options
    devices = FakeDevices(
        platform="tpu",
        device_kind=kind,
        map_shards=lambda function, *_: function,
    )
    x = jnp.zeros((1, size, size, options["inputs"]))

    def run(unit, x):
        return unit(x)

    with trace_for(devices):
        program = jax.make_jaxpr(run)(unit(**options), x)

    assert ("pallas_call" in str(program)) == is_taken
