"""FLOPs of a network, counted in its program.

Matrix products and convolutions count, as in papers. Norms, weight standardisation, softmax, GELU, pooling and biases
do not.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from vit_jax.config.architecture import Architecture
from vit_jax.models import abstract_model

FLOPS_PER_MAC = 2
FORWARDS_PER_TRAINING_STEP = (
    3  # the backward pass computes two gradients, each as expensive as the forward pass
)


def forward_macs(
    architecture: Architecture, network: Any = None, *, count_padding: bool = True
) -> int:
    """Return the multiply-adds of one image's forward pass; divided by 1e9, the "GFLOPs" of many tables.

    Args:
      architecture: the network; `image_size` and `compute_dtype` describe its input.
      network: a network that `architecture` does not describe, of arrays or abstract shapes.
      count_padding: as in tables, count multiplications with the zeros around a map; XLA's cost analysis does not.

    Raises:
      ValueError: as `count_macs`.
    """
    if network is None and architecture.is_standard:
        return _standard_macs(_plain(architecture), count_padding)
    return _network_macs(
        architecture, abstract_model(architecture) if network is None else network, count_padding
    )


@functools.cache
def _standard_macs(architecture: Architecture, count_padding: bool) -> int:
    return _network_macs(architecture, abstract_model(architecture), count_padding)


def _network_macs(architecture: Architecture, network: Any, count_padding: bool) -> int:
    image = jax.ShapeDtypeStruct(
        (1, *architecture.image_size, 3), jnp.dtype(architecture.compute_dtype)
    )
    return count_macs(
        lambda network, image: network(image), network, image, count_padding=count_padding
    )


def _plain(architecture: Architecture) -> Architecture:
    """Return the network in the form with the shortest program; kernels would not count."""
    return dataclasses.replace(architecture, attention="xla", remat="none", scan_unroll=1)


def count_parameters(architecture: Architecture) -> int:
    """Return the number of parameters of a network."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_model(architecture)))


def count_macs(function: Callable[..., Any], *arguments: Any, count_padding: bool = True) -> int:
    """Trace a function and return the multiply-adds of its matrix products and convolutions.

    The body of a scan counts as often as it runs, and the most expensive branch of a conditional. Kernels for one kind
    of device (Pallas, custom calls) do not count.

    Raises:
      ValueError: a while loop, whose length is not known, holds such operations.
    """
    return _macs(jax.make_jaxpr(function)(*arguments).jaxpr, count_padding)


def _macs(jaxpr: Jaxpr, count_padding: bool) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        parameters = equation.params
        inner = [
            _macs(jaxpr, count_padding) for value in parameters.values() for jaxpr in _jaxprs(value)
        ]
        if name == "dot_general":
            total += _dot(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation, count_padding)
        elif name == "while" and any(inner):
            advice = "Use jax.lax.scan, or jax.lax.fori_loop with fixed bounds"
            raise ValueError(
                f"The multiply-adds of a while loop of unknown length cannot be counted. {advice}."
            )
        elif name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * (parameters["length"] if name == "scan" else 1)
    return total


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    for item in value if isinstance(value, (tuple, list)) else (value,):
        jaxpr = getattr(item, "jaxpr", item)
        if isinstance(jaxpr, Jaxpr):
            yield jaxpr


def _dot(equation: Any) -> int:
    left, _ = (variable.aval.shape for variable in equation.invars)
    (contracted, _), _ = equation.params["dimension_numbers"]
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _convolution(equation: Any, count_padding: bool) -> int:
    image, kernel = (variable.aval.shape for variable in equation.invars)
    parameters = equation.params
    output = equation.outvars[0].aval.shape
    numbers = parameters["dimension_numbers"]
    macs = math.prod(output[dim] for dim in numbers.out_spec[:2]) * kernel[numbers.rhs_spec[1]]
    for axis, padding in enumerate(parameters["padding"]):
        old, size, new = (
            shape[spec[2 + axis]]
            for shape, spec in (
                (image, numbers.lhs_spec),
                (kernel, numbers.rhs_spec),
                (output, numbers.out_spec),
            )
        )
        stride, spread, step = (
            parameters[name][axis] for name in ("window_strides", "lhs_dilation", "rhs_dilation")
        )
        seen = stride * np.arange(new)[:, None] + step * np.arange(size) - padding[0]
        is_inside = (seen >= 0) & (seen <= (old - 1) * spread) & (seen % spread == 0)
        macs *= is_inside.size if count_padding else int(is_inside.sum())
    return macs // parameters["batch_group_count"]
