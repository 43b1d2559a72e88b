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
import re
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
# The authors' choice by model and data: for ViTs from their configs, for hybrids from the names of
# released weights.
DEFAULT_AUGMENTATIONS = {
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

# Names of files of released weights, such as
# B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz. Names of fine-tuned weights go on
# with "--" and their data.
FILE_NAME = re.compile(
    r"(?P<model>\w+)-(?P<data>i\w+)-(?P<epochs>\d+)ep-lr_(?P<rate>[\d.e-]+)-aug_(?P<aug>\w+)"
    r"-wd_(?P<wd>[\d.]+)-do_(?P<do>[\d.]+)-sd_(?P<sd>[\d.]+)"
)
ARGUMENTS_OF_FILE = ("data", "epochs", "aug", "wd", "do", "sd")


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,data=…][,aug=…][,wd=…][,do=…][,sd=…][,epochs=…] or FILE; MODEL one of `DEFAULT_AUGMENTATIONS`.

    * data: i21k (default) or i1k;
    * aug: one of `AUGMENTATIONS`; the authors' choice for model and data by default;
    * wd: weight decay, 0.1 (default) or 0.03; the learning rate multiplies it;
    * do, sd: dropout and stochastic depth, both 0 (default) or both 0.1;
    * epochs: 300 by default.

    The name of a file of released weights stands for all of these (`FILE_NAME`).
    """
    arguments = _read_argument(argument)
    model = arguments["model"]
    name = model if "+" in model else f"ViT-{model}"
    augmentation = AUGMENTATIONS[arguments["aug"]]

    data = DATA[arguments["data"]]
    return PretrainConfig(
        data=data.source,
        total=Duration(f"{arguments['epochs']} epochs"),
        global_batch=4096,
        model=ModelConfig(
            name=name,
            head_bias_init=data.head_bias,
            dropout_fraction=arguments["do"],
            stochastic_depth_fraction=arguments["sd"],
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
            weight_decay=arguments["wd"],
            weight_decay_meaning="paper_kernels",  # on kernels, times the learning rate
            clip_global_norm=1.0,
        ),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration("10000 steps"), decay="cosine"),
        evaluation=EvaluationConfig(every=Duration("5000 steps")),
        checkpoint=CheckpointConfig(every=Duration("2500 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )


def _read_argument(argument: str) -> dict[str, Any]:
    """Return the values of the argument by name, with the authors' choice of the augmentation.

    Raises:
      ValueError: a value that is not one of those in the tables.
    """
    pretraining, _, _ = argument.removesuffix(".npz").partition("--")
    if match := FILE_NAME.fullmatch(pretraining):
        argument = _translate_file_name(match)
    arguments = parse_argument(
        argument, model="B/16", data="i21k", aug="", wd=0.1, do=0.0, sd=0.0, epochs=300
    )
    model = arguments["model"].removeprefix("ViT-")
    data = arguments["data"]
    if model not in DEFAULT_AUGMENTATIONS:
        models = ", ".join(DEFAULT_AUGMENTATIONS)
        raise ValueError(f"model={arguments['model']}: must be one of {models}.")
    if data not in DATA:
        raise ValueError(f"data={data}: must be one of {', '.join(DATA)}.")
    aug = arguments["aug"] or DEFAULT_AUGMENTATIONS[model].get(data)
    if aug is None:
        raise ValueError(
            f"model={model},data={data}: the authors name no augmentation for them. "
            f"Give aug= with one of {', '.join(AUGMENTATIONS)}."
        )
    if aug not in AUGMENTATIONS:
        raise ValueError(f"aug={aug}: must be one of {', '.join(AUGMENTATIONS)}.")
    return arguments | {"model": model, "aug": aug}


def _translate_file_name(name: re.Match[str]) -> str:
    """Return the argument that the name of a released file stands for."""
    if float(name["rate"]) != 1e-3:
        raise ValueError(f"lr_{name['rate']}: must be 0.001, the rate of all released weights.")
    *resnet, size, patch = name["model"].split("_")  # B_16 is B/16, R26_S_32 is R26+S/32
    model = "+".join([*resnet, f"{size}/{patch}"])
    values = [f"{key}={name[key]}" for key in ARGUMENTS_OF_FILE]
    return ",".join([f"model={model}", *values])
