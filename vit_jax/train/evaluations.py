"""The evaluations of a run: each an evaluator, the prefix of its results, and when it is due."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax.arrays import Batch
from vit_jax.data.records import Source
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals import ClassificationEvaluator, Evaluator, Split
from vit_jax.references import is_reference, resolve
from vit_jax.train.assemble import Assembly, Datasets, open_evaluation_batches
from vit_jax.train.cadence import Cadence


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluator, when it is due, and what its results are called.

    Attributes:
      prefix: "test" makes "test_accuracy" of the evaluator's "accuracy".
      evaluator: knows neither.
      cadence: after which steps.
    """

    prefix: str
    evaluator: Evaluator
    cadence: Cadence

    def run(self, state: Any) -> dict[str, float]:
        """The evaluator's results on a training state, under the prefix."""
        return {f"{self.prefix}_{name}": float(value) for name, value in self.evaluator.run(state)}


def build_evaluations(run: Assembly, data: Datasets, split: str, after_batch: Callable[[], object]) -> list[Evaluation]:
    """The evaluation of `data.test`, and those of `config.evaluation.evaluators`.

    Args:
      run: the run's parts.
      data: open datasets, one for each evaluator.
      split: what `data.test` is: "test", or "validation" in a search.
      after_batch: called after each batch of any evaluator; may raise, which ends the evaluation.

    Raises:
      ValueError: a referenced evaluator that cannot be built or has no method `run`.
    """

    def open_split(name: str, source: Source) -> Split:
        log = UnreadableLog(source, run.config.input.max_unreadable)  # of all evaluations together

        @contextlib.contextmanager
        def open_batches() -> Iterator[Iterator[Batch]]:
            with open_evaluation_batches(run, source, log) as batches:
                yield _calling(batches, after_batch)

        return Split(name, source.class_names, len(source), open_batches)

    total, steps = run.steps.total, run.steps
    test = ClassificationEvaluator(open_split(split, data.test), run.evaluation_step)
    evaluations = [Evaluation(split, test, Cadence(steps.evaluate_every, total))]
    for name, config in run.config.evaluation.evaluators.items():
        its_split = open_split(name, data.others[name])
        evaluator: Evaluator = ClassificationEvaluator(its_split, run.evaluation_step)
        if is_reference(config.kind):
            evaluator = _build_referenced(name, config, its_split, run)
        evaluations.append(Evaluation(name, evaluator, Cadence(steps.evaluators_every[name], total)))
    return evaluations


def run_all(evaluations: Sequence[Evaluation], state: Any) -> dict[str, float]:
    """The results of several evaluations."""
    return {name: value for evaluation in evaluations for name, value in evaluation.run(state).items()}


def _build_referenced(name: str, config: Any, split: Split, run: Assembly) -> Evaluator:
    field = f"config.evaluation.evaluators.{name}"
    try:
        evaluator = resolve(config.kind, f"{field}.kind")(split, run, **config.arguments)
    except TypeError as error:
        raise ValueError(
            f"{field}: {config.kind!r} cannot be called with (split, run) and arguments="
            f"{dict(config.arguments)}: {error}"
        ) from error
    if not callable(getattr(evaluator, "run", None)):
        raise ValueError(f"{field}.kind={config.kind!r} gives {type(evaluator).__name__}, which has no method run.")
    return evaluator  # type: ignore[no-any-return]


def _calling(batches: Iterator[Batch], after_batch: Callable[[], object]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        after_batch()
