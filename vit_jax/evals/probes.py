"""Classifiers on frozen features of datasets: few-shot, linear probes, nearest neighbours; their results as text."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import scipy.special

from vit_jax.config.metric_names import list_metrics
from vit_jax.data.records import few
from vit_jax.evals.calibration import Calibration
from vit_jax.evals.features import Extractor, Features, count_by_class, notes_on, readable_sides
from vit_jax.evals.fewshot import (
    FewShot,
    FewShotResult,
    choose_examples,
    choose_l2,
    few_shot,
    spread,
)
from vit_jax.evals.intervals import wilson_interval
from vit_jax.evals.label_counts import LabelCounts, describe_classes
from vit_jax.evals.least_squares import L2, LeastSquares, LinearClassifier
from vit_jax.evals.logistic import LogisticClassifier, choose_penalty, fit_logistic
from vit_jax.evals.metric_functions import compute_metric
from vit_jax.evals.neighbours import NUM_NEIGHBOURS, neighbour_accuracy
from vit_jax.evals.splits import Pair
from vit_jax.text.tables import columns

SEARCH_FOLDS = 5
"""A search of the penalty holds out each fifth of the images once, with equal shares of every class."""
MOST_FOLDED = 50_000
"""Of more images one fifth is held out: its log-loss is precise enough."""
Method = Literal["logistic", "least_squares"]
Classifier = LogisticClassifier | LinearClassifier
Measure = Callable[[Pair, Features, Features], tuple[Any, list[str]]]
"""From a dataset and the features of its sides to results, and notes for their readers."""


def run_on_pairs(
    pairs: Sequence[Pair], extractor: Extractor, measure: Measure
) -> tuple[dict[str, Any], list[str]]:
    """Return the results of every dataset by its name, and notes."""
    results = {}
    notes = list[str]()
    for pair in pairs:
        train = extractor.extract(pair.train)
        test = extractor.extract(pair.test)
        notes += notes_on(pair.name, pair.train.class_names, train, test)
        results[pair.name], more = measure(pair, train, test)
        notes += more
    return results, notes


# Few-shot evaluation.


@dataclasses.dataclass(frozen=True)
class FewShotTable:
    """Few-shot accuracies of several datasets by name, and the penalty of each number of shots, chosen for all."""

    protocol: FewShot
    results: Mapping[str, FewShotResult]
    l2: Mapping[int, float]
    notes: list[str]

    def to_dict(self) -> dict[str, object]:
        """Return for JSON, by dataset and number of shots, the accuracy of each seed, their mean and spread."""
        datasets = {
            name: {str(shots): self._details(result, shots) for shots in self.protocol.shots}
            for name, result in self.results.items()
        }
        average = {str(shots): self._average(shots) for shots in self.protocol.shots}
        l2_used = {str(shots): l2 for shots, l2 in self.l2.items()}
        return {
            **dataclasses.asdict(self.protocol),
            "l2_used": l2_used,
            "datasets": datasets,
            "average": average,
        }

    def to_text(self) -> str:
        """Return a line for each dataset and number of shots, and the averages over the datasets."""
        rows = [["data", "shots", "accuracy", "spread", " seeds"]]
        for name, result in self.results.items():
            for shots in self.protocol.shots:
                values = result.of(shots, self.l2[shots])
                seeds = "".join(f" {value:.2%}" for value in values)
                rows.append(
                    [name, str(shots), f"{values.mean():.2%}", f"{spread(values):.2%}", seeds]
                )
        if len(self.results) > 1:
            rows += [
                ["average", str(shots), f"{self._average(shots):.2%}"]
                for shots in self.protocol.shots
            ]
        text = columns(rows, "<>>><", gap=" ", least=(24, 5, 9, 7))
        if len(self.protocol.l2) > 1:
            used = ", ".join(f"{l2:g} for {shots} shots" for shots, l2 in self.l2.items())
            rule = self.protocol.penalty_choice.replace("_", " ")
            text += (
                f"\npenalty {used}: the best {rule} of {len(self.protocol.l2)} over these datasets"
            )
        return text

    def _details(self, result: FewShotResult, shots: int) -> dict[str, object]:
        values = result.of(shots, self.l2[shots])
        return {
            "seeds": values.tolist(),
            "mean": float(values.mean()),
            "spread": spread(values),
            "test_images": result.num_test,
            "mean_by_l2": {
                f"{l2:g}": float(result.of(shots, l2).mean()) for l2 in self.protocol.l2
            },
        }

    def _average(self, shots: int) -> float:
        return float(
            np.mean([result.of(shots, self.l2[shots]).mean() for result in self.results.values()])
        )


def run_few_shot(pairs: Sequence[Pair], extractor: Extractor, protocol: FewShot) -> FewShotTable:
    """Evaluate every dataset with few shots. `choose_l2` selects one of several penalties for all datasets."""

    def measure(pair: Pair, train: Features, test: Features) -> tuple[FewShotResult, list[str]]:
        result = few_shot(protocol, train, test, pair.train.num_classes)
        names = pair.train.class_names
        short = {
            shots: few([names[k] for k in classes])
            for shots, classes in result.short.items()
            if classes
        }
        return result, [
            f"{pair.name}: fewer than {shots} images of {classes}; those there are are used."
            for shots, classes in short.items()
        ]

    results, notes = run_on_pairs(pairs, extractor, measure)
    return FewShotTable(protocol, results, choose_l2(list(results.values()), protocol), notes)


# Linear probes.


def fit_probe(
    train: Features, num_classes: int, method: Method, penalty: float | None, seed: int = 0
) -> tuple[Classifier, dict[str, Any]]:
    """Fit a linear classifier on readable images.

    Without a penalty, least squares takes that of few-shot evaluation, and logistic regression the one with the lowest
    log-loss of held-out images, see `SEARCH_FOLDS`.

    Returns:
      The classifier; and "method", "penalty", of a search "validation_loss": the log-losses by penalty.

    Raises:
      ValueError: there are too few images for a search.
    """
    results: dict[str, Any] = {"method": method}
    if method == "least_squares":
        penalty = L2 if penalty is None else penalty
        least_squares = LeastSquares(train.feature_ND, train.label_N, num_classes)
        return least_squares.solve(penalty), results | {"penalty": penalty}
    if penalty is None:
        penalty, tried = _search_penalty(train, num_classes, seed)
        results["validation_loss"] = {f"{value:.4g}": loss for value, loss in tried.items()}
    classifier = fit_logistic(train.feature_ND, train.label_N, num_classes, penalty)
    return classifier, results | {"penalty": penalty, "iterations": classifier.iterations}


def probe(
    train: Features,
    test: Features,
    num_classes: int,
    method: Method,
    penalty: float | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> tuple[Classifier, dict[str, Any]]:
    """Fit a linear classifier on all training images and measure it on the test images; arguments as `fit_probe`.

    Returns:
      The classifier; and the results of `fit_probe` with "accuracy", "interval", "test_images", of logistic regression
      "loss" and "calibration_error", and with `folds` "folds": the held-out accuracy of each fold, and
      "out_of_fold": metrics of the predictions of all folds. For several labels "mean_average_precision", "f1_micro"
      and "f1_macro" take the place of "accuracy" and "interval", and "loss" is summed over the classes.
    """
    train, test = readable_sides(train, test)
    require_probe_images(train.label_N, num_classes, method, penalty, folds)
    classifier, results = fit_probe(train, num_classes, method, penalty, seed)
    if folds is not None:
        parts = list(_cross_validate(train, num_classes, method, penalty, folds, seed))
        results["folds"] = [part.headline for part in parts]
        results["training_images"] = len(train)
        results["out_of_fold"] = _join(parts).describe(num_classes)
    return classifier, results | _predict(classifier, test).test_metrics()


def require_probe_images(
    label_N: np.ndarray, num_classes: int, method: Method, penalty: float | None, folds: int | None
) -> None:
    """Raise ValueError if the training images do not suit the method, or are too few for folds or a search."""
    if method == "least_squares" and label_N.ndim == 2:
        raise ValueError(
            "--method=least_squares: must be logistic for images that may have several labels. Leave it out."
        )
    if folds is not None and folds > len(label_N):
        raise ValueError(
            f"--folds={folds}: must be at most the number of training images, {len(label_N)}."
        )
    if method == "logistic" and penalty is None:
        _require_searched_images(label_N, num_classes)


def _require_searched_images(label_N: np.ndarray, num_classes: int) -> None:
    if len(label_N) < SEARCH_FOLDS or count_by_class(label_N, num_classes).max() < 2:
        raise ValueError(
            f"{len(label_N)} training images: no class has enough images to hold one out for a search of the penalty. "
            "Give --penalty=."
        )


@dataclasses.dataclass(frozen=True)
class _Predictions:
    """Predictions of images with known labels.

    Attributes:
      label_N: the labels.
      class_N: the predicted classes.
      confidence_N: probabilities of the predicted classes; None of a classifier without probabilities.
      loss_N: cross-entropies; None as `confidence_N`.
    """

    label_N: np.ndarray
    class_N: np.ndarray
    confidence_N: np.ndarray | None
    loss_N: np.ndarray | None

    @property
    def headline(self) -> float:
        """Accuracy: the fraction of right predictions."""
        return float((self.class_N == self.label_N).mean())

    def test_metrics(self) -> dict[str, Any]:
        """Return "accuracy", "interval" and "test_images", and the metrics of probabilities."""
        num_images = len(self.label_N)
        interval = wilson_interval(self.headline * num_images, num_images)
        metrics = {"accuracy": self.headline, "interval": interval, "test_images": num_images}
        return metrics | self.probability_metrics()

    def probability_metrics(self) -> dict[str, float]:
        """Return "loss" and "calibration_error"; {} of a classifier without probabilities."""
        if self.confidence_N is None or self.loss_N is None:
            return {}
        calibration = Calibration()
        calibration.add(self.confidence_N, self.class_N == self.label_N)
        return {"loss": float(self.loss_N.mean()), "calibration_error": calibration.error}

    def describe(self, num_classes: int) -> dict[str, Any]:
        """Return accuracy, metrics of probabilities, "images" and "correct" of each class, and "confusion".

        "confusion" has a row for each class, with its images by predicted class.
        """
        confusion_KK = np.zeros((num_classes, num_classes), np.int64)
        np.add.at(confusion_KK, (self.label_N, self.class_N), 1)
        return {
            "accuracy": self.headline,
            **self.probability_metrics(),
            "images": confusion_KK.sum(axis=1).tolist(),
            "correct": confusion_KK.diagonal().tolist(),
            "confusion": confusion_KK.tolist(),
        }


@dataclasses.dataclass(frozen=True)
class _SeveralLabels:
    """Predictions of images that may have several labels.

    Attributes:
      label_NK: 0 or 1.
      logit_NK: logits of the classes.
    """

    label_NK: np.ndarray
    logit_NK: np.ndarray

    @property
    def loss_N(self) -> np.ndarray:
        """Cross-entropy of each image, summed over the classes."""
        losses_NK = np.logaddexp(0.0, self.logit_NK) - self.logit_NK * self.label_NK
        return np.asarray(losses_NK.sum(axis=1))

    @property
    def headline(self) -> float:
        """Mean average precision."""
        return self.compute("mean_average_precision")

    def compute(self, metric: str) -> float:
        """Return the value of a metric."""
        value = compute_metric(metric, self._count())
        assert value is not None
        return value

    def test_metrics(self) -> dict[str, Any]:
        """Return the metrics, and "test_images"."""
        metrics: dict[str, Any] = {name: self.compute(name) for name in list_metrics("several")}
        return metrics | {"test_images": len(self.label_NK)}

    def describe(self, num_classes: int) -> dict[str, Any]:
        """Return the metrics, and "classes": those of each class, in the order of the classes."""
        metrics = self.test_metrics()
        del metrics["test_images"]
        class_names = [str(number) for number in range(num_classes)]
        return metrics | {"classes": describe_classes(class_names, self._count().per_class())}

    def _count(self) -> LabelCounts:
        counts = LabelCounts(self.label_NK.shape[1])
        probability_NK = scipy.special.expit(self.logit_NK).astype(np.float32)
        rows = {"probability_BK": probability_NK, "label_BK": self.label_NK, "loss_B": self.loss_N}
        counts.add(rows)
        return counts


def _predict(classifier: Classifier, test: Features) -> _Predictions | _SeveralLabels:
    if isinstance(classifier, LinearClassifier):
        return _Predictions(test.label_N, classifier.predict(test.feature_ND), None, None)
    if classifier.has_several_labels:
        return _SeveralLabels(test.label_N, classifier.logits(test.feature_ND))
    log_NK = classifier.log_probabilities(test.feature_ND)
    rows = np.arange(len(test))
    class_N = log_NK.argmax(axis=1)
    confidence_N = np.exp(log_NK[rows, class_N])
    return _Predictions(test.label_N, class_N, confidence_N, -log_NK[rows, test.label_N])


def _join(parts: Sequence[_Predictions | _SeveralLabels]) -> _Predictions | _SeveralLabels:
    """Return the predictions of several parts as one."""
    several = [part for part in parts if isinstance(part, _SeveralLabels)]
    if several:
        label_NK = np.concatenate([part.label_NK for part in several])
        return _SeveralLabels(label_NK, np.concatenate([part.logit_NK for part in several]))
    single = [part for part in parts if isinstance(part, _Predictions)]
    confidences = [part.confidence_N for part in single if part.confidence_N is not None]
    losses = [part.loss_N for part in single if part.loss_N is not None]
    return _Predictions(
        label_N=np.concatenate([part.label_N for part in single]),
        class_N=np.concatenate([part.class_N for part in single]),
        confidence_N=np.concatenate(confidences) if confidences else None,
        loss_N=np.concatenate(losses) if losses else None,
    )


def _cross_validate(
    train: Features, num_classes: int, method: Method, penalty: float | None, folds: int, seed: int
) -> Iterator[_Predictions | _SeveralLabels]:
    """Yield the predictions on each fold by a classifier of the other folds."""
    for fitted, held in _split_folds(train, num_classes, folds, seed):
        classifier, _ = fit_probe(fitted, num_classes, method, penalty, seed)
        yield _predict(classifier, held)


def _split_folds(
    train: Features, num_classes: int, folds: int, seed: int
) -> Iterator[tuple[Features, Features]]:
    """Yield for each fold the other images and its own.

    Folds have equal shares of every class; those of images that may have several labels are random.
    """
    if train.label_N.ndim == 2:
        members = np.random.default_rng(seed).permutation(len(train))
    else:
        members = np.concatenate(choose_examples(train.label_N, num_classes, seed))
    for fold in range(folds):
        rest = np.delete(members, np.s_[fold::folds])
        yield train.take(np.sort(rest)), train.take(members[fold::folds])


def _search_penalty(
    train: Features, num_classes: int, seed: int
) -> tuple[float, dict[float, float]]:
    """Choose by the mean log-loss of held-out images whose classes are fitted."""
    _require_searched_images(train.label_N, num_classes)
    splits = list(_split_folds(train, num_classes, SEARCH_FOLDS, seed))
    if len(train) > MOST_FOLDED:
        splits = splits[:1]

    def loss_of(penalty: float) -> float:
        losses = [_held_out_losses(*split, num_classes, penalty) for split in splits]
        return float(np.concatenate(losses).mean())

    return choose_penalty(loss_of)


def _held_out_losses(
    fitted: Features, held: Features, num_classes: int, penalty: float
) -> np.ndarray:
    classifier = fit_logistic(fitted.feature_ND, fitted.label_N, num_classes, penalty)
    losses = _predict(classifier, held).loss_N
    assert losses is not None
    if classifier.has_several_labels:
        return losses
    is_known = np.isin(held.label_N, fitted.label_N)
    return losses[is_known]


# Nearest neighbours.


def measure_neighbours(
    pair: Pair,
    train: Features,
    test: Features,
    neighbours: Sequence[int] = NUM_NEIGHBOURS,
    **options: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Return the accuracies of nearest neighbours, with intervals, and notes; options as for `neighbour_accuracy`."""
    accuracies = neighbour_accuracy(
        train, test, pair.train.num_classes, neighbours=neighbours, **options
    )
    impossible = ", ".join(str(k) for k in neighbours if k not in accuracies)
    notes = (
        [f"{pair.name}: too few training images for {impossible} neighbours."] if impossible else []
    )
    images = int(test.is_read_N.sum())
    intervals = {
        k: wilson_interval(accuracy * images, images) for k, accuracy in accuracies.items()
    }
    return {"accuracy": accuracies, "interval": intervals, "test_images": images}, notes


def to_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each dataset and classifier: the test accuracy with its 95 % interval."""
    rows = []
    for name, result in results.items():
        if "mean_average_precision" in result:
            classifier = f"{result['method']}, penalty {result['penalty']:.4g}"
            of = f" of {result['test_images']:,} images"
            precision = f"{result['mean_average_precision']:.2%}"
            rows.append([name, classifier, "test mean average precision", precision, of])
        accuracy = result.get("accuracy", {})
        interval = result.get("interval", {})
        if not isinstance(accuracy, dict):
            classifier = f"{result['method']}, penalty {result['penalty']:.4g}"
            accuracy = {classifier: accuracy}
            interval = {classifier: interval}
        for key, value in accuracy.items():
            low, high = interval[key]
            of = f" (95 % interval {low:.2%} to {high:.2%}) of {result['test_images']:,} images"
            rows.append(
                [
                    name,
                    key if isinstance(key, str) else f"{key} neighbours",
                    "test accuracy",
                    f"{value:.2%}",
                    of,
                ]
            )
        if folds := result.get("folds"):
            deviation = np.std(folds, ddof=1)
            of = f" standard deviation {deviation:.2%}, of {result['training_images']:,} training images"
            measure = "accuracy" if "accuracy" in result else "mean average precision"
            rows.append(
                [
                    name,
                    f"mean of {len(folds)} folds",
                    f"held-out {measure}",
                    f"{np.mean(folds):.2%}",
                    of,
                ]
            )
        for place, metrics in (("test", result), ("held-out", result.get("out_of_fold", {}))):
            if "loss" in metrics:
                loss = f" loss {metrics['loss']:.4g}"
                error = f"{metrics['calibration_error']:.2%}"
                rows.append([name, "", f"{place} calibration error", error, loss])
    return columns(rows, "<<<><", gap=" ", least=(24, 32, 17, 7))
