"""Read tar archives once: images are checked by threads, and stored and listed in the order of the archives."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

from vit_jax.data.headers import stated_pixels
from vit_jax.data.images import UnreadableImage, decode
from vit_jax.data.prepared import QUALITY, reduced
from vit_jax.data.scatter import Scatter
from vit_jax.data.tar import is_mislabelled
from vit_jax.data.tar_images import Class, Found, Item, Noted, Place, read_images
from vit_jax.data.workers import available_cores
from vit_jax.tables import to_csv

TRAIN, VALIDATION = "train", "validation"
UNREADABLE, TINY, MISLABELLED = "unreadable", "tiny", "mislabelled"
MAX_FOUND_CLASSES = 2**17

_MEMORY_BYTES = 2**29  # of images that are checked at a time, with their pixels
_OVERHEAD_BYTES = 2**13
_COMMIT_BYTES = 2**28  # repeating the work on this much after an interruption takes seconds


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one dataset.

    Attributes:
      seed: random seed of the order of records.
      classes: names of classes by number; empty: the sorted names in the archives.
      number_names: names of the classes whose numbers files state; empty: those of `classes`.
      skips_others: skip images of other classes than `classes`, which are an error otherwise.
      min_side: pixels; an image with a shorter side is skipped.
      min_class_images: a class with fewer images is skipped.
      holdout_per_class: images of each class, at most half of it, that are the split "validation".
      short_side: pixels to which longer short sides are reduced, as `prepared.reduced` does; None: no change.
      quality: JPEG quality of reduced images.
      shards: files of each split; None: one for each `tar_dataset.SHARD_BYTES` of the archives, and
        `tar_dataset.SHARDS_OF_STREAM` for the standard input.
    """

    seed: int = 0
    classes: tuple[str, ...] = ()
    number_names: tuple[str, ...] = ()
    skips_others: bool = False
    min_side: int = 32
    min_class_images: int = 1
    holdout_per_class: int = 0
    short_side: int | None = None
    quality: int = QUALITY
    shards: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return (TRAIN, VALIDATION) if self.holdout_per_class else (TRAIN,)


class _Checked(NamedTuple):
    """An image after its check: the file to store, if any, and the line to list, if any."""

    image: bytes | None
    sha256: bytes
    noted: Noted | None


def _check(found: Found, options: Options) -> _Checked:
    try:
        height, width, _ = decode(found.image).shape
    except UnreadableImage as error:
        return _Checked(None, b"", Noted(found.source, UNREADABLE, str(error)))
    if min(height, width) < options.min_side:
        return _Checked(None, b"", Noted(found.source, TINY, f"{width} x {height} pixels"))
    noted = None
    if is_mislabelled(found.source, found.image):
        noted = Noted(found.source, MISLABELLED, f"begins with {found.image[:4].hex(' ')}; it is in the dataset")
    smaller = None if options.short_side is None else reduced(found.image, options.short_side, options.quality)
    stored = found.image if smaller is None else smaller
    return _Checked(stored, hashlib.sha256(stored).digest(), noted)


def _with_checks(items: Iterable[Item], options: Options) -> Generator[tuple[Item, _Checked | None]]:
    """Yield items in their order, images with their check; threads check images ahead, within `_MEMORY_BYTES`."""
    waiting, in_flight = collections.deque[tuple[Item, int, concurrent.futures.Future[_Checked] | None]](), 0
    pool = concurrent.futures.ThreadPoolExecutor(available_cores())
    try:
        for item in items:
            weight = _OVERHEAD_BYTES
            if isinstance(item, Found):
                weight += len(item.image) + 4 * stated_pixels(item.image)
            while waiting and (in_flight + weight > _MEMORY_BYTES or (first := waiting[0][2]) is None or first.done()):
                oldest, freed, check = waiting.popleft()
                in_flight -= freed
                yield oldest, check.result() if check else None
            check = pool.submit(_check, item, options) if isinstance(item, Found) else None
            waiting.append((item, weight, check))
            in_flight += weight
        for item, _, check in waiting:
            yield item, check.result() if check else None
    finally:
        pool.shutdown(cancel_futures=True)


class Reading:
    """Stores and lists the images of archives in a scatter, which is committed from time to time."""

    def __init__(self, scatter: Scatter, options: Options, show: Callable[[int, Place], None]) -> None:
        """Take `show`, called with the number of stored images at each place in the archives."""
        self._scatter, self._options, self._show = scatter, options, show
        state = scatter.state
        self._labels: dict[Class, int] = {label: number for number, (label, _) in enumerate(state["classes"])}
        self._counts = collections.Counter[str](state["counts"])
        self._wanted = {*options.classes}
        self._uncommitted, self._place = 0, Place(*state["place"])

    def run(self, archives: Sequence[str]) -> None:
        """Read the rest of the archives; raises as `tar_dataset.prepare_tars`."""
        images = read_images(archives, self._place, self._is_wanted)
        with contextlib.closing(_with_checks(images, self._options)) as items:
            for item, checked in items:
                if isinstance(item, Place):
                    self._reach(item)
                    continue
                noted = item if isinstance(item, Noted) else None
                if isinstance(item, Found) and checked is not None:
                    noted = checked.noted
                    if checked.image is not None:
                        self._scatter.add(item.source, self._number_of(item), checked.image, checked.sha256)
                        self._uncommitted += len(checked.image)
                if noted is not None:
                    note(self._scatter, noted)
                    self._counts[noted.kind] += 1
        self._commit()

    def _reach(self, place: Place) -> None:
        self._place = place
        if self._uncommitted >= _COMMIT_BYTES:
            self._commit()
        self._show(self._scatter.num_rows, place)

    def _commit(self) -> None:
        self._scatter.state |= {"place": [self._place.archive, self._place.member], "counts": self._counts}
        self._scatter.commit()
        self._uncommitted = 0

    def _named(self, label: Class) -> Class:
        """Return the name of a class that files state by its number, where the names of numbers are known."""
        names = self._options.number_names or self._options.classes
        return names[label] if isinstance(label, int) and label < len(names) else label

    def _is_wanted(self, label: Class) -> bool:
        """Return True for a class of the list of classes, and for every class without a list.

        Raises:
          ValueError: it is another class, and others are not skipped.
        """
        if not self._wanted or self._named(label) in self._wanted:
            return True
        if self._options.skips_others:
            return False
        raise ValueError(
            f"class {label}: is not among the {len(self._wanted):,} of --classes=. Complete the list, or give "
            f"--other_classes=skip; remove {self._scatter.folder} before."
        )

    def _number_of(self, found: Found) -> int:
        """Return the number of a class in the order in which they are found."""
        classes = self._scatter.state["classes"]
        label = self._named(found.label)
        number = self._labels.setdefault(label, len(classes))
        if number == len(classes):
            if number == MAX_FOUND_CLASSES:
                raise ValueError(f"{found.source}: is of a {number + 1:,}th class. Give archives that state classes.")
            classes.append([label, found.folder])
            if isinstance(label, int) != isinstance(classes[0][0], int):
                raise ValueError(f"{found.source}: states class {label!r}, but others are names or numbers. Use one.")
        elif found.folder != classes[number][1] and found.folder is not None:
            raise ValueError(
                f"{found.source}: class {label} is in the folders {classes[number][1]!r} and {found.folder!r}, as if "
                "they were splits. Pack each split as an archive and prepare it under another name."
            )
        return number


def note(scatter: Scatter, noted: Noted) -> None:
    """List a file."""
    scatter.note(to_csv([noted]))
