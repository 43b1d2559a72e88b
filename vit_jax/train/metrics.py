"""Metrics read one step late: while the device computes step n, the host looks at those of step n - 1."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax


class LateMetrics:
    """Holds the newest step's metrics back and reports the one before: once for each step, in order, as floats."""

    def __init__(self, report: Callable[[int, dict[str, float]], None]):
        self._report = report
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def push(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Take the metrics of a step just dispatched and report those of the step before."""
        self._exchange((step, metrics))

    def is_busy(self) -> bool:
        """Return whether the devices still compute the newest step."""
        newest: Iterable[Any] = (
            () if self._pending is None else self._pending[1].values()
        )  # `is_ready` has no type
        return not all(value.is_ready() for value in newest)

    def flush(self) -> None:
        """Report what is held back, waiting for the device."""
        self._exchange(None)

    def _exchange(self, entry: tuple[int, Mapping[str, jax.Array]] | None) -> None:
        previous = self._pending
        self._pending = entry
        if previous is not None:
            step, metrics = previous
            self._report(
                step, {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
            )


FINITE = {
    "train_loss": "loss",
    "gradient_norm": "norm of the gradient",
    "parameter_norm": "norm of the parameters",
}
"""Metrics of a step that must be finite, with words for each."""
READABLE_IMAGES = "readable_images"
"""Number of images of a step, over all processes, that could be read."""


def require_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Raise FloatingPointError where loss, gradient or updated parameters are infinite or not a number."""
    if all(math.isfinite(metrics[name]) for name in FINITE):
        return
    values = ", ".join(f"the {words} is {metrics[name]:.6g}" for name, words in FINITE.items())
    rate = metrics["learning_rate"]
    remedy = (
        f"A lower schedule.learning_rate (now {rate:.3g}), a longer schedule.warmup or optimizer.clip_global_norm=1.0 "
        "usually helps."
        if rate
        else "The learning rate is 0, so it is not the cause: check images, weights and loss, or "
        "try model.compute_dtype=float32."
    )
    raise FloatingPointError(
        f"Step {step}: {values}. The run stops; the last checkpoint is from before. {remedy}"
    )
