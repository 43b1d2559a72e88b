"""Arrays to bytes and back, bit for bit: the number types that files hold, and the order of bytes and dimensions."""

from typing import IO, Literal

import ml_dtypes
import numpy as np

from vit_jax.weights.formats.arrays import StoredArray, check_name
from vit_jax.weights.formats.failures import DAMAGED, shown

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (
    *map(np.dtype, ("float16", "float32", "float64", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64", "bool")),
    BFLOAT16,
)
CHUNK_BYTES = 2**20


def read_bytes(stream: IO[bytes], num_bytes: int) -> np.ndarray:
    """Reads exactly so many bytes as uint8 (num_bytes,).

    Raises:
      ValueError: the stream ends early.
    """
    data = np.empty(num_bytes, np.uint8)
    view = data.data
    for start in range(0, num_bytes, CHUNK_BYTES):
        part = view[start : start + CHUNK_BYTES]
        count = stream.readinto(part)  # type: ignore[attr-defined]  # every binary stream has it
        if count != len(part):
            raise ValueError(f"it ends after {start + count:,} of {num_bytes:,} bytes. {DAMAGED}")
    return data


def to_array(
    data: np.ndarray, array: StoredArray, *, byte_order: Literal["<", ">"] = "<", order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """Gives bytes their meaning.

    Args:
      data: uint8 (array.num_bytes,).
      array: what they are.
      byte_order: of the bytes: "<" for the lowest first.
      order: of the numbers: "C" for the last dimension running fastest, "F" for the first.

    Returns:
      An array in C order and the machine's byte order.

    Raises:
      ValueError: a truth value is neither 0 nor 1.
    """
    if array.dtype == np.bool_ and data.max(initial=0) > 1:
        raise ValueError(f"a truth value in it is {data.max()}, not 0 or 1. {DAMAGED}")
    stored = data.view(array.dtype.newbyteorder(byte_order)).reshape(array.shape, order=order)
    return stored.astype(array.dtype, order="C", copy=False)


def to_bytes(array: np.ndarray) -> memoryview:
    """The numbers of an array as they are stored in C order with the lowest byte first."""
    return little_endian(array).reshape(-1).view(np.uint8).data


def little_endian(array: np.ndarray) -> np.ndarray:
    """The array in C order with the lowest byte first; itself if it is so already."""
    return array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)


def describe(name: str, array: np.ndarray) -> StoredArray:
    """What a file will announce.

    Raises:
      ValueError: a name or a dtype that files do not hold.
    """
    check_name(name)
    dtype = array.dtype.newbyteorder("=")
    if dtype not in DTYPES:
        raise ValueError(f"array {shown(name)} is of dtype {array.dtype}, which cannot be written. {allowed_dtypes()}")
    return StoredArray(array.shape, dtype)


def allowed_dtypes() -> str:
    """A sentence for errors."""
    return f"Allowed: {', '.join(str(dtype) for dtype in DTYPES)}."
