"""Arrays of every kind with every bit pattern, and archives put together by hand."""

import io
import itertools
import re
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from vit_jax.weights.formats import open_arrays
from vit_jax.weights.formats.stored import BFLOAT16, DTYPES

SHAPES = {
    "number": (),
    "none": (0,),
    "some/none": (2, 0, 3),
    "vector": (5,),
    "weights/日本/é": (2, 3, 4),
}
METADATA = {
    "class_names": ["cat", "dög", "\U0001f600"],
    "grid": [3, 5],
    "model": {"width": 8, "scale": 0.1},
}


def random_bits(shape, dtype):
    """Return random bits: NaNs with payloads, infinities and subnormals."""
    rng = np.random.default_rng(dtype.num)
    if dtype == np.bool_:
        return rng.integers(2, size=shape).astype(bool)

    data = rng.integers(
        256,
        size=(*shape, dtype.itemsize),
        dtype=np.uint8,
    )
    return np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()


def list_every_kind():
    """Return an array for every dtype and every shape."""
    arrays = {}
    for dtype, (name, shape) in itertools.product(DTYPES, SHAPES.items()):
        arrays[f"{dtype}/{name}"] = random_bits(shape, dtype)
    return arrays


def list_a_few():
    return {
        "head/kernel": random_bits((3, 2), np.dtype("float32")),
        "é": random_bits((), np.dtype("int64")),
        "none": random_bits((0, 2), np.dtype("float16")),
        "head/bias": random_bits((2,), np.dtype(BFLOAT16)),
    }


def is_same(read, expected):
    """Compare shape, dtype and bits."""
    return (
        read.shape == expected.shape
        and read.dtype == expected.dtype
        and read.dtype.isnative
        and read.tobytes() == expected.tobytes()
    )


def read_all(path):
    with open_arrays(path) as file:
        return {name: file.read(name) for name in file.arrays}, file.metadata


def assert_read(path, arrays, metadata):
    """Assert that the file holds exactly these arrays, and this metadata."""
    read, read_metadata = read_all(path)

    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert is_same(read[name], array), name
    assert read_metadata == metadata


def build_npy(
    header,
    data=b"",
    version=1,
    length=None,
):
    """Return a `.npy` file with any header."""
    if isinstance(header, str):
        header = header.encode()
    if length is None:
        length = len(header)

    size = struct.pack("<H" if version == 1 else "<I", length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + data


def write_npy(values, **options):
    """Return a `.npy` file as NumPy writes it."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(values), **options)
    return stream.getvalue()


def build_archive(members, method=zipfile.ZIP_STORED, comment=b""):
    """Return a ZIP archive of (name, content), in order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.comment = comment
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name), content, method)

    return stream.getvalue()


def read_rejection(path, content):
    """Return the message that rejects a file, at the latest when its arrays are read."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_all(path)

    return str(caught.value)


def read_rejection_with_little_memory(path, content):
    """Return the message that rejects a file, for which less than 1 MiB is allocated."""
    tracemalloc.start()
    try:
        message = read_rejection(path, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**20
    return message
