"""Too many unreadable images: how many are too many, when they are found, and what the error names."""

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.stream import HostBatch
from vit_jax.data.unreadable import (
    TooManyUnreadable,
    UnreadableLog,
    count_allowed,
    require_readable,
    spread_indices,
)

MEGAPIXELS = 1.0


class Damaged(MemorySource):
    """Images of which some cannot be read; counts the images that were asked for."""

    def __init__(self, count, damaged):
        super().__init__(
            np.zeros((count, 4, 4, 3), np.uint8),
            np.arange(count) % 2,
            ("a", "b"),
        )
        self.damaged = set(damaged)
        self.asked = []

    def image_of(self, index):
        self.asked.append(index)
        if index in self.damaged:
            raise UnreadableImage(f"Reason {index}")
        return super().image_of(index)

    def name_of(self, index):
        return f"file-{index}"


def batch_of(records, unreadable):
    records = np.array(records)
    mask = ~np.isin(records, list(unreadable))
    return HostBatch(
        None,
        None,
        mask.astype(np.float32),
        records,
    )


@pytest.mark.parametrize(
    ("num_images", "chosen", "expected"),
    [
        (5, None, 1),
        (19, None, 1),
        (20, None, 2),
        (999, None, 99),
        (10**6, None, 100),
        (10**6, 7, 7),
        (5, 300, 300),
    ],
)
def test_a_hundred_or_a_tenth_or_the_chosen_number(
    num_images,
    chosen,
    expected,
):
    assert count_allowed(num_images, chosen) == expected


@pytest.mark.parametrize("num_images", [0, 1, 2, 3, 10, 97, 1000])
def test_every_image_comes_once_and_the_first_ones_are_spread(num_images):
    order = list(spread_indices(num_images))

    assert sorted(order) == list(range(num_images))

    if num_images >= 97:
        first = order[:20]
        gaps = np.diff(sorted([0, *first, num_images]))
        assert gaps.max() < num_images / 5


def test_one_readable_image_is_enough_before_a_run():
    source = Damaged(100, [])
    require_readable(source, "data", None, MEGAPIXELS)

    assert len(source.asked) == 1

    half = Damaged(100, range(0, 100, 2))
    require_readable(half, "data", None, MEGAPIXELS)

    assert len(half.asked) <= 4


@pytest.mark.parametrize("chosen", [None, 3, 500])
def test_a_split_without_a_readable_image_is_rejected(chosen):
    """Any limit rejects it; images are read only as far as the limit needs."""
    source = Damaged(200, range(200))
    with rejects(
        "data: ",
        r"(max_unreadable=|none of the 200 images).*file-\d+ \(Reason \d+\).* more",
    ):
        require_readable(source, "data", chosen, MEGAPIXELS)

    num_asked = 200 if chosen == 500 else 101
    assert len(source.asked) == num_asked


def test_a_log_stops_at_a_tenth_or_at_the_chosen_number():
    source = Damaged(30, range(6))
    log = UnreadableLog(source, None)
    log.update(batch_of([0, 1, 2, 20], source.damaged))

    with rejects(
        "max_unreadable=None: 4 images",
        r"at most 3 of 30.*file-0 \(Reason 0\), .* and 1 more",
    ):
        log.update(batch_of([3, 21], source.damaged))

    chosen = UnreadableLog(source, 6)
    chosen.update(batch_of(range(10), source.damaged))

    assert len(chosen.met) == 6


def test_all_images_are_too_many_for_any_limit():
    source = Damaged(4, range(4))
    log = UnreadableLog(source, 100, option="--max_unreadable")
    log.update(batch_of([0, 1, 2], source.damaged))

    with pytest.raises(
        TooManyUnreadable,
        match=r"^--max_unreadable=100: none of the 4 images can be read: file-0",
    ):
        log.update(batch_of([3], source.damaged))


def test_a_deferred_error_is_kept_for_the_caller():
    source = Damaged(10, range(3))
    log = UnreadableLog(source, None)
    log.defer_errors()
    log.update(batch_of([0, 5], source.damaged))

    assert log.problem == ""

    log.update(batch_of([1, 6], source.damaged))
    first = log.problem
    log.update(batch_of([2, 7], source.damaged))

    assert "2 images cannot be read" in first
    assert log.problem == first


def test_a_resumed_run_forgets_too_many_that_were_replaced():
    source = Damaged(40, [1])
    log = UnreadableLog(source, None)
    log.resume(4, [1, 2, 3])

    assert log.met == {1: 4, 2: 4, 3: 4}

    log.resume(4, [1, 2, 3, 5, 6])

    assert log.met == {1: 4}


def test_a_small_split_without_a_readable_image_is_named_as_such():
    source = Damaged(12, range(12))
    with pytest.raises(
        TooManyUnreadable,
        match=r"^here: none of the 12 images can be read: file-0 \(Reason 0\)",
    ):
        require_readable(source, "here", None, MEGAPIXELS)
