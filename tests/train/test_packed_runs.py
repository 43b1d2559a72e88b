"""Runs on tar shards and on parquet, equal to runs on the digits that they hold; and runs without some images."""

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

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("tiny")]


@pytest.fixture(scope="module")
def packed(tiny_run, tmp_path_factory):
    """The digits, in the same order, in shards and in parquet."""
    folder = tmp_path_factory.mktemp("packed")
    for split, name in (
        ("train", tiny_run.config.input.train_split),
        ("test", tiny_run.config.input.test_split),
    ):
        source = open_source("digits", name, tiny_run.config.input, 0)
        images = [
            cv2.imencode(".png", decode(source[index].image))[1].tobytes()
            for index in range(len(source))
        ]
        labels = source.labels.tolist()
        members = [
            member
            for number, (image, label) in enumerate(zip(images, labels, strict=True))
            for member in ((f"{number:05}.png", image), (f"{number:05}.cls", b"%d" % label))
        ]

        for shard in range(2):
            half = slice(len(members) // 4 * 2 * shard, None if shard else len(members) // 4 * 2)
            write_shard(folder / "wds" / f"{split}-{shard}.tar", members[half])

        stored = [{"bytes": image, "path": None} for image in images]
        write_parquet(folder / "parquet" / f"{split}-0.parquet", labels, group=100, images=stored)

    return folder


@pytest.mark.parametrize("kind", ["wds", "parquet"])
def test_a_resumed_run_ends_with_the_bytes_of_the_run_on_the_digits(
    kind, packed, tiny_run, tmp_path, monkeypatch
):
    inputs = dataclasses.replace(
        tiny_run.config.input,
        train_split="train",
        test_split="test",
        data_dir=None,
    )
    config = dataclasses.replace(tiny_run.config, data=f"{kind}:{packed}/{kind}", input=inputs)
    runs.interrupt(lambda: pretrain(config, str(tmp_path)), 2, 2, monkeypatch)

    runs.assert_same_end(pretrain(config, str(tmp_path)), tiny_run.summary)


def test_a_resumed_run_excludes_the_same_images(data_dir, tiny_run, tmp_path):
    """The opening counts them, and another file of as many ids is another run."""
    ids = {"split": "train", "records": 1437, "ids": [str(number) for number in range(10)]}
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    words = commands.pretraining(
        data_dir,
        tmp_path / "run",
        *LENGTH,
        f"input.exclude={tmp_path}/ids.json",
    )
    out = commands.succeed(words)

    assert f"excluded 10 images of {tmp_path}/ids.json" in out
    assert "1,427 training" in out
    assert (
        commands.summary(tmp_path / "run")["parameters_sha256"]
        != tiny_run.summary["parameters_sha256"]
    )

    (tmp_path / "ids.json").write_text(json.dumps(ids | {"ids": [*ids["ids"][1:], "20"]}))
    outcome = commands.run(words)

    assert outcome.code == 2
    assert "exclude_sha256" in outcome.err
