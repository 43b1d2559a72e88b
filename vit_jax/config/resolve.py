"""Turns a config's durations into steps and checks its values against the dataset and the devices."""

import dataclasses
from collections.abc import Iterator, Mapping

from vit_jax.config.durations import Clock, parse
from vit_jax.config.schema import PretrainConfig, RunConfig
from vit_jax.config.validate import validate


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps with sizes of their own, before the last part of a run."""

    last_step: int
    image_size: tuple[int, int]
    global_batch: int


@dataclasses.dataclass(frozen=True)
class RunSteps:
    """Every length of a run, in steps."""

    total: int
    warmup: int
    timescale: int
    cooldown: int
    polyak_start: int
    evaluate_every: int
    checkpoint_every: int
    log_every: int
    evaluators_every: Mapping[str, int] = dataclasses.field(default_factory=dict)
    phases: tuple[Phase, ...] = ()


def resolve(config: RunConfig, *, num_examples: int, num_devices: int) -> RunSteps:
    """Converts durations to steps, for a training split of `num_examples` and the devices of all processes.

    Raises:
      ValueError: a value that cannot work, with what would.
    """
    validate(config)
    for problem in _of_devices(config, num_devices):  # the first
        raise ValueError(f"config.{problem}")
    return lengths(config, num_examples)


def lengths(config: RunConfig, num_examples: int) -> RunSteps:
    """Converts durations to steps, whatever the devices.

    Points in time count the examples of earlier phases; periods, and lengths at the end, are of the last part's batch.

    Raises:
      ValueError: durations that do not fit each other.
    """
    clock = Clock(config.global_batch, num_examples)
    phases = _phases(config, clock)
    start = dataclasses.replace(clock, earlier=tuple((phase.last_step, phase.global_batch) for phase in phases))
    total = start.to_steps(config.total)
    if total < 1:
        raise ValueError(
            _too_large(config, num_examples) or f"config.total={config.total!r}: must be at least one step."
        )
    start, clock = (dataclasses.replace(each, total_steps=total) for each in (start, clock))
    steps = RunSteps(
        total=total,
        warmup=start.to_steps(config.schedule.warmup),
        timescale=clock.to_steps(config.schedule.timescale),
        cooldown=clock.to_steps(config.schedule.cooldown),
        polyak_start=start.to_steps(config.polyak.start),
        evaluate_every=clock.to_steps(config.evaluation.every),
        checkpoint_every=clock.to_steps(config.checkpoint.every),
        log_every=clock.to_steps(config.logging.every),
        evaluators_every={
            name: clock.to_steps(evaluator.every or config.evaluation.every)
            for name, evaluator in config.evaluation.evaluators.items()
        },
        phases=phases,
    )
    for problem in _of_lengths(config, steps):  # the first
        raise ValueError(_too_large(config, num_examples) or f"config.{problem}")
    return steps


def _phases(config: RunConfig, clock: Clock) -> tuple[Phase, ...]:
    """Return the earlier parts of a run, in order; a fraction is of `config.total`, in its unit."""
    phases: list[Phase] = []
    total, unit = parse(config.total)
    for name, phase in config.phases.items() if isinstance(config, PretrainConfig) else ():
        value, own_unit = parse(phase.until)
        until = f"{value * total} {unit}" if own_unit == "fraction" and unit != "fraction" else phase.until
        before = tuple((earlier.last_step, earlier.global_batch) for earlier in phases)
        batch, first = phase.global_batch or config.global_batch, before[-1][0] if before else 0
        last = dataclasses.replace(clock, global_batch=batch, earlier=before).to_steps(until)
        if last <= first:
            raise ValueError(
                f"config.phases.{name}.until={phase.until!r} is step {last}: must be after step {first}, at which it "
                "begins. Give phases in order."
            )
        phases.append(Phase(last, phase.image_size or config.input.image_size, batch))
    return tuple(phases)


def _too_large(config: RunConfig, num_examples: int) -> str:
    """Return the error for a batch so large that an epoch is less than a step; "" for other batches."""
    if config.global_batch <= num_examples:
        return ""
    return (
        f"config.global_batch={config.global_batch}: must be at most the {num_examples} training images for these "
        f"lengths, since an epoch is less than one step. Use {num_examples} or less."
    )


def _of_lengths(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    schedule, start = config.schedule, config.logging.profile_start_step
    if steps.phases and steps.phases[-1].last_step >= steps.total:
        yield (
            f"phases: the last one ends at step {steps.phases[-1].last_step} of {steps.total}: must end before the run "
            "does. Shorten it."
        )
    if steps.warmup >= steps.total:
        yield (
            f"schedule.warmup={schedule.warmup!r} is {steps.warmup} of {steps.total} steps: it must end before the run "
            "does. Shorten the warm-up or lengthen the run (config.total)."
        )
    if schedule.decay == "wsd" and not 1 <= steps.cooldown <= steps.total - steps.warmup:
        yield (
            f"schedule.cooldown={schedule.cooldown!r} is {steps.cooldown} of {steps.total} steps: must be 1 to "
            f"{steps.total - steps.warmup}, the steps after the warm-up. Choose another length."
        )
    if schedule.decay == "rsqrt" and steps.timescale < 1:
        yield f"schedule.timescale={schedule.timescale!r}: rsqrt needs at least 1 step."
    if config.polyak.factor is not None and steps.polyak_start >= steps.total:
        yield (
            f"polyak.start={config.polyak.start!r} is step {steps.polyak_start} of {steps.total}: there would be no "
            "average. Start earlier, or set config.polyak.factor=None."
        )
    first_drop = round(schedule.drop_at_fraction[0] * steps.total)
    if schedule.decay == "staircase" and first_drop < steps.warmup:
        yield (
            f"schedule.drop_at_fraction={schedule.drop_at_fraction} lowers the rate at step {first_drop}, before the "
            f"warm-up has ended at step {steps.warmup}: shorten warmup, or drop later."
        )
    if start is not None and not 1 <= start <= steps.total:
        yield f"logging.profile_start_step={start}: the run has the steps 1 to {steps.total}."
    evaluators = {f"evaluation.evaluators.{name}": every for name, every in steps.evaluators_every.items()}
    evaluations = {"evaluation": steps.evaluate_every} | evaluators
    for section, every in (evaluations | {"checkpoint": steps.checkpoint_every, "logging": steps.log_every}).items():
        if every < 1:
            yield f"{section}.every must be at least one step."
    yield from _of_early_stopping(config, steps)


def _of_early_stopping(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    patience, metric = config.stop_early.patience, config.checkpoint.best_metric
    of_metric = [every for name, every in steps.evaluators_every.items() if metric.startswith(f"{name}_")]
    every = min(of_metric, default=steps.evaluate_every)
    num_evaluations = -(-steps.total // every)
    if patience is not None and num_evaluations < patience + 2:
        yield (
            f"stop_early.patience={patience}: the run has {num_evaluations} evaluations of {metric}, one every {every} "
            f"of {steps.total} steps, so it could never stop early. Evaluate more often, or lower the patience."
        )


def _of_devices(config: RunConfig, num_devices: int) -> Iterator[str]:
    replicas, shards = config.sharding.num_replicas or 1, config.sharding.num_model_shards
    if num_devices % (replicas * shards):
        yield (
            f"sharding: num_replicas={replicas} x num_model_shards={shards} does not divide the {num_devices} "
            "device(s): choose numbers that do."
        )
    accumulation = config.optimizer.accumulation_steps or 1
    shares = num_devices // shards  # model shards see the same examples
    batches = {"global_batch": (config.global_batch, shares * accumulation)}
    for name, phase in config.phases.items() if isinstance(config, PretrainConfig) else ():
        if phase.global_batch is not None:
            batches[f"phases.{name}.global_batch"] = (phase.global_batch, shares * accumulation)
    if config.evaluation.global_batch is not None:
        batches["evaluation.global_batch"] = (config.evaluation.global_batch, shares)
    for name, (batch, divisor) in batches.items():
        if batch < 1 or batch % divisor:
            below = max(batch, 0) // divisor * divisor
            allowed = f"{below} or {below + divisor}" if below else str(divisor)
            over = f"{num_devices} device(s)" + (f" / {shards} model shards" if shards > 1 else "")
            over += f" x {accumulation} micro-batches" if divisor != shares else ""
            wrong = "divisible by" if batch % divisor else "positive, and divisible by"
            yield f"{name}={batch} is not {wrong} {over}: use {allowed}."
