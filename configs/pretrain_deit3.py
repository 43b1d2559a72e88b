"""DeiT III (2204.07118) as its public JAX reproduction (deit3-jax) trains it: LAMB, LayerScale, ThreeAugment.

On ImageNet-1k: binary cross-entropy, inception crops, mixup or CutMix, three copies of each image;
B, L and H at a lower resolution, then 20 epochs at 224 with AdamW and RandAugment. On ImageNet-21k:
softmax, the simple crop, CutMix alone, then 50 epochs on ImageNet-1k. configs/README.md lists
differences from the reproduction.

  vit-jax pretrain --config=configs/pretrain_deit3.py:B/16 --workdir=A
  vit-jax finetune --config=configs/pretrain_deit3.py:B/16,stage=finetune --workdir=B --config.init_from=A
"""

import dataclasses
from typing import Any

from vit_jax.config import (
    AdaptConfig,
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    FinetuneConfig,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Values that differ between models.

    Attributes:
      pixels: side of the image in pre-training.
      rate: learning rate of pre-training.
      depths: stochastic depth by number of epochs.
      tuned_depth: stochastic depth of fine-tuning; None: as in pre-training.
    """

    pixels: int = 224
    rate: float = 3e-3
    depths: dict[int, float]
    tuned_depth: float | None = None


MODELS = {
    "S/16": {
        "i1k": Row(rate=4e-3, depths={400: 0.0, 800: 0.05}),
        "i21k": Row(depths={90: 0.05, 240: 0.05}),
    },
    "B/16": {
        "i1k": Row(pixels=192, depths={400: 0.1, 800: 0.2}),
        "i21k": Row(depths={90: 0.1, 240: 0.1}),
    },
    "L/16": {
        "i1k": Row(pixels=192, depths={400: 0.4, 800: 0.5}),
        "i21k": Row(depths={90: 0.3, 240: 0.3}),
    },
    "H/14": {
        "i1k": Row(pixels=154, depths={400: 0.5, 800: 0.6}),
        "i21k": Row(pixels=126, depths={90: 0.5, 240: 0.5}, tuned_depth=0.45),
    },
}
STAGES = ("pretrain", "finetune")
INCEPTION = {"crop_area_fraction": (0.08, 1.0), "crop_distribution": "torchvision"}
LIGHT_AUGMENTATION = {"three_augment": True, "color_jitter": 0.3}
RANDAUGMENT = {"randaugment_layers": 2, "randaugment_magnitude": 9}
SMOOTHED = ObjectiveConfig(loss="softmax", label_smoothing_fraction=0.1)
ADAMW = OptimizerConfig(weight_decay=0.1, weight_decay_meaning="paper_kernels")
FOLLOWED = {
    "evaluation": EvaluationConfig(every=Duration("5 epochs")),
    "checkpoint": CheckpointConfig(every=Duration("1 epoch")),
    "logging": LoggingConfig(every=Duration("100 steps")),
}
"""Periods of evaluations, checkpoints and log lines."""


def get_config(argument: str = "") -> PretrainConfig | FinetuneConfig:
    """Argument: MODEL[,data=i1k|i21k][,epochs=N][,stage=pretrain|finetune]; MODEL is one of `MODELS`.

    epochs is the length of pre-training, also of the weights to fine-tune: 400 or 800 on
    ImageNet-1k, 90 or 240 on ImageNet-21k.
    """
    arguments = parse_argument(argument, model="B/16", data="i1k", epochs=0, stage="pretrain")
    model = arguments["model"].replace("ViT-", "")
    data = arguments["data"]
    stage = arguments["stage"]
    require_known(f"model={arguments['model']}", model, MODELS)
    require_known(f"data={data}", data, MODELS["B/16"])
    require_known(f"stage={stage}", stage, STAGES)
    row = MODELS[model][data]
    epochs = arguments["epochs"] or min(row.depths)
    if epochs not in row.depths:
        raise ValueError(
            f"epochs={epochs}: must be {' or '.join(map(str, row.depths))} with data={data}."
        )

    if stage == "pretrain" and data == "i1k":
        return configure_pretraining_1k(model, row, epochs)
    if stage == "pretrain":
        return configure_pretraining_21k(model, row, epochs)
    if data == "i21k":
        return configure_finetuning_21k(model, row, epochs)
    if row.pixels == 224:
        raise ValueError(
            f"stage=finetune: {model} is trained at 224 pixels with data=i1k. Leave it out."
        )
    return configure_resolution_1k(model, row, epochs)


def configure_pretraining_1k(model: str, row: Row, epochs: int) -> PretrainConfig:
    """Return pre-training on ImageNet-1k, with three copies of each image."""
    return PretrainConfig(
        data="tfds:imagenet2012",
        total=Duration(f"{epochs} epochs"),
        global_batch=2048,
        model=_configure_network(model, row.depths[epochs]),
        input=_configure_input(
            row.pixels, **INCEPTION, mixup_alpha=0.8, **LIGHT_AUGMENTATION, repeats=3
        ),
        objective=ObjectiveConfig(loss="bce"),
        optimizer=_configure_lamb(0.05 if epochs == 800 else 0.02),
        schedule=_configure_schedule(row.rate),
        **FOLLOWED,
    )


def configure_pretraining_21k(model: str, row: Row, epochs: int) -> PretrainConfig:
    """Return pre-training on ImageNet-21k, of which a part is held out."""
    return PretrainConfig(
        data=None,
        total=Duration(f"{epochs} epochs"),
        global_batch=2048,
        model=_configure_network(model, row.depths[epochs]),
        input=_configure_input(
            row.pixels,
            train_crop="simple",
            **LIGHT_AUGMENTATION,
            holdout_fraction=0.0036,
        ),
        objective=SMOOTHED,
        optimizer=_configure_lamb(0.02),
        schedule=_configure_schedule(row.rate),
        **FOLLOWED,
    )


def configure_resolution_1k(model: str, row: Row, epochs: int) -> FinetuneConfig:
    """Return the step to 224 pixels after pre-training on ImageNet-1k."""
    return FinetuneConfig(
        data="tfds:imagenet2012",
        total=Duration("20 epochs"),
        global_batch=512,
        model=_adapt_network(model, row, epochs, head="keep"),
        input=_configure_input(224, **INCEPTION, mixup_alpha=0.8, **RANDAUGMENT),
        objective=SMOOTHED,
        optimizer=ADAMW,
        schedule=_configure_schedule(1e-5),
        **FOLLOWED,
    )


def configure_finetuning_21k(model: str, row: Row, epochs: int) -> FinetuneConfig:
    """Return training on ImageNet-1k after pre-training on ImageNet-21k."""
    return FinetuneConfig(
        data="tfds:imagenet2012",
        total=Duration("50 epochs"),
        global_batch=2048,
        model=_adapt_network(model, row, epochs, head="select"),
        input=_configure_input(224, train_crop="simple", **LIGHT_AUGMENTATION),
        objective=SMOOTHED,
        optimizer=_configure_lamb(0.02),
        schedule=_configure_schedule(3e-4),
        **FOLLOWED,
    )


def _configure_network(model: str, stochastic_depth: float) -> ModelConfig:
    return ModelConfig(
        name=f"ViT-{model}",
        head="linear",
        position_tokens="patches",
        layer_scale=1e-4,
        initial_values="truncated_normal",
        **_configure_stochastic_depth(stochastic_depth),
    )


def _adapt_network(model: str, row: Row, epochs: int, *, head: str) -> AdaptConfig:
    stochastic_depth = row.depths[epochs]
    if row.tuned_depth is not None:
        stochastic_depth = row.tuned_depth
    return AdaptConfig(
        name=f"ViT-{model}",
        head=head,
        position_resize="bicubic",
        **_configure_stochastic_depth(stochastic_depth),
    )


def _configure_input(pixels: int, **others: Any) -> InputConfig:
    return InputConfig(
        train_split="train",
        test_split="validation",
        image_size=(pixels, pixels),
        cutmix_alpha=1.0,
        train_interpolation="bicubic",
        test_crop_fraction=1.0,
        test_interpolation="bicubic",
        **others,
    )


def _configure_stochastic_depth(fraction: float) -> dict[str, Any]:
    """Return the options of one rate for all blocks."""
    if fraction == 0:
        return {}
    return {"stochastic_depth_fraction": fraction, "stochastic_depth_form": "constant"}


def _configure_lamb(decay: float) -> OptimizerConfig:
    return OptimizerConfig(
        name="lamb", weight_decay=decay, weight_decay_meaning="paper_kernels", clip_global_norm=1.0
    )


def _configure_schedule(rate: float) -> ScheduleConfig:
    return ScheduleConfig(
        learning_rate=rate, warmup=Duration("5 epochs"), decay="cosine", end_learning_rate=1e-5
    )
