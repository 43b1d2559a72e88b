"""Few-shot evaluation: a linear classifier on features of a few images of each class.

For each seed the training images of each class are put in random order. For each number of shots,
a classifier is fitted to the first ones of each class by least squares (`least_squares`), and its
accuracy is measured on the test images.

Sources: ViT, section 4.1, for the idea; the released evaluator (big_vision, `fewshot_lsr`) for
everything that the paper does not state. An older evaluator (scenic) takes the first examples of
each class (`sampling="first"`), and the best of several penalties (`l2`, `penalty_choice`).

Legend: N images, D width of the features, K classes.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from vit_jax.config.schema import as_tuple
from vit_jax.evals.features import Features, MeasureFeatures, select_readable
from vit_jax.evals.least_squares import L2, LeastSquares

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
Sampling = Literal["random", "first"]
PenaltyChoice = Literal["mean_accuracy", "mean_rank"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot:
    """The protocol of few-shot evaluation.

    Attributes:
      shots: numbers of images of each class, with one classifier each; a larger choice contains the
        smaller ones.
      seeds: seeds of the random choices; None: `SEEDS`.
      l2: penalties on the weights; each is one result.
      sampling: "random" images of each class, or the "first" in the order of the records, which is
        one choice and takes no seeds.
      penalty_choice: rule by which a table of results reports one of several penalties: the highest
        mean accuracy over datasets, or the best mean rank. Only `few_shot_table.choose_l2` reads it.
    """

    shots: tuple[int, ...] = SHOTS
    seeds: tuple[int, ...] | None = None
    l2: tuple[float, ...] = (L2,)
    sampling: Sampling = "random"
    penalty_choice: PenaltyChoice = "mean_accuracy"

    def __post_init__(self) -> None:
        require_counts("shots", self.shots, lowest=1)
        if self.seeds is not None:
            require_counts("seeds", self.seeds, lowest=0)
        require_positive("l2", self.l2)
        require_choice("sampling", self.sampling, get_args(Sampling))
        require_choice("penalty_choice", self.penalty_choice, get_args(PenaltyChoice))
        if self.sampling == "first" and self.seeds is not None and len(self.seeds) > 1:
            raise ValueError(
                f"seeds={self.seeds}: have no effect with sampling='first'. Give none."
            )
        if self.penalty_choice == "mean_rank" and len(self.l2) == 1:
            raise ValueError(
                f"penalty_choice='mean_rank': has no effect with one penalty, l2={self.l2}. Give "
                "several."
            )

    @property
    def orders(self) -> tuple[int | None, ...]:
        """Orders of the images of a class: a seed for each, or None for that of the records."""
        if self.sampling == "first":
            return (None,)
        return self.seeds if self.seeds is not None else SEEDS


@dataclasses.dataclass(frozen=True)
class FewShotResult:
    """Accuracies on one dataset.

    Attributes:
      accuracies: fractions of the readable test images that are right, one for each seed, by
        (shots, l2).
      num_test: number of these images.
      short_classes: for each number of shots, the classes with fewer images, of which all are used.
    """

    accuracies: Mapping[tuple[int, float], list[float]]
    num_test: int
    short_classes: Mapping[int, tuple[int, ...]]


def measure_few_shot(
    protocol: FewShot,
    train: Features,
    test: Features,
    num_classes: int,
) -> FewShotResult:
    """Measure the accuracy of every choice of examples and every penalty.

    Raises:
      ValueError: no readable image on one of the sides, or too little memory.
    """
    train, test = select_readable(train, test)
    accuracies: dict[tuple[int, float], list[float]] = collections.defaultdict(list)
    for order in protocol.orders:
        examples_by_class = order_examples(train.label_N, num_classes, order)
        for num_shots in protocol.shots:
            chosen = np.concatenate([examples[:num_shots] for examples in examples_by_class])
            equations = LeastSquares(train.feature_ND[chosen], train.label_N[chosen], num_classes)
            for l2 in protocol.l2:
                classifier = equations.solve(l2)
                is_right_N = classifier.predict(test.feature_ND) == test.label_N
                accuracies[num_shots, l2].append(float(is_right_N.mean()))

    short_classes = find_short_classes(train.label_N, num_classes, protocol.shots)
    return FewShotResult(dict(accuracies), len(test), short_classes)


def find_short_classes(
    label_N: np.ndarray,
    num_classes: int,
    shots: Sequence[int],
) -> dict[int, tuple[int, ...]]:
    """Return for each number of shots the classes with fewer examples."""
    num_examples_K = np.bincount(label_N, minlength=num_classes)
    short_classes = {}
    for num_shots in shots:
        classes = np.flatnonzero(num_examples_K < num_shots)
        short_classes[num_shots] = tuple(classes.tolist())
    return short_classes


def order_examples(
    label_N: np.ndarray,
    num_classes: int,
    seed: int | None,
) -> list[np.ndarray]:
    """Return the indices of the examples of each class, in random order; in stored order for None.

    As released, one NumPy generator permutes the classes one after another.
    """
    by_class = np.argsort(label_N, kind="stable")
    ends_K = np.cumsum(np.bincount(label_N, minlength=num_classes))
    examples_by_class = np.split(by_class, ends_K[:-1])  # the last class ends with the array
    if seed is None:
        return examples_by_class

    rng = np.random.default_rng(seed)
    return [rng.permutation(examples) for examples in examples_by_class]


def make_few_shot_measure(
    num_classes: int,
    *,
    shots: Sequence[int],
    seeds: int | Sequence[int] | None = None,
    l2: float = L2,
    sampling: Sampling = "random",
) -> MeasureFeatures:
    """Return a measure that yields "5shot_accuracy", "5shot_spread" and so on.

    They are the mean and the standard deviation over the seeds. The arguments are those of
    `FewShot`, with one penalty; an integer is one seed.
    """
    protocol = FewShot(
        shots=tuple(shots),
        seeds=as_tuple(seeds) if seeds is not None else None,
        l2=(l2,),
        sampling=sampling,
    )

    def measure(train: Features, test: Features) -> Iterator[tuple[str, float]]:
        result = measure_few_shot(protocol, train, test, num_classes)
        for num_shots in protocol.shots:
            accuracies = result.accuracies[num_shots, l2]
            yield f"{num_shots}shot_accuracy", float(np.mean(accuracies))
            yield f"{num_shots}shot_spread", compute_spread(accuracies)

    return measure


def compute_spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation over seeds; 0 for a single one."""
    if len(values) <= 1:
        return 0.0
    return float(np.std(values, ddof=1))


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless the value of an argument is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be {' or '.join(choices)}.")


def require_counts(name: str, values: Sequence[int], lowest: int) -> None:
    """Raise ValueError unless values are different whole numbers, at least one."""
    are_different = len(set(values)) == len(values)
    is_valid = bool(values) and are_different
    for value in values:
        if type(value) is not int or value < lowest:
            is_valid = False

    if not is_valid:
        raise ValueError(
            f"{name}={values!r}: must be one or more different whole numbers from {lowest}."
        )


def require_positive(name: str, values: Sequence[float]) -> None:
    """Raise ValueError unless the values of an argument are positive, at least one."""
    if not values:
        raise ValueError(f"{name}={values!r}: must be a positive number.")
    for value in values:
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}={value!r}: must be a positive number.")
