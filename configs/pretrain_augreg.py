"""AugReg, "How to train your ViT" (2106.10270): ImageNet-21k and -1k with strong augmentation.

    --config=configs/pretrain_augreg.py:B/16,aug=light2 --config.data=FOLDER
    --config=configs/pretrain_augreg.py:S/16,data=i1k

Values that are not set here are defaults of `vit_jax.config`:

* network: a class token and a linear head, as in the released weights; big_vision's later configs
  have mean pooling on ImageNet-21k;
* images: random crops ("Inception") and horizontal flips;
* Adam: 0.9 and 0.999.
"""

import dataclasses
from typing import NamedTuple

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
from vit_jax.config.arguments import require_known
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
# The augmentation that the authors choose for each network, by data. That of hybrids is in the
# names of their released weights, which were all trained on i21k.
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
    """Images to pre-train on."""

    source: str | None
    head_bias: float  # about -log(classes): each class begins at the probability 1 / classes
    input: InputConfig


DATA = {
    "i21k": Data(
        source=None,  # the user names the folder
        head_bias=-10.0,
        input=InputConfig(
            train_split="train",
            holdout_fraction=0.0036,  # 51,200 images to test with, of a folder without splits
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


class Choice(NamedTuple):
    """The run that an argument stands for."""

    network: str  # a name of `ModelConfig`
    data: Data
    augmentation: Augmentation
    weight_decay: float
    dropout: float
    stochastic_depth: float
    epochs: int


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,data=…][,aug=…][,wd=…][,do=…][,sd=…][,epochs=…] or FILE; MODEL of `MODELS`.

    * data: i21k (default) or i1k;
    * aug: one of `AUGMENTATIONS`; the authors' choice for model and data by default;
    * wd: weight decay of AdamW, on kernels: a step multiplies it by the learning rate; 0.1 by
      default, the authors also use 0.03;
    * do, sd: dropout and stochastic depth, both 0 by default; the authors also use 0.1 for both;
    * epochs: 300 by default.

    The name of a file of released weights stands for all of these (`config.augreg_files`).
    """
    chosen = _read_argument(argument)
    return PretrainConfig(
        data=chosen.data.source,
        total=Duration(f"{chosen.epochs} epochs"),
        global_batch=4096,
        model=ModelConfig(
            name=chosen.network,
            head_bias_init=chosen.data.head_bias,
            dropout_fraction=chosen.dropout,
            stochastic_depth_fraction=chosen.stochastic_depth,
        ),
        input=dataclasses.replace(
            chosen.data.input,
            randaugment_layers=chosen.augmentation.randaugment_layers,
            randaugment_magnitude=chosen.augmentation.randaugment_magnitude,
            mixup_alpha=chosen.augmentation.mixup_alpha,
        ),
        objective=ObjectiveConfig(loss="sigmoid"),
        optimizer=OptimizerConfig(
            name="adam",
            first_moment_dtype="bfloat16",
            weight_decay=chosen.weight_decay,
            weight_decay_meaning="paper_kernels",  # the decay of AdamW, for kernels alone
            clip_global_norm=1.0,
        ),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration("10000 steps"), decay="cosine"),
        # These intervals are ours.
        evaluation=EvaluationConfig(every=Duration("5000 steps")),
        checkpoint=CheckpointConfig(every=Duration("2500 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )


def _read_argument(argument: str) -> Choice:
    """Return the run that an argument stands for.

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
    model = values["model"].removeprefix("ViT-")  # "ViT-B/16" is accepted, too
    data = values["data"]
    require_known(f"model={values['model']}", model, MODELS)
    require_known(f"data={data}", data, DATA)

    aug = values["aug"] or MODELS[model].get(data)
    if aug is None:
        raise ValueError(
            f"model={model},data={data}: the authors name no augmentation for them. "
            f"Give aug= with one of {', '.join(AUGMENTATIONS)}."
        )
    require_known(f"aug={aug}", aug, AUGMENTATIONS)
    return Choice(
        network=model if "+" in model else f"ViT-{model}",
        data=DATA[data],
        augmentation=AUGMENTATIONS[aug],
        weight_decay=values["wd"],
        dropout=values["do"],
        stochastic_depth=values["sd"],
        epochs=values["epochs"],
    )
