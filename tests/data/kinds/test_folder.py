"""Image folders: which files, which classes, which split, and the message for each mistake."""

import hashlib
import inspect
import os
import pickle
import re
import sys

import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import list_images
from vit_jax.data.sources import holds_out, open_source


def open_names(path, split, config, seed=0):
    source = open_source(f"folder:{path}", split, config, seed)
    return source, [source.name_of(i)[len(str(path)) + 1 :] for i in range(len(source))]


def flat(per_class=10):
    return {f"{name}/{i:03}.png": i for name in ("cat", "dog") for i in range(per_class)}


def below(split, files):
    return {f"{split}/{name}": content for name, content in files.items()}


def test_split_folders_are_used(make_folder, make_config):
    files = {
        "train/cat/a.PNG": 1,
        "train/dog/deep/er/b.png": 2,
        "val/dog/c.png": 3,
        "sketches/cat/d.png": 4,
    }
    path = make_folder(files)
    config = make_config(test_split="val")
    train, names = open_names(path, "train", config)

    assert names == ["train/cat/a.PNG", "train/dog/deep/er/b.png"]

    val, names = open_names(path, "val", config)

    assert names == ["val/dog/c.png"]
    assert train.class_names == val.class_names == ("cat", "dog")
    assert val[0].label == 1
    assert val.num_classes == 2
    assert val[0].image == (path / "val/dog/c.png").read_bytes()
    assert open_names(path, "sketches", config)[1] == [
        "sketches/cat/d.png"
    ]  # a further split of any name


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "val"),
        ("training", "validation"),
        ("train", "valid"),
        ("training", "test"),
    ],
)
def test_usual_names_of_splits_are_known(make_folder, make_config, caplog, train, test):
    path = make_folder(below(train, flat(2)) | below(test, flat(1)))

    assert open_names(path, "train", make_config())[1] == [f"{train}/{name}" for name in flat(2)]
    assert open_names(path, "test", make_config())[1] == [f"{test}/{name}" for name in flat(1)]
    assert (f"{path} has no split 'test': {test!r} is taken." in caplog.messages) == (
        test != "test"
    )
    assert open_names(path, test, make_config())[1] == [f"{test}/{name}" for name in flat(1)]


def test_a_split_of_the_name_itself_comes_first(make_folder, make_config):
    path = make_folder(below("train", flat(2)) | below("test", flat(1)) | below("val", flat(3)))

    assert len(open_names(path, "test", make_config())[1]) == 2
    assert len(open_names(path, "val", make_config())[1]) == 6


def test_parts_of_a_split_are_of_every_class(make_folder, make_config):
    """Chosen by hash, as the hold-out is; two parts of one split of a folder without splits are of all its images."""
    files = flat(10) | {f"emu/{i:03}.png": i for i in range(3)}
    path = make_folder(files)
    config = make_config(train_split="train[:80%]", test_split="train[80%:]")
    train, test = (
        open_names(path, split, config)[1] for split in (config.train_split, config.test_split)
    )

    assert sorted(train + test) == sorted(files)
    assert [sum(name.startswith(kind) for name in test) for kind in ("cat", "dog", "emu")] == [
        2,
        2,
        1,
    ]
    assert not holds_out(f"folder:{path}", config)
    assert not holds_out("digits", make_config(train_split="train[:100]")), (
        "of other data it is not for us to judge"
    )
    assert holds_out(f"folder:{path}", make_config(train_split="train[:80%]"))

    middle = open_names(path, "train[20%:50%]", config)[1]

    assert len(middle) == 7
    assert {*middle} < {*train}

    rest = open_names(path, "train[:50%]", make_config(train_split="train[:50%]"))[1]

    assert not {*rest} & {*open_names(path, "test", make_config())[1]}, (
        "half of what the hold-out leaves"
    )

    path = make_folder(below("train", files) | below("test", files))
    train = open_names(path, "train[:80%]", make_config(train_split="train[:80%]"))[1]

    assert len(train) == 18
    assert all(name.startswith("train/") for name in train)


def test_holdout_is_a_fixed_fraction_of_every_class(make_folder, make_config):
    """By the formula: weights are evaluated on images that they were not trained on only as long as it stays."""
    path = make_folder(flat(20))
    by_hash = sorted(flat(20), key=lambda name: hashlib.sha256(b"7/" + name.encode()).digest())

    expected = {
        name for c in ("cat", "dog") for name in [n for n in by_hash if n.startswith(c)][:3]
    }
    config = make_config(holdout_fraction=0.15)
    test, train = (open_names(path, split, config, seed=7) for split in ("test", "train"))

    assert test[1] == sorted(expected)
    assert sorted(train[1] + test[1]) == sorted(flat(20))
    assert open_names(path, "test", config, seed=8)[1] != test[1]
    assert [train[0][i].label for i in range(34)] == train[0].labels.tolist() == [0] * 17 + [1] * 17


def test_every_image_of_a_folder_without_splits(make_folder, make_config):
    """A class may be named like a split, in any script, and have one image, of which none could be held out."""
    files = {f"{name}/{i}.png": i for name in ("Kätzchen", "train") for i in range(3)} | {
        "犬/a.png": 1
    }
    path = make_folder(files)
    source, names = open_names(path, "all", make_config())

    assert names == sorted(files)
    assert source.class_names == ("Kätzchen", "train", "犬")

    copy = pickle.loads(pickle.dumps(source))

    assert copy.labels.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert [copy[i].image for i in range(7)] == [(path / name).read_bytes() for name in names]


TRAIN = below("train", flat())
TEST = below("test", flat())


@pytest.mark.parametrize(
    ("files", "split", "fields", "rule"),
    [
        ({"a.png": 1}, "train", {}, "two classes.*none"),
        ({"cat/a.png": 1}, "train", {}, "two classes.*'cat'"),
        ({**flat(), "emu/readme.txt": b""}, "train", {}, "emu.*no images"),
        ({**flat(), "emu/a.png": 1}, "train", {}, "one image.*emu"),
        ({}, "train", {}, "no such folder"),
        (flat(), "val", {}, "'val'.*'train', 'test', 'all'"),
        (flat(), "train", {"test_split": "train"}, "differ"),
        (flat(), "all", {"test_split": "all"}, "differ"),
        *(
            (
                flat(),
                split,
                {"train_split": split},
                rf"{re.escape(split)}.*percent.*'train\[:99%\]'",
            )
            for split in ("train[:90]", "train[50%:50%]", "train[:101%]", "train[::2]", "train[")
        ),
        *(
            (flat(), "train", {"holdout_fraction": x}, f"config.input.holdout_fraction.*{x}")
            for x in (0.0, 1.0)
        ),
        (TRAIN, "test", {}, r"folder:.*images.*'test'.*\['train'\].*'train\[90%:\]'"),
        (TRAIN | TEST, "tset", {}, "'tset'.*did you mean 'test'"),
        (TRAIN | {"test/cat/a.png": 1, "test/emu/b.png": 1}, "test", {}, "'test'.*'train'.*emu"),
    ],
)
def test_mistakes_are_named(make_folder, make_config, files, split, fields, rule):
    with rejects("", rule):
        open_source(f"folder:{make_folder(files)}", split, make_config(**fields), 0)


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
def test_names_that_clash(make_folder, make_config, names, rule, layout):
    files = {f"{name}/{i}.png": 1 for name in names for i in range(2)}
    if layout == "train":
        files = below("train", files) | {"test/dog/a.png": 1, "test/emu/a.png": 1}
    if layout == "split":  # one spelling in train, another in test
        files = {f"train/{name}/0.png": 1 for name in (names[0], "zebra")} | {
            f"test/{n}/0.png": 1 for n in names[1:]
        }

    with rejects("", rule):
        open_source(f"folder:{make_folder(files)}", "test", make_config(), 0)


@pytest.mark.parametrize(
    "names",
    [
        ("Test", "Train"),
        ("test_set", "training_set"),
    ],
)
def test_splits_under_other_names_are_no_classes(make_folder, make_config, names):
    """Otherwise a network would learn to tell training images from test images."""
    test, train = names
    path = make_folder(below(test, flat(2)) | below(train, flat(2)))
    message = f"'{test}', '{train}' .*look like splits.*'cat', 'dog'.*train_split={train} and .*test_split={test} "

    with pytest.raises(ValueError, match=message):
        open_source(f"folder:{path}", "train", make_config(), 0)

    config = make_config(train_split=train, test_split=test)

    assert open_names(path, test, config)[1] == [f"{test}/{name}" for name in flat(2)]


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
    files = {f"{name}/old/{i}.png": i for name in ("cat", "dog") for i in range(2)} | more
    assert open_names(make_folder(files), "all", make_config())[1] == sorted(files)


def test_skipped_files_are_reported_once(make_folder, make_config, caplog):
    hidden = dict.fromkeys(
        ("cat/._000.png", ".cache/x.png", "cat/.hidden/x.png", "dog/.DS_Store"),
        b"",
    )
    others = dict.fromkeys(
        [*(f"cat/{i}.heic" for i in range(12)), "dog/notes.TXT", "dog/LICENSE"],
        b"",
    )
    path = make_folder({**flat(2), "dog/same.JFIF": 1, **hidden, **others})
    names = [
        name for split in ("train", "test") for name in open_names(path, split, make_config())[1]
    ]

    assert sorted(names) == sorted([*flat(2), "dog/same.JFIF"])

    (record,) = caplog.records

    assert record.message.endswith(
        ": 12 .heic files are skipped: convert to JPEG or PNG. "
        "2 files that are not images are skipped: 1 .txt, 1 without extension."
    )
    assert str(path) in record.message


def test_a_class_of_files_to_convert_is_an_error_that_names_them(make_folder, make_config):
    path = make_folder(
        {
            **flat(2),
            "emu/0.HEIC": b"",
            "emu/1.dng": b"",
            "emu/2.dng": b"",
            "emu/a.txt": b"",
        }
    )
    expected = r"\.dng files are skipped: convert to JPEG or PNG\."
    expected += r".*1 \.heic file is skipped.*1 file that is not .* \.txt"

    with rejects(f"{path}/emu", f"no images.*2 {expected}"):
        open_source(f"folder:{path}", "all", make_config(), 0)
    with rejects(f"{path}/emu", f"no images.*2 {expected}"):
        list_images([f"{path}/emu"])


def test_special_files_and_links_to_themselves_are_no_traceback(make_folder, make_config, caplog):
    """A pipe would block its reader for ever."""
    path = make_folder(flat(2))
    os.mkfifo(path / "cat/pipe.png")
    (path / "dog/pipe.png").symlink_to(path / "cat/pipe.png")

    for link in ("loop", "cat/loop", "cat/loop.png"):
        (path / link).symlink_to(path / link)

    source, names = open_names(path, "all", make_config())

    assert names == sorted([*flat(2), "cat/loop.png"])

    expected = "3 files that are not images are skipped: 2 special (pipe, socket or device), 1 without extension."
    assert caplog.messages[0].endswith(expected)

    with pytest.raises(UnreadableImage, match="cannot be opened"):
        source.image_of(names.index("cat/loop.png"))


@pytest.mark.parametrize("closed", ["images", "images/cat", "images/cat/deep"])
def test_a_folder_that_cannot_be_read_is_an_error(make_folder, make_config, monkeypatch, closed):
    path = make_folder(flat(2) | {"cat/deep/x.png": 1})
    scandir = os.scandir

    def refuse(folder):
        if str(folder) == str(path.parent / closed):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ValueError,
        match=rf"Folder '{path.parent / closed}' cannot be read \(Permission denied\)",
    ):
        open_source(f"folder:{path}", "all", make_config(), 0)


def test_folders_may_be_deeper_than_the_recursion_limit(make_folder, make_config):
    """The limit is lowered for it: few programs can remove folders deeper than the usual one."""
    files = flat(2) | {f"cat/{'d/' * 300}x.png": 1}
    path = make_folder(files)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)

    try:
        assert open_names(path, "all", make_config())[1] == sorted(files)
    finally:
        sys.setrecursionlimit(limit)


def test_links_are_followed_once(make_folder, make_config, tmp_path):
    """Links to the folder itself, to parents and in circles end; another folder linked twice is read once."""
    path = make_folder(flat(4))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.png").write_bytes((path / "cat/000.png").read_bytes())

    for link in ("cat/up", "cat/again", "dog/up"):
        (path / link).symlink_to(path, target_is_directory=True)

    for link in ("cat/self", "cat/itself", "dog/inner"):
        (path / link).symlink_to((path / link).parent, target_is_directory=True)

    for link in ("cat/one", "cat/two"):
        (path / link).symlink_to(tmp_path / "elsewhere", target_is_directory=True)

    assert open_names(path, "all", make_config())[1] == sorted([*flat(4), "cat/one/x.png"])
