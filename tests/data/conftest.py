"""Small data that several tests of the input pipeline share."""

import numpy as np
import pytest

from tests.data.packed_files import image
from vit_jax.config.schema import InputConfig
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import build_evaluation_transform


@pytest.fixture
def make_config():
    """Return a function from fields to an `InputConfig`, small by default."""

    def make(**fields):
        defaults = {
            "train_split": "train",
            "test_split": "test",
            "image_size": (8, 8),
        }
        return InputConfig(**defaults | fields)

    return make


@pytest.fixture
def open_data(make_config):
    """Return a function that opens data with the seed 0 and fields of an `InputConfig`."""

    def open_with_fields(data, split="all", **fields):
        return open_source(
            data,
            split,
            make_config(**fields),
            0,
        )

    return open_with_fields


@pytest.fixture
def evaluation_transform(make_config):
    """Return a function from fields of an `InputConfig` to the transform of evaluation."""
    return lambda **fields: build_evaluation_transform(make_config(**fields))


@pytest.fixture
def random_source():
    """37 random images of 10 x 12 pixels in 5 classes."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(37, 10, 12, 3), dtype=np.uint8)

    return MemorySource(
        images,
        np.arange(37) % 5,
        tuple("abcde"),
    )


class Broken(MemorySource):
    """A source whose records 5 and 8 hold rubbish.

    Record 6 cannot be read at all if `fatal` is an error.
    """

    fatal = None

    def image_of(self, index):
        if index == 6 and self.fatal:
            raise self.fatal("the disk is gone")
        if index in (5, 8):
            return b"rubbish"
        return super().image_of(index)

    def name_of(self, index):
        return f"file-{index}.jpg"


@pytest.fixture
def broken(random_source):
    return Broken(
        random_source.images,
        random_source.labels,
        random_source.class_names,
    )


@pytest.fixture
def make_folder(tmp_path):
    """Return a function that writes an image folder, {"cat/a.png": grey level or bytes}.

    It returns the path of the folder.
    """

    def make(files):
        for name, content in files.items():
            path = tmp_path / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image(content) if isinstance(content, int) else content)
        return tmp_path / "images"

    return make
