"""Tables of images: which files, which labels, which split, and the message for each mistake."""

import pickle

import pytest

from vit_jax.data.sources import holds_out, listing_of, located, open_source

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
        assert [folder / name for name in names] == [folder / same.name_of(i) for i in range(len(same))]
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
    path = make_table(header, *(line.format(file, file[:3], split) for file, split in splits.items()), name=name)
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


def test_the_examples_that_the_config_chooses(make_table, make_config):
    path = make_table(*lines_of())
    source, names = open_names(path, "train", make_config(classes=("dog", "cat"), train_examples_per_class=3))
    assert source.labels.tolist() == [1] * 3 + [0] * 3
    assert [name[:3] for name in names] == ["cat"] * 3 + ["dog"] * 3


SPLITS = ["image,label,split", *(f"{file},{file[:3]},{'train' if file[4] < '5' else 'test'}" for file in TEN_EACH)]


@pytest.mark.parametrize(
    ("lines", "split", "message"),
    [
        (["file,label", "cat/0.png,cat"], "train", r"no columns 'image': its first line is 'file', 'label'"),
        (["image,class", "cat/0.png,cat"], "train", "no columns 'label'"),
        (["image,label,label", "cat/0.png,cat,cat"], "train", "2 columns 'label'"),
        ([""], "train", "no columns 'image'"),
        (["image,label", "cat/0.png"], "train", "line 2: 1 cells under 2 columns"),
        (["image,label", "cat/0.png,cat, tabby"], "train", "line 2: 3 cells under 2 columns.*quotes"),
        (["image,label", 'cat/0.png,"cat'], "train", "cannot be read as CSV"),
        ([*lines_of(), "cat/new.png,", ",cat"], "train", r"1 lines have no image: line 23 \(empty\)"),
        ([*lines_of(), "cat/new.png, "], "train", r"1 lines have no label: line 22 \(cat/new.png\)"),
        (
            [*lines_of(), "cat/../cat/0.png,dog"],
            "train",
            r"2 lines name an image that .*: line 2 .*, line 22 ",
        ),
        (
            [*lines_of(), *(f"cat/{i}.jpg,cat" for i in range(5))],
            "train",
            r"5 lines name files that do not exist: line 22 \(cat/0.jpg\), .*\(cat/2.jpg\) and 2 more\.",
        ),
        ([*SPLITS, "dog/10.png,dog,trian"], "train", r"1 lines of no known split: line 22 \(trian\)"),
        ([*SPLITS, "dog/10.png,dog,"], "train", r"1 lines have no split, and others have one: line 22"),
        (SPLITS, "tset", r"no split 'tset'; it has \['test', 'train'\]\. Did you mean 'test'"),
        ([line for line in SPLITS if "test" not in line], "test", "Remove the column 'split', and a part of it"),
        ([*SPLITS, "dog/10.png,emu,test"], "test", "'train' does not have: emu.*leave the lines out"),
        (lines_of(), "val", "'val' of .*, which has no column 'split'; allowed"),
        (
            ["image,label", *(f"{file},cat" for file in TEN_EACH)],
            "train",
            "needs labels of at least two .*only one, 'cat'",
        ),
        ([*lines_of(), "cat/../table.csv,Cat"], "train", "'Cat' and 'cat' .*upper and lower case. Write one of them"),
        ([*lines_of(), "table.csv,emu"], "train", "with one image, .*: emu"),
    ],
)
def test_mistakes_are_named(make_table, make_config, lines, split, message):
    with pytest.raises(ValueError, match=message):
        open_source(f"csv:{make_table(*lines)}", split, make_config(), 0)


def test_other_files_are_refused(make_table, make_config, tmp_path):
    with pytest.raises(ValueError, match=r"There is no file .*nowhere\.csv'; give csv:FILE with the columns"):
        open_source("csv:nowhere.csv", "train", make_config(), 0)
    path = make_table(*lines_of(), encoding="utf-16")
    with pytest.raises(ValueError, match="cannot be read as CSV in UTF-8"):
        open_source(f"csv:{path}", "train", make_config(), 0)
    with pytest.raises(ValueError, match=rf"Did you mean 'csv:{path}'\?"):
        open_source(str(path), "train", make_config(), 0)
