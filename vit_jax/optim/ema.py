"""Polyak averaging: an exponential moving average of the parameters, as two pure functions.

The average is a tree like the parameters, in float32, and valid after every step. The paper fine-tunes with a factor of
0.9999 (Sec. 4.1) and says neither when averaging starts nor whether it is corrected for that start. Over runs not much
longer than the 10,000 steps it spans, one that starts from the initial parameters never forgets them; bias correction,
or a later start, cures it.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def init(parameters: T) -> T:
    """The average before the first step: a float32 copy of the parameters.

    A copy even where nothing need be converted: the two trees are donated side by side, and may share no buffer.
    """
    return jax.tree.map(lambda parameter: jnp.array(parameter, dtype=jnp.float32, copy=True), parameters)


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
    """The average after one more step.

    Up to and including `start_step` the average is the parameters. Let n count the steps after it.

    * With bias correction the average is what Adam makes of its moments: the sum over those n steps of
      `factor**age * parameters`, divided by the sum of its weights. Parameters before them have no weight.
    * Without, it is `factor * average + (1 - factor) * parameters`, begun at the parameters of `start_step`.
    * With a warm-up, `factor` there is at most n / (9 + n) ("ratio"; n - 1 updates came before, as in TensorFlow and
      its min(factor, (1 + updates) / (10 + updates))), or 1 - n ** (-2 / 3) ("power", as timm's ModelEmaV3).

    All are `average + rate * (parameters - average)`, the first with a rate of (1 - factor) / (1 - factor**n).
    In float32 this form keeps constant parameters as they are, which `factor * average + (1 - factor) *
    parameters` does not: the rounding of 0.9999 alone would shrink them by 2e-4.

    `step` (int32, may be traced) counts the updates made so far, the one that gave `parameters` included; `factor` is
    the weight that the average keeps, between 0 and 1.
    """
    # (1 - factor) / (1 - factor**count), for counts from 1 on; expm1 because factor**count is all but 1 at first.
    count = jnp.asarray(step, jnp.float32) - start_step
    averaged = jnp.maximum(count, 1.0)
    rate = jnp.float32(1 - factor)
    if bias_correction:
        rate = rate / -jnp.expm1(math.log(factor) * averaged)
    elif warmup is not None:
        rate = jnp.maximum(rate, 9.0 / (9.0 + averaged) if warmup == "ratio" else averaged ** (-2.0 / 3.0))

    def leaf(average: jax.Array, parameter: jax.Array) -> jax.Array:
        parameter = parameter.astype(jnp.float32)
        return jnp.where(count > 0, average + rate * (parameter - average), parameter)

    return jax.tree.map(leaf, average, parameters)
