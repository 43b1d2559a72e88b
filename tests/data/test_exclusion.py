"""Excluded records are not trained on; their file must be of these data, and of this split where ids are places."""

import json

import numpy as np
import pytest

from tests.data.packed_files import samples, write_shard
from tests.rejections import rejects
from vit_jax.data.exclusion import exclude, exclusion_sha256, num_excluded, write_exclusion
from vit_jax.data.records import Source
from vit_jax.data.sources import open_source
from vit_jax.data.stream import TrainStream
from vit_jax.data.transforms import TrainTransform

FILES = {
    f"{split}/{name}/{i}.png": i
    for split in ("train", "test")
    for name in ("cat", "dog")
    for i in range(5)
}


@pytest.fixture
def folder(make_folder):
    return f"folder:{make_folder(FILES)}"


def test_an_excluded_record_is_never_drawn(folder, make_config, tmp_path):
    everything = open_source(folder, "train", make_config(), 0)
    write_exclusion(tmp_path / "x.json", "train", everything, [2, 7])
    config = make_config(exclude=str(tmp_path / "x.json"), train_examples=6, cache_records=True)
    train = open_source(folder, "train", config, 0)

    assert len(train) == 6
    assert num_excluded(train) == 2
    assert num_excluded(everything) == 0

    stream = TrainStream(train, TrainTransform(config), 0, 4, np.arange(4), 0, 30)
    drawn = {train.key_of(int(index)) for step in range(30) for index in stream[step].record_index}

    assert drawn.isdisjoint({b"cat/2.png", b"dog/2.png"})
    assert len(drawn) == 6
    assert len(open_source(folder, "test", config, 0)) == 10

    part = open_source(
        folder,
        "train[:80%]",
        make_config(exclude=config.exclude, train_split="train[:80%]"),
        0,
    )

    assert len(part) + num_excluded(part) == 8
    assert len(exclusion_sha256(config.exclude)) == 64


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
def test_other_files_are_rejected(folder, make_config, tmp_path, content, rule):
    (tmp_path / "x.json").write_text(content)
    with rejects("config.input.exclude", f"x.json.*{rule}"):
        open_source(folder, "train", make_config(exclude=str(tmp_path / "x.json")), 0)


def test_ids_of_another_split_are_rejected_where_they_are_places(data_dir, make_config, tmp_path):
    inputs = {"data_dir": data_dir, "exclude": str(tmp_path / "x.json")}
    part = open_source("digits", "train[100:]", make_config(data_dir=data_dir), 0)
    write_exclusion(tmp_path / "x.json", "train[100:]", part, [0, 5])

    with rejects("config.input.exclude", "is of split 'train.100:.'.*--split='train'"):
        open_source("digits", "train", make_config(**inputs), 0)

    kept = open_source("digits", "train[100:]", make_config(train_split="train[100:]", **inputs), 0)

    assert kept.labels.tolist() == np.delete(part.labels, [0, 5]).tolist()


def test_places_of_other_data_are_rejected(tmp_path):
    """Two datasets may have splits of one name and size; the excluded images themselves tell them apart."""
    file = tmp_path / "x.json"
    held = source_of([b"a", b"b", b"c"])
    write_exclusion(file, "train", held, [2, 1])

    assert exclude(held, str(file), "train").num_excluded == 2

    with rejects("config.input.exclude", "is of other data.*'train'"):
        exclude(source_of([b"a", b"c", b"b"]), str(file), "train")


def test_a_list_without_a_digest_reads_no_image(tmp_path):
    file = tmp_path / "x.json"
    held = source_of([b"a", b"b", b"c"])
    write_exclusion(file, "train", held, [2])
    stated = json.loads(file.read_text())
    del stated["images_sha256"]
    file.write_text(json.dumps(stated))
    held.image_of = None

    assert exclude(held, str(file), "train").num_excluded == 1


def source_of(images):
    class Images(Source):
        class_names = ("cat", "dog")
        labels = np.arange(len(images), dtype=np.int32) % 2

        def image_of(self, index):
            return images[index]

    return Images()


def test_ids_of_shards(tmp_path, make_config):
    write_shard(tmp_path / "train-0.tar", samples([0, 1] * 3))
    data = f"wds:{tmp_path}"
    (tmp_path / "x.json").write_text(
        json.dumps(
            {
                "split": "train",
                "records": 6,
                "ids": ["train-0.tar/00003.png"],
            }
        )
    )
    train = open_source(data, "train", make_config(exclude=str(tmp_path / "x.json")), 0)

    expected = [b"%d.png" % n for n in (0, 1, 2, 4, 5)]
    assert [train.key_of(index)[-5:] for index in range(5)] == expected
