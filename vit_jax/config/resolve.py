"""Turns a config's durations into steps and checks its values against the dataset and the devices."""

import dataclasses

from vit_jax.config.durations import Clock
from vit_jax.config.schema import FinetuneConfig, PretrainConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class RunSteps:
    """Every length of a run, in steps."""

    total: int
    warmup: int
    timescale: int
    polyak_start: int
    evaluate_every: int
    checkpoint_every: int
    log_every: int


def resolve(config: RunConfig, *, num_examples: int, num_devices: int) -> RunSteps:
    """Converts and checks what only the dataset and the devices can tell.

    Args:
      config: as loaded.
      num_examples: size of the training split.
      num_devices: of all processes.

    Raises:
      ValueError: a value that cannot work, with what would.
    """
    _check_values(config)
    _refuse_without_effect(config)
    _check_sharding(config, num_devices)
    _check_batches(config, num_devices)
    clock = Clock(config.global_batch, num_examples)
    total = clock.to_steps(config.total)
    if total < 1:
        raise ValueError(f"config.total={config.total!r} is no step at all: a run has at least one.")
    clock = dataclasses.replace(clock, total_steps=total)
    steps = RunSteps(
        total=total,
        warmup=clock.to_steps(config.schedule.warmup),
        timescale=clock.to_steps(config.schedule.timescale),
        polyak_start=clock.to_steps(config.polyak.start),
        evaluate_every=clock.to_steps(config.evaluation.every),
        checkpoint_every=clock.to_steps(config.checkpoint.every),
        log_every=clock.to_steps(config.logging.every),
    )
    if steps.warmup > total:
        raise ValueError(
            f"config.schedule.warmup={config.schedule.warmup!r} is {steps.warmup} steps, longer than the whole run "
            f"(config.total={config.total!r} is {total} steps): shorten the warm-up or lengthen the run."
        )
    start = config.logging.profile_start_step
    if start is not None and not 1 <= start <= total:
        raise ValueError(f"config.logging.profile_start_step={start}: the run has the steps 1 to {total}.")
    if isinstance(config, PretrainConfig) and config.init_from is not None and config.resume_from is not None:
        raise ValueError(
            "config.init_from and config.resume_from are both set: the first starts at step 0 with the weights of "
            "another run, the second continues it. Choose one."
        )
    for section, every in (
        ("evaluation", steps.evaluate_every),
        ("checkpoint", steps.checkpoint_every),
        ("logging", steps.log_every),
    ):
        if every < 1:
            raise ValueError(f"config.{section}.every must be at least one step.")
    return steps


def _check_values(config: RunConfig) -> None:
    model, inputs, optimizer, polyak = config.model, config.input, config.optimizer, config.polyak
    fractions = {
        "model.dropout_fraction": model.dropout_fraction or 0.0,
        "model.stochastic_depth_fraction": model.stochastic_depth_fraction,
        "objective.label_smoothing_fraction": config.objective.label_smoothing_fraction,
        "input.holdout_fraction": inputs.holdout_fraction,
        "optimizer.momentum": optimizer.momentum,
        "polyak.factor": polyak.factor or 0.0,
        "optimizer.beta1": optimizer.beta1,
        "optimizer.beta2": optimizer.beta2,
    }
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise ValueError(f"config.{name}={value}: must lie in [0, 1).")
    if not 0 < inputs.test_crop_fraction <= 1:
        raise ValueError(f"config.input.test_crop_fraction={inputs.test_crop_fraction}: must lie in (0, 1].")
    low, high = inputs.crop_area_fraction
    if not 0 < low <= high <= 1:
        raise ValueError(f"config.input.crop_area_fraction={(low, high)}: must be 0 < low <= high <= 1.")
    not_negative = {
        "optimizer.weight_decay": optimizer.weight_decay,
        "schedule.learning_rate": config.schedule.learning_rate,
        "schedule.end_learning_rate": config.schedule.end_learning_rate,
        "input.mixup_alpha": inputs.mixup_alpha,
        "input.shift_pixels": inputs.shift_pixels,
        "input.randaugment_layers": inputs.randaugment_layers,
        "input.randaugment_magnitude": inputs.randaugment_magnitude,
        "input.max_unreadable": inputs.max_unreadable,
        "input.num_workers": inputs.num_workers or 0,
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "seed": config.seed,
    }
    for name, number in not_negative.items():
        if number < 0:
            raise ValueError(f"config.{name}={number}: must not be negative.")
    at_least_one = {
        "checkpoint.keep_latest": config.checkpoint.keep_latest,
        "logging.profile_num_steps": config.logging.profile_num_steps,
        "input.num_threads": 1 if inputs.num_threads is None else inputs.num_threads,
    }
    for name, number in at_least_one.items():
        if number < 1:
            raise ValueError(f"config.{name}={number}: must be at least 1.")
    if isinstance(config, FinetuneConfig):
        _check_search(config)
        if optimizer.trained == "head" and (config.model.dropout_fraction or config.model.stochastic_depth_fraction):
            raise ValueError(
                "config.model: with optimizer.trained='head' the features are frozen: dropout has no effect."
            )
    if optimizer.clip_global_norm is not None and optimizer.clip_global_norm <= 0:
        raise ValueError(f"config.optimizer.clip_global_norm={optimizer.clip_global_norm}: must be positive, or None.")


def _check_search(config: FinetuneConfig) -> None:
    rates, fraction = config.search.learning_rates, config.search.validation_fraction
    if not rates and not config.schedule.learning_rate:
        raise ValueError(
            "config.schedule.learning_rate=0.0 and config.search.learning_rates is empty: nothing would be learnt. Set "
            "one of them."
        )
    if not rates:
        return
    if config.schedule.learning_rate:
        raise ValueError(
            f"config.schedule.learning_rate={config.schedule.learning_rate} and config.search.learning_rates={rates} "
            "are both set. To use the one, add --config.search.learning_rates= (empty); to search, set the other to 0."
        )
    if min(rates) <= 0 or len(set(rates)) != len(rates):
        raise ValueError(f"config.search.learning_rates={rates}: must be positive and different from each other.")
    if not 0 < fraction < 1:
        raise ValueError(f"config.search.validation_fraction={fraction}: must lie between 0 and 1.")


def _refuse_without_effect(config: RunConfig) -> None:
    """A field set to something that another field makes meaningless: no setting is silently ignored."""
    inputs, polyak, schedule, optimizer = config.input, config.polyak, config.schedule, config.optimizer
    inception, adam = inputs.train_crop == "inception", optimizer.name == "adam"
    conditions = (
        ("polyak", polyak, ("start", "bias_correction"), polyak.factor is not None, "polyak.factor"),
        ("schedule", schedule, ("timescale",), schedule.decay == "rsqrt", "schedule.decay='rsqrt'"),
        ("schedule", schedule, ("drop_at_fraction",), schedule.decay == "staircase", "schedule.decay='staircase'"),
        ("optimizer", optimizer, ("beta1", "beta2", "epsilon"), adam, "optimizer.name='adam'"),
        ("optimizer", optimizer, ("momentum",), not adam, "optimizer.name='sgd'"),
        ("optimizer", optimizer, ("layer_decay",), optimizer.trained == "all", "optimizer.trained='all'"),
        ("input", inputs, ("crop_area_fraction", "crop_distribution"), inception, "an inception crop"),
        ("input", inputs, ("test_crop_fraction",), inputs.test_resize == "short_side", "short_side"),
    )
    for name, section, fields, has_effect, needed in conditions:
        for field in fields:
            default = next(f.default for f in dataclasses.fields(section) if f.name == field)
            if not has_effect and getattr(section, field) != default:
                raise ValueError(
                    f"config.{name}.{field}={getattr(section, field)!r} has no effect without {needed}: set that too, "
                    f"or leave {name}.{field} at {default!r}."
                )


def _check_sharding(config: RunConfig, num_devices: int) -> None:
    sizes = {
        "num_replicas": 1 if config.sharding.num_replicas is None else config.sharding.num_replicas,
        "num_model_shards": config.sharding.num_model_shards,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"config.sharding.{name}={size}: must be at least 1.")
    if num_devices % (sizes["num_replicas"] * sizes["num_model_shards"]):
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"config.sharding: {product} does not divide the {num_devices} device(s): choose numbers that do."
        )


def _check_batches(config: RunConfig, num_devices: int) -> None:
    accumulation = config.optimizer.accumulation_steps
    if accumulation < 1:
        raise ValueError(f"config.optimizer.accumulation_steps={accumulation}: must be at least 1.")
    shards = config.sharding.num_model_shards  # they see the same examples
    shares = num_devices // shards
    batches = {"global_batch": (config.global_batch, shares * accumulation)}
    if config.evaluation.global_batch is not None:
        batches["evaluation.global_batch"] = (config.evaluation.global_batch, shares)
    for name, (batch, divisor) in batches.items():
        if batch < 1 or batch % divisor:
            below = max(batch, 0) // divisor * divisor
            allowed = f"{below} or {below + divisor}" if below else str(divisor)
            over = f"{num_devices} device(s)" + (f" / {shards} model shards" if shards > 1 else "")
            over += f" x {accumulation} micro-batches" if divisor != shares else ""
            raise ValueError(f"config.{name}={batch} is not divisible by {over}: use {allowed}.")
