"""Lengths of a run in steps, converted from durations such as "300 epochs".

`ScheduleSteps` and `RunSteps` are the one list of lengths: a field states the duration that it is
converted from.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config.durations import parse_duration
from vit_jax.config.field_checks import reject
from vit_jax.config.schema import PhaseConfig, PretrainConfig, RunConfig


def _length(field: str, *, is_point: bool = False) -> Any:
    """Return a dataclass field that is converted from a field of the config.

    `is_point` marks a point in time, which counts the examples of earlier phases. Periods, and
    lengths at the end of a run, have the batch of the last phase.
    """
    return dataclasses.field(metadata={"config_field": field, "is_point": is_point})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSteps:
    """Lengths of the learning rate's schedule, in steps."""

    total: int = _length("total", is_point=True)
    warmup: int = _length("schedule.warmup", is_point=True)
    timescale: int = _length("schedule.timescale")
    cooldown: int = _length("schedule.cooldown")


@dataclasses.dataclass(frozen=True)
class Phase:
    """An earlier phase of a run, with its sizes."""

    last_step: int
    image_size: tuple[int, int]
    global_batch: int
    patch_dropout: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSteps(ScheduleSteps):
    """Every length of a run, in steps."""

    polyak_start: int = _length("polyak.start", is_point=True)
    evaluate_every: int = _length("evaluation.every")
    checkpoint_every: int = _length("checkpoint.every")
    log_every: int = _length("logging.every")
    evaluators_every: Mapping[str, int] = dataclasses.field(default_factory=dict)
    earlier_phases: tuple[Phase, ...] = ()


@dataclasses.dataclass(frozen=True)
class Clock:
    """A conversion of durations of one run into steps.

    Attributes:
      global_batch: number of examples of a step.
      num_examples: size of the training split.
      total_steps: length of the run; None while it is itself being converted.
      earlier: last step and batch of each earlier phase.
    """

    global_batch: int
    num_examples: int
    total_steps: int | None = None
    earlier: tuple[tuple[int, int], ...] = ()

    def to_steps(self, text: str) -> int:
        """Return whole steps, rounded; 0 only for a duration of 0.

        With earlier phases, the duration begins at the first step of the run.
        """
        value, unit = parse_duration(text)
        if unit == "fraction":
            if self.total_steps is None:
                rule = "the length of the run cannot be a fraction of itself"
                raise ValueError(f"total={text!r}: {rule}.")
            steps = value * self.total_steps
        elif unit == "epochs":
            steps = self._count_steps(value * self.num_examples)
        elif unit == "examples":
            steps = self._count_steps(value)
        else:
            steps = value
        if value == 0:
            return 0
        return max(round(steps), 1)

    def _count_steps(self, examples: float) -> float:
        """Return the steps from the start of the run that take these examples."""
        first = 0
        for last, batch in self.earlier:
            examples_of_phase = (last - first) * batch
            if examples <= examples_of_phase:
                return first + examples / batch
            examples = examples - examples_of_phase
            first = last
        return first + examples / self.global_batch


def convert_lengths(config: RunConfig, num_examples: int) -> RunSteps:
    """Convert durations to steps, for any devices.

    Raises:
      ValueError: durations that do not fit each other.
    """
    clock = Clock(config.global_batch, num_examples)
    phases = _convert_phases(config, clock)
    earlier = tuple((phase.last_step, phase.global_batch) for phase in phases)
    clock_of_run = dataclasses.replace(clock, earlier=earlier)

    total = clock_of_run.to_steps(config.total)
    too_large = _find_large_batch(config, num_examples)
    if total < 1 and too_large:
        raise ValueError(f"config.{too_large}")
    if total < 1:
        raise ValueError(f"config.total={config.total!r}: must be at least one step.")

    clock = dataclasses.replace(clock, total_steps=total)
    clock_of_run = dataclasses.replace(clock_of_run, total_steps=total)
    converted = {}
    for field in dataclasses.fields(RunSteps):
        if "config_field" not in field.metadata:
            continue
        duration = _get_duration(config, field.metadata["config_field"])
        if field.metadata["is_point"]:
            converted[field.name] = clock_of_run.to_steps(duration)
        else:
            converted[field.name] = clock.to_steps(duration)
    evaluators_every = {}
    for name, evaluator in config.evaluation.evaluators.items():
        evaluators_every[name] = clock.to_steps(evaluator.every or config.evaluation.every)

    steps = RunSteps(**converted, evaluators_every=evaluators_every, earlier_phases=phases)
    reject(too_large or problem for problem in _find_problems(config, steps))
    return steps


def _get_duration(config: RunConfig, path: str) -> Any:
    """Return the value of a field such as "schedule.warmup"."""
    return functools.reduce(getattr, path.split("."), config)


def get_phases(config: RunConfig) -> Mapping[str, PhaseConfig]:
    """Return the earlier phases of pre-training; fine-tuning has none."""
    if isinstance(config, PretrainConfig):
        return config.phases
    return {}


def list_patch_dropouts(config: RunConfig) -> list[str]:
    """Return `field=value` of each patch dropout of a run that is not 0."""
    values: dict[str, float | None] = {"input.patch_dropout": config.input.patch_dropout}
    for name, phase in get_phases(config).items():
        values[f"phases.{name}.patch_dropout"] = phase.patch_dropout
    return [f"{field}={value}" for field, value in values.items() if value]


def _convert_phases(config: RunConfig, clock: Clock) -> tuple[Phase, ...]:
    """Return the earlier phases of a run, in order; a fraction is a part of `config.total`."""
    phases: list[Phase] = []
    earlier: tuple[tuple[int, int], ...] = ()
    first = 0
    total, total_unit = parse_duration(config.total)
    for name, phase in get_phases(config).items():
        value, unit = parse_duration(phase.until)
        until: str = phase.until
        if unit == "fraction" and total_unit != "fraction":
            until = f"{value * total} {total_unit}"
        batch = phase.global_batch or config.global_batch
        clock_of_phase = dataclasses.replace(clock, global_batch=batch, earlier=earlier)
        last = clock_of_phase.to_steps(until)
        if last <= first:
            raise ValueError(
                f"config.phases.{name}.until={phase.until!r}: must be after step {first}, and is "
                f"step {last}. Give phases in order."
            )

        image_size = phase.image_size or config.input.pixels
        patch_dropout = phase.patch_dropout
        if patch_dropout is None:
            patch_dropout = config.input.patch_dropout
        phases.append(Phase(last, image_size, batch, patch_dropout))
        earlier = (*earlier, (last, batch))
        first = last
    return tuple(phases)


def _find_large_batch(config: RunConfig, num_examples: int) -> str:
    """Return the error for a batch larger than an epoch; "" for other batches."""
    if config.global_batch <= num_examples:
        return ""
    return (
        f"global_batch={config.global_batch}: must be at most the {num_examples} training images, "
        "or lengths in epochs are less than one step."
    )


def _find_problems(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    """Yield lengths that do not fit into the run or to each other."""
    if steps.earlier_phases:
        last = steps.earlier_phases[-1].last_step
        if last >= steps.total:
            rule = f"must end before the run, and the last one ends at step {last} of {steps.total}"
            yield f"phases: {rule}. Shorten it."
    yield from _find_warmup_problems(config, steps)
    yield from _find_decay_problems(config, steps)
    yield from _find_period_problems(config, steps)
    yield from _find_patience_problem(config, steps)


def _find_warmup_problems(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    """Yield problems of the warm-up, and of the cool-down that follows it."""
    schedule = config.schedule
    after_warmup = steps.total - steps.warmup
    if after_warmup <= 0:
        rule = f"is {steps.warmup} of {steps.total} steps and must end before the run"
        yield f"schedule.warmup={schedule.warmup!r}: {rule}. Shorten it, or lengthen config.total."
    if schedule.decay == "wsd" and not 1 <= steps.cooldown <= after_warmup:
        rule = f"is {steps.cooldown} of {steps.total} steps and must be 1 to {after_warmup}"
        yield f"schedule.cooldown={schedule.cooldown!r}: {rule}, after the warm-up."


def _find_decay_problems(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    """Yield problems of the decay after the warm-up, and of the Polyak average."""
    schedule = config.schedule
    if schedule.decay == "rsqrt" and steps.timescale < 1:
        yield f"schedule.timescale={schedule.timescale!r}: must be at least 1 step for rsqrt."
    if config.polyak.factor is not None and steps.polyak_start >= steps.total:
        rule = f"is step {steps.polyak_start} of {steps.total} and must be before the end"
        yield f"polyak.start={config.polyak.start!r}: {rule}. Or set polyak.factor=None."
    if schedule.decay != "staircase":
        return
    drops = schedule.drop_at_fraction
    first = round(drops[0] * steps.total)
    if first < steps.warmup:
        yield (
            f"schedule.drop_at_fraction={drops}: must be after the warm-up, and step {first} is "
            f"before its end at step {steps.warmup}. Shorten the warm-up, or drop later."
        )


def _find_period_problems(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    first_profiled = config.logging.profile_start_step
    if first_profiled is not None and not 1 <= first_profiled <= steps.total:
        rule = f"must be a step of the run, 1 to {steps.total}"
        yield f"logging.profile_start_step={first_profiled}: {rule}."
    periods = {"evaluation": steps.evaluate_every}
    for name, every in steps.evaluators_every.items():
        periods[f"evaluation.evaluators.{name}"] = every
    periods["checkpoint"] = steps.checkpoint_every
    periods["logging"] = steps.log_every
    for section, every in periods.items():
        if every < 1:
            yield f"{section}.every: must be at least one step."


def _find_patience_problem(config: RunConfig, steps: RunSteps) -> Iterator[str]:
    patience = config.stop_early.patience
    if patience is None:
        return
    metric = config.checkpoint.best_metric
    periods = []
    for name, period in steps.evaluators_every.items():
        if metric.startswith(f"{name}_"):
            periods.append(period)
    every = min(periods, default=steps.evaluate_every)
    num_evaluations = -(-steps.total // every)
    if num_evaluations < patience + 2:
        yield (
            f"stop_early.patience={patience}: must be at most {num_evaluations - 2}, for "
            f"{num_evaluations} evaluations of {metric}, one every {every} of {steps.total} steps. "
            "Lower it, or evaluate more often."
        )
