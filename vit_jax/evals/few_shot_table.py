"""Few-shot evaluation of several datasets, and its results as text and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.data.records import few
from vit_jax.evals.features import Extractor, Features
from vit_jax.evals.fewshot import FewShot, FewShotResult, choose_l2, few_shot, spread
from vit_jax.evals.probes import run_on_pairs
from vit_jax.evals.splits import Pair
from vit_jax.text.tables import columns


@dataclasses.dataclass(frozen=True)
class FewShotTable:
    """Few-shot accuracies of several datasets.

    Attributes:
      protocol: how they were computed.
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
        datasets = {}
        for name, result in self.results.items():
            datasets[name] = {s: self._describe(result, int(s)) for s in self._shots}
        return {
            **dataclasses.asdict(self.protocol),
            "l2_used": {str(shots): l2 for shots, l2 in self.l2.items()},
            "datasets": datasets,
            "average": {s: self._compute_average(int(s)) for s in self._shots},
        }

    @property
    def _shots(self) -> list[str]:
        """Numbers of shots as keys of JSON."""
        return [str(shots) for shots in self.protocol.shots]

    def to_text(self) -> str:
        """Return a line for each dataset and number of shots, and averages over datasets."""
        rows = [["data", "shots", "accuracy", "spread", " seeds"]]
        for name, result in self.results.items():
            for shots in self.protocol.shots:
                values = self._list_accuracies(result, shots)
                mean = f"{values.mean():.2%}"
                seeds = "".join(f" {value:.2%}" for value in values)
                rows.append([name, str(shots), mean, f"{spread(values):.2%}", seeds])
        if len(self.results) > 1:
            for shots in self.protocol.shots:
                rows.append(["average", str(shots), f"{self._compute_average(shots):.2%}"])

        text = columns(rows, "<>>><", gap=" ", least=(24, 5, 9, 7))
        num_penalties = len(self.protocol.l2)
        if num_penalties > 1:
            used = ", ".join(f"{l2:g} for {shots} shots" for shots, l2 in self.l2.items())
            rule = self.protocol.penalty_choice.replace("_", " ")
            text += f"\npenalty {used}: the best {rule} of {num_penalties} over these datasets"
        return text

    def _list_accuracies(self, result: FewShotResult, shots: int) -> np.ndarray:
        return result.list_accuracies(shots, self.l2[shots])

    def _describe(self, result: FewShotResult, shots: int) -> dict[str, object]:
        values = self._list_accuracies(result, shots)
        mean_by_l2 = {}
        for l2 in self.protocol.l2:
            mean_by_l2[f"{l2:g}"] = float(result.list_accuracies(shots, l2).mean())
        return {
            "seeds": values.tolist(),
            "mean": float(values.mean()),
            "spread": spread(values),
            "test_images": result.num_test,
            "mean_by_l2": mean_by_l2,
        }

    def _compute_average(self, shots: int) -> float:
        """Return the mean accuracy over the datasets."""
        means = [self._list_accuracies(one, shots).mean() for one in self.results.values()]
        return float(np.mean(means))


def run_few_shot(pairs: Sequence[Pair], extractor: Extractor, protocol: FewShot) -> FewShotTable:
    """Evaluate every dataset with few shots.

    `choose_l2` selects one of several penalties for all datasets.
    """

    def measure(pair: Pair, train: Features, test: Features) -> tuple[FewShotResult, list[str]]:
        result = few_shot(protocol, train, test, pair.train.num_classes)
        return result, _list_notes(pair, result)

    results, notes = run_on_pairs(pairs, extractor, measure)
    return FewShotTable(protocol, results, choose_l2(list(results.values()), protocol), notes)


def _list_notes(pair: Pair, result: FewShotResult) -> list[str]:
    """Return a remark for each number of shots that some classes do not have."""
    notes = []
    for shots, classes in result.short.items():
        if classes:
            names = few([pair.train.class_names[k] for k in classes])
            notes.append(
                f"{pair.name}: fewer than {shots} images of {names}; those there are are used."
            )
    return notes
