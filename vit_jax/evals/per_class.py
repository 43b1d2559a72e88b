"""Counts over the answers to a split: accuracy by class, loss, calibration, what is taken for what, the worst mistakes.

They are added up as answers come, so that memory does not grow with the images.

Legend: L classes of the data, K outputs, A of them that may be answers, N images, T first answers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.evals.answers import Answers
from vit_jax.evals.calibration import Calibration
from vit_jax.evals.intervals import wilson

LARGEST_CONFUSION = 4_000_000  # classes times answers, say 2,000 by 2,000: 64 MB
MOST_MISTAKES = 24  # that are kept


class Mistake(NamedTuple):
    """A wrong answer: to which record, of which class, which output was most probable, and how probable."""

    record: int
    label: int
    answer: int
    probability: float


class Tally:
    """Counts over answers.

    Attributes:
      images_L, top1_L, top5_L: images of each class, and how many of them had a right answer first, or among the first
        five.
      loss: the sum of softmax cross-entropy.
      calibration: of the first answers.
      answer_A: the outputs that may be answers, ascending.
      first_2LA: images of each class by their first answer, the wrong ones [0] and the right ones [1] (an image may
        have several right answers); None where it would be too large.
      mistakes: the most confident ones, the first the worst.
    """

    def __init__(self, num_classes: int, answer_A: np.ndarray) -> None:
        self.images_L, self.top1_L, self.top5_L = np.zeros((3, num_classes), np.int64)
        self.loss = 0.0
        self.calibration = Calibration()
        self.answer_A = answer_A
        is_small = num_classes * len(answer_A) <= LARGEST_CONFUSION
        self.first_2LA = np.zeros((2, num_classes, len(answer_A)), np.int64) if is_small else None
        self.mistakes: list[Mistake] = []

    def add(self, answers: Answers, is_right_NT: np.ndarray) -> None:
        """Counts answers, of which `is_right_NT` says whether they are right."""
        label_N, first_N = answers.label_N, answers.class_NT[:, 0]
        is_right_N, confidence_N = is_right_NT[:, 0], answers.probability_NT[:, 0]
        for counts_L, counted_N in (
            (self.images_L, np.ones(len(label_N), bool)),
            (self.top1_L, is_right_N),
            (self.top5_L, is_right_NT.any(axis=1)),
        ):
            counts_L += np.bincount(label_N[counted_N], minlength=len(counts_L))
        self.loss += float(answers.loss_N.astype(np.float64).sum())
        self.calibration.add(confidence_N, is_right_N)
        if self.first_2LA is not None:
            place_N = np.searchsorted(self.answer_A, first_N)
            np.add.at(self.first_2LA, (is_right_N.astype(int), label_N, place_N), 1)
        wrong = np.flatnonzero(~is_right_N)
        wrong = wrong[np.argsort(-confidence_N[wrong], kind="stable")][:MOST_MISTAKES]
        rows = zip(answers.record_N[wrong], label_N[wrong], first_N[wrong], confidence_N[wrong], strict=True)
        found = [Mistake(int(record), int(label), int(one), float(p)) for record, label, one, p in rows]
        self.mistakes = sorted(self.mistakes + found, key=lambda one: (-one.probability, one.record))[:MOST_MISTAKES]

    @property
    def images(self) -> int:
        """All images."""
        return int(self.images_L.sum())

    def accuracies(self) -> Iterator[tuple[str, float, tuple[float, float]]]:
        """Yields "top1_accuracy" and "top5_accuracy" with their 95 % intervals."""
        for name, right_L in (("top1_accuracy", self.top1_L), ("top5_accuracy", self.top5_L)):
            right = float(right_L.sum())
            yield name, right / self.images, wilson(right, self.images)

    def confused(self, most: int) -> list[tuple[int, int, int]]:
        """The most frequent mistakes as (class, output, images), of equals the lower numbers first."""
        if self.first_2LA is None:
            return []
        labels, places = np.nonzero(self.first_2LA[0])
        counts = self.first_2LA[0, labels, places]
        order = np.argsort(-counts, kind="stable")[:most]
        return [(int(labels[i]), int(self.answer_A[places[i]]), int(counts[i])) for i in order]

    def table(self, class_names: Sequence[str], listed: Sequence[int]) -> Iterator[list[Any]]:
        """Yield the header, then for each listed class: name, images, right ones, accuracies with intervals.

        Accuracies are empty without images.
        """
        accuracies = [f"top{place}_{end}" for place in (1, 5) for end in ("accuracy", "low", "high")]
        yield ["class", "images", "top1_correct", *accuracies]
        for number in listed:
            images, counts = int(self.images_L[number]), (int(self.top1_L[number]), int(self.top5_L[number]))
            shares = [(count / images, *wilson(count, images)) if images else ("", "", "") for count in counts]
            cells = [f"{share:.6f}" if images else "" for triple in shares for share in triple]
            yield [class_names[number], images, counts[0], *cells]
