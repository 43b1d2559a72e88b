"""What runs leave behind, how they start, and how they end when something breaks."""

import json
import pathlib
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests.integration import commands

ROOT = pathlib.Path(__file__).parents[2]
SHORT = ("total=12 steps", "checkpoint.every=4 steps", "evaluation.every=6 steps", "logging.every=1 steps")


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    options = (
        "logging.tensorboard=True",
        "polyak.factor=0.9",
        "logging.profile_start_step=3",
        "logging.profile_num_steps=2",
    )
    result = command.run(workdir, *SHORT, *options)
    assert result.returncode == 0, result.stderr
    return workdir, result


def test_what_a_run_prints(finished):
    _, result = finished
    for text in (
        "ViT-mu/2",
        "total ",
        "1,437 training and 360 test images",
        "starting from scratch",
        "images/s",
        "left",
    ):
        assert text in result.stdout
    assert "test accuracy" in result.stdout.splitlines()[-3]


def test_what_a_run_leaves(finished):
    workdir, _ = finished
    summary, metrics = commands.summary(workdir), commands.metrics(workdir)
    for name in ("test_accuracy", "test_loss", "train_loss", "exaflops", "wall_seconds", "images_per_second"):
        assert isinstance(summary[name], float), name
    assert summary["steps"] == 12
    assert summary["images"] == 12 * 16
    assert summary["num_devices"] == summary["num_processes"] == 1
    assert len(summary["parameters_sha256"]) == 64
    assert json.loads((workdir / "config.json").read_text())["model"]["width"] == 16
    assert [line["step"] for line in metrics if "train_loss" in line] == list(range(1, 13))
    assert [line["step"] for line in metrics if "test_loss" in line] == [6, 12]
    for name in ("gradient_norm", "update_norm", "parameter_norm", "learning_rate", "images_per_second"):
        assert name in metrics[0]
    assert commands.checkpoint_steps(workdir) == [8, 12]
    assert list((workdir / "tensorboard").glob("events.*"))
    assert list((workdir / "profile").rglob("*.xplane.pb"))


def test_weights_of_another_run_start_at_step_0(finished, command, tmp_path):
    workdir, _ = finished
    result = command.run(tmp_path, *SHORT, f"init_from={workdir}", "schedule.learning_rate=0.0")
    assert result.returncode == 0, result.stderr
    assert f"starting at step 0 with the weights of {workdir} (vit_jax, Polyak average of step 12)" in result.stdout


def test_weights_of_a_network_that_computes_something_else_are_refused(finished, command, tmp_path):
    workdir, _ = finished
    result = command.run(tmp_path, *SHORT, f"init_from={workdir}", "model.gelu=exact")
    assert result.returncode == 2
    assert "gelu: there 'tanh', here 'exact'" in result.stderr


def test_a_given_checkpoint_is_continued_in_a_new_workdir(finished, command, tmp_path):
    workdir, _ = finished
    result = command.run(tmp_path, *SHORT, "total=16 steps", "polyak.factor=0.9", f"resume_from={workdir}")
    assert result.returncode == 0, result.stderr
    assert "continuing from step 12" in result.stdout
    assert [line["step"] for line in commands.metrics(tmp_path) if "train_loss" in line] == [13, 14, 15, 16]


def test_resuming_on_other_data_is_refused(finished, command, tmp_path):
    workdir, _ = finished
    result = command.run(tmp_path, *SHORT, "polyak.factor=0.9", "seed=5", f"resume_from={workdir}")
    assert result.returncode == 2
    assert "seed=0, this run has 5" in result.stderr
    assert "init_from" in result.stderr


def test_a_full_disk_ends_the_run_and_spares_the_last_checkpoint(command, tmp_path):
    """A limit on file size stands in for the disk: writing beyond it fails just so, in the middle of a save."""
    options = ("total=40 steps", "checkpoint.every=4 steps", "evaluation.every=40 steps", "model.width=64")
    assert command.run(tmp_path, *options, "total=8 steps").returncode == 0
    (tmp_path / "config.json").unlink()  # the longer run is another config
    before = commands.checkpoint_steps(tmp_path)
    words = command.words(tmp_path, *options, "logging.compilation_cache=False")
    environment = command.environment(1)
    del environment["JAX_COMPILATION_CACHE_DIR"]
    limited = ["bash", "-c", 'ulimit -f 20 && exec "$@"', "bash"]  # 20 KiB
    result = subprocess.run(
        [*limited, sys.executable, "-m", "vit_jax", *words],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert result.returncode == 1, result.stderr
    assert "could not be written" in result.stderr
    assert "the checkpoint of step 8 is whole" in result.stderr
    assert commands.checkpoint_steps(tmp_path) == before
    again = command.run(tmp_path, *options)
    assert again.returncode == 0, again.stderr
    assert "checkpoint of step 8" in again.stdout


def test_a_loss_that_is_not_finite_stops_the_run(command, tmp_path):
    options = ("schedule.learning_rate=1e30", "schedule.warmup=0 steps", "optimizer.clip_global_norm=None")
    result = command.run(tmp_path, *SHORT, "checkpoint.every=1 steps", *options)
    assert result.returncode == 1
    assert "the loss is" in result.stderr
    assert "schedule.learning_rate" in result.stderr
    assert 12 not in commands.checkpoint_steps(tmp_path)


DAMAGED = (0, 1, 2, 3, 6)


@pytest.fixture
def folder_with_damage(tmp_path):
    """Forty images in two classes, five of them damaged: four to train on, and dark/06, which seed 0 holds out."""
    rng = np.random.default_rng(0)
    for label in ("dark", "light"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 100, (8, 8, 3), np.uint8) + (100 if label == "light" else 0)
            cv2.imwrite(str(tmp_path / "images" / label / f"{number:02}.png"), pixels)
    for number in DAMAGED:
        (tmp_path / "images" / "dark" / f"{number:02}.png").write_bytes(b"not an image")
    return tmp_path / "images"


def test_unreadable_images_are_left_out_and_named(folder_with_damage, command, tmp_path):
    options = (*SHORT, f"data=folder:{folder_with_damage}", "evaluation.global_batch=8", "total=20 steps")
    result = command.run(tmp_path / "run", *options)
    assert result.returncode == 0, result.stderr
    named = [line.rpartition("/")[2] for line in result.stderr.splitlines() if "Unreadable image, left out" in line]
    assert sorted(named) == [f"{number:02}.png" for number in DAMAGED], (
        "each damaged file once, in four evaluations too"
    )
    summary = commands.summary(tmp_path / "run")
    assert summary["unreadable_images"] == 4
    assert summary["test_images"] == 3, "of four: a tenth of 20 of each class"
    assert [line["test_images"] for line in commands.metrics(tmp_path / "run") if "test_loss" in line] == [3] * 4
    result = command.run(tmp_path / "strict", *options, "input.max_unreadable=1")
    assert result.returncode == 2
    assert "max_unreadable is 1" in result.stderr
    assert f"{folder_with_damage}/dark/0" in result.stderr


def test_tensorflow_is_never_loaded(command, tmp_path):
    program = "import sys; from vit_jax.cli import main; main(sys.argv[1:]); assert 'tensorflow' not in sys.modules"
    stub = tmp_path / "stub" / "tensorflow"  # there to be found, so that whoever would use TensorFlow does
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    words = command.words(tmp_path, *SHORT, "logging.tensorboard=True")
    result = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=command.environment(1) | {"PYTHONPATH": f"{stub.parent}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "imported").exists()
