"""The choice of a learning rate: the config of a trial, and the rate that wins."""

import dataclasses
import math

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.config import SearchConfig, StopEarlyConfig, load_recipe, resolve
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.train.inputs import Datasets
from vit_jax.train.rate_search import (
    choose,
    choose_learning_rate,
    table,
    trial_config,
    with_learning_rate,
)
from vit_jax.train.run_files import write_summary

CONFIG = load_recipe("configs/finetune.py:any,own")
DIVERGED = {
    "validation_accuracy": None,
    "validation_loss": None,
    "diverged": "Step 3: the loss is nan",
}
SPOILT = {"validation_accuracy": 0.99, "validation_loss": math.nan}


def build_result(accuracy, loss):
    return {"validation_accuracy": accuracy, "validation_loss": loss}


def find_changed_fields(before, after):
    """Return the names of fields that differ."""
    changed = set()
    for field in dataclasses.fields(before):
        if getattr(before, field.name) != getattr(after, field.name):
            changed.add(field.name)
    return changed


def test_the_most_accurate_wins():
    trials = {
        0.1: build_result(0.8, 0.5),
        0.01: build_result(0.9, 2.0),
        0.001: build_result(0.7, 0.1),
    }

    assert choose(trials) == 0.01


def test_of_equal_accuracies_the_lower_loss_wins_then_the_lower_rate():
    trials = {
        0.1: build_result(0.9, 0.5),
        0.03: build_result(0.9, 0.4),
        0.01: build_result(0.9, 0.4),
        0.001: build_result(0.8, 0.1),
    }

    assert choose(trials) == 0.01
    assert choose(dict(reversed(trials.items()))) == 0.01


@pytest.mark.parametrize(
    "lost",
    [DIVERGED, SPOILT, {**SPOILT, "validation_loss": math.inf}],
)
def test_a_trial_that_did_not_stay_finite_never_wins(lost):
    """If the last update spoilt it, only its evaluation shows it."""
    finite = build_result(0.2, 3.0)

    assert choose({0.1: lost, 0.01: finite}) == 0.01
    assert choose({0.01: finite, 0.1: lost}) == 0.01
    with rejects("learning rates 0.1, 0.3", "lower"):
        choose({0.1: lost, 0.3: DIVERGED})


def test_the_table_has_a_line_for_each_and_marks_the_best():
    trials = {
        0.001: build_result(0.5, 1.23456),
        0.03: build_result(0.9375, 0.25),
        0.3: DIVERGED,
        1.0: SPOILT,
    }

    assert table(trials, 0.03).splitlines() == [
        "learning rate  validation accuracy  validation loss",
        "0.001                       50.00%           1.2346",
        "0.03                        93.75%           0.2500  <- chosen",
        "0.3                                        diverged",
        "1                                          diverged",
    ]


def test_accuracies_on_few_images_have_an_interval():
    trials = {}
    for rate, accuracy in ((0.001, 0.5), (0.03, 1.0), (0.3, None)):
        result = DIVERGED if accuracy is None else build_result(accuracy, 0.25)
        trials[rate] = result | {"validation_images": 20}

    assert table(trials, 0.03).splitlines() == [
        "learning rate  validation accuracy                            validation loss",
        "0.001                       50.00% (95 %: 29.93% to 70.07%)            0.2500",
        "0.03                       100.00% (95 %: 83.89% to 100.00%)           0.2500  <- chosen",
        "0.3                                                                  diverged",
    ]


class FakeTraining:
    """A training that diverges at the rate 0.3, and notes its calls."""

    def __init__(self):
        self.calls = []
        self.later_steps = []

    def __call__(
        self,
        config,
        data,
        workdir,
        later_steps,
    ):
        rate = config.schedule.learning_rate
        self.later_steps.append(later_steps)
        workdir.check()
        self.calls.append((rate, data.test_name))
        (workdir.folder / "checkpoints" / "20" / "model").mkdir(parents=True)

        if rate == 0.3:
            raise FloatingPointError(DIVERGED["diverged"])

        write_summary(workdir.folder, build_result(0.5, 0.5))
        return build_result(0.5, 0.5)


SEARCHING = dataclasses.replace(
    CONFIG,
    search=SearchConfig(learning_rates=(0.1, 0.3)),
    total="20 steps",
)


def build_source(sizes):
    """Return images of four classes with these numbers of images."""
    labels = np.repeat(np.arange(4), sizes)
    pixels = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return MemorySource(pixels, labels, ("ant", "bee", "cat", "dog"))


def test_each_rate_is_tried_once(tmp_path):
    """A trial leaves its summary, diverged or not, and no checkpoints."""
    source = build_source((2, 2, 2, 2))
    training = FakeTraining()
    folder = tmp_path / "search" / "learning_rate=0.3"

    for _ in range(2):
        config, trials = choose_learning_rate(
            SEARCHING,
            Datasets(source, source),
            tmp_path,
            training,
        )
        files = sorted(path.name for path in folder.iterdir())
        assert config == with_learning_rate(SEARCHING, 0.1)
        assert trials == {0.1: build_result(0.5, 0.5), 0.3: DIVERGED}
        assert files == ["config.json", "summary.json"]

    assert training.calls == [(0.1, "validation"), (0.3, "validation")]


@pytest.mark.parametrize(
    ("sizes", "missing"),
    [((3, 1, 2, 1), "bee, dog"), ((2, 2, 2, 2), None)],
)
def test_a_search_prints_its_steps_and_classes_without_validation_images(
    tmp_path,
    capsys,
    sizes,
    missing,
):
    source = build_source(sizes)
    training = FakeTraining()
    steps = resolve(SEARCHING, num_examples=sum(sizes), num_devices=8).total

    choose_learning_rate(
        SEARCHING,
        Datasets(source, source),
        tmp_path,
        training,
    )
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("note")]
    (search,) = [line for line in lines if line.startswith("search   2 trials")]
    first, last = training.later_steps

    assert last == steps
    assert search.startswith(f"search   2 trials of {first - last} steps, tested on ")
    assert search.endswith(f"; then {steps} steps on all with the best learning rate")
    if missing:
        note = f"note     these classes have no validation image in the search: {missing}"
        assert notes == [note]
        assert lines[1] == search
    else:
        assert notes == []
        assert lines[0] == search


def test_a_trial_is_judged_once_at_its_end():
    """Also where the final run stops early.

    A trial has fewer images than the final run, and its epochs fewer steps. It can be interrupted
    like any run.
    """
    config = dataclasses.replace(CONFIG, stop_early=StopEarlyConfig(patience=2))

    final = with_learning_rate(config, 0.01)
    trial = trial_config(config, 0.01)

    assert find_changed_fields(config, final) == {"schedule", "search"}
    assert find_changed_fields(CONFIG.schedule, final.schedule) == {"learning_rate"}
    assert find_changed_fields(final, trial) == {"evaluation", "checkpoint", "stop_early"}
    assert trial.stop_early == StopEarlyConfig()
    assert trial.checkpoint.keep_latest == 1
    assert trial.checkpoint.keep_best == 0
    assert trial.checkpoint.every == CONFIG.checkpoint.every
    for num_examples in (64, 100, 1_437):
        steps = resolve(trial, num_examples=num_examples, num_devices=8)
        assert steps.evaluate_every == steps.total
