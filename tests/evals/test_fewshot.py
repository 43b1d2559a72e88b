"""Few-shot evaluation: which examples are taken, and what is reported where a class has too few."""

import itertools

import numpy as np
import pytest

from vit_jax.evals.features import Features, FrozenEvaluator
from vit_jax.evals.few_shot_table import choose_l2
from vit_jax.evals.fewshot import (
    FewShot,
    FewShotResult,
    compute_spread,
    make_few_shot_measure,
    measure_few_shot,
    order_examples,
)
from vit_jax.evals.least_squares import LeastSquares

LABELS = np.array([2, 0, 1, 0, 2, 2, 0, 1, 0, 0], np.int32)  # five, two and three images


def features(labels, seed=0, noise=0.1, unreadable=()):
    """Return features around another corner for each class."""
    rng = np.random.default_rng(seed)
    corners = np.eye(4)[labels]
    deviation = rng.normal(size=corners.shape)
    feature_ND = corners + noise * deviation
    numbers = np.arange(len(labels), dtype=np.uint64)
    is_read = ~np.isin(numbers, unreadable)
    feature_ND[~is_read] = 0

    return Features(
        feature_ND.astype(np.float32),
        labels,
        is_read,
        numbers,
    )


def to_lists(arrays):
    return [array.tolist() for array in arrays]


def test_choice_is_that_of_the_released_evaluator():
    """Each class is permuted by one generator; without a seed, images come in their order."""
    shuffled = order_examples(LABELS, 4, seed=1)
    in_order = order_examples(LABELS, 4, seed=None)

    indices_of_classes = [
        [1, 3, 6, 8, 9],
        [2, 7],
        [0, 4, 5],
        [],
    ]
    assert to_lists(in_order) == indices_of_classes

    rng = np.random.default_rng(1)
    expected = []
    for indices in indices_of_classes:
        permuted = rng.permutation(np.array(indices, int))
        expected.append(permuted)

    assert to_lists(shuffled) == to_lists(expected)


def test_a_class_with_too_few_gives_what_it_has(monkeypatch):
    seen = []

    class RecordingLeastSquares(LeastSquares):
        def __init__(self, feature_ND, label_N, num_classes):
            seen.append(label_N)
            super().__init__(feature_ND, label_N, num_classes)

    monkeypatch.setattr("vit_jax.evals.fewshot.LeastSquares", RecordingLeastSquares)
    protocol = FewShot(shots=(2, 4), seeds=(0,))
    support = features(LABELS)
    test = features(LABELS, 1)

    measure_few_shot(protocol, support, test, 4)

    two, four = seen
    assert np.bincount(two).tolist() == [2, 2, 2]
    assert np.bincount(four).tolist() == [4, 2, 3]


def test_accuracies_and_short_classes():
    """The class without an example is never predicted."""
    support = features(LABELS, noise=0.01)
    classes = np.arange(4, dtype=np.int32)
    labels = classes.repeat(5)
    test = features(labels, 1, noise=0.01)
    protocol = FewShot(
        shots=(1, 3),
        seeds=(0, 1),
        l2=(1e-3, 1.0),
    )

    result = measure_few_shot(protocol, support, test, 4)

    measured = itertools.product(protocol.shots, protocol.l2)

    assert result.num_test == 20
    assert result.short_classes == {
        1: (3,),
        3: (1, 3),
    }
    assert set(result.accuracies) == set(measured)
    assert result.accuracies[3, 1e-3] == [0.75, 0.75]


def test_unreadable_images_are_neither_learnt_from_nor_counted():
    support = features(LABELS, unreadable=(0, 4, 5))
    test = features(LABELS, 1, unreadable=(1,))
    protocol = FewShot(shots=(1,), seeds=(0,))

    result = measure_few_shot(protocol, support, test, 3)

    assert result.num_test == 9
    assert result.short_classes == {1: (2,)}


# Hand-made accuracies of three datasets at penalties 1, 10 and 100, for 1 shot and for 5. The mean
# prefers a penalty that is far ahead on one dataset, the mean rank one that is ahead on most.
PENALTIES = (1.0, 10.0, 100.0)
ACCURACIES = {
    1: [
        (0.10, 0.20, 0.90),
        (0.60, 0.62, 0.61),
        (0.40, 0.45, 0.41),
    ],
    5: [
        (0.93, 0.92, 0.20),
        (0.71, 0.70, 0.72),
        (0.81, 0.80, 0.82),
    ],
}


def test_a_side_without_readable_images_is_an_error():
    nothing = features(LABELS, unreadable=list(range(10)))
    test = features(LABELS, 1, unreadable=(1,))

    with pytest.raises(ValueError, match="one side has none"):
        measure_few_shot(FewShot(), nothing, test, 3)


def make_results():
    """Return one result for each dataset of `ACCURACIES`.

    Two seeds lie symmetrically around each accuracy.
    """
    results = []
    for dataset in range(3):
        accuracies = {}
        for shots, rows in ACCURACIES.items():
            means = rows[dataset]
            for l2, mean in zip(PENALTIES, means, strict=True):
                accuracies[shots, l2] = [mean - 0.05, mean + 0.05]
        results.append(FewShotResult(accuracies, num_test=100, short_classes={}))
    return results


def test_mean_accuracy_chooses_one_penalty_at_the_most_shots():
    """The best mean over datasets counts, not the best of one: 0.817, 0.807, 0.580 of 5 shots."""
    protocol = FewShot(
        shots=(1, 5),
        seeds=(0, 1),
        l2=PENALTIES,
    )

    found = choose_l2(make_results(), protocol)

    assert found == {1: 1.0, 5: 1.0}


def test_mean_rank_chooses_a_penalty_for_each_number_of_shots():
    """Ranks by hand, 0 for the lowest; of equal sums the first penalty is taken.

    1 shot: 012, 021, 021, sums 0 5 4. 5 shots: 210, 102, 102, sums 4 1 4.
    """
    protocol = FewShot(
        shots=(1, 5),
        seeds=(0, 1),
        l2=PENALTIES,
        penalty_choice="mean_rank",
    )

    found = choose_l2(make_results(), protocol)

    assert found == {1: 10.0, 5: 1.0}

    for shots, accuracies in ACCURACIES.items():
        accuracy_DL = np.array(accuracies)
        is_lower_DLL = accuracy_DL[:, None, :] < accuracy_DL[:, :, None]
        rank_DL = is_lower_DLL.sum(axis=-1)
        best = rank_DL.mean(axis=0).argmax()
        assert found[shots] == PENALTIES[best]


def test_mean_rank_of_equal_accuracies_follows_the_order_given():
    """In scenic, two argsorts make the ranks: the later of equal penalties has the higher rank."""
    penalties = (100.0, 1.0, 10.0)
    result = FewShotResult(
        {(1, l2): [0.5] for l2 in penalties},
        num_test=2,
        short_classes={},
    )
    protocol = FewShot(
        shots=(1,),
        seeds=(0,),
        l2=penalties,
        penalty_choice="mean_rank",
    )

    found = choose_l2([result, result], protocol)

    assert found == {1: 10.0}


def test_evaluator_yields_mean_and_spread():
    support = features(LABELS, noise=1.0)
    test = features(LABELS, 1, noise=1.0)
    measure = make_few_shot_measure(
        3,
        shots=(1, 2),
        seeds=(0, 1, 2),
    )
    evaluator = FrozenEvaluator(lambda state: (support, test), measure)

    found = dict(evaluator.run(None))

    protocol = FewShot(shots=(1, 2))
    result = measure_few_shot(protocol, support, test, 3)
    expected = result.accuracies[2, 1024.0]

    assert list(found) == [
        "1shot_accuracy",
        "1shot_spread",
        "2shot_accuracy",
        "2shot_spread",
    ]
    expected_spread = np.std(expected, ddof=1)
    assert found["2shot_accuracy"] == pytest.approx(np.mean(expected))
    assert found["2shot_spread"] == pytest.approx(expected_spread)


def test_one_seed_has_no_spread():
    assert compute_spread([0.5]) == 0.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shots", (), "shots=().*whole numbers from 1"),
        ("shots", (5, 5), "different"),
        ("seeds", (-1,), "from 0"),
        ("l2", (0.0,), "positive"),
        ("sampling", "last", "random or first"),
        ("l2", (), r"l2=\(\).*positive"),
        (
            "penalty_choice",
            "mean_rank",
            "penalty_choice='mean_rank'.*one penalty.*Give several",
        ),
    ],
)
def test_rejected_protocols(field, value, message):
    with pytest.raises(ValueError, match=message):
        FewShot(**{field: value})


def test_the_first_images_are_one_choice_without_seeds():
    assert FewShot(sampling="first").orders == (None,)
    assert FewShot().orders == (0, 1, 2)

    with pytest.raises(ValueError, match=r"seeds=.*no effect"):
        FewShot(sampling="first", seeds=(0, 1))


def test_an_unknown_choice_of_penalties_is_rejected():
    rule = "penalty_choice='median'.*mean_accuracy or mean_rank"

    with pytest.raises(ValueError, match=rule):
        FewShot(penalty_choice="median", l2=(1.0, 2.0))
