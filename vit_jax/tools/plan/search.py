"""The fastest layout that fits: arithmetic excludes most candidates, the compiler decides between the best.

The global batch stays the recipe's unless others are requested: another batch is another run.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax.config import RunConfig, ShardingConfig, resolve, validate
from vit_jax.config.network_options import Policy
from vit_jax.sharding.memory import require_formulas
from vit_jax.tools.plan.arithmetic import arithmetic_memory, roofline
from vit_jax.tools.plan.dataset import Dataset
from vit_jax.tools.plan.estimate import Plan, make_plan
from vit_jax.tools.plan.topology import Topology
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.layout import GROUPS, POLICIES, RESERVE, micro_batches

MODEL_SHARDS = (1, 2, 4)
BATCH_FACTORS = (0.25, 0.5, 2, 4)
DOUBT = 0.15
"""How far arithmetic may be wrong about memory: candidates up to this fraction above the limit are tried last."""
_SEARCHED = (
    *("global_batch", "model.remat", "optimizer.accumulation_steps"),
    *("sharding.parameters", "sharding.num_replicas", "sharding.num_model_shards"),
)


@dataclasses.dataclass(eq=False)
class Candidate:
    """One layout of the run, its figures by arithmetic."""

    config: RunConfig
    needed_bytes: int
    step_seconds: float
    plan: Plan | None = None  # in full; None where that was not tried

    @property
    def fits(self) -> bool:
        """True if its plan fits; False without one."""
        return self.plan is not None and self.plan.fits

    @property
    def seconds_per_image(self) -> float:
        """Time by the plan if it fits, otherwise by arithmetic."""
        seconds = self.plan.step_seconds if self.plan is not None and self.fits else None
        return (seconds or self.step_seconds) / self.config.global_batch


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    candidates: tuple[Candidate, ...]  # all layouts, the fastest by arithmetic first
    winner: Plan | None  # the fastest that fits; None where none does
    overrides: tuple[str, ...]  # options that turn the recipe into the winner
    usable_bytes: int  # of a chip
    num_refused: int  # layouts that the config does not allow on this machine


def search(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    *,
    price_per_chip_hour: float | None = None,
    num_tries: int = 4,
    other_batches: bool = False,
    can_compile: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Search for the fastest layout of a recipe that fits, with plans as `make_plan` makes them.

    Args:
      config: the recipe's.
      topology: the machine.
      dataset: what it would train on.
      price_per_chip_hour: for the winner's report.
      num_tries: candidates to plan; more until one fits.
      other_batches: try other global batches too.
      can_compile: False decides by arithmetic alone.
      report: receives a line before each plan; a compilation may take minutes.

    Raises:
      ValueError: the machine allows no layout, or the network has user-defined components, for
        which there is no formula.
    """
    validate(config)
    refusals: list[str] = []
    factors = (1, *BATCH_FACTORS) if other_batches else (1,)
    candidates = sorted(
        _candidates(config, topology, dataset, factors, refusals),
        key=lambda candidate: candidate.seconds_per_image,
    )
    if not candidates:
        raise ValueError(f"No layout of this recipe is possible on {topology.name}: {refusals[0]}")
    usable = topology.fabric.usable_bytes
    order = _in_order(candidates, usable, usable * (1 + (DOUBT if can_compile else 0)))
    for number, chosen in enumerate(order):
        if number >= num_tries and any(candidate.fits for candidate in order):
            break
        words = " ".join(_overrides(config, chosen.config)) or "the recipe as it is"
        report(f"planning {number + 1} of {num_tries}: {words}")
        chosen.plan = make_plan(
            chosen.config,
            topology,
            dataset,
            price_per_chip_hour=price_per_chip_hour,
            can_compile=can_compile,
        )
    fitting = (candidate for candidate in order if candidate.fits)
    winner = min(fitting, key=lambda candidate: candidate.seconds_per_image, default=None)
    return SearchResult(
        candidates=tuple(candidates),
        winner=winner.plan if winner is not None else None,
        overrides=tuple(_overrides(config, winner.config)) if winner is not None else (),
        usable_bytes=usable,
        num_refused=len(refusals),
    )


def _in_order(candidates: list[Candidate], usable_bytes: int, limit: float) -> list[Candidate]:
    """Return the candidates in the order in which they are tried, none that is larger than the limit.

    First come those with the least recomputation of all that fit by arithmetic, then the others,
    then those in doubt.
    """
    sure = [candidate for candidate in candidates if candidate.needed_bytes <= usable_bytes]
    doubtful = [
        candidate for candidate in candidates if usable_bytes < candidate.needed_bytes <= limit
    ]
    best = next(
        (
            policy
            for policy in POLICIES
            for candidate in sure
            if candidate.config.model.remat == policy
        ),
        None,
    )
    return [*sorted(sure, key=lambda candidate: candidate.config.model.remat != best), *doubtful]


def _candidates(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    factors: Sequence[float],
    refusals: list[str],
) -> Iterator[Candidate]:
    architecture = require_formulas(architecture_of(config, dataset.num_classes))
    for sharding, factor in itertools.product(_shardings(topology), factors):
        changed = dataclasses.replace(
            config, sharding=sharding, global_batch=int(config.global_batch * factor)
        )
        try:
            run = assemble(
                _changed(changed, accumulation_steps=1),
                architecture,
                num_examples=dataset.num_examples,
                devices=topology.stand_ins(),  # type: ignore[arg-type]
            )
        except ValueError as error:
            refusals.append(str(error))
            continue
        for remat in POLICIES:
            yield _smallest_accumulation(run, topology, dataset, remat)


def _smallest_accumulation(
    run: Assembly, topology: Topology, dataset: Dataset, remat: Policy
) -> Candidate:
    """Return the policy with as few micro-batches as fit, or, if nothing fits, with the most that are allowed."""
    best = None
    architecture = dataclasses.replace(run.architecture, remat=remat)
    for number in micro_batches(
        _changed(run.config, accumulation_steps=None), architecture, topology.stand_ins()
    ):
        config = _changed(run.config, accumulation_steps=number, remat=remat)
        try:
            resolve(config, num_examples=dataset.num_examples, num_devices=topology.num_chips)
        except ValueError:
            break
        tried = dataclasses.replace(run, config=config, architecture=architecture)
        needed = arithmetic_memory(tried, topology).total
        best = Candidate(config, needed, roofline(tried, topology).seconds)
        if needed <= (1 - RESERVE) * topology.fabric.usable_bytes:
            break
    assert best is not None, "one micro-batch has been resolved before"
    return best


def _shardings(topology: Topology) -> Iterator[ShardingConfig]:
    # Without a number of replicas
    together = topology.chips_per_slice if topology.is_tpu else topology.num_chips
    for model in MODEL_SHARDS:
        if topology.chips_per_slice % model:
            continue
        yield ShardingConfig(parameters="replicated", num_model_shards=model)
        rest = together // model
        if rest > 1:
            yield ShardingConfig(parameters="fsdp", num_model_shards=model)
        for data in GROUPS:
            if data < rest and rest % data == 0:
                replicas = topology.num_chips // (data * model)
                yield ShardingConfig(
                    parameters="fsdp", num_replicas=replicas, num_model_shards=model
                )


def _changed(config: Any, *, accumulation_steps: int | None, **of_model: Any) -> Any:
    optimizer = dataclasses.replace(config.optimizer, accumulation_steps=accumulation_steps)
    return dataclasses.replace(
        config, optimizer=optimizer, model=dataclasses.replace(config.model, **of_model)
    )


def _overrides(before: RunConfig, after: RunConfig) -> Iterator[str]:
    for field in _SEARCHED:
        value = operator.attrgetter(field)
        if value(before) != value(after):
            yield f"--config.{field}={value(after)}"
