"""Tables of images: files, labels, splits, and the message for each mistake."""

import hashlib
import os
import pickle

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import table
from vit_jax.data.pipeline import open_batches
from vit_jax.data.sources import find_listing, holds_out, normalize_data, open_source
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.subset import read_held_hashes
from vit_jax.data.transforms import build_evaluation_transform

TEN_EACH = {f"cat/{i}.png": i for i in range(10)} | {f"dog/{i}.png": i for i in range(10)}


@pytest.fixture
def make_table(make_folder):
    """Return a function from lines to the path of a table in the folder of TEN_EACH."""

    def make(*lines, name="table.csv", encoding="utf-8"):
        content = "\n".join(lines) + "\n"
        folder = make_folder(TEN_EACH | {name: content.encode(encoding)})
        return folder / name

    return make


LINES = ["image,label", *(f"{file},{file[:3]}" for file in TEN_EACH)]


@pytest.fixture
def open_table(open_data):
    """Return a function from a path and fields of the config to the source of all images."""

    def open_all(path, **fields):
        return open_data(f"csv:{path}", **fields)

    return open_all


def open_names(path, split, config, seed=0):
    """Return a source and the names of its files below the folder of the table."""
    source = open_source(f"csv:{path}", split, config, seed)
    return source, list_names(source, path)


def list_names(source, path):
    prefix = f"{path.parent}/"
    return [source.name_of(i).removeprefix(prefix) for i in range(len(source))]


@pytest.mark.parametrize("split", ["train", "test", "all", "train[:50%]"])
def test_a_table_is_read_as_the_folder_that_it_lists(
    make_table,
    make_config,
    open_data,
    split,
):
    """The same images are held out, by the same hashes, and the same parts are taken."""
    path = make_table(*LINES)
    folder = path.parent

    source, names = open_names(path, split, make_config())

    expected = open_data(f"folder:{folder}", split)
    assert names == list_names(expected, path)
    assert source.class_names == expected.class_names == ("cat", "dog")
    assert source.labels.tolist() == expected.labels.tolist()
    assert source.records_sha256 == expected.records_sha256
    assert holds_out(f"csv:{path}", make_config())

    received = pickle.loads(pickle.dumps(source))
    assert received[0].image == (folder / names[0]).read_bytes()


@pytest.mark.parametrize(
    ("header", "line", "name", "encoding"),
    [
        ("id,label,image,split", "7,{1},{0},{2}", "table.csv", "utf-8"),
        ("image\tlabel\tsplit", "{0}\t{1}\t{2}", "table.tsv", "utf-8"),
        ("image;label;split", "{0};{1};{2}", "table.csv", "utf-8-sig"),
        ('"image", label ,split', '"./{0}", {1} ,{2}', "table.csv", "utf-8"),
    ],
)
def test_columns_in_any_order_and_separators(
    make_table,
    make_config,
    header,
    line,
    name,
    encoding,
):
    """The first five images of each class are for training, the others for validation."""
    lines = [header]
    train_files = []
    for file in TEN_EACH:
        is_train = file[4] < "5"
        lines.append(line.format(file, file[:3], "train" if is_train else "val"))
        if is_train:
            train_files.append(file)
    path = make_table(*lines, name=name)
    path.write_text(path.read_text(), encoding=encoding)

    train, train_names = open_names(path, "train", make_config())
    _, test_names = open_names(path, "test", make_config())
    _, val_names = open_names(path, "val", make_config())
    _, part_names = open_names(
        path,
        "train[:40%]",
        make_config(),
    )

    assert train_names == train_files
    assert train.labels.tolist() == [0] * 5 + [1] * 5
    assert test_names == val_names
    assert len(part_names) == 4
    assert not holds_out(f"csv:{path}", make_config())


def test_files_may_be_anywhere(make_table, open_table, tmp_path):
    images = tmp_path / "images"
    path = make_table(
        "image,label",
        f"{images}/cat/0.png,cat",
        "../images/cat/1.png,dog",
    )

    source = open_table(path)

    assert source[0].image == (images / "cat/0.png").read_bytes()
    assert source[1].image == (images / "cat/1.png").read_bytes()
    by_another_path = normalize_data(f"csv:{path.parent}/../images/{path.name}")
    assert by_another_path == normalize_data(f"csv:{path}")


def test_other_data_have_no_table():
    assert find_listing("csv:") is None
    assert find_listing("digits") is None


SPLITS = [
    "image,label,split",
    *(f"{file},{file[:3]},{'train' if file[4] < '5' else 'test'}" for file in TEN_EACH),
]


@pytest.mark.parametrize(
    ("lines", "split", "rule"),
    [
        (["file,label", "cat/0.png,cat"], "train", "'image'.*'file', 'label'"),
        (["image,class", "cat/0.png,cat"], "train", "'label'"),
        (["image,label,label", "cat/0.png,cat,cat"], "train", "2 columns 'label'"),
        (
            ["image,label,labels", "cat/0.png,cat,cat"],
            "train",
            "2 columns 'labels'.*'label', 'labels'",
        ),
        ([""], "train", "'image'"),
        (["image,label", "cat/0.png"], "train", "line 2.*1 cells.*2 columns"),
        (["image,label", "cat/0.png,cat, tabby"], "train", "line 2.*3 cells.*2 columns.*quotes"),
        (["image,label", 'cat/0.png,"cat'], "train", "CSV"),
        ([*LINES, "cat/new.png,", ",cat"], "train", r"1 lines.*no image.*line 23 \(empty\)"),
        ([*LINES, "cat/new.png, "], "train", r"1 lines.*no label.*line 22 \(cat/new.png\)"),
        (
            [*LINES, "cat/../cat/0.png,dog"],
            "train",
            "2 lines name an image.*line 2 .*line 22 ",
        ),
        (
            [*LINES, *(f"cat/{i}.jpg,cat" for i in range(5))],
            "train",
            "5 lines.*not exist.*line 22.* and 2 more",
        ),
        (
            [*SPLITS, "dog/10.png,dog,trian"],
            "train",
            r"1 lines.*no known split.*train.*line 22 \(trian\)",
        ),
        ([*SPLITS, "dog/10.png,dog,"], "train", "1 lines have no split.*line 22"),
        ([line for line in SPLITS if "test" not in line], "test", r"'test'.*\['train'\]"),
        ([*SPLITS, "dog/10.png,emu,test"], "test", "'train'.*emu.*training images"),
        (LINES, "val", "'val'.*column 'split'"),
        (["image,label", *(f"{file},cat" for file in TEN_EACH)], "train", "two classes.*'cat'"),
        ([*LINES, "cat/../table.csv,Cat"], "train", "'Cat' and 'cat'.*one name"),
    ],
)
def test_mistakes_are_named(make_table, open_data, lines, split, rule):
    table = make_table(*lines)
    with rejects("", rule):
        open_data(f"csv:{table}", split)


def test_an_image_under_two_paths(make_table, open_table, tmp_path):
    path = make_table(
        "image,label",
        f"{tmp_path}/images/cat/0.png,cat",
        "cat/0.png,dog",
    )

    with rejects(str(path), "2 lines name an image"):
        open_table(path)


def test_other_files_are_rejected(make_table, open_data):
    with rejects("nowhere.csv", "csv:FILE"):
        open_data("csv:nowhere.csv", "train")

    path = make_table(*LINES, encoding="utf-16")
    with rejects(str(path), "UTF-8"):
        open_data(f"csv:{path}", "train")
    with rejects(f"config.data={str(path)!r}: unknown data", f"did you mean 'csv:{path}'"):
        open_data(str(path), "train")


def many(*lines):
    """Return the lines of a table with any number of labels."""
    return ["image,labels", *lines]


def label_lines(cells):
    return [f"{image},{cell}" for image, cell in zip(TEN_EACH, cells, strict=False)]


def make_several_labels():
    """Return a table in which images with even numbers, and all after the sixth, have a label."""
    lines = []
    for number, file in enumerate(TEN_EACH):
        labels = []
        if number % 2 == 0:
            labels.append("even")
        if number > 5:
            labels.append("later")
        lines.append(f"{file},{'|'.join(labels)}")
    return many(*lines)


SEVERAL = make_several_labels()


@pytest.fixture
def several_labels(make_table):
    return make_table(
        "image,labels",
        "cat/0.png,tabby | cat",
        "cat/1.png,",
        "dog/0.png,dog",
        "dog/1.png,cat|dog|cat",
    )


def test_several_labels_of_an_image(several_labels, open_table):
    """Labels may be any number, in any order; an image without one is an example of none."""
    source = open_table(several_labels)

    assert source.is_multilabel
    assert source.class_names == ("cat", "dog", "tabby")
    assert source.labels.tolist() == [
        [1, 0, 1],
        [0, 0, 0],
        [0, 1, 0],
        [1, 1, 0],
    ]
    last = source[3]
    assert last.label.tolist() == [1, 1, 0]


def test_some_classes_of_several_labels(several_labels, open_table):
    everything = open_table(several_labels)

    source = open_table(
        several_labels,
        classes=("tabby", "cat"),
        cache_records=True,
    )

    expected = [[1, 1], [0, 0], [0, 0], [0, 1]]
    labels = [source[i].label.tolist() for i in range(4)]

    assert source.labels.tolist() == expected
    assert labels == expected
    assert source.records_sha256 != everything.records_sha256


@pytest.fixture
def one_hot(make_table):
    return make_table(
        "split,dog,image,cat",
        "train,1,cat/0.png,0",
        "train,1.0,cat/1.png,1",
        "test,0,dog/0.png,0",
        name="one_hot.csv",
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_columns_of_0_and_1_are_several_labels(
    one_hot,
    make_table,
    open_data,
    split,
):
    """Labels are the same as in one cell, also without any label and with a split."""
    cells = make_table(
        "image,labels,split",
        "cat/0.png,dog,train",
        "cat/1.png,cat|dog,train",
        "dog/0.png,,test",
    )

    found = open_data(f"csv:{one_hot}", split)

    expected = open_data(f"csv:{cells}", split)
    assert found.is_multilabel
    assert found.class_names == expected.class_names == ("cat", "dog")
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.records_sha256 == expected.records_sha256


def test_other_columns_beside_those_of_0_and_1(make_table, open_table):
    path = make_table(
        "id,split,dog,image,cat",
        "0,train,1,cat/0.png,0",
        "0,train,1.0,cat/1.png,1",
        "0,test,0,dog/0.png,0",
        "2,train,1,dog/1.png,0",
    )

    with rejects(
        "csv:",
        "of 0 and 1 .'dog', 'cat'.* 'id' hold other values. Remove them.*'labels'",
    ):
        open_table(path)


def test_two_columns_of_0_and_1_with_one_name(make_table, open_table):
    path = make_table("image,dog,dog", "cat/0.png,0,1")

    with rejects("csv:", "'dog' is empty or the name of several"):
        open_table(path)


def test_columns_of_0_and_1_need_no_separator(one_hot, open_table):
    with rejects("#comma", "columns of 0 and 1 need none. Remove '#comma'"):
        open_table(f"{one_hot}#comma")


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("comma", ['"cat,dog"', '"dog, emu"', "cat"]),
        # Few cells hold several labels, which others have.
        ("comma", ["cat", "dog", "cat", "dog", '"cat,dog"']),
        ("semicolon", ["cat;dog", "emu;cat", "dog"]),
        ("tab", ['"cat\tdog"', '"emu\tdog"', ""]),
        ("slash", ["cat/dog/emu", "emu / dog", "emu / dog"]),
        ("plus", ["cat + dog", "cat + emu", "emu"]),
        ("newline", ['"cat\ndog"', '"emu\ncat"']),
        ("space", ["cat dog", "cat emu", "dog emu", "cat dog emu"]),
    ],
)
def test_another_separator_of_labels_is_named_and_can_be_chosen(
    make_table,
    open_table,
    name,
    cells,
):
    """With #bar, a cell is one label."""
    path = make_table(*many(*label_lines(cells)))
    separator = table.LABEL_SEPARATORS[name]
    texts = [cell.strip('"') for cell in cells]
    with_bars = [text.replace(separator, "|") for text in texts]
    usual = make_table(*many(*label_lines(with_bars)), name="b.csv")

    with rejects(f"csv:{path}: ", f"of [0-9]+ cells.*#{name} to separate them there, or #bar"):
        open_table(path)

    chosen = open_table(f"{path}#{name}")
    expected = open_table(usual)

    assert chosen.class_names == expected.class_names
    assert chosen.labels.tolist() == expected.labels.tolist()

    data = normalize_data(f"csv:{path}")
    assert normalize_data(f"csv:{path}#{name}") == f"{data}#{name}"

    whole_cells = open_table(f"{path}#bar")
    assert set(whole_cells.class_names) == set(texts) - {""}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # Names of two words.
        (["golden retriever", "tabby cat", "emu"], ("emu", "golden retriever", "tabby cat")),
        (["cat|dog, small", "emu, small"], ("cat", "dog, small", "emu, small")),
        # One cell of three has the separator.
        (["either/or", "cat", "dog"], ("cat", "dog", "either/or")),
        (["C++", "C++", "cat"], ("C++", "cat")),
    ],
)
def test_names_with_other_separators_are_kept(
    make_table,
    open_table,
    cells,
    expected,
):
    lines = label_lines(f'"{cell}"' for cell in cells)
    path = make_table(*many(*lines))

    source = open_table(path)

    assert source.class_names == expected


@pytest.mark.parametrize(
    ("lines", "suffix", "rule"),
    [
        (
            ["image,label", "cat/0.png,cat|dog", "cat/1.png,emu"],
            "#comma",
            "'label' holds one label.*'labels'",
        ),
        (
            ["image,label", "cat/0.png,cat|dog", "cat/1.png,emu|cat", "cat/2.png,cat"],
            "",
            "2 of 3.*Name the column",
        ),
        (many("cat/0.png,cat"), "#coma", "'coma' is no separator.*bar, comma, "),
        (many("cat/0.png,\"['cat', 'dog']\""), "", "lists in brackets"),
        (many("cat/0.png,\"['cat', 'dog']\""), "#comma", "lists in brackets"),
    ],
)
def test_mistakes_with_separators_are_named(
    make_table,
    open_table,
    lines,
    suffix,
    rule,
):
    path = make_table(*lines)

    with rejects("csv:", rule):
        open_table(f"{path}{suffix}")


def test_a_file_may_have_a_number_sign_in_its_name(make_table, open_table):
    path = make_table(*LINES, name="set#1.csv")

    assert len(open_table(path)) == 20


def hash_with_seed_3(name):
    """Return the digest that orders images in a hold-out of seed 3."""
    seeded = f"3/{name}".encode()
    return hashlib.sha256(seeded).digest()


def test_a_part_of_all_images_is_held_out(make_table, make_config):
    """The first images by their hashes are held out."""
    path = make_table(*SEVERAL[:16])
    config = make_config(holdout_fraction=0.2)

    _, test = open_names(path, "test", config, seed=3)
    _, train = open_names(path, "train", config, seed=3)

    by_hash = sorted(test + train, key=hash_with_seed_3)
    assert set(test) == set(by_hash[:3])
    assert len(train) == 12


def test_held_out_images_stay_held_out(make_table, make_config):
    """Images are added and labels are changed later."""
    path = make_table(*SEVERAL[:16])
    config = make_config(holdout_fraction=0.2)
    source, held_out = open_names(path, "test", config, seed=3)

    hashes = read_held_hashes(source, 3)
    text = "\n".join(SEVERAL)
    path.write_text(text.replace("even", "odd"))
    test = open_source(
        f"csv:{path}",
        "test",
        config,
        3,
        hashes,
    )
    train = open_source(
        f"csv:{path}",
        "train",
        config,
        3,
        hashes,
    )

    assert set(held_out) <= set(list_names(test, path))
    assert len(test) + len(train) == len(TEN_EACH)


def test_parts_and_few_images_of_a_table_of_several_labels(make_table, make_config):
    path = make_table(*SEVERAL)

    _, half = open_names(
        path,
        "train[:50%]",
        make_config(train_split="train[:50%]"),
    )
    _, five = open_names(
        path,
        "train",
        make_config(train_examples=5),
    )

    assert len(half) == 9
    assert len(five) == 5


def test_batches_of_several_labels(make_table, make_config, open_table):
    """The third batch of eight is padded with four images without labels."""
    source = open_table(make_table(*SEVERAL))
    transform = build_evaluation_transform(make_config())
    stream = EvaluationStream(
        source,
        transform,
        8,
        np.arange(8),
    )

    with open_batches(stream) as opened:
        batches = list(opened)

    labels = np.concatenate([batch.label for batch in batches])
    mask = np.concatenate([batch.mask for batch in batches])
    padding = np.zeros((4, 2))
    expected = np.concatenate([source.labels, padding])

    assert labels.dtype == np.int32
    assert np.array_equal(labels, expected)
    assert mask.tolist() == [1] * 20 + [0] * 4


def test_a_number_of_images_of_each_class_needs_single_labels(make_table, make_config):
    path = make_table(*SEVERAL)
    config = make_config(train_examples_per_class=2)

    with rejects(
        "config.input.train_examples_per_class=2",
        "several labels.*config.input.train_examples",
    ):
        open_source(f"csv:{path}", "train", config, 0)


def test_a_table_is_bounded(make_table, open_table):
    path = make_table()
    os.truncate(path, 60 * 10**9)

    with rejects("table.csv", "larger than 1,073,741,824 bytes"):
        open_table(path)


def test_special_files_in_a_table_are_unreadable_images(
    make_table,
    make_config,
    open_table,
):
    """So is an image that is too large: each is one record, and the others are read."""
    path = make_table(
        "image,label",
        "/dev/zero,cat",
        "pipe.png,cat",
        "sparse.png,dog",
        "cat/0.png,cat",
    )
    os.mkfifo(path.parent / "pipe.png")
    sparse = path.parent / "sparse.png"
    sparse.touch()
    os.truncate(sparse, 60 * 10**9)

    source = open_table(path)

    rules = ["not a regular file", "not a regular file", "larger than"]
    for number, rule in enumerate(rules):
        with pytest.raises(UnreadableImage, match=rule):
            source.image_of(number)

    transform = build_evaluation_transform(make_config())
    stream = EvaluationStream(
        source,
        transform,
        4,
        np.arange(4),
    )
    with open_batches(stream) as opened:
        (batch,) = opened

    assert batch.mask.tolist() == [0, 0, 0, 1]


def test_a_pipe_is_named_as_one(tmp_path):
    path = tmp_path / "images.csv"
    os.mkfifo(path)
    pipe = table.Table(path)

    with pytest.raises(ValueError, match="must be a regular file"):
        pipe.require()
