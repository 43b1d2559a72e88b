"""From the arguments of a command line to image files."""

import io
import os
import sys
import types

import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import MAX_NAME_BYTES, list_images, read_file

FILES = (
    "b.jpg",
    "a.PNG",
    "deep/er/c.webp",
    "deep/d.gif",
    "deep/notes.txt",
    ".hidden/x.png",
    "deep/.y.png",
    "e.txt",
)


@pytest.fixture
def photos(make_folder, monkeypatch):
    """A folder in which the test runs; files hold one grey pixel and more."""
    folder = make_folder({f"photos/{name}": 10 * i for i, name in enumerate(FILES)})
    monkeypatch.chdir(folder)

    return folder / "photos"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["photos"],
            ["photos/a.PNG", "photos/b.jpg", "photos/deep/d.gif", "photos/deep/er/c.webp"],
        ),
        (
            ["photos/b.jpg", "photos"],
            ["photos/b.jpg", "photos/a.PNG", "photos/deep/d.gif", "photos/deep/er/c.webp"],
        ),
        (["photos/e.txt"], ["photos/e.txt"]),
        (
            ["photos/*"],
            ["photos/a.PNG", "photos/b.jpg", "photos/deep/d.gif", "photos/deep/er/c.webp"],
        ),
        (["photos/?.[jP]*"], ["photos/a.PNG", "photos/b.jpg"]),
        (["**/*.gif"], ["photos/deep/d.gif"]),
        (
            ["photos/**/*.*"],
            ["photos/a.PNG", "photos/b.jpg", "photos/deep/d.gif", "photos/deep/er/c.webp"],
        ),
        (["photos/deep/**"], ["photos/deep/d.gif", "photos/deep/er/c.webp"]),
        (["photos/**/er/**/c.*"], ["photos/deep/er/c.webp"]),
        (["photos/deep/../b.jpg", "photos/b.jpg", "./photos//b.jpg"], ["photos/deep/../b.jpg"]),
    ],
    ids=lambda value: " ".join(value) if len(value) < 4 else "",
)
def test_arguments(photos, arguments, expected):
    assert list_images(arguments) == expected


def test_absolute_patterns_home_and_a_file_named_like_a_pattern(photos, monkeypatch):
    monkeypatch.setenv("HOME", str(photos))

    assert list_images([f"{photos}/**/*.gif", "~/b.jpg"]) == [
        str(photos / "deep/d.gif"),
        str(photos / "b.jpg"),
    ]

    for name in ("a[1].png", "a1.png"):
        (photos / name).touch()

    assert list_images(["photos/a[1].png"]) == ["photos/a[1].png"]


def test_links_in_circles_end(photos):
    for name in ("deep/one", "deep/er/two"):
        (photos / name).symlink_to(photos, target_is_directory=True)
        (photos / f"{name}-down").symlink_to(photos / "deep", target_is_directory=True)

    for argument in ("photos", "photos/**/*"):
        found = {os.path.basename(path) for path in list_images([argument])}
        assert found == {"a.PNG", "b.jpg", "c.webp", "d.gif"}


def test_pipes_are_left_out_unless_they_are_named(photos):
    os.mkfifo(photos / "pipe.png")
    for argument in ("photos", "photos/*", "photos/**/*"):
        assert "photos/pipe.png" not in list_images([argument])

    assert list_images(["photos/pipe.png"]) == [
        "photos/pipe.png"
    ]  # so that it is named when it cannot be read


def test_only_regular_files_of_a_bounded_size_are_images(photos):
    os.mkfifo(photos / "pipe.png")
    with open(photos / "sparse.png", "wb") as file:
        file.truncate(60 * 10**9)

    (photos / "zero.png").symlink_to("/dev/zero")
    for name, reason in (
        ("pipe", "not a regular file"),
        ("sparse", "larger than 1,073,741,824 bytes"),
        ("zero", "not a regular file"),
        ("missing", "cannot be opened"),
    ):
        with pytest.raises(UnreadableImage, match=reason):
            read_file(str(photos / f"{name}.png"))


class Endless(io.RawIOBase):
    """A stream of one line without end, which fails where more is read than a line may have."""

    def readable(self):
        return True

    def readinto(self, buffer):
        self.given = getattr(self, "given", 0) + len(buffer)

        assert self.given < 2**20, "it is read without end"

        buffer[:] = b"x" * len(buffer)
        return len(buffer)


def test_names_on_standard_input_are_bounded(photos, monkeypatch):
    def give(file):
        monkeypatch.setattr(
            sys,
            "stdin",
            types.SimpleNamespace(buffer=file),
        )

    give(io.BytesIO(b"photos/b.jpg\r\n\nphotos/deep/d.gif"))

    assert list_images(["photos/a.PNG", "-"]) == [
        "photos/a.PNG",
        "photos/b.jpg",
        "photos/deep/d.gif",
    ]

    for file in (
        io.BufferedReader(Endless()),
        io.BytesIO(b"photos/b.jpg\n" + b"x" * (MAX_NAME_BYTES + 1)),
    ):
        give(file)
        with rejects("standard input", "longer than 4,096 bytes"):
            list_images(["-"])


def test_the_first_wrong_name_on_standard_input_ends_the_command(photos, monkeypatch):
    lines = types.SimpleNamespace(readline=lambda _: b"y\n")  # as of `yes`
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=lines))

    with rejects("no file or folder 'y'", ""):
        list_images(["-"])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([], "no images"),
        (["photos/b.jpgg"], "'photos/b.jpgg'.*nearest in 'photos': 'b.jpg'"),
        (["photos/xyzzy"], "'photos/xyzzy'.*nothing in 'photos'"),
        (["photo/b.jpg"], "no folder 'photo'"),
        (["photos", "phottos"], "'phottos'.*nearest in '.': 'photos'"),
        (["photos/*.bmp"], r"pattern 'photos/\*.bmp'"),
        (["photos/deep/*.txt"], "pattern 'photos/deep"),
        (["nowhere/**/*.jpg"], "pattern 'nowhere"),
        (["photos/.hidden/empty"], "'photos/.hidden/empty'.*no images"),
        ([""], "no file or folder ''"),
    ],
)
def test_arguments_that_match_nothing(photos, arguments, rule):
    (photos / ".hidden/empty").mkdir()
    with rejects("", rule):
        list_images(arguments)
