"""Self-supervised pre-training by masked patch prediction (ViT, sec. 4.6) on the dataset you give.

The paper (App. B.1.2): 1 M steps of 4,096 images of JFT-300M, about 14 epochs, Adam, 2e-4, warm-up
over 10,000 steps, cosine decay. After fine-tuning, 100,000 steps were nearly as good, and
pre-training on ImageNet too. It states neither weight decay nor dropout: here there is none, and
gradients are not clipped, as on JFT.
"""

from vit_jax.config import (
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    InputConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    PretrainConfig,
    ScheduleConfig,
    parse_argument,
)


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,steps=N]."""
    arguments = parse_argument(argument, model="ViT-B/16", steps=1_000_000)
    return PretrainConfig(
        data=None,
        total=Duration(f"{arguments['steps']} steps"),
        global_batch=4096,
        model=ModelConfig(name=arguments["model"]),
        input=InputConfig(train_split="train", test_split="validation", image_size=(224, 224)),
        objective=ObjectiveConfig(kind="masked_patch", loss="softmax"),
        schedule=ScheduleConfig(learning_rate=2e-4, warmup=Duration("10000 steps"), decay="cosine"),
        evaluation=EvaluationConfig(every=Duration("10000 steps")),
        checkpoint=CheckpointConfig(every=Duration("1000 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )
