"""Chosen metrics of a run: the same numbers in its evaluations and in `vit-jax evaluate`."""

import json

import pytest

from tests.integration import commands
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.train.pretrain import pretrain

pytestmark = pytest.mark.usefixtures("compiled_once")

BRIER = "docs.examples.metric:brier"
LENGTH = (
    "total=4 steps",
    "schedule.warmup=1 step",
    "evaluation.every=2 steps",
    "logging.every=1 step",
)


@pytest.mark.slow
def test_a_run_and_the_evaluation_of_its_weights(tmp_path):
    metrics = f"top5_accuracy,calibration_error,f1_macro,{BRIER}"
    config = runs.config(
        *LENGTH,
        f"evaluation.metrics={metrics}",
        "checkpoint.best_metric=test_brier",
    )
    summary = pretrain(config, str(tmp_path))
    lines = []
    for line in commands.metrics(tmp_path):
        if "test_brier" in line:
            lines.append(line)

    assert [line["step"] for line in lines] == [2, 4]

    words = ["evaluate", tmp_path, "--data=digits", f"--metrics={metrics}", "--json"]
    found = json.loads(commands.succeed([*map(str, words)]))

    for name in ("accuracy", "top5_accuracy", "calibration_error", "f1_macro", "loss", "brier"):
        assert found[name] == pytest.approx(summary[f"test_{name}"], rel=1e-4), name


def test_without_chosen_metrics_the_results_are_the_usual_ones(tmp_path):
    summary = pretrain(
        runs.config("total=1 step", "schedule.warmup=0 steps"),
        str(tmp_path),
    )
    results = {name for name in summary if name.startswith("test_")}

    assert results == {"test_accuracy", "test_loss", "test_images"}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["evaluation.metrics=top6_accuracy"], "top5_accuracy"),
        (["evaluation.metrics=docs.examples.metric:nothing"], "has no 'nothing'"),
        (
            [
                "evaluation.metrics=top5_accuracy",
                "objective.kind=masked_patch",
                "input.mixup_alpha=0",
                "checkpoint.best_metric=test_loss",
            ],
            "no effect",
        ),
    ],
)
def test_metrics_that_a_run_cannot_have(options, rule, tmp_path):
    with rejects("evaluation.metrics", rule):
        pretrain(runs.config(*options), str(tmp_path))


def test_metrics_of_several_labels_need_such_data(tmp_path):
    with rejects("config.evaluation.metrics", "f1_micro.*single-label"):
        pretrain(runs.config("evaluation.metrics=f1_micro"), str(tmp_path))
