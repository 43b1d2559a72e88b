"""The parts that the loop asks: when each is due, and what a checkpoint says of evaluations."""

import dataclasses
import math

import pytest

from tests.train import small_runs as runs
from vit_jax.data.unreadable import TooManyUnreadable
from vit_jax.train.cadence import Cadence, ScheduledEvaluator
from vit_jax.train.early_stopping import EarlyStopping
from vit_jax.train.hooks import (
    EndAtFraction,
    Evaluation,
    Saving,
    StopRequest,
    UnreadableImages,
)
from vit_jax.train.lifecycle.interruption import Interrupted
from vit_jax.train.loop import evaluate_and_save, save_and_raise


@dataclasses.dataclass
class Log:
    """Unreadable images of a split."""

    problem: str = ""

    def list_met(self, step):
        return [step]


class Asked:
    """A signal that arrives, or not."""

    def __init__(self, is_requested=False):
        self._is_requested = is_requested
        self.num_queries = 0

    def is_requested(self):
        self.num_queries += 1
        return self._is_requested

    def request(self):
        self._is_requested = True


class Files:
    """Writers, display and store of a run, which note what they are told."""

    def __init__(self):
        self.lines = []
        self.saved = []

    def write(self, step, results):
        self.lines.append((step, results))

    def show_results(self, step, results):
        pass

    def flush(self):
        pass

    def wait(self):
        pass

    def save(
        self,
        step,
        items,
        *,
        metadata,
        metrics,
    ):
        self.saved.append((step, metadata["owes_evaluation"], metrics))


class Reported:
    """An evaluator with fixed results, or an error."""

    def __init__(self, results, error=None):
        self._results = results
        self._error = error

    def run(self, state):
        if self._error is not None:
            raise self._error
        yield from self._results.items()


@dataclasses.dataclass
class State:
    step: int
    model: None = None
    optimizer: None = None
    polyak: None = None

    def read(self):
        return self


class Session:
    """The parts of a session that evaluating and saving need; evaluated every 2 steps, saved every 3 of 6."""

    def __init__(
        self,
        results=None,
        error=None,
        keep_best=1,
    ):
        config = runs.config("checkpoint.best_metric=test_accuracy")
        keeping = dataclasses.replace(config.checkpoint, keep_best=keep_best)
        stopping = EarlyStopping(config, {})
        self.files = Files()
        self.unreadable = UnreadableImages(Log(), Asked())
        self.stop = StopRequest(Asked(), self.unreadable, 6)
        evaluator = Reported(results or {}, error)
        scheduled = [ScheduledEvaluator("test", evaluator, Cadence(2, 6))]
        self.evaluation = Evaluation(
            scheduled,
            self.files,
            self.files,
            stopping,
        )
        self.saving = Saving(
            self.files,
            keeping,
            Cadence(3, 6),
            EndAtFraction(runs.build().steps, None),
            {},
            stopping,
            self.unreadable,
            self.files,
            wall_seconds=lambda: 1.0,
            step_seconds=lambda: 0.5,
        )
        self.live_state = State(0)

    def save_after(self, step):
        """Return the checkpoints that a step leaves: step, whether it owes an evaluation, metrics."""
        self.live_state.step = step
        self.files.saved.clear()
        evaluate_and_save(self)

        return self.files.saved

    def stop_after(self, step):
        """Save the state after a step, and raise the reason to stop."""
        self.live_state.step = step
        save_and_raise(self, self.stop.make_error(step))


def test_a_checkpoint_has_the_results_of_its_step():
    session = Session({"accuracy": 0.5})
    results = {"test_accuracy": 0.5}

    assert session.save_after(2) == [(2, False, results)], "it may be the best one"
    assert session.save_after(3) == [(3, False, {})], "no evaluator was due"
    assert session.save_after(6) == [(6, False, results)]
    assert session.files.lines == [(2, results), (6, results)]
    assert session.evaluation.results_after(6) == results
    assert session.evaluation.results_after(5) is None


def test_evaluators_without_results_owe_nothing():
    session = Session({})
    assert session.save_after(2) == []
    assert session.save_after(6) == [(6, False, {})]
    assert session.evaluation.results_after(6) is None


def test_metrics_without_a_finite_best_one_are_left_out():
    assert Session({"accuracy": math.nan}).save_after(2) == [
        (2, False, {}),
    ]
    assert Session({"loss": 1.0}).save_after(6) == [
        (6, False, {}),
    ]
    assert Session({"accuracy": 0.5}, keep_best=0).save_after(2) == []


@pytest.mark.parametrize(
    ("step", "owes"),
    [
        (2, True),
        (3, False),
        (5, False),
    ],
)
def test_a_run_that_stops_is_saved_and_owes_the_evaluators_that_are_due(step, owes):
    session = Session({"accuracy": 0.5})
    with pytest.raises(Interrupted, match=f"after step {step} of 6"):
        session.stop_after(step)

    assert session.files.saved == [(step, owes, {})]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Interrupted("stopped while evaluating"), "stopped after step 2 of 6, which is saved"),
        (TooManyUnreadable("9 images"), "9 images"),
    ],
)
def test_an_evaluation_that_does_not_end_is_owed(error, message):
    session = Session({}, error)
    with pytest.raises(type(error), match=message):
        session.save_after(2)

    assert session.files.saved == [(2, True, {})]


def test_unreadable_images_of_training_are_the_reason_that_is_told():
    session = Session({"accuracy": 0.5})
    session.unreadable.note(2, 0.0)
    message = r"Step 2: no image.*after step 3 is saved"

    assert session.stop.is_requested()
    with pytest.raises(TooManyUnreadable, match=message):
        session.stop_after(3)

    assert session.files.saved == [(3, False, {})]


def test_the_run_is_asked_once_after_each_step_whether_it_has_to_end():
    asked = Asked()
    log = Log()
    unreadable = UnreadableImages(log, asked)
    stop = StopRequest(asked, unreadable, 6)
    unreadable.note(1, 8.0)
    unreadable.after_step(1, {})

    assert not stop.is_requested()

    unreadable.note(2, 0.0)
    assert stop.is_requested()
    assert asked.num_queries == 2

    log.problem = "9 images cannot be read"
    unreadable.after_step(3, {})

    assert asked.is_requested()


def test_a_run_pauses_after_the_last_evaluation_up_to_the_fraction():
    steps = runs.build("total=6 steps", "evaluation.every=2 steps").steps
    pause = EndAtFraction(steps, 0.9)

    assert [step for step in range(1, 7) if pause.is_due(step)] == [4]
    assert [step for step in range(1, 7) if pause.is_over(step)] == [5, 6]

    never = EndAtFraction(steps, None)
    assert not any(never.is_due(step) or never.is_over(step) for step in range(1, 7))
    with pytest.raises(ValueError, match="within 30% of the 6 steps"):
        EndAtFraction(steps, 0.3)
