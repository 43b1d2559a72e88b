"""A schedule: warm-up, a constant part, a linear decay over the last fifth (a trapezoid).

`schedule.decay` takes `(learning_rate, warmup_steps, total_steps) -> (step -> rate)`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/trapezoid \
        --config.schedule.decay=docs.examples.schedule:trapezoid
"""

from collections.abc import Callable

import optax

DECAY_FRACTION = 0.2


def trapezoid(*, learning_rate: float, warmup_steps: int, total_steps: int) -> Callable:
    """Return the learning rate as a function of the number of steps, warm-up included."""
    decay_steps = max(round(DECAY_FRACTION * total_steps), 1)
    warmup = optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1))
    decay = optax.linear_schedule(
        learning_rate,
        0.0,
        decay_steps,
        transition_begin=total_steps - decay_steps,
    )

    def decay_after_warmup(step: int) -> float:
        return decay(step + warmup_steps)

    return optax.join_schedules([warmup, decay_after_warmup], [warmup_steps])
