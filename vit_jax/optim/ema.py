"""Polyak averaging (ViT, section 4.1): an exponential moving average of the parameters.

Both functions are pure.

The average is a float32 tree like the parameters, and valid after every step.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def init(parameters: T) -> T:
    """Return the average before the first step: a float32 copy in separate buffers."""

    def copy(parameter: jax.Array) -> jax.Array:
        return jnp.array(parameter, dtype=jnp.float32, copy=True)

    return jax.tree.map(copy, parameters)


def update(
    average: T,
    parameters: T,
    step: jax.typing.ArrayLike,
    *,
    factor: float,
    start_step: int,
    bias_correction: bool,
    warmup: str | None = None,
) -> T:
    """Return the average after one more step.

    Up to and including `start_step` it is the parameters.

    With n steps after `start_step` it is `average + rate * (parameters - average)`, which keeps
    constant parameters as they are in float32, with a rate of

    * `(1 - factor) / (1 - factor**n)` with bias correction, as Adam's moments: parameters before
      have no weight;
    * `1 - factor` without; with a warm-up at least `9 / (9 + n)` ("ratio", TensorFlow) or `n ** (-2
      / 3)` ("power", timm).

    `step` counts the updates made so far, the one that gave `parameters` included.
    """
    count = jnp.asarray(step, jnp.float32) - start_step
    averaged = jnp.maximum(count, 1.0)
    rate = jnp.float32(1 - factor)
    if bias_correction:
        # 1 - factor**n by expm1, because factor**n is nearly 1 at first.
        rate = rate / -jnp.expm1(math.log(factor) * averaged)
    elif warmup == "ratio":
        rate = jnp.maximum(rate, 9.0 / (9.0 + averaged))
    elif warmup is not None:
        rate = jnp.maximum(rate, averaged ** (-2.0 / 3.0))

    def move(average: jax.Array, parameter: jax.Array) -> jax.Array:
        parameter = parameter.astype(jnp.float32)
        return jnp.where(count > 0, average + rate * (parameter - average), parameter)

    return jax.tree.map(move, average, parameters)
