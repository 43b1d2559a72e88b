"""Fine-tuning as in ViT (Table 4, App. B.1.1) of weights in any format, and other rules.

The paper names neither warm-up nor crop. 500, 100 and 200 steps, the inception crop and a plain
resize for testing (`test_resize=direct`) are from the released code. big_vision's transfer.py
tests on the middle 384 pixels of images with a short side of 448: `test_resize=short_side`.
ImageNet at 512 and 518 pixels with a Polyak average is the paper's Table 2; everything else is
trained at 384 without.

The rule bit is BiT-HyperRule, for ResNets. The rule augreg fine-tunes the weights of AugReg
(2106.10270). `FAMILIES` fine-tune current pre-trained ViTs: AdamW with layer decay, on 224 pixels
unless image_size says otherwise. On ImageNet batch, length and learning rate are from the table. On
other tasks batch and length are those of the task, and the learning rate falls with the root of the
batch, which is our choice.

Your images, the task own, have the image size, the pooling and the test preparation of the weights
if the model is any: a run starts with the features that `probe` and `features` see. Positions are
resized as in the library of the weights.
"""

import dataclasses
import math
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
    """A row of Table 4, with the splits of the dataset.

    Attributes:
      data: the dataset; None: set config.data.
      num_examples: number of training images, where it is known.
      is_small: images have fewer than 96 x 96 pixels.
      learning_rates: rates that the search tries.
      validation_fraction: part of the training split that the search holds out.
    """

    data: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    num_examples: int | None = None
    is_small: bool = False
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
    # for all of them; `vit-jax vtab` compares settings and excludes those that harm a task. Images
    # are cropped as in Big Transfer.
    "vtab": Task(
        train_split="train800val200",
        num_examples=1_000,
        total="2500 steps",
        warmup="200 steps",
        learning_rates=(0.01,),
        crop="resize",
    ),
    # Your images: a batch and a resolution for a single GPU, a length in epochs.
    "own": Task(total="20 epochs", warmup="0.1 fraction", global_batch=64, pixels=224),
}
TABLE_2_PIXELS = {"ViT-L/16": 512, "ViT-H/14": 518}
"""Side of the images of ImageNet in Table 2, by model."""
FOLLOWED = {
    "evaluation": EvaluationConfig(every=Duration("0.2 fraction")),
    "checkpoint": CheckpointConfig(every=Duration("0.1 fraction")),
    "logging": LoggingConfig(every=Duration("0.01 fraction")),
}
"""Periods of evaluations, checkpoints and log lines."""
CROPS = ("inception", "resize", "resize_short_side")
TEST_RESIZES = ("direct", "short_side", "weights")
ORIENTATIONS = ("upright", "any")
"""Upright photographs, or images without an upright direction: microscopes, satellites."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Fine-tuning of weights from one kind of pre-training.

    Attributes:
      learning_rate: like the next fields up to `test_resize`, for ImageNet.
      weight_decay: weight decay of kernels.
      erasing: fraction of images with a random rectangle erased.
      pool: pooling of tasks other than own; None keeps the one of the weights.
      final_norm: the last norm of these tasks; None keeps the one of the weights.
    """

    learning_rate: float
    global_batch: int = 1024
    epochs: int
    warmup_epochs: int = 5
    polyak: float | None = None
    test_resize: str = "short_side"
    layer_decay: float
    stochastic_depth: float
    weight_decay: float = 0.05
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    pool: Pool | None = None
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
    # III's). These are usual for strong features; DINOv2's linear probe sees the class token and
    # the mean of patches.
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
LARGER = {
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
"""Values that the authors change for larger models, by family and model."""
NAMED_RULES = ("augreg", *FAMILIES)
"""Rules that may stand in the place of the model, which is then any."""
RULES = ("paper", "bit", "quick", *NAMED_RULES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The argument of the recipe; values that are 0 or "" are those of the task or the rule."""

    model: str = "any"
    task: str = "own"
    rule: str = ""
    crop: str = ""
    image_size: int = 0
    examples: int = 0
    test_resize: str = ""
    orientation: str = "upright"


def find_open_rule(argument: str) -> str | None:
    """Return the argument up to the name of a rule, which the family of the weights gives.

    Return None for an argument with a rule, and for a named model, whose rule is the paper's.
    """
    arguments = Arguments(**parse_argument(argument, **dataclasses.asdict(Arguments())))
    if arguments.model != "any" or arguments.rule:
        return None
    return f"{argument or 'any'},rule="


def get_config(argument: str = "") -> FinetuneConfig:
    """Argument: MODEL,TASK[,rule=RULE][,crop=…][,image_size=N][,examples=N][,test_resize=HOW][,…]: `TASKS`, `RULES`.

    MODEL is what `config.init_from` must hold, "any", or one of `NAMED_RULES` for any network with
    this rule. With any and no rule, a run takes the rule for the family of the weights, and without
    one "paper". `examples` is the number of training images, for the BiT rule on your data. The rule
    "quick" is the paper's with the rate 0.01 instead of a search: one run instead of five. HOW is
    direct, short_side or weights. orientation=any, for microscopes and satellites, also turns
    training images upside down and by 90 degrees.
    """
    arguments = read_arguments(argument)
    task = TASKS[arguments.task]
    if arguments.rule == "bit":
        return configure_bit(arguments, task)
    if arguments.examples:
        raise ValueError(
            "examples=N is for rule=bit; other rules do not go by the number of images."
        )
    if arguments.rule in FAMILIES:
        return configure_family(arguments, task)
    if arguments.rule == "augreg":
        return configure_augreg(arguments, task)
    return configure_paper(arguments, task)


def read_arguments(argument: str) -> Arguments:
    """Return the values of the argument.

    Raises:
      ValueError: a value that is not one of those in the tables.
    """
    arguments = Arguments(**parse_argument(argument, **dataclasses.asdict(Arguments())))
    if arguments.model in NAMED_RULES:
        if arguments.rule not in ("", arguments.model):
            raise ValueError(
                f"rule={arguments.rule}: {arguments.model} is a rule already. Leave rule out."
            )
        arguments = dataclasses.replace(arguments, model="any", rule=arguments.model)
    if not arguments.rule:
        arguments = dataclasses.replace(arguments, rule="paper")

    require_known("task", arguments.task, tuple(TASKS))
    require_known("rule", arguments.rule, RULES)
    require_known("crop", arguments.crop, ("", *CROPS))
    require_known("test_resize", arguments.test_resize, ("", *TEST_RESIZES))
    require_known("orientation", arguments.orientation, ORIENTATIONS)
    if arguments.model != "any":
        try:
            parse_name(arguments.model)
        except ValueError as error:
            words = ", ".join(("any", *NAMED_RULES))
            raise ValueError(f"{error} For the network of the weights: {words}.") from None
    return arguments


def require_known(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for a value that is not allowed."""
    if value not in allowed:
        known = ", ".join(filter(None, allowed))
        raise ValueError(f"{name}={value!r} is not one of {known}.")


def configure_paper(arguments: Arguments, task: Task) -> FinetuneConfig:
    """Return the paper's run; the rule quick has one learning rate in place of a search."""
    model = arguments.model
    pixels = arguments.image_size or task.pixels
    polyak = PolyakConfig()
    has_table_2 = arguments.task == "imagenet" and model in TABLE_2_PIXELS
    if has_table_2 and not arguments.image_size:
        pixels = TABLE_2_PIXELS[model]
        polyak = PolyakConfig(factor=0.9999)
    if arguments.rule == "quick":
        task = dataclasses.replace(task, learning_rates=(0.01,))

    return configure_sgd(
        task,
        model=configure_model(model, pixels),
        input=configure_input(arguments, task, pixels, resize_pixels=pixels * 448 // 384),
        polyak=polyak,
    )


def configure_augreg(arguments: Arguments, task: Task) -> FinetuneConfig:
    """Return a run of 500 steps, 20,000 on ImageNet, on crops of 384 out of 448 pixels."""
    is_long = arguments.task == "imagenet"
    task = dataclasses.replace(
        task,
        total="20000 steps" if is_long else "500 steps",
        warmup="500 steps" if is_long else "100 steps",
        global_batch=512,
        pixels=384,
        crop="resize",
        learning_rates=(0.001, 0.003, 0.01, 0.03),
    )
    pixels = arguments.image_size or task.pixels
    resize_pixels = pixels * 448 // 384
    if pixels == 224:
        resize_pixels = 256
    model = configure_model(arguments.model, pixels)
    return configure_sgd(
        task,
        model=dataclasses.replace(model, dropout_fraction=0.0),
        input=configure_input(arguments, task, pixels, resize_pixels=resize_pixels),
    )


def configure_sgd(task: Task, **sections: Any) -> FinetuneConfig:
    """Return SGD with the length of a task, and a search for its learning rate if it has several.

    `sections` are the other sections of the config.
    """
    learning_rate = 0.0
    searched_rates = task.learning_rates
    if len(task.learning_rates) == 1:
        learning_rate = task.learning_rates[0]
        searched_rates = ()
    return FinetuneConfig(
        data=task.data,
        total=Duration(task.total),
        global_batch=task.global_batch,
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(name="sgd", first_moment_dtype="bfloat16", clip_global_norm=1.0),
        schedule=ScheduleConfig(
            learning_rate=learning_rate, warmup=Duration(task.warmup), decay="cosine"
        ),
        search=SearchConfig(
            learning_rates=searched_rates, validation_fraction=task.validation_fraction
        ),
        **sections,
        **FOLLOWED,
    )


def configure_family(arguments: Arguments, task: Task) -> FinetuneConfig:
    """Return AdamW with layer decay; label smoothing, RandAugment and crops of MAE and FT-CLIP."""
    changes: dict[str, Any] = LARGER.get((arguments.rule, arguments.model), {})
    family = dataclasses.replace(FAMILIES[arguments.rule], **changes)
    polyak = PolyakConfig()
    test_resize = choose_test_resize(arguments)
    if arguments.task == "imagenet":
        task = dataclasses.replace(
            task,
            total=f"{family.epochs} epochs",
            warmup=f"{family.warmup_epochs} epochs",
            global_batch=family.global_batch,
        )
        polyak = PolyakConfig(factor=family.polyak)
        test_resize = family.test_resize
    rate = family.learning_rate * (task.global_batch / family.global_batch) ** 0.5

    pixels = arguments.image_size or 224
    test_resize = arguments.test_resize or test_resize
    arguments = dataclasses.replace(arguments, test_resize=test_resize)
    return FinetuneConfig(
        data=task.data,
        total=Duration(task.total),
        global_batch=task.global_batch,
        model=configure_family_model(arguments, pixels, family),
        input=configure_family_input(arguments, task, pixels, family),
        objective=ObjectiveConfig(loss="softmax", label_smoothing_fraction=0.1),
        optimizer=OptimizerConfig(
            name="adam",
            weight_decay=family.weight_decay,
            weight_decay_meaning="paper_kernels",
            layer_decay=family.layer_decay,
        ),
        schedule=ScheduleConfig(
            learning_rate=float(f"{rate:.2g}"),
            warmup=Duration(task.warmup),
            decay="cosine",
            end_learning_rate=1e-6,
        ),
        polyak=polyak,
        **FOLLOWED,
    )


def configure_family_model(arguments: Arguments, pixels: int, family: Family) -> AdaptConfig:
    """Return the pooling, the head and the stochastic depth of a family."""
    model = configure_model(arguments.model, pixels)
    if not follows_weights(arguments):
        model = dataclasses.replace(model, pool=family.pool, final_norm=family.final_norm)
    return dataclasses.replace(
        model,
        head_stddev=family.head_stddev,
        position_resize="library",
        dropout_fraction=0.0,
        stochastic_depth_fraction=family.stochastic_depth,
    )


def configure_family_input(
    arguments: Arguments, task: Task, pixels: int, family: Family
) -> InputConfig:
    """Return bicubic crops as torchvision makes them, and the augmentation of a family."""
    config = configure_input(arguments, task, pixels, resize_pixels=pixels * 256 // 224)
    if config.train_crop == "inception":
        config = dataclasses.replace(
            config, crop_area_fraction=(0.08, 1.0), crop_distribution="torchvision"
        )
    if config.test_resize == "short_side":
        config = dataclasses.replace(config, test_crop_fraction=224 / 256)
    if config.test_resize != "weights":
        config = dataclasses.replace(config, test_interpolation="bicubic")
    return dataclasses.replace(
        config,
        train_interpolation="bicubic",
        randaugment_layers=2,
        randaugment_magnitude=9,
        mixup_alpha=family.mixup,
        cutmix_alpha=family.cutmix,
        erasing_fraction=family.erasing,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitLength:
    """Length and mixup of BiT-HyperRule for datasets of up to `most_examples` images."""

    most_examples: float
    steps: int
    warmup_steps: int
    drop_at_fraction: tuple[float, ...] = (0.3, 0.6, 0.9)
    mixup: float = 0.1


BIT_LENGTHS = (
    BitLength(
        most_examples=20_000 - 1,
        steps=500,
        warmup_steps=100,
        drop_at_fraction=(0.4, 0.6, 0.8),
        mixup=0.0,
    ),
    BitLength(most_examples=500_000 - 1, steps=10_000, warmup_steps=500),
    BitLength(most_examples=math.inf, steps=20_000, warmup_steps=500),
)


def configure_bit(arguments: Arguments, task: Task) -> FinetuneConfig:
    """Return BiT-HyperRule (Big Transfer).

    Steps, resolution and mixup depend on the number of images and on their size.
    """
    for name, fixed in (("crop", "resize"), ("test_resize", "direct")):
        value = getattr(arguments, name)
        if value:
            raise ValueError(
                f"{name}={value} has no effect with rule=bit, whose {name} is {fixed}."
            )
    num_examples = arguments.examples or task.num_examples
    if not num_examples:
        raise ValueError("rule=bit goes by the number of training images: add examples=N.")
    lengths = [length for length in BIT_LENGTHS if num_examples <= length.most_examples]
    length = lengths[0]

    if task.is_small:
        pixels = arguments.image_size or 128
        resize_pixels = pixels * 160 // 128
    else:
        pixels = arguments.image_size or 480
        resize_pixels = pixels * 512 // 480
    task = dataclasses.replace(task, crop="resize")
    return FinetuneConfig(
        data=task.data,
        total=Duration(f"{length.steps} steps"),
        global_batch=512,
        model=configure_model(arguments.model, pixels),
        input=dataclasses.replace(
            configure_input(arguments, task, pixels, resize_pixels=resize_pixels),
            mixup_alpha=length.mixup,
        ),
        objective=ObjectiveConfig(loss="softmax"),
        optimizer=OptimizerConfig(name="sgd"),
        schedule=ScheduleConfig(
            learning_rate=0.003,
            warmup=Duration(f"{length.warmup_steps} steps"),
            decay="staircase",
            drop_at_fraction=length.drop_at_fraction,
        ),
        **FOLLOWED,
    )


def configure_model(model: str, pixels: int) -> AdaptConfig:
    """Return the paper's head: a linear layer of zeros replaces the one of pre-training.

    H/14 at 384 pixels sees 378 of them, as in the released code; `image_size=378` shows it all of
    the image instead.
    """
    if model == "any":
        return AdaptConfig(position_resize="library")
    if pixels % max(parse_name(model).patch) == 0:
        return AdaptConfig(name=model, uncovered_border="refuse")
    return AdaptConfig(name=model, uncovered_border="drop")


def follows_weights(arguments: Arguments) -> bool:
    """Return True for your images and any network: image size, preparation and pooling are the weights'.

    The rules bit and augreg state the preparation themselves.
    """
    is_open = arguments.task == "own" and arguments.model == "any"
    return is_open and arguments.rule not in ("bit", "augreg")


def choose_test_resize(arguments: Arguments) -> str:
    """Return the preparation of test images without a `test_resize` in the argument."""
    if follows_weights(arguments):
        return "weights"
    return "direct"


def configure_input(
    arguments: Arguments, task: Task, pixels: int, *, resize_pixels: int
) -> InputConfig:
    """Return square images: random crops from images a little larger, or inception crops.

    Your images for any network are prepared for a test as its weights state. They have its image
    size, too, unless the argument or the crop needs another one.
    """
    train_crop = arguments.crop or task.crop
    has_any_orientation = arguments.orientation == "any"
    image_size: tuple[int, int] | None = (pixels, pixels)
    if follows_weights(arguments) and train_crop == "inception" and not arguments.image_size:
        image_size = None
    config = InputConfig(
        train_split=task.train_split,
        test_split=task.test_split,
        image_size=image_size,
        train_crop=train_crop,
        test_resize=arguments.test_resize or choose_test_resize(arguments),
        vertical_flip=has_any_orientation,
        rotate90=has_any_orientation,
        exif_orientation=arguments.task == "own",
    )
    if config.train_crop != "inception":
        config = dataclasses.replace(config, train_resize_pixels=resize_pixels)
    if config.test_resize == "short_side":
        config = dataclasses.replace(config, test_crop_fraction=384 / 448)
    return config
