"""Classifiers that are fitted on features, and the notes for readers of the results."""

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


class LabelFeatures:
    """An extractor whose features are made of the labels.

    Both sides have the same images if the source says so.
    """

    def __init__(self, unreadable=()):
        self._unreadable = unreadable

    def extract(self, source):
        seed = 0 if source.is_same else source.seed
        labels = source.labels.astype(np.int32)
        unreadable = self._unreadable if source.seed else ()
        found = features(labels, seed, unreadable=unreadable)

        hash_N = found.hash_N + np.uint64(1000 * seed)
        return dataclasses.replace(found, hash_N=hash_N)


class LabelSource(MemorySource):
    """A source of black images with these labels; the seed is that of their features."""

    def __init__(self, labels, seed, is_same):
        labels = np.array(labels)
        pixels = np.zeros((len(labels), 1, 1, 1), np.uint8)
        super().__init__(pixels, labels, NAMES)
        self.seed = seed
        self.is_same = is_same


def make_pair(name, train_labels, test_labels, *, is_same=False):
    train = LabelSource(train_labels, 0, is_same)
    test = LabelSource(test_labels, 1, is_same)
    return Pair(name, train, test)


BALANCED = [0, 1, 2, 3] * 12


def make_balanced_pair():
    return make_pair("first", BALANCED, BALANCED)


def test_notes_say_what_a_reader_should_know():
    odd = make_pair(
        "x",
        [0, 0, 1, 3],
        [0, 1, 2, 3, 3],
        is_same=True,
    )
    extractor = LabelFeatures(unreadable=(0,))

    _, notes = run_on_pairs(
        [odd],
        extractor,
        lambda *_: (None, []),
    )

    assert notes == [
        "x: 1 test image(s) cannot be read and are skipped.",
        "x: 3 of 5 test images are among the training images too.",
        "x: no training image of cat; their test images count as wrong.",
    ]


def test_few_shot_table():
    pairs = [
        make_balanced_pair(),
        make_pair("second", [0, 1, 2, 3, 3], [0, 1, 2, 3]),
    ]
    protocol = FewShot(shots=(1, 2), seeds=(0, 1))

    table = run_few_shot(pairs, LabelFeatures(), protocol)

    found = table.to_dict()
    first = found["datasets"]["first"]["2"]
    second = found["datasets"]["second"]["2"]
    average = (first["mean"] + second["mean"]) / 2

    one, other = first["seeds"]
    assert first["mean"] == pytest.approx((one + other) / 2)
    assert found["average"]["2"] == pytest.approx(average)

    lines = table.to_text().splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [
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

    table = run_few_shot(
        [make_balanced_pair()],
        LabelFeatures(),
        protocol,
    )

    found = table.to_dict()
    l2_used = found["l2_used"]
    assert set(l2_used) == {"1", "2"}
    for shots, l2 in l2_used.items():
        result = found["datasets"]["first"][shots]
        assert result["mean"] == result["mean_by_l2"][f"{l2:g}"]

    words = choice.replace("_", " ")
    assert f"the best {words} of 2 over these datasets" in table.to_text()


@pytest.fixture
def balanced_sides():
    """Features of 48 images on each side; the classes lie far apart."""
    labels = np.array(BALANCED)
    return features(labels), features(labels, 1)


def test_probes(balanced_sides):
    """Least squares has no probabilities, and a fixed penalty no search."""
    _, closed = probe(*balanced_sides, 4, "least_squares")
    _, fixed = probe(*balanced_sides, 4, "logistic", 0.5)
    _, searched = probe(*balanced_sides, 4, "logistic")

    for found in (closed, fixed, searched):
        assert found["accuracy"] == 1.0
    assert closed["penalty"] == 1024.0
    assert fixed["penalty"] == 0.5
    assert "loss" not in closed
    assert "validation_loss" not in fixed
    assert len(searched["validation_loss"]) > 7


def test_a_search_needs_enough_images(balanced_sides):
    _, test = balanced_sides
    few = features(np.arange(4))

    with rejects("", "enough images.*--penalty="):
        probe(few, test, 4, "logistic")


def replace_features(original, feature_ND, **changes):
    feature_ND = feature_ND.astype(np.float32)
    return dataclasses.replace(
        original,
        feature_ND=feature_ND,
        **changes,
    )


def make_noisy(num, seed):
    """Return features of overlapping clusters, one for each class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(num) % 4
    noise_ND = rng.normal(size=(num, 8))
    feature_ND = np.eye(8)[labels] + 0.8 * noise_ND

    return replace_features(features(labels), feature_ND)


def compute_losses_by_scikit_learn(train, test, penalty):
    """Return the log-losses of the test images."""
    regression = LogisticRegression(
        C=1 / penalty,
        tol=1e-8,
        max_iter=3000,
    )
    regression.fit(train.feature_ND, train.label_N)
    log_NK = regression.predict_log_proba(test.feature_ND)

    numbers = np.arange(len(test))
    return -log_NK[numbers, test.label_N]


def compute_held_out_loss(folds, penalty):
    """Return the mean loss over folds, each a pair of training and test images."""
    losses = []
    for train, test in folds:
        losses.append(compute_losses_by_scikit_learn(train, test, penalty))
    return np.concatenate(losses).mean()


def test_the_penalty_has_the_least_log_loss_over_folds_as_by_scikit_learn(monkeypatch):
    monkeypatch.setattr(linear_probe, "SEARCH_FOLDS", 3)
    train = make_noisy(120, seed=1)
    test = make_noisy(2000, seed=2)

    _, found = probe(
        train,
        test,
        4,
        "logistic",
        seed=3,
    )

    folds = list(linear_probe._split_folds(train, 4, 3, 3))
    expected = {}
    for penalty, loss in found["validation_loss"].items():
        expected_loss = compute_held_out_loss(folds, float(penalty))
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        expected[float(penalty)] = expected_loss
    best = min(expected, key=expected.get)

    assert found["penalty"] == pytest.approx(best, rel=1e-3)

    for penalty in (0.1, 1.0, 10.0, 100.0):
        losses = compute_losses_by_scikit_learn(train, test, penalty)
        assert found["loss"] <= 1.02 * losses.mean()
    assert found["calibration_error"] < 0.06


def test_metrics_of_out_of_fold_predictions():
    """The accuracy is the mean over folds, which have equal sizes."""
    train = make_noisy(80, seed=1)
    test = make_noisy(80, seed=2)

    _, found = probe(
        train,
        test,
        4,
        "logistic",
        1.0,
        folds=4,
    )

    metrics = found["out_of_fold"]
    folds = list(linear_probe._split_folds(train, 4, 4, 0))
    expected_loss = compute_held_out_loss(folds, 1.0)

    expected_accuracy = np.mean(found["folds"])
    assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-3)
    assert metrics["accuracy"] == pytest.approx(expected_accuracy)
    assert metrics["images"] == [20] * 4

    confusion = np.array(metrics["confusion"])
    num_correct = confusion.trace()
    assert confusion.sum() == 80
    assert np.array_equal(metrics["correct"], confusion.diagonal())
    assert num_correct / 80 == pytest.approx(metrics["accuracy"])

    lines = to_text({"x": found}).splitlines()
    of_test, of_folds = (line for line in lines if "calibration error" in line)

    assert "test" in of_test
    assert "held-out" in of_folds


def make_multilabel(num, seed):
    """Return features of three classes that may occur together, hidden by noise."""
    rng = np.random.default_rng(seed)
    label_NK = rng.integers(
        0,
        2,
        size=(num, 3),
        dtype=np.int32,
    )
    feature_ND = 0.6 * rng.normal(size=(num, 8))
    feature_ND[:, :3] += label_NK

    without_labels = features(np.zeros(num, np.int32))
    return replace_features(
        without_labels,
        feature_ND,
        label_N=label_NK,
    )


def test_several_labels():
    train = make_multilabel(120, seed=1)
    test = make_multilabel(400, seed=2)

    classifier, found = probe(
        train,
        test,
        3,
        "logistic",
        folds=3,
    )

    logits_NK = classifier.logits(test.feature_ND)
    probability_NK = 1 / (1 + np.exp(-logits_NK))
    expected_precision = average_precision_score(
        test.label_N,
        probability_NK,
        average="macro",
    )

    assert found["mean_average_precision"] == pytest.approx(expected_precision, abs=1e-3)

    expected_loss = 0
    for k in range(3):
        labels = test.label_N[:, k]
        expected_loss += log_loss(labels, probability_NK[:, k])

    assert found["loss"] == pytest.approx(expected_loss, rel=1e-4)
    assert found["calibration_error"] < 0.06

    classes = found["out_of_fold"]["classes"]
    images = [row["images"] for row in classes]

    assert np.array_equal(images, train.label_N.sum(axis=0))

    of_test, of_folds, *_ = to_text({"x": found}).splitlines()
    assert "test mean average precision" in of_test
    assert "held-out mean average precision" in of_folds

    with rejects("--method=least_squares", "must be logistic"):
        probe(train, test, 3, "least_squares")


def test_folds(balanced_sides):
    _, found = probe(
        *balanced_sides,
        4,
        "least_squares",
        folds=5,
    )

    assert found["folds"] == [1.0] * 5

    text = to_text({"x": found})
    test_line, folds_line = text.splitlines()
    test_words = " ".join(test_line.split())
    folds_words = " ".join(folds_line.split())

    assert "least_squares, penalty 1024 test accuracy" in test_words
    assert "mean of 5 folds held-out accuracy" in folds_words
    assert test_line.index("100.00%") == folds_line.index("100.00%")


def test_there_are_at_most_as_many_folds_as_images(balanced_sides):
    with rejects("--folds", "at most the number of training images, 48"):
        probe(
            *balanced_sides,
            4,
            "least_squares",
            folds=49,
        )


def test_each_fold_is_measured_by_a_classifier_of_the_others():
    """Random labels can be learnt by heart, but not predicted."""
    rng = np.random.default_rng(0)
    noise_ND = rng.normal(size=(48, 100))
    balanced = features(np.array(BALANCED))
    random = replace_features(balanced, noise_ND)

    _, found = probe(
        random,
        random,
        4,
        "logistic",
        1e-3,
        folds=5,
    )

    assert found["accuracy"] == 1.0
    assert np.mean(found["folds"]) < 0.6


def test_each_dataset_and_its_text():
    """The lower end of the interval is 48 / (48 + 1.96**2)."""
    lowest = 48 / (48 + 1.959964**2)
    measure = functools.partial(
        measure_neighbours,
        neighbours=(3, 100),
        temperature=0.07,
    )

    results, notes = run_on_pairs(
        [make_balanced_pair()],
        LabelFeatures(),
        measure,
    )

    assert results == {
        "first": {
            "accuracy": {3: 1.0},
            "interval": {3: pytest.approx((lowest, 1.0))},
            "test_images": 48,
        }
    }
    assert notes == ["first: too few training images for 100 neighbours."]

    text = to_text(results)
    expected = "test accuracy     100.00%  (95 % interval 92.59% to 100.00%) of 48 images"

    assert "3 neighbours" in text
    assert expected in text


def test_the_text_of_a_probe_names_method_and_penalty():
    def measure(pair, train, test):
        _, found = probe(train, test, 4, "least_squares", 2.0)
        return found, []

    results, _ = run_on_pairs(
        [make_balanced_pair()],
        LabelFeatures(),
        measure,
    )

    assert "least_squares, penalty 2" in to_text(results)
