"""Self-supervision on digits: predict hidden patches, then fine-tune on ten images a class.

Three runs; the third is the control, the same fine-tuning of a network that learnt nothing.

  vit-jax pretrain --config=configs/digits_masked.py:pretrain --workdir=A
  vit-jax finetune --config=configs/digits_masked.py:finetune --workdir=B --config.init_from=A
  vit-jax pretrain --config=configs/digits_masked.py:untrained --workdir=C
  vit-jax finetune --config=configs/digits_masked.py:scratch --workdir=D --config.init_from=C
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

STAGES = ("pretrain", "untrained", "finetune", "scratch")


def get_config(argument: str = "") -> PretrainConfig | FinetuneConfig:
    """Argument: STAGE[,epochs=N], one of `STAGES`; epochs of pre-training."""
    arguments = parse_argument(argument, stage="pretrain", epochs=100)
    stage = arguments["stage"]
    epochs = arguments["epochs"]
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r} is not one of {', '.join(STAGES)}.")
    if stage == "pretrain" and epochs:
        return configure_pretraining(f"{epochs} epochs", learning_rate=2e-3)
    if stage in ("pretrain", "untrained"):
        return configure_pretraining("2 steps", learning_rate=0.0)
    return configure_finetuning()


def configure_pretraining(total: str, *, learning_rate: float) -> PretrainConfig:
    """Return a run on all training images, without their labels."""
    return PretrainConfig(
        data="digits",
        total=Duration(total),
        global_batch=64,
        model=ModelConfig(
            name="ViT-mu/2",
            width=64,
            depth=4,
            mlp_dim=256,
            num_heads=4,
            pool="gap",
            position_embedding="sincos2d",
            compute_dtype="float32",
            remat="none",
            scan_unroll=4,
        ),
        input=configure_input(shift_pixels=1),
        objective=ObjectiveConfig(kind="masked_patch", loss="softmax"),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_global_norm=1.0),
        schedule=ScheduleConfig(
            learning_rate=learning_rate, warmup=Duration("0.05 fraction"), decay="cosine"
        ),
        polyak=PolyakConfig(factor=0.995),
        evaluation=EvaluationConfig(every=Duration("0.2 fraction")),
        checkpoint=CheckpointConfig(every=Duration("0.2 fraction")),
        logging=LoggingConfig(every=Duration("200 steps")),
    )


def configure_finetuning() -> FinetuneConfig:
    """Return a run on ten images of each digit; both starts have the same search and length."""
    return FinetuneConfig(
        data="digits",
        total=Duration("200 steps"),
        global_batch=100,
        model=AdaptConfig(compute_dtype="float32", remat="none", scan_unroll=4),
        input=configure_input(shift_pixels=1, train_examples_per_class=10),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_global_norm=1.0),
        schedule=ScheduleConfig(learning_rate=0.0, warmup=Duration("20 steps"), decay="cosine"),
        search=SearchConfig(learning_rates=(0.001, 0.003, 0.01), validation_fraction=0.5),
        evaluation=EvaluationConfig(every=Duration("200 steps"), global_batch=360),
        checkpoint=CheckpointConfig(every=Duration("200 steps"), keep_best=0),
        logging=LoggingConfig(every=Duration("100 steps")),
    )


def configure_input(**options: object) -> InputConfig:
    """Return the config that all stages share."""
    return InputConfig(
        train_split="train",
        test_split="test",
        image_size=(8, 8),
        train_crop="shift",
        flip=False,
        test_resize="direct",
        cache_records=True,
        **options,
    )
