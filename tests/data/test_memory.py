"""Arrays as a source: what is accepted, and what a mistake is told."""

import numpy as np
import pytest

from vit_jax.data.memory import MemorySource

IMAGES = np.zeros((3, 4, 4, 3), np.uint8)


def test_records_are_the_arrays():
    source = MemorySource(IMAGES + np.arange(3, dtype=np.uint8)[:, None, None, None], np.array([0, 1, 1]), ("a", "b"))
    assert len(source) == 3
    assert source.num_classes == 2
    assert source[2].label == 1
    assert source[2].image.min() == 2
    assert source.name_of(2) == "memory:2"


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.astype(np.float32), [0, 0, 0], "give uint8"),
        (IMAGES[0], [0, 0, 0], "give uint8"),
        (IMAGES, [0, 0], "one integer for each"),
        (IMAGES, [0.0, 0.0, 1.0], "one integer for each"),
        (IMAGES, [0, 0, 2], "there are 2 classes"),
        (IMAGES, [-1, 0, 0], "there are 2 classes"),
    ],
)
def test_mistakes(images, labels, message):
    with pytest.raises(ValueError, match=message):
        MemorySource(images, np.array(labels), ("a", "b"))
