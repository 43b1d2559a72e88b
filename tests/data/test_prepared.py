"""Smaller copies of image folders."""

import os
import pathlib

import cv2
import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data import images, jpeg, prepared
from vit_jax.data.files import image_files
from vit_jax.data.sources import open_source

LARGE = cv2.resize(np.random.default_rng(0).integers(256, size=(9, 12, 3), dtype=np.uint8), (160, 120))


@pytest.fixture
def folder(make_folder):
    """Two classes, one with a photograph, a small image and a broken file."""
    photo, small = (cv2.imencode(".png", pixels)[1].tobytes() for pixels in (LARGE, LARGE[:40]))
    tall = cv2.imencode(".jpg", np.rot90(LARGE))[1].tobytes()
    return make_folder({"a/photo.png": photo, "a/small.png": small, "a/broken.jpg": b"rubbish", "b/c/tall.jpg": tall})


def test_a_copy_has_the_same_files_and_shorter_sides(folder, tmp_path, make_config):
    copy = tmp_path / "copy"
    assert prepared.prepare_folder(folder, copy, short_side=60, quality=95) == {"reduced": 2, "copied": 2}
    before, after = (open_source(f"folder:{path}", "all", make_config(), 0) for path in (folder, copy))
    assert [before.key_of(k) for k in range(4)] == [after.key_of(k) for k in range(4)]  # so the hold-out is the same
    assert before.class_names == after.class_names
    for name in ("a/broken.jpg", "a/small.png"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    for name, shape in (("a/photo.png", (60, 80)), ("b/c/tall.jpg", (80, 60))):
        file, original = ((path / name).read_bytes() for path in (copy, folder))
        exact = images.resize_to_cover(images.decode(original), (60, 60)).astype(int)
        found = images.decode(file)
        assert found.shape[:2] == exact.shape[:2] == shape
        assert np.abs(found - exact).mean() <= 3  # strong colours at half the resolution
        layout = jpeg.layout_of(file)
        assert layout.interval * layout.unit[1] >= layout.width > (layout.interval - 1) * layout.unit[1]
    assert prepared.preparation(f"folder:{copy}") == ", prepared with short side 60 and JPEG quality 95"
    assert prepared.preparation(f"folder:{folder}") == prepared.preparation("digits") == ""


def test_an_interrupted_copy_goes_on(folder, tmp_path):
    copy = tmp_path / "copy"
    prepared.prepare_folder(folder, copy, short_side=60)
    (copy / "a/small.png").rename(copy / "a/.small.png.1f.tmp")  # as a kill before the rename leaves it
    assert len(image_files(str(copy))) == 3
    assert prepared.prepare_folder(folder, copy, short_side=60) == {"reduced": 0, "copied": 1}
    assert len(image_files(str(copy))) == 4


def test_two_processes_make_one_copy(folder, tmp_path, monkeypatch):
    """The second writes all files while the first has written one and not yet given it its name."""
    copy, kinds = tmp_path / "copy", []
    monkeypatch.setattr(prepared, "available_cores", lambda: 1)  # so that it is the first file, "broken.jpg"

    def prepare_before(name):
        rename = getattr(pathlib.Path, name)

        def renamed(path, target):
            if target.name == "broken.jpg" and not kinds:
                kinds.append("first")
                kinds.append(prepared.prepare_folder(folder, copy, short_side=60))
            return rename(path, target)

        monkeypatch.setattr(pathlib.Path, name, renamed)

    prepare_before("rename")
    prepare_before("replace")
    prepared.prepare_folder(folder, copy, short_side=60)
    assert kinds[1] == {"reduced": 2, "copied": 2}
    assert len(image_files(str(copy))) == 4
    assert list(copy.glob("**/.*")) == []


def test_rejections(folder, tmp_path):
    def prepare(source, output, **how):
        prepared.prepare_folder(source, output, **{"short_side": 60} | how)

    with rejects(str(tmp_path / "missing"), "no folder with images"):
        prepare(tmp_path / "missing", tmp_path / "copy")
    with rejects(str(folder / "copy"), "inside"):
        prepare(folder, folder / "copy")
    (tmp_path / "other").mkdir()
    with rejects(str(tmp_path / "other"), "not prepared"):
        prepare(folder, tmp_path / "other")
    prepare(folder, tmp_path / "copy")
    with rejects(str(tmp_path / "copy"), "'short_side': 61"):
        prepare(folder, tmp_path / "copy", short_side=61)


def test_a_file_that_cannot_be_read_is_named(folder, tmp_path):
    (folder / "a/large.png").touch()
    os.truncate(folder / "a/large.png", 60 * 10**9)
    with rejects("a/large.png", "larger than.*Move it"):
        prepared.prepare_folder(folder, tmp_path / "copy", short_side=60)


@pytest.mark.parametrize("content", ["", "[" * 10_000, "[]", "{}", '{"short_side": 60, "quality": null}', "x" * 70_000])
def test_a_description_of_another_structure_is_named(folder, content):
    (folder / prepared.DESCRIPTION).write_text(content)
    with rejects(prepared.DESCRIPTION, ""):
        prepared.preparation(f"folder:{folder}")
