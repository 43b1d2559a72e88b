"""Metrics read one step late: while the device computes step n, the host looks at those of step n - 1."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax


class LateMetrics:
    """Holds the newest step's metrics back and reports the one before: once for each step, in order, as floats."""

    def __init__(self, report: Callable[[int, dict[str, float]], None]):
        self._report = report
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def push(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step just dispatched and reports those of the step before."""
        self._exchange((step, metrics))

    def is_busy(self) -> bool:
        """Whether the devices still compute the newest step."""
        newest: list[Any] = [] if self._pending is None else list(self._pending[1].values())
        return not all(value.is_ready() for value in newest)

    def flush(self) -> None:
        """Reports what is held back, waiting for the device."""
        self._exchange(None)

    def _exchange(self, entry: tuple[int, Mapping[str, jax.Array]] | None) -> None:
        previous, self._pending = self._pending, entry
        if previous is not None:
            step, metrics = previous
            self._report(step, {name: float(value) for name, value in jax.device_get(dict(metrics)).items()})


def require_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Raises FloatingPointError where the loss or the gradient is infinite or not a number."""
    if math.isfinite(metrics["train_loss"]) and math.isfinite(metrics["gradient_norm"]):
        return
    rate = metrics["learning_rate"]
    remedy = (
        f"A lower schedule.learning_rate (now {rate:.3g}), a longer schedule.warmup or optimizer.clip_global_norm=1.0 "
        "usually helps."
        if rate
        else "The learning rate is 0, so it is not the cause: check images, weights and loss, or "
        "try model.compute_dtype=float32."
    )
    raise FloatingPointError(
        f"Step {step}: the loss is {metrics['train_loss']} and the gradient's norm {metrics['gradient_norm']}. "
        f"The run stops; the last checkpoint is from before. {remedy}"
    )
