"""Confidence intervals of fractions."""

import math

INTERVAL_OF = {"accuracy": "accuracy_interval", "top5_accuracy": "top5_interval"}
"""Names of the 95 % intervals of metrics."""
FEW_IMAGES = 2_000
"""With fewer test images an accuracy is printed with its interval everywhere.

The interval of 95 % on 2,000 images is 94.0 to 95.9 %."""
_DEVIATIONS = 1.959963984540054  # 97.5 % of a normal distribution are below


def wilson_interval(correct: float, images: float) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction (Wilson 1927).

    Unlike p ± 2 standard errors it stays within [0, 1] and is useful if all predictions are right,
    or none.

    Args:
      correct: 0 to `images`; a whole number up to rounding.
      images: more than 0, independent of each other: copies of an image or frames of a film make it
        too narrow.
    """
    count = round(images)
    fraction = round(correct) / count
    squared = _DEVIATIONS**2

    centre = fraction + squared / (2 * count)
    variance = fraction * (1 - fraction) / count + squared / (2 * count) ** 2
    half_width = _DEVIATIONS * math.sqrt(variance)
    scale = 1 + squared / count

    low = max(0.0, (centre - half_width) / scale)
    high = min(1.0, (centre + half_width) / scale)
    return low, high


def format_interval(interval: tuple[float, float]) -> str:
    """Return an interval of 95 % as text: "95 %: 96.41% to 99.23%"."""
    low, high = interval
    return f"95 %: {low:.2%} to {high:.2%}"


def find_interval_of_few(accuracy: float, images: float) -> tuple[float, float] | None:
    """Return the 95 % interval if there are few images; None otherwise.

    It is None, too, for what a damaged file gives in the place of a fraction.
    """
    if not 0 < images < FEW_IMAGES or not 0 <= accuracy <= 1:
        return None
    return wilson_interval(accuracy * images, images)


def describe_interval(accuracy: float, images: float) -> str:
    """Return the interval in brackets, after a space, if there are few images; otherwise ""."""
    interval = find_interval_of_few(accuracy, images)
    if interval is None:
        return ""
    return f" ({format_interval(interval)})"
