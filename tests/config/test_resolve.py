"""Durations into steps, and what the dataset and the devices forbid."""

import pytest

from tests.config.test_validate import FINETUNING, change
from tests.rejections import rejects
from vit_jax.config import RunSteps, resolve

LENGTHS = {"total": "200 epochs", "schedule.warmup": "10 epochs", "evaluation.every": "50 epochs"}
BASE = change({"global_batch": 128, **LENGTHS})


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
    given = {"total": 200, "warmup": 20, "timescale": 10, "cooldown": 40, "polyak_start": 30}
    every = {"evaluate_every": 50, "checkpoint_every": 100, "log_every": 1, "evaluators_every": {"v2": 20, "v3": 50}}
    assert steps == RunSteps(**given, **every)


@pytest.mark.parametrize(
    ("fields", "rule"),  # the first field is the one that the message names
    [
        ({"global_batch": 100}, "100.*divisible by 8.*96 or 104"),
        ({"global_batch": 0}, "0.*positive.*use 8"),
        ({"evaluation__global_batch": 12}, "12.*divisible by 8.*8 or 16"),
        ({"global_batch": 40, "optimizer__accumulation_steps": 4}, "40.*divisible by.*4 micro-batches.*32 or 64"),
        ({"global_batch": 10, "sharding__num_model_shards": 2}, "10.*divisible by.*2 model shards.*8 or 12"),
        ({"global_batch": 2560, "total": "10 epochs", "schedule__warmup": "10 steps"}, "2560.*at most the 1280"),
        ({"global_batch": 2560, "total": "0.1 epochs"}, "2560.*at most the 1280"),
        ({"total": "0 epochs"}, "'0 epochs'.*at least one"),
        ({"polyak__start": "1 fraction", "polyak__factor": 0.9}, "'1 fraction'.*2000 of 2000"),
        ({"schedule__warmup": "10 epochs", "total": "5 epochs"}, "'10 epochs'.*100 of 50.*before"),
        ({"evaluation__every": "0 steps"}, "at least one step"),
        ({"evaluation__evaluators": {"v2": {"every": "0 steps"}}}, "v2.every.*at least one step"),
        ({"logging__every": "0 fraction"}, "at least one step"),
        ({"schedule__timescale": "0 steps", "schedule__decay": "rsqrt"}, "'0 steps'.*at least 1 step"),
        ({"schedule__drop_at_fraction": (0.02, 0.5), "schedule__decay": "staircase"}, "step 40.*warm-up.*step 100"),
        ({"stop_early__patience": 3}, "3.*4 evaluations of test_accuracy.*500 of 2000"),
        *(({"logging__profile_start_step": step}, f"{step}.*1 to 2000") for step in (-1, 0, 2001)),
        ({"seed": -1}, "negative"),  # validates too
    ],
)
def test_what_does_not_fit_the_dataset_or_the_devices(fields, rule):
    with rejects(f"config.{next(iter(fields))}".replace("__", "."), rule):
        steps_of(**fields)


def test_a_mesh_that_does_not_divide_the_devices():
    with rejects("config.sharding", "num_replicas=4.*num_model_shards=4.*divide.*8"):
        steps_of(sharding__num_replicas=4, sharding__num_model_shards=4)


def test_what_fits():
    fits = {"global_batch": 64, "optimizer__accumulation_steps": 8, "evaluation__global_batch": 24}
    assert steps_of(**fits).total == 4000
    assert steps_of(evaluation__global_batch=None).total == 2000
    assert steps_of(global_batch=2560).total == 100  # more than an epoch at a step
    shortest = steps_of(total="1 step", schedule__warmup="0 steps")
    assert (shortest.total, shortest.warmup, shortest.evaluate_every) == (1, 0, 500)
    assert steps_of(config=FINETUNING).total == 400
