"""Transfer in minutes: pre-train on the digits 0 to 4, fine-tune on ten images each of 5 to 9.

Three runs, in this order; the third is the control, the same loop and the same grid on a network
that learnt nothing.

  vit-jax pretrain --config=configs/digits_transfer.py:pretrain --workdir=A
  vit-jax finetune --config=configs/digits_transfer.py:finetune --workdir=B --config.init_from=A
  vit-jax pretrain --config=configs/digits_transfer.py:untrained --workdir=C
  vit-jax finetune --config=configs/digits_transfer.py:scratch --workdir=D --config.init_from=C
"""

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
    PolyakConfig,
    PretrainConfig,
    ScheduleConfig,
    SearchConfig,
    parse_argument,
)

SEEN = ("0", "1", "2", "3", "4")
UNSEEN = ("5", "6", "7", "8", "9")
# Learning rates around the best of a coarser grid with SGD and with Adam.
SGD_RATES = (0.03, 0.1, 0.2)
ADAM_RATES = (0.001, 0.003, 0.01)


def get_config(argument: str = "") -> PretrainConfig | FinetuneConfig:
    """Argument: pretrain, untrained, finetune or scratch."""
    stage = parse_argument(argument, stage="pretrain")["stage"]
    if stage == "pretrain":
        return configure_pretraining("150 epochs", learning_rate=3e-3)
    if stage == "untrained":
        return configure_pretraining("2 steps", learning_rate=0.0)
    if stage == "finetune":
        sgd = OptimizerConfig(name="sgd", clip_global_norm=1.0)
        return configure_finetuning(sgd, SGD_RATES)
    if stage == "scratch":
        adam = OptimizerConfig(weight_decay=0.1, clip_global_norm=1.0)
        return configure_finetuning(adam, ADAM_RATES)
    raise ValueError(f"stage={stage!r} is not one of pretrain, untrained, finetune, scratch.")


def configure_pretraining(total: str, *, learning_rate: float) -> PretrainConfig:
    """Return a run on the digits 0 to 4 at 8x8 pixels."""
    return PretrainConfig(
        data="digits",
        total=Duration(total),
        global_batch=64,
        model=ModelConfig(
            name="ViT-mu/2",
            width=64,
            depth=3,
            mlp_dim=256,
            num_heads=4,
            pool="gap",
            compute_dtype="float32",
            remat="none",
            scan_unroll=3,
        ),
        input=configure_input(SEEN, image_size=(8, 8), shift_pixels=1, mixup_alpha=0.4),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_global_norm=1.0),
        schedule=ScheduleConfig(
            learning_rate=learning_rate, warmup=Duration("0.05 fraction"), decay="cosine"
        ),
        polyak=PolyakConfig(factor=0.995),
        evaluation=EvaluationConfig(every=Duration("75 epochs")),
        checkpoint=CheckpointConfig(every=Duration("75 epochs")),
        logging=LoggingConfig(every=Duration("200 steps")),
    )


def configure_finetuning(optimizer: OptimizerConfig, rates: tuple[float, ...]) -> FinetuneConfig:
    """Return a run on ten images of each of the digits 5 to 9, at 16x16 pixels."""
    return FinetuneConfig(
        data="digits",
        total=Duration("100 steps"),
        global_batch=50,
        model=AdaptConfig(compute_dtype="float32", remat="none", scan_unroll=3),
        input=configure_input(
            UNSEEN, image_size=(16, 16), shift_pixels=2, train_examples_per_class=10
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=optimizer,
        schedule=ScheduleConfig(learning_rate=0.0, warmup=Duration("10 steps"), decay="cosine"),
        search=SearchConfig(learning_rates=rates, validation_fraction=0.5),
        evaluation=EvaluationConfig(every=Duration("100 steps"), global_batch=200),
        checkpoint=CheckpointConfig(every=Duration("100 steps"), keep_best=0),
        logging=LoggingConfig(every=Duration("50 steps")),
    )


def configure_input(classes: tuple[str, ...], **options: object) -> InputConfig:
    """Return the config that both halves of the digits share."""
    return InputConfig(
        train_split="train",
        test_split="test",
        classes=classes,
        train_crop="shift",
        flip=False,
        test_resize="direct",
        cache_records=True,
        **options,
    )
