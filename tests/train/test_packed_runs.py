"""Runs on tar shards and Parquet, equal to runs on the digits in them, and runs with excluded images."""

import dataclasses
import json

import cv2
import pytest

from tests.data.packed_files import write_parquet, write_shard
from tests.integration import commands
from tests.tiny import LENGTH
from tests.train import small_runs as runs
from vit_jax.data.decoding.images import decode
from vit_jax.data.sources import open_source
from vit_jax.train.pretrain import pretrain


def encode(source):
    """Return the images of a source as PNG files."""
    files = []
    for index in range(len(source)):
        _, content = cv2.imencode(".png", decode(source[index].image))
        files.append(content.tobytes())
    return files


def list_members(images, labels):
    """Return the members of a tar: an image and its label for each record."""
    members = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        members.append((f"{number:05}.png", image))
        members.append((f"{number:05}.cls", b"%d" % label))
    return members


pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.xdist_group("tiny"),
]


@pytest.fixture(scope="module")
def packed(tiny_run, tmp_path_factory):
    """The digits, in the same order, in shards and in Parquet."""
    folder = tmp_path_factory.mktemp("packed")
    inputs = tiny_run.config.input

    for split, name in (("train", inputs.train_split), ("test", inputs.test_split)):
        source = open_source("digits", name, inputs, 0)
        images = encode(source)
        labels = source.labels.tolist()

        members = list_members(images, labels)
        middle = len(images) // 2 * 2
        write_shard(folder / "wds" / f"{split}-0.tar", members[:middle])
        write_shard(folder / "wds" / f"{split}-1.tar", members[middle:])

        stored = [{"bytes": image, "path": None} for image in images]
        write_parquet(
            folder / "parquet" / f"{split}-0.parquet",
            labels,
            group=100,
            images=stored,
        )

    return folder


@pytest.mark.parametrize("kind", ["wds", "parquet"])
def test_a_resumed_run_ends_with_the_bytes_of_the_run_on_the_digits(
    kind,
    packed,
    tiny_run,
    tmp_path,
    monkeypatch,
):
    inputs = dataclasses.replace(
        tiny_run.config.input,
        train_split="train",
        test_split="test",
        data_dir=None,
    )
    config = dataclasses.replace(
        tiny_run.config,
        data=f"{kind}:{packed}/{kind}",
        input=inputs,
    )
    runs.interrupt(lambda: pretrain(config, str(tmp_path)), 2, 2, monkeypatch)

    runs.assert_same_end(
        pretrain(config, str(tmp_path)),
        tiny_run.summary,
    )


def test_a_resumed_run_excludes_the_same_images(
    data_dir,
    tiny_run,
    tmp_path,
):
    """The opening counts them, and another file with as many ids is another run."""
    workdir = tmp_path / "run"
    file = tmp_path / "ids.json"
    ids = [str(number) for number in range(10)]
    excluded = {"split": "train", "records": 1437}
    file.write_text(json.dumps(excluded | {"ids": ids}))
    words = commands.pretraining(data_dir, workdir, *LENGTH, f"input.exclude={file}")

    out = commands.succeed(words)
    digest = commands.summary(workdir)["parameters_sha256"]
    file.write_text(json.dumps(excluded | {"ids": [*ids[1:], "20"]}))
    resumed = commands.run(words)

    assert f"excluded 10 images of {file}" in out
    assert "1,427 training" in out
    assert digest != tiny_run.summary["parameters_sha256"]
    assert resumed.code == 2
    assert "exclude_sha256" in resumed.err
