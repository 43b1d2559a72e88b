"""The settings of a sweep: from words to runs, and the words that are rejected."""

import math
import random

import pytest

from tests.columns import list_column
from tests.rejections import rejects
from tests.tiny import RECIPE, flags
from tests.weights.test_families import write
from vit_jax.config import load_recipe
from vit_jax.tools.sweeps.fields import Range, follow_weights, make_sweep

RATE = "schedule.learning_rate"


def list_points(*words, **options):
    sweep = make_sweep(str(RECIPE), [], words, **options)
    return [dict(run.point) for run in sweep.runs]


def test_all_combinations_each_with_every_seed():
    grid = make_sweep(
        str(RECIPE),
        flags("model.width=16"),
        ["seed=0,1", f"{RATE}=1e-3,0.01", "config.model.pool=gap"],
    )

    assert list_column(grid.runs, "name") == [
        f"{RATE}=1e-3,model.pool=gap,seed=0",
        f"{RATE}=1e-3,model.pool=gap,seed=1",
        f"{RATE}=0.01,model.pool=gap,seed=0",
        f"{RATE}=0.01,model.pool=gap,seed=1",
    ]
    assert list_column(grid.runs, "config.schedule.learning_rate") == [0.001, 0.001, 0.01, 0.01]
    assert list_column(grid.runs, "config.seed") == [0, 1, 0, 1]
    assert set(list_column(grid.runs, "config.model.width")) == {16}
    assert grid.study.measures == ("test_accuracy",)

    # Each is a run of `vit-jax pretrain`.
    for run in grid.runs:
        assert load_recipe(run.recipe, run.overrides) == run.config


def test_each_run_has_the_rule_of_its_weights(tmp_path):
    """A rule stays where the sweep is over learning rates, which suit one rule only."""
    for case in ("huggingface/dinov2", "timm/eva02_small"):
        write(case, tmp_path / case.replace("/", "_"))
    starts = [tmp_path / "huggingface_dinov2", tmp_path / "timm_eva02_small"]
    words = [f"init_from={starts[0]};{starts[1]}", "seed=0,1"]

    grid = follow_weights(make_sweep("finetune:any,own", [], words))
    rates = follow_weights(
        make_sweep("finetune:any,own", [f"--config.init_from={starts[0]}"], [f"{RATE}=0.1,0.2"])
    )

    rule = "finetune:any,own,rule=dinov3"
    assert list_column(grid.runs, "recipe") == [rule, rule, *["finetune:any,own"] * 2]
    for run in grid.runs:
        assert load_recipe(run.recipe, run.overrides) == run.config
    assert list_column(rates.runs, "recipe") == ["finetune:any,own"] * 2


def test_values_may_have_commas_and_spaces():
    grid = make_sweep(
        str(RECIPE),
        [],
        ["input.image_size=8,8;16,16", "total=7 epochs,9 epochs"],
    )
    configs = list_column(grid.runs, "config")

    assert list_column(configs, "input.image_size") == [
        (8, 8),
        (8, 8),
        (16, 16),
        (16, 16),
    ]
    assert list_column(configs, "total") == [
        "7 epochs",
        "9 epochs",
        "7 epochs",
        "9 epochs",
    ]


def test_random_settings_are_those_of_the_seed_and_the_first_of_more():
    words = [f"{RATE}=log(1e-4,1e-2)", "model.pool=gap,token", "seed=0,1"]
    few = list_points(*words, num_settings=3)
    more = list_points(*words, num_settings=9)

    assert few == more[: len(few)]
    assert list_points(*words, num_settings=3) == few
    assert list_points(*words, num_settings=3, seed=1) != few


def test_random_settings_have_every_seed_and_three_digits():
    words = [f"{RATE}=log(1e-4,1e-2)", "model.pool=gap,token", "seed=0,1"]
    points = list_points(*words, num_settings=9)
    rates = [point[RATE] for point in points]

    assert list_column(points, "seed") == ["0", "1"] * 9
    assert rates[0::2] == rates[1::2]
    for rate in map(float, rates):
        assert rate == float(f"{rate:.2e}")


@pytest.mark.parametrize(
    ("range_", "middle"),
    [
        (Range(True, 1e-4, 1e-2), 1e-3),
        (Range(False, 0.2, 0.6), 0.4),
    ],
    ids=["logarithmic", "uniform"],
)
def test_draws_are_even_over_the_range(range_, middle):
    """Half of 1,000 samples lie below the middle of the range, or of its logarithm.

    The tolerance is five standard deviations.
    """
    rng = random.Random(0)
    samples = [float(range_.sample(rng)) for _ in range(1000)]
    num_low = sum(value < middle for value in samples)

    assert range_.low <= min(samples) < max(samples) <= range_.high
    assert abs(num_low - 500) < 5 * math.sqrt(1000 / 4)


def test_all_combinations_can_be_drawn():
    words = ["model.pool=gap,token", f"{RATE}=0.1,0.2,0.3"]
    sampled = list_points(*words, num_settings=6)
    listed = list_points(*words)

    assert sampled != listed
    assert sorted(map(str, sampled)) == sorted(map(str, listed))


@pytest.mark.parametrize(
    ("words", "start", "rule"),
    [
        (["schedule.rate=1,2"], "schedule.rate=1: ", "There is no field.*schedule"),
        ([f"{RATE}=fast"], f"{RATE}=fast: ", "must be float"),
        ([RATE], f"--grid={RATE}: ", "FIELD=VALUE"),
        ([f"{RATE}=1,,2"], f"--grid={RATE}=1,,2: ", "empty"),
        ([f"{RATE}=1,1"], f"--grid={RATE}=1,1: ", "twice"),
        ([f"{RATE}=0.1,1e-1"], f"{RATE}=0.1 and {RATE}=1e-1", "same run"),
        ([f"{RATE}=0.1", f"{RATE}=0.2"], f"--grid={RATE}=0.2: ", "already"),
        ([f"{RATE}=log(1e-3,1e-2)"], f"--grid={RATE}=", "--random=N"),
    ],
)
def test_mistakes(words, start, rule):
    with rejects(start, rule):
        make_sweep(str(RECIPE), [], words)


@pytest.mark.parametrize(
    ("word", "start", "rule"),
    [
        (f"{RATE}=log(0,1e-2)", f"--grid={RATE}=log(0,1e-2): ", "LOW.*of log above 0"),
        (f"{RATE}=uniform(2,1)", f"--grid={RATE}=uniform(2,1): ", "LOW.*below HIGH"),
        (f"{RATE}=uniform(a,1)", f"--grid={RATE}=uniform(a,1): ", "two numbers"),
        ("seed=uniform(1,2)", "--grid=seed=", "whole numbers"),
    ],
)
def test_mistakes_in_ranges(word, start, rule):
    with rejects(start, rule):
        make_sweep(str(RECIPE), [], [word], num_settings=2)


def test_more_random_settings_than_combinations():
    with rejects("--random=3: ", "only 2"):
        make_sweep(
            str(RECIPE),
            [],
            [f"{RATE}=0.1,0.2", "seed=0,1"],
            num_settings=3,
        )


def test_a_field_that_is_also_set_for_all_runs():
    with rejects(f"--config.{RATE}=0.2: ", f"is set for each run.*Use --grid={RATE}="):
        make_sweep(str(RECIPE), flags(f"{RATE}=0.2"), [f"{RATE}=0.1"])
