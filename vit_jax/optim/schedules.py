"""The learning rate as a function of the step; lengths arrive here already converted to steps.

Every schedule is a decay times a linear warm-up from 0 (ViT, App. B.1, and its released code).
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

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
    * staircase: `base` divided by 10 for every fraction of `drop_at_fraction` that lies behind. Fractions are of the
      whole run, warm-up included, rounded to the nearest step; the step of that number is the first with the lower
      rate (BiT-HyperRule; its released code is one step later);

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
    decay = _make_decay(config, warmup_steps, total_steps, timescale_steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)  # exact up to 2**24 steps
        rate = decay(jnp.maximum(step - warmup_steps, 0.0))
        return rate * jnp.minimum(1.0, step / warmup_steps) if warmup_steps else rate

    return schedule


def _make_decay(
    config: ScheduleConfig, warmup_steps: int, total_steps: int, timescale_steps: int
) -> Callable[[jax.Array], jax.Array]:
    """The rate as a function of the (float32) steps since the end of the warm-up."""
    base, end = config.learning_rate, config.end_learning_rate
    decay_steps = total_steps - warmup_steps

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
        case "staircase":
            drops = np.asarray(_drop_steps(config, total_steps), np.float32) - np.float32(warmup_steps)
            rates = np.asarray([base / 10**count for count in range(len(drops) + 1)], np.float32)
            return lambda step: jnp.asarray(rates)[jnp.searchsorted(drops, step, side="right")]
    raise ValueError(f"schedule.decay={config.decay!r}: use linear, cosine, rsqrt, constant or staircase.")


def _drop_steps(config: ScheduleConfig, total_steps: int) -> list[int]:
    return [round(fraction * total_steps) for fraction in config.drop_at_fraction]


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
    if config.decay in ("rsqrt", "constant", "staircase") and end:
        raise ValueError(
            f"schedule.end_learning_rate={end} has no effect with decay={config.decay!r}: set it to 0, or use "
            "decay='linear' or 'cosine'."
        )
    if config.decay == "rsqrt" and timescale_steps < 1:
        raise ValueError(f"schedule.timescale is {timescale_steps} steps: rsqrt needs at least 1.")
    if config.decay == "staircase":
        _check_drops(config, warmup_steps, total_steps)


def _check_drops(config: ScheduleConfig, warmup_steps: int, total_steps: int) -> None:
    fractions = config.drop_at_fraction
    inside = bool(fractions) and all(0 < fraction < 1 for fraction in fractions)
    if not inside or any(after <= before for before, after in itertools.pairwise(fractions)):
        raise ValueError(
            f"schedule.drop_at_fraction={fractions}: must be one or more ascending numbers between 0 and 1, for "
            "example (0.3, 0.6, 0.9)."
        )
    first = _drop_steps(config, total_steps)[0]
    if first < warmup_steps:
        raise ValueError(
            f"schedule.drop_at_fraction={fractions} lowers the rate at step {first}, before the warm-up has ended at "
            f"step {warmup_steps}: shorten warmup, or drop later."
        )
