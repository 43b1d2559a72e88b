"""What a search found, as a table for people and as JSON for programs."""

import dataclasses
from typing import Any

from vit_jax.plan.report import GIB, to_json, to_text
from vit_jax.plan.search import Candidate, Found


def found_to_text(found: Found) -> str:
    """A table of all candidates, then the winner's report and what to add to the command."""
    head = (
        "parameters  replicas  model  remat  parts   batch | arithmetic: GiB     ms | compiled: GiB     ms | verdict\n"
    )
    rows = "".join(_row(candidate, found) for candidate in found.candidates)
    refused = f"{found.num_refused} layouts are not possible on this machine\n" if found.num_refused else ""
    if found.winner is None:
        return (
            f"{head}{rows}{refused}\nNothing fits: a larger machine, a smaller batch or a smaller network is needed.\n"
        )
    words = " ".join(found.overrides) or "(nothing: the recipe as it is)"
    return f"{head}{rows}{refused}\n{to_text(found.winner)}\nadd to the command: {words}\n"


def _row(candidate: Candidate, found: Found) -> str:
    config, plan = candidate.config, candidate.plan
    needed = f"{candidate.needed_bytes / GIB:>15.2f} {1e3 * candidate.step_seconds:>6,.0f}"
    compiled, verdict = f"{'':>13} {'':>6}", "not tried"
    if plan is not None:
        size = "" if plan.needed_bytes is None else f"{plan.needed_bytes / GIB:.2f}"
        time = f"{1e3 * plan.step_seconds:,.0f}" if plan.timeline is not None else ""
        compiled, verdict = f"{size:>13} {time:>6}", "fits" if plan.fits else "does not fit"
        verdict = "fastest that fits" if plan is found.winner else verdict
    elif candidate.needed_bytes > found.usable_bytes:
        verdict = "too large by arithmetic"
    replicas = config.sharding.num_replicas or "slices"
    return (
        f"{config.sharding.parameters:<10}  {replicas!s:>8}  {config.sharding.num_model_shards:>5}  "
        f"{config.model.remat:<5}  {config.optimizer.accumulation_steps:>5}  {config.global_batch:>6} | {needed} | "
        f"{compiled} | {verdict}\n"
    )


def found_to_json(found: Found) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "candidates": [
            {
                "global_batch": c.config.global_batch,
                "remat": c.config.model.remat,
                "accumulation_steps": c.config.optimizer.accumulation_steps,
                "sharding": dataclasses.asdict(c.config.sharding),
                "arithmetic": {"needed_bytes": c.needed_bytes, "step_seconds": c.step_seconds},
                "plan": None if c.plan is None else to_json(c.plan),
            }
            for c in found.candidates
        ],
        "winner": None if found.winner is None else to_json(found.winner),
        "overrides": list(found.overrides),
        "num_refused": found.num_refused,
    }
