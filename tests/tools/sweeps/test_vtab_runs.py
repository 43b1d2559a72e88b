"""Settings, and the config of each run: of every task of VTAB it is one that can be trained."""

import dataclasses
import math

import pytest

from vit_jax.config import load_recipe, resolve
from vit_jax.config.parsing import flatten, to_dict
from vit_jax.tools.sweeps.suite import VTAB
from vit_jax.tools.sweeps.vtab import (
    RunResult,
    Setting,
    build_run_config,
    build_settings,
    choose,
    get_run_folder,
    read_result,
)
from vit_jax.train.run_files import write_summary

CONFIG = dataclasses.replace(load_recipe("configs/finetune.py:ViT-L/16,vtab"), init_from="weights")
SHORT = Setting(500, 100, 0.01)
LONG = Setting(2500, 200, 0.01)
LOST = RunResult(None, math.inf, 200)


def by_name(name):
    return next(task for task in VTAB if task.name == name)


def differing(task, part, setting=LONG):
    """Fields that differ from the recipe, and what they are."""
    before, after = (
        flatten(to_dict(c)) for c in (CONFIG, build_run_config(CONFIG, task, part, setting))
    )
    return {name: after[name] for name in after if after[name] != before[name]}


def test_the_grid_is_two_rates_by_two_lengths_the_papers_choice_among_them():
    assert build_settings() == (
        Setting(500, 100, 0.003),
        Setting(500, 100, 0.01),
        Setting(2500, 200, 0.003),
        LONG,
    )
    assert (CONFIG.schedule.learning_rate, CONFIG.total, CONFIG.schedule.warmup) == (
        0.01,
        "2500 steps",
        "200 steps",
    )
    assert (CONFIG.global_batch, CONFIG.input.image_size) == (512, (384, 384))


def test_a_final_run_trains_on_all_and_is_tested_once():
    always = {
        "evaluation.every": "2500 steps",
        "checkpoint.keep_best": 0,
        "checkpoint.keep_latest": 1,
    }
    assert differing(by_name("pets"), "final") == always | {"data": "vtab:pets"}

    trial = {"input.train_split": "train800", "input.test_split": "val200"}
    assert differing(by_name("pets"), "trials") == always | trial | {"data": "vtab:pets"}


@pytest.mark.parametrize(
    ("name", "flip", "crop"),
    [
        ("eurosat", True, "resize"),
        ("dmlab", True, "none"),
        ("smallnorb_azimuth", False, "resize"),
        ("dsprites_orientation", False, "resize"),
        ("dsprites_location", False, "none"),
    ],
)
def test_exceptions_of_augmentation(name, flip, crop):
    inputs = build_run_config(CONFIG, by_name(name), "final", SHORT).input

    assert (inputs.flip, inputs.train_crop) == (flip, crop)
    assert inputs.train_resize_pixels == (448 if crop == "resize" else None)


@pytest.mark.parametrize(
    "argument", ["any,vtab", "any,vtab,crop=inception", "any,vtab,rule=bit", "any,own"]
)
@pytest.mark.parametrize("part", ["trials", "final"])
@pytest.mark.parametrize("override", ["flip=False", "crop_area_fraction=0.5,1"])
def test_every_task_resolves_with_every_recipe(argument, part, override):
    if (
        "crop_area" in override
        and "resize" in load_recipe(f"configs/finetune.py:{argument}").input.train_crop
    ):
        override = "max_unreadable=3"  # without effect on another crop

    config = load_recipe(f"configs/finetune.py:{argument}", [f"--config.input.{override}"])
    for task in VTAB:
        for setting in build_settings():
            steps = resolve(
                build_run_config(config, task, part, setting), num_examples=800, num_devices=1
            )
            assert (steps.total, steps.warmup) == (setting.num_steps, setting.warmup_steps)


def test_what_a_run_came_to(tmp_path):
    folder = get_run_folder(tmp_path, by_name("pets"), "trials", SHORT)

    assert folder == tmp_path / "pets" / "trials" / "learning_rate=0.01,steps=500"
    assert read_result(folder) is None

    folder.mkdir(parents=True)
    for accuracy, loss, expected in ((0.5, 1.2, 0.5), (None, None, None), (0.9, math.nan, None)):
        write_summary(folder, {"test_accuracy": accuracy, "test_loss": loss, "test_images": 200})
        assert read_result(folder).accuracy == expected


def results(*accuracies, loss=1.0):
    return [RunResult(accuracy, loss, 200) for accuracy in accuracies]


def test_the_mean_over_tasks_decides():
    slow = Setting(500, 100, 0.003)

    assert choose({SHORT: results(0.9, 0.1), LONG: results(0.6, 0.5)}) == LONG
    assert choose({LONG: results(0.9, 0.1), SHORT: results(0.6, 0.5)}) == SHORT
    # Ties: the lower loss, then the shorter run, then the lower rate.
    assert choose({SHORT: results(0.5, 0.5), LONG: results(0.5, 0.5, loss=0.9)}) == LONG
    assert choose({LONG: results(0.5), SHORT: results(0.5), slow: results(0.5)}) == slow


def test_a_trial_that_diverged_counts_as_nothing_right():
    assert choose({LONG: [*results(0.9), LOST], SHORT: results(0.5, 0.5)}) == SHORT
    assert choose({LONG: [*results(0.9), LOST], SHORT: results(0.3, 0.3)}) == LONG
    assert choose({LONG: [LOST], SHORT: [LOST]}) == SHORT
