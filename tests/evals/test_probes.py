"""What is fitted on features, and what readers of the results are told."""

import dataclasses
import functools

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, log_loss

from tests.evals.test_fewshot import features
from tests.rejections import rejects
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals import linear_probe
from vit_jax.evals.few_shot_table import run_few_shot
from vit_jax.evals.fewshot import FewShot
from vit_jax.evals.linear_probe import probe
from vit_jax.evals.probes import measure_neighbours, run_on_pairs, to_text
from vit_jax.evals.splits import Pair

NAMES = ("ant", "bee", "cat", "dog")


class Found:
    """In the place of an extractor: features made of the labels, the same images where the data say so."""

    def __init__(self, unreadable=()):
        self._unreadable = unreadable

    def extract(self, source):
        seed = 0 if source.is_same else source.seed
        found = features(
            source.labels.astype(np.int32),
            seed,
            unreadable=self._unreadable if source.seed else (),
        )

        return dataclasses.replace(found, hash_N=found.hash_N + np.uint64(1000 * seed))


def pair(name, train_labels, test_labels, *, is_same=False):
    sides = []
    for seed, labels in enumerate((train_labels, test_labels)):
        source = MemorySource(np.zeros((len(labels), 1, 1, 1), np.uint8), np.array(labels), NAMES)
        source.seed = seed
        source.is_same = is_same
        sides.append(source)

    return Pair(name, *sides)


BALANCED = [0, 1, 2, 3] * 12


def test_notes_say_what_a_reader_should_know():
    odd = pair("x", [0, 0, 1, 3], [0, 1, 2, 3, 3], is_same=True)
    _, notes = run_on_pairs([odd], Found(unreadable=(0,)), lambda *_: (None, []))

    expected_notes = [
        "x: 1 test image(s) cannot be read and are left out.",
        "x: 3 of 5 test images are among the training images too.",
        "x: no training image of cat; their test images count as wrong.",
    ]
    assert notes == expected_notes


def test_few_shot_table():
    pairs = [pair("first", BALANCED, BALANCED), pair("second", [0, 1, 2, 3, 3], [0, 1, 2, 3])]
    table = run_few_shot(pairs, Found(), FewShot(shots=(1, 2), seeds=(0, 1)))
    found = table.to_dict()
    seeds = found["datasets"]["first"]["2"]["seeds"]

    assert len(seeds) == 2
    assert found["datasets"]["first"]["2"]["mean"] == pytest.approx(np.mean(seeds))

    means = [found["datasets"][name]["2"]["mean"] for name in ("first", "second")]

    assert found["average"]["2"] == pytest.approx(np.mean(means))

    lines = table.to_text().splitlines()

    assert [line.split()[0] for line in lines] == [
        "data",
        "first",
        "first",
        "second",
        "second",
        "average",
        "average",
    ]
    assert "second: fewer than 2 images of ant, bee, cat; those there are are used." in table.notes


@pytest.mark.parametrize("choice", ["mean_accuracy", "mean_rank"])
def test_penalties_are_chosen_for_all_datasets(choice):
    protocol = FewShot(
        shots=(1, 2),
        seeds=(0,),
        l2=(1e-3, 1e6),
        sampling="first",
        penalty_choice=choice,
    )
    table = run_few_shot([pair("first", BALANCED, BALANCED)], Found(), protocol)
    found = table.to_dict()

    assert set(found["l2_used"]) == {"1", "2"}

    for shots, l2 in found["l2_used"].items():
        result = found["datasets"]["first"][shots]
        assert result["mean"] == result["mean_by_l2"][f"{l2:g}"]

    assert f"the best {choice.replace('_', ' ')} of 2 over these datasets" in table.to_text()


def test_probes():
    train = Found().extract(pair("x", BALANCED, BALANCED).train)
    test = features(np.array(BALANCED), 1)
    _, closed = probe(train, test, 4, "least_squares")
    _, fixed = probe(train, test, 4, "logistic", 0.5)
    _, searched = probe(train, test, 4, "logistic")

    assert closed["penalty"] == 1024.0
    assert fixed["penalty"] == 0.5
    assert (
        closed["accuracy"] == fixed["accuracy"] == searched["accuracy"] == 1.0
    )  # the classes lie far apart
    assert "validation_loss" not in fixed
    assert len(searched["validation_loss"]) > 7
    assert "loss" not in closed  # least squares has no probabilities

    few = features(np.array([0, 1, 2, 3], np.int32))
    with rejects("", "enough images.*--penalty="):
        probe(few, test, 4, "logistic")


def noisy(num, seed):
    """Features of overlapping clusters, one for each class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(num) % 4
    found = features(labels)
    feature_ND = np.eye(8)[labels] + 0.8 * rng.normal(size=(num, 8))

    return dataclasses.replace(found, feature_ND=feature_ND.astype(np.float32))


def reference(train, test, penalty):
    """Log-losses of the test images by scikit-learn."""
    fitted = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=3000).fit(
        train.feature_ND,
        train.label_N,
    )
    log_NK = fitted.predict_log_proba(test.feature_ND)

    return -log_NK[np.arange(len(test)), test.label_N]


def test_the_penalty_has_the_least_log_loss_over_folds_as_by_scikit_learn(monkeypatch):
    monkeypatch.setattr(linear_probe, "SEARCH_FOLDS", 3)
    train = noisy(120, seed=1)
    test = noisy(2000, seed=2)
    _, found = probe(train, test, 4, "logistic", seed=3)
    splits = list(linear_probe._split_folds(train, 4, 3, 3))
    tried = {float(penalty): loss for penalty, loss in found["validation_loss"].items()}

    expected = {
        penalty: np.concatenate([reference(*split, penalty) for split in splits]).mean()
        for penalty in tried
    }
    assert tried == pytest.approx(expected, rel=1e-3)
    assert found["penalty"] == pytest.approx(min(expected, key=expected.get), rel=1e-3)

    others = [0.1, 1.0, 10.0, 100.0]

    assert found["loss"] <= 1.02 * min(reference(train, test, penalty).mean() for penalty in others)
    assert found["calibration_error"] < 0.06


def test_metrics_of_out_of_fold_predictions():
    train = noisy(80, seed=1)
    test = noisy(80, seed=2)
    _, found = probe(train, test, 4, "logistic", 1.0, folds=4)
    splits = list(linear_probe._split_folds(train, 4, 4, 0))

    expected = np.concatenate([reference(*split, 1.0) for split in splits]).mean()
    metrics = found["out_of_fold"]

    assert metrics["loss"] == pytest.approx(expected, rel=1e-3)
    assert metrics["accuracy"] == pytest.approx(np.mean(found["folds"]))  # folds of equal sizes
    assert metrics["images"] == [20] * 4

    confusion = np.array(metrics["confusion"])

    assert confusion.sum() == 80
    assert metrics["correct"] == confusion.diagonal().tolist()
    assert confusion.trace() / 80 == pytest.approx(metrics["accuracy"])

    lines = to_text({"x": found}).splitlines()
    errors = [line for line in lines if "calibration error" in line]

    assert ["test" in errors[0], "held-out" in errors[1], len(errors)] == [True, True, 2]


def several(num, seed):
    """Features of three classes that do not exclude each other, hidden by noise."""
    rng = np.random.default_rng(seed)
    label_NK = rng.integers(0, 2, size=(num, 3)).astype(np.int32)
    feature_ND = np.pad(label_NK, ((0, 0), (0, 5))) + 0.6 * rng.normal(size=(num, 8))
    found = features(np.zeros(num, np.int32))

    return dataclasses.replace(found, label_N=label_NK, feature_ND=feature_ND.astype(np.float32))


def test_several_labels():
    train = several(120, seed=1)
    test = several(400, seed=2)
    classifier, found = probe(train, test, 3, "logistic", folds=3)
    probability_NK = 1 / (1 + np.exp(-classifier.logits(test.feature_ND)))
    precision = average_precision_score(test.label_N, probability_NK, average="macro")

    assert found["mean_average_precision"] == pytest.approx(precision, abs=1e-3)

    loss = sum(log_loss(test.label_N[:, k], probability_NK[:, k]) for k in range(3))

    assert found["loss"] == pytest.approx(loss, rel=1e-4)
    assert found["calibration_error"] < 0.06

    metrics = found["out_of_fold"]

    assert [one["images"] for one in metrics["classes"]] == train.label_N.sum(axis=0).tolist()

    lines = to_text({"x": found}).splitlines()

    assert "test mean average precision" in lines[0]
    assert "held-out mean average precision" in lines[1]

    with rejects("--method=least_squares", "must be logistic"):
        probe(train, test, 3, "least_squares")


def test_folds():
    """Each part is measured by a classifier of the other parts: random labels cannot be predicted."""
    labels = np.array(BALANCED)
    train = features(labels)
    test = features(labels, 1)
    _, found = probe(train, test, 4, "least_squares", folds=5)

    assert found["folds"] == [1.0] * 5

    noise_ND = np.random.default_rng(0).normal(size=(48, 100)).astype(np.float32)
    random = dataclasses.replace(train, feature_ND=noise_ND)
    _, mixed = probe(random, random, 4, "logistic", 1e-3, folds=5)

    assert mixed["accuracy"] == 1.0  # learnt by heart
    assert np.mean(mixed["folds"]) < 0.6

    test_line, folds_line = to_text({"x": found}).splitlines()

    assert test_line.split()[1:6] == ["least_squares,", "penalty", "1024", "test", "accuracy"]
    assert folds_line.split()[1:7] == ["mean", "of", "5", "folds", "held-out", "accuracy"]
    assert test_line.index("100.00%") == folds_line.index("100.00%")

    with rejects("--folds", "at most the number of training images, 48"):
        probe(train, test, 4, "least_squares", folds=49)


def test_each_dataset_and_its_text():
    pairs = [pair("first", BALANCED, BALANCED)]
    knn = functools.partial(measure_neighbours, neighbours=(3, 100), temperature=0.07)
    results, notes = run_on_pairs(pairs, Found(), knn)
    interval = pytest.approx((48 / (48 + 1.959964**2), 1.0))

    expected_results = {
        "first": {
            "accuracy": {3: 1.0},
            "interval": {3: interval},
            "test_images": 48,
        }
    }
    assert results == expected_results
    assert notes == ["first: too few training images for 100 neighbours."]
    assert "3 neighbours" in to_text(results)

    # 48 / (48 + 1.96**2)
    expected = "test accuracy     100.00%  (95 % interval 92.59% to 100.00%) of 48 images"
    assert expected in to_text(results)

    results, _ = run_on_pairs(
        pairs,
        Found(),
        lambda pair, *sides: (probe(*sides, 4, "least_squares", 2.0)[1], []),
    )

    assert "least_squares, penalty 2" in to_text(results)
