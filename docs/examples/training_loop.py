"""A training loop: the parts of a run from `assemble` in a loop of forty lines.

Run it:

    python -m docs.examples.training_loop

The parts make a run fast and exact: the sharded, donated step, the ordered stream of batches, the
learning-rate schedule, Polyak averaging. This loop adds logs and evaluations.
"""

import sys

import jax

from vit_jax.config import load_recipe, validate
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals import ClassificationEvaluator, Split
from vit_jax.train.assemble import (
    architecture_of,
    assemble,
    open_datasets,
    open_evaluation_batches,
    open_train_batches,
)
from vit_jax.train.state import TrainState


def main(recipe: str = "digits", *overrides: str) -> dict[str, float]:
    """Train from scratch and return the accuracy and loss on the test split."""
    config = load_recipe(recipe, overrides)
    validate(config)
    data = open_datasets(config)
    architecture = architecture_of(config, data.train.num_classes)
    run = assemble(config, architecture, num_examples=len(data.train), devices=jax.devices())

    log = UnreadableLog(data.test, config.input.max_unreadable)
    split = Split(
        "test",
        data.test.class_names,
        len(data.test),
        lambda: open_evaluation_batches(run, data.test, log),
    )
    evaluator = ClassificationEvaluator(split, run.evaluation_step)

    state: TrainState = run.init_state()
    results: dict[str, float] = {}
    with open_train_batches(run, data.train, start_step=0) as (batches, _):
        for step, batch in enumerate(batches, 1):
            state, metrics = run.train_step(state, batch)
            if step % run.steps.log_every == 0:
                print(f"step {step}: loss {float(metrics['train_loss']):.4f}", flush=True)
            if step % run.steps.evaluate_every == 0 or step == run.steps.total:
                results = dict(evaluator.run(state))
                print(f"step {step}: test accuracy {results['accuracy']:.2%}", flush=True)
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
