"""A profiler trace of chosen steps, to be opened in TensorBoard or Perfetto."""

import pathlib

import jax


class Profiler:
    """Traces the steps `start_step` to `start_step` + `num_steps` - 1 into `profile/` of the workdir."""

    def __init__(self, workdir: pathlib.Path, start_step: int | None, num_steps: int, *, enabled: bool):
        self._folder, self._start_step, self._num_steps = workdir / "profile", start_step, num_steps
        self._enabled, self._running = enabled and start_step is not None, False

    def before_step(self, step: int) -> None:
        """Args: step: the number of the step about to run, from 1."""
        if self._enabled and step == self._start_step:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after_step(self, step: int, result: object) -> None:
        """Args: result: arrays to wait for, so that the trace holds the whole last step."""
        if self._running and self._start_step is not None and step == self._start_step + self._num_steps - 1:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Writes the trace, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
