"""Counts images that could not be decoded and stops a run that meets too many."""

import logging

from vit_jax.data.sources import Source
from vit_jax.data.stream import HostBatch

SHOWN_NAMES = 10


class UnreadableLog:
    """Remembers which records of a source arrived with mask 0; each counts once, however often it comes."""

    def __init__(self, source: Source, max_unreadable: int) -> None:
        self._source, self._max_unreadable = source, max_unreadable
        self._names: dict[int, str] = {}

    @property
    def count(self) -> int:
        """Unreadable images met so far by this process."""
        return len(self._names)

    def update(self, batch: HostBatch) -> None:
        """Looks through one batch.

        Raises:
          ValueError: more images than `max_unreadable` could not be read; it names them.
        """
        for index in batch.record_index[(batch.mask == 0) & (batch.record_index >= 0)].tolist():
            if index not in self._names:
                self._names[index] = self._source.name_of(index)
                logging.getLogger(__name__).warning("Unreadable image, left out: %s", self._names[index])
        if self.count > self._max_unreadable:
            raise ValueError(self._message())

    def _message(self) -> str:
        names = list(self._names.values())
        more = f" and {self.count - SHOWN_NAMES} more" if self.count > SHOWN_NAMES else ""
        return (
            f"{self.count} images cannot be decoded, max_unreadable is {self._max_unreadable}: "
            f"{', '.join(names[:SHOWN_NAMES])}{more}. Replace or remove them, or raise config.input.max_unreadable."
        )
