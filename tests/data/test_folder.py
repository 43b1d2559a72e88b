"""Image folders: which files, which classes, which split, and what each mistake is told."""

import hashlib
import pickle

import numpy as np
import pytest

from vit_jax.data.sources import open_source


def open_names(path, split, config, seed=0):
    source = open_source(f"folder:{path}", split, config, seed)
    return source, [source.name_of(i)[len(str(path)) + 1 :] for i in range(len(source))]


def flat(per_class=10):
    return {f"{name}/{i:03}.png": i for name in ("cat", "dog") for i in range(per_class)}


def test_split_folders_are_used(make_folder, make_config):
    path = make_folder({"train/cat/a.PNG": 1, "train/dog/deep/er/b.png": 2, "val/dog/c.png": 3})
    config = make_config(test_split="val")
    train, names = open_names(path, "train", config)
    assert names == ["train/cat/a.PNG", "train/dog/deep/er/b.png"]
    val, names = open_names(path, "val", config)
    assert names == ["val/dog/c.png"]
    assert train.class_names == val.class_names == ("cat", "dog")
    assert val[0].label == 1
    assert val.num_classes == 2
    assert val[0].image == (path / "val/dog/c.png").read_bytes()


def test_hidden_files_and_other_files_are_passed_over(make_folder, make_config):
    path = make_folder(
        {**flat(2), "cat/._000.png": b"", "cat/notes.txt": b"", ".cache/x.png": 0, "cat/.hidden/x.png": 0}
    )
    sources = [open_names(path, split, make_config())[1] for split in ("train", "test")]
    assert sorted(name for names in sources for name in names) == sorted(flat(2))


def test_holdout_is_a_fraction_of_every_class_and_fixed(make_folder, make_config):
    path = make_folder(flat(20))
    config = make_config(holdout_fraction=0.25)
    _, train = open_names(path, "train", config)
    _, test = open_names(path, "test", config)
    assert sorted(train + test) == sorted(flat(20))
    assert [sum(name.startswith(c) for name in test) for c in ("cat", "dog")] == [5, 5]
    assert open_names(path, "test", config)[1] == test
    assert open_names(path, "test", config, seed=1)[1] != test
    assert [n[4:] for n in test if n.startswith("cat")] != [n[4:] for n in test if n.startswith("dog")]


def test_the_holdout_of_a_seed_never_changes(make_folder, make_config):
    """Weights are judged on images that they were not trained on only as long as this is so."""
    by_hash = sorted(flat(20), key=lambda name: hashlib.sha256(b"7/" + name.encode()).digest())
    expected = {name for c in ("cat", "dog") for name in [n for n in by_hash if n.startswith(c)][:3]}
    _, names = open_names(make_folder(flat(20)), "test", make_config(holdout_fraction=0.15), seed=7)
    assert names == sorted(expected)


def test_a_class_named_like_a_split_is_a_class(make_folder, make_config):
    path = make_folder({f"{name}/{i}.png": i for name in ("bus", "train") for i in range(4)})
    assert open_names(path, "train", make_config())[0].class_names == ("bus", "train")


def test_names_outside_ascii_and_pickling(make_folder, make_config):
    path = make_folder({f"{name}/{i}.png": i for name in ("Kätzchen", "犬") for i in range(4)})
    source, _ = open_names(path, "train", make_config())
    copy = pickle.loads(pickle.dumps(source))
    assert [copy[i] for i in range(len(copy))] == [source[i] for i in range(len(source))]
    assert copy.name_of(0) == source.name_of(0)


def test_labels_follow_classes(make_folder, make_config):
    source, names = open_names(make_folder(flat(5)), "train", make_config())
    assert np.array_equal([source[i].label for i in range(len(source))], [name.startswith("dog") for name in names])


@pytest.mark.parametrize(
    ("files", "split", "fields", "message"),
    [
        ({"a.png": 1}, "train", {}, "at least two classes; it has none"),
        ({"cat/a.png": 1}, "train", {}, "only one, 'cat'"),
        ({**flat(), "emu/readme.txt": b""}, "train", {}, "emu.*has no images"),
        ({**flat(), "emu/a.png": 1}, "train", {}, "with one image, .*: emu"),
        (flat(), "val", {}, "'val'.*'train', 'test'"),
        (flat(), "train", {"test_split": "train"}, "must differ"),
        (flat(), "train[:90%]", {"train_split": "train[:90%]"}, "parts of splits exist only for TFDS"),
        (flat(), "train", {"holdout_fraction": 0.0}, "holdout_fraction is 0.0"),
        (
            {f"train/{n}": 1 for n in flat()},
            "test",
            {},
            r"no split 'test'; it has \['train'\]\. Give folder:.*images/train, and a part of it is held out",
        ),
        ({f"training/{n}": 1 for n in flat()} | {f"test/{n}": 1 for n in flat()}, "train", {}, "no split 'train'"),
        (flat(), "all", {"test_split": "all"}, "must differ"),
        (flat(), "trian", {}, "'trian'.*allowed are .*'train', 'test', 'all'"),
        (
            {f"train/{n}": 1 for n in flat()} | {"test/cat/a.png": 1, "test/emu/b.png": 1},
            "test",
            {},
            "does not have: emu",
        ),
        ({f"train/{n}": 1 for n in flat()} | {"test/cat/a.txt": b""}, "test", {}, "cat.*has no images"),
        ({"train/cat/a.png": 1, "test/cat/a.png": 1}, "train", {}, "only one, 'cat'"),
    ],
)
def test_mistakes_are_named(make_folder, make_config, files, split, fields, message):
    with pytest.raises(ValueError, match=message):
        open_source(f"folder:{make_folder(files)}", split, make_config(**fields), 0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cat", "Cat", "dog"), "'Cat' and 'cat' of .* differ only in upper and lower case"),
        (("Ärger", "ärger"), "differ only in upper and lower case"),
        (("K\u00e4tzchen", "Ka\u0308tzchen"), r"how Unicode spells them, 'Ka\\u0308tzchen' and 'K\\xe4tzchen'"),
        (("K\u00e4tzchen", "ka\u0308tzchen"), "differ only in upper and lower case"),
    ],
)
@pytest.mark.parametrize("layout", ["{}/{}.png", "train/{}/{}.png", "split"])
def test_names_that_clash(make_folder, make_config, names, message, layout):
    if layout == "split":  # one spelling in train, another in test
        files = {f"train/{name}/0.png" for name in (names[0], "zebra")} | {f"test/{name}/0.png" for name in names[1:]}
    else:
        files = {layout.format(name, i) for name in names for i in range(2)} | {"test/dog/a.png", "test/emu/a.png"}
    if layout == "{}/{}.png":
        files -= {"test/dog/a.png", "test/emu/a.png"}
    path = make_folder(dict.fromkeys(sorted(files), 1))
    with pytest.raises(ValueError, match=message):
        open_source(f"folder:{path}", "test", make_config(), 0)


def test_the_whole_of_a_folder_without_splits(make_folder, make_config):
    """Also where a class has one image, of which none could be held out."""
    files = {**flat(3), "emu/a.png": 1}
    source, names = open_names(make_folder(files), "all", make_config())
    assert names == sorted(files)
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("names", [("Test", "Train"), ("test_set", "training_set")])
def test_splits_under_other_names_are_no_classes(make_folder, make_config, names):
    """Otherwise a network would learn to tell training images from test images."""
    path = make_folder({f"{split}/{name}": level for split in names for name, level in flat(2).items()})
    test, train = names
    message = f"'{test}', '{train}' .*look like splits.*'cat', 'dog'.*train_split={train} and .*test_split={test} "
    with pytest.raises(ValueError, match=message):
        open_source(f"folder:{path}", "train", make_config(), 0)
    config = make_config(train_split=train, test_split=test)
    assert open_names(path, test, config)[1] == [f"{test}/{name}" for name in flat(2)]


@pytest.mark.parametrize("more", [{}, {"dog/9.png": 1}, {"dog/new/9.png": 1}, {"emu/9.png": 1}])
def test_classes_may_hold_folders(make_folder, make_config, more):
    files = {f"{name}/old/{i}.png": i for name in ("cat", "dog") for i in range(2)} | more
    assert open_names(make_folder(files), "all", make_config())[1] == sorted(files)


def test_files_that_are_passed_over_are_told_once(make_folder, make_config, caplog):
    others = {f"cat/{i}.heic": b"" for i in range(12)} | {
        "dog/notes.TXT": b"",
        "dog/LICENSE": b"",
        "dog/.DS_Store": b"",
    }
    path = make_folder({**flat(2), "dog/same.JFIF": 1, **others})
    names = [name for split in ("train", "test") for name in open_names(path, split, make_config())[1]]
    assert sorted(names) == sorted([*flat(2), "dog/same.JFIF"])
    (record,) = caplog.records
    assert record.message.endswith(" we read: 12 .heic, 1 .txt, 1 without extension.")
    assert str(path) in record.message


def test_links_in_circles_end(make_folder, make_config):
    path = make_folder(flat(4))
    for link in ("cat/up", "cat/again", "dog/up"):
        (path / link).symlink_to(path, target_is_directory=True)
    for link in ("cat/self", "cat/itself", "dog/inner"):
        (path / link).symlink_to((path / link).parent, target_is_directory=True)
    names = [name for split in ("train", "test") for name in open_names(path, split, make_config())[1]]
    assert sorted(names) == sorted(flat(4))


def test_linked_folders_are_followed_once(make_folder, make_config, tmp_path):
    path = make_folder(flat(4))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.png").write_bytes((path / "cat/000.png").read_bytes())
    for link in ("cat/one", "cat/two"):
        (path / link).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    names = [name for split in ("train", "test") for name in open_names(path, split, make_config())[1]]
    assert sorted(names) == sorted([*flat(4), "cat/one/x.png"])


def test_missing_folder(tmp_path, make_config):
    with pytest.raises(ValueError, match="There is no folder"):
        open_source(f"folder:{tmp_path / 'nowhere'}", "train", make_config(), 0)


@pytest.mark.parametrize("data", ["folders:/x", "cifar10", "tfds:", "folder:", ""])
def test_unknown_kind_of_data(make_config, data):
    with pytest.raises(ValueError, match="allowed are"):
        open_source(data, "train", make_config(), 0)
