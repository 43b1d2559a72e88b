"""A run in phases is resumed in any of them, to the bit."""

import shutil

import numpy as np
import pytest

from tests.integration import commands
from tests.integration.commands import pretraining, succeed

PHASES = (
    "phases.small.until=5 steps",
    "phases.small.image_size=4",
    "phases.small.global_batch=8",
)
FIELDS = (
    "total=10 steps",
    "schedule.warmup=2 steps",
    "checkpoint.every=2 steps",
    "checkpoint.keep_latest=9",
    "evaluation.every=10 steps",
    "logging.every=1 steps",
    "input.repeats=3",
    "polyak.factor=0.9",
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def uninterrupted(data_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("phases") / "run"

    out = succeed(pretraining(data_dir, workdir, *PHASES, *FIELDS))

    assert "to step 5: 8 images of 4x4 a step" in out
    return workdir


def test_images_and_compute_of_a_run_in_phases(uninterrupted):
    """The compute of a step is one number in each phase."""
    summary = commands.summary(uninterrupted)
    metrics = commands.metrics(uninterrupted)

    totals = [line["exaflops"] for line in metrics if "exaflops" in line]
    of_steps = np.diff([0.0, *totals])

    assert summary["images"] == 5 * 8 + 5 * 16
    assert summary["exaflops"] == totals[-1]
    assert of_steps == pytest.approx([of_steps[0]] * 5 + [of_steps[9]] * 5)
    assert of_steps[0] < of_steps[9] / 4


@pytest.mark.parametrize("step", [4, 8])
def test_killed_in_each_phase(uninterrupted, data_dir, tmp_path, step):
    """A kill after a checkpoint is imitated: there are no later ones, but further metrics."""
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted, workdir)
    (workdir / "summary.json").unlink()
    for later in commands.checkpoint_steps(workdir):
        if later > step:
            shutil.rmtree(workdir / "checkpoints" / str(later))

    out = succeed(pretraining(data_dir, workdir, *PHASES, *FIELDS))

    assert f"continuing from this workdir's checkpoint of step {step}" in out

    found = commands.summary(workdir)
    expected = commands.summary(uninterrupted)
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "images", "exaflops"):
        assert found[name] == expected[name], name
    assert commands.curve(workdir) == commands.curve(uninterrupted)
