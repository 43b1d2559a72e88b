"""Chosen metrics: built-in and user-defined ones, in runs and in evaluations of weights."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score

from tests.evals.samples import (
    NAMES,
    evaluate_of,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
)
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.arrays import Batch, StepResults
from vit_jax.config.metric_names import METRICS, list_metrics
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals import ClassificationEvaluator, MultilabelEvaluator, Split
from vit_jax.evals.class_counts import ClassCounts
from vit_jax.evals.label_counts import LabelCounts
from vit_jax.evals.label_map import Labelled, build_identity_map
from vit_jax.evals.running_metrics import choose_metrics, make_metric_rows
from vit_jax.objectives.sums import score_classes
from vit_jax.sharding import build_mesh, replicate

BRIER = "docs.examples.metric:brier"
LABELS = np.random.default_rng(1).integers(0, 6, 37)  # the last class has no images
PIXELS = sample_pixels(len(LABELS))


def compute_largest_logit(logits_BK, label_BK):
    """Return two values of each image; no function summarises them."""
    largest_logit_B = logits_BK.max(axis=1)
    largest_label_B = label_BK.max(axis=1)
    return jnp.stack([largest_logit_B, largest_label_B], axis=1)


def compute_batch_mean(logits_BK, label_BK):
    return logits_BK.mean()


class NotCallable:
    direction = "max"


COUNTS = {"one": ClassCounts, "several": LabelCounts}


def test_every_metric_exists_and_is_used():
    for name, metric in METRICS.items():
        for labels, counts in COUNTS.items():
            is_computed = isinstance(getattr(counts, name, None), property)
            assert is_computed == (labels in metric.labels), (name, labels)

    assert list_metrics("one") == [
        "accuracy",
        "top5_accuracy",
        "f1_macro",
        "loss",
        "calibration_error",
    ]
    assert "mean_average_precision" in list_metrics("several")


@pytest.fixture(scope="module")
def model():
    mesh = build_mesh(jax.devices())
    return from_weights(sample_weights(), sharding=replicate(mesh))


def compute_calibration_error(is_right, confidence):
    """Return the error over 15 bins, in NumPy."""
    deviation = is_right - confidence
    bins = np.ceil(confidence * 15)
    total_gap = 0.0
    for number in np.unique(bins):
        total_gap += abs(deviation[bins == number].sum())
    return total_gap / is_right.size


def compute_brier(probability_NK, label_NK):
    squares_NK = np.square(probability_NK - label_NK)
    return squares_NK.sum(axis=1).mean()


@pytest.fixture(scope="module")
def expected(model):
    """All metrics in NumPy and scikit-learn, without batches, padding or devices."""
    logits_NK = logits_of(model.module, PIXELS)
    probability_NK = softmax(logits_NK)
    predicted_N = logits_NK.argmax(axis=1)
    label_logit_N = logits_NK[np.arange(37), LABELS]
    rank_N = (logits_NK > label_logit_N[:, None]).sum(axis=1)
    label_NK = np.eye(len(NAMES))[LABELS]
    is_right_N = predicted_N == LABELS
    confidence_N = probability_NK.max(axis=1)

    return {
        "accuracy": is_right_N.mean(),
        "top5_accuracy": np.mean(rank_N < 5),
        "calibration_error": compute_calibration_error(is_right_N, confidence_N),
        "f1_macro": f1_score(
            LABELS,
            predicted_N,
            average="macro",
            labels=range(6),
        ),
        "brier": compute_brier(probability_NK, label_NK),
    }


CHOSEN = ("f1_macro", "top5_accuracy", "calibration_error", BRIER)


@pytest.mark.parametrize(
    ("num_devices", "global_batch"),
    [
        (1, 64),
        (8, 5),
        (3, 10),
    ],
)
def test_evaluate_reports_chosen_metrics(
    num_devices,
    global_batch,
    expected,
    monkeypatch,
):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    mesh = build_mesh(devices)
    model = from_weights(sample_weights(), sharding=replicate(mesh))
    evaluate = evaluate_of(
        model,
        global_batch=global_batch,
        max_unreadable=0,
        chosen=choose_metrics(CHOSEN, "--metrics"),
    )
    labelled = Labelled(
        MemorySource(PIXELS, LABELS, NAMES),
        "words",
        [],
        build_identity_map(NAMES),
    )

    found = evaluate(labelled).values()

    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def run_evaluator(kind, chosen, logits_NK, labels, mask_N, objective_sums):
    """Evaluate logits in batches of 20."""

    measure = make_metric_rows(chosen)

    def step(scale, batch):
        logits_BK = batch.image_BHWC * scale
        rows = measure(logits_BK, batch)
        if batch.is_multilabel:
            rows |= score_classes(logits_BK, batch)
        return StepResults(objective_sums(logits_BK, batch), rows)

    def make_batches():
        for first in range(0, len(mask_N), 20):
            rows = slice(first, first + 20)
            yield Batch(
                jnp.asarray(logits_NK[rows]),
                jnp.asarray(labels[rows]),
                jnp.asarray(mask_N[rows]),
            )

    split = Split(
        "test",
        NAMES,
        int(mask_N.sum()),
        lambda: contextlib.nullcontext(make_batches()),
    )
    evaluator = kind(split, jax.jit(step), chosen)
    return dict(evaluator.run(jnp.float32(1)))


MASK = np.float32([0, *[1] * 37, 0, 0, 0])


def pad(array):
    """Put an unreadable image at the beginning and three rows of padding at the end."""
    return np.concatenate([array[:1], array, array[:3]])


def compute_sums(logits_BK, batch):
    """Return the sums of a step; logits of masked images need not be finite."""
    predicted_B = jnp.nan_to_num(logits_BK).argmax(axis=1)
    is_right_B = (predicted_B == batch.label_B).astype(jnp.float32)
    return {
        "loss": batch.mask_B.sum() * 0.5,
        "correct": (is_right_B * batch.mask_B).sum(),
        "weight": batch.mask_B.sum(),
    }


def test_a_run_reports_the_same_metrics(model, expected):
    """Logits of masked images, NaN or large, do not reach the sums."""
    logits_NK = logits_of(model.module, PIXELS)
    logits_NK = pad(logits_NK.astype(np.float32))
    logits_NK[MASK == 0] = np.nan
    logits_NK[-1] = 1e9
    chosen = choose_metrics(CHOSEN, "config.evaluation.metrics")

    found = run_evaluator(
        ClassificationEvaluator,
        chosen,
        logits_NK,
        pad(LABELS),
        MASK,
        compute_sums,
    )

    expected_results = expected | {"loss": 0.5, "images": 37}
    assert found == pytest.approx(expected_results, rel=1e-5)


def compute_loss_of_1(logits_BK, batch):
    num_images = batch.mask_B.sum()
    return {"loss": num_images, "weight": num_images}


def test_several_labels_have_their_own_metrics():
    rng = np.random.default_rng(0)
    logits_NK = rng.normal(size=(37, len(NAMES))).astype(np.float32)
    label_NK = rng.integers(0, 2, logits_NK.shape).astype(np.int32)
    chosen = choose_metrics(("calibration_error", BRIER), "config.evaluation.metrics")

    found = run_evaluator(
        MultilabelEvaluator,
        chosen,
        pad(logits_NK),
        pad(label_NK),
        MASK,
        compute_loss_of_1,
    )

    probability_NK = 1 / (1 + np.exp(-logits_NK.astype(np.float64)))
    expected_error = compute_calibration_error(label_NK, probability_NK)
    expected_brier = compute_brier(softmax(logits_NK), label_NK)
    expected_macro = f1_score(
        label_NK,
        probability_NK >= 0.5,
        average="macro",
    )

    assert found["calibration_error"] == pytest.approx(expected_error, rel=1e-5)
    assert found["brier"] == pytest.approx(expected_brier, rel=1e-5)
    assert found["f1_macro"] == pytest.approx(expected_macro)
    assert found["loss"] == 1


def test_metrics_of_one_label_are_rejected_for_several():
    chosen = choose_metrics(("top5_accuracy",), "--metrics")

    with rejects("--metrics", "top5_accuracy.*multi-label"):
        chosen.require_labels("several", "--metrics")


def test_names_of_earlier_versions_are_accepted():
    chosen = choose_metrics(("top1_accuracy", "macro_f1", "accuracy"), "--metrics")

    assert chosen.built_in == ("accuracy", "f1_macro")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("top5_acuracy", "top5_accuracy"),
        ("images_per_second", "must be one of accuracy"),
        ("no_such_package.metrics:brier", "there is no such module"),
        (f"{__name__}:NotCallable", "an object with a method measure"),
    ],
)
def test_metrics_that_do_not_exist(name, rule):
    with rejects("--metrics", rule):
        choose_metrics((name,), "--metrics")


def test_two_metrics_with_one_name():
    with rejects("--metrics", "another metric has the name brier"):
        choose_metrics((BRIER, "docs.examples.metric:brier"), "--metrics")


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        ("compute_batch_mean", "a row for each"),
        ("compute_largest_logit", "summarise"),
    ],
)
def test_values_without_the_form_of_a_metric(function, rule):
    chosen = choose_metrics((f"{__name__}:{function}",), "--metrics")
    zeros = jnp.zeros((4, 3))

    with rejects("metrics", rule):
        chosen.compute_custom_rows(zeros, zeros)
