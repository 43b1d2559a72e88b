"""Conversion of configs of google-research/vision_transformer, which fine-tune released weights."""

import os
import posixpath
from collections.abc import Mapping
from typing import Any

from vit_jax.config.migration.foreign_fields import DTYPES, ForeignFields, Section
from vit_jax.config.schema import FinetuneConfig, RunConfig
from vit_jax.config.variants import parse_name

DECAYS = {"cosine": "cosine", "linear": "linear"}
LINEAR_END = 1e-5
"""Learning rate at the end of its linear decay."""
_NO_EFFECT = ("shuffle_buffer", "prefetch", "pp.resize", "trainer", "model_type")


def is_vision_transformer(values: Mapping[str, Any]) -> bool:
    """Return True for the fields of a config of vision_transformer."""
    return "base_lr" in values and "pretrained_dir" in values


def convert_vision_transformer(fields: ForeignFields) -> tuple[type[RunConfig], Section]:
    """Return the kind of the run and the sections of its config; `fields` notes problems."""
    name, init_from = _convert_weights(fields)
    image_size = fields.take("pp.crop")
    if image_size is None:
        fields.reject(
            "pp.crop",
            None,
            "must be the image size",
        )
        image_size = 1
    values = {
        "data": _convert_data(fields),
        "init_from": init_from,
        "total": _convert_total(fields),
        "global_batch": fields.require("batch"),
        "model": {
            "name": name,
            "dropout_fraction": fields.take("model.transformer.dropout_rate", 0.0),
            "uncovered_border": _choose_border(name, image_size),
            "compute_dtype": "float32",
        },
        "input": _convert_input(fields, image_size),
        "objective": {"loss": "softmax"},
        "optimizer": _convert_optimizer(fields),
        "schedule": _convert_schedule(fields),
        "evaluation": {
            "every": _convert_period(fields, "eval_every"),
            "global_batch": fields.take("batch_eval"),
        },
        "checkpoint": {"every": _convert_period(fields, "checkpoint_every")},
        "logging": {"every": _convert_period(fields, "progress_every")},
    }
    manual = "use vit-jax prepare DATASET --manual_dir=FOLDER first, and remove it"
    fields.expect(
        "tfds_manual_dir",
        None,
        fix=manual,
    )
    fields.expect(
        "model.transformer.attention_dropout_rate",
        0,
        fix="remove it",
    )
    fields.drop("model")  # numbers of the network, which come with the weights
    fields.ignore(*_NO_EFFECT)
    return FinetuneConfig, values


def _convert_weights(fields: ForeignFields) -> tuple[str, str]:
    """Return the name of the network and the file of its weights."""
    folder = fields.take("pretrained_dir") or "."
    file = fields.peek("model.model_name")
    chosen = fields.take("model_or_filename")
    if chosen is not None:
        file = chosen
        if "-" not in chosen:
            fix = (
                "must be the name of a file without .npz, such as "
                "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0; "
                "`vit-jax weights AugReg` lists files"
            )
            fields.reject(
                "model_or_filename",
                chosen,
                fix,
            )

    name = str(fields.peek("model.model_name")).removesuffix("-gap-norep").replace("_", "/")
    try:
        parse_name(name)
    except ValueError:
        given = fields.peek("model.model_name")
        fields.reject(
            "model.model_name",
            given,
            "must be a ViT or a hybrid, such as ViT-B_16",
        )
        name = "ViT-B/16"
    return name, posixpath.join(str(folder), f"{file}.npz")


def _convert_data(fields: ForeignFields) -> str | None:
    """Return the address of a dataset of TFDS, or of a folder; None without one."""
    dataset = fields.take("dataset")
    if not dataset:
        return None
    if os.path.isdir(dataset):
        return f"folder:{dataset}"
    return f"tfds:{dataset}"


def _convert_total(fields: ForeignFields) -> str:
    steps = fields.take("total_steps")
    if steps is None:
        fields.reject(
            "total_steps",
            None,
            "must be set",
        )
        steps = 1
    return f"{steps} steps"


def _choose_border(name: str, image_size: int) -> str:
    """Return how an image size that patches do not divide is treated: its border is dropped."""
    patches = parse_name(name)
    if patches.units is not None or image_size % max(patches.patch) == 0:
        return "refuse"
    return "drop"


def _convert_input(fields: ForeignFields, image_size: int) -> Section:
    """Return the section `input`: crops in training, both sides resized directly in the test."""
    return {
        "train_split": fields.take("pp.train", "train"),
        "test_split": fields.take("pp.test", "test"),
        "data_dir": fields.take("tfds_data_dir"),
        "image_size": image_size,
        "test_resize": "direct",
    }


def _convert_optimizer(fields: ForeignFields) -> Section:
    return {
        "name": "sgd",
        "first_moment_dtype": fields.take_choice(
            "optim_dtype",
            DTYPES,
            "bfloat16",
        ),
        "clip_global_norm": fields.take("grad_norm_clip") or None,
        "accumulation_steps": fields.take("accum_steps") or None,
    }


def _convert_schedule(fields: ForeignFields) -> Section:
    decay = fields.take_choice(
        "decay_type",
        DECAYS,
        "cosine",
    )
    section = {
        "learning_rate": fields.require("base_lr"),
        "warmup": f"{fields.take('warmup_steps') or 0} steps",
        "decay": decay,
    }
    if decay == "linear":
        section["end_learning_rate"] = LINEAR_END
    return section


def _convert_period(fields: ForeignFields, name: str) -> str:
    """Return the time between events; 0 means at the end only."""
    steps = fields.take(name)
    if not steps:
        return "1 fraction"
    return f"{steps} steps"
