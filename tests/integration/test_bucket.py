"""A run into a bucket that is killed while it saves, and resumed, ends as a run into a folder."""

import json
import re

import pytest

from tests import gcs
from tests.integration import commands
from tests.tiny import LENGTH
from vit_jax.checkpoint import CheckpointReader
from vit_jax.storage.buckets import BucketPath
from vit_jax.train.run_files import read_metrics

OPTIONS = (*LENGTH, "logging.tensorboard=True")
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


def start_and_wait_for_request(words, request, cloud):
    """Start a run; return its process when it has sent a request."""
    process = commands.start(words)
    commands.wait_until(lambda: any(request in sent for sent in cloud.requests), process)
    return process


def test_killed_while_it_saves_and_resumed(cloud, data_dir, tmp_path):
    """The last object of a checkpoint cannot be written when the run is killed.

    A second run on the same machine is locked out while the first is alive.
    """
    commands.succeed(commands.pretraining(data_dir, tmp_path, *OPTIONS))
    workdir = BucketPath(f"gs://{gcs.BUCKET}/run")
    words = commands.pretraining(data_dir, workdir, *OPTIONS)
    last_object = "checkpoints/4/commit_success.txt"
    cloud.inject(last_object, 503, times=1000)

    process = start_and_wait_for_request(words, last_object, cloud)
    second = commands.run(words)
    assert second.code == 2
    assert f"workdir '{workdir}' is used by another run: process {process.pid} on " in second.err

    commands.kill(process)
    cloud.forgive()
    assert (workdir / "checkpoints" / "4" / "model" / "manifest.ocdbt").exists()

    last_complete = CheckpointReader(workdir).all_steps()[-1]
    assert last_complete < 4

    out = commands.succeed(words)
    assert f"continuing from this workdir's checkpoint of step {last_complete}" in out
    check_run_in_bucket(workdir, tmp_path)


def check_run_in_bucket(workdir, expected_workdir):
    """Compare a finished run in a bucket with one in a folder."""
    summary = json.loads((workdir / "summary.json").read_text())
    expected = commands.summary(expected_workdir)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert summary[name] == expected[name], name

    curve = []
    for line in read_metrics(workdir):
        curve.append((line.get("step"), line.get("train_loss"), line.get("test_loss")))
    assert curve == commands.curve(expected_workdir)

    assert not (workdir / "run.lock").exists()
    assert list(workdir.glob("tensorboard/*"))
    assert f"| {workdir} | ended |" in commands.succeed(["status", f"gs://{gcs.BUCKET}"])


def test_a_bucket_without_access_is_named_at_once(cloud, data_dir):
    cloud.inject("POST /upload", 403)
    workdir = f"gs://{gcs.BUCKET}/forbidden"

    outcome = commands.run(commands.pretraining(data_dir, workdir, *OPTIONS))

    rule = "403.*roles/storage.objectUser.*Choose a folder"
    assert outcome.code == 2, outcome.err
    assert re.search(rf"workdir '{workdir}' cannot be written: .*{rule}", outcome.err)
    assert not cloud.forgive()


def test_a_bucket_that_does_not_exist_is_named_at_once(cloud, data_dir):
    workdir = "gs://no-such-bucket/run"

    outcome = commands.run(commands.pretraining(data_dir, workdir, *OPTIONS))

    rule = "no such object or bucket.*Choose a"
    assert outcome.code == 2, outcome.err
    assert re.search(rf"workdir '{workdir}' cannot be written: .*{rule}", outcome.err)
    assert not cloud.forgive()
