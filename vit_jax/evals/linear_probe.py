"""Linear probes: classifiers on frozen features, with a searched penalty and cross-validation."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from vit_jax.evals.features import Features, count_by_class, select_readable
from vit_jax.evals.fewshot import order_examples
from vit_jax.evals.least_squares import L2, LeastSquares
from vit_jax.evals.logistic import choose_penalty, fit_logistic
from vit_jax.evals.probe_predictions import (
    Classifier,
    ClassPredictions,
    LabelPredictions,
    join_predictions,
    predict_features,
)
from vit_jax.storage.files import JsonObject

SEARCH_FOLDS = 5
"""A search holds out each fifth of the images once, with equal shares of every class."""
MOST_FOLDED = 50_000
"""The most images for folds; with more, one fifth is held out: its loss is precise enough."""
Method = Literal["logistic", "least_squares"]
Predictions = ClassPredictions | LabelPredictions


def fit_probe(
    train: Features,
    num_classes: int,
    method: Method,
    penalty: float | None,
    seed: int = 0,
) -> tuple[Classifier, JsonObject]:
    """Fit a linear classifier on readable images.

    Without a penalty, least squares takes the penalty of few-shot evaluation. Logistic regression
    takes the penalty with the lowest log-loss of held-out images, see `SEARCH_FOLDS`.

    Returns:
      The classifier; and "method", "penalty", of a search "validation_loss": the log-losses by
      penalty.

    Raises:
      ValueError: there are too few images for a search.
    """
    results: JsonObject = {"method": method}
    if method == "least_squares":
        penalty = L2 if penalty is None else penalty
        least_squares = LeastSquares(
            train.feature_ND,
            train.label_N,
            num_classes,
        )
        results["penalty"] = penalty
        return least_squares.solve(penalty), results

    if penalty is None:
        penalty, tried = _search_penalty(train, num_classes, seed)
        losses = {}
        for value, loss in tried.items():
            losses[f"{value:.4g}"] = loss
        results["validation_loss"] = losses

    classifier = fit_logistic(
        train.feature_ND,
        train.label_N,
        num_classes,
        penalty,
    )
    results["penalty"] = penalty
    results["iterations"] = classifier.iterations
    return classifier, results


def probe(
    train: Features,
    test: Features,
    num_classes: int,
    method: Method,
    penalty: float | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> tuple[Classifier, JsonObject]:
    """Fit a linear classifier on all training images and measure it on the test images.

    Arguments are as `fit_probe`.

    Returns:
      The classifier; and the results of `fit_probe` with "accuracy", "interval", "test_images", of
      logistic regression "loss" and "calibration_error", and with `folds` "folds": the held-out
      accuracy of each fold, and "out_of_fold": metrics of the predictions of all folds. For several
      labels "mean_average_precision", "f1_micro" and "f1_macro" take the place of "accuracy" and
      "interval", and "loss" is summed over the classes.
    """
    train, test = select_readable(train, test)
    require_probe_images(train.label_N, num_classes, method, penalty, folds)
    classifier, results = fit_probe(train, num_classes, method, penalty, seed)
    if folds is not None:
        held_out = _cross_validate(
            train,
            num_classes,
            method,
            penalty,
            folds,
            seed,
        )
        parts = list(held_out)
        results["folds"] = [part.headline for part in parts]
        results["training_images"] = len(train)
        results["out_of_fold"] = join_predictions(parts).describe(num_classes)

    predictions = predict_features(classifier, test)
    return classifier, results | predictions.test_metrics()


def require_probe_images(
    label_N: np.ndarray,
    num_classes: int,
    method: Method,
    penalty: float | None,
    folds: int | None,
) -> None:
    """Raise ValueError if images do not suit the method, or are too few for folds or a search."""
    if method == "least_squares" and label_N.ndim == 2:
        raise ValueError(
            "--method=least_squares: must be logistic for images that may have several labels. "
            "Leave it out."
        )
    if folds is not None and folds > len(label_N):
        raise ValueError(
            f"--folds={folds}: must be at most the number of training images, {len(label_N)}."
        )
    if method == "logistic" and penalty is None:
        _require_searched_images(label_N, num_classes)


def _require_searched_images(label_N: np.ndarray, num_classes: int) -> None:
    num_images_K = count_by_class(label_N, num_classes)
    if len(label_N) < SEARCH_FOLDS or num_images_K.max() < 2:
        raise ValueError(
            f"{len(label_N)} training images: no class has enough images to hold one out for a "
            "search of the penalty. Give --penalty=."
        )


def _cross_validate(
    train: Features,
    num_classes: int,
    method: Method,
    penalty: float | None,
    folds: int,
    seed: int,
) -> Iterator[Predictions]:
    """Yield the predictions on each fold by a classifier of the other folds."""
    for fitted, held in _split_folds(train, num_classes, folds, seed):
        classifier, _ = fit_probe(fitted, num_classes, method, penalty, seed)
        yield predict_features(classifier, held)


def _split_folds(
    train: Features,
    num_classes: int,
    folds: int,
    seed: int,
) -> Iterator[tuple[Features, Features]]:
    """Yield for each fold the other images and its images.

    Folds have equal shares of every class; they are random for images with several labels.
    """
    if train.label_N.ndim == 2:
        members = np.random.default_rng(seed).permutation(len(train))
    else:
        members_by_class = order_examples(train.label_N, num_classes, seed)
        members = np.concatenate(members_by_class)

    for fold in range(folds):
        held = np.s_[fold::folds]
        rest = np.delete(members, held)
        yield train.take(np.sort(rest)), train.take(members[held])


def _search_penalty(
    train: Features,
    num_classes: int,
    seed: int,
) -> tuple[float, dict[float, float]]:
    """Choose by the mean log-loss of held-out images whose classes are fitted."""
    _require_searched_images(train.label_N, num_classes)
    splits = list(_split_folds(train, num_classes, SEARCH_FOLDS, seed))
    if len(train) > MOST_FOLDED:
        splits = splits[:1]

    def loss_of(penalty: float) -> float:
        losses = []
        for fitted, held in splits:
            loss_N = _compute_held_out_losses(
                fitted,
                held,
                num_classes,
                penalty,
            )
            losses.append(loss_N)
        return float(np.concatenate(losses).mean())

    return choose_penalty(loss_of)


def _compute_held_out_losses(
    fitted: Features,
    held: Features,
    num_classes: int,
    penalty: float,
) -> np.ndarray:
    """Return the log-losses of held-out images; of one label, only those of fitted classes."""
    classifier = fit_logistic(
        fitted.feature_ND,
        fitted.label_N,
        num_classes,
        penalty,
    )
    loss_N = predict_features(classifier, held).loss_N
    assert loss_N is not None
    if classifier.has_several_labels:
        return loss_N
    is_known_N = np.isin(held.label_N, fitted.label_N)
    return loss_N[is_known_N]
