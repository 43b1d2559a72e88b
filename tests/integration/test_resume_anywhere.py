"""A run saved by four processes of two devices goes on anywhere, with the same images in the same order."""

import shutil

import pytest

from tests.integration import commands
from tests.integration.commands import finish
from tests.integration.launchers import explicit

pytestmark = pytest.mark.processes
OPTIONS = ("total=12 steps", "checkpoint.every=6 steps", "evaluation.every=12 steps", "logging.every=1 step")
OPTIONS += ("model.width=32", "model.num_heads=4", "polyak.factor=0.99", "checkpoint.keep_latest=5")
SAVED = ("sharding.parameters=fsdp", "sharding.num_model_shards=2")


@pytest.fixture(scope="module")
def four_processes(command, tmp_path_factory):
    """The workdir of a whole run of 4 x 2 devices: two replicas of two data by two model shards."""
    workdir = tmp_path_factory.mktemp("four")
    results = finish(command.start_all(workdir, explicit(4), *OPTIONS, *SAVED, "sharding.num_replicas=2", devices=2))
    assert [code for *_, code in results] == [0] * 4, results
    assert "in 4 process(es), 4 images each, parameters fsdp (2 replica x 2 data x 2 model)" in results[0][0]
    return workdir


def at_step_6(whole, workdir):
    """The workdir as it was when the run was half done."""
    shutil.copytree(whole, workdir)
    shutil.rmtree(workdir / "checkpoints" / "12")
    (workdir / "summary.json").unlink()
    assert commands.checkpoint_steps(workdir) == [6]
    return workdir


def losses(workdir):
    lines = {line["step"]: line["train_loss"] for line in commands.metrics(workdir) if "train_loss" in line}
    return [lines[step] for step in range(7, 13)]


def test_on_the_same_layout_to_the_bit(command, four_processes, tmp_path):
    workdir = at_step_6(four_processes, tmp_path / "run")
    results = finish(command.start_all(workdir, explicit(4), *OPTIONS, *SAVED, "sharding.num_replicas=2", devices=2))
    assert [code for *_, code in results] == [0] * 4, results
    assert "checkpoint of step 6" in results[0][0]
    assert losses(workdir) == losses(four_processes)
    summaries = [commands.summary(folder) for folder in (workdir, four_processes)]
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert summaries[0][name] == summaries[1][name]


@pytest.mark.parametrize(
    ("num_processes", "devices", "sharding"),
    [(1, 8, ()), (2, 2, ("sharding.parameters=fsdp",)), (1, 1, ())],
    ids=["1x8-replicated", "2x2-fsdp", "1x1"],
)
def test_on_another_layout_within_float_tolerance(command, four_processes, tmp_path, num_processes, devices, sharding):
    workdir = at_step_6(four_processes, tmp_path / "run")
    if num_processes == 1:
        results = finish([command.start(workdir, *OPTIONS, *sharding, devices=devices)])
    else:
        results = finish(command.start_all(workdir, explicit(num_processes), *OPTIONS, *sharding, devices=devices))
    assert [code for *_, code in results] == [0] * num_processes, results
    assert "checkpoint of step 6" in results[0][0]
    assert losses(workdir) == pytest.approx(losses(four_processes), rel=1e-5)
    expected = commands.summary(four_processes)
    assert commands.summary(workdir)["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-4)
    assert commands.summary(workdir)["num_devices"] == num_processes * devices
