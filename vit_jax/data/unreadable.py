"""Counts images that could not be decoded, reports why, and stops a run with too many."""

import logging
from collections.abc import Iterable, Iterator

from vit_jax.config.schema import InputConfig
from vit_jax.data.depth import ValueRange
from vit_jax.data.images import UnreadableImage, decode
from vit_jax.data.records import Source, few
from vit_jax.data.stream import HostBatch
from vit_jax.files import printable


class UnreadableLog:
    """The unreadable records of a source, which arrive with mask 0; each counts once."""

    def __init__(
        self,
        source: Source,
        max_unreadable: int,
        max_image_megapixels: float = InputConfig.max_image_megapixels,
        value_range: ValueRange | None = None,
    ) -> None:
        self._source, self._max_unreadable = source, max_unreadable
        self._decoding = max_image_megapixels, value_range
        self._batches = 0  # that were seen, or that come before
        self.met: dict[int, int] = {}  # the batch, from 1, that held an unreadable record first; in this process

    def resume(self, step: int, records: Iterable[int]) -> None:
        """Continue after the batch of a step with the unreadable records so far, which are not named again."""
        self._batches, self.met = step, dict.fromkeys(records, step)

    def met_by(self, step: int) -> list[int]:
        """Return the unreadable records up to the batch of a step; batches are read ahead of their steps."""
        return [index for index, batch in self.met.items() if batch <= step]

    def update(self, batch: HostBatch) -> None:
        """Count and log the unreadable images of one batch.

        Raises:
          ValueError: more images than `max_unreadable` could not be read; it names them.
        """
        self._batches += 1
        for index in batch.record_index[(batch.mask == 0) & (batch.record_index >= 0)].tolist():
            if index not in self.met:
                self.met[index] = self._batches
                reason = reason_of(self._source, index, *self._decoding)
                name = printable(self._source.name_of(index))
                logging.getLogger(__name__).warning("Unreadable image, left out. %s: %s", reason, name)
        self.require_few(len(self.met), self._max_unreadable, "config.input.max_unreadable")

    def require_few(self, missing: int, most: int, option: str = "--max_unreadable") -> None:
        """Raise ValueError if more images than `most` are missing in all processes; it names those of this process."""
        if missing > most:
            names = few([self._source.name_of(index) for index in self.met])
            count = f"{option}={most}: {missing} images cannot be read" + (names and f": {names}")
            raise ValueError(f"{count}. Replace or remove them, or raise the limit.")

    def watch(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """Yield the same batches, each after `update`."""
        for batch in batches:
            self.update(batch)
            yield batch


def reason_of(source: Source, index: int, max_image_megapixels: float, value_range: ValueRange | None = None) -> str:
    """Read a record that arrived with mask 0 once more, because batches carry no reasons."""
    try:
        decode(source[index].image, max_image_megapixels, value_range=value_range)
    except UnreadableImage as error:
        return str(error)
    return "It could not be read at first, but it can be now"
