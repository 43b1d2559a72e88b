"""Counts images that could not be decoded, says why, and stops a run that meets too many."""

import logging
from collections.abc import Iterable, Iterator

from vit_jax.data.images import UnreadableImage, decode
from vit_jax.data.sources import Source
from vit_jax.data.stream import HostBatch

SHOWN_NAMES = 10


class UnreadableLog:
    """Remembers which records of a source arrived with mask 0; each counts once, however often it comes."""

    def __init__(self, source: Source, max_unreadable: int) -> None:
        self._source, self._max_unreadable = source, max_unreadable
        self._reasons: dict[int, str] = {}

    @property
    def count(self) -> int:
        """Unreadable images met so far by this process."""
        return len(self._reasons)

    @property
    def reasons(self) -> dict[int, str]:
        """Why, by the index of the record."""
        return dict(self._reasons)

    def update(self, batch: HostBatch) -> None:
        """Looks through one batch.

        Raises:
          ValueError: more images than `max_unreadable` could not be read; it names them.
        """
        for index in batch.record_index[(batch.mask == 0) & (batch.record_index >= 0)].tolist():
            if index not in self._reasons:
                reason = self._reasons[index] = reason_of(self._source, index)
                name = self._source.name_of(index)
                logging.getLogger(__name__).warning("Unreadable image, left out. %s: %s", reason, name)
        if self.count > self._max_unreadable:
            raise ValueError(self._message())

    def watch(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """The same batches, each looked through on its way."""
        for batch in batches:
            self.update(batch)
            yield batch

    def _message(self) -> str:
        names = [self._source.name_of(index) for index in list(self._reasons)[:SHOWN_NAMES]]
        more = f" and {self.count - SHOWN_NAMES} more" if self.count > SHOWN_NAMES else ""
        return (
            f"{self.count} images cannot be decoded, max_unreadable is {self._max_unreadable}: "
            f"{', '.join(names)}{more}. Replace or remove them, or raise config.input.max_unreadable."
        )


def reason_of(source: Source, index: int) -> str:
    """Reads a record that arrived with mask 0 once more, because batches carry no reasons."""
    try:
        decode(source[index].image)
    except UnreadableImage as error:
        return str(error)
    return "It could not be read at first, and now can be"
