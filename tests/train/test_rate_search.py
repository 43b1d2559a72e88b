"""The choice of a learning rate: what a trial is, and which one wins."""

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


def trial(accuracy, loss):
    return {"validation_accuracy": accuracy, "validation_loss": loss}


def changes(before, after):
    """Names of fields that differ."""
    return {
        f.name
        for f in dataclasses.fields(before)
        if getattr(before, f.name) != getattr(after, f.name)
    }


def test_the_most_accurate_wins_then_the_lower_loss_then_the_lower_rate():
    assert choose({0.1: trial(0.8, 0.5), 0.01: trial(0.9, 2.0), 0.001: trial(0.7, 0.1)}) == 0.01

    tie = {
        0.1: trial(0.9, 0.5),
        0.03: trial(0.9, 0.4),
        0.01: trial(0.9, 0.4),
        0.001: trial(0.8, 0.1),
    }

    assert choose(tie) == choose(dict(reversed(tie.items()))) == 0.01


@pytest.mark.parametrize("lost", [DIVERGED, SPOILT, {**SPOILT, "validation_loss": math.inf}])
def test_a_trial_that_did_not_stay_finite_never_wins(lost):
    """Not even where the last update spoilt it, so that only its evaluation shows it."""
    for results in ({0.1: lost, 0.01: trial(0.2, 3.0)}, {0.01: trial(0.2, 3.0), 0.1: lost}):
        assert choose(results) == 0.01

    with rejects("learning rates 0.1, 0.3", "lower"):
        choose({0.1: lost, 0.3: DIVERGED})


def test_the_table_has_a_line_for_each_and_marks_the_best():
    text = table(
        {0.001: trial(0.5, 1.23456), 0.03: trial(0.9375, 0.25), 0.3: DIVERGED, 1.0: SPOILT},
        0.03,
    )
    expected = [
        "learning rate  validation accuracy  validation loss",
        "0.001                       50.00%           1.2346",
        "0.03                        93.75%           0.2500  <- chosen",
        "0.3                                        diverged",
        "1                                          diverged",
    ]

    assert text.splitlines() == expected


@pytest.mark.parametrize(("sizes", "said"), [((3, 1, 2, 1), "bee, dog"), ((2, 2, 2, 2), None)])
def test_each_rate_is_tried_once(tmp_path, capsys, sizes, said):
    """A trial leaves its summary, diverged or not, and no checkpoints; missing classes are named."""
    labels = np.repeat(np.arange(4), sizes)
    tried = []
    later = []
    source = MemorySource(
        np.zeros((len(labels), 2, 2, 3), np.uint8),
        labels,
        ("ant", "bee", "cat", "dog"),
    )
    config = dataclasses.replace(
        CONFIG,
        search=SearchConfig(learning_rates=(0.1, 0.3)),
        total="20 steps",
    )

    def train_with(config, data, workdir, split, later_steps):
        folder = workdir.folder
        later.append(later_steps)
        workdir.check()
        tried.append((config.schedule.learning_rate, split))
        (folder / "checkpoints" / "20" / "model").mkdir(parents=True)

        if config.schedule.learning_rate == 0.3:
            raise FloatingPointError(DIVERGED["diverged"])

        write_summary(folder, trial(0.5, 0.5))
        return trial(0.5, 0.5)

    for _ in range(2):
        chosen, trials = choose_learning_rate(
            config,
            Datasets(source, source),
            tmp_path,
            train_with,
        )
        expected = (
            with_learning_rate(config, 0.1),
            {0.1: trial(0.5, 0.5), 0.3: DIVERGED},
        )

        assert (chosen, trials) == expected

        files = [path.name for path in (tmp_path / "search" / "learning_rate=0.3").iterdir()]
        assert sorted(files) == ["config.json", "summary.json"]

    assert tried == [(0.1, "validation"), (0.3, "validation")]

    steps = resolve(config, num_examples=len(labels), num_devices=8).total
    assert later[1] == steps

    lines = capsys.readouterr().out.splitlines()
    assert lines[0 if said is None else 1].startswith(
        f"search   2 trials of {later[0] - later[1]} steps, tested on "
    )
    assert lines[0 if said is None else 1].endswith(
        f"; then {steps} steps on all with the best learning rate"
    )

    notes = {line for line in lines if line.startswith("note")}
    assert notes == (
        {f"note     these classes have no validation image in the search: {said}"}
        if said
        else set()
    )


def test_a_trial_is_judged_once_at_its_end():
    """Also where the final run stops early."""
    config = dataclasses.replace(CONFIG, stop_early=StopEarlyConfig(patience=2))
    final = with_learning_rate(config, 0.01)
    one = trial_config(config, 0.01)

    assert changes(config, final) == {"schedule", "search"}
    assert changes(CONFIG.schedule, final.schedule) == {"learning_rate"}
    assert changes(final, one) == {"evaluation", "checkpoint", "stop_early"}
    assert one.stop_early == StopEarlyConfig()

    for num_examples in (
        64,
        100,
        1_437,
    ):  # a trial has fewer images than the final run, and its epochs fewer steps
        steps = resolve(one, num_examples=num_examples, num_devices=8)
        assert steps.evaluate_every == steps.total

    assert (one.checkpoint.keep_latest, one.checkpoint.keep_best) == (1, 0)
    assert one.checkpoint.every == CONFIG.checkpoint.every  # it can be interrupted like any run
