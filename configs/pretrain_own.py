"""Any network from scratch on 1,000 to 100,000 of your images; data by `--config.data=folder:PATH`.

Runs on fewer images are longer and have stronger augmentation: AugReg (2106.10270) found that both
replace data. The network and its optimiser are those of the better plain ViT-S/16 (2205.01580), at
a batch for one GPU. With fewer images, or with pre-trained weights, fine-tuning
(`finetune.py:any,own`) gives higher accuracy.
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
from vit_jax.config.variants import parse_name

# By largest number of images: epochs, batch, magnitude of RandAugment (of two layers), alpha of
# mixup.
ROWS = ((3_000, 600, 64, 15, 0.5), (20_000, 300, 128, 15, 0.5), (100_000, 200, 256, 10, 0.2))


def get_config(argument: str = "") -> PretrainConfig:
    """Argument: MODEL[,examples=N][,image_size=N][,orientation=any]; N training images, about.

    orientation=any is for images without an upright direction: microscopes, satellites.
    """
    arguments = parse_argument(
        argument, model="ViT-Ti/16", examples=10_000, image_size=224, orientation="upright"
    )
    orientation = arguments["orientation"]
    if orientation not in ("upright", "any"):
        raise ValueError(f"orientation={orientation!r} is not one of upright, any.")
    examples = arguments["examples"]
    if not 1 <= examples <= ROWS[-1][0]:
        raise ValueError(
            f"examples={examples}: give 1 to 100,000; for more see pretrain_imagenet1k.py."
        )
    _, epochs, batch, magnitude, alpha = next(row for row in ROWS if examples <= row[0])
    side = arguments["image_size"]
    forms = {}
    has_transformer = parse_name(arguments["model"]).size is not None
    if has_transformer:
        forms = {"pool": "gap", "position_embedding": "sincos2d", "head": "linear"}
    return PretrainConfig(
        data=None,
        total=Duration(f"{epochs} epochs"),
        global_batch=batch,
        model=ModelConfig(name=arguments["model"], **forms),
        input=InputConfig(
            train_split="train",
            test_split="test",
            image_size=(side, side),
            crop_area_fraction=(0.2, 1.0),
            randaugment_layers=2,
            randaugment_magnitude=magnitude,
            mixup_alpha=alpha,
            vertical_flip=orientation == "any",
            rotate90=orientation == "any",
            exif_orientation=True,
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(
            weight_decay=1e-4, weight_decay_meaning="big_vision", clip_global_norm=1.0
        ),
        schedule=ScheduleConfig(
            learning_rate=1e-3, warmup=Duration("0.05 fraction"), decay="cosine"
        ),
        evaluation=EvaluationConfig(every=Duration("0.05 fraction")),
        checkpoint=CheckpointConfig(every=Duration("0.05 fraction")),
        logging=LoggingConfig(every=Duration("0.002 fraction")),
    )
