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
from vit_jax.weights.names import stacked_shapes
from vit_jax.weights.position_resize import resize_positions

_LAST_LAYER = "head/linear/"
_NO_PATCH_HEAD = "the head that predicts masked patches, and its [mask] embedding, are left out."


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Parameters for another network."""

    parameters: Mapping[str, np.ndarray]  # float32, for every parameter of the target
    statuses: tuple[ArrayStatus, ...]  # of every parameter of either network
    normalisation: Normalisation = (
        OURS  # of the pixels that the weights were trained on, folded into them
    )
    licence: str = ""  # of the weights

    def summary(self) -> str:
        """Return the number of copied parameters, and the names of the others, of large groups as one."""
        groups: dict[tuple[str, str], list[str]] = {}
        num_copied = 0
        for name, _, _, _, how in self.statuses:
            if how == "copied":
                num_copied += 1
            else:
                groups.setdefault((name.partition("/")[0], how), []).append(name)
        words = [f"{num_copied} parameters copied"]
        for (group, how), names in groups.items():
            if len(names) < 5:
                words += [f"{name} {how}" for name in names]
            else:
                words.append(f"{group}/* ({len(names)} parameters) {how}")
        return ", ".join(words)


def fit(weights: Weights, target: Architecture, *, position_resize: str = "corners") -> Fitted:
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
    if (source.pool, source.final_norm) != (target.pool, target.final_norm):
        statuses += _fit_pooling(parameters, expected)
    method = weights.resize_method(position_resize)
    parameters, resized = resize_positions(parameters, source.grid, target.grid, method)
    statuses += resized
    _require_shapes(
        parameters,
        expected,
        f"{weights.source} does not fit {target.name} ({source.name} is there)",
    )

    fitted = {name: parameters[name] for name in expected}
    reported = {status.name for status in statuses}
    for name, array in fitted.items():
        if name not in reported:
            statuses.append(ArrayStatus.of(name, array, "copied"))
    normalisation = stored_normalisation(weights.preprocessing)
    return Fitted(fitted, tuple(statuses), normalisation, weights.licence)


def _require_shapes(
    parameters: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], fault: str
) -> None:
    """Raise ValueError unless parameters have the expected names and shapes."""
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in expected.items()}
    if lines := pytree.differences(arrays, parameters):
        raise ValueError(f"{fault}:{pytree.listed(lines)}")


def _fit_head(
    parameters: dict[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], bias: float
) -> list[ArrayStatus]:
    """Replace a head that is not the expected one, in place; return how each of its parameters is used."""
    names = [name for name in (*parameters, *expected) if name.startswith("head/")]
    if all(_is_expected(name, parameters, expected) for name in names):
        return []
    statuses = []
    for name in [name for name in parameters if name.startswith("head/")]:
        if name not in expected or name.startswith(_LAST_LAYER):
            status = "replaced" if name in expected else "left out"
            statuses.append(ArrayStatus.of(name, parameters.pop(name), status))
    for name, shape in expected.items():
        if name.startswith(_LAST_LAYER):
            value = bias if name.endswith("bias") else 0
            parameters[name] = np.full(shape, value, np.float32)
    return statuses


def _is_expected(
    name: str, parameters: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]
) -> bool:
    return name in parameters and expected.get(name) == parameters[name].shape


_NORMS = {"encoder/norm/": "pooled_norm/", "pooled_norm/": "encoder/norm/"}


def _fit_pooling(
    parameters: dict[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]
) -> list[ArrayStatus]:
    """Change attention pooling and the last norm of `parameters`; return how each changed parameter is used."""
    statuses = []
    moving = tuple(_NORMS)
    old_names = [name for name in parameters if name.startswith((*moving, "pooling/"))]
    for name in old_names:
        if name in expected:
            continue
        array = parameters.pop(name)
        folder = f"{name.rpartition('/')[0]}/"
        moved = name.replace(folder, _NORMS.get(folder, folder))
        if moved in expected:
            parameters[moved] = array
        status = f"moved to {moved}" if moved in expected else "left out"
        statuses.append(ArrayStatus.of(name, array, status))
    for name, shape in expected.items():
        if name.startswith(moving) and name not in parameters:
            parameters[name] = np.full(shape, name.endswith("scale"), np.float32)
            statuses.append(ArrayStatus.of(name, parameters[name], "new"))
    return statuses


def without_head(weights: Weights, *, keep_hidden: bool = True) -> Weights:
    """Return the weights without their last layer: `fit` initialises a new one, for any number of classes.

    With `keep_hidden` the hidden layer of the head stays, if there is one; otherwise the network
    ends in its pooled features. A head of the user's own class is removed as a whole: which of its
    layers is the last is not known.
    """
    a = weights.architecture
    keep_hidden = keep_hidden and not is_reference(a.head)
    head = a.head if keep_hidden else "linear"
    architecture = dataclasses.replace(a, num_classes=0, patch_outputs=0, head=head)
    left_out = (_LAST_LAYER, "head/mask") if keep_hidden else "head/"
    parameters = {}
    for name, array in weights.parameters.items():
        if not name.startswith(left_out):
            parameters[name] = array
    for name, shape in stacked_shapes(architecture).items():
        if name.startswith(_LAST_LAYER):
            parameters[name] = np.zeros(shape, np.float32)
    notes = [*weights.notes, _NO_PATCH_HEAD] if a.patch_outputs else weights.notes
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
    parameters = dict(weights.parameters)
    kernel_DK = parameters["head/linear/kernel"]
    bias_K = parameters["head/linear/bias"]
    is_known_L = output_L >= 0
    parameters["head/linear/kernel"] = np.where(is_known_L, kernel_DK[:, output_L], np.float32(0))
    parameters["head/linear/bias"] = np.where(
        is_known_L, bias_K[output_L], bias_K[output_L[is_known_L]].mean()
    )
    architecture = dataclasses.replace(weights.architecture, num_classes=len(class_names))
    return weights.with_network(architecture, parameters, class_names=class_names)


LAYER_POOLS = {"token": "token", "mean": "gap", "token_mean": "token_gap"}
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
    final_norm = "none" if a.final_norm == "pooled" else None  # it is not part of these layers
    architecture = set_pooling(a, LAYER_POOLS[layer], final_norm)
    return base.with_network(architecture, fit(base, architecture).parameters)


def with_classifier(
    weights: Weights, kernel_DK: np.ndarray, bias_K: np.ndarray, class_names: tuple[str, ...]
) -> Weights:
    """Return the weights with a new last layer, in float32, whose input is the feature "pre_logits" of the network.

    Raises:
      ValueError: the kernel does not fit the network.
    """
    base = without_head(weights)
    architecture = dataclasses.replace(base.architecture, num_classes=len(class_names))
    head = {
        "head/linear/kernel": kernel_DK.astype(np.float32),
        "head/linear/bias": bias_K.astype(np.float32),
    }
    shapes = stacked_shapes(architecture)
    if wrong := [name for name, array in head.items() if array.shape != shapes[name]]:
        raise ValueError(
            f"{wrong[0]} has the shape {head[wrong[0]].shape}: must be {shapes[wrong[0]]}."
        )
    return base.with_network(architecture, {**base.parameters, **head}, class_names=class_names)


def with_position_table(weights: Weights, *, of_patches: bool = False) -> Weights:
    """Return the same network with one learned row of position for each token, whatever form its positions have.

    With `of_patches` a table of patches alone stays so.
    """
    a = weights.architecture
    if (
        not a.has_transformer
        or (a.position_embedding == "learned_1d" and (of_patches or a.position_tokens == "all"))
        or (a.rope is not None and a.position_embedding == "none")
    ):
        return weights
    parameters = dict(weights.parameters)
    if a.position_embedding == "learned_1d":
        table_1SD = np.pad(parameters["positions/table"], ((0, 0), (a.prefix_length, 0), (0, 0)))
    elif a.position_embedding == "learned_2d":
        half = (*a.grid, a.width // 2)
        columns_hwD = np.broadcast_to(parameters["positions/column_table"], half)
        rows_hwD = np.broadcast_to(parameters["positions/row_table"][:, None], half)
        table_ND = np.concatenate([columns_hwD, rows_hwD], axis=-1).reshape(-1, a.width)
        first_1D = [parameters["positions/class_row"]] if a.num_class_tokens else []
        table_1SD = np.concatenate([*first_1D, table_ND])[None]
    else:
        table_1SD = fixed_positions(
            a.position_embedding, a.grid, a.width, prefix_length=a.prefix_length
        )
    parameters["positions/table"] = table_1SD
    architecture = dataclasses.replace(a, position_embedding="learned_1d", position_tokens="all")
    return weights.with_network(architecture, parameters)
