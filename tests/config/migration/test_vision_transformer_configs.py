"""Configs in the style of vision_transformer: fields with a counterpart, and those without."""

import ml_collections
import pytest

from tests.rejections import rejects
from vit_jax.config import FinetuneConfig, derive, load_recipe
from vit_jax.config.migration.convert import convert


def build(**changes):
    """Return a config in the style of vision_transformer; a name has `__` between sections."""
    values = {
        "pretrained_dir": "gs://weights",
        "dataset": "cifar10",
        "tfds_data_dir": "/data",
        "total_steps": 900,
        "grad_norm_clip": 1.0,
        "optim_dtype": "bfloat16",
        "accum_steps": 4,
        "batch": 256,
        "batch_eval": 128,
        "shuffle_buffer": 1000,
        "eval_every": 50,
        "progress_every": 5,
        "checkpoint_every": 0,
        "base_lr": 0.02,
        "decay_type": "cosine",
        "warmup_steps": 90,
        "model": {
            "model_name": "ViT-B_16",
            "hidden_size": 768,
            "patches": {"size": (16, 16)},
            "transformer": {
                "dropout_rate": 0.1,
                "attention_dropout_rate": 0.0,
                "num_layers": 12,
            },
        },
        "model_or_filename": None,
        "pp": {"train": "train[:98%]", "test": "test", "crop": 384},
    }
    for name, value in changes.items():
        *sections, field = name.split("__")
        section = values
        for key in sections:
            section = section[key]
        section[field] = value
    return ml_collections.ConfigDict(values, type_safe=False)


def read(**changes):
    return convert(build(**changes)).config


def test_the_run_is_that_of_the_shipped_recipe():
    config = derive(
        load_recipe("finetune:ViT-B/16,cifar10"),
        {
            "total": "900 steps",
            "global_batch": 256,
            "init_from": "gs://weights/ViT-B_16.npz",
            "input.train_split": "train[:98%]",
            "input.data_dir": "/data",
            "model.dropout_fraction": 0.1,
            "model.compute_dtype": "float32",
            "optimizer.first_moment_dtype": "bfloat16",
            "optimizer.accumulation_steps": 4,
            "schedule.learning_rate": 0.02,
            "schedule.warmup": "90 steps",
            "search.learning_rates": (),
            "search.validation_fraction": 0.1,
            "evaluation.every": "50 steps",
            "evaluation.global_batch": 128,
            "checkpoint.every": "1 fraction",
            "logging.every": "5 steps",
        },
    )

    assert isinstance(config, FinetuneConfig)
    assert read() == config
    assert convert(build()).ignored == ("shuffle_buffer",)


def test_a_file_of_augreg():
    file = "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"

    assert read(model_or_filename=file).init_from == f"gs://weights/{file}.npz"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (
            {"decay_type": "linear"},
            {"schedule.decay": "linear", "schedule.end_learning_rate": 1e-5},
        ),
        ({"dataset": ""}, {"data": None}),
        (
            {"model__model_name": "ViT-B_16-gap-norep"},
            {"init_from": "gs://weights/ViT-B_16-gap-norep.npz"},
        ),
        (
            {"model__model_name": "ViT-H_14"},
            {
                "init_from": "gs://weights/ViT-H_14.npz",
                "model.name": "ViT-H/14",
                "model.uncovered_border": "drop",
            },
        ),
        (
            {"model__model_name": "R50+ViT-B_16"},
            {"init_from": "gs://weights/R50+ViT-B_16.npz", "model.name": "R50+ViT-B/16"},
        ),
    ],
)
def test_further_fields(changes, fields):
    assert read(**changes) == derive(read(), fields)


def test_a_folder_of_images(tmp_path):
    assert read(dataset=str(tmp_path)).data == f"folder:{tmp_path}"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_or_filename": "R_Ti_16"}, "model_or_filename='R_Ti_16': .*`vit-jax weights"),
        ({"model__model_name": "Mixer-B_16"}, "model_name='Mixer-B_16': must be a ViT"),
        ({"pp__crop": None}, "config.pp.crop=None"),
        ({"total_steps": None}, "config.total_steps=None"),
        ({"tfds_manual_dir": "x"}, "tfds_manual_dir='x': use vit-jax prepare"),
        ({"base_lr": None}, "config.schedule.learning_rate=None"),
        ({"decay_type": "step"}, "decay_type='step': only 'cosine', 'linear'"),
        ({"new_field": 1}, "config.new_field=1: remove it"),
    ],
)
def test_fields_without_a_counterpart(changes, rule):
    with rejects("", rule) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
