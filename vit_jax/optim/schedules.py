"""The learning rate as a function of the step; lengths arrive here already converted to steps.

Every schedule is a decay times a linear warm-up from 0 (ViT, App. B.1, and its released code).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.config.schema import ScheduleConfig

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
"""From steps already taken (int32, traced or not) to the learning rate of the next one (float32 scalar)."""


def build_schedule(config: ScheduleConfig, *, warmup_steps: int, total_steps: int, timescale_steps: int) -> Schedule:
    """The schedule that `config` describes.

    With `progress` running from 0 at the end of the warm-up to 1 at the end of the run, the decays are

    * linear: `end + (base - end) * (1 - progress)`;
    * cosine: `end + (base - end) * (1 + cos(pi * progress)) / 2`;
    * rsqrt: `base / sqrt(1 + steps since the warm-up / timescale)`, which leaves the warm-up at `base`
      whatever the timescale, unlike `base * sqrt(timescale / step)` (Scaling Vision Transformers);
    * constant: `base`;

    each times `min(1, step / warmup_steps)`. Step 0 therefore has rate 0 if there is a warm-up.

    Args:
      config: base and end values and the kind of decay; its durations are ignored in favour of:
      warmup_steps: length of the warm-up; 0 for none.
      total_steps: length of the run, warm-up included.
      timescale_steps: of rsqrt only.

    Raises:
      ValueError: values that do not fit together.
    """
    _check(config, warmup_steps, total_steps, timescale_steps)
    decay = _make_decay(config, total_steps - warmup_steps, timescale_steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24 steps
        rate = decay(jnp.maximum(step - warmup_steps, 0.0))
        return rate * jnp.minimum(1.0, step / warmup_steps) if warmup_steps else rate

    return schedule


def _make_decay(config: ScheduleConfig, decay_steps: int, timescale_steps: int) -> Callable[[jax.Array], jax.Array]:
    """The rate as a function of the (float32) steps since the end of the warm-up."""
    base, end = config.learning_rate, config.end_learning_rate

    def remaining(step: jax.Array) -> jax.Array:
        return 1.0 - jnp.minimum(step / decay_steps, 1.0)

    match config.decay:
        case "linear":
            return lambda step: end + (base - end) * remaining(step)
        case "cosine":  # 1 + cos(pi * progress), written so that it is exactly 0 at the end
            return lambda step: end + (base - end) * 0.5 * (1.0 - jnp.cos(math.pi * remaining(step)))
        case "rsqrt":
            return lambda step: base / jnp.sqrt(1.0 + step / timescale_steps)
        case "constant":
            return lambda step: jnp.full_like(step, base)
    raise ValueError(f"schedule.decay={config.decay!r}: use linear, cosine, rsqrt or constant.")


def _check(config: ScheduleConfig, warmup_steps: int, total_steps: int, timescale_steps: int) -> None:
    base, end = config.learning_rate, config.end_learning_rate
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"schedule.warmup is {warmup_steps} of {total_steps} steps: it must be 0 or more and end before the run "
            "does. Shorten it, or lengthen total."
        )
    if not (math.isfinite(base) and base >= 0):
        raise ValueError(f"schedule.learning_rate={base}: must be a finite number, 0 or more.")
    if config.decay in ("linear", "cosine") and not 0 <= end <= base:
        raise ValueError(f"schedule.end_learning_rate={end}: must lie between 0 and learning_rate={base}.")
    if config.decay in ("rsqrt", "constant") and end:
        raise ValueError(
            f"schedule.end_learning_rate={end} has no effect with decay={config.decay!r}: set it to 0, or use "
            "decay='linear' or 'cosine'."
        )
    if config.decay == "rsqrt" and timescale_steps < 1:
        raise ValueError(f"schedule.timescale is {timescale_steps} steps: rsqrt needs at least 1.")
