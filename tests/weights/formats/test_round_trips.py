"""What is written is read back bit for bit, in both formats; what cannot be is refused before a file is touched."""

import os

import numpy as np
import pytest

from tests.weights.formats.samples import METADATA, a_few, every_kind, read_all, same
from vit_jax.weights.formats import open_arrays, write_npz, write_safetensors
from vit_jax.weights.formats.encoding import BFLOAT16


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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_every_special_number(write, path, dtype):
    bits = {
        "float16": ("<u2", [0x8000, 0x0001, 0x7C00, 0xFC00, 0x7C01, 0x7E55, 0xFFFF]),
        "float32": ("<u4", [0x80000000, 0x1, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF]),
        "float64": ("<u8", [1 << 63, 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (0x7FF8 << 48) + 99, 2**64 - 1]),
        "bfloat16": ("<u2", [0x8000, 0x0001, 0x7F80, 0xFF80, 0x7F81, 0x7FD5, 0xFFFF]),
    }[dtype]
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    array = np.array(bits[1], bits[0]).view(dtype)
    write(path, {"x": array}, {})
    assert np.array_equal(read_all(path)[0]["x"].view(bits[0]), np.array(bits[1]))


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


def test_no_arrays_and_no_metadata(write, path):
    write(path, {}, {})
    assert read_all(path) == ({}, {})


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
    "metadata", [{"x": object()}, {"x": float("nan")}, {1: 2, "a": 3}, {"x": "a" * 5_000_000}], ids=range(4)
)
def test_metadata_that_is_not_json_is_refused(write, path, metadata):
    with pytest.raises(ValueError, match="weights: metadata "):
        write(path, {"x": np.zeros(2)}, metadata)
    assert not path.exists()


def test_endless_metadata_is_refused(write, path):
    metadata = {}
    metadata["x"] = metadata
    with pytest.raises(ValueError, match="metadata must be JSON"):
        write(path, {}, metadata)


class Failing(dict):
    """Gives its arrays once, for their types, and fails when they are read again to be written."""

    def __init__(self, arrays, error):
        super().__init__(arrays)
        self.error, self.given = error, set()

    def __getitem__(self, name):
        if name in self.given and name == "z":
            raise self.error
        self.given.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), TypeError("bug")])
def test_a_write_that_fails_leaves_everything_as_it_was(write, path, error):
    path.write_bytes(b"before")
    arrays = Failing({"a": np.zeros(1000), "z": np.zeros(10)}, error)
    expected = ValueError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="weights cannot be written: No space" if expected is ValueError else None):
        write(path, arrays, {})
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
        open_arrays(path, memory_bytes=11_999_999)


def test_the_memory_of_the_machine_is_the_default(write, path, monkeypatch):
    write(path, {"x": np.zeros((1000, 1000))}, {})
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    with pytest.raises(ValueError, match="memory"):
        open_arrays(path)


def test_memory_that_is_refused_is_one_clear_error(write, path, monkeypatch):
    write(path, {"x": np.zeros(10)}, {})

    def refuse(*_):
        raise MemoryError

    with open_arrays(path) as file:
        monkeypatch.setattr(np, "empty", refuse)
        with pytest.raises(ValueError, match="weights: array 'x': there is not enough memory"):
            file.read("x")
