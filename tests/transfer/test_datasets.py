"""Both sides of a dataset: the released names, own folders split as in training, and mistakes."""

import dataclasses

import pytest

from tests.inference.samples import sample_pixels, write_classes
from tests.rejections import rejects
from tests.weights.small_networks import TRAINING
from vit_jax.transfer import datasets
from vit_jax.transfer.datasets import RELEASED, PairChoice, open_pair


def test_released_datasets_have_their_splits(monkeypatch):
    opened = []

    def open_source(data, split, config, seed, held_then, range_option):
        assert range_option == "--value_range"
        opened.append((data, split, config.data_dir))
        return type("Fake", (), {"class_names": ("a", "b"), "is_multilabel": False})()

    monkeypatch.setattr(datasets, "open_source", open_source)
    for name in (*RELEASED, "vtab:pets"):
        open_pair(name, PairChoice(data_dir="/data"))
    assert opened[-2:] == [("vtab:pets", "train800val200", "/data"), ("vtab:pets", "test", "/data")]
    assert len(RELEASED) == 7
    assert ("tfds:uc_merced", "train[:1000]", "/data") in opened
    assert ("tfds:uc_merced", "train[1000:]", "/data") in opened
    assert ("tfds:imagenet2012", "train[:65000]", "/data") in opened
    assert ("tfds:cars196:2.1.0", "test", "/data") in opened


def test_digits_with_classes_and_parts(data_dir):
    pair = open_pair("digits", PairChoice(data_dir=data_dir, classes=("5", "7"), train_split="train[:50%]"))
    assert pair.train.class_names == pair.test.class_names == ("5", "7")
    assert 0 < len(pair.train) < len(pair.test) * 3


def test_a_flat_folder_is_split_as_in_training(tmp_path):
    write_classes(tmp_path / "images", [0] * 10 + [1] * 10, sample_pixels(20))
    data = f"folder:{tmp_path}/images"
    then = dataclasses.replace(TRAINING, data=f"folder:{tmp_path}/./images")
    as_then, fresh = open_pair(data, PairChoice(), then), open_pair(data, PairChoice())
    assert (len(as_then.test), len(fresh.test)) == (8, 2)
    assert not {as_then.train.key_of(i) for i in range(12)} & {as_then.test.key_of(i) for i in range(8)}


@pytest.mark.parametrize(
    ("name", "choice", "field", "rule"),
    [
        ("cifar10", PairChoice(), "--data=cifar10", "did you mean cifar100"),
        ("digits", PairChoice(test_split="train"), "split", "both 'train'"),
    ],
)
def test_mistakes(name, choice, field, rule):
    with rejects(field, rule):
        open_pair(name, choice)


def test_splits_of_other_classes(tmp_path, monkeypatch):
    kinds = iter([("a", "b"), ("a", "c")])
    monkeypatch.setattr(
        datasets, "open_source", lambda *_: type("Fake", (), {"class_names": next(kinds), "is_multilabel": False})()
    )
    with rejects("mine:x", "different classes"):
        open_pair("mine:x", PairChoice())
