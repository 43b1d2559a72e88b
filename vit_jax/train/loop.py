"""The training loop, once for every kind of run: steps, and what is due between them.

The loop calls a `Session`, which opens what a run needs, and the parts of it that work in the loop
(`train/session.py` describes them all):

* `batches` yields the batches of the next steps;
* `live_state` holds the only copy of the state on the devices, which each step replaces, and the
  number of its steps on the host;
* `step_hooks` look at the metrics of every step; one of them, `late_metrics`, logs them one step
  late;
* `stop` knows whether the run has to end, `evaluation` and `saving` when they are due;
* `unreadable` counts images that could not be read.
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
      ValueError: something in the config, the data or the checkpoints that the user can change;
        raised by `Session.begin`.
      FloatingPointError: the loss, a gradient or a parameter is not finite; `divergence.json`
        states the step. Raised when the metrics of the step are reported.
      SaveError: a checkpoint could not be written; raised by the next save, or at the end.
      WorkdirLost: the folder is not the run's any more; raised by `Session.between_steps`.
      Paused: the run has reached `session.pause_fraction`; raised by `Session.before_step`.
      Interrupted: SIGTERM or Ctrl-C, after the state has been saved.
      TooManyUnreadable: too many images cannot be read; raised after the state has been saved.
    """
    with session.begin():
        session.run_owed_evaluation()  # an earlier start may have been stopped while evaluating
        take_steps(session)
        summary = session.summarize()
    # `summary.json` says that the run has ended, so it is written after everything is closed.
    return session.publish(summary)


def take_steps(session: "Session") -> None:
    """Train from the step of the state to the last step, or until the run stops early."""
    while not session.is_over():
        step = session.live_state.step + 1
        session.before_step(step)  # may raise Paused
        batch = next(session.batches)
        metrics = session.live_state.advance(batch)
        # The devices still compute these metrics: `late_metrics` keeps them until the next step, and
        # logs those of the step before.
        for hook in session.step_hooks:
            hook.after_step(step, metrics)

        is_stopping = session.stop.is_requested()  # asked, and answered alike, in all processes
        is_due = session.evaluation.is_due(step) or session.saving.is_due(step)
        if not (is_stopping or is_due):
            continue

        # Log this step now. If its metrics are not finite, the run ends here with
        # FloatingPointError, before the state is evaluated or saved.
        session.late_metrics.flush()
        # The clock and the watchdog pause, and transfers to the host are allowed.
        with session.between_steps():
            if is_stopping:
                save_and_raise(session, session.stop.make_error(step))
            evaluate_and_save(session)


def evaluate_and_save(session: "Session") -> None:
    """Run the evaluators that are due, then save the state if that is due or it may be the best.

    Raises:
      Interrupted, TooManyUnreadable: they ended an evaluation, and the state has been saved. The
        resumed run begins with this evaluation.
    """
    step = session.live_state.step
    state = session.live_state.read()
    try:
        results = session.evaluation.run_due(step, state)
    except Interrupted:  # raised by the input, without the step; this error names it
        save_and_raise(session, session.stop.make_error(step))
    except TooManyUnreadable as error:
        save_and_raise(session, error)
    session.saving.save_if_due_or_best(step, state, results)


def save_and_raise(session: "Session", error: Exception) -> NoReturn:
    """Save the state after the last step, and end the run with `error`.

    If evaluators are due after this step and have not all ended, the checkpoint notes it, and the
    resumed run begins with all of them.

    Raises:
      TooManyUnreadable: in the place of `error`, if that has occurred in any process.
    """
    step = session.live_state.step
    # Too many unreadable images explain more than `error`. All processes have to ask together, so
    # this comes before saving, which may fail in one.
    final_error = session.unreadable.find_error(step) or error
    session.saving.save(
        step,
        session.live_state.read(),
        results={},
        owes_evaluation=session.evaluation.has_unfinished(step),
    )
    session.saving.wait()
    raise final_error from None  # without its cause: the user sees one message
