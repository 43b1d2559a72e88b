"""Smaller copies of image folders."""

import json
import os
import pathlib

import cv2
import numpy as np
import pytest

from tests.columns import list_column
from tests.integration.commands import run
from tests.rejections import rejects
from vit_jax.data import workers
from vit_jax.data.decoding import images, jpeg
from vit_jax.data.kinds.folder import describe_copy
from vit_jax.data.kinds.image_files import image_files
from vit_jax.data.sources import open_source
from vit_jax.tools.prepare import prepared

RNG = np.random.default_rng(0)
SMALL = RNG.integers(256, size=(9, 12, 3), dtype=np.uint8)
LARGE = cv2.resize(SMALL, (160, 120))


def encode(pixels, suffix=".png"):
    _, file = cv2.imencode(suffix, pixels)
    return file.tobytes()


@pytest.fixture
def folder(make_folder):
    """Two classes, one with a photograph, a small image and a broken file."""
    return make_folder(
        {
            "a/photo.png": encode(LARGE),
            "a/small.png": encode(LARGE[:40]),
            "a/broken.jpg": b"rubbish",
            "b/c/tall.jpg": encode(np.rot90(LARGE), ".jpg"),
        }
    )


def count(reduced=0, copied=0, unreadable=0):
    return {
        "reduced": reduced,
        "copied": copied,
        "unreadable": unreadable,
    }


def test_a_copy_has_the_same_files_and_classes(
    folder,
    tmp_path,
    make_config,
):
    copy = tmp_path / "copy"
    counts = prepared.prepare_folder(
        folder,
        copy,
        short_side=60,
        quality=95,
    )

    assert counts == count(reduced=2, copied=2)
    assert describe_copy(f"folder:{copy}") == ", prepared with short side 60 and JPEG quality 95"
    assert describe_copy(f"folder:{folder}") == ""
    assert describe_copy("digits") == ""

    before = open_source(f"folder:{folder}", "all", make_config(), 0)
    after = open_source(f"folder:{copy}", "all", make_config(), 0)
    # The hold-out depends on the keys.
    for k in range(4):
        assert after.key_of(k) == before.key_of(k)
    assert before.class_names == after.class_names

    for name in ("a/broken.jpg", "a/small.png"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("a/photo.png", (60, 80)),
        ("b/c/tall.jpg", (80, 60)),
    ],
)
def test_a_copy_has_shorter_sides(folder, tmp_path, name, shape):
    copy = tmp_path / "copy"
    prepared.prepare_folder(
        folder,
        copy,
        short_side=60,
        quality=95,
    )
    stored = (copy / name).read_bytes()
    original = images.decode((folder / name).read_bytes())
    resized = images.resize_to_cover(original, (60, 60))
    expected = resized.astype(int)

    pixels = images.decode(stored)

    assert pixels.shape[:2] == shape
    assert expected.shape[:2] == shape
    # Strong colours are stored with half the resolution.
    assert np.abs(pixels - expected).mean() <= 3

    layout = jpeg.find_layout(stored)
    unit_width = layout.unit[1]

    assert layout.interval * unit_width >= layout.width
    assert (layout.interval - 1) * unit_width < layout.width


def test_values_of_more_than_8_bits_are_copied(tmp_path, make_folder):
    """The range that training is given, or that a file states, remains the range of the file."""
    deep = encode(LARGE.astype(np.uint16) * 16)
    folder = make_folder({"a/deep.png": deep})
    counts = prepared.prepare_folder(folder, tmp_path / "copy", short_side=60)

    assert counts == count(copied=1)
    assert (tmp_path / "copy/a/deep.png").read_bytes() == deep


def test_an_interrupted_copy_goes_on(folder, tmp_path):
    copy = tmp_path / "copy"
    prepared.prepare_folder(folder, copy, short_side=60)
    # A kill before the rename leaves this file.
    (copy / "a/small.png").rename(copy / "a/.small.png.1f.tmp")
    assert len(image_files(str(copy))) == 3

    assert prepared.prepare_folder(folder, copy, short_side=60) == count(copied=1)
    assert len(image_files(str(copy))) == 4


def test_two_processes_make_one_copy(folder, tmp_path, monkeypatch):
    """The second writes all files while the first has written one and not yet given it its name."""
    copy = tmp_path / "copy"
    results = []
    # With one core, "broken.jpg" is the first file.
    monkeypatch.setattr(workers, "count_cores", lambda: 1)

    def prepare_before(name):
        rename = getattr(pathlib.Path, name)

        def prepare_and_rename(path, target):
            if target.name == "broken.jpg" and not results:
                results.append("first")
                results.append(prepared.prepare_folder(folder, copy, short_side=60))
            return rename(path, target)

        monkeypatch.setattr(pathlib.Path, name, prepare_and_rename)

    prepare_before("rename")
    prepare_before("replace")
    prepared.prepare_folder(folder, copy, short_side=60)

    assert results[1] == count(reduced=2, copied=2)
    assert len(image_files(str(copy))) == 4
    assert list(copy.glob("**/.*")) == []


def test_files_that_cannot_be_read_or_encoded(folder, tmp_path, caplog):
    """Unreadable files are skipped, named, and copied later.

    Images that no JPEG can hold are copied.
    """
    missing = tmp_path / "elsewhere.png"
    copy = tmp_path / "copy"
    wide = encode(np.zeros((61, 70_000, 3), np.uint8))
    (folder / "a/dangling.png").symlink_to(missing)
    (folder / "b/loop.jpg").symlink_to("loop.jpg")
    (folder / "b/sparse.jpg").touch()
    os.truncate(folder / "b/sparse.jpg", 60 * 10**9)
    (folder / "b/wide.png").write_bytes(wide)

    counts = prepared.prepare_folder(
        folder,
        copy,
        short_side=60,
    )

    assert counts == count(reduced=2, copied=3, unreadable=3)
    assert (copy / "b/wide.png").read_bytes() == wide
    assert sorted(path.name for path in copy.rglob("*") if path.is_file()) == [
        "broken.jpg",
        "photo.png",
        "prepared.json",
        "small.png",
        "tall.jpg",
        "wide.png",
    ]

    (message,) = caplog.messages
    assert str(folder / "a/dangling.png") in message
    assert str(folder / "b/loop.jpg") in message
    assert str(folder / "b/sparse.jpg") in message

    missing.write_bytes(wide)
    counts = prepared.prepare_folder(
        folder,
        copy,
        short_side=60,
    )

    assert counts == count(copied=1, unreadable=2)


def test_the_verb_ends_with_code_1_after_an_unreadable_file(folder, tmp_path):
    words = [
        "prepare",
        f"folder:{folder}",
        f"--output={tmp_path / 'copy'}",
        "--short_side=60",
    ]
    assert run(words).code == 0

    (folder / "a/dangling.png").symlink_to(tmp_path / "elsewhere.png")
    outcome = run(words)

    assert outcome.code == 1
    assert "1 cannot be read" in outcome.out


def test_an_output_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with rejects(str(tmp_path / "file/copy"), "cannot be written"):
        prepared.prepare_folder(folder, tmp_path / "file/copy", short_side=60)

    copy = tmp_path / "copy"
    prepared.prepare_folder(folder, copy, short_side=60)
    (copy / "b").rename(copy / "elsewhere")
    (copy / "b").write_bytes(b"")

    with rejects(str(copy / "b"), "cannot be written"):
        prepared.prepare_folder(folder, copy, short_side=60)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"short_side": 60}', '{"short_side": "60", "quality": 90}']
)
def test_a_damaged_description(folder, text):
    (folder / prepared.DESCRIPTION).write_text(text)
    with rejects(str(folder / prepared.DESCRIPTION), "short_side.*quality|not JSON"):
        describe_copy(f"folder:{folder}")


def test_an_unfinished_copy_is_rejected(
    folder,
    tmp_path,
    make_config,
    monkeypatch,
):
    """So is a split of it. The message is the command that finishes the copy."""
    copy = tmp_path / "copy"
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "decode", fail_at_last)
        with pytest.raises(KeyboardInterrupt):
            prepared.prepare_folder(
                folder,
                copy,
                short_side=60,
            )

    assert len(image_files(str(copy))) < 4
    assert list_column(copy.rglob(".*"), "name") == []

    command = f"vit-jax prepare folder:{folder} --short_side=60 --quality=90 --output={copy}"
    for part in (copy, copy / "a"):
        with rejects(f"folder:{part}", command):
            open_source(f"folder:{part}", "all", make_config(), 0)

    prepared.prepare_folder(folder, copy, short_side=60)
    assert len(open_source(f"folder:{copy}", "all", make_config(), 0)) == 4


def fail_at_last(stored, decode=images.decode):
    image = decode(stored)
    if image.shape[0] > image.shape[1]:
        raise KeyboardInterrupt
    return image


def test_a_copy_of_an_older_version_has_no_mark_and_is_taken_as_finished(
    folder,
    tmp_path,
    make_config,
):
    copy = tmp_path / "copy"
    prepared.prepare_folder(folder, copy, short_side=60)
    (copy / "prepared.json").write_text('{"short_side": 60, "quality": 90}')

    assert len(open_source(f"folder:{copy}", "all", make_config(), 0)) == 4
    assert describe_copy(f"folder:{copy}") == ", prepared with short side 60 and JPEG quality 90"
    assert prepared.prepare_folder(folder, copy, short_side=60) == count()
    assert json.loads((copy / "prepared.json").read_text())["complete"] is True


def test_rejections(folder, tmp_path):
    missing = tmp_path / "missing"
    copy = tmp_path / "copy"
    other = tmp_path / "other"
    other.mkdir()

    with rejects(str(missing), "no folder with images"):
        prepared.prepare_folder(missing, copy, short_side=60)

    with rejects(str(folder / "copy"), "inside"):
        prepared.prepare_folder(folder, folder / "copy", short_side=60)

    with rejects(str(other), "not prepared"):
        prepared.prepare_folder(folder, other, short_side=60)

    prepared.prepare_folder(folder, copy, short_side=60)
    with rejects(str(copy), "'short_side': 61"):
        prepared.prepare_folder(folder, copy, short_side=61)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 10_000,
        "[]",
        "{}",
        '{"short_side": 60, "quality": null}',
        "x" * 70_000,
    ],
)
def test_a_description_of_another_structure_is_named(folder, content):
    (folder / prepared.DESCRIPTION).write_text(content)

    with rejects(prepared.DESCRIPTION, ""):
        describe_copy(f"folder:{folder}")


def test_files_that_a_killed_process_left_are_removed_from_the_finished_copy(folder, tmp_path):
    output = tmp_path / "copy"
    prepared.prepare_folder(folder, output, short_side=32)
    copied = next(output.rglob("*/*.*"))
    abandoned = copied.with_name(".a.jpg.0123456789abcdef.tmp")
    abandoned.write_bytes(b"half")
    other = output / ".notes.tmp"
    other.write_text("not ours")

    prepared.prepare_folder(folder, output, short_side=32)

    assert not abandoned.exists()
    assert other.exists()
