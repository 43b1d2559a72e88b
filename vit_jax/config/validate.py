"""Validates every value of a config that neither the dataset nor the devices are needed for. Nothing else does.

`load` has checked names and types before; `resolve` checks what depends on the dataset and the devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config.load import flatten, references, to_dict
from vit_jax.config.schema import (
    FROZEN_ARGUMENTS,
    MULTILABEL_RESULTS,
    EvaluatorConfig,
    FinetuneConfig,
    InputConfig,
    PretrainConfig,
    RunConfig,
    ScheduleConfig,
)
from vit_jax.files import refuse_bucket
from vit_jax.nearest import did_you_mean
from vit_jax.references import allowed_code, is_reference, resolve

_RANGES = (  # lowest, highest, whether the highest is allowed; of the fields that are set
    (0, 1, False, "model.dropout_fraction model.stochastic_depth_fraction objective.label_smoothing_fraction"),
    (0, 1, False, "input.holdout_fraction optimizer.momentum optimizer.beta1 optimizer.beta2 polyak.factor"),
    (0, 1, True, "input.test_crop_fraction input.cutmix_fraction input.erasing_fraction input.color_jitter"),
    (0, None, True, "optimizer.weight_decay schedule.learning_rate schedule.end_learning_rate input.mixup_alpha"),
    (0, None, True, "input.shift_pixels input.randaugment_layers input.randaugment_magnitude input.max_unreadable"),
    (0, None, True, "input.num_workers checkpoint.keep_best seed stop_early.min_delta input.cutmix_alpha"),
    (1, None, True, "checkpoint.keep_latest logging.profile_num_steps input.num_threads optimizer.accumulation_steps"),
    (1, None, True, "sharding.num_replicas sharding.num_model_shards stop_early.patience input.repeats"),
    (1, None, True, "optimizer.lora_rank"),
)
_POSITIVE = (
    *("input.test_crop_fraction", "input.max_image_megapixels"),
    *("optimizer.epsilon", "optimizer.clip_global_norm", "optimizer.layer_decay", "optimizer.lora_alpha"),
    "logging.hang_seconds",
)


def validate(config: RunConfig) -> None:
    """Checks values one by one and against each other, and imports what references name.

    Raises:
      ValueError: a value that cannot work, with what would.
    """
    for name, value in flatten(to_dict(config)).items():
        if isinstance(value, str):
            refuse_bucket(value, f"config.{name}={value}")
    for name, value in references(config):  # first: whether other fields have an effect depends on what exists
        resolve(value, f"config.{name}")
    checks = (
        _out_of_range(flatten(to_dict(config))),
        _without_effect(config),
        _wrong_input(config.input),
        _wrong_objective(config),
        _wrong_optimizer(config),
        _wrong_schedule(config.schedule),
        _wrong_evaluations(config),
        _wrong_phases(config),
        _wrong_start(config),
    )
    for problem in itertools.chain.from_iterable(checks):  # the first
        raise ValueError(f"config.{problem}")


def _out_of_range(flat: Mapping[str, Any]) -> Iterator[str]:
    for low, high, is_closed, names in _RANGES:
        allowed = f"lie in [{low}, {high}{']' if is_closed else ')'}"
        if high is None:
            allowed = "not be negative" if low == 0 else f"be at least {low}"
        for name in names.split():
            value = flat.get(name)
            if value is None:
                continue
            if value < low or (high is not None and (value > high if is_closed else value >= high)):
                yield f"{name}={value}: must {allowed}."
    for name in _POSITIVE:
        if flat[name] is not None and flat[name] <= 0:
            yield f"{name}={flat[name]}: must be positive."
    if flat["polyak.factor"] == 0:
        yield "polyak.factor=0.0: must lie between 0 and 1, for example 0.9999; None for off."
    warmup, is_on = flat["polyak.warmup"], flat["polyak.factor"] is not None
    if warmup and is_on and flat["polyak.bias_correction"]:
        yield f"polyak.warmup={warmup!r}: replaces bias_correction. Set config.polyak.bias_correction=False."
    if flat["optimizer.layer_decay"] > 1:
        yield f"optimizer.layer_decay={flat['optimizer.layer_decay']}: at most 1, where 1 is off."


def _without_effect(config: RunConfig) -> Iterator[str]:
    """A field set to something that another field makes meaningless: no setting is silently ignored."""
    inputs, polyak, schedule, optimizer = config.input, config.polyak, config.schedule, config.optimizer
    inception, kind, decay = inputs.train_crop == "inception", optimizer.name, schedule.decay
    ours = not is_reference(kind)
    ends = decay in ("linear", "cosine", "wsd")
    hides = config.objective.kind == "masked_patch"
    conditions = (
        (
            "objective",
            ("corrupted_fraction", "corruption_shares", "patch_target"),
            hides,
            "objective.kind='masked_patch'",
        ),
        ("objective", ("label_smoothing_fraction", "class_weights"), not hides, "objective.kind='classification'"),
        ("input", ("mixup_alpha", "cutmix_alpha"), not hides, "objective.kind='classification'"),
        ("input", ("cutmix_fraction",), inputs.mixup_alpha > 0 < inputs.cutmix_alpha, "mixup_alpha and cutmix_alpha"),
        ("polyak", ("start", "bias_correction", "warmup"), polyak.factor is not None, "polyak.factor"),
        ("stop_early", ("min_delta",), config.stop_early.patience is not None, "stop_early.patience"),
        ("schedule", ("timescale",), decay == "rsqrt", "schedule.decay='rsqrt'"),
        ("schedule", ("drop_at_fraction",), decay == "staircase", "schedule.decay='staircase'"),
        ("schedule", ("cooldown", "cooldown_form"), decay == "wsd", "schedule.decay='wsd'"),
        ("schedule", ("end_learning_rate",), ends, "schedule.decay='linear', 'cosine' or 'wsd'"),
        ("optimizer", ("beta1", "beta2", "epsilon"), kind in ("adam", "lamb"), "optimizer.name='adam' or 'lamb'"),
        ("optimizer", ("momentum",), kind == "sgd", "optimizer.name='sgd'"),
        ("optimizer", ("weight_decay", "first_moment_dtype"), ours, "an optimiser of ours (adam, lamb, sgd)"),
        ("optimizer", ("arguments",), not ours, "a reference such as optimizer.name='optax:lion'"),
        ("optimizer", ("layer_decay", "frozen", "lora_rank"), optimizer.trained == "all", "optimizer.trained='all'"),
        ("optimizer", ("lora_alpha", "lora_layers"), optimizer.lora_rank is not None, "optimizer.lora_rank"),
        ("input", ("crop_area_fraction", "crop_distribution"), inception, "an inception crop"),
        ("input", ("randaugment_arithmetic",), inputs.randaugment_layers > 0, "input.randaugment_layers"),
        (
            "logging",
            ("profile_num_steps",),
            config.logging.profile_start_step is not None,
            "logging.profile_start_step",
        ),
        ("input", ("test_crop_fraction",), inputs.test_resize == "short_side", "short_side"),
    )
    for name, fields, has_effect, needed in conditions:
        section = getattr(config, name)
        for field in fields if not has_effect else ():
            declared = next(f for f in dataclasses.fields(section) if f.name == field)
            default = {} if declared.default is dataclasses.MISSING else declared.default
            if getattr(section, field) != default:
                is_plain = default is None or isinstance(default, str | int | float)
                other = f"add --config.{name}.{field}={default}" if is_plain else f"leave {name}.{field} at {default!r}"
                yield (
                    f"{name}.{field}={getattr(section, field)!r} has no effect without {needed}: set that too, "
                    f"or {other}."
                )


def is_value_range(value: Any) -> bool:
    """Return whether this is a pair of finite numbers, the first of them lower."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(type(n) in (int, float) and math.isfinite(n) for n in value) and value[0] < value[1]


def _wrong_input(config: InputConfig) -> Iterator[str]:
    if min(config.image_size) < 1:
        yield f"input.image_size={config.image_size}: height and width must be at least 1 pixel."
    if config.train_split == config.test_split:
        yield (
            f"input.train_split and config.input.test_split are both {config.test_split!r}: the run would be tested on "
            "the images it trains on. Name two different splits."
        )
    low, high = config.crop_area_fraction
    if not 0 < low <= high <= 1:
        yield f"input.crop_area_fraction={(low, high)}: must be 0 < low <= high <= 1."
    if config.value_range is not None and not is_value_range(config.value_range):
        yield f"input.value_range={config.value_range}: must be finite numbers, low < high. Use 0,4095 for 12 bits."
    if (config.shift_pixels > 0) != (config.train_crop == "shift"):
        yield (
            f"input.shift_pixels={config.shift_pixels} with train_crop={config.train_crop!r}: give at least 1 with "
            "train_crop='shift', and 0 otherwise."
        )
    per_class = config.train_examples_per_class
    if per_class is not None and per_class < 1:
        yield f"input.train_examples_per_class={per_class}: give at least 1, or None for all."
    if config.train_examples is not None and (config.train_examples < 1 or per_class is not None):
        yield (
            f"input.train_examples={config.train_examples} and train_examples_per_class={per_class}: give one of them, "
            "at least 1, or None for all."
        )
    layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
    if magnitude and not layers:
        yield f"input.randaugment_layers={layers} and randaugment_magnitude={magnitude}: give both, or 0 for both."
    pixels, resizes = config.train_resize_pixels, config.train_crop in ("resize", "resize_short_side")
    if resizes != (pixels is not None):
        yield (
            f"input.train_resize_pixels={pixels} with train_crop={config.train_crop!r}: give a number with 'resize' "
            "and 'resize_short_side', and None otherwise."
        )
    if pixels is not None and pixels < max(config.image_size):
        yield (
            f"input.train_resize_pixels={pixels}: a crop of image_size {config.image_size} does not fit; give at least "
            f"{max(config.image_size)}."
        )


def _wrong_objective(config: RunConfig) -> Iterator[str]:
    objective, shares = config.objective, config.objective.corruption_shares
    if objective.class_weights and min(objective.class_weights) <= 0:
        yield f"objective.class_weights={objective.class_weights}: must be positive."
    if objective.loss == "bce" and objective.label_smoothing_fraction:
        yield (
            f"objective.label_smoothing_fraction={objective.label_smoothing_fraction}: must be 0 for loss='bce', which "
            "would take all classes for present. Use loss='sigmoid'."
        )
    if objective.kind != "masked_patch":
        return
    if isinstance(config, FinetuneConfig):
        yield "objective.kind='masked_patch': only pre-training predicts patches; fine-tuning takes labels."
    if objective.loss != "softmax":
        yield f"objective.loss={objective.loss!r}: masked_patch has a loss of its own; leave it at 'softmax'."
    if not 0 < objective.corrupted_fraction <= 1:
        yield f"objective.corrupted_fraction={objective.corrupted_fraction}: must lie between 0 and 1."
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        yield f"objective.corruption_shares={shares}: must be three shares, not negative, that sum to 1."
    if config.optimizer.trained == "head":
        yield "optimizer.trained='head': with masked_patch the patches' head alone would learn from frozen features."


def _wrong_optimizer(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    for pattern, factor in optimizer.learning_rate_multipliers.items():
        if factor <= 0:
            yield (
                f"optimizer.learning_rate_multipliers[{pattern!r}]={factor}: must be positive. To keep parameters as "
                f"they are, use config.optimizer.frozen={pattern}."
            )
    searches = isinstance(config, FinetuneConfig) and config.search.learning_rates
    has_rate = config.schedule.learning_rate or searches
    if optimizer.weight_decay_meaning == "big_vision" and optimizer.weight_decay and not has_rate:
        yield (
            "optimizer.weight_decay_meaning='big_vision' divides by the peak learning rate, which is 0: set "
            "schedule.learning_rate to a positive number, or weight_decay to 0."
        )
    if optimizer.lora_rank is not None and not isinstance(config, FinetuneConfig):
        yield (
            f"optimizer.lora_rank={optimizer.lora_rank}: LoRA adapts weights that are given. Use `vit-jax finetune`, "
            "or None."
        )
    if optimizer.trained == "head" and (config.model.dropout_fraction or config.model.stochastic_depth_fraction):
        yield "model: with optimizer.trained='head' the features are frozen: dropout has no effect."


def _wrong_schedule(config: ScheduleConfig) -> Iterator[str]:
    base, end, fractions = config.learning_rate, config.end_learning_rate, config.drop_at_fraction
    if config.decay in ("linear", "cosine", "wsd") and base and end > base:
        yield f"schedule.end_learning_rate={end}: must lie between 0 and learning_rate={base}."
    is_inside = bool(fractions) and all(0 < fraction < 1 for fraction in fractions)
    if not is_inside or any(after <= before for before, after in itertools.pairwise(fractions)):
        yield (
            f"schedule.drop_at_fraction={fractions}: must be one or more ascending numbers between 0 and 1, for "
            "example (0.3, 0.6, 0.9)."
        )


def result_names(config: RunConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What evaluations of a run will find, and the prefixes of evaluators of one's own, whose results have any name."""
    objective = config.objective
    has_accuracy = objective.kind == "classification" or objective.patch_target != "pixels"
    usual: tuple[str, ...] = ("accuracy", "loss") if has_accuracy else ("loss",)
    if objective.kind == "classification" and objective.loss != "softmax":
        usual += MULTILABEL_RESULTS  # if the data turn out to be such
    known = [f"test_{result}" for result in usual]
    own = []
    for name, evaluator in config.evaluation.evaluators.items():
        if is_reference(evaluator.kind):
            own.append(f"{name}_")
        else:
            results = usual if evaluator.kind == "classification" else _frozen_results(evaluator)
            known += [f"{name}_{result}" for result in results]
    return tuple(known), tuple(own)


def _wrong_evaluations(config: RunConfig) -> Iterator[str]:
    best_metric = config.checkpoint.best_metric if config.checkpoint.keep_best else None
    for name, evaluator in config.evaluation.evaluators.items():
        field = f"evaluation.evaluators.{name}"
        if not name.isidentifier() or name in ("test", "validation", "train"):
            yield (
                f"{field}: the name is a prefix of results; use letters, digits and _, and neither test, validation "
                "nor train."
            )
        if evaluator.train_split is not None and evaluator.kind not in ("fewshot", "knn"):
            yield f"{field}.train_split has no effect with kind={evaluator.kind!r}."
        if is_reference(evaluator.kind):
            continue
        if evaluator.kind != "classification":
            yield from _wrong_arguments(field, evaluator)
            train, test = evaluator.train_split or config.input.train_split, evaluator.split or config.input.test_split
            if train == test:
                yield f"{field}: split and train_split are both {test!r}: it would be tested on what it learns from."
        elif evaluator.arguments:
            yield f"{field}.arguments have no effect with kind={evaluator.kind!r}."
    if config.stop_early.patience is not None and best_metric is None:
        yield "stop_early.patience with config.checkpoint.keep_best=0: keep the best checkpoint, such a run's result."
    known, own = result_names(config)
    if best_metric is not None and best_metric not in known and not best_metric.startswith(own):
        results = ", ".join([*known, *(f"{prefix}..." for prefix in own)])
        yield f"checkpoint.best_metric={best_metric!r} is no result of an evaluator; these are: {results}."


def _wrong_arguments(field: str, config: EvaluatorConfig) -> Iterator[str]:
    """Names alone: values are checked by the evaluator, before anything is compiled."""
    allowed = FROZEN_ARGUMENTS[config.kind]
    for name in config.arguments:
        if name not in allowed:
            hint = did_you_mean(name, allowed, "{}")
            yield f"{field}.arguments.{name} is unknown.{hint} Of kind={config.kind!r} there are {', '.join(allowed)}."


def _frozen_results(config: EvaluatorConfig) -> Iterator[str]:
    result = "shot_accuracy" if config.kind == "fewshot" else "nn_accuracy"
    return (f"{number}{result}" for number in config.numbers)


def _wrong_phases(config: RunConfig) -> Iterator[str]:
    for name, phase in config.phases.items() if isinstance(config, PretrainConfig) else ():
        if phase.image_size is None and phase.global_batch is None:
            yield f"phases.{name}: has no effect. Set its image_size or global_batch."
        if phase.image_size is not None and min(phase.image_size) < 1:
            yield f"phases.{name}.image_size={phase.image_size}: height and width must be at least 1 pixel."


def _wrong_start(config: RunConfig) -> Iterator[str]:
    """Check the start of a run: seed, weights and their code, learning rate."""
    if config.seed >= 2**32:
        yield f"seed={config.seed}: give 0 to 2**32 - 1."
    try:
        allowed_code(config.allow_code)
    except ValueError as error:
        yield str(error)
    if not isinstance(config, FinetuneConfig):
        if config.init_from is not None and config.resume_from is not None:
            yield (
                "init_from and config.resume_from are both set: the first starts at step 0 with the weights of another "
                "run, the second continues it. Choose one."
            )
        if config.resume_step is not None and config.resume_from is None:
            yield f"resume_step={config.resume_step}: must come with config.resume_from. Set it, or leave both out."
        return
    rate, rates = config.schedule.learning_rate, config.search.learning_rates
    if not rates and not rate:
        yield (
            "schedule.learning_rate=0.0 and config.search.learning_rates is empty: nothing would be learnt. Set one of "
            "them."
        )
    if rates and rate:
        yield (
            f"schedule.learning_rate={rate} and config.search.learning_rates={rates} are both set. To use the one, add "
            "--config.search.learning_rates= (empty); to search, set the other to 0."
        )
    if rates and (min(rates) <= 0 or len(set(rates)) != len(rates)):
        yield f"search.learning_rates={rates}: must be positive and different from each other."
    if rates and not 0 < (fraction := config.search.validation_fraction) < 1:
        yield f"search.validation_fraction={fraction}: must lie between 0 and 1."
