"""ViTs, ResNets and hybrids on JFT-300M (ViT, Table 3).

JFT is private: the recipe runs on the data of --config.data.

The paper does not state the loss: sigmoid with a head bias of -10 is usual on JFT, where an image
has 1.26 labels on average. It does not state the end of the linear decay either: its authors gave
1e-5 for ImageNet-21k. Gradients are clipped only in its ImageNet runs.
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

# Learning rates by model and epochs. Table 6 has two runs that Table 3 does not. Their rates are
# guesses: for R152x2 the rate of 7 epochs, for R200x3 a lower one, because deeper ResNets have
# lower rates.
LEARNING_RATES = {
    ("ViT-B/16", 7): 8e-4,
    ("ViT-B/32", 7): 8e-4,
    ("ViT-L/32", 7): 6e-4,
    ("ViT-L/16", 7): 4e-4,
    ("ViT-L/16", 14): 4e-4,
    ("ViT-H/14", 14): 3e-4,
    ("R50x1", 7): 1e-3,
    ("R50x2", 7): 1e-3,
    ("R101x1", 7): 8e-4,
    ("R152x1", 7): 6e-4,
    ("R152x2", 7): 6e-4,
    ("R152x2", 14): 6e-4,
    ("R200x3", 14): 4e-4,
    ("R50+ViT-B/16", 7): 8e-4,
    ("R50+ViT-B/32", 7): 8e-4,
    ("R50+ViT-L/32", 7): 2e-4,
    ("R50+ViT-L/16", 7): 4e-4,
    ("R50+ViT-L/16", 14): 4e-4,
}


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,epochs=N], a row of `LEARNING_RATES`."""
    model, epochs = choose_row(argument, LEARNING_RATES)
    return PretrainConfig(
        data=None,
        total=Duration(f"{epochs} epochs"),
        global_batch=4096,
        model=ModelConfig(name=model, head_bias_init=-10.0),
        input=InputConfig(train_split="train", test_split="validation", image_size=(224, 224)),
        objective=ObjectiveConfig(loss="sigmoid"),
        optimizer=OptimizerConfig(weight_decay=0.1, weight_decay_meaning="paper"),
        schedule=ScheduleConfig(
            learning_rate=LEARNING_RATES[model, epochs],
            warmup=Duration("10000 steps"),
            decay="linear",
            end_learning_rate=1e-5,
        ),
        evaluation=EvaluationConfig(every=Duration("10000 steps")),
        checkpoint=CheckpointConfig(every=Duration("1000 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )
