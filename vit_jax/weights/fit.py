"""Weights of one network fitted to another: a new head, another resolution, positions in another form.

Legend: h w rows and columns of patches, S sequence length, D width.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.config.adaptation import set_pooling
from vit_jax.imports.references import is_reference
from vit_jax.models.positions import fixed_positions
from vit_jax.weights.folding import OURS, Normalisation, stored_normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.load_report import ArrayStatus
from vit_jax.weights.names import Shape, stacked_shapes
from vit_jax.weights.position_resize import resize_positions

_LAST_LAYER = "head/linear/"
_HEAD_KERNEL = f"{_LAST_LAYER}kernel"
_HEAD_BIAS = f"{_LAST_LAYER}bias"
_NO_PATCH_HEAD = "the head that predicts masked patches, and its [mask] embedding, are left out."


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Parameters for another network."""

    parameters: Mapping[str, np.ndarray]  # float32, for every parameter of the target
    statuses: tuple[ArrayStatus, ...]  # of every parameter of either network
    # Normalisation of the pixels that the weights were trained on, folded into them.
    normalisation: Normalisation = OURS
    licence: str = ""  # of the weights

    def summary(self) -> str:
        """Return the number of copied parameters, and the names of the others.

        A large group is one item.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        num_copied = 0
        for name, _, _, _, how in self.statuses:
            if how == "copied":
                num_copied += 1
                continue
            group, _, _ = name.partition("/")
            groups.setdefault((group, how), []).append(name)

        words = [f"{num_copied} parameters copied"]
        for (group, how), names in groups.items():
            if len(names) >= 5:
                words.append(f"{group}/* ({len(names)} parameters) {how}")
                continue
            for name in names:
                words.append(f"{name} {how}")
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
    has one. For a fresh head with the same classes remove it first (`without_head`). If the target
    pools otherwise, attention pooling is dropped, and the last norm moves between the tokens and
    the pooled features; a new norm begins at a scale of 1.

    `position_resize`, a value of `PositionResize`, is how learned positions change their grid.
    Fields without effect on names and shapes, such as the GELU form, are not compared.

    Raises:
      ValueError: names or shapes of parameters differ in more than image size, pooling, last norm
        and head.
    """
    source = weights.architecture
    expected = stacked_shapes(target)
    parameters = dict(weights.parameters)
    statuses = _fit_head(parameters, expected, target.head_bias_init)

    source_ending = (source.pool, source.final_norm)
    target_ending = (target.pool, target.final_norm)
    if source_ending != target_ending:
        statuses += _fit_pooling(parameters, expected)

    method = weights.resize_method(position_resize)
    parameters, resized = resize_positions(parameters, source.grid, target.grid, method)
    statuses += resized

    problem = f"{weights.source} does not fit {target.name} ({source.name} is there)"
    _require_shapes(parameters, expected, problem)

    fitted = {name: parameters[name] for name in expected}
    reported = {status.name for status in statuses}
    for name, array in fitted.items():
        if name not in reported:
            statuses.append(ArrayStatus.of(name, array, "copied"))
    return Fitted(
        parameters=fitted,
        statuses=tuple(statuses),
        normalisation=stored_normalisation(weights.preprocessing),
        licence=weights.licence,
    )


def _require_shapes(
    parameters: Mapping[str, np.ndarray],
    expected: Mapping[str, Shape],
    problem: str,
) -> None:
    """Raise ValueError unless parameters have the expected names and shapes."""
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in expected.items()}
    lines = pytree.differences(arrays, parameters)
    if lines:
        raise ValueError(f"{problem}:{pytree.listed(lines)}")


def _fit_head(
    parameters: dict[str, np.ndarray],
    expected: Mapping[str, Shape],
    bias: float,
) -> list[ArrayStatus]:
    """Replace a head that is not the expected one, in place.

    Return how each of its parameters is used.
    """
    if _has_head(parameters, expected):
        return []

    statuses = []
    for name in list(parameters):
        if not name.startswith("head/"):
            continue
        is_kept = name in expected and not name.startswith(_LAST_LAYER)
        if is_kept:
            continue
        array = parameters.pop(name)
        status = "replaced" if name in expected else "left out"
        statuses.append(ArrayStatus.of(name, array, status))

    for name, shape in expected.items():
        if name.startswith(_LAST_LAYER):
            value = bias if name.endswith("bias") else 0
            parameters[name] = np.full(shape, value, np.float32)
    return statuses


def _has_head(
    parameters: Mapping[str, np.ndarray],
    expected: Mapping[str, Shape],
) -> bool:
    """Return True if parameters have the expected head, and nothing else in it."""
    for name in (*parameters, *expected):
        if not name.startswith("head/"):
            continue
        if name not in parameters or name not in expected:
            return False
        if parameters[name].shape != expected[name]:
            return False
    return True


_NORMS = {
    "encoder/norm/": "pooled_norm/",
    "pooled_norm/": "encoder/norm/",
}
"""Folder of the last norm → its folder where the network pools otherwise."""


def _fit_pooling(
    parameters: dict[str, np.ndarray],
    expected: Mapping[str, Shape],
) -> list[ArrayStatus]:
    """Change attention pooling and the last norm of `parameters`, in place.

    Return how each changed parameter is used.
    """
    norms = tuple(_NORMS)
    statuses = []
    for name in list(parameters):
        if name in expected or not name.startswith((*norms, "pooling/")):
            continue
        array = parameters.pop(name)
        moved = _move_norm(name)
        if moved in expected:
            parameters[moved] = array
            status = f"moved to {moved}"
        else:
            status = "left out"
        statuses.append(ArrayStatus.of(name, array, status))

    for name, shape in expected.items():
        if name in parameters or not name.startswith(norms):
            continue
        is_scale = name.endswith("scale")
        parameters[name] = np.full(shape, is_scale, np.float32)
        statuses.append(ArrayStatus.of(name, parameters[name], "new"))
    return statuses


def _move_norm(name: str) -> str:
    """Return the name of a parameter of the last norm at its other place; others keep theirs."""
    folder, _, leaf = name.rpartition("/")
    moved = _NORMS.get(f"{folder}/", f"{folder}/")
    return f"{moved}{leaf}"


def without_head(weights: Weights, *, keep_hidden: bool = True) -> Weights:
    """Return the weights without their last layer: `fit` initialises a new one, for any number of classes.

    With `keep_hidden` the hidden layer of the head stays, if there is one; otherwise the network
    ends in its pooled features. A head of the user's own class is removed as a whole: which of its
    layers is the last is not known.
    """
    a = weights.architecture
    left_out: tuple[str, ...]
    if keep_hidden and not is_reference(a.head):
        head = a.head
        left_out = (_LAST_LAYER, "head/mask")
    else:
        head = "linear"
        left_out = ("head/",)
    architecture = dataclasses.replace(a, num_classes=0, patch_outputs=0, head=head)

    parameters = {}
    for name, array in weights.parameters.items():
        if not name.startswith(left_out):
            parameters[name] = array
    for name, shape in stacked_shapes(architecture).items():
        if name.startswith(_LAST_LAYER):
            parameters[name] = np.zeros(shape, np.float32)

    notes = weights.notes
    if a.patch_outputs:
        notes = [*notes, _NO_PATCH_HEAD]
    return dataclasses.replace(
        weights,
        architecture=architecture,
        parameters=parameters,
        class_names=None,
        notes=notes,
        has_several_labels=False,
    )


def select_classes(weights: Weights, output_L: np.ndarray, class_names: tuple[str, ...]) -> Weights:
    """Return the weights with the outputs `output_L` alone, for classes of these names.

    A class without an output, -1, has a kernel of zeros and the mean bias.
    """
    kernel_DK = weights.parameters[_HEAD_KERNEL]
    bias_K = weights.parameters[_HEAD_BIAS]
    is_known_L = output_L >= 0
    mean_bias = bias_K[output_L[is_known_L]].mean()

    parameters = dict(weights.parameters)
    parameters[_HEAD_KERNEL] = np.where(is_known_L, kernel_DK[:, output_L], np.float32(0))
    parameters[_HEAD_BIAS] = np.where(is_known_L, bias_K[output_L], mean_bias)

    architecture = dataclasses.replace(weights.architecture, num_classes=len(class_names))
    return weights.with_network(architecture, parameters, class_names=class_names)


LAYER_POOLS = {
    "token": "token",
    "mean": "gap",
    "token_mean": "token_gap",
}
"""Layers of features and the pooling that gives the same."""


def ending_in(weights: Weights, layer: str) -> Weights:
    """Return the network without its head, whose feature "pre_logits" is a layer of this one.

    The layer is "pre_logits", which keeps the hidden layer of the head, "pooled" or one of
    `LAYER_POOLS`.

    Raises:
      ValueError: the network has no class token.
    """
    base = without_head(weights, keep_hidden=layer == "pre_logits")
    if layer not in LAYER_POOLS:
        return base
    a = base.architecture
    # A norm of the pooled features is not part of these layers.
    final_norm = "none" if a.final_norm == "pooled" else None
    architecture = set_pooling(a, LAYER_POOLS[layer], final_norm)
    fitted = fit(base, architecture)
    return base.with_network(architecture, fitted.parameters)


def with_classifier(
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
    base = without_head(weights)
    architecture = dataclasses.replace(base.architecture, num_classes=len(class_names))
    shapes = stacked_shapes(architecture)
    head = {
        _HEAD_KERNEL: kernel_DK.astype(np.float32),
        _HEAD_BIAS: bias_K.astype(np.float32),
    }
    for name, array in head.items():
        if array.shape != shapes[name]:
            raise ValueError(f"{name} has the shape {array.shape}: must be {shapes[name]}.")

    parameters = {**base.parameters, **head}
    return base.with_network(architecture, parameters, class_names=class_names)


def with_position_table(weights: Weights, *, of_patches: bool = False) -> Weights:
    """Return the same network with one learned row of position for each token.

    Its positions can have any form. With `of_patches` a table of patches alone stays so.
    """
    a = weights.architecture
    if not a.has_transformer:
        return weights
    if a.position_embedding == "learned_1d" and (of_patches or a.position_tokens == "all"):
        return weights
    if a.position_embedding == "none" and a.rope is not None:
        return weights

    parameters = dict(weights.parameters)
    parameters["positions/table"] = _build_position_table(a, parameters)
    architecture = dataclasses.replace(a, position_embedding="learned_1d", position_tokens="all")
    return weights.with_network(architecture, parameters)


def _build_position_table(a: Architecture, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the positions of a network as a table (1, S, D) with a row for each token."""
    if a.position_embedding == "learned_1d":
        patches_1SD = parameters["positions/table"]
        return np.pad(patches_1SD, ((0, 0), (a.prefix_length, 0), (0, 0)))

    if a.position_embedding != "learned_2d":
        return fixed_positions(
            a.position_embedding,
            a.grid,
            a.width,
            prefix_length=a.prefix_length,
        )

    half_shape = (*a.grid, a.width // 2)
    columns_hwD = np.broadcast_to(parameters["positions/column_table"], half_shape)
    rows_hwD = np.broadcast_to(parameters["positions/row_table"][:, None], half_shape)
    table_hwD = np.concatenate([columns_hwD, rows_hwD], axis=-1)
    table_SD = table_hwD.reshape(-1, a.width)
    if a.num_class_tokens:
        table_SD = np.concatenate([parameters["positions/class_row"], table_SD])
    return table_SD[None]
