"""The learning rate as a function of the step; lengths arrive here already converted to steps.

Every built-in schedule is a decay times a linear warm-up from 0 (ViT, App. B.1, and its released
code).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.lengths import ScheduleSteps
from vit_jax.config.schema import ScheduleConfig
from vit_jax.imports.references import explain_call, is_reference, resolve

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
"""From steps taken (int32, traced or not) to the learning rate of the next one (float32)."""


def build_schedule(config: ScheduleConfig, steps: ScheduleSteps) -> Schedule:
    """Build the schedule of a config, with its durations as numbers of steps.

    The rate is a decay times `min(1, step / warmup)`. With `p` from 0 at the end of the warm-up to
    1 at the end of the run, the decays are

    * linear: `end + (base - end) * (1 - p)`; cosine: `end + (base - end) * (1 + cos(pi * p)) / 2`;
      constant: `base`;
    * rsqrt: `base / sqrt(1 + steps since the warm-up / timescale)`, which is `base` after the
      warm-up, unlike that of Scaling Vision Transformers;
    * staircase: `base` divided by 10 at each fraction of the complete run in `drop_at_fraction`, at
      the nearest step (BiT-HyperRule; its code is one step later);
    * wsd: `base` until the last `cooldown` steps, then linear or `end + (base - end) * (1 -
      sqrt(q))` with `q` from 0 to 1 (Haegele et al., 2024). Before the cooldown runs of all lengths
      have the same rate.

    A reference is called with `learning_rate`, `warmup_steps` and `total_steps`, and returns the
    complete schedule.

    Raises:
      ValueError: a reference that cannot be called so.
    """
    if is_reference(config.decay):
        return _build_referenced(config, steps)
    decay = _make_decay(config, steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24 steps
        rate = decay(jnp.maximum(step - steps.warmup, 0.0))
        if not steps.warmup:
            return rate
        return rate * jnp.minimum(1.0, step / steps.warmup)

    return schedule


def _make_decay(config: ScheduleConfig, steps: ScheduleSteps) -> Callable[[jax.Array], jax.Array]:
    """Return the rate as a function of the (float32) steps since the end of the warm-up."""
    base = config.learning_rate
    end = config.end_learning_rate
    decay_steps = steps.total - steps.warmup

    def compute_rest(step: jax.Array) -> jax.Array:
        return 1.0 - jnp.minimum(step / decay_steps, 1.0)

    match config.decay:
        case "linear":
            return lambda step: end + (base - end) * compute_rest(step)
        case "cosine":
            # 1 + cos(pi * progress) would lose four digits at the end.
            return lambda step: (
                end + (base - end) * 0.5 * (1.0 - jnp.cos(math.pi * compute_rest(step)))
            )
        case "rsqrt":
            return lambda step: base / jnp.sqrt(1.0 + step / steps.timescale)
        case "wsd":
            return _make_cooldown(config, decay_steps - steps.cooldown, steps.cooldown)
        case "staircase":
            return _make_staircase(config, steps)
    return lambda step: jnp.full_like(step, base)


def _make_cooldown(
    config: ScheduleConfig,
    stable_steps: int,
    cooldown_steps: int,
) -> Callable[[jax.Array], jax.Array]:
    base = config.learning_rate
    end = config.end_learning_rate

    def decay(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - stable_steps) / cooldown_steps, 0.0, 1.0)
        if config.cooldown_form == "sqrt":
            progress = jnp.sqrt(progress)
        return end + (base - end) * (1.0 - progress)

    return decay


def _make_staircase(
    config: ScheduleConfig, steps: ScheduleSteps
) -> Callable[[jax.Array], jax.Array]:
    drops = []
    for fraction in config.drop_at_fraction:
        drops.append(round(fraction * steps.total) - steps.warmup)
    factors = {step: 0.1 ** drops.count(step) for step in drops}
    return optax.piecewise_constant_schedule(config.learning_rate, factors)


def _build_referenced(config: ScheduleConfig, steps: ScheduleSteps) -> Schedule:
    field = "config.schedule.decay"
    make = resolve(config.decay, field)
    with explain_call(f"{field}={config.decay!r}", "learning_rate, warmup_steps and total_steps"):
        schedule = make(
            learning_rate=config.learning_rate,
            warmup_steps=steps.warmup,
            total_steps=steps.total,
        )
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    if getattr(rate, "shape", None) != ():
        raise ValueError(
            f"{field}={config.decay!r} gives {rate} for a step; a learning rate is a scalar."
        )
    return lambda step: jnp.asarray(schedule(step), jnp.float32)
