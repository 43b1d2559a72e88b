"""The fastest layout that fits: the compiler decides between the best by arithmetic.

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
from vit_jax.tools.plan.arithmetic import estimate_memory, estimate_roofline
from vit_jax.tools.plan.dataset import Dataset
from vit_jax.tools.plan.estimate import Network, Plan, find_network, make_plan
from vit_jax.tools.plan.topology import Topology
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.layout import GROUPS, POLICIES, RESERVE, micro_batches
from vit_jax.train.starting_weights import set_open_size

MODEL_SHARDS = (1, 2, 4)
BATCH_FACTORS = (0.25, 0.5, 2, 4)
DOUBT = 0.15
"""Error of the arithmetic for memory.

Candidates up to this fraction above the limit are tried last.
"""
_SEARCHED = (
    "global_batch",
    "model.remat",
    "optimizer.accumulation_steps",
    "sharding.parameters",
    "sharding.num_replicas",
    "sharding.num_model_shards",
)


@dataclasses.dataclass(eq=False)
class Candidate:
    """One layout of the run, with memory and time by arithmetic."""

    config: RunConfig
    needed_bytes: int
    step_seconds: float
    plan: Plan | None = None  # the complete plan; None if it was not tried

    @property
    def fits(self) -> bool:
        """True if its plan fits; False without one."""
        return self.plan is not None and self.plan.fits

    @property
    def seconds_per_image(self) -> float:
        """Time by the plan if it fits, otherwise by arithmetic."""
        step_seconds = None
        if self.plan is not None and self.plan.fits:
            step_seconds = self.plan.step_seconds
        return (step_seconds or self.step_seconds) / self.config.global_batch


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    candidates: tuple[Candidate, ...]  # all layouts, the fastest by arithmetic first
    winner: Plan | None  # the fastest that fits; None if none fits
    overrides: tuple[str, ...]  # options that turn the recipe into the winner
    usable_bytes: int  # memory of a chip
    num_rejected: int  # layouts that the config does not allow on this machine


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
      config: config of the recipe.
      topology: the machine.
      dataset: its training data.
      price_per_chip_hour: for the winner's report.
      num_tries: candidates to plan; more until one fits.
      other_batches: try other global batches too.
      can_compile: False compares candidates by arithmetic alone.
      report: receives a line before each plan; a compilation may take minutes.

    Raises:
      ValueError: the machine allows no layout, or no formula knows the user-defined components.
    """
    validate(config)
    network = find_network(config, dataset.num_classes)
    factors = (1, *BATCH_FACTORS) if other_batches else (1,)
    candidates, rejections = _build_candidates(config, topology, dataset, network, factors)
    if not candidates:
        problem = f"No layout of this recipe is possible on {topology.name}"
        raise ValueError(f"{problem}: {rejections[0]}")

    candidates.sort(key=_get_cost)
    doubt = DOUBT if can_compile else 0.0
    ordered = _order_candidates(candidates, topology.fabric.usable_bytes, doubt)
    for number, candidate in enumerate(ordered):
        if number >= num_tries and any(tried.fits for tried in ordered):
            break
        overrides = " ".join(_list_overrides(config, candidate.config))
        report(f"planning {number + 1} of {num_tries}: {overrides or 'the recipe as it is'}")
        candidate.plan = make_plan(
            candidate.config,
            topology,
            dataset,
            network=network,
            price_per_chip_hour=price_per_chip_hour,
            can_compile=can_compile,
        )

    result = SearchResult(
        candidates=tuple(candidates),
        winner=None,
        overrides=(),
        usable_bytes=topology.fabric.usable_bytes,
        num_rejected=len(rejections),
    )
    return _add_winner(result, config, ordered)


def _add_winner(
    result: SearchResult,
    config: RunConfig,
    planned: Sequence[Candidate],
) -> SearchResult:
    """Return the result with the fastest candidate that fits, if one does."""
    fitting = [candidate for candidate in planned if candidate.fits]
    winner = min(fitting, key=_get_cost, default=None)
    if winner is None:
        return result
    overrides = _list_overrides(config, winner.config)
    return dataclasses.replace(result, winner=winner.plan, overrides=overrides)


def _get_cost(candidate: Candidate) -> float:
    return candidate.seconds_per_image


def _order_candidates(
    candidates: list[Candidate],
    usable_bytes: int,
    doubt: float,
) -> list[Candidate]:
    """Return the candidates in the order in which they are tried.

    First come candidates with the least recomputation of all that fit by arithmetic, then the
    others that fit, then those in doubt: up to this fraction too large.
    """
    sure = [candidate for candidate in candidates if candidate.needed_bytes <= usable_bytes]
    limit = usable_bytes * (1 + doubt)
    doubtful = [
        candidate for candidate in candidates if usable_bytes < candidate.needed_bytes <= limit
    ]
    fitting_policies = {candidate.config.model.remat for candidate in sure}
    for policy in POLICIES:
        if policy in fitting_policies:
            sure.sort(key=lambda candidate: candidate.config.model.remat != policy)
            break
    return sure + doubtful


def _build_candidates(
    config: RunConfig,
    topology: Topology,
    dataset: Dataset,
    network: Network,
    factors: Sequence[float],
) -> tuple[list[Candidate], list[str]]:
    """Return the possible layouts, and the reasons against the others."""
    architecture = require_formulas(network.architecture)
    config = set_open_size(config, architecture)
    candidates = []
    rejections = []
    for sharding, factor in itertools.product(_list_shardings(topology), factors):
        global_batch = int(config.global_batch * factor)
        changed = dataclasses.replace(config, sharding=sharding, global_batch=global_batch)
        try:
            run = assemble(
                _replace_options(changed, accumulation_steps=1),
                architecture,
                num_examples=dataset.num_examples,
                devices=topology.stand_ins(),  # type: ignore[arg-type]
            )
        except ValueError as error:
            rejections.append(str(error))
            continue
        for remat in POLICIES:
            candidates.append(_find_accumulation(run, topology, dataset, remat))
    return candidates, rejections


def _find_accumulation(
    run: Assembly,
    topology: Topology,
    dataset: Dataset,
    remat: Policy,
) -> Candidate:
    """Return the policy with the fewest micro-batches that fit; if none fit, with the most."""
    candidate = None
    builder = run.builder.replace_architecture(remat=remat)
    config = _replace_options(run.config, accumulation_steps=None)
    for number in micro_batches(config, builder.architecture, topology.stand_ins()):
        config = _replace_options(run.config, accumulation_steps=number, remat=remat)
        try:
            resolve(config, num_examples=dataset.num_examples, num_devices=topology.num_chips)
        except ValueError:
            break
        changed_run = dataclasses.replace(run, config=config, builder=builder)
        needed_bytes = estimate_memory(changed_run, topology).total
        candidate = Candidate(
            config,
            needed_bytes,
            estimate_roofline(changed_run, topology).seconds,
        )
        if needed_bytes <= (1 - RESERVE) * topology.fabric.usable_bytes:
            break
    assert candidate is not None, "one micro-batch has been resolved before"
    return candidate


def _list_shardings(topology: Topology) -> Iterator[ShardingConfig]:
    """Yield the shardings that divide the machine."""
    # Chips of one replica, if the config states no number of replicas
    chips_together = topology.chips_per_slice if topology.is_tpu else topology.num_chips
    for num_model_shards in MODEL_SHARDS:
        if topology.chips_per_slice % num_model_shards:
            continue
        yield ShardingConfig(parameters="replicated", num_model_shards=num_model_shards)
        num_data_shards = chips_together // num_model_shards
        if num_data_shards > 1:
            yield ShardingConfig(parameters="fsdp", num_model_shards=num_model_shards)
        for group_size in GROUPS:
            if group_size < num_data_shards and num_data_shards % group_size == 0:
                yield ShardingConfig(
                    parameters="fsdp",
                    num_replicas=topology.num_chips // (group_size * num_model_shards),
                    num_model_shards=num_model_shards,
                )


def _replace_options(
    config: Any,
    *,
    accumulation_steps: int | None,
    **model_fields: Any,
) -> Any:
    """Return the config with other micro-batches and other fields of the model."""
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, accumulation_steps=accumulation_steps),
        model=dataclasses.replace(config.model, **model_fields),
    )


def _list_overrides(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """Return the options that turn one config into another."""
    overrides = []
    for field in _SEARCHED:
        get_value = operator.attrgetter(field)
        value = get_value(after)
        if get_value(before) != value:
            overrides.append(f"--config.{field}={value}")
    return tuple(overrides)
