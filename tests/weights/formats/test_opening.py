"""A file is told by its content, and one that is not read is told for what it is."""

import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest

from tests.weights.formats.samples import archive, numbers
from vit_jax.weights.formats import open_arrays, write_npz, write_safetensors

X = {"x": np.arange(3.0)}


def test_the_suffix_does_not_matter(tmp_path):
    for write in (write_npz, write_safetensors):
        for name in ("weights", "weights.npz", "weights.safetensors", "weights.bin"):
            write(tmp_path / name, X, {})
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
        (b"\x1f\x8b\x08\0", "compressed as a whole"),
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
        open_arrays(path)
    assert kind in str(caught.value)


def test_an_archive_of_other_things_is_refused(tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(archive([("config.json", b"{}")], zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match=r"model\.keras: the member 'config\.json' is not an array"):
        open_arrays(path)


def test_places_that_are_no_files(tmp_path):
    with pytest.raises(ValueError, match="missing: there is no such file"):
        open_arrays(tmp_path / "missing")
    with pytest.raises(ValueError, match="this is a folder"):
        open_arrays(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="this is a device or a pipe"):
        open_arrays(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="loop"):
        open_arrays(tmp_path / "loop")


@pytest.mark.parametrize("given", ["model.ckpt-9", "model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "."])
def test_tensorflow_checkpoints_are_named(tmp_path, given):
    for name in ("model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "checkpoint"):
        (tmp_path / name).write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match="a TensorFlow checkpoint"):
        open_arrays(tmp_path / given)


def test_a_file_that_must_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    write_npz(path, X, {})

    def forbid(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", forbid)
    with pytest.raises(ValueError, match=r"weights\.npz: Permission denied\.$"):
        open_arrays(path)
