"""Processes of one run that differ are told so, by name and value."""

import json

import jax
import numpy as np
import pytest

from tests.data.packed_files import image, samples, write_parquet, write_shard
from tests.train import small_runs as runs
from vit_jax import hosts
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.sources import open_source
from vit_jax.train.inputs import open_datasets
from vit_jax.train.lifecycle.agreement import (
    NUM_COMPARED,
    describe_differences,
    digest_images,
    require_agreement,
)

FACTS = {"config.seed": 0, "classes": ["cat", "dog"], "train_files_sha256": "1", "weights": None}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"config.seed": 1}, "process 1: config.seed is 1, in process 0 0"),
        ({"classes": ["cat"]}, "process 1: of the classes only one of the two has 'dog'"),
        (
            {"classes": ["dog", "cat"]},
            "process 1: classes is ['dog', 'cat'], in process 0 ['cat', 'dog']",
        ),
        ({"train_files_sha256": "2"}, "process 1: the train files have other names or classes"),
        (
            {"config.evaluation.evaluators.mine.split": "x"},
            "evaluators.mine.split is 'x', in process 0 None",
        ),
    ],
)
def test_what_differs_is_named_with_its_process(changes, line):
    message = describe_differences([FACTS, FACTS | changes, FACTS])
    assert line in message
    assert len(message.splitlines()) == 1


def test_of_many_differences_ten_are_named():
    many = [{f"config.{number}": process for number in range(40)} for process in range(2)]
    assert "; and 30 more. Start" in describe_differences(many)


def test_a_run_compares_itself_with_the_others(data_dir, monkeypatch):
    """What may differ between hosts is left out: where data lie, and what a machine can do."""
    config = runs.config(f"input.data_dir={data_dir}")
    data = open_datasets(config)
    require_agreement(config, data)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    everyone = []
    monkeypatch.setattr(hosts, "gather", lambda facts: [everyone.append(facts) or facts])
    require_agreement(config, data)
    other = runs.config(
        "input.data_dir=/elsewhere",
        "input.num_workers=3",
        "logging.tensorboard=True",
    )
    monkeypatch.setattr(hosts, "gather", lambda facts: [*everyone, facts])
    require_agreement(other, data)
    monkeypatch.setattr(hosts, "gather", lambda facts: [facts, facts | {"config.seed": 7}])

    with pytest.raises(ValueError, match=r"process 1: config\.seed is 7, in process 0 0"):
        require_agreement(config, data)


def write_host(folder, kind, levels):
    """The images of one host with these levels, under the same names; returns how they are named."""
    labels = [0, 1] * 6
    if kind == "wds":
        members = [
            (name, image(levels[int(name[:5])]) if "png" in name else content)
            for name, content in samples(labels)
        ]
        return f"wds:{write_shard(folder / 'a.tar', members)}"

    if kind == "parquet":
        images = [{"bytes": image(level), "path": None} for level in levels]
        return f"parquet:{write_parquet(folder / 'a.parquet', labels, images=images)}"

    lines = ["image,label"]
    for number, level in enumerate(levels):
        path = folder / "images" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(level))
        lines.append(f"images/{number % 2}/{number}.png,{number % 2}")

    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    return f"folder:{folder}/images" if kind == "folder" else f"csv:{folder}/a.csv"


@pytest.mark.parametrize("kind", ["folder", "csv", "wds", "parquet"])
def test_other_bytes_under_the_same_names_are_noticed(kind, tmp_path, monkeypatch):
    """Names, sizes, numbers and labels are equal; one image of twelve is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hosts_of = {"a": [*range(12)], "b": [*range(12)], "c": [*range(7), 99, *range(8, 12)]}
    digests = {}

    for host, levels in hosts_of.items():
        source = open_source(
            write_host(tmp_path / host, kind, levels),
            "all",
            runs.config().input,
            0,
        )
        digests[host] = json.loads(json.dumps(digest_images(source, seed=0)))

    assert len(digests["a"]) == 12

    same = [{"training images": digests["a"]}, {"training images": digests["b"]}]
    assert describe_differences(same) == ""

    message = describe_differences([*same, {"training images": digests["c"]}])
    assert "process 2: 1 of 12 compared training images have other bytes or labels: " in message

    (other,) = [key for key in digests["a"] if digests["a"][key] != digests["c"][key]]
    assert f"labels: {other}. Start" in message
    assert "7" in other


def test_the_seed_chooses_the_images(data_dir):
    """Pixels and stored records of TFDS; labels count, and so does an image that only one host can read."""
    pixels = np.random.default_rng(0).integers(256, size=(200, 2, 3, 1), dtype=np.uint8)
    labels = np.arange(200) % 2
    first = digest_images(MemorySource(pixels, labels, ("a", "b")), 0)

    assert len(first) == NUM_COMPARED
    assert [*first] == sorted(first, key=int)
    assert first == digest_images(MemorySource(pixels.copy(), labels, ("a", "b")), 0)
    assert first.keys() != digest_images(MemorySource(pixels, labels, ("a", "b")), 1).keys()

    turned = digest_images(MemorySource(pixels.transpose(0, 2, 1, 3), labels, ("a", "b")), 0)
    relabelled = digest_images(MemorySource(pixels, 1 - labels, ("a", "b")), 0)

    for other in (turned, relabelled):
        assert other.keys() == first.keys()
        assert not {*other.items()} & {*first.items()}

    digits = open_source("digits", "train", runs.config(f"input.data_dir={data_dir}").input, 0)
    assert len({*digest_images(digits, 0).values()}) == NUM_COMPARED


def test_an_unreadable_image_is_compared(tmp_path):
    data = write_host(tmp_path, "folder", range(12))
    source = open_source(data, "all", runs.config("input.cache_records=False").input, 0)
    whole = digest_images(source, 0)
    (tmp_path / "images" / "1" / "3.png").unlink()

    assert {*digest_images(source, 0).items()} - {*whole.items()} == {("1/3.png", "unreadable")}
