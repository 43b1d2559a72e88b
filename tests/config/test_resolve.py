"""Durations into steps, and what the dataset and the devices forbid."""

import pytest

from tests.config.test_validate import FINETUNING, change
from vit_jax.config import RunSteps, resolve

BASE = change(
    {"global_batch": 128, "total": "200 epochs", "schedule.warmup": "10 epochs", "evaluation.every": "50 epochs"}
)


def steps_of(num_devices=8, config=BASE, **fields):
    """Of the config with fields changed; `section__field=value`."""
    changed = change({name.replace("__", "."): value for name, value in fields.items()}, config)
    return resolve(changed, num_examples=1280, num_devices=num_devices)


def test_every_length_becomes_steps():
    steps = steps_of(
        total="20 epochs",  # of 10 steps
        schedule__warmup="0.1 fraction",
        schedule__decay="rsqrt",
        schedule__timescale="1280 examples",
        polyak__start="3 epochs",
        evaluation__every="50 steps",
        evaluation__evaluators={"v2": {"every": "2 epochs"}, "v3": {}},
        checkpoint__every="0.5 fraction",
        logging__every="1 example",
    )
    given = {"total": 200, "warmup": 20, "timescale": 10, "polyak_start": 30}
    every = {"evaluate_every": 50, "checkpoint_every": 100, "log_every": 1, "evaluators_every": {"v2": 20, "v3": 50}}
    assert steps == RunSteps(**given, **every)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_batch": 100}, r"config.global_batch=100 is not divisible by 8 device\(s\): use 96 or 104\."),
        ({"global_batch": 0}, r"config.global_batch=0 is not positive, .*: use 8\."),
        ({"evaluation__global_batch": 12}, "config.evaluation.global_batch=12 is not divisible by 8 .*: use 8 or 16"),
        (
            {"global_batch": 40, "optimizer__accumulation_steps": 4},
            r"config.global_batch=40 is not divisible by 8 device\(s\) x 4 micro-batches: use 32 or 64\.",
        ),
        (
            {"global_batch": 10, "sharding__num_model_shards": 2},
            r"config.global_batch=10 is not divisible by 8 device\(s\) / 2 model shards: use 8 or 12\.",
        ),
        ({"sharding__num_replicas": 4, "sharding__num_model_shards": 4}, "=4 x num_model_shards=4 does not divide the"),
        ({"total": "0 epochs"}, "config.total='0 epochs' is no step at all"),
        ({"total": "0.5 fraction"}, "total='0.5 fraction': the length of the run cannot be a fraction of itself"),
        (
            {"polyak__factor": 0.9, "polyak__start": "1 fraction"},
            "start='1 fraction' is step 2000 of 2000: there would be",
        ),
        ({"total": "5 epochs"}, r"config.schedule.warmup='10 epochs' is 100 of 50 steps: it must end before"),
        ({"evaluation__every": "0 steps"}, "config.evaluation.every must be at least one step"),
        ({"evaluation__evaluators": {"v2": {"every": "0 steps"}}}, "config.evaluation.evaluators.v2.every must be at"),
        ({"logging__every": "0 fraction"}, "config.logging.every must be at least one step"),
        ({"schedule__decay": "rsqrt", "schedule__timescale": "0 steps"}, "timescale='0 steps': rsqrt needs at least 1"),
        (
            {"schedule__decay": "staircase", "schedule__drop_at_fraction": (0.02, 0.5)},
            "lowers the rate at step 40, before the warm-up has ended at step 100",
        ),
        (
            {"stop_early__patience": 3},
            "stop_early.patience=3: the run has 4 evaluations of test_accuracy, one every 500 of 2000 steps, so",
        ),
        *(({"logging__profile_start_step": step}, "the run has the steps 1 to 2000") for step in (-1, 0, 2001)),
        ({"seed": -1}, "config.seed=-1: must not be negative"),  # validates too
    ],
)
def test_what_does_not_fit_the_dataset_or_the_devices(fields, message):
    with pytest.raises(ValueError, match=message):
        steps_of(**fields)


def test_what_fits():
    fits = {"global_batch": 64, "optimizer__accumulation_steps": 8, "evaluation__global_batch": 24}
    assert steps_of(**fits).total == 4000
    assert steps_of(evaluation__global_batch=None).total == 2000
    shortest = steps_of(total="1 step", schedule__warmup="0 steps")
    assert (shortest.total, shortest.warmup, shortest.evaluate_every) == (1, 0, 500)
    assert steps_of(config=FINETUNING).total == 400
