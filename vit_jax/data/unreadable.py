"""Count images that cannot be decoded, report the reasons, and stop a run with too many."""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping

from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.bands import BandChoice, name_wrong_bands
from vit_jax.data.decoding.depth import ValueRange
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.records import Source
from vit_jax.data.stream import HostBatch
from vit_jax.text.printable import printable

MOST = 100
"""Number of unreadable images that are skipped by default.

It is at most a tenth of a split, but at least one.
"""
OPTION = "config.input.max_unreadable"
_SHOWN = 3
"""Number of files that an error names, each with its reason."""
_GOLDEN_RATIO = 0.618


class TooManyUnreadable(ValueError):
    """More images than allowed, or all images, cannot be read."""


class UnreadableLog:
    """The unreadable records of a source, which arrive with mask 0; each counts once.

    Attributes:
      met: the first batch with each unreadable record of this process, by record; batches are
        counted from 1.
      problem: the error of too many unreadable records, after `defer_errors`; "" before there are
        too many.
    """

    def __init__(
        self,
        source: Source,
        max_unreadable: int | None,
        max_image_megapixels: float = InputConfig.max_image_megapixels,
        value_range: ValueRange | None = None,
        option: str = OPTION,
        bands: BandChoice | None = None,
    ) -> None:
        self._source = source
        self._max_unreadable = max_unreadable
        self._option = option
        self._decoding = (max_image_megapixels, value_range, bands)
        self._batches = 0  # number of batches so far
        self._defers = False
        self.met: dict[int, int] = {}
        self.problem = ""

    def resume(self, step: int, records: Iterable[int]) -> None:
        """Continue after the batch of a step with the unreadable records so far.

        They are not named again. If they are too many, records that can be read now are forgotten:
        their files may have been replaced.
        """
        self._batches = step
        self.met = dict.fromkeys(records, step)
        if len(self.met) > count_allowed(len(self._source), self._max_unreadable):
            still_unreadable = {}
            for index in self.met:
                if self._find_problem(index) is not None:
                    still_unreadable[index] = step
            self.met = still_unreadable

    def defer_errors(self) -> None:
        """Keep the error of too many unreadable records in `problem`, so that the run can save."""
        self._defers = True

    def list_met(self, step: int) -> list[int]:
        """Return the unreadable records up to a step; batches are read ahead of their steps."""
        return [index for index, batch in self.met.items() if batch <= step]

    def update(self, batch: HostBatch) -> None:
        """Count and log the unreadable images of one batch.

        Raises:
          TooManyUnreadable: more images than `max_unreadable` could not be read; it names them.
        """
        self._batches += 1
        is_unreadable = (batch.mask == 0) & (batch.record_index >= 0)
        for index in batch.record_index[is_unreadable].tolist():
            if index in self.met:
                continue
            self.met[index] = self._batches
            name = printable(self._source.name_of(index))
            reason = self._find_reason(index)
            logging.getLogger(__name__).warning("Unreadable image, skipped. %s: %s", reason, name)
        if self.problem:
            return
        try:
            self.require_few(len(self.met))
        except TooManyUnreadable as error:
            if not self._defers:
                raise
            self.problem = str(error)

    def require_few(self, missing: int) -> None:
        """Raise TooManyUnreadable if more images than `max_unreadable` are missing, or all are.

        `missing` counts images of all processes. The error names images of this process.
        """
        most = self._max_unreadable
        if missing <= count_allowed(len(self._source), most) and missing < len(self._source):
            return
        shown = list(self.met)[:_SHOWN]
        reasons = {index: self._find_reason(index) for index in shown}
        text = describe(self._source, reasons, missing, most, num_known=len(self.met))
        raise TooManyUnreadable(f"{self._option}={most}: {text}")

    def watch(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """Yield the same batches, each after `update`."""
        for batch in batches:
            self.update(batch)
            yield batch

    def _find_reason(self, index: int) -> str:
        return find_reason(self._source, index, *self._decoding)

    def _find_problem(self, index: int) -> str | None:
        return find_problem(self._source, index, *self._decoding)


def count_allowed(num_images: int, chosen: int | None) -> int:
    """Return the number of images of a split that may be unreadable.

    It is the chosen number, by default a tenth of the split, from 1 to 100. One image always may,
    so that small splits do not depend on each of their images.
    """
    if chosen is not None:
        return chosen
    return min(MOST, max(1, num_images // 10))


def describe(
    source: Source,
    reasons: Mapping[int, str],
    missing: int,
    most: int | None,
    *,
    num_known: int,
) -> str:
    """Return the error of too many unreadable images, without the name of the option.

    Args:
      source: the source of the images.
      reasons: reasons of the first images, by their index.
      missing: number of unreadable images.
      most: the configured limit.
      num_known: unreadable images that this process has met.
    """
    files = []
    for index, reason in reasons.items():
        name = printable(source.name_of(index))
        files.append(f"{name} ({reason})")
    named = ""
    if files:
        named = f": {', '.join(files)}"
    if files and num_known > len(files):
        named += f" and {num_known - len(files):,} more"

    if missing >= len(source):
        return f"none of the {missing:,} images can be read{named}. Replace them."

    allowed = ""
    if most is None:
        limit = count_allowed(len(source), most)
        allowed = f", and at most {limit} of {len(source):,} may (a tenth, up to {MOST})"
    return (
        f"{missing} images cannot be read{allowed}{named}. "
        "Replace or remove them, or raise the limit."
    )


def require_readable(
    source: Source,
    place: str,
    max_unreadable: int | None,
    max_image_megapixels: float,
    value_range: ValueRange | None = None,
    bands: BandChoice | None = None,
) -> None:
    """Read images, spread over a split, until one can be read.

    A split without readable images is found before a run starts. `place` is the name of the split.

    Raises:
      TooManyUnreadable: more images than `max_unreadable`, and at least 100, or all cannot be read;
        it names the first.
    """
    reasons: dict[int, str] = {}
    most = max(MOST, count_allowed(len(source), max_unreadable))
    for index in itertools.islice(spread_indices(len(source)), most + 1):
        problem = find_problem(source, index, max_image_megapixels, value_range, bands)
        if problem is None:
            return
        reasons[index] = problem
    first = dict(sorted(reasons.items())[:_SHOWN])
    text = describe(source, first, len(reasons), max_unreadable, num_known=len(reasons))
    option = ""
    if len(reasons) < len(source):
        option = f"{OPTION}={max_unreadable}: "
    raise TooManyUnreadable(f"{place}: {option}{text}")


def spread_indices(num_images: int) -> Iterator[int]:
    """Yield all indices; those of any moment are spread over the whole range."""
    stride = max(1, round(num_images * _GOLDEN_RATIO))
    while math.gcd(stride, num_images) > 1:
        stride += 1
    return (number * stride % num_images for number in range(num_images))


def find_reason(
    source: Source,
    index: int,
    max_image_megapixels: float,
    value_range: ValueRange | None = None,
    bands: BandChoice | None = None,
) -> str:
    """Return the reason why a record arrived with mask 0; it is read once more."""
    problem = find_problem(source, index, max_image_megapixels, value_range, bands)
    if problem is None:
        return "It could not be read at first, but it can be now"
    return problem


def find_problem(
    source: Source,
    index: int,
    max_image_megapixels: float,
    value_range: ValueRange | None = None,
    bands: BandChoice | None = None,
) -> str | None:
    """Return the reason why a record cannot be read; None if it can.

    Raises:
      ValueError: the record does not have the bands.
    """
    try:
        with name_wrong_bands(source.name_of, index):
            image = source[index].image
            decode(image, max_image_megapixels, value_range=value_range, bands=bands)
    except UnreadableImage as error:
        return str(error)
    return None
