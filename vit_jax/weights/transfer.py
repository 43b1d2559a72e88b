"""Weights of one network made to fit another: a new head, another resolution. Every parameter's fate is told."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.weights.load import Weights
from vit_jax.weights.names import stacked_shapes
from vit_jax.weights.position_embedding import position_table, resize_grid, resize_rows
from vit_jax.weights.report import Fate

RESIZED = ("positions/table", "positions/row_table", "positions/column_table")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Parameters for another network.

    Attributes:
      parameters: float32, for every parameter of the target.
      fates: of every parameter of either network.
    """

    parameters: Mapping[str, np.ndarray]
    fates: tuple[Fate, ...]

    def summary(self) -> str:
        """How many were copied, and the names of those that were not."""
        copied = sum(fate.words == "copied" for fate in self.fates)
        others = [f"{fate.name} {fate.words}" for fate in self.fates if fate.words != "copied"]
        return ", ".join([f"{copied} parameters copied", *others])


def fit(weights: Weights, target: Architecture, *, position_resize: str = "corners") -> Fitted:
    """Makes weights fit the network `target`.

    Where the target has other classes, or no hidden layer in its head, the head is left behind: the last layer
    begins at zero (its bias at `target.head_bias_init`), a hidden layer stays if the target has one. Whoever wants
    a fresh head with the same classes takes it away first (`without_head`).

    Args:
      weights: of a network that differs from the target in image size and head only.
      target: what the parameters are for.
      position_resize: how learned positions change their grid.

    Raises:
      ValueError: names or shapes of parameters differ in anything else; every difference is listed. What leaves no
        trace in them, such as another GELU, is not seen here.
    """
    source = weights.architecture
    expected, given = stacked_shapes(target), dict(weights.parameters)
    is_new_head = not _is_same_head(given, expected)
    fates, fitted = [], {}
    for name in [name for name in given if name.startswith("head/") and (is_new_head or name not in expected)]:
        if name not in expected or name.startswith("head/linear/"):
            fates.append(Fate.of(name, given.pop(name), "replaced" if name in expected else "left out"))
    if is_new_head:
        given |= _zero_head(expected, target.head_bias_init)
    for name, (old, new) in _grids(source, target).items():
        if name in given and old != new:
            given[name] = _resize(name, given[name], old, new, position_resize)
            fates.append(Fate.of(name, given[name], f"resized from {old[0]}x{old[1]} to {new[0]}x{new[1]}"))
    if lines := pytree.differences({n: np.broadcast_to(np.float32(0), s) for n, s in expected.items()}, given):
        detail = "\n  ".join(lines)
        raise ValueError(f"{weights.source} does not fit {target.name} ({source.name} is there):\n  {detail}")
    told = {fate.name for fate in fates}
    for name in expected:
        fitted[name] = given[name]
        if name not in told:
            fates.append(Fate.of(name, given[name], "copied"))
    return Fitted(fitted, tuple(fates))


def _is_same_head(given: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]) -> bool:
    names = {name for name in (*given, *expected) if name.startswith("head/")}
    return all(name in given and expected.get(name) == given[name].shape for name in names)


def without_head(weights: Weights, *, keep_hidden: bool = True) -> Weights:
    """The weights with an empty last layer: `fit` then begins a new one, whatever the number of classes.

    Args:
      weights: stay as they are.
      keep_hidden: a hidden layer stays, for a target that has one; else the network ends in what is pooled.
    """
    a = weights.architecture
    empty = {"head/linear/kernel": (a.width, 0), "head/linear/bias": (0,)}
    kept = {name: array for name, array in weights.parameters.items() if keep_hidden or not name.startswith("head/")}
    parameters = kept | {name: np.zeros(shape, np.float32) for name, shape in empty.items()}
    architecture = dataclasses.replace(a, num_classes=0, head=a.head if keep_hidden else "linear")
    return dataclasses.replace(weights, architecture=architecture, parameters=parameters, class_names=None)


def with_position_table(weights: Weights) -> Weights:
    """The same network with one learned row of position for each token, whatever form its positions have."""
    a = weights.architecture
    if not a.has_transformer or a.position_embedding == "learned_1d":
        return weights
    architecture = dataclasses.replace(a, position_embedding="learned_1d")
    given = {**weights.parameters, RESIZED[0]: position_table(a, weights.parameters)}
    parameters = {name: given[name] for name in stacked_shapes(architecture)}
    return dataclasses.replace(weights, architecture=architecture, parameters=parameters)


def _zero_head(expected: Mapping[str, tuple[int, ...]], bias: float) -> dict[str, np.ndarray]:
    kernel, offset = "head/linear/kernel", "head/linear/bias"
    return {kernel: np.zeros(expected[kernel], np.float32), offset: np.full(expected[offset], bias, np.float32)}


def _grids(source: Architecture, target: Architecture) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Old and new grid of each table of positions; the tables of rows and of columns are grids one wide."""
    (rows, columns), (new_rows, new_columns) = source.grid, target.grid
    grids = ((source.grid, target.grid), ((rows, 1), (new_rows, 1)), ((columns, 1), (new_columns, 1)))
    return dict(zip(RESIZED, grids, strict=True))


def _resize(name: str, array: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str) -> np.ndarray:
    if name == RESIZED[0]:
        return resize_rows(array[0], old, new, method)[None]
    return resize_grid(array[:, None], new, method)[:, 0]
