"""The choice of splits: images held out in training, however they are given; whole folders; both sides of a dataset."""

import dataclasses
import re

import pytest

from tests.evals.samples import NAMES, sample_pixels, sample_weights, write_classes
from tests.rejections import rejects
from tests.weights.small_networks import TRAINING
from vit_jax.config import InputConfig
from vit_jax.data.sources import located, open_source
from vit_jax.data.subset import held_up_to
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

TEN_EACH = [f"{name}/{number}.png" for name in NAMES[:2] for number in range(10)]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes files, which nobody decodes here; the tests run in the folder around them."""
    monkeypatch.chdir(tmp_path)

    def make(folder, files=TEN_EACH):
        for file in files:
            (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).touch()
        return f"folder:{folder}"

    return make


def trained_on(data, **details):
    """Weights of a run on these data."""
    usual = {
        "seed": 7,
        "holdout_fraction": 0.3,
        "train_split": "train",
        "test_split": "test",
        "classes": (),
    }
    return sample_weights(training=TrainingData(data=located(data), **usual | details))


def judged(data, weights, **choice):
    """Names of the images below the folder that was given, and the notes."""
    source, _, notes, _ = open_labelled(data, weights, SplitChoice(**choice))
    return [source.name_of(index)[-len(TEN_EACH[0]) :] for index in range(len(source))], notes


def test_a_folder_made_for_testing_is_judged_whole(make):
    """Also a class with one image of it, and whatever the weights were trained on."""
    files = [*TEN_EACH, "cat/0.png"]
    data = make("testset", files)

    for weights in (sample_weights(), trained_on("digits")):
        source, words, notes, _ = open_labelled(data, weights)

        assert len(source) == 21
        assert words == "all of folder:testset, 21 of 21 images"
        assert notes == []


def test_images_of_training_are_known_however_they_are_given(make, tmp_path):
    data = make("my-images")
    weights = trained_on(data)
    held_out, notes = judged(data, weights)

    assert len(held_out) == 6
    assert notes == []

    (tmp_path / "link").symlink_to(tmp_path / "my-images")
    old = dataclasses.replace(
        weights,
        training=dataclasses.replace(weights.training, data="folder:./my-images"),
    )

    assert judged(data, old) == (held_out, []), (
        "a checkpoint of before has the path as it was given"
    )

    for other in ("my-images/", "./my-images", f"{tmp_path}/my-images", "link", "my-images/ant/.."):
        assert judged(f"folder:{other}", weights) == (held_out, []), other

    rest, _ = judged(data, weights, split="train")

    assert (
        sorted(held_out + rest) == sorted(judged(data, weights, split="all")[0]) == sorted(TEN_EACH)
    )
    assert open_labelled(data, weights).words == "test of folder:my-images, 6 of 20 images"


def test_a_copy_is_not_known_and_that_is_told(make):
    weights = trained_on(make("my-images"))
    names, notes = judged(make("copy"), weights)

    assert len(names) == 20
    assert len(notes) == 1
    assert re.search(
        r"trained on folder:/.*my-images\. If folder:copy holds the same.*--split=test",
        notes[0],
    )

    expected = judged("folder:my-images", weights)
    assert judged("folder:copy", weights, split="test") == expected


def test_names_of_the_run_are_names_here(make):
    data = make("my-images")
    weights = trained_on(data, train_split="fit", test_split="val")
    held_out = judged(data, weights)

    assert len(held_out[0]) == 6
    assert judged(data, weights, split="val") == judged(data, weights, split="test") == held_out

    expected = judged(data, weights, split="train")
    assert judged(data, weights, split="fit") == expected

    with rejects("--split=vla", "train, test, all, fit, val"):
        open_labelled(data, weights, SplitChoice(split="vla"))


def test_classes_of_the_run_are_those_judged(make):
    data = make("my-images", [*TEN_EACH, "emu/0.png", "emu/1.png"])

    assert len(judged(data, trained_on(data, classes=NAMES[:2]))[0]) == 6
    assert len(judged(data, trained_on(data), classes=("bee", "ant"))[0]) == 6


def test_an_option_asks_for_a_holdout(make):
    data = make("images")
    names, notes = judged(data, sample_weights(), holdout_fraction=0.2, seed=1)

    assert len(names) == 4
    assert notes == []
    assert len(judged(data, sample_weights(), split="train", holdout_fraction=0.2)[0]) == 16
    assert len(judged(data, sample_weights(), split="test")[0]) == 2


@pytest.mark.parametrize(
    "choice",
    [
        {"seed": 1},
        {"holdout_fraction": 0.5},
    ],
)
def test_another_holdout_than_that_of_training_is_told(make, choice):
    data = make("images")
    weights = trained_on(data)
    names, notes = judged(data, weights, **choice)

    assert names != judged(data, weights)[0]

    (note,) = notes

    assert note.startswith(
        "training held out 0.3 of each class by seed 7; this is another hold-out"
    )
    assert judged(data, weights, seed=7, holdout_fraction=0.3) == judged(data, weights)


def test_a_folder_that_has_changed_holds_out_nothing_that_was_trained_on(make, tmp_path):
    data = make("my-images")
    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(8, 8),
        holdout_fraction=0.3,
    )
    held_out, trained = (open_source(data, split, config, 7) for split in ("test", "train"))
    weights = trained_on(data, held_up_to=held_up_to(held_out, 7))
    fitted = {trained.name_of(index)[-9:] for index in range(len(trained))}
    before, notes = judged(data, weights)

    assert len(before) == 6
    assert notes == []
    assert judged(data, trained_on(data)) == (before, []), (
        "weights of before, which do not state it"
    )

    (tmp_path / "my-images" / before[0]).unlink()
    make("my-images", [f"{name}/{letter}.png" for name in NAMES[:2] for letter in "abcdefghijkl"])

    assert fitted & {*judged(data, trained_on(data))[0]}, "the first by hash are others now"

    after, notes = judged(data, weights)

    assert not fitted & {*after}
    assert {*before[1:]} < {*after}

    expected_notes = [
        "folder:my-images has changed since training: what was held out then is held out, and of new images those that "
        "would have been. No image has changed sides."
    ]
    assert notes == expected_notes

    rest, _ = judged(data, weights, split="train")
    everything, notes = judged(data, weights, split="all")

    assert sorted(rest + after) == sorted(everything)
    assert "trained on most of folder:my-images" in notes[0]

    pair = open_pair(data, SplitChoice(), weights.training)

    assert len(pair.test) == len(after)
    assert len(pair.train) == len(rest)


def test_a_folder_that_was_given_splits_since(make):
    data = make(
        "my-images",
        [f"{split}/{file}" for split in ("test", "train") for file in TEN_EACH],
    )
    _, notes = judged(data, trained_on(data, held_up_to={"ant": "1" * 16}))

    expected_notes = [
        "folder:my-images had no splits in training: its test may hold images of then."
    ]
    assert notes == expected_notes


def test_split_folders(make):
    files = [f"{split}/{file}" for split in ("test", "Train", "val") for file in TEN_EACH]
    data = make("splits", [*files, "val/cat/0.png"])

    for weights in (sample_weights(), trained_on("folder:other", test_split="val")):
        source, words, notes, _ = open_labelled(data, weights)

        assert words == "test of folder:splits, 20 of 20 images"
        assert notes == []
        assert source.class_names == NAMES

    val = open_labelled(data, sample_weights(), SplitChoice(split="val"))

    assert val.words == "val of folder:splits, 21 of 21 images"

    own = trained_on(data, train_split="Train", test_split="test", holdout_fraction=0.1)

    assert open_labelled(data, own).words == "test of folder:splits, 20 of 20 images"
    assert len(open_labelled(data, own, SplitChoice(split="Train")).source) == 20


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
    make("splits", [f"test/{file}" for file in TEN_EACH])

    with rejects(options, f"effect.*{data}"):
        open_labelled(data, sample_weights(), SplitChoice(**choice))


def test_classes_that_the_weights_do_not_know(make):
    data = make("four", [f"{name}/0.png" for name in ("bee", "emu", "gnat", "gnu")])
    with rejects("folder:four", r"classes.*: emu, gnat\..*ant, bee, cat"):
        open_labelled(data, sample_weights())

    data = make("many", [f"class{number:02}/0.png" for number in range(12)])
    with rejects("class09 and 2 more"):
        open_labelled(data, sample_weights())


def test_a_folder_that_does_not_exist(make):
    with rejects("folder:nowhere", "give a folder"):
        open_labelled("folder:nowhere", sample_weights())


def test_names_that_weights_have_twice(make):
    weights = sample_weights(class_names=("bee", "bee", *NAMES[2:]))
    with rejects("w.npz", "more than one class.*bee"):
        open_labelled(make("both", ["bee/0.png", "cat/0.png"]), weights)

    labels = open_labelled(
        make("else", ["cat/0.png", "dog/0.png"]),
        weights,
    ).source.labels.tolist()

    assert labels == [2, 3]


UNNAMED = dataclasses.replace(sample_weights(), class_names=None)


def labels_by_folder(data, **details):
    """The output of each folder, and the only note."""
    source, _, notes, _ = open_labelled(data, dataclasses.replace(UNNAMED, **details))
    (note,) = notes
    folders = [source.name_of(index).split("/")[-2] for index in range(len(source))]

    return dict(zip(folders, source.labels.tolist(), strict=True)), note


@pytest.mark.parametrize(
    "outputs",
    [
        {"0": 0, "1": 1, "2": 2, "3": 3, "4": 4, "5": 5, "6": 6},
        {"06": 6, "3": 3, "0004": 4, "1": 1, "+2": 2, "00": 0},
        {"5": 5, "2": 2},
    ],
)
def test_integer_names_match_outputs_of_weights_without_names_by_value(make, outputs):
    found, note = labels_by_folder(make("numbers", [f"{name}/0.png" for name in outputs]))

    assert found == outputs

    pairs = [f"{name!r} is output {outputs[name]}" for name in sorted(outputs)]

    assert ", ".join(pairs[:5]) in note
    assert ("and 2 more" in note) == (len(pairs) == 7)


def test_outputs_beyond_nine_are_not_in_alphabetical_order(make):
    twelve = dataclasses.replace(UNNAMED.architecture, num_classes=12)
    data = make("twelve", [f"{number}/0.png" for number in range(12)])

    expected = {str(number): number for number in range(12)}
    assert labels_by_folder(data, architecture=twelve)[0] == expected


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
    with rejects("folder:others", reason):
        open_labelled(make("others", [f"{name}/0.png" for name in names]), UNNAMED)


def test_imagenet_names_match_outputs_of_weights_without_names(make):
    thousand = dataclasses.replace(UNNAMED.architecture, num_classes=1000)
    weights = {"architecture": thousand, "format": "timm"}
    by_id, note = labels_by_folder(make("ids", ["n01440764/0.png", "n15075141/0.png"]), **weights)

    assert by_id == {"n01440764": 0, "n15075141": 999}
    assert "ImageNet's names" in note

    by_name, _ = labels_by_folder(make("names", ["goldfish/0.png", "tench/0.png"]), **weights)

    assert by_name == {"goldfish": 1, "tench": 0}


def test_a_dataset_that_numbers_its_classes_is_matched_by_these_numbers():
    ten = dataclasses.replace(UNNAMED.architecture, num_classes=10)
    source, _, notes, _ = open_labelled("digits", dataclasses.replace(UNNAMED, architecture=ten))

    assert source.class_names == tuple("0123456789")
    assert "numbers of the data's classes: '0' is output 0" in notes[0]

    with rejects("digits has 10 classes", "7.*--class_names="):
        open_labelled("digits", UNNAMED)


def test_a_table_is_judged_as_a_folder_is(make, tmp_path):
    """Its lines are the images: what is added to them since training changes no side of another."""
    folder = make("my-images")
    table = tmp_path / "my-images/table.csv"
    lines = ["image,label", *(f"{file},{file[:3]}" for file in TEN_EACH[:14])]
    table.write_text("\n".join(lines))
    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(8, 8),
        holdout_fraction=0.3,
    )
    held_out = open_source(f"csv:{table}", "test", config, 7)
    weights = trained_on(f"csv:{table}", held_up_to=held_up_to(held_out, 7))
    before, notes = judged("csv:./my-images/table.csv", weights)

    assert len(before) == 4
    assert notes == []

    table.write_text("\n".join([*lines, *(f"{file},{file[:3]}" for file in TEN_EACH[14:])]))
    after, notes = judged(f"csv:{table}", weights)

    assert {*before} < {*after}
    assert not {*TEN_EACH[:14]} & {*after} - {*before}
    assert "No image has changed sides" in notes[0]
    assert (
        "If folder:my-images holds the same images, say --split=test."
        in judged(folder, weights)[1][0]
    )


def test_released_datasets_have_their_splits(monkeypatch):
    opened = []

    def open_source(data, split, config, seed, held_then, range_option, *, is_classified):
        assert range_option == "--images.value_range"

        opened.append((data, split, config.data_dir))
        return type("Fake", (), {"class_names": ("a", "b"), "is_multilabel": False})()

    monkeypatch.setattr(splits, "open_source", open_source)
    for name in (*RELEASED, "vtab:pets"):
        open_pair(name, SplitChoice(data_dir="/data"))

    expected = [("vtab:pets", "train800val200", "/data"), ("vtab:pets", "test", "/data")]
    assert opened[-2:] == expected
    assert len(RELEASED) == 7
    assert ("tfds:uc_merced", "train[:1000]", "/data") in opened
    assert ("tfds:uc_merced", "train[1000:]", "/data") in opened
    assert ("tfds:imagenet2012", "train[:65000]", "/data") in opened
    assert ("tfds:cars196:2.1.0", "test", "/data") in opened


def test_digits_with_classes_and_parts(data_dir):
    pair = open_pair(
        "digits",
        SplitChoice(data_dir=data_dir, classes=("5", "7"), train_split="train[:50%]"),
    )

    assert pair.train.class_names == pair.test.class_names == ("5", "7")
    assert 0 < len(pair.train) < len(pair.test) * 3


def test_a_flat_folder_is_split_as_in_training(tmp_path):
    write_classes(tmp_path / "images", [0] * 10 + [1] * 10, sample_pixels(20))
    data = f"folder:{tmp_path}/images"
    then = dataclasses.replace(TRAINING, data=f"folder:{tmp_path}/./images")
    as_then = open_pair(data, SplitChoice(), then)
    fresh = open_pair(data, SplitChoice())

    assert len(as_then.test) == 8
    assert len(fresh.test) == 2
    assert not {as_then.train.key_of(i) for i in range(12)} & {
        as_then.test.key_of(i) for i in range(8)
    }


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
    kinds = iter([("a", "b"), ("a", "c")])
    monkeypatch.setattr(
        splits,
        "open_source",
        lambda *_, **__: type("Fake", (), {"class_names": next(kinds), "is_multilabel": False})(),
    )

    with rejects("mine:x", "different classes"):
        open_pair("mine:x", SplitChoice())


def test_images_without_a_classifier_need_no_training_split_and_one_class(make):
    """As for features and duplicates; classes keep the numbers of a training split, and new ones follow."""
    make("tested", [f"test/{file}" for file in TEN_EACH])
    only_test = open_split("folder:tested", None, SplitChoice())

    assert only_test.class_names == NAMES[:2]
    assert only_test.labels.tolist() == [0] * 10 + [1] * 10

    make("single", ["emu/0.png", "emu/1.png"])
    single = open_split("folder:single", "all", SplitChoice())

    assert single.class_names == ("emu",)
    assert single.labels.tolist() == [0, 0]

    make("both", ["training/cat/0.png", "training/dog/0.png", "test/ant/0.png", "test/dog/1.png"])
    both = open_split("folder:both", "test", SplitChoice())

    assert both.class_names == ("cat", "dog", "ant")
    assert [both.name_of(index)[-9:] for index in range(2)] == ["dog/1.png", "ant/0.png"]
    assert both.labels.tolist() == [1, 2]

    with rejects(
        "folder:tested has no split 'train'",
        "Name one of them as the split, such as 'test'",
    ):
        open_split("folder:tested", "train", SplitChoice())

    make("empty", ["test/notes.txt"])
    with rejects("Folder 'empty/test'", "no images"):
        open_split("folder:empty", "test", SplitChoice())


def test_the_only_split_is_searched_for_duplicates(make):
    make("tested", [f"val/{file}" for file in TEN_EACH])
    make("parts", [f"{split}/{file}" for split in ("train", "val") for file in TEN_EACH])
    make("whole")

    assert split_to_search("folder:tested", "train", SplitChoice(), ["folder:parts"]) == "val"
    assert split_to_search("folder:parts", "train", SplitChoice(), ["folder:tested"]) == "train"
    assert split_to_search("folder:whole", "train", SplitChoice(), ["folder:tested"]) == "all"
    assert split_to_search("folder:tested", "train", SplitChoice(), ["folder:./tested"]) == "train"
    assert split_to_search("digits", "test", SplitChoice(), ["folder:tested"]) == "test"
