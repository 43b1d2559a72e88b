"""The machine that a run is on: its speed, its compilation cache, a profiler trace."""

import atexit
import pathlib
import tempfile

import jax

from vit_jax.config import LoggingConfig
from vit_jax.sharding.chips import find_chip
from vit_jax.storage.files import (
    cache_folder,
    is_in_bucket,
    read_bounded,
    remove_tree,
    write_atomically,
)

MAX_UPLOAD_BYTES = 2**32


def peak_flops() -> float | None:
    """FLOP/s of all devices together; None where the chip is not known."""
    chip = find_chip(jax.devices()[0].device_kind)
    return None if chip is None else chip.peak_bf16_flops * jax.device_count()


def use_compilation_cache(enabled: bool) -> None:
    """Compiled programs outlive the process, unless the user has set up a cache of their own."""
    if enabled and not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))


class Upload:
    """A folder on this machine for files of libraries that write by path; those of a workdir in a bucket are copied.

    Attributes:
      local: the folder, that of the workdir or a temporary one.
      is_needed: it is a temporary one.
    """

    def __init__(self, folder: pathlib.Path):
        self.is_needed = is_in_bucket(folder)
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="vit_jax-")) if self.is_needed else folder
        self._folder = folder
        self._sent = dict[pathlib.Path, int]()
        if self.is_needed:
            atexit.register(remove_tree, self.local)

    def send(self) -> None:
        """Copy the files that have changed."""
        for path in self.local.rglob("*") if self.is_needed else ():
            if path.is_file() and self._sent.get(path) != (size := path.stat().st_size):
                write_atomically(
                    self._folder / path.relative_to(self.local),
                    read_bounded(path, MAX_UPLOAD_BYTES),
                )
                self._sent[path] = size


class Profiler:
    """Traces the steps `profile_start_step` and on, `profile_num_steps` of them, into `profile/` of the workdir.

    The trace can be opened in TensorBoard or Perfetto.
    """

    def __init__(self, workdir: pathlib.Path, config: LoggingConfig, *, enabled: bool):
        self._folder = Upload(workdir / "profile")
        self._num_steps = config.profile_num_steps
        self._running = False
        self._start_step = config.profile_start_step if enabled else None

    def before_step(self, step: int) -> None:
        """Start a trace if `step`, the next one, counted from 1, is the first to trace."""
        if step == self._start_step:
            jax.profiler.start_trace(str(self._folder.local))
            self._running = True

    def after_step(self, step: int, result: object) -> None:
        """Stop the trace after its last step; wait for `result`, so that this step is complete."""
        if (
            self._running
            and self._start_step is not None
            and step == self._start_step + self._num_steps - 1
        ):
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Write the trace, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._folder.send()
