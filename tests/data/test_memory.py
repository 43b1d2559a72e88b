"""Arrays as a source: what is accepted, and the message for each mistake; the cache around any source."""

import numpy as np
import pytest

from vit_jax.data.memory import CachedSource, MemorySource

IMAGES = np.zeros((3, 4, 4, 3), np.uint8)


def test_records_are_the_arrays():
    source = MemorySource(IMAGES + np.arange(3, dtype=np.uint8)[:, None, None, None], np.array([0, 1, 1]), ("a", "b"))
    assert (len(source), source.num_classes, source[2].label, source[2].image.min()) == (3, 2, 1, 2)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.astype(np.float32), [0, 0, 0], "give uint8"),
        (IMAGES[0], [0, 0, 0], "give uint8"),
        (IMAGES, [0, 0], "one integer for each"),
        (IMAGES, [0.0, 0.0, 1.0], "one integer for each"),
        (IMAGES, [0, 0, 2], "record 2 has the label 2, but classes are 0 to 1"),
        (IMAGES, [-1, 0, 0], "record 0 has the label -1"),
    ],
)
def test_mistakes(images, labels, message):
    with pytest.raises(ValueError, match=message):
        MemorySource(images, np.array(labels), ("a", "b"))


def test_cache_reads_each_record_once(random_source, monkeypatch):
    source = CachedSource(random_source)
    first = source[5]
    monkeypatch.setattr(type(random_source), "image_of", None)
    assert source[5] is first
    assert source.labels is random_source.labels
    assert (source.name_of(5), source.key_of(5), len(source)) == ("record 5", b"5", 37)
    constructor, arguments = source.__reduce__()
    assert arguments == (random_source,)  # workers get no records
    assert constructor(*arguments).class_names == source.class_names
