"""The choice of splits: held-out images, whole folders, both sides of a dataset."""

import dataclasses
import pathlib
import re

import pytest

from tests.evals.samples import NAMES, sample_pixels, sample_weights, write_classes
from tests.rejections import rejects
from tests.weights.small_networks import TRAINING
from vit_jax.config import InputConfig
from vit_jax.data.sources import normalize_data, open_source
from vit_jax.data.subset import read_held_hashes
from vit_jax.evals import splits
from vit_jax.evals.splits import (
    RELEASED,
    SplitChoice,
    open_labelled,
    open_pair,
    open_split,
    split_to_search,
)
from vit_jax.weights.description import TrainingData


def list_files(*folders, files):
    """Return the files below each of these folders."""
    return [f"{folder}/{file}" for folder in folders for file in files]


TEN = [f"{number}.png" for number in range(10)]
TEN_EACH = list_files(*NAMES[:2], files=TEN)


def list_splits(*folders):
    """Return the images of two classes below each of these folders."""
    return list_files(*folders, files=TEN_EACH)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes empty files and returns the data.

    The tests run in the folder around them.
    """
    monkeypatch.chdir(tmp_path)

    def make(folder, files=TEN_EACH):
        for file in files:
            path = tmp_path / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return f"folder:{folder}"

    return make


HOLDOUT = InputConfig(
    train_split="train",
    test_split="test",
    image_size=(8, 8),
    holdout_fraction=0.3,
)


def make_weights(data, **details):
    """Return weights of a run on these data."""
    usual = {
        "seed": 7,
        "holdout_fraction": 0.3,
        "train_split": "train",
        "test_split": "test",
        "classes": (),
    }
    details = usual | details
    training = TrainingData(data=normalize_data(data), **details)
    return sample_weights(training=training)


def list_names(source):
    """Return the names of images below the folder."""
    length = len(TEN_EACH[0])
    names = []
    for index in range(len(source)):
        names.append(source.name_of(index)[-length:])
    return names


def judge(data, weights, **choice):
    """Return names of the images below the folder, and the notes."""
    source, _, notes, _ = open_labelled(
        data,
        weights,
        SplitChoice(**choice),
    )
    return list_names(source), notes


@pytest.mark.parametrize(
    "make_any_weights",
    [
        sample_weights,
        lambda: make_weights("digits"),
    ],
    ids=["untrained", "trained on other data"],
)
def test_a_folder_made_for_testing_is_judged_whole(make, make_any_weights):
    """All images are judged, also of a class that has one."""
    data = make("testset", [*TEN_EACH, "cat/0.png"])

    source, words, notes, _ = open_labelled(data, make_any_weights())

    assert len(source) == 21
    assert words == "all of folder:testset, 21 of 21 images"
    assert notes == []


def test_images_of_training_are_known_by_any_path(make, tmp_path):
    weights = make_weights(make("my-images"))
    (tmp_path / "link").symlink_to(tmp_path / "my-images")

    held_out, notes = judge("folder:my-images", weights)

    assert len(held_out) == 6
    assert notes == []
    other_paths = (
        "my-images/",
        "./my-images",
        f"{tmp_path}/my-images",
        "link",
        "my-images/ant/..",
    )
    for path in other_paths:
        assert judge(f"folder:{path}", weights) == (held_out, []), path


def test_images_of_training_are_known_by_earlier_checkpoints(make):
    """Earlier checkpoints have the path as it was given."""
    data = make("my-images")
    weights = make_weights(data)
    training = dataclasses.replace(weights.training, data="folder:./my-images")
    earlier = dataclasses.replace(weights, training=training)

    assert judge(data, earlier) == judge(data, weights)


def test_splits_of_a_flat_folder(make):
    data = make("my-images")
    weights = make_weights(data)

    test, _ = judge(data, weights)
    train, _ = judge(data, weights, split="train")
    everything, _ = judge(data, weights, split="all")

    assert sorted(test + train) == sorted(TEN_EACH)
    assert sorted(everything) == sorted(TEN_EACH)
    assert open_labelled(data, weights).words == "test of folder:my-images, 6 of 20 images"


def test_a_copy_is_not_known_which_a_note_says(make):
    data = make("my-images")
    copy = make("copy")
    weights = make_weights(data)

    names, (note,) = judge(copy, weights)

    assert len(names) == 20
    assert re.search(
        r"trained on folder:/.*my-images\. If folder:copy holds the same.*--split=test",
        note,
    )
    held_out = judge(data, weights)
    assert judge(copy, weights, split="test") == held_out


def test_names_of_the_run_are_names_here(make):
    data = make("my-images")
    weights = make_weights(
        data,
        train_split="fit",
        test_split="val",
    )

    held_out = judge(data, weights)
    train = judge(data, weights, split="train")

    names, _ = held_out
    assert len(names) == 6
    assert judge(data, weights, split="val") == held_out
    assert judge(data, weights, split="test") == held_out
    assert judge(data, weights, split="fit") == train
    with rejects(
        "--split=vla", "must be one of train, test, all, fit, val for folder:.*no sub-folders"
    ):
        open_labelled(
            data,
            weights,
            SplitChoice(split="vla"),
        )


def test_classes_of_the_run_are_those_judged(make):
    data = make("my-images", [*TEN_EACH, "emu/0.png", "emu/1.png"])

    by_run, _ = judge(data, make_weights(data, classes=NAMES[:2]))
    by_option, _ = judge(
        data,
        make_weights(data),
        classes=("bee", "ant"),
    )

    assert len(by_run) == 6
    assert len(by_option) == 6


def test_an_option_asks_for_a_holdout(make):
    data = make("images")
    weights = sample_weights()

    names, notes = judge(
        data,
        weights,
        holdout_fraction=0.2,
        seed=1,
    )
    train, _ = judge(
        data,
        weights,
        split="train",
        holdout_fraction=0.2,
    )
    test, _ = judge(data, weights, split="test")

    assert len(names) == 4
    assert notes == []
    assert len(train) == 16
    assert len(test) == 2


@pytest.mark.parametrize(
    "choice",
    [
        {"seed": 1},
        {"holdout_fraction": 0.5},
    ],
)
def test_another_holdout_than_that_of_training_is_noted(make, choice):
    data = make("images")
    weights = make_weights(data)

    names, (note,) = judge(data, weights, **choice)

    of_training = judge(data, weights)
    names_of_training, _ = of_training

    assert names != names_of_training
    assert note.startswith(
        "training held out 0.3 of each class by seed 7; this is another hold-out"
    )
    assert judge(data, weights, seed=7, holdout_fraction=0.3) == of_training


@pytest.fixture
def changed_folder(make, tmp_path):
    """A folder that has lost a held-out image and gained others since training.

    Returns the data, the weights, the trained and the held-out images, and the missing one.
    """
    data = make("my-images")
    test = open_source(data, "test", HOLDOUT, 7)
    trained = list_names(open_source(data, "train", HOLDOUT, 7))
    weights = make_weights(data, held_up_to=read_held_hashes(test, 7))
    held_out, notes = judge(data, weights)

    assert len(held_out) == 6
    assert notes == []

    missing = held_out[0]
    (tmp_path / "my-images" / missing).unlink()
    new_images = [f"{letter}.png" for letter in "abcdefghijkl"]
    new_files = list_files(*NAMES[:2], files=new_images)
    make("my-images", new_files)
    return data, weights, trained, held_out, missing


def test_a_changed_folder_holds_out_nothing_that_was_trained_on(changed_folder):
    """Without the recorded hashes, the first images by hash would be others now."""
    data, weights, trained, held_out, missing = changed_folder

    now, notes = judge(data, weights)

    without_hashes, _ = judge(data, make_weights(data))
    assert set(trained) & set(without_hashes)
    assert not set(trained) & set(now)
    assert set(held_out) - {missing} < set(now)
    assert notes == [
        "folder:my-images has changed since training: what was held out then is held out, and of "
        "new images those that would have been. No image has changed sides."
    ]


def test_both_sides_of_a_changed_folder(changed_folder):
    data, weights, *_ = changed_folder

    test, _ = judge(data, weights)
    train, _ = judge(data, weights, split="train")
    everything, (note,) = judge(data, weights, split="all")
    pair = open_pair(data, SplitChoice(), weights.training)

    assert sorted(train + test) == sorted(everything)
    assert "trained on most of folder:my-images" in note
    assert len(pair.test) == len(test)
    assert len(pair.train) == len(train)


def test_weights_without_recorded_hashes_have_the_same_holdout(make):
    data = make("my-images")
    test = open_source(data, "test", HOLDOUT, 7)

    hashes = read_held_hashes(test, 7)
    weights = make_weights(data)
    weights_with_hashes = make_weights(data, held_up_to=hashes)

    assert judge(data, weights) == judge(data, weights_with_hashes)


def test_a_folder_that_was_given_splits_since(make):
    data = make("my-images", list_splits("test", "train"))
    weights = make_weights(data, held_up_to={"ant": "1" * 16})

    _, notes = judge(data, weights)

    assert notes == [
        "folder:my-images had no splits in training: its test may hold training images."
    ]


@pytest.fixture
def split_folders(make):
    """A folder with the splits test, Train and val; val has one image more."""
    files = list_splits("test", "Train", "val")
    return make("splits", [*files, "val/cat/0.png"])


@pytest.mark.parametrize(
    "make_any_weights",
    [
        sample_weights,
        lambda: make_weights("folder:other", test_split="val"),
    ],
    ids=["untrained", "trained on other data"],
)
def test_split_folders(split_folders, make_any_weights):
    source, words, notes, _ = open_labelled(split_folders, make_any_weights())

    assert words == "test of folder:splits, 20 of 20 images"
    assert notes == []
    assert source.class_names == NAMES


def test_another_split_folder(split_folders):
    val = open_labelled(
        split_folders,
        sample_weights(),
        SplitChoice(split="val"),
    )

    assert val.words == "val of folder:splits, 21 of 21 images"


def test_split_folders_of_training(split_folders):
    weights = make_weights(
        split_folders,
        train_split="Train",
        test_split="test",
        holdout_fraction=0.1,
    )

    test = open_labelled(split_folders, weights)
    train = open_labelled(
        split_folders,
        weights,
        SplitChoice(split="Train"),
    )

    assert test.words == "test of folder:splits, 20 of 20 images"
    assert len(train.source) == 20


@pytest.mark.parametrize(
    ("data", "choice", "options"),
    [
        ("folder:flat", {"data_dir": "/nowhere"}, "--data_dir"),
        ("folder:flat", {"train_split": "train"}, "--train_split"),
        ("folder:flat", {"split": "all", "seed": 1}, "--seed"),
        ("folder:splits", {"seed": 7, "holdout_fraction": 0.5}, "--seed, --holdout_fraction"),
        ("folder:splits", {"data_dir": "/nowhere"}, "--data_dir"),
        ("digits", {"holdout_fraction": 0.1}, "--holdout_fraction"),
        ("digits", {"train_split": "train", "seed": 0}, "--train_split, --seed"),
    ],
)
def test_options_without_effect_are_rejected(make, data, choice, options):
    make("flat")
    make("splits", list_splits("test"))

    with rejects(options, f"effect.*{data}"):
        open_labelled(
            data,
            sample_weights(),
            SplitChoice(**choice),
        )


@pytest.mark.parametrize(
    ("folder", "names", "rule"),
    [
        (
            "four",
            ["bee", "emu", "gnat", "gnu"],
            r"classes.*: emu, gnat\..*ant, bee, cat",
        ),
        (
            "many",
            [f"class{number:02}" for number in range(12)],
            "class09 and 2 more",
        ),
    ],
)
def test_classes_that_the_weights_do_not_know(make, folder, names, rule):
    data = make(folder, list_files(*names, files=["0.png"]))

    with rejects(data, rule):
        open_labelled(data, sample_weights())


def test_a_folder_that_does_not_exist(make):
    with rejects("folder:nowhere", "give a folder"):
        open_labelled("folder:nowhere", sample_weights())


def test_names_that_weights_have_twice(make):
    """The name is rejected where the data have it."""
    weights = sample_weights(class_names=("bee", "bee", *NAMES[2:]))
    with_name = make("both", ["bee/0.png", "cat/0.png"])
    without_name = make("else", ["cat/0.png", "dog/0.png"])

    with rejects("w.npz", "more than one class.*bee"):
        open_labelled(with_name, weights)

    source = open_labelled(without_name, weights).source
    assert source.labels.tolist() == [2, 3]


UNNAMED = dataclasses.replace(sample_weights(), class_names=None)


def match_folders(data, **details):
    """Return the output of each folder for weights without names, and the only note."""
    weights = dataclasses.replace(UNNAMED, **details)
    source, _, notes, _ = open_labelled(data, weights)
    (note,) = notes

    outputs = {}
    for index, label in enumerate(source.labels.tolist()):
        path = pathlib.Path(source.name_of(index))
        outputs[path.parent.name] = label
    return outputs, note


@pytest.mark.parametrize(
    "names",
    [
        list("0123456"),
        ["06", "3", "0004", "1", "+2", "00"],
        ["5", "2"],
    ],
    ids=["all", "other spellings", "some"],
)
def test_integer_names_match_outputs_of_weights_without_names_by_value(make, names):
    data = make("numbers", list_files(*names, files=["0.png"]))

    found, note = match_folders(data)

    assert found == {name: int(name) for name in names}
    matches = [f"{name!r} is output {int(name)}" for name in sorted(names)]
    assert ", ".join(matches[:5]) in note
    assert ("and 2 more" in note) == (len(matches) == 7)


def test_outputs_beyond_nine_are_not_in_alphabetical_order(make):
    names = [str(number) for number in range(12)]
    data = make("twelve", list_files(*names, files=["0.png"]))
    twelve = dataclasses.replace(UNNAMED.architecture, num_classes=12)

    found, _ = match_folders(data, architecture=twelve)

    assert found == {name: int(name) for name in names}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["1", "7"], "classes 7 are no outputs.*0 to 6.*--class_names="),
        (["-1", "2"], "classes -1 are no outputs.*0 to 6.*--class_names="),
        (["3", "003", "4"], "classes 003, 3 are not unique.*--class_names="),
        (["1", "bee"], "classes bee cannot be matched.*--class_names="),
        (["a", "b", "c", "d", "e", "f", "g"], "classes a, b, c.*cannot be matched.*--class_names="),
        (["1.0", "²"], "classes 1.0, ² cannot be matched.*--class_names="),
    ],
)
def test_other_names_need_a_label_map(make, names, reason):
    data = make("others", list_files(*names, files=["0.png"]))

    with rejects("folder:others", reason):
        open_labelled(data, UNNAMED)


def test_imagenet_names_match_outputs_of_weights_without_names(make):
    """Folders may be named by WordNet's identifiers or by the names of classes."""
    thousand = dataclasses.replace(UNNAMED.architecture, num_classes=1000)
    ids = make("ids", ["n01440764/0.png", "n15075141/0.png"])
    names = make("names", ["goldfish/0.png", "tench/0.png"])
    details = {"architecture": thousand, "format": "timm"}

    by_id, note = match_folders(ids, **details)
    by_name, _ = match_folders(names, **details)

    assert by_id == {"n01440764": 0, "n15075141": 999}
    assert "ImageNet's names" in note
    assert by_name == {"goldfish": 1, "tench": 0}


def test_a_dataset_that_numbers_its_classes_is_matched_by_these_numbers():
    ten = dataclasses.replace(UNNAMED.architecture, num_classes=10)
    weights = dataclasses.replace(UNNAMED, architecture=ten)

    source, _, notes, _ = open_labelled("digits", weights)

    assert source.class_names == tuple("0123456789")
    assert "numbers of the data's classes: '0' is output 0" in notes[0]
    with rejects("digits has 10 classes", "7.*--class_names="):
        open_labelled("digits", UNNAMED)


def write_table(path, files):
    lines = [f"{file},{file.partition('/')[0]}" for file in files]
    path.write_text("\n".join(["image,label", *lines]))


def test_a_table_is_judged_as_a_folder_is(make, tmp_path):
    """Lines that are added since training change no side of another image."""
    folder = make("my-images")
    table = tmp_path / "my-images/table.csv"
    write_table(table, TEN_EACH[:14])
    held_out = open_source(
        f"csv:{table}",
        "test",
        HOLDOUT,
        7,
    )
    weights = make_weights(f"csv:{table}", held_up_to=read_held_hashes(held_out, 7))

    before, notes = judge("csv:./my-images/table.csv", weights)
    assert len(before) == 4
    assert notes == []

    write_table(table, TEN_EACH)
    after, notes = judge(f"csv:{table}", weights)

    assert set(before) < set(after)
    assert set(after) - set(before) <= set(TEN_EACH[14:])
    assert "No image has changed sides" in notes[0]

    _, notes = judge(folder, weights)
    assert "If folder:my-images holds the same images, say --split=test." in notes[0]


class FakeSource:
    is_multilabel = False

    def __init__(self, *class_names):
        self.class_names = class_names


def test_released_datasets_have_their_splits(monkeypatch):
    opened = []

    def open_source(
        data,
        split,
        config,
        seed,
        held_hashes,
        range_option,
        *,
        is_classified,
    ):
        assert range_option == "--images.value_range"
        opened.append((data, split, config.data_dir))
        return FakeSource("a", "b")

    monkeypatch.setattr(splits, "open_source", open_source)

    for name in (*RELEASED, "vtab:pets"):
        open_pair(name, SplitChoice(data_dir="/data"))

    assert len(RELEASED) == 7
    assert ("tfds:uc_merced", "train[:1000]", "/data") in opened
    assert ("tfds:uc_merced", "train[1000:]", "/data") in opened
    assert ("tfds:imagenet2012", "train[:65000]", "/data") in opened
    assert ("tfds:cars196:2.1.0", "test", "/data") in opened
    assert opened[-2:] == [
        ("vtab:pets", "train800val200", "/data"),
        ("vtab:pets", "test", "/data"),
    ]


def test_digits_with_classes_and_parts(data_dir):
    choice = SplitChoice(
        data_dir=data_dir,
        classes=("5", "7"),
        train_split="train[:50%]",
    )

    pair = open_pair("digits", choice)

    assert pair.train.class_names == pair.test.class_names == ("5", "7")
    assert 0 < len(pair.train) < len(pair.test) * 3


def test_a_flat_folder_is_split_as_in_training(tmp_path):
    write_classes(
        tmp_path / "images",
        [0] * 10 + [1] * 10,
        sample_pixels(20),
    )
    data = f"folder:{tmp_path}/images"
    training = dataclasses.replace(TRAINING, data=f"folder:{tmp_path}/./images")

    as_in_training = open_pair(data, SplitChoice(), training)
    fresh = open_pair(data, SplitChoice())

    assert len(as_in_training.test) == 8
    assert len(fresh.test) == 2

    train_keys = {as_in_training.train.key_of(i) for i in range(12)}
    test_keys = {as_in_training.test.key_of(i) for i in range(8)}

    assert not train_keys & test_keys


@pytest.mark.parametrize(
    ("name", "choice", "field", "rule"),
    [
        ("cifar10", SplitChoice(), "--data=cifar10", "did you mean cifar100"),
        ("digits", SplitChoice(test_split="train"), "split", "both 'train'"),
    ],
)
def test_mistakes(name, choice, field, rule):
    with rejects(field, rule):
        open_pair(name, choice)


def test_splits_of_other_classes(tmp_path, monkeypatch):
    sources = iter([FakeSource("a", "b"), FakeSource("a", "c")])
    monkeypatch.setattr(
        splits,
        "open_source",
        lambda *_, **__: next(sources),
    )

    with rejects("mine:x", "different classes"):
        open_pair("mine:x", SplitChoice())


def test_images_without_a_classifier_need_no_training_split(make):
    """Features and duplicates are computed of a test split alone."""
    data = make("tested", list_splits("test"))

    source = open_split(data, None, SplitChoice())

    assert source.class_names == NAMES[:2]
    assert source.labels.tolist() == [0] * 10 + [1] * 10
    with rejects(
        "folder:tested has no split 'train'",
        "Name one of them as the split, such as 'test'",
    ):
        open_split(data, "train", SplitChoice())


def test_images_without_a_classifier_may_have_one_class(make):
    data = make("single", ["emu/0.png", "emu/1.png"])

    source = open_split(data, "all", SplitChoice())

    assert source.class_names == ("emu",)
    assert source.labels.tolist() == [0, 0]


def test_new_classes_of_a_test_split_follow_those_of_training(make):
    files = [
        "training/cat/0.png",
        "training/dog/0.png",
        "test/ant/0.png",
        "test/dog/1.png",
    ]
    data = make("both", files)

    source = open_split(data, "test", SplitChoice())

    assert source.class_names == ("cat", "dog", "ant")
    assert list_names(source) == ["dog/1.png", "ant/0.png"]
    assert source.labels.tolist() == [1, 2]


def test_a_split_without_images(make):
    make("empty", ["test/notes.txt"])

    with rejects("Folder 'empty/test'", "no images"):
        open_split("folder:empty", "test", SplitChoice())


@pytest.mark.parametrize(
    ("data", "split", "other", "expected"),
    [
        ("folder:tested", "train", "folder:parts", "val"),
        ("folder:parts", "train", "folder:tested", "train"),
        ("folder:whole", "train", "folder:tested", "all"),
        ("folder:tested", "train", "folder:./tested", "train"),
        ("digits", "test", "folder:tested", "test"),
    ],
)
def test_the_only_split_is_searched_for_duplicates(
    make,
    data,
    split,
    other,
    expected,
):
    make("tested", list_splits("val"))
    make("parts", list_splits("train", "val"))
    make("whole")

    found = split_to_search(
        data,
        split,
        SplitChoice(),
        [other],
    )

    assert found == expected
