"""Tables of images: which files, which labels, which split, and the message for each mistake."""

import hashlib
import os
import pickle

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import table
from vit_jax.data.pipeline import open_batches
from vit_jax.data.sources import holds_out, listing_of, located, open_source
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.subset import held_up_to
from vit_jax.data.transforms import build_evaluation_transform

TEN_EACH = {f"{name}/{i}.png": i for name in ("cat", "dog") for i in range(10)}


@pytest.fixture
def make_table(make_folder):
    """Returns a function from lines to a table in the folder of TEN_EACH; it returns the path."""

    def make(*lines, name="table.csv", encoding="utf-8"):
        return make_folder({**TEN_EACH, name: ("\n".join(lines) + "\n").encode(encoding)}) / name

    return make


def lines_of(files=TEN_EACH):
    return ["image,label", *(f"{file},{file[:3]}" for file in files)]


def open_names(path, split, config, seed=0):
    source = open_source(f"csv:{path}", split, config, seed)
    return source, [source.name_of(i)[len(str(path.parent)) + 1 :] for i in range(len(source))]


def test_a_table_is_read_as_the_folder_that_it_lists(make_table, make_config):
    """The same images are held out, by the same hashes, and the same parts are taken."""
    path = make_table(*lines_of())
    for split in ("train", "test", "all", "train[:50%]"):
        source, names = open_names(path, split, make_config())
        folder = make_table(*lines_of()).parent
        same = open_source(f"folder:{folder}", split, make_config(), 0)

        assert [folder / name for name in names] == [
            folder / same.name_of(i) for i in range(len(same))
        ]
        assert source.class_names == same.class_names == ("cat", "dog")
        assert source.labels.tolist() == same.labels.tolist()
        assert source.records_sha256 == same.records_sha256

    assert holds_out(f"csv:{path}", make_config())

    copy = pickle.loads(pickle.dumps(source))

    assert copy[0].image == (folder / names[0]).read_bytes()


@pytest.mark.parametrize(
    ("header", "line", "name", "encoding"),
    [
        ("id,label,image,split", "7,{1},{0},{2}", "table.csv", "utf-8"),
        ("image\tlabel\tsplit", "{0}\t{1}\t{2}", "table.tsv", "utf-8"),
        ("image;label;split", "{0};{1};{2}", "table.csv", "utf-8-sig"),
        ('"image", label ,split', '"./{0}", {1} ,{2}', "table.csv", "utf-8"),
    ],
)
def test_columns_in_any_order_and_separators(make_table, make_config, header, line, name, encoding):
    splits = {file: "train" if file[4] in "01234" else "val" for file in TEN_EACH}
    path = make_table(
        header,
        *(line.format(file, file[:3], split) for file, split in splits.items()),
        name=name,
    )
    path.write_text(path.read_text(), encoding=encoding)
    train, names = open_names(path, "train", make_config())

    assert names == [file for file, split in splits.items() if split == "train"]
    assert train.labels.tolist() == [0] * 5 + [1] * 5
    assert open_names(path, "test", make_config())[1] == open_names(path, "val", make_config())[1]
    assert len(open_names(path, "train[:40%]", make_config())[1]) == 4
    assert not holds_out(f"csv:{path}", make_config())


def test_files_may_be_anywhere(make_table, make_config, tmp_path):
    table = make_table("image,label", f"{tmp_path}/images/cat/0.png,cat", "../images/cat/1.png,dog")
    source = open_source(f"csv:{table}", "all", make_config(), 0)

    assert source[0].image == (tmp_path / "images/cat/0.png").read_bytes()
    assert source[1].image == (tmp_path / "images/cat/1.png").read_bytes()
    assert located(f"csv:{table.parent}/../images/{table.name}") == located(f"csv:{table}")
    assert listing_of("csv:") is listing_of("digits") is None

    twice = make_table("image,label", f"{tmp_path}/images/cat/0.png,cat", "cat/0.png,dog")
    with rejects(str(twice), "2 lines name an image"):
        open_source(f"csv:{twice}", "all", make_config(), 0)


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
        ([*lines_of(), "cat/new.png,", ",cat"], "train", r"1 lines.*no image.*line 23 \(empty\)"),
        ([*lines_of(), "cat/new.png, "], "train", r"1 lines.*no label.*line 22 \(cat/new.png\)"),
        (
            [*lines_of(), "cat/../cat/0.png,dog"],
            "train",
            "2 lines name an image.*line 2 .*line 22 ",
        ),
        (
            [*lines_of(), *(f"cat/{i}.jpg,cat" for i in range(5))],
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
        (lines_of(), "val", "'val'.*column 'split'"),
        (["image,label", *(f"{file},cat" for file in TEN_EACH)], "train", "two classes.*'cat'"),
        ([*lines_of(), "cat/../table.csv,Cat"], "train", "'Cat' and 'cat'.*one name"),
    ],
)
def test_mistakes_are_named(make_table, make_config, lines, split, rule):
    table = make_table(*lines)
    with rejects("", rule):
        open_source(f"csv:{table}", split, make_config(), 0)


def test_other_files_are_rejected(make_table, make_config):
    with rejects("nowhere.csv", "csv:FILE"):
        open_source("csv:nowhere.csv", "train", make_config(), 0)

    path = make_table(*lines_of(), encoding="utf-16")
    with rejects(str(path), "UTF-8"):
        open_source(f"csv:{path}", "train", make_config(), 0)
    with rejects(f"config.data={str(path)!r}: unknown data", f"did you mean 'csv:{path}'"):
        open_source(str(path), "train", make_config(), 0)


def many(*lines):
    return ["image,labels", *lines]


def label_lines(cells):
    return [f"{image},{cell}" for image, cell in zip(TEN_EACH, cells, strict=False)]


NUMBERED = enumerate(TEN_EACH)
SEVERAL = many(
    *(f"{file},{'|'.join(['even'] * (n % 2 == 0) + ['later'] * (n > 5))}" for n, file in NUMBERED)
)


def test_several_labels_an_image(make_table, make_config):
    """Any number of them, in any order; an image without one is an example of none."""
    path = make_table(
        *many("cat/0.png,tabby | cat", "cat/1.png,", "dog/0.png,dog", "dog/1.png,cat|dog|cat")
    )
    source = open_source(f"csv:{path}", "all", make_config(), 0)

    assert source.is_multilabel
    assert source.class_names == ("cat", "dog", "tabby")
    assert source.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert source[3].label.tolist() == [1, 1, 0]

    chosen = open_source(
        f"csv:{path}",
        "all",
        make_config(classes=("tabby", "cat"), cache_records=True),
        0,
    )

    assert chosen.labels.tolist() == [[1, 1], [0, 0], [0, 0], [0, 1]]
    assert [chosen[i].label.tolist() for i in range(4)] == chosen.labels.tolist()
    assert source.records_sha256 != chosen.records_sha256


def test_columns_of_0_and_1_are_several_labels(make_table, make_config):
    """As the same labels in one cell, also without any label and with a split."""
    lines = [
        "id,split,dog,image,cat",
        "0,train,1,cat/0.png,0",
        "0,train,1.0,cat/1.png,1",
        "0,test,0,dog/0.png,0",
    ]
    one_hot = make_table(*(line.partition(",")[2] for line in lines), name="one_hot.csv")
    cells = make_table(
        "image,labels,split",
        "cat/0.png,dog,train",
        "cat/1.png,cat|dog,train",
        "dog/0.png,,test",
    )

    for split in ("train", "test"):
        found, expected = (
            open_source(f"csv:{path}", split, make_config(), 0) for path in (one_hot, cells)
        )

        assert found.is_multilabel
        assert found.class_names == expected.class_names == ("cat", "dog")
        assert found.labels.tolist() == expected.labels.tolist()
        assert found.records_sha256 == expected.records_sha256

    with rejects(
        "csv:",
        "of 0 and 1 .'dog', 'cat'.* 'id' hold other values. Remove them.*'labels'",
    ):
        open_source(f"csv:{make_table(*lines, '2,train,1,dog/1.png,0')}", "train", make_config(), 0)

    with rejects("csv:", "'dog' is empty or the name of several"):
        open_source(
            f"csv:{make_table('image,dog,dog', 'cat/0.png,0,1')}",
            "train",
            make_config(),
            0,
        )

    with rejects("#comma", "columns of 0 and 1 need none. Remove '#comma'"):
        open_source(f"csv:{one_hot}#comma", "train", make_config(), 0)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("comma", ['"cat,dog"', '"dog, emu"', "cat"]),
        (
            "comma",
            ["cat", "dog", "cat", "dog", '"cat,dog"'],
        ),  # few cells, of labels that others have
        ("semicolon", ["cat;dog", "emu;cat", "dog"]),
        ("tab", ['"cat\tdog"', '"emu\tdog"', ""]),
        ("slash", ["cat/dog/emu", "emu / dog", "emu / dog"]),
        ("plus", ["cat + dog", "cat + emu", "emu"]),
        ("newline", ['"cat\ndog"', '"emu\ncat"']),
        ("space", ["cat dog", "cat emu", "dog emu", "cat dog emu"]),
    ],
)
def test_another_separator_of_labels_is_named_and_can_be_chosen(
    make_table, make_config, name, cells
):
    path = make_table(*many(*label_lines(cells)))
    with rejects(f"csv:{path}: ", f"of [0-9]+ cells.*#{name} to separate them there, or #bar"):
        open_source(f"csv:{path}", "all", make_config(), 0)

    chosen = open_source(f"csv:{path}#{name}", "all", make_config(), 0)
    usual = [cell.strip('"').replace(table.LABEL_SEPARATORS[name], "|") for cell in cells]

    expected = open_source(
        f"csv:{make_table(*many(*label_lines(usual)), name='b.csv')}",
        "all",
        make_config(),
        0,
    )
    assert chosen.class_names == expected.class_names
    assert chosen.labels.tolist() == expected.labels.tolist()

    joint = open_source(f"csv:{path}#bar", "all", make_config(), 0)

    assert {cell.strip('"') for cell in cells} - {""} == {*joint.class_names}
    assert located(f"csv:{path}#{name}") == f"{located(f'csv:{path}')}#{name}"


@pytest.mark.parametrize(
    "cells",
    [
        ["golden retriever", "tabby cat", "emu"],  # names of two words
        ["cat|dog, small", "emu, small"],
        ["either/or", "cat", "dog"],  # one cell of three
        ["C++", "C++", "cat"],
    ],
)
def test_names_with_other_separators_are_kept(make_table, make_config, cells):
    lines = label_lines(f'"{cell}"' for cell in cells)
    source = open_source(f"csv:{make_table(*many(*lines))}", "all", make_config(), 0)

    expected_class_names = tuple(sorted({label for cell in cells for label in cell.split("|")}))
    assert source.class_names == expected_class_names


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
def test_mistakes_with_separators_are_named(make_table, make_config, lines, suffix, rule):
    with rejects("csv:", rule):
        open_source(f"csv:{make_table(*lines)}{suffix}", "all", make_config(), 0)


def test_a_file_may_have_a_number_sign_in_its_name(make_table, make_config):
    path = make_table(*lines_of(), name="set#1.csv")
    assert len(open_source(f"csv:{path}", "all", make_config(), 0)) == 20


def test_a_part_of_all_images_is_held_out(make_table, make_config):
    """By their hashes alone, and the same part later, whatever was added and whatever labels were changed."""
    path = make_table(*SEVERAL[:16])
    config = make_config(holdout_fraction=0.2)
    (test, held), (_, rest) = (
        open_names(path, split, config, seed=3) for split in ("test", "train")
    )
    by_hash = sorted(TEN_EACH, key=lambda name: hashlib.sha256(b"3/" + name.encode()).digest())

    assert {*held} == {*[name for name in by_hash if name in held + rest][:3]}
    assert len(rest) == 12

    then = held_up_to(test, 3)
    path.write_text("\n".join(SEVERAL).replace("even", "odd"))
    again, later = (
        open_source(f"csv:{path}", split, config, 3, then) for split in ("test", "train")
    )

    assert {*held} <= {
        name[len(str(path.parent)) + 1 :] for name in map(again.name_of, range(len(again)))
    }
    assert len(again) + len(later) == len(TEN_EACH)
    assert len(open_names(path, "train[:50%]", make_config(train_split="train[:50%]"))[1]) == 9
    assert len(open_names(path, "train", make_config(train_examples=5))[1]) == 5


def test_batches_of_several_labels(make_table, make_config):
    source = open_source(f"csv:{make_table(*SEVERAL)}", "all", make_config(), 0)
    transform = build_evaluation_transform(make_config())

    with open_batches(EvaluationStream(source, transform, 8, np.arange(8))) as batches:
        found = list(batches)

    labels = np.concatenate([batch.label for batch in found])

    assert labels.dtype == np.int32
    assert labels.tolist() == [*source.labels.tolist(), *[[0, 0]] * 4]
    assert np.concatenate([batch.mask for batch in found]).tolist() == [1] * 20 + [0] * 4


def test_a_number_of_images_of_each_class_needs_one_class_an_image(make_table, make_config):
    with rejects(
        "config.input.train_examples_per_class=2",
        "several labels.*config.input.train_examples",
    ):
        open_source(
            f"csv:{make_table(*SEVERAL)}",
            "train",
            make_config(train_examples_per_class=2),
            0,
        )


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"image,label\n" + b"x" * (table.MAX_LINE_LETTERS + 1), "line 2 is longer than 1,048,576"),
        (b"x" * (table.MAX_LINE_LETTERS + 1), "line 1 is longer than 1,048,576"),
        (b"image,label\n" + b"x" * 200_000 + b",cat\n", "larger than field limit"),
        (None, "larger than 1,073,741,824 bytes"),
    ],
    ids=["line", "header", "cell", "file"],
)
def test_a_table_is_bounded(make_table, make_config, content, rule):
    path = make_table()
    if content is None:
        os.truncate(path, 60 * 10**9)
    else:
        path.write_bytes(content)

    with rejects("table.csv", rule):
        open_source(f"csv:{path}", "all", make_config(), 0)


def test_special_files_in_a_table_are_unreadable_images(make_table, make_config):
    """As is an image that is too large: each is one record, and the others are read."""
    path = make_table(
        "image,label",
        "/dev/zero,cat",
        "pipe.png,cat",
        "sparse.png,dog",
        "cat/0.png,cat",
    )
    os.mkfifo(path.parent / "pipe.png")
    (path.parent / "sparse.png").touch()
    os.truncate(path.parent / "sparse.png", 60 * 10**9)
    source = open_source(f"csv:{path}", "all", make_config(), 0)

    for number, rule in ((0, "not a regular file"), (1, "not a regular file"), (2, "larger than")):
        with pytest.raises(UnreadableImage, match=rule):
            source.image_of(number)

    transform = build_evaluation_transform(make_config())
    with open_batches(EvaluationStream(source, transform, 4, np.arange(4))) as batches:
        assert [batch.mask.tolist() for batch in batches] == [[0, 0, 0, 1]]


def test_a_pipe_is_named_as_one(tmp_path):
    os.mkfifo(tmp_path / "images.csv")
    with pytest.raises(ValueError, match="must be a regular file"):
        table.Table(tmp_path / "images.csv").require()
