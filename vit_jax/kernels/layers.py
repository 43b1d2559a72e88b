"""Layers one after the other without a loop, in the form that XLA for TPUs compiles best.

`jax.lax.scan` with all layers in one iteration reads each layer at a constant index of the stacked
parameters, and joins the gradients of all layers at the end. XLA for TPUs reads a kernel within the
product, and writes the gradient of a kernel into the stack within its product. This has two costs:

* Equal products of two layers differ in the index, and each is compiled. Here the indices are
  values that XLA does not know.
* Gradients are written from the first layer to the last, but are known from the last to the first:
  the products wait, and their operands stay in memory. Here they are written as they come.

Legend: L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def run_layers(
    run_layer: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    layers: Any,
) -> tuple[Any, Any]:
    """Return the results of `jax.lax.scan` with all layers in one iteration."""
    leaves_L, structure = jax.tree.flatten(layers)
    num_layers = len(leaves_L[0])
    index_L = jax.lax.optimization_barrier(jnp.arange(num_layers))
    leaves_by_layer = zip(*[_split(leaf_L, index_L) for leaf_L in leaves_L], strict=True)

    run_traced = jax.jit(run_layer)  # equal layers are traced once
    outputs = []
    for leaves in leaves_by_layer:
        layer = jax.tree.unflatten(structure, leaves)
        carry, output = run_traced(carry, layer)
        outputs.append(output)
    return carry, jax.tree.map(_stack, *outputs)


def _stack(*arrays: Array) -> Array:
    return jnp.stack(arrays)


@jax.custom_vjp
def _split(leaf_L: Array, index_L: Array) -> list[Array]:
    """Return the array of each layer."""
    arrays = []
    for i in range(len(leaf_L)):
        array = jax.lax.dynamic_index_in_dim(
            leaf_L,
            index_L[i],
            keepdims=False,
            allow_negative_indices=False,
        )
        arrays.append(array)
    return arrays


def _split_and_save(leaf_L: Array, index_L: Array) -> tuple[list[Array], Array]:
    """Return the array of each layer, and the indices for the backward pass."""
    return _split(leaf_L, index_L), index_L


def _join_gradients(index_L: Array, gradients: list[Array]) -> tuple[Array, None]:
    """Return the gradient of the stack, written from the last layer to the first."""
    num_layers = len(gradients)
    first = gradients[0]
    gradient_L = jax.lax.empty((num_layers, *first.shape), first.dtype)
    for i in reversed(range(num_layers)):
        gradient_L = jax.lax.dynamic_update_index_in_dim(
            gradient_L,
            gradients[i],
            index_L[i],
            axis=0,
            allow_negative_indices=False,
        )
    return gradient_L, None


_split.defvjp(_split_and_save, _join_gradients)
