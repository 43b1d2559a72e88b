"""A profiler trace of chosen steps, to be opened in TensorBoard or Perfetto."""

import pathlib
from typing import Self

import jax

from vit_jax.config import LoggingConfig


class Profiler:
    """Traces the steps `profile_start_step` and on, `profile_num_steps` of them, into `profile/` of the workdir."""

    def __init__(self, workdir: pathlib.Path, config: LoggingConfig, *, enabled: bool):
        self._folder, self._start_step = workdir / "profile", config.profile_start_step
        self._num_steps, self._enabled, self._running = config.profile_num_steps, enabled, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def before_step(self, step: int) -> None:
        """Args: step: the number of the step about to run, from 1."""
        if self._enabled and step == self._start_step:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after_step(self, step: int, result: object) -> None:
        """Args: result: arrays to wait for, so that the trace contains the complete last step."""
        if self._running and self._start_step is not None and step == self._start_step + self._num_steps - 1:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Writes the trace, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
