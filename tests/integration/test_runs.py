"""What runs leave behind, how they start, and how they end when something breaks."""

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
MOST_MODULES = 171
PROGRAM = "import sys; from vit_jax.cli import main; main(sys.argv[1:]); assert 'tensorflow' not in sys.modules"
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    """Workdir and output of a process with one device, beside a TensorFlow that can be found and leaves a trace."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tensorflow").mkdir()
    (folder / "tensorflow" / "__init__.py").write_text(
        f"open({str(folder / 'imported')!r}, 'w').close()"
    )
    profile = (
        "logging.tensorboard=True",
        "logging.profile_start_step=3",
        "logging.profile_num_steps=2",
    )
    words = pretraining(data_dir, folder / "finished", *AVERAGED, *profile)
    result = subprocess.run(
        [sys.executable, *commands.STRICT, "-c", PROGRAM, *words],
        env=commands.environment_of(1) | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=commands.HANG_SECONDS,
    )

    assert result.returncode == 0, result.stderr
    assert not (folder / "imported").exists()

    return folder / "finished", result.stdout


def test_what_a_run_prints(finished):
    for part in (
        "ViT-mu/2",
        "params   4,858: ",
        "1,437 training and 360 test images",
        "from scratch",
        "images/s",
    ):
        assert part in finished[1]

    assert "test accuracy" in finished[1].splitlines()[-3]


def test_what_a_run_leaves(finished):
    workdir, _ = finished
    summary = commands.summary(workdir)
    metrics = commands.metrics(workdir)

    for name in (
        "test_accuracy",
        "test_loss",
        "train_loss",
        "exaflops",
        "wall_seconds",
        "images_per_second",
    ):
        assert isinstance(summary[name], float), name

    assert summary["steps"] == 12
    assert summary["images"] == 12 * 16
    assert summary["num_devices"] == summary["num_processes"] == 1
    assert len(summary["parameters_sha256"]) == 64
    assert json.loads((workdir / "config.json").read_text())["model"]["width"] == 16
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

    assert commands.checkpoint_steps(workdir) == [8, 12]
    assert list((workdir / "tensorboard").glob("events.*"))
    assert list((workdir / "profile").rglob("*.xplane.pb"))


def test_weights_of_another_run_start_at_step_0(finished, data_dir, tmp_path):
    out = succeed(
        pretraining(data_dir, tmp_path, *SHORT, "total=6 steps", f"init_from={finished[0]}")
    )

    assert (
        f"starting at step 0 with the weights of {finished[0]} (vit_jax, Polyak average of step 12)"
        in out
    )
    assert list(commands.losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_given_checkpoint_is_continued_in_a_new_workdir_on_other_devices(
    finished, data_dir, tmp_path
):
    out = succeed(
        pretraining(data_dir, tmp_path, *AVERAGED, "total=16 steps", f"resume_from={finished[0]}")
    )

    assert "continuing from step 12" in out
    assert list(commands.losses(tmp_path)) == [13, 14, 15, 16]
    assert commands.summary(tmp_path)["num_devices"] == 8


def test_weights_of_another_network_are_rejected(finished, data_dir, tmp_path):
    outcome = run(
        pretraining(data_dir, tmp_path, *AVERAGED, f"init_from={finished[0]}", "model.gelu=exact")
    )

    assert outcome.code == 2
    assert "gelu: there 'tanh', here 'exact'" in outcome.err


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(finished, data_dir, tmp_path):
    """A limit on file size stands in for the disk: writing beyond it fails just so, in the middle of a save.

    How orbax divides arrays among files varies; what it says of the optimiser's is always a file of
    17 KB.
    """
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    (workdir / "config.json").unlink()  # the longer run is another config
    words = pretraining(data_dir, workdir, *AVERAGED, "total=16 steps")
    limited = subprocess.run(
        [
            "bash",
            "-c",
            'ulimit -f 12 && exec "$@"',
            "bash",
            sys.executable,
            "-m",
            "vit_jax",
            *words,
        ],  # 12 KiB
        env=commands.environment_of(1)
        | {"JAX_ENABLE_COMPILATION_CACHE": "false"},  # which would be written, too
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=commands.HANG_SECONDS,
    )

    assert limited.returncode == 1, limited.stderr
    assert "could not be written" in limited.stderr
    assert "the checkpoint of step 12 is intact" in limited.stderr
    assert len(limited.stderr.splitlines()) == 2, (
        "the message alone, without what orbax prints of its threads"
    )
    assert commands.checkpoint_steps(workdir) == [8, 12]
    assert "checkpoint of step 12" in succeed(words)


def test_a_loss_that_is_not_finite_stops_the_run(data_dir, tmp_path):
    options = (
        "schedule.learning_rate=1e30",
        "schedule.warmup=0 steps",
        "optimizer.clip_global_norm=None",
    )
    outcome = run(pretraining(data_dir, tmp_path, *SHORT, "checkpoint.every=1 steps", *options))

    assert outcome.code == 1
    assert "the loss is" in outcome.err
    assert "schedule.learning_rate" in outcome.err
    assert 12 not in commands.checkpoint_steps(tmp_path)


DAMAGED = (0, 1, 2, 3, 6)


def write_damaged(folder):
    """Forty images in two classes, five of them damaged: four to train on, and dark/06, which seed 0 holds out."""
    rng = np.random.default_rng(0)
    for label in ("dark", "light"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 100, (8, 8, 3), np.uint8) + (100 if label == "light" else 0)
            cv2.imwrite(str(folder / "images" / label / f"{number:02}.png"), pixels)

    for number in DAMAGED:
        (folder / "images" / "dark" / f"{number:02}.png").write_bytes(b"not an image")

    return folder / "images"


def test_unreadable_images_are_left_out_and_named_and_counted_in_a_resumed_run_too(
    data_dir, tmp_path, caplog
):
    """Resumed in the first epoch and after it, and with the limit."""
    options = (
        "checkpoint.every=2 steps",
        "checkpoint.keep_latest=9",
        "evaluation.every=2 steps",
        "total=6 steps",
    )
    options += (
        "evaluation.global_batch=8",
        "logging.every=1 steps",
        f"data=folder:{write_damaged(tmp_path)}",
    )
    options += ("input.max_unreadable=100",)  # more than a tenth
    words = pretraining(data_dir, tmp_path / "run", *options)
    outcome = run(words)

    assert outcome.code == 0, outcome.err

    lines = [*outcome.err.splitlines(), *caplog.messages]
    named = [line.rpartition("/")[2] for line in lines if "Unreadable image, left out" in line]

    expected_named = [f"{number:02}.png" for number in DAMAGED]
    assert sorted(named) == expected_named, "once each, in three evaluations too"
    assert "5 images could not be read and were left out" in outcome.out, "of both splits"

    summary = commands.summary(tmp_path / "run")

    assert summary["test_images"] == 3, "of four: a tenth of 20 of each class"
    assert [
        line["test_images"] for line in commands.metrics(tmp_path / "run") if "test_loss" in line
    ] == [3] * 3

    def counts():
        lines = commands.metrics(tmp_path / "run")
        return [line["unreadable_images"] for line in lines if "unreadable_images" in line]

    expected = counts()
    assert expected[0] < expected[-1] == 4

    for step in (4, 2):
        for later in (tmp_path / "run" / "checkpoints").iterdir():
            if int(later.name) > step:
                shutil.rmtree(later)

        succeed(words)

        assert counts() == expected, step
        assert commands.summary(tmp_path / "run")["unreadable_images"] == 5

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    outcome = run([*words, "--config.input.max_unreadable=3"])

    assert outcome.code == 2
    assert "config.input.max_unreadable=3: 4 images cannot be read" in outcome.err

    saved = int(re.search(r"The state after step (\d) is saved", outcome.err)[1])

    assert saved == commands.checkpoint_steps(tmp_path / "run")[-1] >= 5
    assert counts()[: saved - 1] == expected[: saved - 1]


def test_a_run_loads_a_part_of_the_package(data_dir, tmp_path):
    """A pre-training run loads no tools, no readers of weights and no other kinds of data."""
    program = "import sys; from vit_jax.cli import main; main(sys.argv[1:]); "
    program += "print(*(name for name in sys.modules if name.startswith('vit_jax.')))"
    words = pretraining(data_dir, tmp_path / "run", "total=12 steps")
    command = [sys.executable, *commands.STRICT, "-c", program, *words]
    environment = commands.environment_of(1) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    names = done.stdout.splitlines()[-1].split()

    assert "vit_jax.train.loop" in names
    assert not [name for name in names if name.startswith(("vit_jax.tools", "vit_jax.api"))]
    unused = {
        "vit_jax.cli.sweeps",
        "vit_jax.data.decoding.tiff",
        "vit_jax.data.kinds.parquet",
        "vit_jax.objectives.masked_patch",
        "vit_jax.storage.buckets",
        "vit_jax.weights.load",
    }
    assert unused.isdisjoint(names)
    assert len(names) <= MOST_MODULES, "\n".join(sorted(names))
