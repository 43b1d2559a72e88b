"""TFDS datasets and the digits, prepared without TensorFlow, and datasets that are not ready."""

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from tests.rejections import rejects
from vit_jax.data.decoding import images
from vit_jax.data.kinds import digits
from vit_jax.data.kinds.tfds_source import open_tfds, prepare
from vit_jax.data.sources import open_source

SCRIPT = """
import sys
import numpy as np
from vit_jax.config.schema import InputConfig
from vit_jax.data import pipeline, placement, sources, stream, tfds_source, transforms, unreadable, workers

if __name__ == "__main__":
    config = InputConfig(train_split="train[:90%]", test_split="test", image_size=(8, 8), data_dir=sys.argv[1])
    tfds_source.prepare("digits", data_dir=sys.argv[1])
    source = sources.open_source("digits", "train[:90%]", config, 0)
    transform = transforms.TrainTransform(config)
    steps = stream.TrainStream(source, transform, 4, np.arange(4), seed=0, start_step=0, num_steps=2)
    with pipeline.open_batches(steps, workers.Parallelism(1, 1)) as batches:
        assert [batch.mask.sum() for batch in batches] == [4, 4]
    assert "tensorflow" not in sys.modules
"""


@pytest.mark.newest
def test_tensorflow_is_never_imported(data_dir, tmp_path):
    """A module of that name, found first, ends each process that imports it.

    The script takes the complete path of the data.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tensorflow.py").write_text(
        "import os, sys\nsys.stderr.write('TensorFlow imported')\nos._exit(3)\n"
    )
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}",
        "JAX_PLATFORMS": "cpu",
    }

    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), data_dir],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert done.returncode == 0, done.stderr
    assert "TensorFlow imported" not in done.stderr


def read_digits(source):
    """Return pixels and label of each image."""
    found = []
    for index in range(len(source)):
        record = source[index]
        found.append((images.decode(record.image)[..., 0].tobytes(), record.label))
    return found


def test_digits_are_those_of_scikit_learn_in_two_stratified_splits(data_dir, open_data):
    train = open_data("digits", "train", data_dir=data_dir)
    test = open_data("digits", "test", data_dir=data_dir)

    assert len(train) == 1437
    assert len(test) == 360

    truth = load_digits()
    pixels = np.round(truth.images * 255 / 16).astype(np.uint8)
    expected = []
    for image, label in zip(pixels, truth.target, strict=True):
        expected.append((image.tobytes(), label))

    assert sorted(read_digits(train) + read_digits(test)) == sorted(expected)

    test_shares = np.bincount(test.labels) / np.bincount(truth.target)
    assert np.all(np.abs(test_shares - 0.2) < 0.01)


def test_preparing_again_changes_nothing(data_dir):
    def list_times(folder):
        return {file: file.stat().st_mtime_ns for file in folder.iterdir()}

    path = digits.prepare(data_dir)
    before = list_times(path)

    assert prepare("digits", data_dir=data_dir) == str(path)
    assert path.is_relative_to(data_dir)
    assert list_times(path) == before


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("cifar1O", "nearest.*cifar10"),
        ("cifar10", r"pip install .*\[prepare\]"),
    ],
)
def test_names_that_cannot_be_prepared(tmp_path, monkeypatch, name, rule):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with rejects(name, rule):
        prepare(name, data_dir=str(tmp_path))


def test_the_second_to_prepare_uses_the_files_of_the_first(tmp_path, monkeypatch):
    """The second process cannot rename its folder, because the first was faster."""
    download_and_prepare = digits.VitJaxDigits.download_and_prepare

    def prepare_and_fail(builder):
        download_and_prepare(builder)
        raise OSError("Directory not empty")

    monkeypatch.setattr(
        digits.VitJaxDigits,
        "download_and_prepare",
        prepare_and_fail,
    )

    path = digits.prepare(str(tmp_path))

    assert (path / "dataset_info.json").exists()


def test_an_error_of_preparation_is_raised_if_nothing_was_prepared(tmp_path, monkeypatch):
    def fail(builder):
        raise OSError("Directory not empty")

    monkeypatch.setattr(digits.VitJaxDigits, "download_and_prepare", fail)

    with pytest.raises(OSError, match="not empty"):
        digits.prepare(str(tmp_path))


def test_parts_of_splits_by_name_read_by_threads(data_dir, make_config):
    config = make_config(data_dir=data_dir)

    source = open_source("tfds:vit_jax_digits", "train[:98%]", config, 0)
    rest = open_source("tfds:vit_jax_digits:1.0.0", "train[98%:]", config, 0)

    assert len(source) == 1408
    assert len(rest) == 29
    assert source.class_names == tuple("0123456789")
    assert source.num_classes == 10
    assert source.name_of(3) == "train[:98%]:3"

    received = pickle.loads(pickle.dumps(rest))
    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(received.__getitem__, range(29)))

    assert records == [rest[i] for i in range(29)]


def test_labels_come_without_images(data_dir, open_data, monkeypatch):
    """The split is more than two chunks of labels."""
    source = open_data("digits", "train[:700]", data_dir=data_dir)
    expected = [source[i].label for i in range(len(source))]

    monkeypatch.setattr(tfds.features.Image, "decode_example_np", None)
    monkeypatch.setattr(type(source), "__getitem__", None)

    assert source.labels.tolist() == expected
    assert source.labels is source.labels
    assert source.key_of(3) == b"3"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("cifar1O", "nearest.*cifar10"),
        ("cifar10:9.9.9", ""),
        ("cifar10", "vit-jax prepare cifar10 --data_dir={}$"),
    ],
)
def test_names_that_cannot_be_opened(tmp_path, open_data, name, rule):
    with rejects(name, rule.format(tmp_path)):
        open_data(
            f"tfds:{name}",
            "train",
            data_dir=str(tmp_path),
        )


@pytest.mark.parametrize(
    ("file", "before", "after", "rule"),
    [
        (
            "dataset_info.json",
            "array_record",
            "tfrecord",
            "tfrecord.*vit-jax prepare vit_jax_digits --data_dir=",
        ),
        ("features.json", '"label"', '"number"', "features.*'number'.*'image'"),
    ],
)
def test_datasets_that_cannot_be_used(
    data_dir,
    tmp_path,
    open_data,
    file,
    before,
    after,
    rule,
):
    copy = shutil.copytree(data_dir, tmp_path / "tfds")
    path = next(copy.glob(f"**/{file}"))

    assert before in path.read_text()

    path.write_text(path.read_text().replace(before, after))
    with rejects("vit_jax_digits", rule):
        open_data(
            "tfds:vit_jax_digits",
            "train",
            data_dir=str(copy),
        )


@pytest.fixture
def train_file(data_dir, tmp_path):
    """The file of the training split, in a copy of the digits."""
    copy = Path(shutil.copytree(data_dir, tmp_path / "tfds"))
    (file,) = copy.glob("**/*-train.array_record*")
    return file


@pytest.mark.parametrize("length", [0, 1000, 200_000, -1, None])
def test_a_file_that_is_cut_off_is_named_when_it_is_opened(
    train_file,
    make_config,
    length,
):
    """None: the file is missing."""
    if length is None:
        train_file.unlink()
    else:
        train_file.write_bytes(train_file.read_bytes()[:length])
    config = make_config(data_dir=str(train_file.parents[2]))

    with rejects(train_file.name, "missing, cut off or damaged"):
        open_source("digits", "train", config, 0)

    assert len(open_source("digits", "test", config, 0)) == 360


def test_a_flipped_bit_is_one_unreadable_image(train_file, make_config):
    config = make_config(data_dir=str(train_file.parents[2]))
    before = open_source("digits", "train", config, 0).labels
    content = bytearray(train_file.read_bytes())
    content[70_000] ^= 16
    train_file.write_bytes(content)

    source = open_source("digits", "train", config, 0)
    errors = {}
    for index in range(len(source)):
        try:
            label = source[index].label
        except images.UnreadableImage as error:
            errors[index] = str(error)
        else:
            assert label == before[index]

    ((damaged, message),) = errors.items()
    assert "The stored record is damaged (Corrupted" in message
    assert np.delete(source.labels, damaged).tolist() == np.delete(before, damaged).tolist()
    assert source.labels[damaged] == 0


@pytest.mark.parametrize(
    ("split", "rule"),
    [
        ("valid", "1437"),
        ("train[:x%]", "1437"),
        ("train[:0]", "1437"),
    ],
)
def test_split_without_examples_lists_the_known(
    data_dir,
    open_data,
    split,
    rule,
):
    with rejects(split, rule):
        open_data("digits", split, data_dir=data_dir)


def test_digits_in_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with rejects("input.data_dir", "cannot be written.*--data_dir=FOLDER"):
        digits.prepare(str(tmp_path / "file" / "data"))


@pytest.mark.parametrize(
    "name",
    [
        "some/config=FOLDER,version=1.0.0",
        "some/config=FOLDER",
        "some/..:1.0.0",
        "some/a/file_format=x",
        "../some",
        "kubric:movi",
        "huggingface:mnist",
        "some-one:mnist/config:1.0.0",
    ],
)
def test_names_for_which_tfds_runs_code_are_rejected(name, tmp_path):
    """TFDS imports modules that files of a dataset name, or downloads code for a namespace.

    Weights of others may state such names.
    """
    folder = tmp_path / "theirs"
    for place in (folder, folder / "1.0.0"):
        place.mkdir()
        (place / "dataset_info.json").write_text(json.dumps({"name": "some", "version": "1.0.0"}))
        (place / "features.json").write_text(json.dumps({"pythonClassName": "this.Feature"}))
    sys.modules.pop("this", None)

    with pytest.raises(ValueError, match=r"^data='tfds:.*': must be a name\."):
        open_tfds(
            name.replace("FOLDER", str(folder)),
            "train",
            str(tmp_path),
        )

    assert "this" not in sys.modules


DESCRIPTIONS = {
    "pipe": (os.mkfifo, "not a regular file"),
    "no JSON": (lambda file: file.write_text("["), "not JSON"),
    "another structure": (lambda file: file.write_text('{"splits": 3}'), "TFDS cannot open"),
}


@pytest.mark.parametrize(("make", "rule"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
@pytest.mark.parametrize("place", ["some/1.0.0", "some/config/1.0.0"])
def test_damaged_descriptions(tmp_path, place, make, rule):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "features.json").write_text(json.dumps({"pythonClassName": "a.B"}))
    make(folder / "dataset_info.json")
    name = "some" if place == "some/1.0.0" else "some/config"

    with pytest.raises(ValueError, match=rule):
        open_tfds(f"{name}:1.0.0", "train", str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "some",
        "some:1.0.2",
        "some:1.*.*",
        "some/a-b+c.d",
        "some/a.1:1.0.0",
        "SomeName",
    ],
)
def test_names_of_tfds_are_looked_for(name, tmp_path):
    with pytest.raises(ValueError, match=r"^TFDS (has no dataset|cannot open)"):
        open_tfds(name, "train", str(tmp_path))


def test_prepared_datasets_are_among_the_nearest_names(tmp_path):
    (tmp_path / "my_animals").mkdir()
    with pytest.raises(ValueError, match=r"no dataset 'my_animal'.*Nearest: my_animals"):
        open_tfds("my_animal", "train", str(tmp_path))
