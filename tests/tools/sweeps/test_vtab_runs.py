"""Settings, and the config of each run: of every task of VTAB it is one that can be trained."""

import dataclasses
import math

import pytest

from vit_jax.config import load_recipe, resolve
from vit_jax.config.parsing import flatten, to_dict
from vit_jax.tools.sweeps.suite import VTAB
from vit_jax.tools.sweeps.vtab import (
    LEARNING_RATES,
    RunResult,
    Setting,
    build_run_config,
    build_settings,
    choose,
    choose_learning_rates,
    get_run_folder,
    read_result,
)
from vit_jax.train.run_files import write_summary

CONFIG = dataclasses.replace(load_recipe("configs/finetune.py:ViT-L/16,vtab"), init_from="weights")
SHORT = Setting(500, 100, 0.01)
LONG = Setting(2500, 200, 0.01)
LOST = RunResult(None, math.inf, 200)


def find_task(name):
    return next(task for task in VTAB if task.name == name)


def find_differences(task, part):
    """Return the fields of a run that differ from the recipe, and their values."""
    before = flatten(to_dict(CONFIG))
    after = flatten(to_dict(build_run_config(CONFIG, task, part, LONG)))
    changed = {}
    for name, value in after.items():
        if value != before[name]:
            changed[name] = value
    return changed


def test_the_grid_is_two_rates_by_two_lengths_the_papers_choice_among_them():
    assert build_settings() == (
        Setting(500, 100, 0.003),
        Setting(500, 100, 0.01),
        Setting(2500, 200, 0.003),
        LONG,
    )


@pytest.mark.parametrize(
    ("argument", "rates"),
    [
        ("any,vtab", LEARNING_RATES),
        ("any,vtab,rule=dinov3", (8.4e-05, 0.00028)),
        ("any,pets", LEARNING_RATES),  # searches its own
    ],
)
def test_the_rates_are_the_recipes_and_a_third_of_it(argument, rates):
    config = load_recipe(f"finetune:{argument}")

    assert choose_learning_rates(config) == rates


def test_the_recipe_has_the_papers_choice():
    assert CONFIG.schedule.learning_rate == 0.01
    assert CONFIG.total == "2500 steps"
    assert CONFIG.schedule.warmup == "200 steps"
    assert CONFIG.global_batch == 512
    assert CONFIG.input.image_size == (384, 384)


def test_a_final_run_trains_on_all_and_is_tested_once():
    expected = {
        "data": "vtab:pets",
        "evaluation.every": "2500 steps",
        "checkpoint.keep_best": 0,
        "checkpoint.keep_latest": 1,
    }
    splits = {
        "input.train_split": "train800",
        "input.test_split": "val200",
    }

    assert find_differences(find_task("pets"), "final") == expected
    assert find_differences(find_task("pets"), "trials") == expected | splits


@pytest.mark.parametrize(
    ("name", "flip", "crop", "resize_pixels"),
    [
        ("eurosat", True, "resize", 448),
        ("dmlab", True, "none", None),
        ("smallnorb_azimuth", False, "resize", 448),
        ("dsprites_orientation", False, "resize", 448),
        ("dsprites_location", False, "none", None),
    ],
)
def test_exceptions_of_augmentation(name, flip, crop, resize_pixels):
    config = build_run_config(CONFIG, find_task(name), "final", SHORT)

    assert config.input.flip == flip
    assert config.input.train_crop == crop
    assert config.input.train_resize_pixels == resize_pixels


def load_with(argument, override):
    return load_recipe(f"configs/finetune.py:{argument}", [f"--config.input.{override}"])


@pytest.mark.parametrize(
    "argument", ["any,vtab", "any,vtab,crop=inception", "any,vtab,rule=bit", "any,own"]
)
@pytest.mark.parametrize("part", ["trials", "final"])
@pytest.mark.parametrize("override", ["flip=False", "crop_area_fraction=0.5,1"])
def test_every_task_resolves_with_every_recipe(argument, part, override):
    crop = load_recipe(f"configs/finetune.py:{argument}").input.train_crop
    if "crop_area" in override and "resize" in crop:
        # The area has no effect on another crop.
        override = "max_unreadable=3"
    config = load_with(argument, override)

    for task in VTAB:
        for setting in build_settings():
            run = build_run_config(config, task, part, setting)
            steps = resolve(run, num_examples=800, num_devices=1)
            assert steps.total == setting.num_steps
            assert steps.warmup == setting.warmup_steps


@pytest.mark.parametrize(
    ("accuracy", "loss", "expected"),
    [
        (0.5, 1.2, 0.5),
        (None, None, None),
        (0.9, math.nan, None),
    ],
)
def test_the_outcome_of_a_run(tmp_path, accuracy, loss, expected):
    folder = get_run_folder(tmp_path, find_task("pets"), "trials", SHORT)

    assert folder == tmp_path / "pets" / "trials" / "learning_rate=0.01,steps=500"
    assert read_result(folder) is None

    folder.mkdir(parents=True)
    write_summary(
        folder,
        {
            "test_accuracy": accuracy,
            "test_loss": loss,
            "test_images": 200,
        },
    )
    assert read_result(folder).accuracy == expected


def make_results(*accuracies, loss=1.0):
    return [RunResult(accuracy, loss, 200) for accuracy in accuracies]


def test_the_mean_over_tasks_decides():
    slow = Setting(500, 100, 0.003)

    spread = make_results(0.9, 0.1)
    steady = make_results(0.6, 0.5)

    assert choose({SHORT: spread, LONG: steady}) == LONG
    assert choose({LONG: spread, SHORT: steady}) == SHORT
    # Ties: the lower loss, then the shorter run, then the lower rate.
    equal = make_results(0.5, 0.5)
    with_lower_loss = make_results(0.5, 0.5, loss=0.9)
    assert choose({SHORT: equal, LONG: with_lower_loss}) == LONG
    single = make_results(0.5)
    assert choose({LONG: single, SHORT: single, slow: single}) == slow


def test_a_trial_that_diverged_counts_as_nothing_right():
    assert choose({LONG: [*make_results(0.9), LOST], SHORT: make_results(0.5, 0.5)}) == SHORT
    assert choose({LONG: [*make_results(0.9), LOST], SHORT: make_results(0.3, 0.3)}) == LONG
    assert choose({LONG: [LOST], SHORT: [LOST]}) == SHORT
