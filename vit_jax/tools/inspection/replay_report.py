"""The report of a repeated step: layers, examples, and the first value that is not finite.

Legend: B global batch.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vit_jax.storage.files import JsonObject
from vit_jax.text.printable import printable
from vit_jax.text.tables import align_table
from vit_jax.tools.inspection.examination import KINDS, Figures, sort_layers
from vit_jax.train.metrics import FINITE

REPORT_FILE = "replay.json"
NUM_PRINTED_EXAMPLES = 10


@dataclasses.dataclass(frozen=True)
class Replay:
    """A step of a run, repeated.

    Attributes:
      step: number of the step.
      start: a sentence on the state from which steps were repeated.
      metrics: metrics of the step.
      recorded: metrics that the run wrote; None if it wrote none for this step.
      figures: results of `examination`, on the host.
      record_B: numbers of the records of the batch.
      name_B: names of the records.
      folder: folder of the report, and of the state before the step.
    """

    step: int
    start: str
    metrics: Mapping[str, float]
    recorded: Mapping[str, float] | None
    figures: Figures
    record_B: np.ndarray
    name_B: Sequence[str]
    folder: pathlib.Path

    @property
    def differences(self) -> list[str]:
        """Metrics that are not equal, to the bit, to the metrics that the run wrote."""
        different = []
        for name in FINITE:
            if self.recorded is None or name not in self.recorded:
                continue
            if not np.array_equal(self.recorded[name], self.metrics[name], equal_nan=True):
                different.append(name)
        return different

    @property
    def first_cause(self) -> str:
        """The first value that is not finite in the order of computation; "" if all are finite."""
        for description, value in self._describe_values():
            if not math.isfinite(value):
                return description
        return ""

    def _describe_values(self) -> Iterator[tuple[str, float]]:
        """Yield descriptions and values in the order in which a step computes them."""
        forward = sort_layers(self.figures)
        backward = forward[::-1]
        for layer in forward:
            description = f"the parameters of {layer}, before this step: replay an earlier one"
            yield description, self.figures["parameters"].get(layer, 0.0)
        for layer in forward:
            yield f"the output of {layer}", self.figures["largest"].get(layer, 0.0)
        for record, name, loss in zip(
            self.record_B,
            self.name_B,
            self.figures["loss_B"],
            strict=True,
        ):
            yield f"the loss of record {record}, {name}", loss
        for kind in ("gradient", "update"):
            for layer in backward:
                yield f"the {kind} of {layer}", self.figures[kind].get(layer, 0.0)

    def to_json(self) -> JsonObject:
        """Return everything as values of JSON."""
        return {
            "step": self.step,
            "start": self.start,
            "metrics": dict(self.metrics),
            "recorded": None if self.recorded is None else dict(self.recorded),
            "first_not_finite": self.first_cause or None,
            "layers": self._list_layers(),
            "examples": self._list_examples(),
        }

    def _list_layers(self) -> dict[str, dict[str, float]]:
        """Return the figures of each layer.

        A layer without parameters, such as the pooling, has no norms of parameters.
        """
        layers: dict[str, dict[str, float]] = {}
        for layer in sort_layers(self.figures):
            layers[layer] = {}
            for kind in KINDS:
                if layer in self.figures[kind]:
                    layers[layer][kind] = float(self.figures[kind][layer])
        return layers

    def _list_examples(self) -> list[JsonObject]:
        """Return the values of each example."""
        names = ("record", "label", "loss", "mask", "name")
        rows = zip(
            self.record_B.tolist(),
            self.figures["label_B"].tolist(),
            self.figures["loss_B"].tolist(),
            self.figures["mask_B"].tolist(),
            self.name_B,
            strict=True,
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    def to_text(self) -> str:
        """Return the report for a terminal."""
        metrics = []
        for name, words in FINITE.items():
            metrics.append(f"{words} {_format(self.metrics[name])}")
        cause = self.first_cause
        finding = "all values are finite"
        if cause:
            finding = f"first value that is not finite: {printable(cause)}"

        lines = [
            f"step {self.step}: {', '.join(metrics)}",
            self._compare(),
            finding,
            "",
            self._tabulate_layers(),
            self._tabulate_examples(),
            f"{self.folder}: all figures in {REPORT_FILE}, and the state before the step: for "
            "`inspect` and other verbs, for config.init_from, and for config.resume_from to "
            "continue from it",
        ]
        return "\n".join(lines)

    def _compare(self) -> str:
        """Return the line that compares the step with the step of the run."""
        if self.recorded is None:
            return "the run wrote no metrics of this step to compare with"
        if not self.differences:
            return "loss and norms equal those of the run to the bit"
        changes = []
        for name in self.differences:
            then = self.recorded[name]
            now = self.metrics[name]
            changes.append(f"{name} {then!r} then, {now!r} now")
        return f"not the step of the run: {'; '.join(changes)}. Other devices, versions or code?"

    def _tabulate_layers(self) -> str:
        rows = []
        for layer, figures in self._list_layers().items():
            cells = [_format(figures.get(kind)) for kind in KINDS]
            rows.append([layer, *cells])
        return align_table(("layer", *KINDS), rows, words=("layer",))

    def _tabulate_examples(self) -> str:
        """Return the table of the largest losses; losses that are not finite come first."""
        rows = []
        worst = sorted(self._list_examples(), key=_rank_by_loss)
        for example in worst[:NUM_PRINTED_EXAMPLES]:
            record = str(example["record"])
            label = _format_label(example["label"])

            loss = _format(None)  # an unreadable image has none
            if example["mask"]:
                loss = _format(example["loss"])
            rows.append([record, label, loss, example["name"]])
        return align_table(("record", "label", "loss", "name"), rows, words=("name",))


def _rank_by_loss(example: JsonObject) -> tuple[bool, float]:
    """Return the sort key of an example: the worst one is first."""
    return math.isfinite(example["loss"]), -example["loss"]


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}"


def _format_label(label: int | list[int]) -> str:
    """Return the class of an example, or the numbers of its classes if it has several labels."""
    if isinstance(label, int):
        return str(label)
    classes = np.flatnonzero(label).tolist()
    return ",".join(map(str, classes))
