"""What is written is read back bit for bit, in both formats; what cannot be is refused before a file is touched."""

import contextlib
import json
import os
import re
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.weights.formats.samples import (
    METADATA,
    assert_read,
    every_kind,
    numbers,
    read_all,
    refused,
    same,
)
from vit_jax.weights import formats
from vit_jax.weights.formats import open_arrays, write_npz, write_safetensors

ENDLESS: dict = {}
ENDLESS["x"] = ENDLESS
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture(params=[write_npz, write_safetensors], ids=["npz", "safetensors"])
def write(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


@pytest.mark.parametrize("suffix", ["", ".npz", ".safetensors", ".bin"])
def test_every_dtype_and_shape_whatever_the_suffix(write, tmp_path, suffix):
    arrays = every_kind()
    path = f"{tmp_path}/weights{suffix}"
    write(path, arrays, METADATA)

    assert_read(path, arrays, METADATA)

    with open_arrays(path) as file:  # known before data is read
        assert all(
            stored == (arrays[name].shape, arrays[name].dtype)
            for name, stored in file.arrays.items()
        )


def test_arrays_outlive_the_file_and_may_be_changed(write, path):
    write(path, {"x": np.arange(3.0)}, {})
    with open_arrays(path) as file:
        x = file.read("x")
        with pytest.raises(ValueError, match=r"weights: there is no array 'y' among its 1"):
            file.read("y")

    x += 1
    assert x.tolist() == [1, 2, 3]
    assert read_all(path)[0]["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="weights"):
        file.read("x")


def test_neither_order_nor_layout_nor_time_changes_the_bytes(write, path, monkeypatch):
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    write(path, {"b": table, "a": np.float32(1).reshape(())}, {"x": 1, "y": 2})
    first = path.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)

    for layout in (
        np.asfortranarray(table),
        table.astype(">f4"),
        np.repeat(table, 2, axis=1)[:, ::2],
    ):
        write(path, {"a": np.array(1, ">f4"), "b": layout}, {"y": 2, "x": 1})
        assert path.read_bytes() == first


NAMES = (
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/..",
    "./a",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\ud800",
    "a" * 1025,
)
DTYPES = (object, "U4", [("x", "f4")], "V2", "complex64", np.longdouble)
NOT_JSON = ({"x": object()}, {"x": float("nan")}, {1: 2, "a": 3}, {"x": "a" * 5_000_000}, ENDLESS)
WRONG_DTYPE = r"array 'x' is of dtype .* cannot be written\. Allowed: float16"
CASES = [
    *(({name: np.zeros(2)}, {}, "the array name .* is not allowed") for name in NAMES),
    *(({"fine": np.zeros(2), "x": np.zeros(2, dtype)}, {}, WRONG_DTYPE) for dtype in DTYPES),
    *(({"x": np.zeros(2)}, metadata, "metadata ") for metadata in NOT_JSON),
]


@pytest.mark.parametrize(("arrays", "metadata", "words"), CASES, ids=range(len(CASES)))
def test_what_cannot_be_written_is_refused_before_a_file_is_touched(
    write, path, arrays, metadata, words
):
    with pytest.raises(ValueError, match=f"weights: {words}"):
        write(path, arrays, metadata)

    with pytest.raises(ValueError, match="cannot be the name of an array"):
        write_safetensors(path, {"__metadata__": np.zeros(2)}, {})

    assert not path.exists()


def test_a_write_that_fails_leaves_everything_as_it_was(write, path):
    path.mkdir()
    with pytest.raises(ValueError, match="weights cannot be written"):
        write(path, {"x": np.zeros(2)}, {})

    assert os.listdir(path.parent) == ["weights"]


def test_more_than_the_memory_is_refused(write, path, monkeypatch):
    write(path, {"x": np.zeros((1000, 1000)), "y": np.zeros((500, 1000))}, {})
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4000, "SC_PHYS_PAGES": 3000}.__getitem__)

    assert read_all(path)[0]["x"].shape == (1000, 1000)

    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 3999, "SC_PHYS_PAGES": 3000}.__getitem__)
    with pytest.raises(
        ValueError, match=r"weights: its arrays take 0\.0 GB and there are 0\.0 GB of memory"
    ):
        read_all(path)


# safetensors: what the library does for us, and what we add.


def tensors(header, data=b"12345678"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_the_library_reads_what_we_write_and_we_what_it_writes(path):
    arrays = every_kind()
    write_safetensors(path, arrays, METADATA)

    with safe_open(path, framework="numpy") as file:
        assert all(same(file.get_tensor(name), array) for name, array in arrays.items())
        texts = file.metadata()

    assert texts.keys() == {"format", "vit_jax", "vit_jax_sha256"}
    assert json.loads(texts["vit_jax_sha256"]).keys() == {*arrays, "__metadata__"}
    assert (texts["format"], json.loads(texts["vit_jax"])) == ("pt", METADATA)

    save_file(arrays, path, metadata={"format": "pt", "source": "elsewhere"})
    assert_read(path, arrays, {})


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (
            {"x": {**ENTRY, "dtype": "F8_E4M3", "shape": [8]}},
            "of type 'F8_E4M3', which is not read. Allowed: float16",
        ),
        ({"x": {**ENTRY, "shape": [10**12]}}, "invalid shape, data type, or offset"),
        ({"x": {**ENTRY, "shape": [2**62, 2**62]}}, "overflow"),
        ({"x": {**ENTRY, "data_offsets": [8, 16]}}, "damaged"),
        ({"x": ENTRY, "y": ENTRY}, "damaged"),
        (
            {"none": {**ENTRY, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "x": ENTRY},
            "array is too big",
        ),
        ({}, "damaged"),
        ({"__metadata__": {"a": 1}, "x": ENTRY}, "damaged"),
        ({"__metadata__": {"vit_jax": "[]"}, "x": ENTRY}, "not an object"),
        ({"../x": ENTRY}, "is not allowed"),
        (b'{"x":' + b"[" * 200_000, "damaged"),
    ],
    ids=range(11),
)
def test_lying_headers_are_refused_and_take_no_memory(tmp_path, header, reason):
    tracemalloc.start()
    try:
        message = refused(tmp_path / "x.safetensors", tensors(header))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()

    assert reason in message
    assert len(message) < 1000


def test_truncations_and_shrinking_under_the_reader(path):
    write_safetensors(path, {"x": np.zeros(1000), "y": np.zeros(2)}, METADATA)
    content = path.read_bytes()

    for size in (*range(0, len(content), 501), len(content) - 1):
        refused(path, content[:size])

    refused(path, content + b"\0")
    path.write_bytes(content)

    with open_arrays(path) as file:
        with open(path, "r+b") as other:
            other.truncate(len(content) // 2)

        with pytest.raises(ValueError, match="weights: array 'x': "):
            file.read("x")


def test_a_changed_bit_is_noticed_or_changes_nothing(path):
    arrays = {"head/kernel": np.arange(4, dtype=np.float32), "mask": np.ones((2, 3), bool)}
    write_safetensors(path, arrays, METADATA)
    content = path.read_bytes()
    read = []

    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)

        with contextlib.suppress(ValueError):
            assert_read(path, arrays, METADATA)
            read.append(at)

    assert len(read) < 40  # the padding of the header, and the names of "format" and of the digests


def test_other_bytes_than_were_written_are_refused_with_the_name_of_the_array(write, path):
    write(path, {"head/kernel": np.arange(4, dtype=np.float32), "x": np.ones(3)}, METADATA)
    content = path.read_bytes()
    changed = content.replace(np.float32(3).tobytes(), np.float32(2).tobytes())

    assert changed != content

    message = refused(path, changed)
    assert re.fullmatch(
        rf"{path}: (array|member) 'head/kernel(\.npy)?': .* fetch it again\.",
        message,
    )  # one line


def test_more_arrays_than_any_network_has_are_refused_before_their_headers_are_read(
    write, path, monkeypatch
):
    many = {f"a/{number}": np.zeros(1) for number in range(30)}
    write(path, many)
    monkeypatch.setattr(formats.stored, "MAX_ARRAYS", 29)

    with pytest.raises(ValueError, match="weights: 30 arrays are more than the 29 allowed"):
        write(path, many)

    monkeypatch.setattr(np.lib.format, "read_magic", None)
    assert "30 arrays are more than the 29 allowed" in refused(path, path.read_bytes())


# What is in a file.


@pytest.mark.parametrize("length", [0x0280, 0x8B1F, 0x7B, 0x3C])
def test_a_header_length_that_looks_like_another_format(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"__metadata__":{}}'.ljust(length))

    with open_arrays(path) as file:
        assert file.arrays == {}


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 40, "HDF5"),
        (numbers([1, 2]), "one array (.npy)"),
        (b"\x81\xa6params\x82", "msgpack"),
        (b"\x1f\x8b\x08\0", "compressed. Unpack"),
        (tarfile.TarInfo("data.pkl").tobuf(), "a tar archive"),
        (b'{"metadata": {}, "weight_map": {}}', "JSON text"),
        (b"GGUF\3\0\0\0", "of no known format: it starts with b'GGUF"),
    ],
)
def test_other_files_are_named(tmp_path, content, kind):
    path = tmp_path / "weights.npz"
    path.write_bytes(content)

    with pytest.raises(
        ValueError, match=r"^\S*weights\.npz: this is .*\.npz and \.safetensors\.$"
    ) as caught:
        read_all(path)

    assert kind in str(caught.value)


def test_places_that_are_no_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="missing: there is no such file"):
        read_all(tmp_path / "missing")

    with pytest.raises(ValueError, match="this is a folder"):
        read_all(tmp_path)

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="this is a device or a pipe"):
        read_all(tmp_path / "pipe")

    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="loop"):
        read_all(tmp_path / "loop")

    (tmp_path / "forbidden").touch()
    monkeypatch.setattr(os, "open", lambda *_, **__: os.listdir("/nowhere"))

    with pytest.raises(ValueError, match=r"forbidden: No such file or directory\.$"):
        read_all(tmp_path / "forbidden")


@pytest.mark.parametrize(
    "checkpoint",
    ["model.ckpt-9", "model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "."],
)
def test_tensorflow_checkpoints_are_named(tmp_path, checkpoint):
    for name in ("model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "checkpoint"):
        (tmp_path / name).write_bytes(b"\0\1\2")

    with pytest.raises(ValueError, match="a TensorFlow checkpoint"):
        read_all(tmp_path / checkpoint)
