"""Image folders: which files, which classes, which split, and the message for each mistake."""

import hashlib
import inspect
import os
import pathlib
import pickle
import sys

import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.folder import Folder
from vit_jax.data.kinds.image_files import list_images
from vit_jax.data.sources import holds_out, open_source


def open_names(path, split, config, seed=0):
    """Return a source and the names of its files below the folder."""
    source = open_source(
        f"folder:{path}",
        split,
        config,
        seed,
    )
    names = [source.name_of(i).removeprefix(f"{path}/") for i in range(len(source))]
    return source, names


def list_names(path, split, config, seed=0):
    _, names = open_names(path, split, config, seed)
    return names


def make_class(name, count):
    """Return names and grey levels of images of one class."""
    return {f"{name}/{i:03}.png": i for i in range(count)}


def make_flat(per_class=10):
    """Return names and grey levels of images of two classes."""
    return make_class("cat", per_class) | make_class("dog", per_class)


def put_below(folder, files):
    return {f"{folder}/{name}": content for name, content in files.items()}


def test_split_folders_are_used(make_folder, make_config):
    """Each split has the classes of training; a further split may have any name."""
    path = make_folder(
        {
            "train/cat/a.PNG": 1,
            "train/dog/deep/er/b.png": 2,
            "val/dog/c.png": 3,
            "sketches/cat/d.png": 4,
        }
    )
    config = make_config(test_split="val")

    train, train_names = open_names(path, "train", config)
    val, val_names = open_names(path, "val", config)

    assert train_names == ["train/cat/a.PNG", "train/dog/deep/er/b.png"]
    assert val_names == ["val/dog/c.png"]
    assert train.class_names == val.class_names == ("cat", "dog")
    assert val.num_classes == 2

    record = val[0]
    content = (path / "val/dog/c.png").read_bytes()

    assert record.label == 1
    assert record.image == content

    sketches = list_names(path, "sketches", config)
    assert sketches == ["sketches/cat/d.png"]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "val"),
        ("training", "validation"),
        ("train", "valid"),
        ("training", "test"),
    ],
)
def test_usual_names_of_splits_are_known(
    make_folder,
    make_config,
    caplog,
    train,
    test,
):
    train_files = put_below(train, make_flat(2))
    test_files = put_below(test, make_flat(1))
    path = make_folder(train_files | test_files)
    config = make_config()

    train_names = list_names(path, "train", config)
    test_names = list_names(path, "test", config)

    message = f"{path} has no split 'test': {test!r} is taken."
    is_noted = message in caplog.messages

    assert train_names == list(train_files)
    assert test_names == list(test_files)
    assert is_noted == (test != "test")
    assert list_names(path, test, config) == test_names


def test_a_split_of_the_name_itself_comes_first(make_folder, make_config):
    files = {}
    for split, per_class in (("train", 2), ("test", 1), ("val", 3)):
        files |= put_below(split, make_flat(per_class))
    path = make_folder(files)
    config = make_config()

    test = list_names(path, "test", config)
    val = list_names(path, "val", config)

    assert len(test) == 2
    assert len(val) == 6


TWO_LARGE_CLASSES_AND_A_SMALL_ONE = make_flat(10) | make_class("emu", 3)


def test_parts_of_a_split_are_of_every_class(make_folder, make_config):
    """Images are chosen by hash, as in a hold-out; two parts of one split divide all images."""
    files = TWO_LARGE_CLASSES_AND_A_SMALL_ONE
    path = make_folder(files)
    config = make_config(train_split="train[:80%]", test_split="train[80%:]")

    train = list_names(path, "train[:80%]", config)
    test = list_names(path, "train[80%:]", config)
    middle = list_names(path, "train[20%:50%]", config)

    assert sorted(train + test) == sorted(files)
    assert [name[:3] for name in test] == ["cat", "cat", "dog", "dog", "emu"]
    assert len(middle) == 7
    assert set(middle) < set(train)


def test_a_hold_out_is_left_to_folders_without_splits(make_folder, make_config):
    """Two parts of one split need no hold-out; other data decide for themselves."""
    path = make_folder(TWO_LARGE_CLASSES_AND_A_SMALL_ONE)
    two_parts = make_config(train_split="train[:80%]", test_split="train[80%:]")
    one_part = make_config(train_split="train[:80%]")

    assert not holds_out(f"folder:{path}", two_parts)
    assert holds_out(f"folder:{path}", one_part)
    assert not holds_out("digits", make_config(train_split="train[:100]"))


def test_a_part_of_training_has_no_image_of_the_hold_out(make_folder, make_config):
    path = make_folder(TWO_LARGE_CLASSES_AND_A_SMALL_ONE)
    config = make_config(train_split="train[:50%]")

    half = list_names(path, "train[:50%]", config)
    test = list_names(path, "test", make_config())

    assert not set(half) & set(test)


def test_part_of_a_split_folder(make_folder, make_config):
    files = TWO_LARGE_CLASSES_AND_A_SMALL_ONE
    path = make_folder(put_below("train", files) | put_below("test", files))
    config = make_config(train_split="train[:80%]")

    train = list_names(path, "train[:80%]", config)

    assert len(train) == 18
    for name in train:
        assert name.startswith("train/")


def hash_with_seed_7(name):
    """Return the digest that orders images in a hold-out of seed 7."""
    seeded = f"7/{name}".encode()
    return hashlib.sha256(seeded).digest()


def test_holdout_is_a_fixed_fraction_of_every_class(make_folder, make_config):
    """Held-out images stay held out only as long as this formula stays."""
    files = make_flat(20)
    path = make_folder(files)
    config = make_config(holdout_fraction=0.15)

    test_names = list_names(path, "test", config, seed=7)
    train, train_names = open_names(path, "train", config, seed=7)

    cats = sorted(make_class("cat", 20), key=hash_with_seed_7)
    dogs = sorted(make_class("dog", 20), key=hash_with_seed_7)

    assert test_names == sorted(cats[:3] + dogs[:3])
    assert sorted(train_names + test_names) == sorted(files)

    other_names = list_names(path, "test", config, seed=8)
    assert other_names != test_names

    labels = [train[i].label for i in range(34)]
    assert labels == [0] * 17 + [1] * 17
    assert train.labels.tolist() == labels


def test_every_image_of_a_folder_without_splits(make_folder, make_config):
    """A class may have the name of a split, in any script, and a single image."""
    files = make_class("Kätzchen", 3) | make_class("train", 3)
    files["犬/a.png"] = 1
    path = make_folder(files)

    source, names = open_names(path, "all", make_config())

    assert names == sorted(files)
    assert source.class_names == ("Kätzchen", "train", "犬")

    received = pickle.loads(pickle.dumps(source))
    assert received.labels.tolist() == [0] * 3 + [1] * 3 + [2]
    for i, name in enumerate(names):
        content = (path / name).read_bytes()
        assert received[i].image == content


FLAT = make_flat()
TRAIN = put_below("train", FLAT)
TEST = put_below("test", FLAT)


@pytest.mark.parametrize(
    ("files", "split", "fields", "rule"),
    [
        ({"a.png": 1}, "train", {}, "two classes.*none"),
        ({"cat/a.png": 1}, "train", {}, "two classes.*'cat'"),
        (FLAT | {"emu/readme.txt": b""}, "train", {}, "emu.*no images"),
        (FLAT | {"emu/a.png": 1}, "train", {}, "one image.*emu"),
        ({}, "train", {}, "no such folder"),
        (FLAT, "val", {}, "'val'.*'train', 'test', 'all'"),
        (FLAT, "train", {"test_split": "train"}, "differ"),
        (FLAT, "all", {"test_split": "all"}, "differ"),
        (FLAT, "train", {"holdout_fraction": 0.0}, "config.input.holdout_fraction.*0.0"),
        (FLAT, "train", {"holdout_fraction": 1.0}, "config.input.holdout_fraction.*1.0"),
        (TRAIN, "test", {}, r"folder:.*images.*'test'.*\['train'\].*'train\[90%:\]'"),
        (TRAIN | TEST, "tset", {}, "'tset'.*did you mean 'test'"),
        (TRAIN | {"test/cat/a.png": 1, "test/emu/b.png": 1}, "test", {}, "'test'.*'train'.*emu"),
    ],
)
def test_mistakes_are_named(
    make_folder,
    open_data,
    files,
    split,
    fields,
    rule,
):
    path = make_folder(files)

    with rejects("", rule):
        open_data(f"folder:{path}", split, **fields)


@pytest.mark.parametrize(
    "split",
    [
        "train[:90]",
        "train[50%:50%]",
        "train[:101%]",
        "train[::2]",
        "train[",
    ],
)
def test_parts_that_are_no_percentages_are_named(
    make_folder,
    open_data,
    split,
):
    path = make_folder(FLAT)

    with rejects(split, r"percent.*'train\[:99%\]'"):
        open_data(f"folder:{path}", split, train_split=split)


def place_clashing_names(names, layout):
    """Return files of classes with these names: without splits, in train, or one in each split."""
    files = {}
    if layout == "split":
        first, *others = names
        for name in (first, "zebra"):
            files |= make_class(f"train/{name}", 1)
        for name in others:
            files |= make_class(f"test/{name}", 1)
        return files

    for name in names:
        files |= make_class(name, 2)
    if layout == "flat":
        return files
    test_files = make_class("test/dog", 1) | make_class("test/emu", 1)
    return put_below("train", files) | test_files


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (("cat", "Cat", "dog"), "'Cat' and 'cat'.*upper and lower case"),
        (("Ärger", "ärger"), "upper and lower case"),
        (
            ("K\u00e4tzchen", "Ka\u0308tzchen"),
            r"unicode form.*'Ka\\u0308tzchen' and 'K\\xe4tzchen'",
        ),
        (("K\u00e4tzchen", "ka\u0308tzchen"), "upper and lower case"),
    ],
)
@pytest.mark.parametrize("layout", ["flat", "train", "split"])
def test_names_that_clash(make_folder, open_data, names, rule, layout):
    path = make_folder(place_clashing_names(names, layout))

    with rejects("", rule):
        open_data(f"folder:{path}", "test")


@pytest.mark.parametrize(
    ("test", "train"),
    [
        ("Test", "Train"),
        ("test_set", "training_set"),
    ],
)
def test_splits_under_other_names_are_no_classes(
    make_folder,
    make_config,
    open_data,
    test,
    train,
):
    """Otherwise a network would learn to tell training images from test images."""
    test_files = put_below(test, make_flat(2))
    path = make_folder(test_files | put_below(train, make_flat(2)))
    message = (
        f"'{test}', '{train}' .*look like splits.*'cat', 'dog'"
        f".*train_split={train} and .*test_split={test} "
    )

    with pytest.raises(ValueError, match=message):
        open_data(f"folder:{path}", "train")

    config = make_config(train_split=train, test_split=test)
    assert list_names(path, test, config) == list(test_files)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dog/9.png": 1},
        {"dog/new/9.png": 1},
        {"emu/9.png": 1},
    ],
)
def test_classes_may_hold_folders(make_folder, make_config, more):
    files = {
        "cat/old/0.png": 0,
        "cat/old/1.png": 1,
        "dog/old/0.png": 0,
        "dog/old/1.png": 1,
    }
    all_files = files | more
    path = make_folder(all_files)

    names = list_names(path, "all", make_config())

    assert names == sorted(all_files)


@pytest.mark.parametrize(
    "place",
    [
        ".",
        "photos",
        "./photos/",
        "photos/../photos",
        "{root}/photos",
    ],
)
def test_names_of_images_begin_below_the_folder(
    make_folder,
    monkeypatch,
    place,
):
    photos = make_folder(
        {
            "cat/a.png": 0,
            "cat/deep/b.png": 0,
            "dog/c.png": 1,
        }
    )
    root = photos.rename(photos.parent / "photos").parent
    monkeypatch.chdir(root / "photos" if place == "." else root)
    folder = Folder(pathlib.Path(place.format(root=root)))

    source = folder.read(None, ("cat", "dog"))

    keys = [source.key_of(index) for index in range(3)]
    assert keys == [b"cat/a.png", b"cat/deep/b.png", b"dog/c.png"]


def test_skipped_files_are_reported_once(make_folder, make_config, caplog):
    images = make_flat(2) | {"dog/same.JFIF": 1}
    others = [
        "cat/._000.png",
        ".cache/x.png",
        "cat/.hidden/x.png",
        "dog/.DS_Store",
        "dog/notes.TXT",
        "dog/LICENSE",
    ]
    others += [f"cat/{i}.heic" for i in range(12)]
    path = make_folder(images | dict.fromkeys(others, b""))

    train = list_names(path, "train", make_config())
    test = list_names(path, "test", make_config())

    assert sorted(train + test) == sorted(images)
    (record,) = caplog.records
    assert str(path) in record.message
    assert record.message.endswith(
        ": 12 .heic files are skipped: convert to JPEG or PNG. "
        "2 files that are not images are skipped: 1 .txt, 1 without extension."
    )


def test_a_class_of_files_to_convert_is_an_error_that_names_them(make_folder, open_data):
    others = ("emu/0.HEIC", "emu/1.dng", "emu/2.dng", "emu/a.txt")
    files = make_flat(2) | dict.fromkeys(others, b"")
    path = make_folder(files)
    rule = (
        r"no images.*2 \.dng files are skipped: convert to JPEG or PNG\."
        r".*1 \.heic file is skipped.*1 file that is not .* \.txt"
    )

    with rejects(f"{path}/emu", rule):
        open_data(f"folder:{path}")
    with rejects(f"{path}/emu", rule):
        list_images([f"{path}/emu"])


def test_special_files_and_links_to_themselves_are_no_traceback(
    make_folder,
    make_config,
    caplog,
):
    """A pipe would block its reader for ever."""
    files = make_flat(2)
    path = make_folder(files)
    os.mkfifo(path / "cat/pipe.png")
    (path / "dog/pipe.png").symlink_to(path / "cat/pipe.png")
    for link in ("loop", "cat/loop", "cat/loop.png"):
        (path / link).symlink_to(path / link)

    source, names = open_names(path, "all", make_config())

    assert names == sorted([*files, "cat/loop.png"])
    assert caplog.messages[0].endswith(
        "3 files that are not images are skipped: "
        "2 special (pipe, socket or device), 1 without extension."
    )
    with pytest.raises(UnreadableImage, match="cannot be opened"):
        source.image_of(names.index("cat/loop.png"))


@pytest.mark.parametrize("closed", ["images", "images/cat", "images/cat/deep"])
def test_a_folder_that_cannot_be_read_is_an_error(
    make_folder,
    open_data,
    monkeypatch,
    closed,
):
    path = make_folder(make_flat(2) | {"cat/deep/x.png": 1})
    closed_folder = path.parent / closed
    scandir = os.scandir

    def deny(folder):
        if str(folder) == str(closed_folder):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", deny)
    rule = rf"Folder '{closed_folder}' cannot be read \(Permission denied\)"

    with pytest.raises(ValueError, match=rule):
        open_data(f"folder:{path}")


def test_folders_may_be_deeper_than_the_recursion_limit(make_folder, make_config):
    """The limit is lowered here: few programs can remove folders deeper than the usual one."""
    files = make_flat(2) | {f"cat/{'d/' * 300}x.png": 1}
    path = make_folder(files)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)

    try:
        names = list_names(path, "all", make_config())
    finally:
        sys.setrecursionlimit(limit)

    assert names == sorted(files)


def test_links_are_followed_once(make_folder, make_config, tmp_path):
    """Links to the folder itself, to parents and in circles end.

    Another folder that is linked twice is read once.
    """
    files = make_flat(4)
    path = make_folder(files)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    content = (path / "cat/000.png").read_bytes()
    (elsewhere / "x.png").write_bytes(content)

    targets = {
        "cat/up": path,
        "cat/again": path,
        "dog/up": path,
        "cat/self": path / "cat",
        "cat/itself": path / "cat",
        "dog/inner": path / "dog",
        "cat/one": elsewhere,
        "cat/two": elsewhere,
    }
    for link, target in targets.items():
        (path / link).symlink_to(target, target_is_directory=True)

    names = list_names(path, "all", make_config())

    assert names == sorted([*files, "cat/one/x.png"])
