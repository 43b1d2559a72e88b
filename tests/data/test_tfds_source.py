"""TFDS datasets and the digits, prepared for real; every way in which one may not be ready."""

import multiprocessing
import pickle
import shutil
import sys
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from vit_jax.data import digits, images
from vit_jax.data.memory import CachedSource
from vit_jax.data.sources import open_source


@pytest.fixture
def altered(data_dir, tmp_path):
    """Returns a function that copies the digits and edits one of their files of metadata; it returns the data_dir."""

    def alter(file, before, after):
        shutil.copytree(data_dir, tmp_path / "tfds")
        path = next((tmp_path / "tfds").glob(f"**/{file}"))
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))
        return str(tmp_path / "tfds")

    return alter


def pixels_of(source):
    return np.stack([images.decode(source[i].image) for i in range(len(source))])


def test_digits_are_those_of_scikit_learn(data_dir, make_config):
    splits = [open_source("digits", split, make_config(data_dir=data_dir), 0) for split in ("train", "test")]
    assert [len(split) for split in splits] == [1437, 360]
    stored = np.concatenate([pixels_of(split) for split in splits])
    labels = [split[i].label for split in splits for i in range(len(split))]
    assert stored.shape == (1797, 8, 8, 3)
    truth = load_digits()
    expected = np.round(truth.images * 255 / 16).astype(np.uint8)
    assert sorted((p[..., 0].tobytes(), n) for p, n in zip(stored, labels, strict=True)) == sorted(
        (p.tobytes(), n) for p, n in zip(expected, truth.target, strict=True)
    )


def test_digits_split_is_disjoint_and_stratified():
    labels = load_digits().target
    train, test = digits.split_indices(labels)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(1797))
    shares = np.bincount(labels[test]) / np.bincount(labels)
    assert np.all(np.abs(shares - 0.2) < 0.01)


def test_preparing_again_changes_nothing(data_dir):
    path = digits.prepare(data_dir)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert digits.prepare(data_dir) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_two_processes_may_prepare_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=digits.prepare, args=(str(tmp_path),)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(path.name for path in digits.prepare(str(tmp_path)).parent.iterdir()) == ["1.0.0"]


def test_parts_of_splits_by_name(data_dir, make_config):
    config = make_config(data_dir=data_dir)
    source = open_source("tfds:vit_jax_digits", "train[:98%]", config, 0)
    rest = open_source("tfds:vit_jax_digits:1.0.0", "train[98%:]", config, 0)
    assert (len(source), len(rest)) == (1408, 29)
    assert source.class_names == tuple("0123456789")
    assert source.num_classes == 10
    assert source.name_of(3) == "train[:98%]:3"
    assert "tensorflow" not in sys.modules


def test_pickled_and_read_by_threads(data_dir, make_config):
    source = open_source("digits", "test", make_config(data_dir=data_dir), 0)
    expected = [source[i] for i in range(len(source))]
    copy = pickle.loads(pickle.dumps(source))
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({i: copy[i] for i in range(n, len(copy), 4)}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(copy))] == expected


def test_cache_reads_each_record_once(data_dir, make_config):
    source = open_source("digits", "test", make_config(data_dir=data_dir, cache_records=True), 0)
    assert isinstance(source, CachedSource)
    assert source[5] is source[5]
    assert isinstance(source[5].image, bytes)
    assert source.name_of(5) == "test:5"
    assert len(pickle.dumps(source)) == len(pickle.dumps(CachedSource(source.source)))


def test_labels_come_without_images(data_dir, make_config, monkeypatch):
    source = open_source("digits", "train[:700]", make_config(data_dir=data_dir), 0)  # more than two chunks
    expected = [source[i].label for i in range(len(source))]
    monkeypatch.setattr(tfds.features.Image, "decode_example_np", None)
    monkeypatch.setattr(type(source), "__getitem__", None)
    assert source.labels.tolist() == expected
    assert source.labels is source.labels
    assert CachedSource(source).labels is source.labels
    assert source.key_of(3) == b"3"


def test_unknown_name_offers_the_nearest(tmp_path, make_config):
    with pytest.raises(ValueError, match="Nearest: cifar10"):
        open_source("tfds:cifar1O", "train", make_config(data_dir=str(tmp_path)), 0)


def test_unknown_version(tmp_path, make_config):
    with pytest.raises(ValueError, match=r"cannot open 'cifar10:9\.9\.9'"):
        open_source("tfds:cifar10:9.9.9", "train", make_config(data_dir=str(tmp_path)), 0)


def test_not_prepared_says_what_to_run(tmp_path, make_config):
    with pytest.raises(ValueError, match=f"vit-jax prepare cifar10 --data_dir={tmp_path}$"):
        open_source("tfds:cifar10", "train", make_config(data_dir=str(tmp_path)), 0)


def test_tfrecord_says_what_to_do(altered, make_config):
    with pytest.raises(ValueError, match=r"prepared as tfrecord.*vit-jax prepare vit_jax_digits --data_dir="):
        open_source(
            "tfds:vit_jax_digits",
            "train",
            make_config(data_dir=altered("dataset_info.json", "array_record", "tfrecord")),
            0,
        )


@pytest.mark.parametrize(
    ("split", "message"), [("valid", "'train': 1437"), ("train[:x%]", "no split"), ("train[:0]", "no examples")]
)
def test_unknown_split_lists_the_known(data_dir, make_config, split, message):
    with pytest.raises(ValueError, match=message):
        open_source("digits", split, make_config(data_dir=data_dir), 0)


class Unlabelled(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """One image with a number instead of a class."""

    name = "unlabelled"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(shape=(None, None, 3)), "number": tfds.features.Scalar(np.int64)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"image": cv2.imencode(".png", np.zeros((2, 3, 3), np.uint8))[1].tobytes(), "number": 1}


def test_missing_feature_lists_the_present(tmp_path, make_config):
    Unlabelled(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    with pytest.raises(ValueError, match=r"has the features .*'number'.* needs 'image'"):
        open_source("tfds:unlabelled", "train", make_config(data_dir=str(tmp_path)), 0)


def test_prepared_folder_is_the_one_reported(data_dir):
    assert Path(data_dir) in digits.prepare(data_dir).parents
