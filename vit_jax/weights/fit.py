"""Weights of one network fitted to another: new head, other resolution, other form of positions.

Legend: h w rows and columns of patches, S sequence length, D width, K classes of the source, L
classes of the target.
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.config.adaptation import set_pooling
from vit_jax.config.network_options import HeadForm
from vit_jax.config.rules import Reference
from vit_jax.imports.references import is_reference
from vit_jax.models.positions import build_fixed_positions
from vit_jax.weights.folding import OURS, Normalisation, read_normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.load_report import ArrayStatus
from vit_jax.weights.names import HEAD_BIAS, HEAD_KERNEL, Shape, list_shapes
from vit_jax.weights.position_resize import Grid, resize_positions

T = TypeVar("T")
_HEAD = "head/"
_LAST_LAYER = "head/linear/"
_LARGE_GROUP = 5  # parameters that a summary does not list
_NO_PATCH_HEAD = "the head that predicts masked patches, and its [mask] embedding, are dropped."

# Parameter of the last norm → its name in a network that pools otherwise.
_MOVED_NORMS = {
    "encoder/norm/scale": "pooled_norm/scale",
    "encoder/norm/bias": "pooled_norm/bias",
    "pooled_norm/scale": "encoder/norm/scale",
    "pooled_norm/bias": "encoder/norm/bias",
}


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Parameters for another network."""

    parameters: Mapping[str, np.ndarray]  # float32, for every parameter of the target
    statuses: tuple[ArrayStatus, ...]  # the use of every parameter of either network
    # Normalisation of the pixels that the weights were trained on, folded into them.
    normalisation: Normalisation = OURS
    licence: str = ""  # licence of the weights

    def summary(self) -> str:
        """Return the number of copied parameters, and the names of the others.

        A large group is one item.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        num_copied = 0
        for name, _, _, _, status in self.statuses:
            if status == "copied":
                num_copied += 1
                continue
            folder, _, _ = name.partition("/")
            groups.setdefault((folder, status), []).append(name)

        words = [f"{num_copied} parameters copied"]
        for (folder, status), names in groups.items():
            if len(names) >= _LARGE_GROUP:
                words.append(f"{folder}/* ({len(names)} parameters) {status}")
                continue
            for name in names:
                words.append(f"{name} {status}")
        return ", ".join(words)


def fit(
    weights: Weights,
    target: Architecture,
    *,
    position_resize: str = "corners",
) -> Fitted:
    """Fit weights to the network `target`.

    If the target has other classes, or no hidden layer in its head, the head is dropped: the last
    layer begins at zero (its bias at `target.head_bias_init`), a hidden layer stays if the target
    has one. For a fresh head with the same classes remove it first (`remove_head`). If the target
    pools otherwise, attention pooling is dropped, and the last norm moves between the tokens and
    the pooled features; a new norm begins at a scale of 1.

    `position_resize`, a value of `PositionResize`, is how learned positions change their grid.
    Fields without effect on names and shapes, such as the GELU form, are not compared.

    Raises:
      ValueError: names or shapes of parameters differ in more than image size, pooling, last norm
        and head.
    """
    source = weights.architecture
    adaptation = _Adaptation(weights.parameters, list_shapes(target))

    if not adaptation.has_expected_head():
        adaptation.replace_head(target.head_bias_init)
    if (source.pool, source.final_norm) != (target.pool, target.final_norm):
        adaptation.change_pooling()
    method = weights.choose_resize_method(position_resize)
    adaptation.resize_positions(source.grid, target.grid, method)

    problem = f"{weights.source} does not fit {target.name} ({source.name} is there)"
    return Fitted(
        parameters=adaptation.select_expected(problem),
        statuses=adaptation.list_statuses(),
        normalisation=read_normalisation(weights.preprocessing),
        licence=weights.licence,
    )


class _Adaptation:
    """Parameters that are changed, step by step, into those of another network.

    `statuses` has the use of the changed ones, by name; the others are copied.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        expected: Mapping[str, Shape],
    ) -> None:
        """Take the parameters of the source, and the names and shapes of the target."""
        self.parameters = dict(parameters)
        self.expected = expected
        self.statuses: dict[str, ArrayStatus] = {}

    def has_expected_head(self) -> bool:
        """Return True if the head has the names and shapes of the target."""
        shapes = {name: array.shape for name, array in self.parameters.items()}
        return _select_head(shapes) == _select_head(self.expected)

    def replace_head(self, bias: float) -> None:
        """Drop the head except hidden layers of the target, and add a last layer of zeros."""
        for name in _select_head(self.parameters):
            is_last = name.startswith(_LAST_LAYER)
            if is_last or name not in self.expected:
                self._drop(name)
        for name in _select_head(self.expected):
            if name == HEAD_BIAS:
                self._add(name, bias)
            elif name.startswith(_LAST_LAYER):
                self._add(name, 0.0)

    def change_pooling(self) -> None:
        """Move the last norm to the place where the target has it, and drop attention pooling."""
        for name in list(self.parameters):
            if name in self.expected:
                continue
            if name.startswith("pooling/"):
                self._drop(name)
            elif name in _MOVED_NORMS:
                self._move(name, _MOVED_NORMS[name])

        for name in self.expected:
            if name in _MOVED_NORMS and name not in self.parameters:
                is_scale = name.endswith("scale")
                self._add(name, float(is_scale))

    def resize_positions(self, old: Grid, new: Grid, method: str) -> None:
        """Resize every table of positions to another grid of patches."""
        self.parameters, statuses = resize_positions(self.parameters, old, new, method)
        for status in statuses:
            self.statuses[status.name] = status

    def select_expected(self, problem: str) -> dict[str, np.ndarray]:
        """Return the parameters of the target, in its order.

        Raises:
          ValueError: names or shapes differ. The message begins with `problem`.
        """
        placeholders = {}
        for name, shape in self.expected.items():
            placeholders[name] = np.broadcast_to(np.float32(0), shape)
        lines = pytree.differences(placeholders, self.parameters)
        if lines:
            raise ValueError(f"{problem}:{pytree.list_lines(lines)}")
        return {name: self.parameters[name] for name in self.expected}

    def list_statuses(self) -> tuple[ArrayStatus, ...]:
        """Return the use of every parameter of either network."""
        copied = []
        for name in self.expected:
            if name not in self.statuses:
                copied.append(ArrayStatus.describe(name, self.parameters[name], "copied"))
        return (*self.statuses.values(), *copied)

    def _drop(self, name: str) -> None:
        status = "replaced" if name in self.expected else "dropped"
        self._remove(name, status)

    def _move(self, name: str, new_name: str) -> None:
        if new_name not in self.expected:
            self._drop(name)
            return
        self.parameters[new_name] = self._remove(name, f"moved to {new_name}")

    def _remove(self, name: str, status: str) -> np.ndarray:
        array = self.parameters.pop(name)
        self.statuses[name] = ArrayStatus.describe(name, array, status)
        return array

    def _add(self, name: str, value: float) -> None:
        """Add a parameter of the target with one value in all elements."""
        array = np.full(self.expected[name], value, np.float32)
        self.parameters[name] = array
        if name not in self.statuses:  # otherwise it replaces one of the source
            self.statuses[name] = ArrayStatus.describe(name, array, "new")


def _select_head(parameters: Mapping[str, T]) -> dict[str, T]:
    """Return the parameters of the head."""
    head = {}
    for name, value in parameters.items():
        if name.startswith(_HEAD):
            head[name] = value
    return head


def remove_head(weights: Weights, *, keep_hidden: bool = True) -> Weights:
    """Return the weights without their last layer; `fit` adds a new one, for any classes.

    With `keep_hidden` the hidden layer of the head stays, if there is one; otherwise the network
    ends in its pooled features. A head of a custom class is removed as a whole, since its last
    layer is not known.
    """
    a = weights.architecture
    head: HeadForm | Reference = "linear"
    removed: tuple[str, ...] = (_HEAD,)
    if keep_hidden and not is_reference(a.head):
        head = a.head
        removed = (_LAST_LAYER, "head/mask")
    architecture = dataclasses.replace(a, num_classes=0, patch_outputs=0, head=head)

    parameters = {}
    for name, array in weights.parameters.items():
        if not name.startswith(removed):
            parameters[name] = array
    for name, shape in list_shapes(architecture).items():
        if name.startswith(_LAST_LAYER):
            parameters[name] = np.zeros(shape, np.float32)

    if a.patch_outputs:
        weights = weights.add_note(_NO_PATCH_HEAD)
    return dataclasses.replace(
        weights,
        architecture=architecture,
        parameters=parameters,
        class_names=None,
        has_several_labels=False,
    )


def select_classes(
    weights: Weights,
    output_L: np.ndarray,
    class_names: tuple[str, ...],
) -> Weights:
    """Return the weights with some of their outputs, for classes of these names.

    `output_L` is the output of each class. A class without an output, -1, has a kernel of zeros and
    the mean bias.
    """
    kernel_DK = weights.parameters[HEAD_KERNEL]
    bias_K = weights.parameters[HEAD_BIAS]
    is_known_L = output_L >= 0
    mean_bias = bias_K[output_L[is_known_L]].mean()

    kernel_DL = np.where(is_known_L, kernel_DK[:, output_L], np.float32(0))
    bias_L = np.where(is_known_L, bias_K[output_L], mean_bias)
    parameters = {
        **weights.parameters,
        HEAD_KERNEL: kernel_DL,
        HEAD_BIAS: bias_L,
    }

    architecture = dataclasses.replace(weights.architecture, num_classes=len(class_names))
    return weights.replace_network(architecture, parameters, class_names=class_names)


LAYER_POOLS = {
    "token": "token",
    "mean": "gap",
    "token_mean": "token_gap",
}
"""Layers of features and the pooling that gives the same."""


def cut_after_layer(weights: Weights, layer: str) -> Weights:
    """Return the network without its head, whose feature "pre_logits" is a layer of this one.

    The layer is "pre_logits", which keeps the hidden layer of the head, "pooled" or one of
    `LAYER_POOLS`.

    Raises:
      ValueError: the network has no class token.
    """
    base = remove_head(weights, keep_hidden=layer == "pre_logits")
    if layer not in LAYER_POOLS:
        return base
    a = base.architecture
    # A norm of the pooled features is not part of these layers.
    final_norm = "none" if a.final_norm == "pooled" else None
    architecture = set_pooling(a, LAYER_POOLS[layer], final_norm)
    fitted = fit(base, architecture)
    return base.replace_network(architecture, fitted.parameters)


def set_classifier(
    weights: Weights,
    kernel_DK: np.ndarray,
    bias_K: np.ndarray,
    class_names: tuple[str, ...],
) -> Weights:
    """Return the weights with a new last layer, in float32.

    Its input is the feature "pre_logits" of the network.

    Raises:
      ValueError: the kernel does not fit the network.
    """
    base = remove_head(weights)
    architecture = dataclasses.replace(base.architecture, num_classes=len(class_names))
    shapes = list_shapes(architecture)
    head = {
        HEAD_KERNEL: kernel_DK.astype(np.float32),
        HEAD_BIAS: bias_K.astype(np.float32),
    }
    for name, array in head.items():
        if array.shape != shapes[name]:
            raise ValueError(f"{name} has the shape {array.shape}: must be {shapes[name]}.")

    parameters = {**base.parameters, **head}
    return base.replace_network(architecture, parameters, class_names=class_names)


def tabulate_positions(weights: Weights, *, allows_patch_table: bool = False) -> Weights:
    """Return the same network with a learned table of positions that has a row for each token.

    Other formats know no other form. With `allows_patch_table` they also know a table with rows for
    patches alone, which is then kept. A network whose only positions are rotary is unchanged.
    """
    a = weights.architecture
    if not a.has_transformer:
        return weights
    if a.position_embedding == "none" and a.rope is not None:
        return weights
    has_table = a.position_embedding == "learned_1d"
    if has_table and (a.position_tokens == "all" or allows_patch_table):
        return weights

    parameters = dict(weights.parameters)
    parameters["positions/table"] = _build_position_table(a, parameters)
    architecture = dataclasses.replace(a, position_embedding="learned_1d", position_tokens="all")
    return weights.replace_network(architecture, parameters)


def _build_position_table(
    a: Architecture,
    parameters: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Return the positions of every token, (1, S, D)."""
    if a.position_embedding == "learned_1d":
        patches_1ND = parameters["positions/table"]
        return np.pad(patches_1ND, ((0, 0), (a.prefix_length, 0), (0, 0)))
    if a.position_embedding == "learned_2d":
        return _join_halves(a, parameters)
    return build_fixed_positions(
        a.position_embedding,
        a.grid,
        a.width,
        prefix_length=a.prefix_length,
    )


def _join_halves(a: Architecture, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the positions (1, S, D) of `LearnedPositions2D`, whose halves are of width D / 2."""
    shape_hwD = (*a.grid, a.width // 2)
    column_half_hwD = np.broadcast_to(parameters["positions/column_table"], shape_hwD)
    rows_h1D = parameters["positions/row_table"][:, None]
    row_half_hwD = np.broadcast_to(rows_h1D, shape_hwD)
    grid_hwD = np.concatenate([column_half_hwD, row_half_hwD], axis=-1)
    table_SD = grid_hwD.reshape(-1, a.width)
    if a.num_class_tokens:
        table_SD = np.concatenate([parameters["positions/class_row"], table_SD])
    return table_SD[None]
