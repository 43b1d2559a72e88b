"""Counts images that could not be decoded, reports why, and stops a run with too many."""

import logging
from collections.abc import Iterable, Iterator

from vit_jax.data.images import UnreadableImage, decode
from vit_jax.data.records import Source, few
from vit_jax.data.stream import HostBatch
from vit_jax.files import printable


class UnreadableLog:
    """The records of a source that arrived with mask 0; each counts once, however often it is read."""

    def __init__(self, source: Source, max_unreadable: int) -> None:
        self._source, self._max_unreadable = source, max_unreadable
        self.reasons: dict[int, str] = {}  # by the index of the record; in this process

    def update(self, batch: HostBatch) -> None:
        """Counts and logs the unreadable images of one batch.

        Raises:
          ValueError: more images than `max_unreadable` could not be read; it names them.
        """
        for index in batch.record_index[(batch.mask == 0) & (batch.record_index >= 0)].tolist():
            if index not in self.reasons:
                reason = self.reasons[index] = reason_of(self._source, index)
                name = printable(self._source.name_of(index))
                logging.getLogger(__name__).warning("Unreadable image, left out. %s: %s", reason, name)
        if len(self.reasons) > self._max_unreadable:
            raise ValueError(
                f"{len(self.reasons)} images cannot be decoded, max_unreadable is {self._max_unreadable}: "
                f"{few([self._source.name_of(index) for index in self.reasons])}. Replace or remove them, or raise "
                "config.input.max_unreadable."
            )

    def watch(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """Yields the same batches, each after `update`."""
        for batch in batches:
            self.update(batch)
            yield batch


def reason_of(source: Source, index: int) -> str:
    """Reads a record that arrived with mask 0 once more, because batches carry no reasons."""
    try:
        decode(source[index].image)
    except UnreadableImage as error:
        return str(error)
    return "It could not be read at first, but it can be now"
