"""A run into a bucket that is killed while it saves, and resumed, ends with the bytes of a run into a folder."""

import json
import re

import pytest

from tests import gcs
from tests.integration import commands
from vit_jax.checkpoint import CheckpointReader
from vit_jax.storage.buckets import BucketPath
from vit_jax.train.run_files import read_metrics

LENGTH = (
    "total=6 steps",
    "checkpoint.every=2 steps",
    "evaluation.every=3 steps",
    "logging.every=1 steps",
)
OPTIONS = (*LENGTH, "polyak.factor=0.99", "logging.tensorboard=True")
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


def test_killed_while_it_saves_locked_out_and_resumed(cloud, data_dir, tmp_path):
    commands.succeed(commands.pretraining(data_dir, tmp_path, *OPTIONS))
    workdir = BucketPath(f"gs://{gcs.BUCKET}/run")
    words = commands.pretraining(data_dir, workdir, *OPTIONS)
    last_object = "checkpoints/4/commit_success.txt"
    cloud.inject(last_object, 503, times=1000)
    process = commands.start(words)
    commands.wait_until(lambda: any(last_object in request for request in cloud.requests), process)
    second = commands.run(words)  # on the same machine: the other process is alive

    assert second.code == 2
    assert f"workdir '{workdir}' is used by another run: process {process.pid} on " in second.err

    commands.kill(process)
    cloud.forgive()

    assert (workdir / "checkpoints" / "4" / "model" / "manifest.ocdbt").exists()

    before = CheckpointReader(workdir).all_steps()[-1]

    assert before < 4

    assert f"continuing from this workdir's checkpoint of step {before}" in commands.succeed(words)

    summary = json.loads((workdir / "summary.json").read_text())
    expected = commands.summary(tmp_path)

    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert summary[name] == expected[name], name

    keys = ("step", "train_loss", "test_loss")
    curve = [tuple(line.get(key) for key in keys) for line in read_metrics(workdir)]

    assert curve == commands.curve(tmp_path)
    assert not (workdir / "run.lock").exists()
    assert list(workdir.glob("tensorboard/*"))
    assert f"| {workdir} | ended |" in commands.succeed(["status", f"gs://{gcs.BUCKET}"])


@pytest.mark.parametrize(
    ("status", "place", "words"),
    [
        (403, "run", "403.*roles/storage.objectUser.*Choose a folder"),
        (None, "", "no such object or bucket.*Choose a"),
    ],
)
def test_a_bucket_that_cannot_be_written_is_said_at_once(
    cloud, data_dir, tmp_path, status, place, words
):
    if status:
        cloud.inject("POST /upload", status)

    workdir = f"gs://{gcs.BUCKET}/forbidden" if status else "gs://no-such-bucket/run"
    outcome = commands.run(commands.pretraining(data_dir, workdir, *OPTIONS))

    assert outcome.code == 2, outcome.err
    assert re.search(rf"workdir '{workdir}' cannot be written: .*{words}", outcome.err)
    assert not cloud.forgive()
