"""One array in NumPy's `.npy` format, versions 1 to 3, as it lies inside an `.npz` archive.

The header is a Python literal. NumPy evaluates it; here it is held to the few forms that a plain array needs,
so that nothing an attacker nests, repeats or names gets as far as a Python parser or `numpy.dtype`.
"""

import dataclasses
import re
import struct
from typing import IO, Literal

import numpy as np

from vit_jax.weights.formats.arrays import StoredArray
from vit_jax.weights.formats.encoding import (
    BFLOAT16,
    DTYPES,
    allowed_dtypes,
    little_endian,
    read_bytes,
    to_array,
)
from vit_jax.weights.formats.failures import DAMAGED, shown

MAX_HEADER_BYTES = 64 * 2**10
_MAGIC = b"\x93NUMPY"
_LENGTHS = {1: "<H", 2: "<I", 3: "<I"}
_KEYS = {"descr", "fortran_order", "shape"}
_ENTRY = re.compile(
    r"""\s*(?P<quote>['"])(?P<key>[a-z_]+)(?P=quote)\s*:\s*"""
    r"""(?:(?P<quote2>['"])(?P<text>[^'"\\]*)(?P=quote2)|(?P<truth>True|False)|\((?P<sizes>[^()]*)\))\s*(?:,|$)""",
    re.ASCII,
)
_SIZE = re.compile(r"\s*(-?(?:0|[1-9][0-9]{0,18}))L?\s*", re.ASCII)  # Python 2 wrote 3L
# Two bytes of no kind are how NumPy writes a bfloat16, which it does not know.
_CODES = {f"{dtype.kind}{dtype.itemsize}": dtype for dtype in DTYPES if dtype != BFLOAT16}
_BFLOAT16_CODES = ("|V2", "<V2", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Header:
    """What precedes the data.

    Attributes:
      array: shape and dtype.
      byte_order: of the data: "<" for the lowest byte first.
      fortran_order: whether the first dimension runs fastest.
      num_bytes: from the start of the file to the data.
    """

    array: StoredArray
    byte_order: Literal["<", ">"]
    fortran_order: bool
    num_bytes: int


def read_header(stream: IO[bytes]) -> Header:
    """Reads up to where the data begins.

    Raises:
      ValueError: this is no array, or not of a type that weights have.
    """
    start = stream.read(8)
    if start[:6] != _MAGIC or len(start) < 8:
        raise ValueError(f"it does not start as an array does. {DAMAGED}")
    if (version := start[6]) not in _LENGTHS:
        raise ValueError(f"it is of version {version} of the .npy format; versions 1, 2 and 3 are read.")
    length_format = _LENGTHS[version]
    (length,) = struct.unpack(length_format, stream.read(struct.calcsize(length_format)))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header takes {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read.")
    text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"its header ends early. {DAMAGED}")
    fields = _fields(text.decode("ascii"))
    dtype, byte_order = _dtype(fields["descr"]["text"])
    return Header(
        array=StoredArray(_shape(fields["shape"]["sizes"]), dtype),
        byte_order=byte_order,
        fortran_order=_required(fields["fortran_order"]["truth"]) == "True",
        num_bytes=8 + struct.calcsize(length_format) + length,
    )


def read_data(stream: IO[bytes], header: Header) -> np.ndarray:
    """The array, from a stream that has given its header.

    Raises:
      ValueError: the stream ends early.
    """
    data = read_bytes(stream, header.array.num_bytes)
    return to_array(data, header.array, byte_order=header.byte_order, order="F" if header.fortran_order else "C")


def write(stream: IO[bytes], array: np.ndarray) -> None:
    """Writes an array of one of `encoding.DTYPES`."""
    plain = little_endian(array)
    plain = plain.view("V2") if plain.dtype == BFLOAT16 else plain
    np.lib.format.write_array(stream, plain, version=(1, 0), allow_pickle=False)


def _fields(text: str) -> dict[str, re.Match[str]]:
    text = text.strip(" \n")
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError(f"its header is not a dictionary: {shown(text)}. {DAMAGED}")
    body = text[1:-1].rstrip(" \n")
    found: dict[str, re.Match[str]] = {}
    position = 0
    while position < len(body):
        entry = _ENTRY.match(body, position)
        if not entry or entry["key"] in found:
            raise ValueError(f"its header is not that of a plain array of numbers, from {shown(body[position:])} on.")
        found[entry["key"]] = entry
        position = entry.end()
    if found.keys() != _KEYS:
        raise ValueError(f"its header has the keys {sorted(found)}, not {sorted(_KEYS)}. {DAMAGED}")
    return found


def _dtype(code: str | None) -> tuple[np.dtype, Literal["<", ">"]]:
    code = _required(code)
    if code in _BFLOAT16_CODES:
        return BFLOAT16, "<"
    dtype = _CODES.get(code[1:])
    if dtype is None or code[0] not in ("<>" if dtype.itemsize > 1 else "<>|"):
        raise ValueError(f"it is of type {shown(code)}, which is not read. {allowed_dtypes()}")
    return dtype, ">" if code[0] == ">" else "<"


def _shape(text: str | None) -> tuple[int, ...]:
    *sizes, last = _required(text).split(",")
    if last.strip():
        if not sizes:
            raise ValueError(f"its shape {shown(last)} is not a tuple. {DAMAGED}")
        sizes.append(last)
    matches = [_SIZE.fullmatch(size) for size in sizes]
    if not all(matches):
        raise ValueError(f"its shape {shown(_required(text))} is not one of whole numbers. {DAMAGED}")
    return tuple(int(match[1]) for match in matches if match)


def _required(value: str | None) -> str:
    if value is None:
        raise ValueError(f"its header has a value of the wrong kind. {DAMAGED}")
    return value
