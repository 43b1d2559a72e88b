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

FACTS = {
    "config.seed": 0,
    "classes": ["cat", "dog"],
    "train_files_sha256": "1",
    "weights": None,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"config.seed": 1}, "process 1: config.seed is 1, in process 0 0"),
        ({"classes": ["cat"]}, "process 1: of the classes only one of the two has 'dog'"),
        (
            {"classes": ["dog", "cat"]},
            "process 1: classes is ['dog', 'cat'], in process 0 ['cat', 'dog']",
        ),
        (
            {"train_files_sha256": "2"},
            "process 1: the train files have other names or classes",
        ),
        (
            {"config.evaluation.evaluators.mine.split": "x"},
            "evaluators.mine.split is 'x', in process 0 None",
        ),
    ],
)
def test_differences_are_named_with_their_process(changes, line):
    message = describe_differences([FACTS, FACTS | changes, FACTS])

    assert line in message
    assert len(message.splitlines()) == 1


def test_of_many_differences_ten_are_named():
    names = [f"config.{number}" for number in range(40)]
    first = dict.fromkeys(names, 0)
    second = dict.fromkeys(names, 1)

    message = describe_differences([first, second])

    assert "; and 30 more. Start" in message


def test_a_run_compares_itself_with_the_others(data_dir, monkeypatch):
    """Hosts may differ in the place of their data and the options of a machine."""
    config = runs.config(f"input.data_dir={data_dir}")
    other = runs.config(
        "input.data_dir=/elsewhere",
        "input.num_workers=3",
        "logging.tensorboard=True",
    )
    data = open_datasets(config)
    facts_of_processes = []

    def gather_alone(facts):
        facts_of_processes.append(facts)
        return [facts]

    require_agreement(config, data)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "gather", gather_alone)
    require_agreement(config, data)

    def gather_with_first(facts):
        return [*facts_of_processes, facts]

    monkeypatch.setattr(hosts, "gather", gather_with_first)
    require_agreement(other, data)

    def gather_with_other_seed(facts):
        return [facts, facts | {"config.seed": 7}]

    monkeypatch.setattr(hosts, "gather", gather_with_other_seed)

    message = r"process 1: config\.seed is 7, in process 0 0"
    with pytest.raises(ValueError, match=message):
        require_agreement(config, data)


def list_members(labels, levels):
    """Return the members of a tar whose images have these levels."""
    members = []
    for name, content in samples(labels):
        if "png" in name:
            content = image(levels[int(name[:5])])
        members.append((name, content))
    return members


def write_images(folder, levels):
    """Write images of two classes, and a table of them."""
    lines = ["image,label"]
    for number, level in enumerate(levels):
        label = number % 2
        path = folder / "images" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(level))
        lines.append(f"images/{label}/{number}.png,{label}")
    (folder / "a.csv").write_text("\n".join(lines) + "\n")


def write_host(folder, kind, levels):
    """Write the images of one host with these levels, under the same names; return the data."""
    labels = [0, 1] * 6
    if kind == "wds":
        members = list_members(labels, levels)
        path = write_shard(folder / "a.tar", members)
        return f"wds:{path}"
    if kind == "parquet":
        images = [{"bytes": image(level), "path": None} for level in levels]
        path = write_parquet(folder / "a.parquet", labels, images=images)
        return f"parquet:{path}"

    write_images(folder, levels)
    if kind == "folder":
        return f"folder:{folder}/images"
    return f"csv:{folder}/a.csv"


def digest_host(folder, kind, levels):
    data = write_host(folder, kind, levels)
    source = open_source(data, "all", runs.config().input, 0)
    digests = digest_images(source, seed=0)
    return json.loads(json.dumps(digests))


@pytest.mark.parametrize("kind", ["folder", "csv", "wds", "parquet"])
def test_other_bytes_under_the_same_names_are_noticed(
    kind,
    tmp_path,
    monkeypatch,
):
    """Names, sizes, numbers and labels are equal; one image of twelve is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = digest_host(tmp_path / "a", kind, [*range(12)])
    second = digest_host(tmp_path / "b", kind, [*range(12)])
    third = digest_host(
        tmp_path / "c",
        kind,
        [*range(7), 99, *range(8, 12)],
    )
    same = [
        {"training images": first},
        {"training images": second},
    ]
    changed = {"training images": third}

    message = describe_differences([*same, changed])
    (other,) = [key for key in first if first[key] != third[key]]

    assert len(first) == 12
    assert describe_differences(same) == ""
    assert "process 2: 1 of 12 compared training images have other bytes or labels: " in message
    assert f"labels: {other}. Start" in message
    assert "7" in other


def test_the_seed_chooses_the_images(data_dir):
    """Pixels, labels and stored records of TFDS count, and an image that only one host can read."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(200, 2, 3, 1), dtype=np.uint8)
    labels = np.arange(200) % 2
    config = runs.config(f"input.data_dir={data_dir}")
    digits = open_source("digits", "train", config.input, 0)

    def digest(pixels, labels, seed=0):
        source = MemorySource(pixels, labels, ("a", "b"))
        return digest_images(source, seed)

    first = digest(pixels, labels)
    other_pixels = digest(pixels.transpose(0, 2, 1, 3), labels)
    other_labels = digest(pixels, 1 - labels)
    digests_of_digits = digest_images(digits, 0).values()

    assert len(first) == NUM_COMPARED
    assert list(first) == sorted(first, key=int)
    assert first == digest(pixels.copy(), labels)
    assert first.keys() != digest(pixels, labels, seed=1).keys()
    for other in (other_pixels, other_labels):
        assert other.keys() == first.keys()
        assert not other.items() & first.items()
    assert len(set(digests_of_digits)) == NUM_COMPARED


def test_an_unreadable_image_is_compared(tmp_path):
    data = write_host(tmp_path, "folder", range(12))
    source = open_source(
        data,
        "all",
        runs.config("input.cache_records=False").input,
        0,
    )

    complete = digest_images(source, 0)
    (tmp_path / "images/1/3.png").unlink()
    damaged = digest_images(source, 0)

    changed = damaged.items() - complete.items()
    assert changed == {("1/3.png", "unreadable")}
