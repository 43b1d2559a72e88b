"""Arrays are read back bit for bit in both formats; impossible ones are rejected before writing."""

import contextlib
import importlib.metadata
import json
import os
import re
import struct
import tarfile

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.weights.formats.samples import (
    METADATA,
    assert_read,
    is_same,
    list_every_kind,
    read_all,
    read_rejection,
    read_rejection_with_little_memory,
    write_npy,
)
from vit_jax.weights import formats
from vit_jax.weights.formats import open_arrays, write_npz, write_safetensors

ENDLESS: dict = {}
ENDLESS["x"] = ENDLESS
ENTRY = {
    "dtype": "F32",
    "shape": [2],
    "data_offsets": [0, 8],
}


@pytest.fixture(
    params=[write_npz, write_safetensors],
    ids=["npz", "safetensors"],
)
def write(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


@pytest.mark.parametrize(
    "suffix",
    [
        "",
        ".npz",
        ".safetensors",
        ".bin",
    ],
)
def test_every_dtype_and_shape_with_any_suffix(write, tmp_path, suffix):
    arrays = list_every_kind()
    path = f"{tmp_path}/weights{suffix}"

    write(path, arrays, METADATA)

    assert_read(path, arrays, METADATA)
    # Shapes and dtypes are known before data is read.
    with open_arrays(path) as file:
        for name, stored in file.arrays.items():
            assert stored == (arrays[name].shape, arrays[name].dtype)


def test_arrays_outlive_the_file_and_may_be_changed(write, path):
    write(path, {"x": np.arange(3.0)}, {})
    with open_arrays(path) as file:
        x = file.read("x")
        message = r"weights: there is no array 'y' among its 1"

        with pytest.raises(ValueError, match=message):
            file.read("y")

    x += 1
    assert x.tolist() == [1, 2, 3]
    arrays, _ = read_all(path)
    assert arrays["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="weights"):
        file.read("x")


def test_neither_order_nor_layout_nor_time_changes_the_bytes(
    write,
    path,
    monkeypatch,
):
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    write(
        path,
        {
            "b": table,
            "a": np.float32(1).reshape(()),
        },
        {"x": 1, "y": 2},
    )
    first = path.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)

    for layout in (
        np.asfortranarray(table),
        table.astype(">f4"),
        np.repeat(table, 2, axis=1)[:, ::2],
    ):
        write(
            path,
            {
                "a": np.array(1, ">f4"),
                "b": layout,
            },
            {"y": 2, "x": 1},
        )
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
DTYPES = (
    object,
    "U4",
    [("x", "f4")],
    "V2",
    "complex64",
    np.longdouble,
)
NOT_JSON = (
    {"x": object()},
    {"x": float("nan")},
    {1: 2, "a": 3},
    {"x": "a" * 5_000_000},
    ENDLESS,
)
WRONG_DTYPE = r"array 'x' is of dtype .* cannot be written\. Allowed: float16"


def list_cases():
    """Return arrays and metadata that cannot be written, with the reason."""
    cases = []
    for name in NAMES:
        arrays = {name: np.zeros(2)}
        cases.append((arrays, {}, "the array name .* is not allowed"))
    for dtype in DTYPES:
        arrays = {
            "fine": np.zeros(2),
            "x": np.zeros(2, dtype),
        }
        cases.append((arrays, {}, WRONG_DTYPE))
    for metadata in NOT_JSON:
        arrays = {"x": np.zeros(2)}
        cases.append((arrays, metadata, "metadata "))
    return cases


CASES = list_cases()


@pytest.mark.parametrize(
    ("arrays", "metadata", "words"),
    CASES,
    ids=range(len(CASES)),
)
def test_arrays_that_cannot_be_written_are_rejected_before_a_file_is_touched(
    write,
    path,
    arrays,
    metadata,
    words,
):
    with pytest.raises(ValueError, match=f"weights: {words}"):
        write(path, arrays, metadata)

    assert not path.exists()


def test_the_name_of_the_metadata_is_rejected_before_a_file_is_touched(path):
    message = "cannot be the name of an array"

    with pytest.raises(ValueError, match=message):
        write_safetensors(path, {"__metadata__": np.zeros(2)}, {})

    assert not path.exists()


def set_memory(monkeypatch, page_size):
    values = {"SC_PAGE_SIZE": page_size, "SC_PHYS_PAGES": 3000}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)


def test_a_write_that_fails_leaves_everything_as_it_was(write, path):
    path.mkdir()
    with pytest.raises(ValueError, match="weights cannot be written"):
        write(path, {"x": np.zeros(2)}, {})

    assert os.listdir(path.parent) == ["weights"]


def test_more_than_the_memory_is_rejected(write, path, monkeypatch):
    write(
        path,
        {
            "x": np.zeros((1000, 1000)),
            "y": np.zeros((500, 1000)),
        },
        {},
    )
    message = r"weights: its arrays take 0\.0 GB and there are 0\.0 GB of memory"

    set_memory(monkeypatch, 4000)
    arrays, _ = read_all(path)
    assert arrays["x"].shape == (1000, 1000)

    set_memory(monkeypatch, 3999)
    with pytest.raises(ValueError, match=message):
        read_all(path)


# safetensors: the checks of the library, and further ones.


def tensors(header, data=b"12345678"):
    text = header
    if not isinstance(header, bytes):
        text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_the_library_reads_files_of_vit_jax(path):
    arrays = list_every_kind()

    write_safetensors(path, arrays, METADATA)

    with safe_open(path, framework="numpy") as file:
        texts = file.metadata()
        for name, array in arrays.items():
            assert is_same(file.get_tensor(name), array), name
    digests = json.loads(texts["vit_jax_sha256"])

    assert texts.keys() == {"format", "vit_jax", "vit_jax_sha256"}
    assert digests.keys() == {*arrays, "__metadata__"}
    assert texts["format"] == "pt"
    assert json.loads(texts["vit_jax"]) == METADATA


def test_files_of_the_library_are_read(path):
    arrays = list_every_kind()

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
            {
                "none": {**ENTRY, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]},
                "x": ENTRY,
            },
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
def test_lying_headers_are_rejected_and_take_no_memory(
    tmp_path,
    header,
    reason,
):
    message = read_rejection_with_little_memory(tmp_path / "x.safetensors", tensors(header))

    assert reason in message
    assert len(message) < 1000


def test_truncations_are_rejected(path):
    write_safetensors(path, {"x": np.zeros(1000), "y": np.zeros(2)}, METADATA)
    content = path.read_bytes()

    for size in (*range(0, len(content), 501), len(content) - 1):
        read_rejection(path, content[:size])
    read_rejection(path, content + b"\0")


def test_a_file_that_shrinks_under_the_reader(path):
    write_safetensors(path, {"x": np.zeros(1000), "y": np.zeros(2)}, METADATA)
    size = path.stat().st_size

    with open_arrays(path) as file:
        with open(path, "r+b") as other:
            other.truncate(size // 2)

        with pytest.raises(ValueError, match="weights: array 'x': "):
            file.read("x")


def test_a_changed_bit_is_noticed_or_changes_nothing(path):
    """Unnoticed bits are in the padding of the header, and the names of "format" and of digests."""
    arrays = {
        "head/kernel": np.arange(4, dtype=np.float32),
        "mask": np.ones((2, 3), bool),
    }
    write_safetensors(path, arrays, METADATA)
    content = path.read_bytes()
    unnoticed = 0

    for index in range(len(content)):
        changed = bytearray(content)
        changed[index] ^= 1
        path.write_bytes(changed)

        with contextlib.suppress(ValueError):
            assert_read(path, arrays, METADATA)
            unnoticed += 1

    assert unnoticed < 40


def test_other_bytes_than_were_written_are_rejected_with_the_name_of_the_array(write, path):
    write(
        path,
        {
            "head/kernel": np.arange(4, dtype=np.float32),
            "x": np.ones(3),
        },
        METADATA,
    )
    content = path.read_bytes()
    changed = content.replace(
        np.float32(3).tobytes(),
        np.float32(2).tobytes(),
    )
    one_line = rf"{path}: (array|member) 'head/kernel(\.npy)?': .* fetch it again\."

    message = read_rejection(path, changed)

    assert changed != content
    assert re.fullmatch(one_line, message)


def test_more_arrays_than_any_network_has_are_rejected_before_their_headers_are_read(
    write,
    path,
    monkeypatch,
):
    many = {f"a/{number}": np.zeros(1) for number in range(30)}
    write(path, many)
    monkeypatch.setattr(formats.stored, "MAX_ARRAYS", 29)
    message = "weights: 30 arrays are more than the 29 allowed"

    with pytest.raises(ValueError, match=message):
        write(path, many)

    monkeypatch.setattr(np.lib.format, "read_magic", None)
    assert "30 arrays are more than the 29 allowed" in read_rejection(path, path.read_bytes())


# Kinds of files.


@pytest.mark.parametrize("length", [0x0280, 0x8B1F, 0x7B, 0x3C])
def test_a_header_length_that_looks_like_another_format(tmp_path, length):
    path = tmp_path / "x.safetensors"
    header = b'{"__metadata__":{}}'.ljust(length)
    path.write_bytes(length.to_bytes(8, "little") + header)

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
        (write_npy([1, 2]), "one array (.npy)"),
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
    message = r"^\S*weights\.npz: this is .*\.npz and \.safetensors\.$"

    with pytest.raises(ValueError, match=message) as caught:
        read_all(path)

    assert kind in str(caught.value)


def test_a_library_that_is_too_old_is_no_damaged_file(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    write_safetensors(path, {"kernel": np.zeros(3, np.float32)})

    def open_as_version_0_7(path, framework, device="cpu"):
        raise AssertionError("this version has no argument backend")

    monkeypatch.setattr(formats.safetensors, "safe_open", open_as_version_0_7)
    requirements = ["safetensors>=0.8.0"]
    metadata = importlib.metadata
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.0")

    message = r"weights\.safetensors: it cannot be read: safetensors 0\.7\.0 is installed: pip "
    with pytest.raises(ValueError, match=message) as caught:
        read_all(path)
    assert "damaged" not in str(caught.value)


def test_paths_of_no_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    message = "missing: there is no such file"

    with pytest.raises(ValueError, match=message):
        read_all(tmp_path / "missing")
    with pytest.raises(ValueError, match="this is a folder"):
        read_all(tmp_path)
    with pytest.raises(ValueError, match="this is a device or a pipe"):
        read_all(tmp_path / "pipe")
    with pytest.raises(ValueError, match="loop"):
        read_all(tmp_path / "loop")


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch):
    (tmp_path / "forbidden").touch()
    monkeypatch.setattr(os, "open", lambda *_, **__: os.listdir("/nowhere"))
    message = r"forbidden: No such file or directory\.$"

    with pytest.raises(ValueError, match=message):
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
