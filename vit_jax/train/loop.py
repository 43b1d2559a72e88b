"""The training loop, once for every kind of run: steps, and what is due between them.

`session` builds the parts that the loop asks. `pretrain` and `finetune` supply the parts of the
run.
"""

from typing import TYPE_CHECKING

from vit_jax.data.unreadable import TooManyUnreadable
from vit_jax.storage.files import JsonObject
from vit_jax.train.lifecycle.interruption import Interrupted

if TYPE_CHECKING:
    from vit_jax.train.session import Session


def train(session: "Session") -> JsonObject:
    """Train to the last step, or until the run stops early; return the content of `summary.json`.

    Raises:
      ValueError: something in the config, the data or the checkpoints that the user can change.
      FloatingPointError: the loss, a gradient or a parameter is not finite; `divergence.json`
        states the step.
      SaveError: a checkpoint could not be written.
      WorkdirLost: the folder is not the run's any more.
      Interrupted: SIGTERM or Ctrl-C; the state is saved.
      Paused: it has been trained to `session.pause_fraction`.
    """
    with session.begin():
        session.run_owed_evaluation()
        take_steps(session)
        summary = session.summarize()
    return session.publish(summary)


def take_steps(session: "Session") -> None:
    """Train from the step of the state to the last step, or until the run stops early."""
    for step in range(session.start_step + 1, session.total_steps + 1):
        if session.early_stopping.reason_to_stop():
            return
        session.before_step(step)
        batch = next(session.batches)
        metrics = session.state.train_step(batch)
        for hook in session.step_hooks:
            hook.after_step(step, metrics)

        reason = session.stop.find_reason(step)
        is_due = session.evaluation.is_due(step) or session.saving.is_due(step)
        if is_due or reason is not None:
            session.late_metrics.flush()
            with session.between_steps():
                evaluate_and_save(session, reason)


def evaluate_and_save(session: "Session", reason: Interrupted | None) -> None:
    """Evaluate and save after a step, as far as they are due; raise the reason to stop, if any.

    Evaluators do not begin if there is a reason to stop; those of the config end after the batch in
    which one arises. The checkpoint then records that they are owed, and the resumed run begins
    with them.
    """
    step = session.state.step
    state = session.state.read()
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
