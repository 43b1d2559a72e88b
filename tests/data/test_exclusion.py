"""Excluded records are not trained on; their file must be of these data and of this split."""

import json

import numpy as np
import pytest

from tests.data.packed_files import samples, write_shard
from tests.rejections import rejects
from vit_jax.data.exclusion import digest_exclusion, exclude, num_excluded, write_exclusion
from vit_jax.data.records import Source
from vit_jax.data.sources import open_source
from vit_jax.data.stream import TrainStream
from vit_jax.data.transforms import TrainTransform


@pytest.fixture
def folder(make_folder):
    """The data of five images in each of two classes and two splits."""
    files = {}
    for kind in ("train/cat", "train/dog", "test/cat", "test/dog"):
        for number in range(5):
            files[f"{kind}/{number}.png"] = number
    folder = make_folder(files)
    return f"folder:{folder}"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.json"


def test_an_excluded_record_is_never_sampled(
    folder,
    make_config,
    open_data,
    file,
):
    everything = open_data(folder, "train")
    write_exclusion(file, "train", everything, [2, 7])
    config = make_config(
        exclude=str(file),
        train_examples=6,
        cache_records=True,
    )

    train = open_source(folder, "train", config, 0)

    assert len(train) == 6
    assert num_excluded(train) == 2
    assert num_excluded(everything) == 0

    stream = TrainStream(
        train,
        TrainTransform(config),
        4,
        np.arange(4),
        seed=0,
        start_step=0,
        num_steps=30,
    )
    keys = set()
    for step in range(30):
        for index in stream[step].record_index.tolist():
            keys.add(train.key_of(index))

    assert keys.isdisjoint({b"cat/2.png", b"dog/2.png"})
    assert len(keys) == 6


def test_other_splits_and_parts_with_an_exclusion(
    folder,
    make_config,
    open_data,
    file,
):
    everything = open_data(folder, "train")
    write_exclusion(file, "train", everything, [2, 7])

    test = open_data(folder, "test", exclude=str(file))
    config = make_config(exclude=str(file), train_split="train[:80%]")
    part = open_source(folder, "train[:80%]", config, 0)

    assert len(test) == 10
    assert len(part) + num_excluded(part) == 8
    assert len(digest_exclusion(str(file))) == 64


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("[]", "split, records and ids.*duplicates"),
        ('{"split": "train", "records": 10, "ids": [1]}', "split, records and ids"),
        (
            '{"split": "train", "records": 10, "ids": ["emu/1.png"]}',
            "none of its 1 ids is a record",
        ),
        ("{", "JSON"),
    ],
)
def test_other_files_are_rejected(folder, open_data, file, content, rule):
    file.write_text(content)

    with rejects("config.input.exclude", f"x.json.*{rule}"):
        open_data(folder, "train", exclude=str(file))


def test_ids_of_another_split_are_rejected_where_they_are_places(
    data_dir,
    make_config,
    open_data,
    file,
):
    part = open_data("digits", "train[100:]", data_dir=data_dir)
    write_exclusion(file, "train[100:]", part, [0, 5])
    fields = {"data_dir": data_dir, "exclude": str(file)}

    with rejects("config.input.exclude", "is of split 'train.100:.'.*--split='train'"):
        open_data("digits", "train", **fields)

    config = make_config(train_split="train[100:]", **fields)
    kept = open_source("digits", "train[100:]", config, 0)
    expected = np.delete(part.labels, [0, 5])

    assert np.array_equal(kept.labels, expected)


def test_places_of_other_data_are_rejected(file):
    """Two datasets may have splits of one name and size; the images tell them apart."""
    source = make_source([b"a", b"b", b"c"])
    other = make_source([b"a", b"c", b"b"])
    write_exclusion(file, "train", source, [2, 1])

    kept = exclude(source, str(file), "train")

    assert kept.num_excluded == 2
    with rejects("config.input.exclude", "is of other data.*'train'"):
        exclude(other, str(file), "train")


def test_a_list_without_a_digest_reads_no_image(file):
    source = make_source([b"a", b"b", b"c"])
    write_exclusion(file, "train", source, [2])
    stated = json.loads(file.read_text())
    del stated["images_sha256"]
    file.write_text(json.dumps(stated))

    source.image_of = None

    kept = exclude(source, str(file), "train")

    assert kept.num_excluded == 1


def make_source(images):
    class Images(Source):
        class_names = ("cat", "dog")
        labels = np.arange(len(images), dtype=np.int32) % 2

        def image_of(self, index):
            return images[index]

    return Images()


def test_ids_of_shards(tmp_path, open_data, file):
    write_shard(tmp_path / "train-0.tar", samples([0, 1] * 3))
    exclusion = {
        "split": "train",
        "records": 6,
        "ids": ["train-0.tar/00003.png"],
    }
    file.write_text(json.dumps(exclusion))

    train = open_data(
        f"wds:{tmp_path}",
        "train",
        exclude=str(file),
    )

    names = [train.key_of(index)[-5:] for index in range(5)]
    assert names == [b"0.png", b"1.png", b"2.png", b"4.png", b"5.png"]
