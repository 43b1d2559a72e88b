"""Runs of masked patch prediction: exact resume, any layout, fine-tuning from their weights, and mistakes."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from tests import tiny
from tests.integration import commands
from tests.tiny import flags
from tests.train import small_runs as runs
from vit_jax.config import load_recipe
from vit_jax.train import pretrain as verb
from vit_jax.train.inputs import Datasets
from vit_jax.train.starting_weights import adapt
from vit_jax.weights import load_weights
from vit_jax.weights.saving import save_weights

MASKED = ("objective.kind=masked_patch", "input.mixup_alpha=0.0")
LENGTHS = (
    "total=4 steps",
    "schedule.warmup=1 step",
    "logging.every=1 step",
    "checkpoint.every=2 steps",
)
LENGTHS += ("evaluation.every=4 steps", "logging.tensorboard=False")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def pretrain(workdir, monkeypatch, *options):
    monkeypatch.setattr(
        verb,
        "open_datasets",
        lambda config: Datasets(tiny.source(80), tiny.source(20, seed=1)),
    )
    return verb.pretrain(runs.config(*MASKED, *LENGTHS, *options), str(workdir))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return workdir, pretrain(workdir, monkeypatch)


@pytest.mark.newest
def test_resumes_to_the_bit(finished, tmp_path, monkeypatch):
    workdir, summary = finished
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    (tmp_path / "run" / "summary.json").unlink()

    assert commands.checkpoint_steps(tmp_path / "run") == [2]

    resumed = pretrain(tmp_path / "run", monkeypatch)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert resumed[name] == summary[name]

    assert commands.losses(tmp_path / "run") == commands.losses(workdir)


def test_what_a_run_reports(finished):
    workdir, summary = finished
    assert {"test_loss", "test_accuracy", "test_majority_accuracy", "test_images"} <= summary.keys()
    assert summary["test_images"] == 20

    last = commands.metrics(workdir)[-1]
    assert 0 <= summary["test_majority_accuracy"] <= 1
    assert all(line.get("train_majority_accuracy", 0) <= 1 for line in commands.metrics(workdir))
    assert last["step"] == 4


def test_pixels_have_a_loss_alone(tmp_path, monkeypatch):
    options = ("objective.patch_target=pixels", "checkpoint.best_metric=test_loss")
    summary = pretrain(tmp_path, monkeypatch, *options)

    assert "test_accuracy" not in summary
    assert 0 < summary["test_loss"] < 2  # pixels lie in [-1, 1]


def test_every_layout_trains_as_one_device():
    steps = 3
    alone = runs.build(*MASKED, devices=1)
    spread = runs.build(
        *MASKED,
        "sharding.parameters=fsdp",
        "sharding.num_model_shards=2",
        devices=8,
    )
    (_, expected), (_, found) = (runs.train(run, steps) for run in (alone, spread))

    for step in range(steps):
        for name in ("train_loss", "train_accuracy", "train_majority_accuracy"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-5)

    assert expected[0]["train_loss"] == pytest.approx(
        np.log(512), rel=1e-6
    )  # the last layer begins at zero


def test_learns_a_colour_from_its_surroundings():
    """Images of one colour each: a patch is known as soon as another is seen."""
    run = runs.build(
        *MASKED,
        "total=60 steps",
        "schedule.learning_rate=0.01",
        "schedule.warmup=5 steps",
    )
    state = run.init_state()
    losses = []

    for number, batch in enumerate(runs.batches(run, 60)):
        colours = np.random.default_rng(number).integers(0, 2, (len(batch.label_B), 1, 1, 1)) * 255
        plain = dataclasses.replace(
            batch,
            image_BHWC=np.broadcast_to(colours, batch.image_BHWC.shape).astype(np.uint8),
        )
        state, metrics = run.train_step(state, jax.device_put(plain, run.batch_sharding))
        losses.append(float(metrics["train_accuracy"]))

    assert np.mean(losses[-10:]) > 0.9  # half of the images are black: guessing gives 0.5


def test_fine_tuning_leaves_the_head_behind_and_says_so(finished):
    config = load_recipe("digits_transfer:finetune", flags(f"init_from={finished[0]}"))
    config = dataclasses.replace(config, input=dataclasses.replace(config.input, image_size=(8, 8)))
    architecture, fitted, report = adapt(config, tiny.source(20, seed=2))

    assert (architecture.patch_outputs, architecture.num_classes) == (0, 10)
    assert "head/mask" not in fitted.parameters
    assert fitted.parameters["head/linear/kernel"].shape == (16, 10)
    assert (
        "note     the head that predicts masked patches, and its [mask] embedding, are dropped."
        in report
    )


def test_other_formats_hold_the_network_without_its_head(finished, tmp_path):
    weights = load_weights(str(finished[0]))
    assert weights.architecture.patch_outputs == 512

    save_weights(weights, tmp_path / "w.npz", "released")
    found = load_weights(str(tmp_path / "w.npz"), image_size=(8, 8), num_heads=2)

    assert (found.architecture.num_classes, found.architecture.patch_outputs) == (0, 0)
    assert not [name for name in found.parameters if name.startswith("head/mask")]
