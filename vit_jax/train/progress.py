"""The progress of a run: a bar on a terminal, plain lines elsewhere, and the clock behind both."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from vit_jax.config.metric_names import format_metric
from vit_jax.text.printable import printable_lines

T = TypeVar("T")

SHOWN_WAIT_FRACTION = 0.01  # a smaller fraction of the time is in the metrics alone
ESTIMATE_AFTER_STEPS = 3
LONG_ON_CPU_SECONDS = 3600
_SHORT_SECONDS = 60  # a shorter training has no estimate


class TrainingClock:
    """The time of this process in training steps, without compiling, evaluating and saving.

    Args:
      start_step: steps done before.
      images: from a number of steps to the images in them.
      flops: from a number of steps to their FLOPs.
      peak_flops: FLOP/s of all devices together; None: not known.
    """

    def __init__(
        self,
        start_step: int,
        images: Callable[[int], int],
        flops: Callable[[int], float],
        peak_flops: float | None,
    ):
        self._start_step = start_step
        self._images = images
        self._flops = flops
        self._peak_flops = peak_flops
        self._running_since: float | None = time.perf_counter()
        self._seconds = 0.0
        self._waited_seconds = 0.0

    def time_input(self, batches: Iterator[T], is_busy: Callable[[], bool]) -> Iterator[T]:
        """Yield batches; if the devices have no work, the time counts as waiting for input.

        The devices may have ended their last step meanwhile, so that the time is up to a step too
        long.
        """
        began = time.perf_counter()
        for batch in batches:
            if not is_busy():
                self._waited_seconds += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Open a context whose time does not count."""
        self._seconds = self.seconds
        self._running_since = None
        try:
            yield
        finally:
            self._running_since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The training time of this process so far."""
        if self._running_since is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._running_since

    def rates(self, step: int) -> dict[str, float]:
        """Return images per second and other rates since the start, and the compute of all steps.

        Images per second, the fraction of time spent waiting for input, and on a known chip MFU are
        of this process; `exaflops` includes the steps before a resume.
        """
        seconds = max(self.seconds, 1e-9)
        images = self._images(step) - self._images(self._start_step)
        flops = self._flops(step) - self._flops(self._start_step)
        rates = {
            "images_per_second": images / seconds,
            "input_wait_fraction": self._waited_seconds / seconds,
            "exaflops": self._flops(step) / 1e18,
        }
        if self._peak_flops:
            rates["mfu"] = flops / seconds / self._peak_flops
        return rates

    def seconds_left(self, step: int, total_steps: int) -> float:
        """Return the time left at the mean speed so far, by the FLOPs of these steps."""
        flops_done = self._flops(step) - self._flops(self._start_step)
        flops_left = self._flops(total_steps) - self._flops(step)
        return self.seconds / max(flops_done, 1) * flops_left


class Display:
    """A bar on a terminal or lines; `enabled` in the first process only.

    Attributes:
      is_bar: it is a bar.
      advance: moves the bar by a step.
      close: ends the bar.
    """

    def __init__(self, total_steps: int, start_step: int, *, enabled: bool):
        self._total_steps = total_steps
        self._enabled = enabled
        # Without the speed and the time left of tqdm, which include compiling, evaluating and
        # saving.
        layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        is_off = not (enabled and sys.stderr.isatty())
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            dynamic_ncols=True,
            bar_format=layout,
            disable=is_off,
        )
        self.advance = self._bar.update
        self.is_bar = not is_off
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._bar.close)
        if self.is_bar:
            self._stack.enter_context(logging_redirect_tqdm())  # warnings appear above the bar
        self.close = self._stack.close

    def show(
        self,
        step: int,
        metrics: Mapping[str, float],
        seconds_left: float,
        seconds_to_end: float | None = None,
    ) -> None:
        """Show loss, learning rate, speed and time left after a step.

        Args:
          step: steps done.
          metrics: metrics of the step, with rates.
          seconds_left: time left in this run.
          seconds_to_end: with the runs that follow; None: not shown.
        """
        text = f"loss {metrics['train_loss']:.4f}  lr {metrics['learning_rate']:.2e}"
        text += f"  {metrics['images_per_second']:,.0f} images/s"
        if "mfu" in metrics:
            text += f"  MFU {metrics['mfu']:.1%}"
        if metrics.get("input_wait_fraction", 0.0) >= SHOWN_WAIT_FRACTION:
            text += f"  waiting for input {metrics['input_wait_fraction']:.0%}"
        text += f"  {duration_text(seconds_left)} left"
        if seconds_to_end is not None:
            text += f", about {duration_text(seconds_to_end)} to the end of all runs"
        if self.is_bar:
            self._bar.set_postfix_str(text, refresh=False)
        else:
            self.say(f"step {step:>6}/{self._total_steps}  {text}")

    def show_results(self, step: int, results: Mapping[str, float]) -> None:
        """Show the results of an evaluation after `step`."""
        self.say(results_line(step, self._total_steps, results))

    def say(self, line: str) -> None:
        """Print lines, above the bar if there is one; an empty text prints nothing."""
        line = printable_lines(line)
        if not line or not self._enabled:
            return
        if self.is_bar:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, flush=True)


def results_line(step: int, total_steps: int, results: Mapping[str, float]) -> str:
    """Return the results of an evaluation as a line."""
    values = [f"{name} {format_metric(name, value)}" for name, value in results.items()]
    return f"step {step:>6}/{total_steps}  {'  '.join(values)}"


def estimate_text(seconds: float, platform: str) -> str:
    """Return a line on the time that the rest of training takes, "" if that is short.

    Args:
      seconds: to the end of all runs of the command, without evaluations and saves.
      platform: platform of the devices; on a CPU the line names a faster verb.
    """
    if seconds < _SHORT_SECONDS:
        return ""
    duration = duration_text(seconds)
    line = f"estimate: {duration} of training, from the first {ESTIMATE_AFTER_STEPS} steps"
    if platform == "cpu" and seconds > LONG_ON_CPU_SECONDS:
        probe = "vit-jax probe WEIGHTS --data=DATA --output=FOLDER"
        line += f"; on a CPU, {probe} trains a classifier on frozen features in minutes"
    return line


def duration_text(seconds: float) -> str:
    """Return a duration as text: "1m 15s" of 75.0."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    if minutes:
        return f"{minutes}m {rest:02}s"
    return f"{rest}s"
