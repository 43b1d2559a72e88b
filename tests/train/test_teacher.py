"""Distillation: the teacher in the step, in checkpoints, on several devices, and wrong ones."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests import tiny
from tests.integration import commands
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax import pytree
from vit_jax.arrays import ModelOutput
from vit_jax.config.check import validate
from vit_jax.models import abstract_model
from vit_jax.models.flops import FLOPS_PER_MAC, count_macs, forward_macs
from vit_jax.train import pretrain as verb
from vit_jax.train.inputs import Datasets
from vit_jax.train.step import TeacherNetwork
from vit_jax.train.teacher import read_teacher
from vit_jax.weights import Weights
from vit_jax.weights.saving import OWN, save_weights

CLASSES = tuple("0123456789")
MIXED = ("input.cutmix_alpha=1.0", "logging.every=1 step")


def save_teacher(path, *fields, class_names=CLASSES, num_classes=10, seed=0, preprocessing=None):
    """Write the weights of a random network as a user's file."""
    architecture = runs.build("model.width=32", *fields).architecture
    architecture = dataclasses.replace(
        architecture,
        num_classes=num_classes,
    )
    rng = np.random.default_rng(seed)
    parameters = {}
    for name, leaf in pytree.name_leaves(abstract_model(architecture)).items():
        parameters[name] = (0.2 * rng.normal(size=leaf.shape)).astype(np.float32)
    weights = Weights(
        architecture,
        parameters,
        class_names=class_names,
        preprocessing=preprocessing,
    )
    save_weights(weights, path, OWN)
    return str(path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher") / "teacher")


def build(teacher, *fields, devices=1):
    config = tiny.config(
        *MIXED,
        f"objective.teacher={teacher}",
        *fields,
    )
    return runs.assemble_config(config, devices)


def test_the_step_has_one_forward_pass_of_the_teacher(teacher):
    """A gradient of the teacher would be two more of its passes."""
    run = build(teacher)
    alone = runs.build(*MIXED)
    batch = runs.first_batch(run)
    state = run.abstract_state
    images = run.config.global_batch
    taught_macs = count_macs(
        run.step_parts.train_step,
        state,
        batch,
        run.teacher.abstract,
    )
    macs = count_macs(alone.step_parts.train_step, state, batch)
    teacher_macs = forward_macs(run.teacher.architecture)
    flops = run.training_flops_per_image - alone.training_flops_per_image
    assert run.teacher.architecture.width == 32
    assert taught_macs - macs == images * teacher_macs
    assert flops == FLOPS_PER_MAC * teacher_macs
    assert (
        pytree.name_leaves(run.abstract_state).keys()
        == pytree.name_leaves(alone.abstract_state).keys()
    )


def test_a_distilled_student_gives_the_logits_of_both_tokens(teacher):
    run = build(
        teacher,
        "model.pool=token",
        "model.class_tokens=2",
        "model.head=linear",
    )
    inputs = jax.eval_shape(
        run.step_parts.prepare_inputs,
        np.int32(0),
        runs.first_batch(run),
    )
    model = run.abstract_state.model

    output = jax.eval_shape(run.step_parts.predict, model, inputs)

    assert output.token_logits_TBK.shape == (2, 16, 10)
    assert output.logits_BK.shape == (16, 10)


def test_the_teacher_sees_the_mixed_images_in_its_size(teacher):
    run = build(teacher)
    seen = []

    def record(images):
        seen.append(images)
        return ModelOutput(logits_BK=images.sum(axis=(1, 2)))

    larger = dataclasses.replace(
        run.teacher.architecture,
        image_size=(16, 16),
    )
    inputs = run.step_parts.prepare_inputs(
        np.int32(0),
        runs.first_batch(run),
    )

    TeacherNetwork(record, run.teacher.architecture).predict(inputs.images)
    TeacherNetwork(record, larger).predict(inputs.images)

    assert seen[0] is inputs.images
    assert seen[1].shape == (16, 16, 16, 3)
    assert_allclose(
        seen[1].mean(),
        inputs.images.mean(),
        atol=0.01,
    )


@pytest.mark.slow
def test_every_layout_learns_the_same(teacher):
    fields = ("model.depth=1", "optimizer.accumulation_steps=2", "input.patch_dropout=0.5")
    losses = []
    for layout, devices in (((), 1), (("sharding.parameters=fsdp",), 8)):
        options = fields if devices == 1 else (*fields, *layout)
        run = build(teacher, *options, devices=devices)
        state = run.init_state()
        network = run.teacher.network
        curve = []
        for batch in runs.batches(run, 2):
            batch = jax.device_put(batch, run.batch_sharding)
            state, metrics = run.train_step(state, batch, network)
            curve.append([metrics["train_loss"], metrics["train_distillation_loss"]])
        losses.append(np.asarray(curve))

    assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert (losses[0] > 0).all()


def pretrain(workdir, monkeypatch, teacher, *fields):
    data = Datasets(tiny.source(80), tiny.source(20, seed=1))
    monkeypatch.setattr(
        verb,
        "open_datasets",
        lambda config: data,
    )
    config = tiny.config(
        "total=4 steps",
        "schedule.warmup=1 step",
        "logging.every=1 step",
        "checkpoint.every=2 steps",
        "evaluation.every=4 steps",
        f"objective.teacher={teacher}",
        *fields,
    )
    return verb.pretrain(config, str(workdir))


@pytest.mark.slow
def test_resumes_to_the_bit_with_the_same_teacher_alone(tmp_path, monkeypatch):
    path = save_teacher(tmp_path / "teacher")
    summary = pretrain(tmp_path / "run", monkeypatch, path)
    losses = commands.losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    (tmp_path / "run" / "summary.json").unlink()
    stored = commands.checkpoint_steps(tmp_path / "run")

    save_teacher(path, seed=1)
    with rejects("config.objective.teacher", "parameters differ"):
        pretrain(tmp_path / "run", monkeypatch, path)
    save_teacher(path)
    resumed = pretrain(tmp_path / "run", monkeypatch, path)

    assert stored == [2]
    assert resumed["parameters_sha256"] == summary["parameters_sha256"]
    assert commands.losses(tmp_path / "run") == losses
    assert "train_distillation_loss" in commands.metrics(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"num_classes": 3, "class_names": ("a", "b", "c")}, "must have the 10 classes"),
        ({"class_names": tuple("1023456789")}, "classes of the data in their order"),
    ],
)
def test_teachers_of_other_classes(tmp_path, monkeypatch, options, rule):
    path = save_teacher(tmp_path / "other", **options)

    with rejects("config.objective.teacher", rule):
        pretrain(tmp_path / "run", monkeypatch, path)

    assert not (tmp_path / "run").exists()


BANDS = ("input.channels=2", "input.bands=4,1")
SCALE = ("input.channel_mean=20,300", "input.channel_std=10,50")


def state_bands(*, numbers=(4, 1), mean=(20.0, 300.0), std=(10.0, 50.0)):
    """Return the preprocessing of weights for two bands."""
    stored = {"count": 2, "numbers": numbers, "mean": mean, "std": std}
    return {"pixel_range": [-1.0, 1.0], "bands": stored}


@pytest.mark.parametrize(
    ("stated", "fields", "rule"),
    [
        (
            {"numbers": (1, 4)},
            (*BANDS, *SCALE),
            r"bands of the run, \(4, 1\).*has \(1, 4\).*bands=1,4",
        ),
        ({"numbers": ()}, (*BANDS, *SCALE), r"bands of the run, \(4, 1\).*has \(1, 2\)"),
        ({"mean": (20.0, 310.0)}, (*BANDS, *SCALE), "scale.*mean=20.0,310.0.*std=10.0,50.0"),
        ({"std": (10.0, 5.0)}, (*BANDS, *SCALE), "scale of the channels"),
        ({}, (*BANDS, "input.value_range=0,255"), "scale.*no value_range"),
    ],
)
def test_teachers_of_other_bands(tmp_path, stated, fields, rule):
    preprocessing = state_bands(**stated)
    path = save_teacher(tmp_path / "other", *BANDS, preprocessing=preprocessing)

    with rejects("config.objective.teacher", rule):
        build(path, *fields)


def test_a_teacher_of_bands_for_colours(tmp_path):
    bands = {"count": 3, "numbers": (4, 3, 2), "mean": (0.0,) * 3, "std": (1.0,) * 3}
    path = save_teacher(tmp_path / "other", preprocessing={"bands": bands})

    with rejects("config.objective.teacher", "RGB.*bands=4,3,2"):
        build(path)


def test_a_teacher_of_nearly_the_same_scale(tmp_path):
    """Two runs on parts of the same images measure a little different scales."""
    preprocessing = state_bands(mean=(20.5, 298.0), std=(10.1, 49.0))
    path = save_teacher(tmp_path / "same", *BANDS, preprocessing=preprocessing)

    assert build(path, *BANDS, *SCALE).teacher.architecture.channels == 2


def test_a_teacher_that_does_not_exist(tmp_path):
    config = tiny.config(f"objective.teacher={tmp_path}/nothing")
    with rejects("config.objective.teacher", "nothing"):
        read_teacher(config)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (("objective.distillation=hard",), "objective.distillation"),
        (("objective.teacher=a", "objective.kind=masked_patch"), "objective.teacher"),
        (
            (
                "objective.teacher=a",
                "objective.distillation=hard",
                "objective.distillation_temperature=2.0",
            ),
            "objective.distillation_temperature",
        ),
        (("objective.teacher=a", "objective.distillation_weight=1.5"), "distillation_weight"),
    ],
)
def test_options_that_have_no_effect(fields, field):
    with rejects(f"config.{field}" if "." in field else field):
        validate(tiny.config("input.mixup_alpha=0.0", *fields))
