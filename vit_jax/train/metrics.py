"""Metrics, read one step late: while the device computes step n, the host reads step n - 1."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax


class LateMetrics:
    """Holds the newest step's metrics back and reports the step before: each once, in order.

    So the devices never wait for the host.
    """

    def __init__(self, report: Callable[[int, dict[str, float]], None]):
        self._report = report
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def after_step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Take the metrics of a step just dispatched and report the metrics of the step before."""
        previous = self._pending
        self._pending = (step, metrics)
        self._report_floats(previous)

    def is_busy(self) -> bool:
        """Return whether the devices still compute the newest step."""
        if self._pending is None:
            return False
        _, metrics = self._pending
        values: Iterable[Any] = metrics.values()  # `is_ready` has no type
        return not all(value.is_ready() for value in values)

    def flush(self) -> None:
        """Report the metrics that are held back, waiting for the device."""
        previous = self._pending
        self._pending = None
        self._report_floats(previous)

    def _report_floats(self, entry: tuple[int, Mapping[str, jax.Array]] | None) -> None:
        if entry is None:
            return
        step, metrics = entry
        values = {}
        for name, array in jax.device_get(dict(metrics)).items():
            values[name] = float(array)
        self._report(step, values)


FINITE = {
    "train_loss": "loss",
    "gradient_norm": "norm of the gradient",
    "parameter_norm": "norm of the parameters",
}
"""Metrics of a step that must be finite, with words for each."""
READABLE_IMAGES = "readable_images"
"""Number of images of a step, over all processes, that could be read."""


def require_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Raise FloatingPointError if loss, gradient or updated parameters are not finite."""
    is_finite = True
    values = []
    for name, words in FINITE.items():
        values.append(f"the {words} is {metrics[name]:.6g}")
        is_finite = is_finite and math.isfinite(metrics[name])
    if is_finite:
        return

    rate = metrics["learning_rate"]
    if rate:
        remedy = (
            f"A lower schedule.learning_rate (now {rate:.3g}), a longer schedule.warmup or "
            "optimizer.clip_global_norm=1.0 usually helps."
        )
    else:
        remedy = (
            "The learning rate is 0, so it is not the cause: check images, weights and loss, or "
            "try model.compute_dtype=float32."
        )
    raise FloatingPointError(
        f"Step {step}: {', '.join(values)}. The run stops; the last checkpoint is from before. "
        f"{remedy}"
    )
