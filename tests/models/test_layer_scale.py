"""The scale of a branch within the last linear layer of the branch."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from vit_jax.models.attention import Linear


def build_layer(*, has_factors):
    layer = Linear(8, 6, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(6.0)
    if has_factors:
        key_of_a, key_of_b = jax.random.split(jax.random.key(1))
        factor_a = jax.random.normal(key_of_a, (8, 2))
        factor_b = jax.random.normal(key_of_b, (2, 6))
        layer.lora_a = nnx.Param(factor_a)
        layer.lora_b = nnx.Param(factor_b)
        layer.lora_scale = 3.0
    return layer


@pytest.mark.parametrize("has_factors", [False, True], ids=["kernel", "with factors"])
@pytest.mark.parametrize("num_rows", [3, 40], ids=["fewer rows than inputs", "more"])
def test_a_layer_scales_its_output(num_rows, has_factors):
    layer = build_layer(has_factors=has_factors)
    x = jax.random.normal(jax.random.key(2), (num_rows, 8))
    scale = jnp.linspace(-1.0, 2.0, 6)

    def compute_loss(layer, x, scale, *, is_separate):
        if is_separate:
            output = layer(x) * scale
        else:
            output = layer(x, output_scale=scale)
        shifted = output + 0.1
        return jnp.square(shifted).sum()

    differentiate = jax.value_and_grad(compute_loss, argnums=(0, 1, 2))
    expected = differentiate(
        layer,
        x,
        scale,
        is_separate=True,
    )
    actual = differentiate(
        layer,
        x,
        scale,
        is_separate=False,
    )

    expected_arrays = jax.tree.leaves(expected)
    actual_arrays = jax.tree.leaves(actual)
    for array, reference in zip(actual_arrays, expected_arrays, strict=True):
        assert_allclose(array, reference, rtol=1e-5, atol=1e-4)


def test_many_rows_scale_the_kernel():
    """The output itself is not multiplied, so the backward pass does not read it."""
    layer = build_layer(has_factors=False)
    x = jnp.ones((40, 8))

    def run(scale):
        return layer(x, output_scale=scale)

    trace = jax.make_jaxpr(run)
    program = trace(jnp.ones(6))

    scaled = []
    for equation in program.eqns:
        if equation.primitive.name == "mul":
            (product,) = equation.outvars
            scaled.append(product.aval.shape)
    assert scaled == [(8, 6), (6,)]
