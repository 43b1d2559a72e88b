"""From the arguments of a command line to image files."""

import os

import pytest

from tests.rejections import rejects
from vit_jax.data.files import list_images

FILES = ("b.jpg", "a.PNG", "deep/er/c.webp", "deep/d.gif", "deep/notes.txt", ".hidden/x.png", "deep/.y.png", "e.txt")


@pytest.fixture
def photos(make_folder, monkeypatch):
    """A folder in which the test runs; files hold one grey pixel and more."""
    folder = make_folder({f"photos/{name}": 10 * i for i, name in enumerate(FILES)})
    monkeypatch.chdir(folder)
    return folder / "photos"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["photos"], ["photos/a.PNG", "photos/b.jpg", "photos/deep/d.gif", "photos/deep/er/c.webp"]),
        (["photos/b.jpg", "photos"], ["photos/b.jpg", "photos/a.PNG", "photos/deep/d.gif", "photos/deep/er/c.webp"]),
        (["photos/e.txt"], ["photos/e.txt"]),
        (["photos/*"], ["photos/a.PNG", "photos/b.jpg", "photos/deep/d.gif", "photos/deep/er/c.webp"]),
        (["photos/?.[jP]*"], ["photos/a.PNG", "photos/b.jpg"]),
        (["**/*.gif"], ["photos/deep/d.gif"]),
        (["photos/**/*.*"], ["photos/a.PNG", "photos/b.jpg", "photos/deep/d.gif", "photos/deep/er/c.webp"]),
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
    assert list_images([f"{photos}/**/*.gif", "~/b.jpg"]) == [str(photos / "deep/d.gif"), str(photos / "b.jpg")]
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
    assert list_images(["photos/pipe.png"]) == ["photos/pipe.png"]  # as the shell's <(...)


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
