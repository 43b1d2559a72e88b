"""Fine-tuning as in ViT, Table 4 and App.

B.1.1, for weights in any format; BiT-HyperRule for ResNets; your images.

The paper names neither warm-up nor crop. 500, 100 and 200 steps, the inception crop and a plain
resize for testing (`test_resize=direct`) are those of the released code. big_vision's transfer.py
tests on the middle 384 pixels of images with a short side of 448: `test_resize=short_side`.
ImageNet at 512 and 518 pixels with a Polyak average is the paper's Table 2; everything else is
trained at 384 without.

The rule augreg fine-tunes the weights of AugReg (2106.10270). Those of `FAMILIES` fine-tune current
pre-trained ViTs: AdamW with layer decay, on 224 pixels unless image_size says otherwise. On
ImageNet batch, length and learning rate are those of the table. On other tasks batch and length are
the task's, and the learning rate falls with the root of the batch, which is our choice.
"""

import dataclasses
from typing import Any

from vit_jax.config import (
    AdaptConfig,
    CheckpointConfig,
    Duration,
    EvaluationConfig,
    FinetuneConfig,
    InputConfig,
    LoggingConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolyakConfig,
    ScheduleConfig,
    SearchConfig,
    parse_argument,
)
from vit_jax.config.schema import FinalNorm, Pool
from vit_jax.config.variants import parse_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A row of Table 4, with the splits of the dataset and the part of train that chooses the learning rate."""

    data: str | None = None  # None: set config.data
    train_split: str = "train"
    test_split: str = "test"
    num_examples: int | None = None
    is_small: bool = False  # images of fewer than 96 x 96 pixels
    total: str
    warmup: str
    global_batch: int = 512
    pixels: int = 384
    crop: str = "inception"
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    validation_fraction: float = 0.1


TASKS = {
    "cifar10": Task(
        data="tfds:cifar10",
        num_examples=50_000,
        is_small=True,
        total="10000 steps",
        warmup="500 steps",
        validation_fraction=0.02,
    ),
    "cifar100": Task(
        data="tfds:cifar100",
        num_examples=50_000,
        is_small=True,
        total="10000 steps",
        warmup="500 steps",
        validation_fraction=0.02,
    ),
    "pets": Task(
        data="tfds:oxford_iiit_pet", num_examples=3_680, total="500 steps", warmup="100 steps"
    ),
    "flowers": Task(
        data="tfds:oxford_flowers102", num_examples=1_020, total="500 steps", warmup="100 steps"
    ),
    "imagenet": Task(
        data="tfds:imagenet2012",
        test_split="validation",
        num_examples=1_281_167,
        total="20000 steps",
        warmup="500 steps",
        learning_rates=(0.003, 0.01, 0.03, 0.06),
        validation_fraction=0.01,
    ),
    # Any of the 19 tasks of VTAB-1k, `data="vtab:TASK"`, with the setting that the paper found best
    # for all of them; `vit-jax vtab` compares settings and leaves out what harms a task. Images are
    # cropped as Big Transfer does.
    "vtab": Task(
        train_split="train800val200",
        num_examples=1_000,
        total="2500 steps",
        warmup="200 steps",
        learning_rates=(0.01,),
        crop="resize",
    ),
    # Own images: a batch and a resolution that a single GPU takes, a length that goes by their
    # number.
    "own": Task(total="20 epochs", warmup="0.1 fraction", global_batch=64, pixels=224),
}
TABLE_2_PIXELS = {"ViT-L/16": 512, "ViT-H/14": 518}  # on ImageNet
FOLLOWED = {  # how often a run is looked at and saved
    "evaluation": EvaluationConfig(every=Duration("0.2 fraction")),
    "checkpoint": CheckpointConfig(every=Duration("0.1 fraction")),
    "logging": LoggingConfig(every=Duration("0.01 fraction")),
}
CROPS = ("inception", "resize", "resize_short_side")
TEST_RESIZES = ("direct", "short_side")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Fine-tuning of weights from one kind of pre-training; the first values are for ImageNet."""

    learning_rate: float
    global_batch: int = 1024
    epochs: int
    warmup_epochs: int = 5
    polyak: float | None = None
    test_resize: str = "short_side"
    layer_decay: float
    stochastic_depth: float
    weight_decay: float = 0.05  # of kernels
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0  # random erasing
    pool: Pool | None = None  # None: as in the weights
    final_norm: FinalNorm | None = None
    head_stddev: float = 0.0


FAMILIES = {
    # MAE: FINETUNE.md of its code, for ViT-B. The paper's Table 9 has a rate of 4e-3 at a layer
    # decay of 0.75, for pre-training without normalised pixels, and no random erasing. In the code
    # the norm after the pooling is new.
    "mae": Family(
        learning_rate=2e-3,
        epochs=100,
        layer_decay=0.65,
        stochastic_depth=0.1,
        mixup=0.8,
        cutmix=1.0,
        erasing=0.25,
        pool="gap",
        final_norm="pooled",
        head_stddev=2e-5,
    ),
    # DINOv2, DINOv3: uncertain. Their authors publish no values for fine-tuning (DINOv2 took DeiT
    # III's). These are usual for strong features; the class token and the mean of patches are what
    # DINOv2's linear probe sees.
    "dinov3": Family(
        learning_rate=4e-4, epochs=50, layer_decay=0.75, stochastic_depth=0.1, pool="token_gap"
    ),
    # SigLIP 2: uncertain. Its authors publish no values for fine-tuning. These are FT-CLIP's (Dong
    # et al., 2022) for CLIP ViT-B/16, which has no mixup, CutMix and stochastic depth.
    "siglip2": Family(
        learning_rate=6e-4,
        global_batch=2048,
        epochs=50,
        warmup_epochs=10,
        polyak=0.9998,
        test_resize="direct",
        layer_decay=0.6,
        stochastic_depth=0.0,
        erasing=0.25,
    ),
}
LARGER = {  # what the authors change for a model that the argument names
    ("mae", "ViT-L/16"): {
        "learning_rate": 4e-3,
        "epochs": 50,
        "layer_decay": 0.75,
        "stochastic_depth": 0.2,
    },
    ("mae", "ViT-H/14"): {
        "learning_rate": 4e-3,
        "epochs": 50,
        "layer_decay": 0.75,
        "stochastic_depth": 0.3,
    },
    ("siglip2", "ViT-L/16"): {
        "learning_rate": 4e-4,
        "epochs": 30,
        "warmup_epochs": 5,
        "layer_decay": 0.65,
    },
}
NAMED_RULES = ("augreg", *FAMILIES)  # may stand in the place of the model, which is then any
RULES = ("paper", "bit", "quick", *NAMED_RULES)


def get_config(argument: str = "") -> FinetuneConfig:
    """Argument: MODEL,TASK[,rule=RULE][,crop=…][,image_size=N][,examples=N][,test_resize=HOW], of `TASKS` and `RULES`.

    MODEL is what `config.init_from` must hold, "any", or one of `NAMED_RULES` for any network with
    this rule. `examples` is the number of training images, for the BiT rule on your data. The rule
    "quick" is the paper's with the rate 0.01 instead of a search: one run instead of five. HOW is
    direct or short_side.
    """
    chosen = parse_argument(
        argument,
        model="any",
        task="own",
        rule="",
        crop="",
        image_size=0,
        examples=0,
        test_resize="",
    )
    if chosen["model"] in NAMED_RULES:
        if chosen["rule"] not in ("", chosen["model"]):
            raise ValueError(
                f"rule={chosen['rule']}: {chosen['model']} is a rule already. Leave rule out."
            )
        chosen |= {"model": "any", "rule": chosen["model"]}
    chosen["rule"] = chosen["rule"] or "paper"
    choices = {
        "task": tuple(TASKS),
        "rule": RULES,
        "crop": (*CROPS, ""),
        "test_resize": (*TEST_RESIZES, ""),
    }
    for name, allowed in choices.items():
        if chosen[name] not in allowed:
            raise ValueError(
                f"{name}={chosen[name]!r} is not one of {', '.join(filter(None, allowed))}."
            )
    if chosen["model"] != "any":
        parse_name(chosen["model"])
    task = TASKS[chosen["task"]]
    if chosen["rule"] == "bit":
        return bit_hyperrule(chosen, task)
    if chosen["examples"]:
        raise ValueError(
            "examples=N is for rule=bit; other rules do not go by the number of images."
        )
    if chosen["rule"] in FAMILIES:
        changes: dict[str, Any] = LARGER.get((chosen["rule"], chosen["model"]), {})
        return family_recipe(chosen, task, dataclasses.replace(FAMILIES[chosen["rule"]], **changes))
    is_imagenet = chosen["task"] == "imagenet"
    is_augreg = chosen["rule"] == "augreg"
    is_table_2 = (
        is_imagenet
        and chosen["model"] in TABLE_2_PIXELS
        and not chosen["image_size"]
        and not is_augreg
    )
    task = augreg(task, is_long=is_imagenet) if is_augreg else task
    pixels = chosen["image_size"] or (
        TABLE_2_PIXELS[chosen["model"]] if is_table_2 else task.pixels
    )
    model = adapted(chosen["model"], pixels)
    rates = (0.01,) if chosen["rule"] == "quick" else task.learning_rates
    has_search = len(rates) > 1
    return FinetuneConfig(
        data=task.data,
        total=Duration(task.total),
        global_batch=task.global_batch,
        model=dataclasses.replace(model, dropout_fraction=0.0) if is_augreg else model,
        input=inputs(
            chosen,
            task,
            pixels,
            resize_pixels=256 if is_augreg and pixels == 224 else pixels * 448 // 384,
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(name="sgd", first_moment_dtype="bfloat16", clip_global_norm=1.0),
        schedule=ScheduleConfig(
            learning_rate=0.0 if has_search else rates[0],
            warmup=Duration(task.warmup),
            decay="cosine",
        ),
        search=SearchConfig(
            learning_rates=rates if has_search else (), validation_fraction=task.validation_fraction
        ),
        polyak=PolyakConfig(factor=0.9999) if is_table_2 else PolyakConfig(),
        **FOLLOWED,
    )


def augreg(task: Task, *, is_long: bool) -> Task:
    """500 steps, 20,000 on ImageNet; crops of 384 out of 448 pixels."""
    return dataclasses.replace(
        task,
        total="20000 steps" if is_long else "500 steps",
        warmup="500 steps" if is_long else "100 steps",
        global_batch=512,
        pixels=384,
        crop="resize",
        learning_rates=(0.001, 0.003, 0.01, 0.03),
    )


def family_recipe(chosen: dict[str, Any], task: Task, family: Family) -> FinetuneConfig:
    """AdamW with layer decay; label smoothing, RandAugment and crops as MAE and FT-CLIP have them."""
    is_published = chosen["task"] == "imagenet"
    pixels = chosen["image_size"] or 224
    global_batch = family.global_batch if is_published else task.global_batch
    rate = family.learning_rate * (global_batch / family.global_batch) ** 0.5
    how = chosen["test_resize"] or (family.test_resize if is_published else "direct")
    resize = inputs(chosen | {"test_resize": how}, task, pixels, resize_pixels=pixels * 256 // 224)
    is_inception = resize.train_crop == "inception"
    return FinetuneConfig(
        data=task.data,
        total=Duration(f"{family.epochs} epochs") if is_published else Duration(task.total),
        global_batch=global_batch,
        model=dataclasses.replace(
            adapted(chosen["model"], pixels),
            pool=family.pool,
            final_norm=family.final_norm,
            head_stddev=family.head_stddev,
            position_resize="library",
            dropout_fraction=0.0,
            stochastic_depth_fraction=family.stochastic_depth,
        ),
        input=dataclasses.replace(
            resize,
            **(
                {"crop_area_fraction": (0.08, 1.0), "crop_distribution": "torchvision"}
                if is_inception
                else {}
            ),
            **({"test_crop_fraction": 224 / 256} if how == "short_side" else {}),
            train_interpolation="bicubic",
            test_interpolation="bicubic",
            randaugment_layers=2,
            randaugment_magnitude=9,
            mixup_alpha=family.mixup,
            cutmix_alpha=family.cutmix,
            erasing_fraction=family.erasing,
        ),
        objective=ObjectiveConfig(loss="softmax", label_smoothing_fraction=0.1),
        optimizer=OptimizerConfig(
            name="adam",
            weight_decay=family.weight_decay,
            weight_decay_meaning="paper_kernels",
            layer_decay=family.layer_decay,
        ),
        schedule=ScheduleConfig(
            learning_rate=float(f"{rate:.2g}"),
            warmup=Duration(f"{family.warmup_epochs} epochs")
            if is_published
            else Duration(task.warmup),
            decay="cosine",
            end_learning_rate=1e-6,
        ),
        polyak=PolyakConfig(factor=family.polyak) if is_published else PolyakConfig(),
        **FOLLOWED,
    )


def bit_hyperrule(chosen: dict[str, Any], task: Task) -> FinetuneConfig:
    """BiT-HyperRule (Big Transfer): steps, resolution and mixup by the size of the dataset and of its images."""
    for name, fixed in (("crop", "resize"), ("test_resize", "direct")):
        if chosen[name]:
            raise ValueError(
                f"{name}={chosen[name]} has no effect with rule=bit, whose {name} is {fixed}."
            )
    num_examples = chosen["examples"] or task.num_examples
    if not num_examples:
        raise ValueError("rule=bit goes by the number of training images: add examples=N.")
    steps, warmup, drops, mixup = (
        (500, 100, (0.4, 0.6, 0.8), 0.0)
        if num_examples < 20_000
        else (10_000, 500, (0.3, 0.6, 0.9), 0.1)
        if num_examples < 500_000
        else (20_000, 500, (0.3, 0.6, 0.9), 0.1)
    )
    pixels = chosen["image_size"] or (128 if task.is_small else 480)
    resize_pixels = pixels * 160 // 128 if task.is_small else pixels * 512 // 480
    return FinetuneConfig(
        data=task.data,
        total=Duration(f"{steps} steps"),
        global_batch=512,
        model=adapted(chosen["model"], pixels),
        input=dataclasses.replace(
            inputs(chosen | {"crop": "resize"}, task, pixels, resize_pixels=resize_pixels),
            mixup_alpha=mixup,
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(
            learning_rate=0.003,
            warmup=Duration(f"{warmup} steps"),
            decay="staircase",
            drop_at_fraction=drops,
        ),
        **FOLLOWED,
    )


def adapted(model: str, pixels: int) -> AdaptConfig:
    """The paper's head: a linear layer of zeros replaces that of pre-training.

    H/14 at 384 pixels sees 378 of them, as in the released code; `image_size=378` shows it all of
    the image instead.
    """
    if model == "any":
        return AdaptConfig()
    is_covered = pixels % max(parse_name(model).patch) == 0
    return AdaptConfig(name=model, uncovered_border="refuse" if is_covered else "drop")


def inputs(chosen: dict[str, Any], task: Task, pixels: int, *, resize_pixels: int) -> InputConfig:
    """Square images; random crops from images a little larger, or inception crops."""
    crop = chosen["crop"] or task.crop
    test_resize = chosen["test_resize"] or "direct"
    cropped = {} if test_resize == "direct" else {"test_crop_fraction": 384 / 448}
    return InputConfig(
        train_split=task.train_split,
        test_split=task.test_split,
        image_size=(pixels, pixels),
        train_crop=crop,
        train_resize_pixels=None if crop == "inception" else resize_pixels,
        test_resize=test_resize,
        **cropped,
        exif_orientation=chosen["task"] == "own",
    )
