"""ViT on ImageNet-21k (ViT, Table 3; loss, head bias and end of the decay from its authors' answers to issues).

The dataset is not in the TFDS catalogue, so --config.data is required (docs/imagenet21k.md). The
splits suit a folder of images with 51,200 held out, and datasets of `vit-jax prepare`.
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
    PretrainConfig,
    ScheduleConfig,
    choose_row,
)

ROWS = (  # model and epochs; the learning rate is the same for all
    ("ViT-B/16", 90),
    ("ViT-B/32", 90),
    ("ViT-L/16", 30),
    ("ViT-L/16", 90),
    ("ViT-L/32", 30),
    ("ViT-L/32", 90),
)


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,epochs=N], one of `ROWS`."""
    model, epochs = choose_row(argument, ROWS)
    return PretrainConfig(
        data=None,
        total=Duration(f"{epochs} epochs"),
        global_batch=4096,
        model=ModelConfig(name=model, head="mlp", head_bias_init=-10.0, dropout_fraction=0.1),
        input=InputConfig(
            train_split="train",
            test_split="validation",
            holdout_fraction=0.0036,  # 51,200 of 14.2 million
            image_size=(224, 224),
        ),
        objective=ObjectiveConfig(loss="sigmoid"),
        optimizer=OptimizerConfig(weight_decay=0.03, weight_decay_meaning="paper"),
        schedule=ScheduleConfig(
            learning_rate=1e-3,
            warmup=Duration("10000 steps"),
            decay="linear",
            end_learning_rate=1e-5,
        ),
        evaluation=EvaluationConfig(every=Duration("5000 steps")),
        checkpoint=CheckpointConfig(every=Duration("1000 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )
