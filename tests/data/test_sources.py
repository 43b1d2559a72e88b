"""Sources for the `data` of a config: kinds, splits and custom sources."""

import pickle

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.kinds.in_memory import CachedSource
from vit_jax.data.sources import open_source

CUSTOM = """
import numpy as np
from vit_jax.data.records import Source


class Levels(Source):
    class_names = ("dark", "light")

    def __init__(self, split, config, seed):
        self.levels = np.arange(seed, 8 if split == "train" else 4, dtype=np.uint8) * 30
        self.labels = (self.levels > 100).astype(int)

    def image_of(self, index):
        return np.full((5, 4, 3), self.levels[index])


def changed(**fields):
    def opener(split, config, seed):
        source = Levels(split, config, seed)
        vars(source).update(fields)
        return source
    return opener


find_out_of_range = changed(labels=np.array([0, 2]))
plain_list = changed(labels=[0, 1])
not_integers = changed(labels=np.array([0.0, 1.0]))
column = changed(labels=np.zeros((2, 1), int))
several = changed(labels=np.array([[0, 0], [1, 1], [1, 0]]), is_multilabel=True)
no_rows = changed(is_multilabel=True)
three = changed(labels=np.array([[0, 0], [1, 3]]), is_multilabel=True)
empty = changed(labels=np.zeros(0, int))
one_class = changed(class_names=("dark",))
twice = changed(class_names=("dark", "dark"))
no_tuple = changed(class_names=["dark", "light"])
nothing = lambda split, config, seed: None
"""


@pytest.fixture
def custom_data(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)


def test_custom_source(custom_data, make_config):
    train = open_source(
        "own_data:Levels",
        "train",
        make_config(),
        1,
    )
    test = open_source(
        "own_data:Levels",
        "test",
        make_config(),
        1,
    )

    assert len(train) == 7
    assert len(test) == 3
    assert train.num_classes == 2
    assert train[6].label == 1
    assert np.array_equal(train[6].image, np.full((5, 4, 3), 210))
    assert train.name_of(6) == "record 6"
    assert train.key_of(6) == b"6"
    assert train.records_sha256 != test.records_sha256

    received = pickle.loads(pickle.dumps(train))
    assert np.array_equal(received[3].image, train[3].image)


def test_some_classes_and_records_of_a_custom_source(custom_data, make_config):
    config = make_config(
        classes=("light", "dark"),
        train_examples_per_class=2,
        cache_records=True,
    )

    source = open_source("own_data:Levels", "train", config, 1)

    assert isinstance(source, CachedSource)
    assert source.class_names == ("light", "dark")
    assert np.bincount(source.labels).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("find_out_of_range", "record 1.*label 2.*0 to 1"),
        ("plain_list", "labels.*list.*2 integers"),
        ("not_integers", r"labels.*float64 \(2,\).*2 integers"),
        ("column", r"labels.*int64 \(2, 1\).*2 integers"),
        ("no_rows", r"labels.*int64 \(8,\).*8 x 2 integers"),
        ("three", r"record 1.*label \[1 3\].*0 or 1"),
        ("empty", "0 records.*at least one"),
        ("one_class", r"class_names.*\('dark',\).*two"),
        ("twice", r"class_names.*\('dark', 'dark'\).*different"),
        ("no_tuple", "class_names.*tuple"),
        ("nothing", "NoneType.*class_names, num_classes, labels.*vit_jax.data.records.Source"),
    ],
)
def test_a_custom_source_is_validated_when_opened(
    custom_data,
    open_data,
    name,
    rule,
):
    with rejects(f"config.data='own_data:{name}', split 'train'", rule):
        open_data(f"own_data:{name}", "train")


def test_a_custom_source_may_have_several_labels(custom_data, open_data):
    source = open_data("own_data:several", "train", classes=("light", "dark"))

    assert source.labels.tolist() == [[0, 0], [1, 1], [0, 1]]
    assert source[2].label.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ("folders:/x", "folder:PATH.*did you mean 'folder'"),
        ("cifar10", "did you mean 'tfds:cifar10'"),
        ("tfds:", "tfds:NAME"),
        ("folder:", "folder:PATH"),
        ("", "digits"),
        ("digit", "did you mean 'digits'"),
        ("{}", "did you mean 'folder:{}'"),
        ("tdfs:cifar10", "module.*did you mean 'tfds'"),
        ("own_data:Level", "'Level'.*Levels"),
        ("own_data:np", "module.*function"),
    ],
)
def test_unknown_kind_of_data(custom_data, open_data, tmp_path, data, rule):
    with rejects(repr(data.format(tmp_path)), rule.format(tmp_path)):
        open_data(data.format(tmp_path), "train")
