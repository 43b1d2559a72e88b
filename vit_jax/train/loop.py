"""The training loop, once for every kind of run: steps, and what is due between them.

`session` builds the parts that the loop asks. `pretrain` and `finetune` supply the parts of the run
and its first state.
"""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_jax.data.unreadable import TooManyUnreadable
from vit_jax.storage.files import JsonObject
from vit_jax.train.cadence import ScheduledEvaluator
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.lifecycle.lock import WorkdirLock

if TYPE_CHECKING:
    from vit_jax.train.assembly import Assembly
    from vit_jax.train.inputs import Datasets
    from vit_jax.train.session import FirstState, Session
    from vit_jax.weights.fit import Fitted


def train(
    run: "Assembly",
    data: "Datasets",
    workdir: WorkdirLock,
    first_state: "FirstState",
    interruption: Interruption,
    *,
    split: str = "test",
    later_steps: int = 0,
    pause_fraction: float | None = None,
    further: Sequence[ScheduledEvaluator] = (),
    fitted: "Fitted | None" = None,
) -> JsonObject:
    """Train to the last step, or until the run stops early; return the content of `summary.json`.

    Args:
      run: the parts, from `assemble`.
      data: open; `data.test` is what the run is evaluated on.
      workdir: claimed.
      first_state: restores a checkpoint, fits given weights, or initialises the parameters.
      interruption: interruption of the command; may end the run after any step.
      split: name of `data.test`, the prefix of its results: "test", or "validation" in a search.
      later_steps: steps of the runs that follow in the same command, for the time that is shown.
      pause_fraction: fraction of the steps; the run ends, saved, after the last evaluation up to there.
      further: evaluations besides those of the config, for custom evaluators of the caller.
      fitted: the weights that a fine-tuning run starts with; their licence and preprocessing go
        into the metadata.

    Raises:
      ValueError: something in the config, the data or the checkpoints that the user can change.
      FloatingPointError: the loss, a gradient or a parameter is not finite; `divergence.json`
        states the step.
      SaveError: a checkpoint could not be written.
      WorkdirLost: the folder is not the run's any more.
      Interrupted: SIGTERM or Ctrl-C; the state is saved.
      Paused: it has been trained to `pause_fraction`.
    """
    # The parts of every kind, which the loop does not know.
    from vit_jax.train.session import Session, publish, summarize

    with contextlib.ExitStack() as stack:
        session = Session(
            stack,
            run,
            data,
            workdir,
            first_state,
            interruption,
            split=split,
            later_steps=later_steps,
            pause_fraction=pause_fraction,
            further=further,
            fitted=fitted,
        )
        session.run_owed_evaluation()
        take_steps(session)
        summary = summarize(session)
    return publish(session, summary)


def take_steps(session: "Session") -> None:
    """Train from `session.step` to the last step, or until the run stops early."""
    for step in range(session.step + 1, session.total_steps + 1):
        if session.early_stopping.reason_to_stop():
            return
        session.before_step(step)
        batch = session.clock.next_batch(session.batches, session.reports.is_busy)
        session.leaves, metrics = session.train_step(session.leaves, batch)
        session.step = step
        for hook in session.step_hooks:
            hook.after_step(step, metrics)

        reason = session.stop.find_reason(step)
        is_due = session.evaluation.is_due(step) or session.saving.is_due(step)
        if is_due or reason is not None:
            session.reports.flush()
            with session.between_steps():
                evaluate_and_save(session, reason)


def evaluate_and_save(session: "Session", reason: Interrupted | None) -> None:
    """Evaluate and save after a step, as far as they are due; raise the reason to stop, if any.

    Evaluators do not begin if there is a reason to stop; those of the config end after the batch in
    which one arises. The checkpoint then records that they are owed, and the resumed run begins
    with them.
    """
    step = session.step
    state = session.build_state()
    results: dict[str, float] = {}
    error: Exception | None = reason
    if error is None:
        try:
            results = session.evaluation.run_due(step, state)
        except Interrupted:
            error = session.stop.make_reason(step)
        except TooManyUnreadable as unreadable:
            error = unreadable

    is_stopping = error is not None
    session.saving.save_if_due(
        step,
        state,
        results,
        owes_evaluation=is_stopping and session.evaluation.is_due(step),
        is_stopping=is_stopping,
    )
    if error is not None:
        session.saving.wait()
        session.unreadable.require_readable(step)
        raise error
