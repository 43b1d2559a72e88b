"""The fastest layout that fits: arithmetic leaves out what cannot win, the compiler decides between the best.

The global batch stays the recipe's unless other batches are asked for: another one is another run.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from vit_jax.config import RunConfig, ShardingConfig, resolve
from vit_jax.config.schema import Remat
from vit_jax.plan.arithmetic import arithmetic_memory, roofline
from vit_jax.plan.dataset import Dataset
from vit_jax.plan.estimate import Plan, make_plan
from vit_jax.plan.topology import Topology
from vit_jax.train.assemble import Assembly, architecture_of, assemble

REMAT: tuple[Remat, ...] = ("none", "dots", "full")
MODEL_SHARDS = (1, 2, 4)
DATA_AXES = (8, 16, 64)  # devices that share the parameters of FSDP, beside all of a slice
BATCH_FACTORS = (0.25, 0.5, 2, 4)
MAX_ACCUMULATION = 64
DOUBT = 0.15
"""How far arithmetic may be wrong about memory: what it puts this much above the limit may be compiled, at last."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to lay the run out.

    Attributes:
      config: of the run.
      needed_bytes: by arithmetic.
      step_seconds: by arithmetic.
      plan: compiled; None where that was not tried.
    """

    config: RunConfig
    needed_bytes: int
    step_seconds: float
    plan: Plan | None = None

    @property
    def seconds_per_image(self) -> float:
        return self.best_step_seconds / self.config.global_batch

    @property
    def best_step_seconds(self) -> float:
        """By the compiled schedule where there is one."""
        return self.plan.step_seconds if self.plan is not None and self.plan.fits else self.step_seconds


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
      candidates: all that were looked at, the fastest by arithmetic first.
      winner: the fastest that fits; None where none does.
      overrides: of the command line, that turn the recipe into the winner.
      usable_bytes: of a chip.
      num_refused: layouts that the config does not allow on this machine.
    """

    candidates: tuple[Candidate, ...]
    winner: Plan | None
    overrides: tuple[str, ...]
    usable_bytes: int
    num_refused: int


def search(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    *,
    price_per_chip_hour: float | None = None,
    num_tries: int = 4,
    other_batches: bool = False,
    can_compile: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Looks for the fastest layout that fits.

    Args:
      config: the recipe's.
      topology: the machine.
      dataset: what it would train on.
      price_per_chip_hour: for the winner's report.
      num_tries: candidates that are compiled at least, if there are so many; more only until one fits.
      other_batches: whether to look at other global batches too.
      can_compile: False decides by arithmetic alone.
      tell: receives a line before each compilation, which may take minutes.

    Raises:
      ValueError: the machine allows no layout at all.
    """
    refusals: list[str] = []
    candidates = list(_candidates(config, topology, dataset, other_batches, refusals))
    if not candidates:
        raise ValueError(f"No layout of this recipe is possible on {topology.name}: {refusals[0]}")
    usable = topology.fabric.usable_bytes
    limit = usable * (1 + (DOUBT if can_compile else 0))
    compiled: list[Candidate] = []
    for place in _worth_trying(candidates, usable, limit):
        if len(compiled) >= num_tries and any(c.plan is not None and c.plan.fits for c in compiled):
            break
        chosen = candidates[place]
        tell(
            f"planning {len(compiled) + 1} of {num_tries}: {' '.join(_overrides(config, chosen.config)) or 'as it is'}"
        )
        plan = make_plan(
            chosen.config, topology, dataset, price_per_chip_hour=price_per_chip_hour, can_compile=can_compile
        )
        candidates[place] = dataclasses.replace(chosen, plan=plan)
        compiled.append(candidates[place])
    fitting = [c for c in compiled if c.plan is not None and c.plan.fits]
    winner = min(fitting, key=lambda c: c.seconds_per_image, default=None)
    return Found(
        candidates=tuple(candidates),
        winner=winner.plan if winner is not None else None,
        overrides=tuple(_overrides(config, winner.config)) if winner is not None else (),
        usable_bytes=usable,
        num_refused=len(refusals),
    )


def _worth_trying(candidates: list[Candidate], usable_bytes: int, limit: float) -> list[int]:
    """Places in the order in which they are tried, none that is larger than the limit.

    The best of each rematerialisation policy comes first, then the others that fit by arithmetic, then those in doubt.
    """
    sure = [place for place, candidate in enumerate(candidates) if candidate.needed_bytes <= usable_bytes]
    doubtful = [place for place, candidate in enumerate(candidates) if usable_bytes < candidate.needed_bytes <= limit]
    first: dict[str, int] = {}
    for place in sure:
        first.setdefault(candidates[place].config.model.remat, place)
    return [*first.values(), *(place for place in sure if place not in first.values()), *doubtful]


def _candidates(
    config: RunConfig, topology: Topology, dataset: Dataset, other_batches: bool, refusals: list[str]
) -> Iterator[Candidate]:
    found = []
    factors = (1, *BATCH_FACTORS) if other_batches else (1,)
    for sharding in _shardings(topology):
        for factor in factors:
            changed = dataclasses.replace(config, sharding=sharding, global_batch=int(config.global_batch * factor))
            try:
                run = assemble(
                    _accumulating(changed, 1),
                    architecture_of(config, dataset.num_classes),
                    num_examples=dataset.num_examples,
                    devices=topology.stand_ins(),  # type: ignore[arg-type]
                )
            except ValueError as error:
                refusals.append(str(error))
                continue
            found += [_smallest_accumulation(run, topology, dataset, remat) for remat in REMAT]
    yield from sorted(found, key=lambda candidate: candidate.seconds_per_image)


def _smallest_accumulation(run: Assembly, topology: Topology, dataset: Dataset, remat: Remat) -> Candidate:
    """The policy with as few micro-batches as fit, or, where nothing fits, with the most that are allowed."""
    steps, best = 1, None
    while steps <= MAX_ACCUMULATION:
        config = _accumulating(run.config, steps)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        try:
            resolve(config, num_examples=dataset.num_examples, num_devices=topology.num_chips)
        except ValueError:
            break
        architecture = dataclasses.replace(run.architecture, remat=remat)
        tried = dataclasses.replace(run, config=config, architecture=architecture)
        needed = arithmetic_memory(tried, topology).total
        best = Candidate(config, needed, roofline(tried, topology).seconds)
        if needed <= topology.fabric.usable_bytes:
            break
        steps *= 2
    assert best is not None, "one micro-batch has been resolved before"
    return best


def _shardings(topology: Topology) -> Iterator[ShardingConfig]:
    together = topology.chips_per_slice if topology.is_tpu else topology.num_chips  # without a number of replicas
    for model in MODEL_SHARDS:
        if topology.chips_per_slice % model:
            continue
        yield ShardingConfig(parameters="replicated", num_model_shards=model)
        rest = together // model
        if rest > 1:
            yield ShardingConfig(parameters="fsdp", num_model_shards=model)
        for data in DATA_AXES:
            if data < rest and rest % data == 0:
                replicas = topology.num_chips // (data * model)
                yield ShardingConfig(parameters="fsdp", num_replicas=replicas, num_model_shards=model)


def _accumulating(config: Any, steps: int) -> Any:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, accumulation_steps=steps))


def _overrides(before: RunConfig, after: RunConfig) -> Iterator[str]:
    fields = (
        "global_batch",
        "model.remat",
        "optimizer.accumulation_steps",
        "sharding.parameters",
        "sharding.num_replicas",
        "sharding.num_model_shards",
    )
    for field in fields:
        old, new = _value(before, field), _value(after, field)
        if old != new:
            yield f"--config.{field}={new}"


def _value(config: Any, field: str) -> Any:
    for part in field.split("."):
        config = getattr(config, part)
    return config
