"""Few-shot evaluation of several datasets, and its results as text and JSON.

Legend: S numbers of shots, T datasets, L penalties.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.data.records import few
from vit_jax.evals.features import Extractor, Features
from vit_jax.evals.fewshot import FewShot, FewShotResult, compute_spread, measure_few_shot
from vit_jax.evals.probes import run_on_pairs
from vit_jax.evals.splits import Pair
from vit_jax.text.tables import columns


@dataclasses.dataclass(frozen=True)
class FewShotTable:
    """Few-shot accuracies of several datasets.

    Attributes:
      protocol: the protocol of the evaluation.
      results: accuracies by the name of the dataset.
      l2: the penalty of each number of shots, chosen for all datasets.
      notes: remarks for readers.
    """

    protocol: FewShot
    results: Mapping[str, FewShotResult]
    l2: Mapping[int, float]
    notes: list[str]

    def to_dict(self) -> dict[str, object]:
        """Return accuracies, mean and spread by dataset and number of shots, for JSON."""
        datasets = {name: self._describe(result) for name, result in self.results.items()}

        l2_used = {str(shots): l2 for shots, l2 in self.l2.items()}

        average = {}
        for shots in self.protocol.shots:
            average[str(shots)] = self._compute_average(shots)

        return {
            **dataclasses.asdict(self.protocol),
            "l2_used": l2_used,
            "datasets": datasets,
            "average": average,
        }

    def to_text(self) -> str:
        """Return a line for each dataset and number of shots, and averages over datasets."""
        header = ["data", "shots", "accuracy", "spread", " seeds"]
        rows = [header]
        for name, result in self.results.items():
            for shots in self.protocol.shots:
                values = self._list_accuracies(result, shots)
                seeds = [f" {value:.2%}" for value in values]
                row = [
                    name,
                    str(shots),
                    f"{np.mean(values):.2%}",
                    f"{compute_spread(values):.2%}",
                    "".join(seeds),
                ]
                rows.append(row)

        if len(self.results) > 1:
            for shots in self.protocol.shots:
                average = self._compute_average(shots)
                row = ["average", str(shots), f"{average:.2%}"]
                rows.append(row)

        table = columns(rows, "<>>><", gap=" ", least=(24, 5, 9, 7))
        if len(self.protocol.l2) == 1:
            return table
        return f"{table}\n{self._describe_penalties()}"

    def _describe_penalties(self) -> str:
        """Return a line of text: the penalty of each number of shots, and how it was chosen."""
        penalties = []
        for shots, l2 in self.l2.items():
            penalties.append(f"{l2:g} for {shots} shots")
        used = ", ".join(penalties)

        rule = self.protocol.penalty_choice.replace("_", " ")
        num_penalties = len(self.protocol.l2)
        return f"penalty {used}: the best {rule} of {num_penalties} over these datasets"

    def _list_accuracies(self, result: FewShotResult, shots: int) -> list[float]:
        """Return the accuracies of the seeds with the chosen penalty."""
        return result.accuracies[shots, self.l2[shots]]

    def _describe(self, result: FewShotResult) -> dict[str, object]:
        """Return the accuracies of a dataset by the number of shots, for JSON."""
        by_shots: dict[str, object] = {}
        for shots in self.protocol.shots:
            by_shots[str(shots)] = self._describe_shots(result, shots)
        return by_shots

    def _describe_shots(self, result: FewShotResult, shots: int) -> dict[str, object]:
        values = self._list_accuracies(result, shots)
        mean_by_l2 = {}
        for l2 in self.protocol.l2:
            mean_by_l2[f"{l2:g}"] = float(np.mean(result.accuracies[shots, l2]))

        return {
            "seeds": values,
            "mean": float(np.mean(values)),
            "spread": compute_spread(values),
            "test_images": result.num_test,
            "mean_by_l2": mean_by_l2,
        }

    def _compute_average(self, shots: int) -> float:
        """Return the mean accuracy over the datasets."""
        means = []
        for result in self.results.values():
            means.append(np.mean(self._list_accuracies(result, shots)))
        return float(np.mean(means))


def run_few_shot(
    pairs: Sequence[Pair],
    extractor: Extractor,
    protocol: FewShot,
) -> FewShotTable:
    """Evaluate every dataset with few shots.

    `choose_l2` selects one of several penalties for all datasets.
    """

    def measure(
        pair: Pair,
        train: Features,
        test: Features,
    ) -> tuple[FewShotResult, list[str]]:
        result = measure_few_shot(protocol, train, test, pair.train.num_classes)
        return result, _list_notes(pair, result)

    results, notes = run_on_pairs(pairs, extractor, measure)

    l2 = choose_l2(list(results.values()), protocol)
    return FewShotTable(protocol, results, l2, notes)


def _list_notes(pair: Pair, result: FewShotResult) -> list[str]:
    """Return a remark for each number of shots that some classes do not have."""
    notes = []
    for shots, classes in result.short_classes.items():
        if not classes:
            continue

        class_names = [pair.train.class_names[k] for k in classes]
        names = few(class_names)
        notes.append(
            f"{pair.name}: fewer than {shots} images of {names}; those there are are used."
        )
    return notes


def choose_l2(results: Sequence[FewShotResult], protocol: FewShot) -> dict[int, float]:
    """Return for each number of shots the penalty that is used for all datasets.

    The accuracy of several seeds is their mean.
    """
    shape_STL = (len(protocol.shots), len(results), len(protocol.l2))
    accuracy_STL = np.zeros(shape_STL)
    for s, shots in enumerate(protocol.shots):
        for t, result in enumerate(results):
            for i, l2 in enumerate(protocol.l2):
                accuracy_STL[s, t, i] = np.mean(result.accuracies[shots, l2])

    if protocol.penalty_choice == "mean_rank":
        return _choose_by_mean_rank(accuracy_STL, protocol)
    return _choose_by_mean_accuracy(accuracy_STL, protocol)


def _choose_by_mean_accuracy(accuracy_STL: np.ndarray, protocol: FewShot) -> dict[int, float]:
    """Return the penalty with the highest mean accuracy over datasets at the most shots.

    It is used for all numbers of shots. Of equal penalties it is the largest. The rule is of this
    project.
    """
    most_shots = np.argmax(protocol.shots)
    mean_accuracy_L = accuracy_STL[most_shots].mean(axis=0)
    _, best_penalty = max(zip(mean_accuracy_L, protocol.l2, strict=True))
    return dict.fromkeys(protocol.shots, best_penalty)


def _choose_by_mean_rank(accuracy_STL: np.ndarray, protocol: FewShot) -> dict[int, float]:
    """Return for each number of shots the penalty with the highest mean rank over datasets.

    Ranks start at 0 for the lowest accuracy, and equal accuracies have ranks in the order of
    `protocol.l2`. Of equal mean ranks it is the first. The rule is of scenic.
    """
    order_STL = accuracy_STL.argsort(axis=-1, kind="stable")
    rank_STL = order_STL.argsort(axis=-1)
    best_S = rank_STL.mean(axis=1).argmax(axis=-1)
    best_penalties = {}
    for shots, best in zip(protocol.shots, best_S, strict=True):
        best_penalties[shots] = protocol.l2[best]
    return best_penalties
