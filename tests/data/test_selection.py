"""`config.classes` and `config.train_examples_per_class`, on an image folder and on the digits."""

import numpy as np
import pytest

from vit_jax.data.memory import CachedSource
from vit_jax.data.sources import open_source

SIZES = {"ant": 4, "bee": 6, "cat": 5}


@pytest.fixture
def folder(make_folder):
    files = {f"{name}/{i}.png": i for name, size in SIZES.items() for i in range(size)}
    return make_folder({f"{split}/{file}": level for split in ("train", "test") for file, level in files.items()})


def open_names(folder, split, config, seed=0):
    source = open_source(f"folder:{folder}", split, config, seed)
    return source, [source.name_of(i)[len(f"{folder}/{split}/") :] for i in range(len(source))]


@pytest.mark.parametrize("split", ["train", "test"])
def test_classes_are_numbered_in_their_order(folder, make_config, split):
    source, names = open_names(folder, split, make_config(classes=("cat", "ant")))
    assert source.class_names == ("cat", "ant")
    assert source.num_classes == 2
    expected = [("cat", "ant").index(name.partition("/")[0]) for name in names]
    assert sorted(expected) == [0] * 5 + [1] * 4
    assert source.labels.tolist() == [source[i].label for i in range(len(source))] == expected
    assert source[0].image == (folder / split / names[0]).read_bytes()


def test_without_a_choice_all_examples_are_taken(folder, make_config):
    assert len(open_names(folder, "train", make_config())[0]) == 15
    assert len(open_names(folder, "test", make_config(train_examples_per_class=2))[0]) == 15


def test_few_examples_of_each_class_of_training(folder, make_config):
    """Chosen by the seed and by each file's name alone."""

    def chosen(per_class, classes=(), seed=0, path=folder):
        config = make_config(train_examples_per_class=per_class, classes=classes)
        source, names = open_names(path, "train", config, seed)
        assert np.bincount(source.labels).tolist() == [per_class] * len(classes or SIZES)
        return set(names)

    three, two = chosen(3), chosen(2)
    assert two < three
    assert any(chosen(3, seed=seed) != three for seed in (1, 2, 3))
    assert chosen(3, classes=("cat", "bee")) == {name for name in three if not name.startswith("ant")}
    moved = folder.rename(folder.parent / "elsewhere")
    assert chosen(2, path=moved) == two
    (moved / "train/bee/-first.png").write_bytes((moved / "train/bee/0.png").read_bytes())
    assert len(chosen(2, path=moved) - two) <= 1


def test_digits(data_dir, make_config):
    """The demonstration: ten each of the digits 5 to 9."""
    config = make_config(data_dir=data_dir, classes=tuple("56789"), train_examples_per_class=10, cache_records=True)
    train, test = (open_source("digits", split, config, 0) for split in ("train", "test"))
    assert isinstance(train, CachedSource)
    assert np.bincount(train.labels).tolist() == [10] * 5
    assert train.labels.tolist() == [train[i].label for i in range(50)]
    whole = open_source("digits", "test", make_config(data_dir=data_dir), 0)
    assert len(test) == (whole.labels >= 5).sum()
    assert train.class_names == test.class_names == tuple("56789")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": ("cat", "bea")}, r"names 'bea', which the data does not have\. Nearest: 'bee'"),
        ({"classes": ("cat", "zebra")}, "'zebra'.*It has 'ant', 'bee', 'cat'"),
        ({"classes": ("cat",)}, "only 'cat'; give at least two"),
        ({"classes": ("cat", "ant", "cat")}, "'cat' more than once"),
        ({"train_examples_per_class": 5}, r"needs 5 example\(s\) of each class; 'ant' has 4\."),
        ({"train_examples_per_class": 6, "classes": ("cat", "bee")}, "'cat' has 5"),
    ],
)
def test_mistakes(folder, make_config, fields, message):
    with pytest.raises(ValueError, match=message):
        open_names(folder, "train", make_config(**fields))


def test_split_without_the_classes(data_dir, make_config):
    label = open_source("digits", "test[:1]", make_config(data_dir=data_dir), 0)[0].label
    others = tuple(str(digit) for digit in range(10) if digit != label)
    with pytest.raises(ValueError, match="No example of this split"):
        open_source("digits", "test[:1]", make_config(data_dir=data_dir, classes=others), 0)
    config = make_config(data_dir=data_dir, classes=(str(label), others[0]), train_split="test[:1]")
    with pytest.raises(ValueError, match=f"'{others[0]}' has 0"):
        open_source("digits", "test[:1]", config, 0)
