"""The settings of a sweep: from words to runs, and the words that are rejected."""

import math
import random

import pytest

from tests.rejections import rejects
from tests.tiny import RECIPE, flags
from vit_jax.config import load_recipe
from vit_jax.tools.sweeps.fields import Range, make_sweep

RATE = "schedule.learning_rate"


def points(*words, **options):
    return [dict(run.point) for run in make_sweep(str(RECIPE), [], words, **options).runs]


def test_all_combinations_each_with_every_seed():
    grid = make_sweep(
        str(RECIPE),
        flags("model.width=16"),
        ["seed=0,1", f"{RATE}=1e-3,0.01", "config.model.pool=gap"],
    )

    assert [run.name for run in grid.runs] == [
        f"{RATE}={rate},model.pool=gap,seed={seed}" for rate in ("1e-3", "0.01") for seed in (0, 1)
    ]
    for run in grid.runs:  # it is a run of `vit-jax pretrain`
        assert load_recipe(run.recipe, run.overrides) == run.config

    values = [
        (run.config.schedule.learning_rate, run.config.seed, run.config.model.width)
        for run in grid.runs
    ]
    assert values == [(0.001, 0, 16), (0.001, 1, 16), (0.01, 0, 16), (0.01, 1, 16)]
    assert grid.study.measures == ("test_accuracy",)


def test_values_may_have_commas_and_spaces():
    grid = make_sweep(str(RECIPE), [], ["input.image_size=8,8;16,16", "total=7 epochs,9 epochs"])

    assert [run.config.input.image_size for run in grid.runs] == [
        (8, 8),
        (8, 8),
        (16, 16),
        (16, 16),
    ]
    assert [run.config.total for run in grid.runs] == ["7 epochs", "9 epochs"] * 2


def test_random_settings_are_those_of_the_seed_and_the_first_of_more():
    words = [f"{RATE}=log(1e-4,1e-2)", "model.pool=gap,token", "seed=0,1"]
    few = points(*words, num_settings=3)
    more = points(*words, num_settings=9)

    assert few == more[: len(few)] == points(*words, num_settings=3)
    assert points(*words, num_settings=3, seed=1) != few
    assert [point["seed"] for point in few] == ["0", "1"] * 3
    assert [point[RATE] for point in few[::2]] == [
        point[RATE] for point in few[1::2]
    ]  # every setting with every seed
    assert all(
        float(point[RATE]) == float(f"{float(point[RATE]):.2e}") for point in more
    )  # three digits


@pytest.mark.parametrize(
    ("range_", "middle"), [(Range(True, 1e-4, 1e-2), 1e-3), (Range(False, 0.2, 0.6), 0.4)]
)
def test_draws_are_even_over_the_range(range_, middle):
    """Half of 1,000 draws lie below the middle of the range, or of its logarithm, within five standard deviations."""
    rng = random.Random(0)
    drawn = [float(range_.sample(rng)) for _ in range(1000)]

    assert range_.low <= min(drawn) < max(drawn) <= range_.high
    assert abs(sum(value < middle for value in drawn) - 500) < 5 * math.sqrt(1000 / 4)


def test_all_combinations_can_be_drawn():
    words = ["model.pool=gap,token", f"{RATE}=0.1,0.2,0.3"]
    drawn = points(*words, num_settings=6)
    listed = points(*words)

    assert drawn != listed
    assert sorted(map(str, drawn)) == sorted(map(str, listed))


@pytest.mark.parametrize(
    ("words", "overrides", "options", "start", "rule"),
    [
        (["schedule.rate=1,2"], [], {}, "schedule.rate=1: ", "There is no field.*schedule"),
        ([f"{RATE}=fast"], [], {}, f"{RATE}=fast: ", "must be float"),
        ([RATE], [], {}, f"--grid={RATE}: ", "FIELD=VALUE"),
        ([f"{RATE}=1,,2"], [], {}, f"--grid={RATE}=1,,2: ", "empty"),
        ([f"{RATE}=1,1"], [], {}, f"--grid={RATE}=1,1: ", "twice"),
        ([f"{RATE}=0.1,1e-1"], [], {}, f"{RATE}=0.1 and {RATE}=1e-1", "same run"),
        ([f"{RATE}=0.1", f"{RATE}=0.2"], [], {}, f"--grid={RATE}=0.2: ", "already"),
        (
            [f"{RATE}=0.1"],
            [f"{RATE}=0.2"],
            {},
            f"--config.{RATE}=0.2: ",
            f"is set for each run.*Use --grid={RATE}=",
        ),
        ([f"{RATE}=log(1e-3,1e-2)"], [], {}, f"--grid={RATE}=", "--random=N"),
        (
            [f"{RATE}=log(0,1e-2)"],
            [],
            {"num_settings": 2},
            f"--grid={RATE}=log(0,1e-2): ",
            "LOW.*of log above 0",
        ),
        (
            [f"{RATE}=uniform(2,1)"],
            [],
            {"num_settings": 2},
            f"--grid={RATE}=uniform(2,1): ",
            "LOW.*below HIGH",
        ),
        (
            [f"{RATE}=uniform(a,1)"],
            [],
            {"num_settings": 2},
            f"--grid={RATE}=uniform(a,1): ",
            "two numbers",
        ),
        (["seed=uniform(1,2)"], [], {"num_settings": 2}, "--grid=seed=", "whole numbers"),
        ([f"{RATE}=0.1,0.2", "seed=0,1"], [], {"num_settings": 3}, "--random=3: ", "only 2"),
    ],
)
def test_mistakes(words, overrides, options, start, rule):
    with rejects(start, rule):
        make_sweep(str(RECIPE), flags(*overrides), words, **options)
