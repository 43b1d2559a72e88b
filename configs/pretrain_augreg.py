"""AugReg, "How to train your ViT" (2106.10270), on ImageNet-21k and ImageNet-1k: augmentation and regularisation.

Networks have a class token and a linear head, as the released weights; big_vision's later configs
have mean pooling on ImageNet-21k. The test split is ImageNet's validation split; a part of
ImageNet-21k is held out (configs/README.md).
"""

import re
from typing import Any

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

# Augmentation by data: for ViTs from the authors' configs, for hybrids from the released weights.
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
DATA = ("i21k", "i1k")
AUGMENTATIONS = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),  # operations without a magnitude still act
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}
"""Layers and magnitude of RandAugment, alpha of mixup."""
FILE_NAME = re.compile(
    r"(?P<model>\w+)-(?P<data>i\w+)-(?P<epochs>\d+)ep-lr_(?P<rate>[\d.e-]+)-aug_(?P<aug>\w+)"
    r"-wd_(?P<wd>[\d.]+)-do_(?P<do>[\d.]+)-sd_(?P<sd>[\d.]+)"
)
"""Names of the files of released weights."""
ARGUMENTS_OF_FILE = ("data", "epochs", "aug", "wd", "do", "sd")


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,data=i21k|i1k][,aug=…][,wd=N][,do=N][,sd=N][,epochs=N] or a file name; MODEL is one of `MODELS`.

    `aug` is one of `AUGMENTATIONS`; by default the authors' choice. wd is the decay that multiplies
    the learning rate (0.1 or 0.03), do the dropout and sd the stochastic depth (0 or 0.1 both). The
    name of a released file, such as B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0, says
    all of these.
    """
    arguments = _read_argument(argument)
    model = arguments["model"]
    name = model if "+" in model else f"ViT-{model}"
    layers, magnitude, mixup_alpha = AUGMENTATIONS[arguments["aug"]]
    data = None
    head_bias = -10.0
    splits: dict[str, Any] = {"train_split": "train", "holdout_fraction": 0.0036}  # 51,200 images
    if arguments["data"] == "i1k":
        data = "tfds:imagenet2012"
        head_bias = -6.9
        splits = {"train_split": "train[:99%]"}  # the last percent is for hyper-parameters

    return PretrainConfig(
        data=data,
        total=Duration(f"{arguments['epochs']} epochs"),
        global_batch=4096,
        model=ModelConfig(
            name=name,
            head_bias_init=head_bias,
            dropout_fraction=arguments["do"],
            stochastic_depth_fraction=arguments["sd"],
        ),
        input=InputConfig(
            **splits,
            test_split="validation",
            image_size=(224, 224),
            randaugment_layers=layers,
            randaugment_magnitude=magnitude,
            mixup_alpha=mixup_alpha,
        ),
        objective=ObjectiveConfig(loss="sigmoid"),
        optimizer=OptimizerConfig(
            first_moment_dtype="bfloat16",
            weight_decay=arguments["wd"],
            weight_decay_meaning="paper_kernels",
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
    if match := FILE_NAME.match(argument.removesuffix(".npz").partition("--")[0]):
        argument = _read_file_name(match)
    arguments = parse_argument(
        argument, model="B/16", data="i21k", aug="", wd=0.1, do=0.0, sd=0.0, epochs=300
    )
    model = arguments["model"].replace("ViT-", "")
    data = arguments["data"]
    if model not in MODELS:
        raise ValueError(f"model={arguments['model']}: must be one of {', '.join(MODELS)}.")
    if data not in DATA:
        raise ValueError(f"data={data}: must be one of {', '.join(DATA)}.")
    aug = arguments["aug"] or MODELS[model].get(data)
    if aug is None:
        raise ValueError(
            f"aug=: must be one of {', '.join(AUGMENTATIONS)}. "
            "The authors name no choice for this model on ImageNet-1k."
        )
    if aug not in AUGMENTATIONS:
        raise ValueError(f"aug={aug}: must be one of {', '.join(AUGMENTATIONS)}.")
    return arguments | {"model": model, "aug": aug}


def _read_file_name(name: re.Match[str]) -> str:
    """Return the argument that the name of a released file stands for: R26_S_32 is R26+S/32."""
    if float(name["rate"]) != 1e-3:
        raise ValueError(f"lr_{name['rate']}: must be 0.001, the rate of all released weights.")
    *resnet, size, patch = name["model"].split("_")
    model = "+".join([*resnet, f"{size}/{patch}"])
    values = [f"{key}={name[key]}" for key in ARGUMENTS_OF_FILE]
    return ",".join([f"model={model}", *values])
