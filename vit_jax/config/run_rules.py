"""Rules for the fields of a run, one function each, by the section that they protect.

A rule returns the problem that it found as `field=value: rule. fix.`, or None. The schema annotates
rules of single fields; `evaluation_rules` has those of evaluators and of the best checkpoint,
`architecture_rules` those of the network.
"""

import itertools
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from vit_jax.config.field_checks import apply_rules, is_value_range
from vit_jax.config.lengths import get_phases, list_patch_dropouts
from vit_jax.config.schema import FinetuneConfig, InputConfig, RunConfig
from vit_jax.imports.references import parse_allowed_code, resolve

RGB_AUGMENTATIONS = {
    "randaugment_layers": "autocontrast, equalize, posterize, solarize, color and others",
    "three_augment": "grayscale and solarize",
    "color_jitter": "saturation and the mean luma",
}
"""Augmentations of images with three channels of 8 bits, with the operations that need them."""
TRACKER_METHODS = ("start", "write", "close")
Rule = Callable[[RunConfig], str | None]


def find_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems of the input, the objective, the optimiser, the schedule and the logging."""
    yield from apply_rules(INPUT_RULES, config)
    yield from apply_rules(OBJECTIVE_RULES, config)
    if config.objective.kind == "masked_patch":
        yield from apply_rules(MASKED_PATCH_RULES, config)
    yield from apply_rules(OPTIMIZER_RULES, config)
    yield from apply_rules(SCHEDULE_RULES, config)
    yield from apply_rules(LOGGING_RULES, config)


def find_start_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems of the start of a run: weights and their code, phases, the learning rate."""
    yield from apply_rules(START_RULES, config)
    if isinstance(config, FinetuneConfig):
        yield from apply_rules(FINETUNE_RULES, config)


# The images.


def check_splits(config: RunConfig) -> str | None:
    """The test split must not be the training split."""
    if config.input.train_split != config.input.test_split:
        return None
    split = config.input.test_split
    return f"input.test_split={split!r}: must differ from train_split. Name another split."


def check_crop_area(config: RunConfig) -> str | None:
    """Fractions of the image's area must be an interval in (0, 1]."""
    low, high = config.input.crop_area_fraction
    if 0 < low <= high <= 1:
        return None
    return f"input.crop_area_fraction={(low, high)}: must be 0 < low <= high <= 1."


def check_value_range(config: RunConfig) -> str | None:
    """Values of pixels must have a finite range."""
    value_range = config.input.value_range
    if value_range is None or is_value_range(value_range):
        return None
    return (
        f"input.value_range={value_range}: must be finite numbers, low < high. "
        "Use 0,4095 for 12 bits."
    )


def check_bands(config: RunConfig) -> str | None:
    """Each channel must have one band, if bands are chosen."""
    return find_band_problem(config.input)


def find_band_problem(inputs: InputConfig) -> str | None:
    """Return the problem of bands that are not one a channel."""
    count = len(inputs.bands)
    if count in (0, inputs.channels):
        return None
    fix = f"Set config.input.channels={count}, or change the bands"
    return f"input.bands={inputs.bands}: must be {inputs.channels} numbers, one a channel. {fix}."


def check_channel_scale(config: RunConfig) -> str | None:
    """Mean and standard deviation must be those of all channels, in place of a range."""
    return find_scale_problem(config.input)


def find_scale_problem(inputs: InputConfig) -> str | None:
    """Return the problem of a mean and standard deviation that do not suit the channels."""
    mean = inputs.channel_mean
    std = inputs.channel_std
    if not mean and not std:
        return None
    field = f"input.channel_mean={mean}, channel_std={std}"
    if not inputs.reads_bands:
        fix = "Remove both, or set config.input.bands=1,2,3"
        return f"{field}: has no effect on RGB of 8 bits, which becomes -1 to 1. {fix}."
    if inputs.value_range is not None:
        return f"{field}: must be empty with value_range={inputs.value_range}. Choose one."
    if {len(mean), len(std)} == {inputs.channels}:
        return None
    fix = "Give both, or neither: the training images are measured then"
    return f"{field}: must be {inputs.channels} numbers each, one a channel. {fix}."


def check_rgb_augmentations(config: RunConfig) -> str | None:
    """Augmentations of colours need RGB of 8 bits."""
    inputs = config.input
    if not inputs.reads_bands:
        return None
    for name, operations in RGB_AUGMENTATIONS.items():
        value = getattr(inputs, name)
        if value:
            bands = f"channels={inputs.channels}"
            if inputs.bands:
                bands = f"bands={inputs.bands}"
            fix = f"Set config.input.{name}={type(value)()}"
            if inputs.randaugment_magnitude:
                fix += " and config.input.randaugment_magnitude=0"
            return (
                f"input.{name}={value}: must be off with input.{bands}: {operations} need RGB of 8 "
                f"bits. {fix}; crops, flips, erasing, mixup and CutMix work with all bands."
            )
    return None


def check_shift(config: RunConfig) -> str | None:
    """A crop that shifts the image needs a distance."""
    if config.input.train_crop != "shift" or config.input.shift_pixels:
        return None
    return (
        "input.shift_pixels=0: must be at least 1 with train_crop='shift'. "
        "Use 4, or another train_crop."
    )


def check_rotation(config: RunConfig) -> str | None:
    """Only square images keep their size when they are rotated by 90 degrees."""
    if not config.input.rotate90:
        return None
    sizes = [config.input.image_size]
    for phase in get_phases(config).values():
        sizes.append(phase.image_size)
    for size in sizes:
        if size is not None and size[0] != size[1]:
            side = max(size)
            return (
                f"input.rotate90=True: must be False with image_size={size}, which is not square. "
                f"Use image_size={side},{side}, or vertical_flip."
            )
    return None


def check_number_of_examples(config: RunConfig) -> str | None:
    """The number of training examples must be stated once."""
    per_class = config.input.train_examples_per_class
    examples = config.input.train_examples
    if examples is None or per_class is None:
        return None
    return (
        f"input.train_examples={examples}: must be None with train_examples_per_class={per_class}."
    )


def check_train_resize(config: RunConfig) -> str | None:
    """An image that is resized before its crop must be at least as large as the crop."""
    crop = config.input.train_crop
    pixels = config.input.train_resize_pixels
    if crop not in ("resize", "resize_short_side"):
        return None
    if config.input.image_size is None:
        return f"input.image_size=None: must be set with train_crop={crop!r}. Use 224."
    side = max(config.input.image_size)
    if pixels is not None and pixels >= side:
        return None
    return (
        f"input.train_resize_pixels={pixels}: must be at least {side} with train_crop={crop!r}. "
        f"Use {side * 8 // 7}."
    )


def check_image_size(config: RunConfig) -> str | None:
    """Without weights an image size must be stated."""
    if config.input.image_size is not None or isinstance(config, FinetuneConfig):
        return None
    return "input.image_size=None: must be set in pre-training, which has no weights. Use 224."


def check_test_resize(config: RunConfig) -> str | None:
    """Without weights the preparation of test images must be stated."""
    if config.input.test_resize != "weights" or isinstance(config, FinetuneConfig):
        return None
    return (
        "input.test_resize='weights': must be short_side or direct in pre-training, which has no "
        "weights. Use short_side."
    )


INPUT_RULES: tuple[Rule, ...] = (
    check_splits,
    check_crop_area,
    check_value_range,
    check_bands,
    check_channel_scale,
    check_rgb_augmentations,
    check_shift,
    check_rotation,
    check_number_of_examples,
    check_train_resize,
    check_image_size,
    check_test_resize,
)


# The objective.


def check_smoothing(config: RunConfig) -> str | None:
    """Smoothed labels of `bce` would be above its threshold for every class."""
    objective = config.objective
    if objective.loss != "bce" or not objective.label_smoothing_fraction:
        return None
    return (
        f"objective.label_smoothing_fraction={objective.label_smoothing_fraction}: must be 0 for "
        "loss='bce', which would take all classes for present. Use loss='sigmoid'."
    )


def check_masked_pretraining(config: RunConfig) -> str | None:
    """Masked patches are an objective of pre-training."""
    if not isinstance(config, FinetuneConfig):
        return None
    return "objective.kind='masked_patch': must be pre-training. Use classification in fine-tuning."


def check_masked_loss(config: RunConfig) -> str | None:
    """Masked patches have a loss of their target, not of classes."""
    loss = config.objective.loss
    if loss == "softmax":
        return None
    return f"objective.loss={loss!r}: has no effect on masked_patch. Leave it at 'softmax'."


def check_corruption_shares(config: RunConfig) -> str | None:
    """Each masked patch must have one of the forms of corruption."""
    shares = config.objective.corruption_shares
    if abs(sum(shares) - 1) <= 1e-6:
        return None
    return f"objective.corruption_shares={shares}: must sum to 1."


def check_masked_features(config: RunConfig) -> str | None:
    """A head alone cannot learn from masked patches."""
    if config.optimizer.trained != "head":
        return None
    return "optimizer.trained='head': must be 'all' with masked_patch, whose features are learned."


def check_masked_dropout(config: RunConfig) -> str | None:
    """Masked patches must be in the sequence to be predicted."""
    for field in list_patch_dropouts(config):
        return f"{field}: must be 0 with objective.kind='masked_patch', which predicts all patches."
    return None


OBJECTIVE_RULES: tuple[Rule, ...] = (check_smoothing,)
MASKED_PATCH_RULES: tuple[Rule, ...] = (
    check_masked_pretraining,
    check_masked_loss,
    check_corruption_shares,
    check_masked_features,
    check_masked_dropout,
)


# The optimiser and the Polyak average.


def check_decay_by_rate(config: RunConfig) -> str | None:
    """The weight decay of big_vision is divided by the learning rate."""
    optimizer = config.optimizer
    if optimizer.weight_decay_meaning != "big_vision" or not optimizer.weight_decay:
        return None
    is_searched = isinstance(config, FinetuneConfig) and config.search.learning_rates
    if config.schedule.learning_rate or is_searched:
        return None
    return (
        "optimizer.weight_decay_meaning='big_vision': must have a positive learning rate, by which "
        "it divides. Set schedule.learning_rate, or weight_decay=0."
    )


def check_lora(config: RunConfig) -> str | None:
    """LoRA adapts weights that exist."""
    rank = config.optimizer.lora_rank
    if rank is None or isinstance(config, FinetuneConfig):
        return None
    return f"optimizer.lora_rank={rank}: must be fine-tuning. Use `vit-jax finetune`, or None."


def check_head_dropout(config: RunConfig) -> str | None:
    """Frozen features are computed once, without dropout."""
    if config.optimizer.trained != "head":
        return None
    if list_patch_dropouts(config):
        return (
            "input.patch_dropout: must be 0 with optimizer.trained='head', on frozen features. "
            "Use 0."
        )
    if not (config.model.dropout_fraction or config.model.stochastic_depth_fraction):
        return None
    return "model: dropout has no effect with optimizer.trained='head', on frozen features. Use 0."


def check_polyak_start(config: RunConfig) -> str | None:
    """Warm-up and bias correction of the average exclude each other."""
    polyak = config.polyak
    if polyak.factor is None or not (polyak.warmup and polyak.bias_correction):
        return None
    return (
        f"polyak.warmup={polyak.warmup!r}: replaces bias_correction. "
        "Set config.polyak.bias_correction=False."
    )


OPTIMIZER_RULES: tuple[Rule, ...] = (
    check_decay_by_rate,
    check_lora,
    check_head_dropout,
    check_polyak_start,
)


# The schedule of the learning rate.


def check_end_rate(config: RunConfig) -> str | None:
    """The learning rate must not rise towards the end."""
    base = config.schedule.learning_rate
    end = config.schedule.end_learning_rate
    if not base or end <= base:
        return None
    return f"schedule.end_learning_rate={end}: must lie in [0, {base}], up to learning_rate."


def check_drops(config: RunConfig) -> str | None:
    """The drops of a staircase must be in order, within the run."""
    drops = config.schedule.drop_at_fraction
    pairs = itertools.pairwise((0.0, *drops, 1.0))
    if drops and all(earlier < later for earlier, later in pairs):
        return None
    return (
        f"schedule.drop_at_fraction={drops}: must be ascending numbers in (0, 1). "
        "Use (0.3, 0.6, 0.9)."
    )


SCHEDULE_RULES: tuple[Rule, ...] = (check_end_rate, check_drops)


# The trackers.


def check_writers(config: RunConfig) -> str | None:
    """A custom writer must be a class with the methods of a tracker."""
    for reference in config.logging.writers:
        found = resolve(reference, "config.logging.writers")
        missing = [name for name in TRACKER_METHODS if not callable(getattr(found, name, None))]
        if missing or not isinstance(found, type):
            methods = ", ".join(TRACKER_METHODS)
            return (
                f"logging.writers={reference!r}: must be a class with the methods {methods}. "
                "See docs/extend.md."
            )
    return None


LOGGING_RULES: tuple[Rule, ...] = (check_writers,)


# The start of a run.


def check_allowed_code(config: RunConfig) -> str | None:
    """Allowed code must be packages or references."""
    try:
        parse_allowed_code(config.allow_code)
    except ValueError as error:
        return str(error)
    return None


def check_phases(config: RunConfig) -> str | None:
    """An earlier phase must differ from the run."""
    for name, phase in get_phases(config).items():
        values = (phase.image_size, phase.global_batch, phase.patch_dropout)
        if values == (None, None, None):
            return (
                f"phases.{name}: has no effect. Set its image_size, global_batch or patch_dropout."
            )
    return None


def check_weights(config: RunConfig) -> str | None:
    """A continued run has its weights from its checkpoint."""
    if isinstance(config, FinetuneConfig):
        return None
    if config.init_from is None or config.resume_from is None:
        return None
    return (
        f"init_from={config.init_from!r}: must be None with resume_from, which continues a run. "
        "Choose one."
    )


START_RULES: tuple[Rule, ...] = (check_allowed_code, check_phases, check_weights)


# The learning rates of fine-tuning. These rules have the config of a fine-tuning run.


def check_channel_weights(config: FinetuneConfig) -> str | None:
    """Kernels of zeros must be trained."""
    if config.model.channel_weights != "zero":
        return None
    optimizer = config.optimizer
    if optimizer.lora_rank is None and optimizer.trained == "all":
        return None
    return (
        "model.channel_weights='zero': must be cyclic with LoRA or optimizer.trained='head' or "
        "'last:N', which freeze the first layer. Use cyclic."
    )


def check_frozen_head(config: FinetuneConfig) -> str | None:
    """Through a kernel of zeros that stays, no gradient reaches other parameters."""
    model = config.model
    if model.head not in ("zero", "zero_keep_hidden") or model.head_stddev:
        return None
    for pattern in config.optimizer.frozen:
        if fnmatchcase("head/linear/kernel", pattern):
            return (
                f"optimizer.frozen={pattern!r}: must not freeze the new head, whose zeros stop all "
                "gradients. Set config.model.head_stddev=0.02, or config.model.head=keep."
            )
    return None


def check_rate(config: FinetuneConfig) -> str | None:
    """Fine-tuning needs a learning rate, or several to search."""
    if config.search.learning_rates or config.schedule.learning_rate:
        return None
    return (
        "schedule.learning_rate=0.0: must be positive. "
        "Set it, or config.search.learning_rates to search."
    )


def check_searched_rate(config: FinetuneConfig) -> str | None:
    """A search chooses the learning rate."""
    rate = config.schedule.learning_rate
    rates = config.search.learning_rates
    if not (rates and rate):
        return None
    return (
        f"schedule.learning_rate={rate}: must be 0 with config.search.learning_rates={rates}. "
        "Use 0, or add --config.search.learning_rates= (empty)."
    )


def check_different_rates(config: FinetuneConfig) -> str | None:
    """A search tries each learning rate once."""
    rates = config.search.learning_rates
    if len(set(rates)) == len(rates):
        return None
    return f"search.learning_rates={rates}: must differ from each other."


def check_searched_fraction(config: FinetuneConfig) -> str | None:
    """A search needs images to train on and others to compare learning rates on."""
    fraction = config.search.validation_fraction
    if not config.search.learning_rates or 0 < fraction < 1:
        return None
    return f"search.validation_fraction={fraction}: must lie in (0, 1)."


FINETUNE_RULES: tuple[Callable[[FinetuneConfig], str | None], ...] = (
    check_channel_weights,
    check_frozen_head,
    check_rate,
    check_searched_rate,
    check_different_rates,
    check_searched_fraction,
)
