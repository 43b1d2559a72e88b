"""Multiply-adds of any function by its jaxpr, for networks that the formulas of `cost.flops` do not know.

Counted is what those formulas count: matrix products and convolutions.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import Architecture


def forward_macs(model: Any, architecture: Architecture, *, count_padding: bool = True) -> int:
    """Multiply-adds of one image's forward pass, as `cost.flops.forward_macs`, but also for a network of one's own.

    The model is of arrays or their abstract shapes; arguments and errors otherwise as for `count_macs`.
    """
    image = jax.ShapeDtypeStruct((1, *architecture.image_size, 3), jnp.dtype(architecture.compute_dtype))
    return count_macs(lambda model, image: model(image), model, image, count_padding=count_padding)


def count_macs(function: Callable[..., Any], *arguments: Any, count_padding: bool = True) -> int:
    """Multiply-adds of the matrix products and convolutions in a function, which is traced and not run.

    The body of a scan counts as often as it runs; of a conditional the most expensive branch; multiplications with the
    zeros around a map if `count_padding`. Kernels for one kind of device (Pallas, custom calls) do not count.

    Raises:
      ValueError: a while loop, whose length is not known, holds such operations.
    """
    return _macs(jax.make_jaxpr(function)(*arguments).jaxpr, count_padding)


def _macs(jaxpr: Any, count_padding: bool) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        inner = [_macs(part, count_padding) for value in parameters.values() for part in _jaxprs(value)]
        if name == "dot_general":
            total += _dot(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation, count_padding)
        elif name == "while" and any(inner):
            raise ValueError(
                "The multiply-adds of a while loop cannot be counted, because its length is not known: use "
                "jax.lax.scan, or jax.lax.fori_loop with fixed bounds."
            )
        elif name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * (parameters["length"] if name == "scan" else 1)
    return total


def _jaxprs(value: Any) -> Iterator[Any]:
    for part in value if isinstance(value, (tuple, list)) else (value,):
        part = getattr(part, "jaxpr", part)
        if hasattr(part, "eqns"):
            yield part


def _dot(equation: Any) -> int:
    left, _ = (variable.aval.shape for variable in equation.invars)
    (contracted, _), _ = equation.params["dimension_numbers"]
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _convolution(equation: Any, count_padding: bool) -> int:
    image, kernel = (variable.aval.shape for variable in equation.invars)
    parameters, output = equation.params, equation.outvars[0].aval.shape
    numbers = parameters["dimension_numbers"]
    macs = math.prod(output[dim] for dim in numbers.out_spec[:2]) * kernel[numbers.rhs_spec[1]]
    for axis, padding in enumerate(parameters["padding"]):
        old, size, new = (
            shape[spec[2 + axis]]
            for shape, spec in ((image, numbers.lhs_spec), (kernel, numbers.rhs_spec), (output, numbers.out_spec))
        )
        stride, spread, step = (parameters[name][axis] for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
        seen = stride * np.arange(new)[:, None] + step * np.arange(size) - padding[0]
        is_inside = (seen >= 0) & (seen <= (old - 1) * spread) & (seen % spread == 0)
        macs *= is_inside.size if count_padding else int(is_inside.sum())
    return macs // parameters["batch_group_count"]
