"""The machine that a run is on: its speed, its compilation cache, a profiler trace."""

import atexit
import pathlib
import tempfile

import jax

from vit_jax.config import LoggingConfig
from vit_jax.sharding.chips import find_chip
from vit_jax.storage.files import (
    is_in_bucket,
    read_bounded,
    remove_tree,
    write_atomically,
)

MAX_UPLOAD_BYTES = 2**32


def peak_flops() -> float | None:
    """Return the FLOP/s of all devices together; None for an unknown chip."""
    chip = find_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return chip.peak_bf16_flops * jax.device_count()


class Upload:
    """A folder on this machine for files of libraries that write by path.

    If the workdir is in a bucket the folder is a temporary one, and its files are copied.

    Attributes:
      local: the folder.
      is_needed: it is a temporary one.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._sent_bytes = dict[pathlib.Path, int]()
        self.is_needed = is_in_bucket(folder)
        self.local = folder
        if self.is_needed:
            self.local = pathlib.Path(tempfile.mkdtemp(prefix="vit_jax-"))
            atexit.register(remove_tree, self.local)

    def send(self) -> None:
        """Copy the files that have changed."""
        if not self.is_needed:
            return
        for path in self.local.rglob("*"):
            if not path.is_file():
                continue
            num_bytes = path.stat().st_size
            if num_bytes == self._sent_bytes.get(path):
                continue
            target = self._folder / path.relative_to(self.local)
            write_atomically(target, read_bounded(path, MAX_UPLOAD_BYTES))
            self._sent_bytes[path] = num_bytes


class Profiler:
    """Traces `profile_num_steps` steps from `profile_start_step` on into `profile/` of the workdir.

    The trace can be opened in TensorBoard or Perfetto.
    """

    def __init__(self, workdir: pathlib.Path, config: LoggingConfig, *, enabled: bool):
        self._folder = Upload(workdir / "profile")
        self._num_steps = config.profile_num_steps
        self._running = False
        self._start_step: int | None = None
        if enabled:
            self._start_step = config.profile_start_step

    def before_step(self, step: int) -> None:
        """Start a trace if `step`, the next one, counted from 1, is the first to trace."""
        if step == self._start_step:
            jax.profiler.start_trace(str(self._folder.local))
            self._running = True

    def after_step(self, step: int, result: object) -> None:
        """Stop the trace after its last step; wait for `result`, so that this step is complete."""
        if not self._running or self._start_step is None:
            return
        last_step = self._start_step + self._num_steps - 1
        if step == last_step:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Write the trace, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._folder.send()
