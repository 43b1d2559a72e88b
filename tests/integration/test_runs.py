"""Files that runs leave behind, their start, and their end when something breaks."""

import json
import os
import re
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests.integration import commands
from tests.integration.commands import pretraining, run, succeed
from tests.tiny import ROOT

SHORT = (
    "total=12 steps",
    "checkpoint.every=4 steps",
    "evaluation.every=6 steps",
    "logging.every=1 steps",
)
AVERAGED = (*SHORT, "polyak.factor=0.9")
MOST_MODULES = 175
PROGRAM = (
    "import sys; from vit_jax.cli import main; main(sys.argv[1:]); "
    "assert 'tensorflow' not in sys.modules"
)
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    """Workdir and output of a process with one device.

    A TensorFlow beside it can be found, and leaves a trace if it is imported.
    """
    folder = tmp_path_factory.mktemp("runs")
    trace = folder / "imported"
    (folder / "tensorflow").mkdir()
    (folder / "tensorflow" / "__init__.py").write_text(f"open({str(trace)!r}, 'w').close()")
    words = pretraining(
        data_dir,
        folder / "finished",
        *AVERAGED,
        "logging.tensorboard=True",
        "logging.profile_start_step=3",
        "logging.profile_num_steps=2",
    )

    result = subprocess.run(
        [sys.executable, *commands.STRICT, "-c", PROGRAM, *words],
        env=commands.environment_of(1) | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=commands.HANG_SECONDS,
    )

    assert result.returncode == 0, result.stderr
    assert not trace.exists()
    return folder / "finished", result.stdout


def test_the_output_of_a_run(finished):
    _, out = finished

    for part in (
        "ViT-mu/2",
        "params   4,858: ",
        "1,437 training and 360 test images",
        "from scratch",
        "images/s",
    ):
        assert part in out
    assert "test accuracy" in out.splitlines()[-3]


def test_the_summary_of_a_run(finished):
    workdir, _ = finished

    summary = commands.summary(workdir)

    assert summary["steps"] == 12
    assert summary["images"] == 12 * 16
    assert summary["num_devices"] == 1
    assert summary["num_processes"] == 1
    assert len(summary["parameters_sha256"]) == 64
    for name in (
        "test_accuracy",
        "test_loss",
        "train_loss",
        "exaflops",
        "wall_seconds",
        "images_per_second",
    ):
        assert isinstance(summary[name], float), name
    assert 0 < summary["goodput"] < 1


def test_the_metrics_of_a_run(finished):
    workdir, _ = finished

    metrics = commands.metrics(workdir)

    assert list(commands.losses(workdir)) == list(range(1, 13))
    assert [line["step"] for line in metrics if "test_loss" in line] == [6, 12]
    for name in (
        "gradient_norm",
        "update_norm",
        "parameter_norm",
        "learning_rate",
        "images_per_second",
    ):
        assert name in metrics[0]
    assert all(0 < line["goodput"] < 1 for line in metrics if "train_loss" in line)


def test_other_files_of_a_run(finished):
    workdir, _ = finished

    config = json.loads((workdir / "config.json").read_text())

    assert config["model"]["width"] == 16
    assert commands.checkpoint_steps(workdir) == [8, 12]
    assert list((workdir / "tensorboard").glob("events.*"))
    assert list((workdir / "profile").rglob("*.xplane.pb"))


def test_weights_of_another_run_start_at_step_0(
    finished,
    data_dir,
    tmp_path,
):
    source, _ = finished
    words = pretraining(
        data_dir,
        tmp_path,
        *SHORT,
        "total=6 steps",
        f"init_from={source}",
    )

    out = succeed(words)

    weights = f"the weights of {source} (vit_jax, Polyak average of step 12)"
    assert f"starting at step 0 with {weights}" in out
    assert list(commands.losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_given_checkpoint_is_continued_in_a_new_workdir_on_other_devices(
    finished,
    data_dir,
    tmp_path,
):
    source, _ = finished
    words = pretraining(
        data_dir,
        tmp_path,
        *AVERAGED,
        "total=16 steps",
        f"resume_from={source}",
    )

    out = succeed(words)

    assert "continuing from step 12" in out
    assert list(commands.losses(tmp_path)) == [13, 14, 15, 16]
    assert commands.summary(tmp_path)["num_devices"] == 8


def test_weights_of_another_network_are_rejected(
    finished,
    data_dir,
    tmp_path,
):
    source, _ = finished
    words = pretraining(
        data_dir,
        tmp_path,
        *AVERAGED,
        f"init_from={source}",
        "model.gelu=exact",
    )

    outcome = run(words)

    assert outcome.code == 2
    assert "gelu: there 'tanh', here 'exact'" in outcome.err


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(
    finished,
    data_dir,
    tmp_path,
):
    """A limit on file size stands in for the disk: a save fails in the middle.

    How orbax divides arrays among files varies, but its description of the optimiser's arrays is
    always a file of 17 KB. The limit is 12 KiB. The compilation cache is off, for it would be
    written, too.
    """
    source, _ = finished
    workdir = tmp_path / "run"
    shutil.copytree(source, workdir)
    (workdir / "config.json").unlink()  # the longer run is another config
    words = pretraining(data_dir, workdir, *AVERAGED, "total=16 steps")
    limit = ["bash", "-c", 'ulimit -f 12 && exec "$@"', "bash"]

    limited = subprocess.run(
        [*limit, sys.executable, "-m", "vit_jax", *words],
        env=commands.environment_of(1) | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=commands.HANG_SECONDS,
    )

    assert limited.returncode == 1, limited.stderr
    assert "could not be written" in limited.stderr
    assert "the checkpoint of step 12 is intact" in limited.stderr
    assert len(limited.stderr.splitlines()) == 2, "the message, and nothing of orbax's threads"
    assert commands.checkpoint_steps(workdir) == [8, 12]
    assert "checkpoint of step 12" in succeed(words)


def test_a_loss_that_is_not_finite_stops_the_run(data_dir, tmp_path):
    words = pretraining(
        data_dir,
        tmp_path,
        *SHORT,
        "checkpoint.every=1 steps",
        "schedule.learning_rate=1e30",
        "schedule.warmup=0 steps",
        "optimizer.clip_global_norm=None",
    )

    outcome = run(words)

    assert outcome.code == 1
    assert "the loss is" in outcome.err
    assert "schedule.learning_rate" in outcome.err
    assert 12 not in commands.checkpoint_steps(tmp_path)


DAMAGED = (0, 1, 2, 3, 6)


def write_damaged(folder):
    """Write forty images in two classes, five of them damaged; return the folder.

    Four of them are training images; seed 0 holds out dark/06.
    """
    rng = np.random.default_rng(0)
    for label, level in (("dark", 0), ("light", 100)):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 100, (8, 8, 3), np.uint8) + level
            cv2.imwrite(str(folder / "images" / label / f"{number:02}.png"), pixels)

    for number in DAMAGED:
        (folder / "images" / "dark" / f"{number:02}.png").write_bytes(b"not an image")
    return folder / "images"


def count_unreadable(workdir):
    """Return the numbers of unreadable images in the metrics, step after step."""
    lines = commands.metrics(workdir)
    return [line["unreadable_images"] for line in lines if "unreadable_images" in line]


def test_unreadable_images_are_skipped_and_named_and_counted(
    data_dir,
    tmp_path,
    caplog,
):
    """The counts are the same in runs that are resumed in the first epoch and after it.

    The limit is above a tenth of the images. The test split has four images: a tenth of the 20 of
    each class.
    """
    workdir = tmp_path / "run"
    words = pretraining(
        data_dir,
        workdir,
        "checkpoint.every=2 steps",
        "checkpoint.keep_latest=9",
        "evaluation.every=2 steps",
        "total=6 steps",
        "evaluation.global_batch=8",
        "logging.every=1 steps",
        f"data=folder:{write_damaged(tmp_path)}",
        "input.max_unreadable=100",
    )

    outcome = run(words)

    assert outcome.code == 0, outcome.err
    lines = [*outcome.err.splitlines(), *caplog.messages]
    named = []
    for line in lines:
        if "Unreadable image, skipped" in line:
            named.append(line.rpartition("/")[2])

    expected_names = [f"{number:02}.png" for number in DAMAGED]
    assert sorted(named) == expected_names, "once each, in three evaluations too"
    assert "5 images could not be read and were skipped" in outcome.out, "of both splits"

    metrics = commands.metrics(workdir)
    assert commands.summary(workdir)["test_images"] == 3
    assert [line["test_images"] for line in metrics if "test_loss" in line] == [3, 3, 3]

    counts = count_unreadable(workdir)
    assert counts[0] < counts[-1] == 4
    check_resumed_counts(words, workdir, counts)
    check_limit_of_unreadable(words, workdir, counts)


def check_resumed_counts(words, workdir, counts):
    """Resume after steps 4 and 2; the counts are those of the uninterrupted run."""
    for step in (4, 2):
        for later in (workdir / "checkpoints").iterdir():
            if int(later.name) > step:
                shutil.rmtree(later)

        succeed(words)

        assert count_unreadable(workdir) == counts, step
        assert commands.summary(workdir)["unreadable_images"] == 5


def check_limit_of_unreadable(words, workdir, counts):
    """Resume with a limit that is reached: the state before is saved."""
    shutil.rmtree(workdir / "checkpoints" / "6")

    outcome = run([*words, "--config.input.max_unreadable=3"])

    assert outcome.code == 2
    assert "config.input.max_unreadable=3: 4 images cannot be read" in outcome.err
    saved = int(re.search(r"The state after step (\d) is saved", outcome.err)[1])
    assert saved == commands.checkpoint_steps(workdir)[-1] >= 5
    assert count_unreadable(workdir)[: saved - 1] == counts[: saved - 1]


def test_a_run_loads_a_part_of_the_package(data_dir, tmp_path):
    """A pre-training run loads no tools, no readers of weights and no other kinds of data."""
    program = (
        "import sys; from vit_jax.cli import main; main(sys.argv[1:]); "
        "print(*(name for name in sys.modules if name.startswith('vit_jax.')))"
    )
    words = pretraining(data_dir, tmp_path / "run", "total=12 steps")

    done = subprocess.run(
        [sys.executable, *commands.STRICT, "-c", program, *words],
        env=commands.environment_of(1) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    unused = {
        "vit_jax.cli.sweeps",
        "vit_jax.data.decoding.tiff",
        "vit_jax.data.kinds.parquet",
        "vit_jax.objectives.masked_patch",
        "vit_jax.storage.buckets",
        "vit_jax.weights.load",
    }
    names = done.stdout.splitlines()[-1].split()
    assert "vit_jax.train.loop" in names
    assert not [name for name in names if name.startswith(("vit_jax.tools", "vit_jax.api"))]
    assert unused.isdisjoint(names)
    assert len(names) <= MOST_MODULES, "\n".join(sorted(names))
