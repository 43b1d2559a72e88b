"""Fashion-MNIST from scratch: ViTs, ResNets and hybrids on all 60,000 images of clothes.

  vit-jax pretrain --config=fashion:MODEL --workdir=FOLDER
  vit-jax study data_size --config=fashion --workdir=FOLDER

`MODELS` has three sizes of each network, of similar computation. docs/digits.md has results.
"""

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
    PolyakConfig,
    PretrainConfig,
    ScheduleConfig,
    parse_argument,
)

# Width, with MLPs of twice the width and heads of at most 32 numbers.
WIDTHS = (16, 32, 64)
RESNETS = ("R14x0.5", "R26x0.5", "R50x0.5")
MODELS: dict[str, dict[str, Any]] = {
    **{f"ViT-{width}": {"name": "ViT-mu/4", "width": width} for width in WIDTHS},
    **{name: {"name": name} for name in RESNETS},
    **{f"Hybrid-{width}": {"name": "R14x0.5+ViT-mu/4", "width": width} for width in WIDTHS},
}

STUDIES = {
    "data_size": {
        "models": tuple(f"{model},epochs=1" for model in MODELS),
        "examples": (100, 1_000, 10_000, 60_000),
        # No evaluation on the test images chooses a step. The average of the parameters covers
        # about 100 steps, not 500, because one epoch has only 938.
        "config": (
            "evaluation.every=1 fraction",
            "checkpoint.every=0.5 fraction",
            "polyak.factor=0.99",
        ),
        "measures": ("test_accuracy", "fewshot_5shot_accuracy"),
    },
    "scaling": {"models": tuple(MODELS), "epochs": (1, 4)},
}


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,epochs=N], one of `MODELS`."""
    arguments = parse_argument(argument, model="R14x0.5", epochs=10)
    model = arguments["model"]
    if model not in MODELS:
        raise ValueError(
            f"model={model!r} is not one of {', '.join(MODELS)}. For another network "
            "take the nearest of them and override --config.model.name."
        )
    return PretrainConfig(
        data="fashion",
        total=Duration(f"{arguments['epochs']} epochs"),
        global_batch=64,
        model=configure_model(MODELS[model]),
        input=InputConfig(
            train_split="train",
            test_split="test",
            image_size=(28, 28),
            channels=1,
            channel_mean=(73.0,),  # mean and standard deviation of the training images
            channel_std=(90.0,),
            train_crop="shift",
            shift_pixels=2,
            test_resize="direct",
        ),
        objective=ObjectiveConfig(loss="softmax", label_smoothing_fraction=0.1),
        optimizer=OptimizerConfig(weight_decay=0.05, clip_global_norm=1.0),
        schedule=ScheduleConfig(
            learning_rate=3e-3, warmup=Duration("0.05 fraction"), decay="cosine"
        ),
        polyak=PolyakConfig(factor=0.998),
        evaluation=EvaluationConfig(every=Duration("0.2 fraction")),
        checkpoint=CheckpointConfig(every=Duration("0.1 fraction"), keep_best=0),
        logging=LoggingConfig(every=Duration("100 steps")),
    )


def configure_model(numbers: dict[str, Any]) -> ModelConfig:
    """Return a network by its name and, for a transformer, its width."""
    transformer: dict[str, Any] = {}
    if "width" in numbers:
        width = numbers["width"]
        transformer = {
            "depth": 6,
            "mlp_dim": 2 * width,
            "num_heads": max(1, width // 32),
            "pool": "gap",
            "position_embedding": "sincos2d",
        }
    return ModelConfig(
        head="linear",
        compute_dtype="float32",
        remat="none",
        scan_unroll=6,  # on a CPU, unrolled layers are faster
        **numbers,
        **transformer,
    )
