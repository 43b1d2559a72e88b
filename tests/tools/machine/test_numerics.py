"""Numerics of attention and norms: right results pass, and errors of values or gradients alone are
found.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from vit_jax.kernels import attention_cudnn
from vit_jax.models import attention, block, resnet
from vit_jax.sharding import build_mesh
from vit_jax.tools.machine import numerics
from vit_jax.tools.plan import aot
from vit_jax.tools.plan.topology import parse_topology


def XLA(projections, num_heads):
    return attention.attend(projections, num_heads, "xla")


@pytest.fixture(autouse=True)
def one_case(monkeypatch):
    monkeypatch.setattr(numerics, "LENGTHS", (5,))
    monkeypatch.setattr(numerics, "SIDES", (3,))
    monkeypatch.setattr(numerics, "TOLERANCES", {"cpu": {"bfloat16": 2e-2}})


def scale(projections, num_heads):
    return XLA(projections, num_heads) * jnp.bfloat16(1.05)


def pad(projections, num_heads):
    """Compute attention with a token of padding that takes part."""
    tokens = []
    for x in projections.add_biases():
        tokens.append(jnp.pad(x, ((0, 0), (0, 1), (0, 0))))

    no_bias = [jnp.zeros_like(bias_E) for bias_E in projections.biases_E]
    output_BSE = XLA(attention.Projections(*tokens, no_bias), num_heads)
    return output_BSE[:, :-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend_with_wrong_gradient(projections, num_heads):
    return XLA(projections, num_heads)


def differentiate(num_heads, projections, gradient):
    def attend(given):
        return XLA(given, num_heads)

    _, pull_back = jax.vjp(attend, projections)
    (right,) = pull_back(gradient)
    wrong_key = right.key_BSE * jnp.bfloat16(1.05)
    return (right._replace(key_BSE=wrong_key),)


attend_with_wrong_gradient.defvjp(
    lambda given, num_heads: (XLA(given, num_heads), given), differentiate
)


def attend_to_nan(projections, num_heads):
    return XLA(projections, num_heads).at[0, 0, 0].set(jnp.nan)


@pytest.mark.parametrize(
    ("core", "has_right_values", "may_have_right_gradients"),
    [
        (XLA, True, True),
        (scale, False, True),
        (pad, False, False),
        (attend_with_wrong_gradient, True, False),
        (attend_to_nan, False, True),
    ],
)
def test_an_attention_form_with_an_error(
    monkeypatch,
    core,
    has_right_values,
    may_have_right_gradients,
):
    def attend(given, num_heads, _):
        return core(given, num_heads)

    monkeypatch.setattr(numerics, "attend", attend)
    finding = numerics.check_attention("xla", 2)
    values, gradients = finding.figures.values()

    assert finding.is_good == (core is XLA)
    assert (values <= 2e-2) == has_right_values
    assert not gradients <= 2e-2 or may_have_right_gradients
    if core is not XLA:
        advice = "and train with another --config.model.attention= until then"
        assert finding.remedy.endswith(advice)


@pytest.mark.parametrize(
    ("layer", "check"),
    [
        (block.LayerNorm, numerics.check_layer_norm),
        (resnet.GroupNorm, numerics.check_group_norm),
    ],
)
def test_a_norm_with_an_error(monkeypatch, layer, check):
    assert check().is_good

    call = layer.__call__

    def call_wrongly(self, x):
        return call(self, x) * jnp.bfloat16(1.05)

    monkeypatch.setattr(layer, "__call__", call_wrongly)

    assert not check().is_good


def test_a_form_of_other_devices():
    finding = numerics.check_attention("cudnn", 2)
    assert finding.found == "not available: it is for NVIDIA GPUs"


def test_a_form_that_is_rejected(monkeypatch):
    monkeypatch.setattr(numerics, "_MISSING_FORMS", {})
    monkeypatch.setattr(attention_cudnn, "find_problem", lambda *_: "it is missing")
    finding = numerics.check_attention("cudnn", 2)
    reason = "bfloat16 5: cuDNN rejects this attention: it is missing."

    assert finding.found.startswith(f"not available: {reason}")
    assert finding.is_good


@pytest.mark.newest
@pytest.mark.tools
@pytest.mark.skipif(not aot.has_compiler(), reason="libtpu is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_compile_for_tpus(dtype):
    """Check the kernel on both chips of a mesh, with an odd length."""
    mesh = build_mesh(aot.list_devices(parse_topology("v5e:2x2"))[:2])

    def describe(shape, dtype):
        struct = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        sharding = numerics.choose_sharding(struct, mesh)
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)

    tokens = describe((4, 197, 128), dtype)
    bias = describe((3, 128), dtype)
    gradient = describe((4, 197, 128), "float32")
    program = numerics.jit_with_gradients(
        functools.partial(numerics._attend, "pallas", 2),
        mesh,
    )
    traced = program.trace(tokens, tokens, tokens, bias, gradient)

    compiled = aot.compile_program(traced.lower, mesh.devices.flat[0])

    assert isinstance(compiled, aot.Executable)
    assert "tpu_custom_call" in compiled.text
