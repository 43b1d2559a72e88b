"""Lengths of training: text with a unit in, steps out. The only place where units are converted."""

import dataclasses
import math

UNITS = ("steps", "epochs", "examples", "fraction")


def parse(text: str) -> tuple[float, str]:
    """Splits "300 epochs" into (300.0, "epochs").

    Raises:
      ValueError: the text is not a number followed by one of `UNITS`, or the number is negative.
    """
    number, _, unit = text.strip().partition(" ")
    unit = unit.strip()
    if unit in ("step", "epoch", "example"):
        unit += "s"
    try:
        value = float(number.replace("_", ""))
    except ValueError:
        value = math.nan
    if unit not in UNITS or not math.isfinite(value) or value < 0:
        raise ValueError(
            f"{text!r} is not a duration: write a number and a unit, for example '500 steps', "
            f"'90 epochs', '1e6 examples' or '0.1 fraction'."
        )
    if unit == "fraction" and value > 1:
        raise ValueError(f"{text!r} is not a duration: a fraction of the run lies between 0 and 1.")
    return value, unit


@dataclasses.dataclass(frozen=True)
class Clock:
    """Converts durations of one run into steps."""

    global_batch: int  # examples a step takes
    num_examples: int  # of the training split
    total_steps: int | None = None  # length of the run; None while it is itself being converted
    earlier: tuple[tuple[int, int], ...] = ()  # last step and batch of each phase that comes before

    def to_steps(self, text: str) -> int:
        """Whole steps, rounded to the nearest; 0 only for a duration of 0. With earlier phases, from the first step."""
        value, unit = parse(text)
        if unit == "fraction":
            if self.total_steps is None:
                raise ValueError(f"total={text!r}: the length of the run cannot be a fraction of itself.")
            steps = value * self.total_steps
        elif unit == "steps":
            steps = value
        else:
            steps = self._steps_of(value * self.num_examples if unit == "epochs" else value)
        return max(round(steps), 1 if value else 0)

    def _steps_of(self, examples: float) -> float:
        """Steps from the start of the run that take these examples."""
        first = 0
        for last, batch in self.earlier:
            if examples <= (last - first) * batch:
                return first + examples / batch
            examples, first = examples - (last - first) * batch, last
        return first + examples / self.global_batch
