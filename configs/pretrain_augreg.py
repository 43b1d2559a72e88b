"""AugReg, "How to train your ViT" (2106.10270), on ImageNet-21k and ImageNet-1k: augmentation and regularisation.

    --config=configs/pretrain_augreg.py:B/16,aug=light2 --config.data=FOLDER
    --config=configs/pretrain_augreg.py:S/16,data=i1k

Values that are not set here are defaults of `vit_jax.config`: a class token and a linear head, as in
the released weights (big_vision's later configs have mean pooling on ImageNet-21k), random crops
("Inception") and horizontal flips, 0.9 and 0.999 for Adam.

The test split is ImageNet's validation split; a part of ImageNet-21k is held out
(configs/README.md).
"""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

from vit_jax.config import (
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    InputConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PretrainConfig,
    ScheduleConfig,
    parse_argument,
)
from vit_jax.config.augreg_files import translate_file_name


class Augmentation(NamedTuple):
    """RandAugment and mixup of a run."""

    randaugment_layers: int
    randaugment_magnitude: int
    mixup_alpha: float


AUGMENTATIONS = {
    "none": Augmentation(0, 0, 0.0),
    "light1": Augmentation(2, 0, 0.0),  # operations without a magnitude still act
    "light2": Augmentation(2, 10, 0.2),
    "medium1": Augmentation(2, 15, 0.2),
    "medium2": Augmentation(2, 15, 0.5),
    "strong1": Augmentation(2, 20, 0.5),
    "strong2": Augmentation(2, 20, 0.8),
}
# The networks, and the augmentation that the authors choose for each by data: for ViTs in their
# configs, for hybrids in the names of released weights. Where one is missing, they name none.
MODELS = {
    "Ti/16": {"i21k": "none", "i1k": "light1"},
    "S/32": {"i21k": "none", "i1k": "medium1"},
    "S/16": {"i21k": "light1", "i1k": "medium2"},
    "B/32": {"i21k": "light2", "i1k": "medium2"},
    "B/16": {"i21k": "light2", "i1k": "medium2"},
    "L/16": {"i21k": "medium2", "i1k": "medium2"},
    "R+Ti/16": {"i21k": "none"},
    "R26+S/32": {"i21k": "light1"},
    "R50+L/32": {"i21k": "medium1"},
}


class Data(NamedTuple):
    """Images to pre-train on. `head_bias` is about -log(classes): all begin at equal probability."""

    source: str | None
    head_bias: float
    input: InputConfig


DATA = {
    "i21k": Data(
        source=None,  # the user names the folder
        head_bias=-10.0,
        input=InputConfig(
            train_split="train",
            holdout_fraction=0.0036,  # 51,200 images
            test_split="validation",
            image_size=(224, 224),
        ),
    ),
    "i1k": Data(
        source="tfds:imagenet2012",
        head_bias=-6.9,
        input=InputConfig(
            train_split="train[:99%]",  # the rest is for the choice of hyper-parameters
            test_split="validation",
            image_size=(224, 224),
        ),
    ),
}


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,data=…][,aug=…][,wd=…][,do=…][,sd=…][,epochs=…] or FILE; one of `MODELS`.

    * data: i21k (default) or i1k;
    * aug: one of `AUGMENTATIONS`; the authors' choice for model and data by default;
    * wd: weight decay, 0.1 (default) or 0.03; the learning rate multiplies it;
    * do, sd: dropout and stochastic depth, both 0 (default) or both 0.1;
    * epochs: 300 by default.

    The name of a file of released weights stands for all of these (`config.augreg_files`).
    """
    values = _read_argument(argument)
    model = values["model"]
    name = model if "+" in model else f"ViT-{model}"
    augmentation = AUGMENTATIONS[values["aug"]]
    data = DATA[values["data"]]

    return PretrainConfig(
        data=data.source,
        total=Duration(f"{values['epochs']} epochs"),
        global_batch=4096,
        model=ModelConfig(
            name=name,
            head_bias_init=data.head_bias,
            dropout_fraction=values["do"],
            stochastic_depth_fraction=values["sd"],
        ),
        input=dataclasses.replace(
            data.input,
            randaugment_layers=augmentation.randaugment_layers,
            randaugment_magnitude=augmentation.randaugment_magnitude,
            mixup_alpha=augmentation.mixup_alpha,
        ),
        objective=ObjectiveConfig(loss="sigmoid"),
        optimizer=OptimizerConfig(
            name="adam",
            first_moment_dtype="bfloat16",
            weight_decay=values["wd"],
            weight_decay_meaning="paper_kernels",  # decays kernels alone; the rate multiplies it
            clip_global_norm=1.0,
        ),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration("10000 steps"), decay="cosine"),
        # These intervals are ours.
        evaluation=EvaluationConfig(every=Duration("5000 steps")),
        checkpoint=CheckpointConfig(every=Duration("2500 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )


def _read_argument(argument: str) -> dict[str, Any]:
    """Return the values of the argument by name, with the authors' choice of the augmentation.

    Raises:
      ValueError: a value that is not one of those in the tables.
    """
    values = parse_argument(
        translate_file_name(argument),
        model="B/16",
        data="i21k",
        aug="",
        wd=0.1,
        do=0.0,
        sd=0.0,
        epochs=300,
    )
    model = values["model"].removeprefix("ViT-")
    data = values["data"]
    _require("model", model, MODELS)
    _require("data", data, DATA)

    aug = values["aug"] or MODELS[model].get(data)
    if aug is None:
        raise ValueError(
            f"model={model},data={data}: the authors name no augmentation for them. "
            f"Give aug= with one of {', '.join(AUGMENTATIONS)}."
        )
    _require("aug", aug, AUGMENTATIONS)
    return values | {"model": model, "aug": aug}


def _require(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError unless a value of the argument is allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value}: must be one of {', '.join(allowed)}.")
