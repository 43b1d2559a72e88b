"""DeiT III (2204.07118) as its public JAX reproduction (deit3-jax) trains it: LAMB, LayerScale, ThreeAugment.

On ImageNet-1k: binary cross-entropy, inception crops, mixup or CutMix, three copies of each image;
B, L and H at a lower resolution, then 20 epochs at 224 with AdamW and RandAugment. On ImageNet-21k:
softmax, the simple crop, CutMix alone, then 50 epochs on ImageNet-1k. configs/README.md lists
differences from the reproduction.

  vit-jax pretrain --config=configs/pretrain_deit3.py:B/16 --workdir=A vit-jax finetune
  --config=configs/pretrain_deit3.py:B/16,stage=finetune --workdir=B --config.init_from=A
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Values that differ between models, by dataset and number of epochs."""

    pixels: int = 224
    rate: float = 3e-3
    depths: dict[int, float]  # stochastic depth by epochs
    tuned_depth: float | None = None  # of fine-tuning; None: the same


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
LIGHT = {"three_augment": True, "color_jitter": 0.3}
RANDAUGMENT = {"randaugment_layers": 2, "randaugment_magnitude": 9}
SMOOTHED = ObjectiveConfig(loss="softmax", label_smoothing_fraction=0.1)
ADAMW = OptimizerConfig(weight_decay=0.1, weight_decay_meaning="paper_kernels")
FOLLOWED = {  # how often a run is looked at and saved
    "evaluation": EvaluationConfig(every=Duration("5 epochs")),
    "checkpoint": CheckpointConfig(every=Duration("1 epoch")),
    "logging": LoggingConfig(every=Duration("100 steps")),
}


def get_config(argument: str = "") -> PretrainConfig | FinetuneConfig:
    """Argument: MODEL[,data=i1k|i21k][,epochs=N][,stage=pretrain|finetune]; MODEL is one of `MODELS`.

    epochs is the length of pre-training, also of the weights to fine-tune: 400 or 800 on
    ImageNet-1k, 90 or 240 on ImageNet-21k.
    """
    chosen = parse_argument(argument, model="B/16", data="i1k", epochs=0, stage="pretrain")
    model = chosen["model"].replace("ViT-", "")
    data = chosen["data"]
    stage = chosen["stage"]
    for name, value, known in (
        ("model", model, MODELS),
        ("data", data, MODELS["B/16"]),
        ("stage", stage, STAGES),
    ):
        if value not in known:
            raise ValueError(f"{name}={value}: must be one of {', '.join(known)}.")
    row = MODELS[model][data]
    epochs = chosen["epochs"] or min(row.depths)
    if epochs not in row.depths:
        raise ValueError(
            f"epochs={epochs}: must be {' or '.join(map(str, row.depths))} with data={data}."
        )
    if stage == "pretrain":
        return _pretraining(model, row, epochs, is_21k=data == "i21k")
    if row.pixels == 224 and data == "i1k":
        raise ValueError(
            f"stage=finetune: {model} is trained at 224 pixels with data=i1k. Leave it out."
        )
    return _finetuning(model, row, epochs, is_21k=data == "i21k")


def _pretraining(model: str, row: Row, epochs: int, *, is_21k: bool) -> PretrainConfig:
    return PretrainConfig(
        data=None if is_21k else "tfds:imagenet2012",
        total=Duration(f"{epochs} epochs"),
        global_batch=2048,
        model=ModelConfig(
            name=f"ViT-{model}",
            head="linear",
            position_tokens="patches",
            layer_scale=1e-4,
            initial_values="truncated_normal",
            **_stochastic_depth(row.depths[epochs]),
        ),
        input=_inputs(
            row.pixels,
            is_21k=is_21k,
            **LIGHT,
            repeats=1 if is_21k else 3,
            **({"holdout_fraction": 0.0036} if is_21k else {}),
        ),
        objective=SMOOTHED if is_21k else ObjectiveConfig(loss="bce"),
        optimizer=_lamb(0.05 if epochs == 800 else 0.02),
        schedule=_schedule(row.rate),
        **FOLLOWED,
    )


def _finetuning(model: str, row: Row, epochs: int, *, is_21k: bool) -> FinetuneConfig:
    """The resolution step after ImageNet-1k, or ImageNet-1k after ImageNet-21k."""
    return FinetuneConfig(
        data="tfds:imagenet2012",
        total=Duration("50 epochs" if is_21k else "20 epochs"),
        global_batch=2048 if is_21k else 512,
        model=AdaptConfig(
            name=f"ViT-{model}",
            head="select" if is_21k else "keep",
            position_resize="bicubic",
            **_stochastic_depth(row.depths[epochs] if row.tuned_depth is None else row.tuned_depth),
        ),
        input=_inputs(224, is_21k=is_21k, **(LIGHT if is_21k else RANDAUGMENT)),
        objective=SMOOTHED,
        optimizer=_lamb(0.02) if is_21k else ADAMW,
        schedule=_schedule(3e-4 if is_21k else 1e-5),
        **FOLLOWED,
    )


def _inputs(pixels: int, *, is_21k: bool, **others: Any) -> InputConfig:
    return InputConfig(
        train_split="train",
        test_split="validation",
        image_size=(pixels, pixels),
        **({"train_crop": "simple"} if is_21k else INCEPTION),
        mixup_alpha=0.0 if is_21k else 0.8,
        cutmix_alpha=1.0,
        train_interpolation="bicubic",
        test_crop_fraction=1.0,
        test_interpolation="bicubic",
        **others,
    )


def _stochastic_depth(fraction: float) -> dict[str, Any]:
    """Return the options of one rate for all blocks."""
    if fraction == 0:
        return {}
    return {"stochastic_depth_fraction": fraction, "stochastic_depth_form": "constant"}


def _lamb(decay: float) -> OptimizerConfig:
    return OptimizerConfig(
        name="lamb", weight_decay=decay, weight_decay_meaning="paper_kernels", clip_global_norm=1.0
    )


def _schedule(rate: float) -> ScheduleConfig:
    return ScheduleConfig(
        learning_rate=rate, warmup=Duration("5 epochs"), decay="cosine", end_learning_rate=1e-5
    )
