"""What is written is read back bit for bit, in both formats; what cannot be is refused before a file is touched."""

import io
import json
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.weights.formats.samples import METADATA, a_few, archive, every_kind, numbers, read_all, refused, same
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


def test_every_dtype_and_shape(write, path):
    arrays = every_kind()
    write(path, arrays, METADATA)
    found, metadata = read_all(path)
    assert found.keys() == arrays.keys()
    assert [name for name in arrays if not same(found[name], arrays[name])] == []
    assert metadata == METADATA


def test_headers_are_known_before_data_is_read(write, path):
    arrays = a_few()
    write(path, arrays, {})
    with open_arrays(path) as file:
        assert {name: (array.shape, array.dtype) for name, array in file.arrays.items()} == {
            name: (array.shape, array.dtype) for name, array in arrays.items()
        }
        assert file.path == path


def test_arrays_outlive_the_file_and_may_be_changed(write, path):
    write(path, {"x": np.arange(3.0)}, {})
    with open_arrays(path) as file:
        x = file.read("x")
    x += 1
    assert x.tolist() == [1, 2, 3]
    assert read_all(path)[0]["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="weights"):
        file.read("x")


def test_an_unknown_name_is_an_error(write, path):
    write(path, {"x": np.arange(3.0)}, {})
    with open_arrays(path) as file, pytest.raises(ValueError, match=r"weights: there is no array 'y' among its 1"):
        file.read("y")


def test_neither_order_nor_layout_nor_time_changes_the_bytes(write, path, monkeypatch):
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    write(path, {"b": table, "a": np.float32(1).reshape(())}, {"x": 1, "y": 2})
    first = path.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    for layout in (np.asfortranarray(table), table.astype(">f4"), np.repeat(table, 2, axis=1)[:, ::2]):
        write(path, {"a": np.array(1, ">f4"), "b": layout}, {"y": 2, "x": 1})
        assert path.read_bytes() == first


@pytest.mark.parametrize(
    "array",
    [
        np.array([{}], object),
        np.array(["text"]),
        np.array([b"text"]),
        np.zeros(2, [("x", "f4")]),
        np.zeros(2, "V2"),
        np.zeros(2, "complex64"),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_other_dtypes_are_refused(write, path, array):
    with pytest.raises(ValueError, match=r"weights: array 'x' is of dtype .* cannot be written\. Allowed: float16"):
        write(path, {"fine": np.zeros(2), "x": array}, {})
    assert not path.exists()


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "../a", "a/..", "./a", "a\\b", "a\0b", "a\nb", "\x1b[2J", "\ud800", "a" * 1025]
)
def test_odd_names_are_refused(write, path, name):
    with pytest.raises(ValueError, match=r"weights: the array name .* is not allowed"):
        write(path, {name: np.zeros(2)}, {})
    assert not path.exists()


@pytest.mark.parametrize(
    "metadata", [{"x": object()}, {"x": float("nan")}, {1: 2, "a": 3}, {"x": "a" * 5_000_000}, ENDLESS], ids=range(5)
)
def test_metadata_that_is_not_json_is_refused(write, path, metadata):
    with pytest.raises(ValueError, match="weights: metadata "):
        write(path, {"x": np.zeros(2)}, metadata)
    assert not path.exists()


def test_a_write_that_fails_leaves_everything_as_it_was(write, path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    path.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ValueError, match="weights cannot be written: No space"):
        write(path, {"a": np.zeros(1000)}, {})
    assert path.read_bytes() == b"before"
    assert os.listdir(path.parent) == ["weights"]


def test_a_place_that_cannot_be_written(write, path):
    with pytest.raises(ValueError, match=r"nowhere/weights cannot be written: No such file or directory"):
        write(path.parent / "nowhere/weights", {}, {})
    path.mkdir()
    with pytest.raises(ValueError, match="weights cannot be written"):
        write(path, {}, {})
    assert os.listdir(path.parent) == ["weights"]


def test_all_is_on_disk_before_the_file_takes_its_name(write, path, monkeypatch):
    synchronised = []

    def record(descriptor):
        assert not path.exists()
        synchronised.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", record)
    write(path, {"x": np.zeros(10)}, {})
    assert synchronised == [path.stat().st_size]


def test_the_file_has_the_permissions_of_any_new_file(write, path):
    write(path, {}, {})
    other = path.with_name("other")
    other.write_bytes(b"")
    assert path.stat().st_mode == other.stat().st_mode


def test_more_than_the_memory_is_refused(write, path):
    write(path, {"x": np.zeros((1000, 1000)), "y": np.zeros((500, 1000))}, {})
    with open_arrays(path, memory_bytes=12_000_000) as file:
        assert file.read("x").shape == (1000, 1000)
    with pytest.raises(ValueError, match=r"weights: its arrays take 0\.0 GB and there are 0\.0 GB of memory"):
        open_arrays(path, memory_bytes=11_999_999).__enter__()


def test_the_memory_of_the_machine_is_the_default(write, path, monkeypatch):
    write(path, {"x": np.zeros((1000, 1000))}, {})
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    with pytest.raises(ValueError, match="memory"):
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
    assert texts.keys() == {"format", "vit_jax"}
    assert (texts["format"], json.loads(texts["vit_jax"])) == ("pt", METADATA)
    save_file(arrays, path, metadata={"format": "pt", "source": "elsewhere"})
    found, metadata = read_all(path)
    assert found.keys() == arrays.keys()
    assert all(same(found[name], array) for name, array in arrays.items())
    assert metadata == {}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"x": {**ENTRY, "dtype": "F8_E4M3", "shape": [8]}}, "of type 'F8_E4M3', which is not read. Allowed: float16"),
        ({"x": {**ENTRY, "dtype": "C64", "shape": [1]}}, "is not read"),
        ({"x": {**ENTRY, "shape": [10**12]}}, "invalid shape, data type, or offset"),
        ({"x": {**ENTRY, "shape": [2**62, 2**62]}}, "overflow"),
        ({"x": {**ENTRY, "shape": [10**11], "data_offsets": [0, 4 * 10**11]}}, "damaged"),
        ({"x": {**ENTRY, "data_offsets": [8, 16]}}, "damaged"),
        ({"x": ENTRY, "y": ENTRY}, "damaged"),
        ({"none": {**ENTRY, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "x": ENTRY}, "array is too big"),
        ({}, "damaged"),
        ({"x": 3}, "damaged"),
        ({"__metadata__": {"a": 1}, "x": ENTRY}, "damaged"),
        ({"__metadata__": {"vit_jax": "[]"}, "x": ENTRY}, "not an object"),
        ({"../x": ENTRY}, "is not allowed"),
        (b'{"x": ', "damaged"),
        (b'{"x":' + b"[" * 200_000, "damaged"),
    ],
    ids=range(15),
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


@pytest.mark.parametrize("length", [1000, 2**24, 2**39])
def test_a_lying_header_length_is_refused(tmp_path, length):
    refused(tmp_path / "x.safetensors", struct.pack("<Q", length) + json.dumps({"x": ENTRY}).encode())


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


def test_the_name_of_the_metadata_is_taken(path):
    with pytest.raises(ValueError, match="cannot be the name of an array"):
        write_safetensors(path, {"__metadata__": np.zeros(2)}, {})


# What is in a file.


def test_the_suffix_does_not_matter(tmp_path):
    for write in (write_npz, write_safetensors):
        for name in ("weights", "weights.npz", "weights.safetensors", "weights.bin"):
            write(tmp_path / name, {"x": np.arange(3.0)}, {})
            with open_arrays(str(tmp_path / name)) as file:
                assert file.read("x").tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", [0x0280, 0x8B1F, 0x7B, 0x3C])
def test_a_header_length_that_looks_like_another_format(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"__metadata__":{}}'.ljust(length))
    with open_arrays(path) as file:
        assert file.arrays == {}


def a_tar():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("data.pkl"))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n <HTML lang=en>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (archive([("archive/data.pkl", pickle.dumps({})), ("archive/data/0", b"")]), "a PyTorch file"),
        (pickle.dumps({"x": 1}), "a Python pickle"),
        (pickle.dumps({"x": 1}, protocol=2), "a Python pickle"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 40, "HDF5"),
        (numbers([1, 2]), "one array (.npy)"),
        (b"\x81\xa6params\x82", "msgpack"),
        (b"\x1f\x8b\x08\0", "compressed. Unpack"),
        (a_tar(), "a tar archive"),
        (b'{"metadata": {}, "weight_map": {}}', "JSON text"),
        (b"GGUF\3\0\0\0", "of no known format: it starts with b'GGUF"),
        (b"\0", "of no known format"),
    ],
)
def test_other_files_are_named(tmp_path, content, kind):
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^\S*weights\.npz: this is .*\.npz and \.safetensors\.$") as caught:
        read_all(path)
    assert kind in str(caught.value)


def test_an_archive_of_other_things_is_refused(tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(archive([("config.json", b"{}")], zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match=r"model\.keras: the member 'config\.json' is not an array"):
        read_all(path)


def test_places_that_are_no_files(tmp_path):
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


@pytest.mark.parametrize("given", ["model.ckpt-9", "model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "."])
def test_tensorflow_checkpoints_are_named(tmp_path, given):
    for name in ("model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "checkpoint"):
        (tmp_path / name).write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match="a TensorFlow checkpoint"):
        read_all(tmp_path / given)


def test_a_file_that_must_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    write_npz(path, {"x": np.arange(3.0)}, {})

    def forbid(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", forbid)
    with pytest.raises(ValueError, match=r"weights\.npz: Permission denied\.$"):
        read_all(path)
