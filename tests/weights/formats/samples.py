"""Arrays of every kind with every bit pattern, and archives put together by hand."""

import io
import re
import struct
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
    """Any bit pattern at all: NaNs with payloads, infinities, subnormals."""
    rng = np.random.default_rng(dtype.num)
    if dtype == np.bool_:
        return rng.integers(2, size=shape).astype(bool)

    data = rng.integers(256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()


def every_kind():
    """An array for every dtype and every shape."""
    return {
        f"{dtype}/{name}": random_bits(shape, dtype)
        for dtype in DTYPES
        for name, shape in SHAPES.items()
    }


def a_few():
    kinds = {"head/kernel": ((3, 2), "float32"), "é": ((), "int64"), "none": ((0, 2), "float16")}
    kinds["head/bias"] = ((2,), BFLOAT16)
    return {name: random_bits(shape, np.dtype(dtype)) for name, (shape, dtype) in kinds.items()}


def same(read, expected):
    """Shape, dtype and bits."""
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
    """The file holds exactly these arrays, and this metadata."""
    read = read_all(path)
    assert read[0].keys() == arrays.keys()
    assert [name for name, array in arrays.items() if not same(read[0][name], array)] == []
    assert read[1] == metadata


def npy(header, data=b"", version=1, length=None):
    """A `.npy` file with any header."""
    text = header if isinstance(header, bytes) else header.encode()
    length = len(text) if length is None else length

    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", length)
        + text
        + data
    )


def numbers(values, **options):
    """A `.npy` file as NumPy writes it."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(values), **options)

    return stream.getvalue()


def archive(members, method=zipfile.ZIP_STORED, comment=b""):
    """A ZIP archive of (name, content), in order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.comment = comment
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name), content, method)

    return stream.getvalue()


def refused(path, content):
    """The message with which a file is refused, at the latest when its arrays are read."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_all(path)

    return str(caught.value)
