"""Weights of one network fitted to another: new head, other resolution, other pooling.

A parameter of the target is copied from the source, unless there is a `Change` for it. Five
functions plan changes: of the head, the last norm, the pooling, the positions and the channels of
the first kernel. Each sees the parameters of the source and returns a dictionary, {} if nothing has
to change. No two plan a change of the same parameter. `apply_changes` then carries them out.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.weights.channels import FIRST_KERNELS, adapt_channels
from vit_jax.weights.folding import OURS, Normalisation, read_normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.load_report import COPIED, ArrayStatus
from vit_jax.weights.names import HEAD_BIAS, Shape, list_shapes
from vit_jax.weights.position_resize import Grid, resize_positions

Parameters = Mapping[str, np.ndarray]
Shapes = Mapping[str, Shape]
HEAD = "head/"  # a hidden layer, which may be missing, and the last layer
LAST_LAYER = "head/linear/"
POOLING = "pooling/"
_MIN_LARGE_GROUP = 5
"""From this number on, a summary counts the parameters of a folder and does not name them."""

# Folder of the last norm, by `Architecture.final_norm`; other values have no such norm.
LAST_NORMS = {"tokens": "encoder/norm/", "pooled": "pooled_norm/"}


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Parameters for another network.

    Attributes:
      parameters: float32, for every parameter of the target.
      statuses: the use of every parameter of either network.
      normalisation: how the library of the weights normalises pixels, for exports. It is not to be
        applied: reading the weights has folded it into the first kernel, which takes pixels from -1
        to 1 (`weights.folding`).
      licence: terms of the weights.
      finetuning_rule: rule of the recipe finetune for the family of the weights.
    """

    parameters: Parameters
    statuses: tuple[ArrayStatus, ...]
    normalisation: Normalisation = OURS
    licence: str = ""
    finetuning_rule: str = ""

    def summary(self) -> str:
        """Return the number of copied parameters, and the names of the others.

        A large group is one item.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        num_copied = 0
        for array in self.statuses:
            if array.status == COPIED:
                num_copied += 1
                continue
            folder, _, _ = array.name.partition("/")
            groups.setdefault((folder, array.status), []).append(array.name)

        items = [f"{num_copied} parameters copied"]
        for (folder, status), names in groups.items():
            if len(names) >= _MIN_LARGE_GROUP:
                items.append(f"{folder}/* ({len(names)} parameters) {status}")
                continue
            for name in names:
                items.append(f"{name} {status}")
        return ", ".join(items)


class Change(NamedTuple):
    """The fate of a parameter that is not copied under its name.

    A parameter that gets another name has two changes: None under its old name, and its value under
    the new one (`move`).

    Attributes:
      new_value: value in the target; None for a parameter that the target does not have.
      status: description for the user.
    """

    new_value: np.ndarray | None
    status: ArrayStatus


Changes = dict[str, Change]  # by the name of the parameter


def fit(
    weights: Weights,
    target: Architecture,
    *,
    position_resize: str = "corners",
    channel_weights: str = "cyclic",
) -> Fitted:
    """Fit weights to the network `target`.

    A head with the shapes of the target's is kept: if it is to be a new one, remove it from the
    weights first (`remove_head`). Fields without effect on names and shapes, such as the GELU form,
    are not compared.

    Args:
      weights: the source.
      target: the network.
      position_resize: how learned positions change their grid, a value of `PositionResize`;
        "library" is the method of the library that the weights come from.
      channel_weights: how the first kernel changes its channels (`weights.channels`).

    Raises:
      ValueError: names or shapes differ. Allowed are another last layer of the head, last norm,
        image size and number of channels, and a pooling that only the source has.
    """
    source = weights.architecture
    parameters = weights.parameters
    target_shapes = list_shapes(target)

    old_norm = LAST_NORMS.get(source.final_norm)
    new_norm = LAST_NORMS.get(target.final_norm)
    resize_method = weights.choose_resize_method(position_resize)
    changes = join_changes(
        [
            plan_head(parameters, target_shapes, target.head_bias_init),
            plan_last_norm(parameters, target_shapes, old_norm, new_norm),
            plan_pooling(parameters, target_shapes, source.pool, target.pool),
            plan_grid(parameters, source.grid, target.grid, resize_method),
            plan_channels(parameters, source.channels, target.channels, channel_weights),
        ]
    )
    fitted = apply_changes(parameters, changes)
    message_start = f"{weights.source} does not fit {target.name}; it is for {source.name}"
    require_shapes(fitted, target_shapes, message_start)

    # A normalisation has a mean and a deviation for each channel, so it is kept with the channels.
    normalisation = OURS
    if source.channels == target.channels:
        normalisation = read_normalisation(weights.preprocessing)
    return Fitted(
        parameters={name: fitted[name] for name in target_shapes},
        statuses=list_statuses(fitted, changes),
        normalisation=normalisation,
        licence=weights.licence,
        finetuning_rule=weights.finetuning_rule,
    )


# The head.


def has_target_head(parameters: Parameters, target_shapes: Shapes) -> bool:
    """Return True if the head has the names and shapes of the target."""
    names = list_folder(parameters, HEAD)
    if set(names) != set(list_folder(target_shapes, HEAD)):
        return False
    return all(parameters[name].shape == target_shapes[name] for name in names)


def plan_head(parameters: Parameters, target_shapes: Shapes, bias: float) -> Changes:
    """Plan a new last layer, of zeros and this bias, unless the head has the shapes of the target.

    A hidden layer that both networks have is kept, one of the source alone is dropped, and one of
    the target alone is reported as missing by `require_shapes`.
    """
    if has_target_head(parameters, target_shapes):
        return {}
    last_layer: Changes = {}
    for name in list_folder(target_shapes, LAST_LAYER):
        value = bias if name == HEAD_BIAS else 0.0
        last_layer |= fill(name, target_shapes[name], value, replaces=parameters.get(name))
    # Parameters of the source alone are dropped. Those of both get no change: they are copied.
    return drop_from_folder(parameters, target_shapes, HEAD) | last_layer


# The last norm.


def plan_last_norm(
    parameters: Parameters,
    target_shapes: Shapes,
    old_folder: str | None,
    new_folder: str | None,
) -> Changes:
    """Plan to initialise, drop or move the last norm.

    Args:
      parameters: parameters of the source.
      target_shapes: shapes of the target.
      old_folder: folder of the last norm in the source; None: it has no last norm.
      new_folder: folder of the last norm in the target; None: it has no last norm.
    """
    if old_folder == new_folder:
        return {}
    if new_folder is None:
        assert old_folder is not None
        return drop_from_folder(parameters, target_shapes, old_folder)

    changes: Changes = {}
    if old_folder is None:
        for name in list_folder(target_shapes, new_folder):
            value = 1.0 if name.endswith("scale") else 0.0
            changes |= fill(name, target_shapes[name], value)
        return changes

    for name in list_folder(parameters, old_folder):
        new_name = new_folder + name.removeprefix(old_folder)
        changes |= move(name, new_name, parameters[name])
    return changes


# The pooling.


def plan_pooling(parameters: Parameters, target_shapes: Shapes, old: str, new: str) -> Changes:
    """Plan to drop the parameters of another pooling.

    A new pooling is not planned: `require_shapes` reports its parameters as missing.
    """
    if old == new:
        return {}
    return drop_from_folder(parameters, target_shapes, POOLING)


# The positions.


def plan_grid(parameters: Parameters, old: Grid, new: Grid, method: str) -> Changes:
    """Plan to resize every table of positions to another grid of patches."""
    resized, statuses = resize_positions(parameters, old, new, method)
    changes = {}
    for status in statuses:  # one for each table whose size changes
        changes[status.name] = Change(resized[status.name], status)
    return changes


# The channels.


def plan_channels(parameters: Parameters, old: int, new: int, method: str) -> Changes:
    """Plan other channels of the kernel that sees the image: the first one of `FIRST_KERNELS`."""
    if old == new:
        return {}
    for name in FIRST_KERNELS:
        if name in parameters:
            kernel = adapt_channels(parameters[name], new, method)
            status = ArrayStatus.describe(name, kernel, f"for {new} channels ({method})")
            return {name: Change(kernel, status)}
    return {}


# Single changes, and their effect.


def list_folder(names: Iterable[str], folder: str) -> list[str]:
    """Return the names that begin with a folder."""
    return [name for name in names if name.startswith(folder)]


def drop_from_folder(
    parameters: Parameters,
    target_shapes: Shapes,
    folder: str,
) -> Changes:
    """Return the changes that drop the parameters of a folder that the target does not have."""
    changes = {}
    for name in list_folder(parameters, folder):
        if name not in target_shapes:
            status = ArrayStatus.describe(name, parameters[name], "dropped")
            changes[name] = Change(None, status)
    return changes


def move(name: str, new_name: str, array: np.ndarray) -> Changes:
    """Return the changes of a parameter that has another name in the target."""
    return {
        name: Change(None, ArrayStatus.describe(name, array, f"moved to {new_name}")),
        new_name: Change(array, ArrayStatus.describe(new_name, array, COPIED)),
    }


def fill(
    name: str,
    shape: Shape,
    value: float,
    *,
    replaces: np.ndarray | None = None,
) -> Changes:
    """Return the change of a parameter that is initialised with one value in all elements.

    Args:
      name: name of the parameter.
      shape: its shape in the target.
      value: the value.
      replaces: array of the source that it replaces, None for none; the status describes it, to
        show what is lost.
    """
    array = np.full(shape, value, np.float32)
    if replaces is None:
        status = ArrayStatus.describe(name, array, "new")
    else:
        status = ArrayStatus.describe(name, replaces, "replaced")
    return {name: Change(array, status)}


def join_changes(plans: Sequence[Changes]) -> Changes:
    """Return the changes of all plans, in their order."""
    joined: Changes = {}
    for changes in plans:
        assert joined.keys().isdisjoint(changes), "each parameter is in one plan"
        joined.update(changes)
    return joined


def apply_changes(parameters: Parameters, changes: Changes) -> dict[str, np.ndarray]:
    """Return the parameters of the source, changed."""
    changed = dict(parameters)
    for name, change in changes.items():
        changed.pop(name, None)
        if change.new_value is not None:
            changed[name] = change.new_value
    return changed


def require_shapes(parameters: Parameters, target_shapes: Shapes, message_start: str) -> None:
    """Raise ValueError unless names and shapes are the target's."""
    placeholders = {}  # `differences` compares arrays; these take no memory
    for name, shape in target_shapes.items():
        placeholders[name] = np.broadcast_to(np.float32(0), shape)
    lines = pytree.differences(placeholders, parameters)
    if lines:
        raise ValueError(f"{message_start}:{pytree.list_lines(lines)}")


def list_statuses(
    parameters: Parameters,
    changes: Changes,
) -> tuple[ArrayStatus, ...]:
    """Return the use of every parameter of either network."""
    statuses = [change.status for change in changes.values()]
    for name, array in parameters.items():
        if name not in changes:
            statuses.append(ArrayStatus.describe(name, array, COPIED))
    return tuple(statuses)
