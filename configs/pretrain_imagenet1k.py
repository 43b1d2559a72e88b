"""ViT from scratch on ImageNet (ViT, Table 3, which has one row, "ViT-*", for all sizes).

The paper does not name the loss. The default is sigmoid with a head bias of -10, both from the
authors' later recipe for ImageNet-21k (big_vision, configs/vit_i21k.py): every class begins with a
probability of 0.00005. The bias was not tuned for 1,000 classes. loss=softmax has a head bias of 0:
every class begins with 1/1000.
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
    parse_argument,
)

HEAD_BIAS = {"sigmoid": -10.0, "softmax": 0.0}  # by loss


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,loss=sigmoid|softmax]; the check of the config rejects unknown models."""
    arguments = parse_argument(argument, model="ViT-B/16", loss="sigmoid")
    model = arguments["model"]
    loss = arguments["loss"]
    if loss not in HEAD_BIAS:
        raise ValueError(f"loss={loss!r} is not one of {', '.join(HEAD_BIAS)}.")
    return PretrainConfig(
        data="tfds:imagenet2012",
        total=Duration("300 epochs"),
        global_batch=4096,
        model=ModelConfig(
            name=model,
            head="mlp",  # a hidden tanh layer of the width of the network (ViT, sec. 3.1)
            head_bias_init=HEAD_BIAS[loss],
            dropout_fraction=0.1,
        ),
        input=InputConfig(
            train_split="train",
            test_split="validation",
            image_size=(224, 224),
            train_crop="inception",
            flip=True,
        ),
        objective=ObjectiveConfig(loss=loss),
        optimizer=OptimizerConfig(
            name="adam",
            beta1=0.9,
            beta2=0.999,
            # "paper": every parameter p loses learning_rate * weight_decay * p in a step. The other
            # meanings are in `optim.optimizers`.
            weight_decay=0.3,
            weight_decay_meaning="paper",
            clip_global_norm=1.0,
        ),
        schedule=ScheduleConfig(learning_rate=3e-3, warmup=Duration("10000 steps"), decay="cosine"),
        # The paper does not state how often it evaluates, saves and logs.
        evaluation=EvaluationConfig(every=Duration("5000 steps")),
        checkpoint=CheckpointConfig(every=Duration("1000 steps")),
        logging=LoggingConfig(every=Duration("100 steps")),
    )
