"""What is fitted on frozen features: few-shot classifiers, probes, nearest neighbours; and how results are printed."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vit_jax.data.records import few
from vit_jax.evals.features import Features, notes_on
from vit_jax.evals.fewshot import FewShot, FewShotResult, choose_examples, choose_l2, few_shot, spread
from vit_jax.evals.intervals import wilson
from vit_jax.evals.least_squares import L2, LeastSquares, LinearClassifier
from vit_jax.evals.logistic import LogisticClassifier, choose_penalty, fit_logistic
from vit_jax.evals.neighbours import NUM_NEIGHBOURS, neighbour_accuracy
from vit_jax.transfer.datasets import Pair
from vit_jax.transfer.features import Extractor
from vit_jax.weights.description import describe_preparation
from vit_jax.weights.folding import stored_normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.transfer import ending_in, with_classifier

VALIDATION_FRACTION = 0.2
Method = Literal["logistic", "least_squares"]


def features_of(pair: Pair, extractor: Extractor) -> tuple[Features, Features, list[str]]:
    """Features of the training and of the test images, and what readers of a result on them should know."""
    train, test = extractor.extract(pair.train), extractor.extract(pair.test)
    return train, test, notes_on(pair.name, pair.train.class_names, train, test)


@dataclasses.dataclass(frozen=True)
class FewShotTable:
    """Few-shot accuracies of several datasets by name, and the penalty of each number of shots, chosen for all."""

    protocol: FewShot
    results: dict[str, FewShotResult]
    l2: Mapping[int, float]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: per dataset and number of shots the accuracy of each seed, their mean and spread."""
        datasets = {
            name: {
                str(shots): _summary(result.of(shots, self.l2[shots]))
                | {"test_images": result.num_test, "mean_by_l2": self._means(result, shots)}
                for shots in self.protocol.shots
            }
            for name, result in self.results.items()
        }
        average = {str(shots): self._average(shots) for shots in self.protocol.shots}
        l2_used = {str(shots): l2 for shots, l2 in self.l2.items()}
        return {**dataclasses.asdict(self.protocol), "l2_used": l2_used, "datasets": datasets, "average": average}

    def to_text(self) -> str:
        """A line for each dataset and number of shots, and the averages over the datasets."""
        lines = [f"{'data':<24} {'shots':>5} {'accuracy':>9} {'spread':>7}  seeds"]
        for name, result in self.results.items():
            for shots in self.protocol.shots:
                values = result.of(shots, self.l2[shots])
                seeds = " ".join(f"{value:.2%}" for value in values)
                lines.append(f"{name:<24} {shots:>5} {values.mean():>9.2%} {spread(values):>7.2%}  {seeds}")
        if len(self.results) > 1:
            lines += [f"{'average':<24} {shots:>5} {self._average(shots):>9.2%}" for shots in self.protocol.shots]
        if len(self.protocol.l2) > 1:
            used = ", ".join(f"{l2:g} for {shots} shots" for shots, l2 in self.l2.items())
            rule = self.protocol.penalty_choice.replace("_", " ")
            lines.append(f"penalty {used}: the best {rule} of {len(self.protocol.l2)} over these datasets")
        return "\n".join(lines)

    def _means(self, result: FewShotResult, shots: int) -> dict[str, float]:
        return {f"{l2:g}": float(result.of(shots, l2).mean()) for l2 in self.protocol.l2}

    def _average(self, shots: int) -> float:
        return float(np.mean([result.of(shots, self.l2[shots]).mean() for result in self.results.values()]))


def run_few_shot(pairs: Sequence[Pair], extractor: Extractor, protocol: FewShot) -> FewShotTable:
    """Evaluate every dataset with few shots. Of several penalties `choose_l2` selects those used for all datasets."""
    results, notes = {}, []
    for pair in pairs:
        train, test, found = features_of(pair, extractor)
        result = few_shot(protocol, train, test, pair.train.num_classes)
        notes += found
        for shots, classes in result.short.items():
            if classes:
                names = few([pair.train.class_names[k] for k in classes])
                notes.append(f"{pair.name}: fewer than {shots} images of {names}; those there are are used.")
        results[pair.name] = result
    return FewShotTable(protocol, results, choose_l2(list(results.values()), protocol), notes)


Classifier = LogisticClassifier | LinearClassifier


def fit_probe(
    train: Features, num_classes: int, method: Method, penalty: float | None, seed: int = 0
) -> tuple[Classifier, dict[str, Any]]:
    """Fit a linear classifier.

    Args:
      train: to fit on; all readable.
      num_classes: of the classifier.
      method: "logistic" regression, or "least_squares" in closed form.
      penalty: of the weights; None: of logistic regression the one that is best on `VALIDATION_FRACTION` of each class,
        of least squares that of few-shot evaluation.
      seed: of that part.

    Returns:
      The classifier; and "method", "penalty", of a search "validation": the accuracies by penalty.
    """
    found: dict[str, Any] = {"method": method}
    if method == "least_squares":
        penalty = L2 if penalty is None else penalty
        return LeastSquares(train.feature_ND, train.label_N, num_classes).solve(penalty), found | {"penalty": penalty}
    if penalty is None:
        penalty, tried = _search_penalty(train, num_classes, seed)
        found["validation"] = {f"{value:.4g}": accuracy for value, accuracy in tried.items()}
    classifier = fit_logistic(train.feature_ND, train.label_N, num_classes, penalty)
    return classifier, found | {"penalty": penalty, "iterations": classifier.iterations}


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
      The classifier; and what `fit_probe` returns with "accuracy", "interval", "test_images", and with `folds` "folds":
      the accuracy of each part of the training images for a classifier of the other parts.
    """
    train, test = train.readable(), test.readable()
    if not len(train) or not len(test):
        raise ValueError("A probe needs readable images to learn from and to test on; one side has none.")
    classifier, found = fit_probe(train, num_classes, method, penalty, seed)
    accuracy = _accuracy(classifier, test)
    if folds is not None:
        found["folds"] = list(_cross_validate(train, num_classes, method, penalty, folds, seed))
        found["training_images"] = len(train)
    interval = wilson(accuracy * len(test), len(test))
    return classifier, found | {"accuracy": accuracy, "interval": interval, "test_images": len(test)}


def _cross_validate(
    train: Features, num_classes: int, method: Method, penalty: float | None, folds: int, seed: int
) -> Iterator[float]:
    """Yield the accuracy on each of `folds` parts, which have the same share of every class, by the other parts."""
    if folds > len(train):
        raise ValueError(f"--folds={folds}: must be at most the number of training images, {len(train)}.")
    members = np.concatenate(choose_examples(train.label_N, num_classes, seed))
    for part in range(folds):
        rest, held = np.delete(members, np.s_[part::folds]), members[part::folds]
        classifier, _ = fit_probe(train.take(np.sort(rest)), num_classes, method, penalty, seed)
        yield _accuracy(classifier, train.take(held))


def _accuracy(classifier: Classifier, test: Features) -> float:
    return float((classifier.predict(test.feature_ND) == test.label_N).mean())


def run_probes(
    pairs: Sequence[Pair], extractor: Extractor, **options: Any
) -> Iterator[tuple[Pair, Classifier, dict[str, Any], list[str]]]:
    """Fit and measure a probe on one dataset after another; `options` as for `probe`.

    Yields:
      The dataset, its classifier, the results, and notes.
    """
    for pair in pairs:
        train, test, notes = features_of(pair, extractor)
        yield pair, *probe(train, test, pair.train.num_classes, **options), notes


def classifier_weights(weights: Weights, extractor: Extractor, pair: Pair, classifier: Classifier) -> Weights:
    """Return weights whose last layer is the classifier of the layer, for images prepared as the extractor does."""
    preparation = describe_preparation(extractor.transform, stored_normalisation(weights.preprocessing))
    base = ending_in(weights, extractor.layer)
    fitted = with_classifier(base, *classifier.to_linear(), pair.train.class_names)
    return dataclasses.replace(fitted, preprocessing=preparation, training=pair.training)


def run_neighbours(
    pairs: Sequence[Pair], extractor: Extractor, **options: Any
) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield for one dataset after another its name, the accuracies of nearest neighbours, and notes."""
    for pair in pairs:
        train, test, notes = features_of(pair, extractor)
        accuracies = neighbour_accuracy(train, test, pair.train.num_classes, **options)
        if left_out := [k for k in options.get("neighbours", NUM_NEIGHBOURS) if k not in accuracies]:
            notes.append(f"{pair.name}: too few training images for {', '.join(map(str, left_out))} neighbours.")
        images = int(test.is_read_N.sum())
        intervals = {k: wilson(accuracy * images, images) for k, accuracy in accuracies.items()}
        yield pair.name, {"accuracy": accuracies, "interval": intervals, "test_images": images}, notes


def to_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each dataset and method: the test accuracy with its 95 % interval."""
    lines = []
    for name, result in results.items():
        accuracy, interval = result["accuracy"], result["interval"]
        is_knn = isinstance(accuracy, dict)
        rows = accuracy if is_knn else {f"{result['method']}, penalty {result['penalty']:.4g}": accuracy}
        for key, value in rows.items():
            low, high = interval[key] if is_knn else interval
            what = f"{key} neighbours" if is_knn else key
            of = f"(95 % interval {low:.2%} to {high:.2%}) of {result['test_images']:,} images"
            lines.append(f"{name:<24} {what:<32} {'test accuracy':<17} {value:>7.2%}  {of}")
        if folds := result.get("folds"):
            what, deviation = f"mean of {len(folds)} folds", np.std(folds, ddof=1)
            of = f"standard deviation {deviation:.2%}, of {result['training_images']:,} training images"
            lines.append(f"{name:<24} {what:<32} {'held-out accuracy':<17} {np.mean(folds):>7.2%}  {of}")
    return "\n".join(lines)


def _search_penalty(train: Features, num_classes: int, seed: int) -> tuple[float, dict[float, float]]:
    members = choose_examples(train.label_N, num_classes, seed)
    counts = [round(len(indices) * VALIDATION_FRACTION) for indices in members]
    held = np.concatenate([indices[:count] for indices, count in zip(members, counts, strict=True)])
    rest = np.concatenate([indices[count:] for indices, count in zip(members, counts, strict=True)])
    if not len(held):
        raise ValueError(f"No class has enough images to hold {VALIDATION_FRACTION:.0%} out: give --penalty=.")
    fitted, validation = train.take(rest), train.take(held)

    def accuracy(penalty: float) -> float:
        return _accuracy(fit_logistic(fitted.feature_ND, fitted.label_N, num_classes, penalty), validation)

    return choose_penalty(accuracy)


def _summary(values: np.ndarray) -> dict[str, Any]:
    return {"seeds": values.tolist(), "mean": float(values.mean()), "spread": spread(values)}
