"""Checks of a config.

`lengths` converts its durations to steps. `architecture_rules` has the checks of the network.

`validate` needs the config alone; `resolve` the size of the dataset and the devices, `require_fit`
the network, `require_labels` the kind of labels.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.directions import (
    find_stated_direction,
    require_direction,
    stated_direction,
    stated_directions,
)
from vit_jax.config.field_checks import out_of_range, reject, without_effect
from vit_jax.config.lengths import RunSteps, convert_lengths, phases_by_name
from vit_jax.config.metric_names import (
    MULTILABEL_RESULTS,
    find_current_name,
    find_metric,
    name_custom_metric,
    require_metric_name,
)
from vit_jax.config.parsing import flatten, references, to_dict
from vit_jax.config.schema import (
    EvaluatorConfig,
    FinetuneConfig,
    InputConfig,
    RunConfig,
    ScheduleConfig,
)
from vit_jax.imports.references import allowed_code, is_reference
from vit_jax.imports.references import resolve as import_reference
from vit_jax.storage.files import refuse_bucket
from vit_jax.text.nearest import did_you_mean

_FROM_BUCKETS = ("data", "input.data_dir", "init_from", "resume_from")


def validate(config: RunConfig) -> None:
    """Check values one by one and against each other, and import the user's code that references name.

    Raises:
      ValueError: a value that cannot work, with what would.
    """
    for name, value in flatten(to_dict(config)).items():
        if isinstance(value, str):
            is_read = name in _FROM_BUCKETS or name.endswith(".data")  # of an evaluator
            refuse_bucket(value, f"config.{name}={value}", allowed=is_read)
    for name, value in references(
        config
    ):  # first: whether other fields have an effect depends on what exists
        import_reference(value, f"config.{name}")
    checks = (
        out_of_range(config),
        without_effect(config, config),
        _wrong_input(config.input),
        _wrong_objective(config),
        _wrong_optimizer(config),
        _wrong_schedule(config.schedule),
        _wrong_evaluations(config),
        _wrong_start(config),
    )
    reject(itertools.chain.from_iterable(checks))


def resolve(config: RunConfig, *, num_examples: int, num_devices: int) -> RunSteps:
    """Convert durations to steps, for a training split of `num_examples` and the devices of all processes.

    Raises:
      ValueError: a value that does not suit the dataset or the devices, with what would. `validate`
        checks the others.
    """
    reject(_of_devices(config, num_devices))
    return convert_lengths(config, num_examples)


def require_fit(config: RunConfig, a: Architecture, platform: str) -> None:
    """Check values that must suit the network and the platform ("cpu", "gpu" or "tpu").

    Raises:
      ValueError: one does not.
    """
    reject(_of_network(config, a, platform))


def require_labels(config: RunConfig, *, is_multilabel: bool, frozen: Mapping[str, bool]) -> None:
    """Check values that are for single-label or for multi-label data alone.

    `is_multilabel` is of the training split, `frozen` of the data of each evaluator on frozen
    features, by its name.

    Raises:
      ValueError: a value does not suit the data.
    """
    reject(_of_labels(config, is_multilabel, frozen))


def _of_devices(config: RunConfig, num_devices: int) -> Iterator[str]:
    replicas = config.sharding.num_replicas or 1
    shards = config.sharding.num_model_shards
    if num_devices % (replicas * shards):
        mesh = f"num_replicas={replicas} x num_model_shards={shards}"
        yield f"sharding: {mesh} must divide the {num_devices} device(s). Choose divisors."
    accumulation = config.optimizer.accumulation_steps or 1
    shares = num_devices // shards  # model shards see the same examples
    training: dict[str, int | None] = {"global_batch": config.global_batch}
    training |= {
        f"phases.{name}.global_batch": phase.global_batch
        for name, phase in phases_by_name(config).items()
    }
    batches = [(name, batch, shares * accumulation) for name, batch in training.items()]
    for name, batch, divisor in (
        *batches,
        ("evaluation.global_batch", config.evaluation.global_batch, shares),
    ):
        if batch is not None and batch % divisor:
            below = batch // divisor * divisor
            allowed = f"{below} or {below + divisor}" if below else str(divisor)
            over = f"{num_devices} device(s)" + (f" / {shards} model shards" if shards > 1 else "")
            over += f" x {accumulation} micro-batches" if divisor != shares else ""
            yield f"{name}={batch}: must be divisible by {over}. Use {allowed}."


def _of_network(config: RunConfig, a: Architecture, platform: str) -> Iterator[str]:
    weights = config.objective.class_weights
    form = config.model.attention
    shards = config.sharding.num_model_shards
    if len(weights) not in (0, a.num_classes):
        yield f"objective.class_weights={weights}: must have one number for each class. Give {a.num_classes}."
    if form == "cudnn" and platform != "gpu":
        yield f"model.attention='cudnn': must run on an NVIDIA GPU, and here is {platform}. Use auto."
    if form != "auto" and not a.has_transformer:
        yield f"model.attention={form!r}: has no effect on {a.name}, which has no attention. Use auto."
    if a.is_standard and a.num_heads % shards:
        yield f"sharding.num_model_shards={shards}: must divide the {a.num_heads} heads of {a.name}. Choose a divisor."


def _of_labels(config: RunConfig, is_multilabel: bool, frozen: Mapping[str, bool]) -> Iterator[str]:
    best_metric = config.checkpoint.best_metric
    objective = config.objective
    if not is_multilabel and best_metric.endswith(MULTILABEL_RESULTS):
        yield f"checkpoint.best_metric={best_metric!r}: must be a metric of single-label data. Use test_accuracy."
    single = "must be unset for multi-label data"
    for name in (name for name, is_multilabel in frozen.items() if is_multilabel):
        kind = config.evaluation.evaluators[name].kind
        yield f"evaluation.evaluators.{name}.kind={kind!r}: must have single-label data. Remove the evaluator."
    if not is_multilabel:
        return
    if objective.kind == "classification" and objective.loss == "softmax":
        yield "objective.loss='softmax': must have single-label data. Use config.objective.loss=sigmoid."
    if objective.class_weights:
        yield f"objective.class_weights={objective.class_weights}: {single}. Leave it at ()."
    if config.input.sampling == "balanced":
        yield "input.sampling='balanced': must have single-label data. Use uniform."


def is_value_range(value: Any) -> bool:
    """Return whether this is a pair of finite numbers, the first of them lower."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return (
        is_pair
        and all(type(n) in (int, float) and math.isfinite(n) for n in value)
        and value[0] < value[1]
    )


def _wrong_input(config: InputConfig) -> Iterator[str]:
    if config.train_split == config.test_split:
        yield f"input.test_split={config.test_split!r}: must differ from train_split. Name another split."
    low, high = config.crop_area_fraction
    if not 0 < low <= high <= 1:
        yield f"input.crop_area_fraction={(low, high)}: must be 0 < low <= high <= 1."
    if config.value_range is not None and not is_value_range(config.value_range):
        yield f"input.value_range={config.value_range}: must be finite numbers, low < high. Use 0,4095 for 12 bits."
    if config.train_crop == "shift" and not config.shift_pixels:
        yield "input.shift_pixels=0: must be at least 1 with train_crop='shift'. Use 4, or another train_crop."
    per_class = config.train_examples_per_class
    if config.train_examples is not None and per_class is not None:
        yield f"input.train_examples={config.train_examples}: must be None with train_examples_per_class={per_class}."
    pixels = config.train_resize_pixels
    side = max(config.image_size)
    if config.train_crop in ("resize", "resize_short_side") and (pixels is None or pixels < side):
        rule = f"must be at least {side} with train_crop={config.train_crop!r}"
        yield f"input.train_resize_pixels={pixels}: {rule}. Use {side * 8 // 7}."


def _wrong_objective(config: RunConfig) -> Iterator[str]:
    objective = config.objective
    shares = config.objective.corruption_shares
    if objective.loss == "bce" and (smoothing := objective.label_smoothing_fraction):
        rule = "must be 0 for loss='bce', which would take all classes for present"
        yield f"objective.label_smoothing_fraction={smoothing}: {rule}. Use loss='sigmoid'."
    if objective.kind != "masked_patch":
        return
    if isinstance(config, FinetuneConfig):
        yield "objective.kind='masked_patch': must be pre-training. Use classification in fine-tuning."
    if objective.loss != "softmax":
        yield f"objective.loss={objective.loss!r}: has no effect on masked_patch. Leave it at 'softmax'."
    if abs(sum(shares) - 1) > 1e-6:
        yield f"objective.corruption_shares={shares}: must sum to 1."
    if config.optimizer.trained == "head":
        yield "optimizer.trained='head': must be 'all' with masked_patch, whose features are learned."


def _wrong_optimizer(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    polyak = config.polyak
    searches = isinstance(config, FinetuneConfig) and config.search.learning_rates
    has_rate = config.schedule.learning_rate or searches
    if optimizer.weight_decay_meaning == "big_vision" and optimizer.weight_decay and not has_rate:
        rule = "must have a positive learning rate, by which it divides"
        yield f"optimizer.weight_decay_meaning='big_vision': {rule}. Set schedule.learning_rate, or weight_decay=0."
    if optimizer.lora_rank is not None and not isinstance(config, FinetuneConfig):
        yield f"optimizer.lora_rank={optimizer.lora_rank}: must be fine-tuning. Use `vit-jax finetune`, or None."
    if optimizer.trained == "head" and (
        config.model.dropout_fraction or config.model.stochastic_depth_fraction
    ):
        yield "model: dropout has no effect with optimizer.trained='head', on frozen features. Use 0."
    if polyak.factor is not None and polyak.warmup and polyak.bias_correction:
        yield f"polyak.warmup={polyak.warmup!r}: replaces bias_correction. Set config.polyak.bias_correction=False."


def _wrong_schedule(config: ScheduleConfig) -> Iterator[str]:
    base = config.learning_rate
    end = config.end_learning_rate
    fractions = config.drop_at_fraction
    if base and end > base:
        yield f"schedule.end_learning_rate={end}: must lie in [0, {base}], up to learning_rate."
    if not fractions or any(
        after <= before for before, after in itertools.pairwise((0.0, *fractions, 1.0))
    ):
        yield f"schedule.drop_at_fraction={fractions}: must be ascending numbers in (0, 1). Use (0.3, 0.6, 0.9)."


def result_names(config: RunConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of results of a run's evaluations, and the prefixes of results of user-defined evaluators."""
    objective = config.objective
    has_accuracy = objective.kind == "classification" or objective.patch_target != "pixels"
    usual: tuple[str, ...] = ("accuracy", "loss") if has_accuracy else ("loss",)
    if objective.kind == "classification" and objective.loss != "softmax":
        usual += MULTILABEL_RESULTS  # the data may be multi-label
    usual += _chosen_results(config)
    known = [f"test_{result}" for result in usual]
    own = []
    for name, evaluator in config.evaluation.evaluators.items():
        if is_reference(evaluator.kind):
            own.append(f"{name}_")
        else:
            frozen = evaluator.frozen
            results = (
                [f"{number}{frozen.result_suffix}" for number in evaluator.numbers]
                if frozen
                else usual
            )
            known += [f"{name}_{result}" for result in results]
    return tuple(known), tuple(own)


def _chosen_results(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the metrics that `evaluation.metrics` adds."""
    names = []
    for metric in config.evaluation.metrics:
        is_custom = is_reference(metric)
        names.append(name_custom_metric(metric) if is_custom else find_current_name(metric))
    return tuple(names)


def _require_metrics(config: RunConfig) -> None:
    """Raise ValueError for an unknown metric, or a user-defined one that states a wrong direction."""
    field = "config.evaluation.metrics"
    for metric in config.evaluation.metrics:
        if is_reference(metric):
            stated_direction(import_reference(metric, field), f"{field}={metric}")
        else:
            require_metric_name(metric, field)


def _wrong_evaluations(config: RunConfig) -> Iterator[str]:
    _require_metrics(config)
    for name, evaluator in config.evaluation.evaluators.items():
        field = f"evaluation.evaluators.{name}"
        if not name.isidentifier() or name in ("test", "validation", "train"):
            rule = "must be a prefix of results: letters, digits and _, but not test, validation or train"
            yield f"{field}: {rule}."
        if evaluator.frozen:
            yield from _wrong_frozen(config, field, evaluator)
        if is_reference(evaluator.kind):
            place = f"config.{field}.kind={evaluator.kind!r}"
            stated_directions(import_reference(evaluator.kind, f"config.{field}.kind"), place)
    if config.checkpoint.keep_best:
        yield from _wrong_best_metric(config)


def _wrong_frozen(config: RunConfig, field: str, evaluator: EvaluatorConfig) -> Iterator[str]:
    """Check an evaluator on frozen features."""
    frozen = evaluator.frozen
    assert frozen is not None, field
    yield from _wrong_arguments(field, evaluator, (frozen.number_argument, *frozen.arguments))
    train = evaluator.train_split or config.input.train_split
    test = evaluator.split or config.input.test_split
    if train == test:
        yield f"{field}: split and train_split must differ, and are both {test!r}."


def _wrong_best_metric(config: RunConfig) -> Iterator[str]:
    """Check the metric of the best checkpoint, and whether its direction is known."""
    metric = config.checkpoint.best_metric
    known, prefixes = result_names(config)
    if metric not in known and not metric.startswith(prefixes):
        results = ", ".join([*known, *(f"{prefix}..." for prefix in prefixes)])
        rule = f"must be a result of an evaluator. Use one of {results}"
        yield f"checkpoint.best_metric={metric!r}: {rule}."
        return
    mode = config.checkpoint.best_mode
    if mode != "auto":
        stated = find_stated_direction(config, metric)
        if stated is not None:
            yield f"checkpoint.best_mode={mode!r}: has no effect on {metric}: {stated}. Use auto."
        elif metric in known and find_metric(metric) is not None:
            yield f"checkpoint.best_mode={mode!r}: has no effect on {metric}. Use auto."
    require_direction(config, metric)


def _wrong_arguments(
    field: str, config: EvaluatorConfig, allowed: tuple[str, ...]
) -> Iterator[str]:
    """Check names; the evaluator checks values before anything is compiled."""
    for name in (name for name in config.arguments if name not in allowed):
        hint = did_you_mean(name, allowed, "{}")
        yield f"{field}.arguments.{name}: must be one of {', '.join(allowed)}, for kind={config.kind!r}.{hint}"


def _wrong_start(config: RunConfig) -> Iterator[str]:
    """Check the start of a run: weights and their code, learning rate, phases."""
    try:
        allowed_code(config.allow_code)
    except ValueError as error:
        yield str(error)
    for name, phase in phases_by_name(config).items():
        if phase.image_size is None and phase.global_batch is None:
            yield f"phases.{name}: has no effect. Set its image_size or global_batch."
    if not isinstance(config, FinetuneConfig):
        if config.init_from is not None and config.resume_from is not None:
            yield f"init_from={config.init_from!r}: must be None with resume_from, which continues a run. Choose one."
        return
    rate = config.schedule.learning_rate
    rates = config.search.learning_rates
    if not rates and not rate:
        yield "schedule.learning_rate=0.0: must be positive. Set it, or config.search.learning_rates to search."
    if rates and rate:
        rule = f"must be 0 with config.search.learning_rates={rates}"
        yield f"schedule.learning_rate={rate}: {rule}. Use 0, or add --config.search.learning_rates= (empty)."
    if len(set(rates)) != len(rates):
        yield f"search.learning_rates={rates}: must differ from each other."
    if rates and not 0 < (fraction := config.search.validation_fraction) < 1:
        yield f"search.validation_fraction={fraction}: must lie in (0, 1)."
