"""The training loop, once for every kind of run: steps, and what is due between them.

`session` builds the parts that the loop asks. `pretrain` and `finetune` supply the parts of the
run.
"""

from typing import TYPE_CHECKING, NoReturn

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

        is_stopping = session.stop.is_requested()
        is_due = session.evaluation.is_due(step) or session.saving.is_due(step)
        if not (is_stopping or is_due):
            continue
        session.late_metrics.flush()
        with session.between_steps():
            if is_stopping:
                save_and_stop(session, session.stop.make_error(step))
            evaluate_and_save(session)


def evaluate_and_save(session: "Session") -> None:
    """Run the evaluators that are due, then save the state if that is due or it may be the best."""
    step = session.state.step
    state = session.state.read()
    try:
        results = session.evaluation.run_due(step, state)
    except Interrupted:
        save_and_stop(session, session.stop.make_error(step))
    except TooManyUnreadable as error:
        save_and_stop(session, error)
    session.saving.save_if_due(step, state, results)


def save_and_stop(session: "Session", error: Exception) -> NoReturn:
    """Save the state, and end the run with an error.

    Evaluators that are due but have not ended are owed: the resumed run begins with them.
    """
    step = session.state.step
    session.saving.save(
        step,
        session.state.read(),
        results={},
        owes_evaluation=session.evaluation.is_due(step),
    )
    session.saving.wait()
    session.unreadable.require_readable(step)
    raise error
