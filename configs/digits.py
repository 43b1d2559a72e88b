"""Scikit-learn's handwritten digits: 1,797 real scans of 8x8 pixels, nothing to download, minutes on a laptop.

They go the road of ImageNet: prepared into ArrayRecord files, read by TFDS and grain, trained by the sharded step.
"""

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


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: epochs=N."""
    chosen = parse_argument(argument, epochs=100)
    return PretrainConfig(
        data="digits",
        total=Duration(f"{chosen['epochs']} epochs"),
        global_batch=64,
        model=ModelConfig(
            name="ViT-mu/2",
            width=64,
            depth=4,
            mlp_dim=256,
            num_heads=4,
            pool="gap",
            head="linear",
            position_embedding="sincos2d",  # with so few steps, learned positions are still learning at the end
            compute_dtype="float32",
            scan_unroll=4,  # on a CPU, unrolled layers are 1.6 times as fast
        ),
        input=InputConfig(
            train_split="train",
            test_split="test",
            image_size=(8, 8),
            train_crop="shift",
            shift_pixels=1,
            flip=False,  # a mirrored 2 is no 2
            mixup_alpha=0.4,
            test_resize="direct",
            cache_records=True,
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_global_norm=1.0),
        schedule=ScheduleConfig(learning_rate=3e-3, warmup=Duration("5 epochs"), decay="cosine"),
        polyak=PolyakConfig(factor=0.995),  # with 360 test images, a single set of weights is a lottery ticket
        evaluation=EvaluationConfig(every=Duration("20 epochs")),
        checkpoint=CheckpointConfig(every=Duration("20 epochs")),
        logging=LoggingConfig(every=Duration("200 steps")),
    )
