"""Label maps: the outputs of a network that stand for the classes of the data.

Legend: K outputs, L classes of the data, N images, S right outputs of an image, T predictions of an
image.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vit_jax.config import Architecture
from vit_jax.data.records import Source, few

if TYPE_CHECKING:
    from vit_jax.data.subset import TrainingData

MOST_PAIRS = 5  # pairs of class and output in a note
_INTEGER = re.compile(r"[+-]?[0-9]+")


class WeightsInfo(Protocol):
    """The fields of `vit_jax.weights.Weights` that evaluations use, described there."""

    @property
    def source(self) -> str: ...
    @property
    def architecture(self) -> Architecture: ...
    @property
    def class_names(self) -> tuple[str, ...] | None: ...
    @property
    def is_multilabel(self) -> bool: ...
    @property
    def training(self) -> "TrainingData | None": ...
    @property
    def format(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LabelMap:
    """Maps classes of the data to outputs of the network.

    Attributes:
      output_names: names of the outputs.
      is_allowed_K: bool; other outputs are ignored, as if the network did not have them.
      output_L: output of each class of the data; -1 if there is none.
      listed: classes of the data that have images.
      correct_NS: correct outputs of each image, filled with -1; None: the output of its class.
    """

    output_names: tuple[str, ...]
    is_allowed_K: np.ndarray
    output_L: np.ndarray
    listed: np.ndarray
    correct_NS: np.ndarray | None = None

    def is_right(
        self,
        record_N: np.ndarray | None,
        label_N: np.ndarray,
        class_NT: np.ndarray,
    ) -> np.ndarray:
        """Return which predictions are right, bool (N, T).

        `record_N` may be None without `correct_NS`.
        """
        if self.correct_NS is None:
            correct_NS = self.output_L[label_N][:, None]
        else:
            assert record_N is not None
            correct_NS = self.correct_NS[record_N]
        return (class_NT[:, :, None] == correct_NS[:, None, :]).any(axis=2)

    @property
    def has_single_outputs(self) -> bool:
        """True if each image has exactly one right output: only then it has a loss."""
        return self.correct_NS is None and bool((self.output_L[self.listed] >= 0).all())

    def arguments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `is_allowed_K`, and the output of each class for the loss.

        The latter is padded to (K,), so that one step fits all data.
        """
        output_K = np.zeros(len(self.is_allowed_K), np.int32)
        if self.has_single_outputs:
            output_K[: len(self.output_L)] = self.output_L
        return self.is_allowed_K, output_K


def build_identity_map(
    names: tuple[str, ...],
    correct_NS: np.ndarray | None = None,
) -> LabelMap:
    """Return the map of data whose classes are the outputs of the network, in the same order.

    `correct_NS` is described at `LabelMap`.
    """
    numbers = np.arange(len(names))
    return LabelMap(
        output_names=names,
        is_allowed_K=np.ones(len(names), bool),
        output_L=numbers,
        listed=numbers,
        correct_NS=correct_NS,
    )


class Labelled(NamedTuple):
    """Images to evaluate.

    Attributes:
      source, label_map: the images, and the map of their classes to outputs.
      words: split, data and number of images, for people.
      notes: remarks for readers of the result.
    """

    source: Source
    words: str
    notes: list[str]
    label_map: LabelMap


# Weights without class names: the number of an output is all that is known of it.


def match_by_value(data: str, class_names: Sequence[str], weights: WeightsInfo) -> np.ndarray:
    """Return the output of each class whose name is an integer, (L,); "7" and "007" are output 7.

    Raises:
      ValueError: a name is no integer, is no number of an output, or has the value of another name.
    """
    others = [name for name in class_names if not _INTEGER.fullmatch(name)]
    if others:
        raise ValueError(
            f"{data}: {weights.source} does not name its {weights.architecture.num_classes:,} "
            f"classes, so the classes {few(others)} cannot be matched with its outputs. Add "
            "--class_names=FILE, the name of each output on a line."
        )

    outputs = list(map(int, class_names))
    _require_outputs(data, class_names, outputs, weights)
    return np.array(outputs)


def _require_outputs(
    data: str,
    class_names: Sequence[str],
    outputs: Sequence[int],
    weights: WeightsInfo,
) -> None:
    """Raise ValueError if a number is not the number of an output, or two classes have it."""
    count = weights.architecture.num_classes
    output_of = dict(zip(class_names, outputs, strict=True))
    outside = [name for name, output in output_of.items() if not 0 <= output < count]
    if outside:
        raise ValueError(
            f"{data}: the classes {few(outside)} are no outputs of {weights.source}, which are 0 "
            f"to {count - 1} and have no names. Rename the classes, or add --class_names=FILE, the "
            "name of each output on a line."
        )
    uses = collections.Counter(outputs)
    repeated = [name for name, output in output_of.items() if uses[output] > 1]
    if repeated:
        raise ValueError(
            f"{data}: the classes {few(repeated)} are not unique as numbers of outputs of "
            f"{weights.source}, which has no class names. Rename them, or add --class_names=FILE, "
            "the name of each output on a line."
        )


def describe_pairs(class_names: Sequence[str], outputs: Sequence[int] | np.ndarray) -> str:
    """Return the first pairs of classes of the data and outputs, and the number of the others."""
    outputs_by_name = dict(zip(class_names, outputs, strict=True))
    pairs = []
    for name, output in outputs_by_name.items():
        pairs.append(f"{name!r} is output {output}")

    words = ", ".join(pairs[:MOST_PAIRS])
    rest = len(pairs) - MOST_PAIRS
    if rest > 0:
        words += f" and {rest:,} more"
    return words
