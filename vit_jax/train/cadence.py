"""Evaluators with the steps after which they run."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_jax import hosts
from vit_jax.data.unreadable import TooManyUnreadable, UnreadableLog
from vit_jax.train.state import TrainState

if TYPE_CHECKING:
    from vit_jax.evals import Evaluator


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Due after every `every` steps, at least 1, and after the `last` step of the run."""

    every: int
    last: int

    def is_due(self, step: int) -> bool:
        """Return whether it is due after this number of steps; never after 0."""
        if step == 0:
            return False
        return step % self.every == 0 or step == self.last


@dataclasses.dataclass(frozen=True)
class ScheduledEvaluator:
    """An evaluator with the prefix of its results and its cadence.

    Attributes:
      prefix: "test" makes "test_accuracy" of the evaluator's "accuracy".
      evaluator: measures training states.
      cadence: when it is due.
      logs: unreadable images of the splits that it reads.
    """

    prefix: str
    evaluator: "Evaluator[TrainState]"
    cadence: Cadence
    logs: Sequence[UnreadableLog] = ()

    def run(self, state: TrainState) -> dict[str, float]:
        """Return the prefixed results on a training state; all processes get those of the first.

        Raises:
          TooManyUnreadable: in every process, if one has met too many unreadable images.
        """
        results = {}
        for name, value in self.evaluator.run(state):
            results[f"{self.prefix}_{name}"] = float(value)
        problems = [log.problem for log in self.logs if log.problem]

        gathered: list[tuple[dict[str, float], list[str]]] = hosts.gather((results, problems))
        for _, problems_of_process in gathered:
            if problems_of_process:
                raise TooManyUnreadable(f"{self.prefix}: {problems_of_process[0]}")
        results_of_first, _ = gathered[0]
        return results_of_first


def run_all(evaluators: Sequence[ScheduledEvaluator], state: TrainState) -> dict[str, float]:
    """Return the results of several evaluators."""
    results: dict[str, float] = {}
    for evaluator in evaluators:
        results |= evaluator.run(state)
    return results
