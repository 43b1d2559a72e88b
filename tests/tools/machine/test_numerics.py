"""Numerics of attention and norms: right results pass, and errors of values or gradients alone are found."""

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


def scaled(projections, num_heads):
    return XLA(projections, num_heads) * jnp.bfloat16(1.05)


def padded(projections, num_heads):
    """A token of padding that takes part."""
    tokens = [jnp.pad(x, ((0, 0), (0, 1), (0, 0))) for x in projections.add_biases()]
    return XLA(attention.Projections(*tokens, jnp.zeros_like(projections.bias_3E)), num_heads)[
        :, :-1
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_wrong_gradient(projections, num_heads):
    return XLA(projections, num_heads)


def differentiate(num_heads, projections, gradient):
    (right,) = jax.vjp(lambda given: XLA(given, num_heads), projections)[1](gradient)
    return (right._replace(key_BSE=right.key_BSE * jnp.bfloat16(1.05)),)


with_wrong_gradient.defvjp(lambda given, num_heads: (XLA(given, num_heads), given), differentiate)


def not_finite(projections, num_heads):
    return XLA(projections, num_heads).at[0, 0, 0].set(jnp.nan)


@pytest.mark.parametrize("core", [XLA, scaled, padded, with_wrong_gradient, not_finite])
def test_an_attention_form_with_an_error(monkeypatch, core):
    monkeypatch.setattr(numerics, "attend", lambda given, num_heads, _: core(given, num_heads))
    finding = numerics.attention("xla", 2)
    values, gradients = finding.figures.values()

    assert finding.is_good == (core is XLA)
    assert (values <= 2e-2) == (core in (XLA, with_wrong_gradient))
    assert not gradients <= 2e-2 or core in (XLA, scaled, not_finite)

    if core is not XLA:
        assert finding.remedy.endswith(
            "and train with another --config.model.attention= until then"
        )


@pytest.mark.parametrize(
    ("layer", "check"),
    [(block.LayerNorm, numerics.layer_norm), (resnet.GroupNorm, numerics.group_norm)],
)
def test_a_norm_with_an_error(monkeypatch, layer, check):
    assert check().is_good

    call = layer.__call__
    monkeypatch.setattr(layer, "__call__", lambda self, x: call(self, x) * jnp.bfloat16(1.05))

    assert not check().is_good


def test_forms_of_other_devices_and_a_form_that_is_rejected(monkeypatch):
    assert numerics.attention("cudnn", 2).found == "not available: it is for NVIDIA GPUs"

    monkeypatch.setattr(numerics, "_ELSEWHERE", {})
    monkeypatch.setattr(attention_cudnn, "find_problem", lambda *_: "it is missing")
    finding = numerics.attention("cudnn", 2)

    assert finding.found.startswith(
        "not available: bfloat16 5: cuDNN rejects this attention: it is missing."
    )
    assert finding.is_good


@pytest.mark.newest
@pytest.mark.tools
@pytest.mark.skipif(not aot.has_compiler(), reason="libtpu is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_compile_for_tpus(dtype):
    """Check the kernel on both chips of a mesh, with an odd length."""
    mesh = build_mesh(aot.topology_devices(parse_topology("v5e:2x2"))[:2])
    tokens = (4, 197, 128)
    bias = (3, 128)
    dtypes = [jnp.dtype(dtype)] * 4 + [jnp.dtype("float32")]
    operands = [
        jax.ShapeDtypeStruct(
            shape, each, sharding=numerics.place_of(jax.ShapeDtypeStruct(shape, each), mesh)
        )
        for shape, each in zip((tokens, tokens, tokens, bias, tokens), dtypes, strict=True)
    ]
    program = numerics.program(functools.partial(numerics._attend, "pallas", 2), mesh)
    compiled = aot.compile_program(lambda: program.trace(*operands).lower(), mesh.devices.flat[0])

    assert isinstance(compiled, aot.Executable)
    assert "tpu_custom_call" in compiled.text
