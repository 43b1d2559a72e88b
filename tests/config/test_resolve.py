"""Durations into steps, and what the dataset and the devices forbid."""

import dataclasses

import pytest

from vit_jax.config import Duration, RunSteps, from_dict, load_recipe, resolve, to_dict
from vit_jax.config.load import flatten

BASE = load_recipe(
    "configs/digits.py",
    [
        "--config.global_batch=128",
        "--config.total=200 epochs",
        "--config.schedule.warmup=10 epochs",
        "--config.evaluation.every=50 epochs",
    ],
)


FINETUNING = load_recipe("configs/finetune.py:any,own")


def change(base=BASE, **fields):
    """A valid config with fields changed; `section__field=value`."""
    values = to_dict(base)
    for name, value in fields.items():
        *sections, field = name.split("__")
        section = values[sections[0]] if sections else values
        assert field in section
        section[field] = value
    return from_dict(type(base), values)


def steps_of(config, num_examples=1280, num_devices=8):
    return resolve(config, num_examples=num_examples, num_devices=num_devices)


def test_every_length_becomes_steps():
    config = change(
        total="20 epochs",  # of 10 steps
        schedule__warmup="0.1 fraction",
        schedule__decay="rsqrt",
        schedule__timescale="1280 examples",
        polyak__start="3 epochs",
        evaluation__every="50 steps",
        checkpoint__every="0.5 fraction",
        logging__every="1 example",
    )
    assert steps_of(config) == RunSteps(
        total=200, warmup=20, timescale=10, polyak_start=30, evaluate_every=50, checkpoint_every=100, log_every=1
    )


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.total = Duration("1 step")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_batch": 100}, r"config.global_batch=100 is not divisible by 8 device\(s\): use 96 or 104\."),
        ({"global_batch": 4}, r"config.global_batch=4 is not divisible by 8 device\(s\): use 8\."),
        ({"global_batch": 0}, r"config.global_batch=0 .*: use 8\."),
        ({"global_batch": -8}, r"config.global_batch=-8 .*: use 8\."),
        ({"evaluation__global_batch": 12}, "config.evaluation.global_batch=12 is not divisible by 8 .*: use 8 or 16"),
        (
            {"global_batch": 40, "optimizer__accumulation_steps": 4},
            r"config.global_batch=40 is not divisible by 8 device\(s\) x 4 micro-batches: use 32 or 64\.",
        ),
        (
            {"global_batch": 10, "sharding__num_model_shards": 2},
            r"config.global_batch=10 is not divisible by 8 device\(s\) / 2 model shards: use 8 or 12\.",
        ),
        ({"optimizer__accumulation_steps": 0}, "config.optimizer.accumulation_steps=0: must be at least 1"),
    ],
)
def test_batches_that_cannot_be_shared_out(fields, message):
    with pytest.raises(ValueError, match=message):
        steps_of(change(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_model_shards": 0}, "config.sharding.num_model_shards=0: must be at least 1"),
        ({"num_replicas": 0}, "config.sharding.num_replicas=0: must be at least 1"),
        ({"num_model_shards": 3}, r"num_replicas=1 x num_model_shards=3 does not divide the 8 device\(s\)"),
        ({"num_replicas": 4, "num_model_shards": 4}, "num_replicas=4 x num_model_shards=4 does not divide the 8"),
    ],
)
def test_meshes_that_cannot_be_cut(fields, message):
    with pytest.raises(ValueError, match=message):
        steps_of(change(**{f"sharding__{name}": value for name, value in fields.items()}))


def test_batches_that_can():
    config = change(global_batch=64, optimizer__accumulation_steps=8, evaluation__global_batch=24)
    assert steps_of(config).total == 4000
    assert steps_of(change(evaluation__global_batch=None)).total == 2000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"total": "0 epochs"}, "config.total='0 epochs' is no step at all"),
        ({"total": "0.5 fraction"}, "total='0.5 fraction': the length of the run cannot be a fraction of itself"),
        (
            {"total": "5 epochs"},
            r"config.schedule.warmup='10 epochs' is 100 steps, longer than the whole run \(config.total='5 epochs'",
        ),
        ({"evaluation__every": "0 steps"}, "config.evaluation.every must be at least one step"),
        ({"checkpoint__every": "0 epochs"}, "config.checkpoint.every must be at least one step"),
        ({"logging__every": "0 fraction"}, "config.logging.every must be at least one step"),
    ],
)
def test_lengths_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        steps_of(change(**fields))


def test_shortest_run():
    steps = steps_of(change(total="1 step", schedule__warmup="0 steps"))
    assert (steps.total, steps.warmup, steps.evaluate_every) == (1, 0, 500)


FRACTIONS = (
    "model.dropout_fraction",
    "model.stochastic_depth_fraction",
    "objective.label_smoothing_fraction",
    "input.holdout_fraction",
    "polyak.factor",
    "optimizer.beta1",
    "optimizer.beta2",
)
NOT_NEGATIVE = (
    "optimizer.weight_decay",
    "schedule.learning_rate",
    "schedule.end_learning_rate",
    "input.mixup_alpha",
    "input.shift_pixels",
    "input.randaugment_layers",
    "input.randaugment_magnitude",
    "input.max_unreadable",
    "input.num_workers",
    "checkpoint.keep_best",
    "seed",
)
AT_LEAST_ONE = ("checkpoint.keep_latest", "logging.profile_num_steps", "input.num_threads")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *((name, value, r"must lie in \[0, 1\)") for name in FRACTIONS for value in (-0.1, 1.0)),
        *((name, -1, "must not be negative") for name in NOT_NEGATIVE),
        *((name, 0, "must be at least 1") for name in AT_LEAST_ONE),
        ("input.test_crop_fraction", 0.0, r"must lie in \(0, 1\]"),
        ("input.test_crop_fraction", 1.1, r"must lie in \(0, 1\]"),
        ("input.crop_area_fraction", (0.0, 1.0), "must be 0 < low <= high <= 1"),
        ("input.crop_area_fraction", (0.5, 0.4), "must be 0 < low <= high <= 1"),
        ("input.crop_area_fraction", (0.5, 1.1), "must be 0 < low <= high <= 1"),
        ("optimizer.clip_global_norm", 0.0, "must be positive, or None"),
        *(("logging.profile_start_step", value, "the run has the steps 1 to 2000") for value in (-1, 0, 2001)),
    ],
)
def test_value_out_of_range(name, value, rule):
    with pytest.raises(ValueError, match=rf"config\.{name}=.*{rule}"):
        steps_of(change(**{name.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"polyak__factor": None, "polyak__start": "5 steps"}, "polyak.start"),
        ({"polyak__factor": None, "polyak__bias_correction": False}, "polyak.bias_correction"),
        ({"schedule__timescale": "5 steps"}, "schedule.timescale"),
        ({"input__crop_area_fraction": (0.5, 1.0)}, "input.crop_area_fraction"),
        ({"input__crop_distribution": "torchvision"}, "input.crop_distribution"),
        ({"input__test_crop_fraction": 0.5}, "input.test_crop_fraction"),
        ({"optimizer__momentum": 0.5}, "optimizer.momentum"),
        ({"optimizer__name": "sgd", "optimizer__beta2": 0.95}, "optimizer.beta2"),
        ({"optimizer__trained": "head", "optimizer__layer_decay": 0.9}, "optimizer.layer_decay"),
        ({"schedule__drop_at_fraction": (0.5,)}, "schedule.drop_at_fraction"),
    ],
)
def test_a_setting_without_effect_is_refused(fields, name):
    with pytest.raises(ValueError, match=rf"config\.{name}=.* has no effect without"):
        steps_of(change(**fields))


def test_limits_themselves_are_allowed():
    at_zero = {name.replace(".", "__"): 0 for name in (*FRACTIONS, *NOT_NEGATIVE)}
    at_one = {name.replace(".", "__"): 1 for name in AT_LEAST_ONE}
    crops = {"input__train_crop": "inception", "input__test_resize": "short_side"}
    at_one |= {"input__test_crop_fraction": 1.0, "input__crop_area_fraction": (1.0, 1.0)}
    steps_of(change(**crops, **at_zero, **at_one))


def test_named_fields_exist():
    assert {*FRACTIONS, *NOT_NEGATIVE, *AT_LEAST_ONE} <= flatten(to_dict(BASE)).keys()


@pytest.mark.parametrize("rates", [(0.01,), (0.001, 0.03)])
def test_a_search_needs_no_learning_rate(rates):
    config = change(FINETUNING, search__learning_rates=rates, search__validation_fraction=0.5)
    assert steps_of(config).total == 400


def test_a_learning_rate_needs_no_search():
    config = change(FINETUNING, search__learning_rates=(), schedule__learning_rate=0.01)
    assert steps_of(config).total == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedule__learning_rate": 0.01},
            r"config.schedule.learning_rate=0.01 and config.search.learning_rates=\(0.001, .* are both set",
        ),
        ({"search__learning_rates": ()}, "learning_rate=0.0 and .*learning_rates is empty: nothing would be learnt"),
        ({"search__learning_rates": (0.01, 0.0)}, r"\(0.01, 0.0\): must be positive and different"),
        ({"search__learning_rates": (0.01, -0.1)}, r"\(0.01, -0.1\): must be positive and different"),
        ({"search__learning_rates": (0.01, 0.03, 0.01)}, r"must be positive and different from each other"),
        ({"search__validation_fraction": 0.0}, "config.search.validation_fraction=0.0: must lie between 0 and 1"),
        ({"search__validation_fraction": 1.0}, "config.search.validation_fraction=1.0: must lie between 0 and 1"),
        ({"model__dropout_fraction": 1.0}, r"config.model.dropout_fraction=1.0: must lie in \[0, 1\)"),
        ({"optimizer__momentum": 1.0}, r"config.optimizer.momentum=1.0: must lie in \[0, 1\)"),
        ({"optimizer__trained": "head", "model__dropout_fraction": 0.1}, "features are frozen: dropout has no effect"),
        ({"optimizer__trained": "head", "model__stochastic_depth_fraction": 0.1}, "features are frozen"),
    ],
)
def test_what_fine_tuning_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        steps_of(change(FINETUNING, **fields))


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_a_frozen_backbone_may_leave_dropout_to_its_default(dropout):
    steps_of(change(FINETUNING, optimizer__trained="head", model__dropout_fraction=dropout))
