"""Runs of masked patch prediction: exact resume, any layout, fine-tuning, and other formats."""

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
    "evaluation.every=4 steps",
    "logging.tensorboard=False",
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def pretrain(workdir, monkeypatch, *options):
    data = Datasets(tiny.source(80), tiny.source(20, seed=1))
    monkeypatch.setattr(verb, "open_datasets", lambda config: data)
    config = runs.config(*MASKED, *LENGTHS, *options)
    return verb.pretrain(config, str(workdir))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return workdir, pretrain(workdir, monkeypatch)


@pytest.mark.newest
def test_resumes_to_the_bit(finished, tmp_path, monkeypatch):
    workdir, summary = finished
    resumed_workdir = tmp_path / "run"
    shutil.copytree(workdir, resumed_workdir)
    shutil.rmtree(resumed_workdir / "checkpoints" / "4")
    (resumed_workdir / "summary.json").unlink()
    assert commands.checkpoint_steps(resumed_workdir) == [2]

    resumed = pretrain(resumed_workdir, monkeypatch)

    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert resumed[name] == summary[name]
    assert commands.losses(resumed_workdir) == commands.losses(workdir)


def test_metrics_of_a_run(finished):
    workdir, summary = finished
    lines = commands.metrics(workdir)

    for name in ("loss", "accuracy", "majority_accuracy", "images"):
        assert f"test_{name}" in summary
    assert summary["test_images"] == 20
    assert 0 <= summary["test_majority_accuracy"] <= 1
    for line in lines:
        assert line.get("train_majority_accuracy", 0) <= 1
    assert lines[-1]["step"] == 4


def test_pixels_have_a_loss_alone(tmp_path, monkeypatch):
    options = ("objective.patch_target=pixels", "checkpoint.best_metric=test_loss")
    summary = pretrain(tmp_path, monkeypatch, *options)

    assert "test_accuracy" not in summary
    assert 0 < summary["test_loss"] < 2  # pixels lie in [-1, 1]


def test_every_layout_trains_as_one_device():
    alone = runs.build(*MASKED, devices=1)
    spread = runs.build(
        *MASKED,
        "sharding.parameters=fsdp",
        "sharding.num_model_shards=2",
        devices=8,
    )

    _, expected = runs.train(alone, 3)
    _, curve = runs.train(spread, 3)

    # The last layer begins at zero.
    assert expected[0]["train_loss"] == pytest.approx(np.log(512), rel=1e-6)
    for here, there in zip(curve, expected, strict=True):
        for name in ("train_loss", "train_accuracy", "train_majority_accuracy"):
            assert here[name] == pytest.approx(there[name], rel=1e-5)


def paint_black_or_white(batch, seed):
    """Return the batch with images of one colour each, half of them black."""
    rng = np.random.default_rng(seed)
    count, *sizes = batch.image_BHWC.shape
    colours = 255 * rng.integers(0, 2, (count, 1, 1, 1))
    image = np.tile(np.uint8(colours), (1, *sizes))
    return dataclasses.replace(batch, image_BHWC=image)


def test_learns_a_colour_from_its_surroundings():
    """A patch is known as soon as another is seen; guessing gives an accuracy of 0.5."""
    run = runs.build(
        *MASKED,
        "total=60 steps",
        "schedule.learning_rate=0.01",
        "schedule.warmup=5 steps",
    )
    state = run.init_state()
    accuracies = []

    for number, batch in enumerate(runs.batches(run, 60)):
        painted = paint_black_or_white(batch, number)
        state, metrics = run.train_step(
            state,
            jax.device_put(painted, run.batch_sharding),
        )
        accuracies.append(float(metrics["train_accuracy"]))

    assert np.mean(accuracies[-10:]) > 0.9


def test_fine_tuning_drops_the_head_and_notes_it(finished):
    workdir, _ = finished
    config = load_recipe("digits_transfer:finetune", flags(f"init_from={workdir}"))
    config = dataclasses.replace(
        config,
        input=dataclasses.replace(config.input, image_size=(8, 8)),
    )
    note = "note     the head that predicts masked patches, and its [mask] embedding, are dropped."

    architecture, fitted, _, report = adapt(config, tiny.source(20, seed=2))

    assert architecture.patch_outputs == 0
    assert architecture.num_classes == 10
    assert "head/mask" not in fitted.parameters
    assert fitted.parameters["head/linear/kernel"].shape == (16, 10)
    assert note in report


def test_other_formats_hold_the_network_without_its_head(finished, tmp_path):
    workdir, _ = finished
    weights = load_weights(str(workdir))
    assert weights.architecture.patch_outputs == 512

    save_weights(weights, tmp_path / "w.npz", "released")
    read = load_weights(
        str(tmp_path / "w.npz"),
        image_size=(8, 8),
        num_heads=2,
    )

    assert read.architecture.num_classes == 0
    assert read.architecture.patch_outputs == 0
    assert not [name for name in read.parameters if name.startswith("head/mask")]
