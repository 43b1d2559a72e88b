"""Progress of long work on images: a bar on a terminal, else a line now and then."""

import sys
import time
from typing import Protocol, Self

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30


class ProgressBar(Protocol):
    """Counts images until its context ends."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def update(self, num_images: int) -> object:
        """Count further images."""


class ProgressLines:
    """Writes a line to standard error every `SECONDS_BETWEEN_LINES` while images are counted."""

    def __init__(self, description: str, num_images: int) -> None:
        """Begin to count up to this number of images."""
        self._description = description
        self._num_images = num_images
        self._num_done = 0
        self._began = time.monotonic()
        self._last_line = self._began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End without a line: the command prints its result."""

    def update(self, num_images: int) -> None:
        """Count further images."""
        self._num_done += num_images
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        seconds_an_image = (now - self._began) / max(self._num_done, 1)
        seconds_left = seconds_an_image * (self._num_images - self._num_done)
        print(
            f"{self._description}: {self._num_done:,} of {self._num_images:,} images, "
            f"about {seconds_left / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )


def open_progress(description: str, num_images: int, *, is_shown: bool) -> ProgressBar:
    """Return a count of images that is shown, or a silent one."""
    if is_shown and not sys.stderr.isatty():
        return ProgressLines(description, num_images)
    return tqdm(total=num_images, unit=" images", desc=description, disable=not is_shown)
