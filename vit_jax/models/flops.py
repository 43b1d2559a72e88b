"""FLOPs of a network, counted in its program.

Matrix products and convolutions count, as in papers. Norms, weight standardisation, softmax, GELU,
pooling and biases do not.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from vit_jax.arrays import ModelOutput
from vit_jax.config.architecture import Architecture
from vit_jax.models import abstract_model

Equation = Any  # a `JaxprEqn`; JAX does not type the shapes of its values
Network = Callable[..., ModelOutput]
FLOPS_PER_MAC = 2
# The backward pass computes two gradients, each as expensive as the forward pass.
FORWARDS_PER_TRAINING_STEP = 3


def forward_macs(
    architecture: Architecture,
    network: Network | None = None,
    *,
    count_padding: bool = True,
    num_kept: int | None = None,
) -> int:
    """Return the multiply-adds of one image's forward pass.

    Divided by 1e9 they are the "GFLOPs" of many tables.

    Args:
      architecture: the network; `image_size` and `compute_dtype` describe its input.
      network: a network that `architecture` does not describe, of arrays or abstract shapes.
      count_padding: count multiplications with the zeros around a map, unlike XLA's cost analysis;
        tables do.
      num_kept: number of patches that patch dropout keeps; None: all.

    Raises:
      ValueError: a while loop, whose length is not known, holds matrix products.
    """
    if network is None and architecture.is_standard:
        return _count_standard_macs(_simplify(architecture), count_padding, num_kept)
    if network is None:
        network = abstract_model(architecture)
    return _count_network_macs(architecture, network, count_padding, num_kept)


@functools.cache
def _count_standard_macs(
    architecture: Architecture,
    count_padding: bool,
    num_kept: int | None,
) -> int:
    """Return the multiply-adds of the network that an architecture describes."""
    network = abstract_model(architecture)
    return _count_network_macs(architecture, network, count_padding, num_kept)


def _count_network_macs(
    architecture: Architecture,
    network: Network,
    count_padding: bool,
    num_kept: int | None,
) -> int:
    """Return the multiply-adds of a network for one image."""
    shape_1HWC = (1, *architecture.image_shape)
    image = jax.ShapeDtypeStruct(shape_1HWC, jnp.dtype(architecture.compute_dtype))

    def apply(network: Network, image: Array) -> ModelOutput:
        if num_kept is None:
            return network(image)
        return network(image, kept_BM=jnp.arange(num_kept)[None])

    return count_macs(apply, network, image, count_padding=count_padding)


def _simplify(architecture: Architecture) -> Architecture:
    """Return the network in the form with the shortest program; kernels would not count."""
    return dataclasses.replace(architecture, attention="xla", remat="none", scan_unroll=1)


def count_parameters(architecture: Architecture) -> int:
    """Return the number of parameters of a network."""
    leaves = jax.tree.leaves(abstract_model(architecture))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def count_macs(function: Callable[..., Any], *arguments: Any, count_padding: bool = True) -> int:
    """Trace a function and return the multiply-adds of its matrix products and convolutions.

    The body of a scan counts as often as it runs, and the most expensive branch of a conditional.
    Kernels for one kind of device (Pallas, custom calls) do not count.

    Raises:
      ValueError: a while loop, whose length is not known, holds such operations.
    """
    program = jax.make_jaxpr(function)(*arguments)
    return _count_program(program.jaxpr, count_padding)


def _count_program(program: Jaxpr, count_padding: bool) -> int:
    """Return the multiply-adds of all equations of a program."""
    total = 0
    for equation in program.eqns:
        total += _count_equation(equation, count_padding)
    return total


def _count_equation(equation: Equation, count_padding: bool) -> int:
    """Return the multiply-adds of an equation, and of the programs that it runs."""
    name = equation.primitive.name
    if name == "dot_general":
        return _count_product(equation)
    if name == "conv_general_dilated":
        return _count_convolution(equation, count_padding)

    programs = _find_programs(equation)
    inner = [_count_program(program, count_padding) for program in programs]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return sum(inner) * int(equation.params["length"])
    if name == "while" and any(inner):
        raise ValueError(
            "The multiply-adds of a while loop of unknown length cannot be counted. "
            "Use jax.lax.scan, or jax.lax.fori_loop with fixed bounds."
        )
    return sum(inner)


def _find_programs(equation: Equation) -> list[Jaxpr]:
    """Return the programs that an equation runs, such as the body of a loop."""
    found = []
    for value in equation.params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            program = getattr(item, "jaxpr", item)
            if isinstance(program, Jaxpr):
                found.append(program)
    return found


def _count_product(equation: Equation) -> int:
    """Return the multiply-adds of a matrix product."""
    left_shape = equation.invars[0].aval.shape
    output_shape = equation.outvars[0].aval.shape
    contracted_dims = equation.params["dimension_numbers"][0][0]
    macs = math.prod(output_shape)
    for dim in contracted_dims:
        macs *= left_shape[dim]
    return macs


def _count_convolution(equation: Equation, count_padding: bool) -> int:
    """Return the multiply-adds of a convolution."""
    image, kernel = equation.invars
    output_shape = equation.outvars[0].aval.shape
    parameters = equation.params
    numbers = parameters["dimension_numbers"]
    batch_dim, channel_dim, *output_dims = numbers.out_spec
    _, input_channel_dim, *kernel_dims = numbers.rhs_spec
    image_dims = numbers.lhs_spec[2:]

    inputs = kernel.aval.shape[input_channel_dim]
    macs = output_shape[batch_dim] * output_shape[channel_dim] * inputs
    for axis, padding in enumerate(parameters["padding"]):
        macs *= _count_window_products(
            image_size=image.aval.shape[image_dims[axis]],
            kernel_size=kernel.aval.shape[kernel_dims[axis]],
            output_size=output_shape[output_dims[axis]],
            stride=parameters["window_strides"][axis],
            image_dilation=parameters["lhs_dilation"][axis],
            kernel_dilation=parameters["rhs_dilation"][axis],
            pad_before=padding[0],
            count_padding=count_padding,
        )
    return int(macs // parameters["batch_group_count"])


def _count_window_products(
    *,
    image_size: int,
    kernel_size: int,
    output_size: int,
    stride: int,
    image_dilation: int,
    kernel_dilation: int,
    pad_before: int,
    count_padding: bool,
) -> int:
    """Return the pairs of an output and a window offset along one axis."""
    if count_padding:
        return output_size * kernel_size
    output = np.arange(output_size)[:, None]
    offset = np.arange(kernel_size)
    position = stride * output + kernel_dilation * offset - pad_before
    last_position = (image_size - 1) * image_dilation
    is_inside = (position >= 0) & (position <= last_position) & (position % image_dilation == 0)
    return int(is_inside.sum())
