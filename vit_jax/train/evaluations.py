"""The evaluations of a run: each an evaluator, the prefix of its results, and when it is due."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax.arrays import Batch
from vit_jax.config import EvaluatorConfig
from vit_jax.data.records import Source
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals import ClassificationEvaluator, Evaluator, Split
from vit_jax.references import called, is_reference, resolve
from vit_jax.train.assemble import Assembly, Datasets, open_evaluation_batches


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Due after every `every` steps, at least 1, and after the `last` of the run."""

    every: int
    last: int

    def is_due(self, step: int) -> bool:
        """Whether it is, after this many steps; never after none."""
        return step > 0 and (step % self.every == 0 or step == self.last)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluator, when it is due, and what its results are called; it knows neither."""

    prefix: str  # "test" makes "test_accuracy" of the evaluator's "accuracy"
    evaluator: Evaluator
    cadence: Cadence

    def run(self, state: Any) -> dict[str, float]:
        """The evaluator's results on a training state, under the prefix."""
        return {f"{self.prefix}_{name}": float(value) for name, value in self.evaluator.run(state)}


def build_evaluations(run: Assembly, data: Datasets, split: str, after_batch: Callable[[], object]) -> list[Evaluation]:
    """The evaluation of `data.test`, which is "test" or in a search "validation", and `config.evaluation.evaluators`.

    `after_batch` is called after each batch of any evaluator; may raise, which ends the evaluation.

    Raises:
      ValueError: a referenced evaluator that cannot be built or has no method `run`.
    """

    def open_split(name: str, source: Source) -> Split:
        inputs = run.config.input
        log = UnreadableLog(source, inputs.max_unreadable, inputs.max_image_megapixels)  # of all evaluations together

        @contextlib.contextmanager
        def open_batches() -> Iterator[Iterator[Batch]]:
            def interruptible() -> Iterator[Batch]:
                for batch in batches:
                    yield batch
                    after_batch()

            with open_evaluation_batches(run, source, log) as batches:
                yield interruptible()

        return Split(name, source.class_names, len(source), open_batches)

    def evaluation(name: str, source: Source, every: int, config: EvaluatorConfig) -> Evaluation:
        its_split = open_split(name, source)
        evaluator: Evaluator = ClassificationEvaluator(its_split, run.evaluation_step)
        if is_reference(config.kind):
            evaluator = _build_referenced(name, config, its_split, run)
        return Evaluation(name, evaluator, Cadence(every, run.steps.total))

    further = run.config.evaluation.evaluators
    return [
        evaluation(split, data.test, run.steps.evaluate_every, EvaluatorConfig()),
        *(evaluation(name, data.others[name], run.steps.evaluators_every[name], further[name]) for name in further),
    ]


def run_all(evaluations: Sequence[Evaluation], state: Any) -> dict[str, float]:
    """The results of several evaluations."""
    return {name: value for evaluation in evaluations for name, value in evaluation.run(state).items()}


def _build_referenced(name: str, config: Any, split: Split, run: Assembly) -> Evaluator:
    field = f"config.evaluation.evaluators.{name}"
    with called(f"{field}: {config.kind!r}", f"(split, run) and arguments={dict(config.arguments)}"):
        evaluator = resolve(config.kind, f"{field}.kind")(split, run, **config.arguments)
    if not callable(getattr(evaluator, "run", None)):
        raise ValueError(f"{field}.kind={config.kind!r} gives {type(evaluator).__name__}, which has no method run.")
    return evaluator  # type: ignore[no-any-return]
