"""Scikit-learn's handwritten digits: 1,797 real scans of 8x8 pixels, nothing to download, minutes on a laptop.

They are treated as ImageNet is: prepared into ArrayRecord files, read by TFDS and grain, trained by
the sharded step.
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

TRANSFORMER: dict[str, Any] = {
    "width": 64,
    "depth": 4,
    "mlp_dim": 256,
    "num_heads": 4,
    "pool": "gap",
    # In this number of steps, learned positions do not converge.
    "position_embedding": "sincos2d",
}
# Side of the image in pixels, numbers beside the name.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "ViT-mu/2": (8, TRANSFORMER),
    "R14x0.5": (16, {}),  # the root of a ResNet divides by 4, so the images are enlarged
    "R14x0.5+ViT-mu/4": (16, TRANSFORMER),
}


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,epochs=N], one of `MODELS`."""
    arguments = parse_argument(argument, model="ViT-mu/2", epochs=100)
    if arguments["model"] not in MODELS:
        raise ValueError(
            f"model={arguments['model']!r} is not one of {', '.join(MODELS)}. For another network "
            "take the nearest of them and override --config.model.name."
        )
    side, numbers = MODELS[arguments["model"]]
    return PretrainConfig(
        data="digits",
        total=Duration(f"{arguments['epochs']} epochs"),
        global_batch=64,
        model=ModelConfig(
            name=arguments["model"],
            head="linear",
            compute_dtype="float32",
            remat="none",
            scan_unroll=4,  # on a CPU, unrolled layers are 1.6 times as fast
            **numbers,
        ),
        input=InputConfig(
            train_split="train",
            test_split="test",
            image_size=(side, side),
            train_crop="shift",
            shift_pixels=side // 8,  # one pixel of the scan
            flip=False,  # a mirrored 2 is no 2
            mixup_alpha=0.4,
            test_resize="direct",
            cache_records=True,
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_global_norm=1.0),
        schedule=ScheduleConfig(learning_rate=3e-3, warmup=Duration("5 epochs"), decay="cosine"),
        # With 360 test images, the accuracy of one step's weights varies much.
        polyak=PolyakConfig(factor=0.995),
        evaluation=EvaluationConfig(every=Duration("20 epochs")),
        checkpoint=CheckpointConfig(every=Duration("20 epochs")),
        logging=LoggingConfig(every=Duration("200 steps")),
    )
