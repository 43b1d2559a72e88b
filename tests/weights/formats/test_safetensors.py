"""Files for and from the safetensors library, and headers that lie."""

import json
import re
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from tests.weights.formats.samples import METADATA, a_few, every_kind, read_all, same
from vit_jax.weights.formats import open_arrays, write_safetensors

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = struct.pack("<2f", 1, 2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def tensors(header, data=DATA, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_all(path)
    return str(caught.value)


# The library.


def test_the_library_reads_what_we_write(path):
    library = pytest.importorskip("safetensors", reason="the library is the reference")
    arrays = every_kind()
    write_safetensors(path, arrays, METADATA)
    with library.safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(arrays)
        assert all(same(file.get_tensor(name), array) for name, array in arrays.items())
        texts = file.metadata()
    assert texts["format"] == "pt"
    assert json.loads(texts["vit_jax"]) == METADATA
    assert texts.keys() == {"format", "vit_jax"}


def test_we_read_what_the_library_writes(path):
    library = pytest.importorskip("safetensors.numpy", reason="the library is the reference")
    arrays = every_kind()
    library.save_file(arrays, path, metadata={"format": "pt", "source": "elsewhere"})
    with open_arrays(path) as file:
        assert file.arrays.keys() == arrays.keys()
        assert all(same(file.read(name), array) for name, array in arrays.items())
        assert file.metadata == {}


def test_every_array_starts_at_a_multiple_of_its_item_size(path):
    write_safetensors(path, a_few(), METADATA)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    del header["__metadata__"]
    for name, entry in header.items():
        assert entry["data_offsets"][0] % a_few()[name].dtype.itemsize == 0


def test_metadata_is_a_text_of_ours_beside_the_format(path):
    write_safetensors(path, {}, {"b": 1, "a": [2]})
    with open_arrays(path) as file:
        assert file.metadata == {"a": [2], "b": 1}
    assert b'"format":"pt"' in path.read_bytes()
    assert b'"vit_jax":"{\\"a\\":[2],\\"b\\":1}"' in path.read_bytes()


def test_long_metadata_is_no_matter(path):
    metadata = {"class_names": [f"class {number}" for number in range(21_843)]}
    write_safetensors(path, {"x": np.zeros(2)}, metadata)
    assert read_all(path)[1] == metadata


# Headers.


@pytest.mark.parametrize(
    "header",
    [
        {"x": ENTRY},
        {"__metadata__": {}, "x": ENTRY},
        json.dumps({"x": ENTRY}).encode() + b"   ",
        {
            "b": {"dtype": "U8", "shape": [7], "data_offsets": [1, 8]},
            "a": {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]},
        },
        {"x": ENTRY, "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]}},
        {"x": ENTRY, "none": {"dtype": "F32", "shape": [3, 0], "data_offsets": [0, 0]}},
    ],
    ids=range(6),
)
def test_proper_headers(path, header):
    path.write_bytes(tensors(header))
    arrays, _ = read_all(path)
    assert b"".join(arrays[name].tobytes() for name in sorted(arrays)) == DATA


def test_an_array_at_an_odd_place(path):
    first = {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}
    path.write_bytes(tensors({"a": first, "b": {**ENTRY, "data_offsets": [1, 9]}}, b"\x07" + DATA))
    arrays, _ = read_all(path)
    assert arrays["b"].tolist() == [1, 2]
    assert arrays["b"].flags.aligned


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "F8_E4M3"}, "of type 'F8_E4M3', which is not read. Allowed: F16, F32"),
        ({"dtype": "F4"}, "is not read"),
        ({"dtype": "C64"}, "is not read"),
        ({"dtype": "f32"}, "is not read"),
        ({"dtype": ["F32"]}, "is not read"),
        ({"dtype": None}, "is not read"),
        ({"shape": [3]}, "takes 12 bytes, and it has 8"),
        ({"shape": []}, "takes 4 bytes, and it has 8"),
        ({"shape": [10**12]}, "takes 4,000,000,000,000 bytes, and it has 8"),
        ({"shape": [2**62, 2**62]}, "more than any memory"),
        ({"shape": [0, 2**62, 2**62]}, "more than any memory"),
        ({"shape": [10**4000]}, "whole numbers"),
        ({"shape": [-2]}, "whole numbers"),
        ({"shape": [2.0]}, "whole numbers"),
        ({"shape": [True, 2]}, "whole numbers"),
        ({"shape": 2}, "whole numbers"),
        ({"shape": [1] * 65}, "at most 64"),
        ({"data_offsets": [0, 4]}, "and it has 4"),
        ({"data_offsets": [8, 0]}, "and it has -8"),
        ({"data_offsets": [-8, 0]}, "whole numbers"),
        ({"data_offsets": [0]}, "whole numbers"),
        ({"data_offsets": [0, 8, 8]}, "whole numbers"),
        ({"data_offsets": None}, "whole numbers"),
        ({"data_offsets": [8, 16]}, "it starts at byte 8"),
        ({"shape": [10**11], "data_offsets": [0, 4 * 10**11]}, "take 400,000,000,000 bytes and the file has 8"),
        ({"more": 1}, "must have data_offsets, dtype, shape"),
    ],
)
def test_lying_entries_are_refused_and_take_no_memory(path, changes, reason):
    content = tensors({"a/b": {**ENTRY, **changes}})
    tracemalloc.start()
    try:
        message = refused(path, content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert reason in message
    assert len(message) < 600
    assert "array 'a/b'" in message or "its arrays" in message


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"x": ENTRY, "y": ENTRY}, "array 'y': it starts at byte 0 of the data, and what is before it ends at 8"),
        ({"x": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}}, "take 4 bytes and the file has 8"),
        ({}, "take 0 bytes and the file has 8"),
        ({"x": ENTRY, "y": {**ENTRY, "data_offsets": [4, 12]}}, "it starts at byte 4"),
        ({"x": 3}, "and nothing else"),
        ({"x": {}}, "and nothing else"),
        ({"__metadata__": {"a": 1}, "x": ENTRY}, "not texts under names"),
        ({"__metadata__": ["a"], "x": ENTRY}, "not texts under names"),
        ({"__metadata__": {"a": "\ud800"}, "x": ENTRY}, "surrogates"),
        ({"__metadata__": {"\ud800": "a"}, "x": ENTRY}, "surrogates"),
        ({"__metadata__": {"vit_jax": "[]"}, "x": ENTRY}, "not an object"),
        ({"__metadata__": {"vit_jax": "{"}, "x": ENTRY}, "Expecting"),
        ({"../x": ENTRY}, "is not allowed"),
        ({"x\u202ey": ENTRY}, "is not allowed"),
        (b'{"x": 1, "x": 2}', "'x' stands twice"),
        (b'{"x": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "'dtype' stands twice"),
        (b'{"x": NaN}', "NaN"),
        (b'{"x": ', "Expecting"),
        (b'{"\xff": 1}', "utf-8"),
        (b'{"x":' + b"[" * 200_000, "damaged"),
        (b'{"x": [' + b"9" * 5000 + b"]}", "digits"),
    ],
    ids=range(21),
)
def test_lying_headers_are_refused(path, header, reason):
    message = refused(path, tensors(header))
    assert reason in message
    assert len(message) < 600


@pytest.mark.parametrize("length", [1000, 2**24, 2**24 + 1, 2**39])
def test_a_lying_header_length_is_refused_and_takes_no_memory(path, length):
    content = tensors({"x": ENTRY}, length=length)
    tracemalloc.start()
    try:
        assert f"its header claims {length:,} bytes" in refused(path, content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_that_is_too_long_is_refused_unread(path):
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 20 * 2**20) + b"{")
        file.truncate(30 * 2**20)
    with pytest.raises(ValueError, match="its header claims 20,971,520 bytes"):
        open_arrays(path)


def test_truth_is_0_or_1(path):
    content = tensors({"x": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\x00\x03")
    assert "array 'x': a truth value in it is 3" in refused(path, content)


def test_every_truncation_is_refused(path):
    write_safetensors(path, a_few(), METADATA)
    content = path.read_bytes()
    for size in range(len(content)):
        refused(path, content[:size])
    refused(path, content + b"\0")


def test_a_file_that_shrinks_under_the_reader(path):
    write_safetensors(path, {"x": np.zeros(100_000, ml_dtypes.bfloat16)}, {})
    with open_arrays(path) as file:
        with open(path, "r+b") as other:
            other.truncate(50_000)
        with pytest.raises(ValueError, match=r"array 'x': it ends after [\d,]+ of 200,000 bytes"):
            file.read("x")


def test_the_name_of_the_metadata_is_taken(path):
    with pytest.raises(ValueError, match="cannot be the name of an array"):
        write_safetensors(path, {"__metadata__": np.zeros(2)}, {})
