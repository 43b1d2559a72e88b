"""Read checkpoints, check their digests, and restore them onto any layout of devices."""

import contextlib
import hashlib
import json
import logging
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from vit_jax import hosts, pytree
from vit_jax.checkpoint import workarounds
from vit_jax.checkpoint.damage import (
    METADATA,
    DamagedCheckpoint,
    describe_damage,
    describe_error,
    describe_item_damage,
    require_plain_files,
)
from vit_jax.checkpoint.digests import compute_digests
from vit_jax.imports.references import mark_stored
from vit_jax.storage.files import MAX_JSON_BYTES, JsonObject, expand_path, parse_json, read_bounded

T = TypeVar("T")
ComputeShapes = Callable[[JsonObject], Mapping[str, tuple[int, ...]]]
"""Function from the metadata of a checkpoint to the shape of every parameter by name."""

FOLDER = "checkpoints"
# Names within the metadata.
DIGESTS = "array_digests"
METADATA_DIGEST = "metadata_sha256"
BEST_STEPS = "best_steps"  # kept steps of a run with early stopping, the best first
MAX_VALUES = 2**40  # elements of one array; a larger one would take 4 TiB
_MAX_NAMED = 3  # changed arrays that an error names


class _RestoredItem(NamedTuple):
    """An item of a checkpoint that was read."""

    leaves: dict[str, jax.Array]
    checked: list[str]  # leaves with the stored dtype, which have the stored digest


class CheckpointReader:
    """The checkpoints of one workdir. Creates, changes and deletes nothing."""

    def __init__(self, workdir: str | pathlib.Path, allowed: tuple[str, ...] = ()):
        """Take a workdir, and packages whose code the metadata may name (`parse_allowed_code`)."""
        workarounds.apply()
        self.folder = expand_path(workdir).absolute() / FOLDER
        self.allowed = allowed
        self._described: dict[int, JsonObject] = {}  # metadata with digests, by step

    def all_steps(self) -> list[int]:
        """Return every step whose checkpoint is complete, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(ocp.utils.checkpoint_steps(self.folder))

    def item_names(self, step: int) -> set[str]:
        """Return the names of the items in the checkpoint of `step`."""
        return {path.name for path in (self.folder / str(step)).iterdir() if path.is_dir()}

    def metadata(self, step: int) -> JsonObject:
        """Return the metadata that `CheckpointStore.save` received.

        Raises:
          DamagedCheckpoint: it cannot be read, or has changed since.
        """
        metadata = dict(self._metadata(step))
        del metadata[DIGESTS]
        return metadata

    def restore(self, step: int, abstract: Mapping[str, T]) -> dict[str, T]:
        """Read items into the structure, dtypes and shardings of `abstract`.

        Args:
          step: one of `all_steps`.
          abstract: for each item wanted a tree of `jax.ShapeDtypeStruct` with shardings, or of
            NumPy arrays. Where shardings span several processes, each of them must call this.

        Raises:
          ValueError: names or shapes differ from the stored ones; differences are listed.
          DamagedCheckpoint: in every process, if files are missing or cannot be parsed in one of
            them, or an array has changed since.
          Exception: any other error of a read, such as an OSError of a failing disk; it says
            nothing about the files.
        """
        folder = self.folder / str(step)

        restored: dict[str, _RestoredItem] = {}
        digests: JsonObject = {}
        problem = ""
        try:
            digests = self._metadata(step)[DIGESTS]
            for item, tree in abstract.items():
                restored[item] = _restore_item(folder / item, tree)
        except _WrongModel:
            raise  # in every process: their descriptions are the same files
        except Exception as error:
            problem = describe_damage(error, folder)

        if not _is_local(abstract):
            problem = _find_first_problem(problem)
        if not problem:
            problem = _describe_changes(restored, digests)
        if problem:
            raise DamagedCheckpoint(folder, problem)

        trees = {}
        for item, tree in abstract.items():
            trees[item] = pytree.from_named_leaves(tree, restored[item].leaves)
        return trees

    def _metadata(self, step: int) -> JsonObject:
        """Return metadata with digests, which may be empty; the files are read once."""
        if step in self._described:
            return self._described[step]
        folder = self.folder / str(step)
        try:
            require_plain_files(folder)
            metadata = _read_metadata(folder / METADATA / METADATA)
        except OSError as error:
            raise DamagedCheckpoint(folder, describe_damage(error, folder)) from error
        except (TypeError, ValueError) as error:
            raise DamagedCheckpoint(folder, describe_error(error)) from error
        self._described[step] = mark_stored(metadata, str(folder), self.allowed)
        return self._described[step]


class _WrongModel(ValueError):
    """A checkpoint that is not damaged but lacks items or has other arrays."""


def _restore_item(path: pathlib.Path, tree: object) -> _RestoredItem:
    """Read an item into the structure of a tree.

    Raises:
      _WrongModel: the checkpoint does not have the item, or it has other arrays.
      DamagedCheckpoint: its description cannot be read.
      Exception: an error of the read.
    """
    wanted = pytree.name_leaves(tree)
    if not path.is_dir():
        raise _WrongModel(f"{path.parent} has no item {path.name!r}.")
    # Handlers within a checkpointer wait for all processes, also for one that failed.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        stored = pytree.name_leaves(dict(handler.metadata(path).tree))
    except Exception as error:
        raise DamagedCheckpoint(path.parent, describe_item_damage(error, path)) from error

    expected = {}
    for name, leaf in wanted.items():
        expected[name] = _separate_stored_heads(leaf, stored.get(name))
    differences = pytree.differences(expected, stored)
    if differences:
        raise _WrongModel(
            f"{path.parent}, item {path.name!r}, is not of this model:{pytree.list_lines(differences)}"
        )

    nested = unflatten_dict(expected, sep="/")
    restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
    args = ocp.args.PyTreeRestore(nested, restore_args=restore_args)
    leaves = pytree.name_leaves(handler.restore(path, args=args))

    checked = []
    for name, leaf in expected.items():
        if stored[name].dtype == leaf.dtype:
            checked.append(name)
        if leaf is not wanted[name]:
            leaves[name] = _reshape(leaves[name], wanted[name])
    return _RestoredItem(leaves, checked)


def _is_local(abstract: Mapping[str, object]) -> bool:
    """Return whether this process has all devices of the arrays to restore."""
    for leaf in jax.tree.leaves(dict(abstract)):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not sharding.is_fully_addressable:
            return False
    return True


def _find_first_problem(problem: str) -> str:
    """Return the first problem of any process; "" without any."""
    problems: list[str] = hosts.gather(problem)
    return next(filter(None, problems), "")


def _describe_changes(
    restored: Mapping[str, _RestoredItem],
    digests: Mapping[str, Mapping[str, int | None]],
) -> str:
    """Return a clause on arrays that no longer have their digests; "" without any.

    Args:
      restored: items by name.
      digests: digests by item and leaf.
    """
    changed = []
    for name, item in restored.items():
        changed += _list_changed(name, item, digests.get(name, {}))
    if not changed:
        return ""

    text = f"other bytes than were written in {', '.join(changed[:_MAX_NAMED])}"
    num_more = len(changed) - _MAX_NAMED
    if num_more > 0:
        text += f" and {num_more} more"
    return text


def _list_changed(
    name: str,
    item: _RestoredItem,
    digests: Mapping[str, int | None],
) -> list[str]:
    """Return the leaves of an item that no longer have their digests."""
    known = {leaf: digests[leaf] for leaf in item.checked if digests.get(leaf) is not None}
    current = compute_digests({leaf: item.leaves[leaf] for leaf in known})
    changed = []
    for leaf, digest in known.items():
        if current[leaf] != digest:
            changed.append(f"{name}/{leaf}")
    return changed


def _read_metadata(file: pathlib.Path) -> JsonObject:
    """Return the metadata in a file, with digests of arrays.

    Raises:
      ValueError: other content. The message names the file.
    """
    content = read_bounded(file, MAX_JSON_BYTES)
    try:
        metadata = dict(parse_json(content))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{METADATA}/{METADATA}: {describe_error(error)}") from error

    stored_digest = metadata.pop(METADATA_DIGEST, None)
    if stored_digest not in (None, digest_metadata(metadata)):
        raise ValueError(f"other bytes than were written in {METADATA}")
    digests = metadata.setdefault(DIGESTS, {})
    if not _are_digests(digests):
        raise ValueError(f"{DIGESTS} in {METADATA} must be an integer or null by item and array")
    return metadata


def _are_digests(value: object) -> bool:
    """Return whether a value of the metadata is a digest (or None) by item and array."""
    if not isinstance(value, dict):
        return False
    for leaves in value.values():
        if not isinstance(leaves, dict):
            return False
        for digest in leaves.values():
            if digest is not None and type(digest) is not int:
                return False
    return True


def digest_metadata(metadata: Mapping[str, object]) -> str:
    """Return the SHA-256 of JSON values, the same before writing and after reading."""
    values = json.loads(json.dumps(metadata))
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def has_checkpoints(workdir: str | pathlib.Path) -> bool:
    """Return whether a folder looks like a workdir with at least one checkpoint."""
    folder = expand_path(workdir) / FOLDER
    return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())


def read_workdir(
    folder: pathlib.Path,
    compute_shapes: ComputeShapes,
    *,
    step: int | None = None,
    polyak: bool = True,
    allowed: tuple[str, ...] = (),
) -> tuple[dict[str, np.ndarray], JsonObject, str]:
    """Read a run's parameters into this machine's memory, whatever devices they were saved from.

    The newest checkpoint is read; with early stopping the best one that is kept.

    Args:
      folder: a workdir that has checkpoints.
      compute_shapes: a function from the metadata of a checkpoint to the shape of every parameter.
      step: read the checkpoint of this step, and no other.
      polyak: take the Polyak average where the checkpoint has one, which was evaluated.
      allowed: packages whose code the metadata may name, from `references.parse_allowed_code`.

    Returns:
      Parameters by name, the metadata, and a description: "Polyak average of step 5".

    Raises:
      ValueError: no checkpoint is complete, there is none of `step`, or names or shapes differ from
        the stored ones; differences are listed.
    """
    reader = CheckpointReader(folder, allowed)
    if step is not None:
        _require_step(reader, step)
        return _read_weights(reader, step, compute_shapes, polyak=polyak)

    problems: list[str] = []
    for candidate in _list_steps_to_read(reader):
        try:
            weights = _read_weights(reader, candidate, compute_shapes, polyak=polyak)
        except DamagedCheckpoint as error:
            problems.append(str(error))
            continue

        _, _, description = weights
        for problem in problems:
            logging.warning("%s Read instead: %s.", problem, description)
        return weights

    advice = "Is it half written, or copied in part? Copy it again."
    reasons = problems or ["None is completely on disk."]
    lines = [f"No checkpoint in {reader.folder} can be used. {advice}", *reasons]
    raise ValueError("\n".join(lines))


def _require_step(reader: CheckpointReader, step: int) -> None:
    """Raise ValueError, with the steps that exist, if the step has no complete checkpoint."""
    steps = reader.all_steps()
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise ValueError(
            f"{reader.folder.parent}@{step}: there is no checkpoint of step {step}. "
            f"Use one of {known}; config.checkpoint.keep_latest keeps more of them."
        )


def _list_steps_to_read(reader: CheckpointReader) -> list[int]:
    """Return every step: first the best ones by the newest readable checkpoint, then the newest."""
    newest_first = reader.all_steps()[::-1]
    for step in newest_first:
        with contextlib.suppress(DamagedCheckpoint):
            best_first = reader.metadata(step).get(BEST_STEPS, ())
            kept = [best_step for best_step in best_first if best_step in newest_first]
            return list(dict.fromkeys([*kept, *newest_first]))
    return newest_first


def _read_weights(
    reader: CheckpointReader,
    step: int,
    compute_shapes: ComputeShapes,
    *,
    polyak: bool,
) -> tuple[dict[str, np.ndarray], JsonObject, str]:
    """Return the parameters of a checkpoint, its metadata, and a description of the parameters."""
    metadata = reader.metadata(step)
    item = "model"
    description = f"parameters of step {step}"
    if polyak and "polyak" in reader.item_names(step):
        item = "polyak"
        description = f"Polyak average of step {step}"

    abstract = {}
    parameters = {}
    for name, shape in compute_shapes(metadata).items():
        size = math.prod(shape)
        if size > MAX_VALUES:
            problem = f"{METADATA} states {name} with the shape {shape}"
            raise DamagedCheckpoint(reader.folder / str(step), problem)
        if size == 0:  # not stored
            parameters[name] = np.zeros(shape, np.float32)
            continue
        # A NumPy array is restored into memory; this one takes none.
        placeholder = np.broadcast_to(np.float32(0), shape)
        abstract[name] = placeholder
        parameters[name] = placeholder

    restored = reader.restore(step, {item: abstract})
    parameters |= restored[item]
    return parameters, metadata, description


def _separate_stored_heads(leaf: Any, stored: Any) -> Any:
    """Return the leaf to restore, with an axis of heads if the stored array has one.

    Before 0.3 the projections of attention, and their moments, had the shape (D, T, h); now it is
    (D, T h).
    """
    shape = leaf.shape
    stored_shape = getattr(stored, "shape", shape)
    axis = _find_different_axis(shape, stored_shape)
    if axis is None:
        return leaf

    before = stored_shape[:axis]
    heads = stored_shape[axis : axis + 2]
    after = stored_shape[axis + 2 :]
    if (*before, math.prod(heads), *after) != shape:
        return leaf

    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.zeros((), leaf.dtype), stored_shape)
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = _insert_axis(sharding, axis + 1, leaf.ndim)
    return jax.ShapeDtypeStruct(stored_shape, leaf.dtype, sharding=sharding)


def _insert_axis(
    sharding: jax.sharding.NamedSharding,
    axis: int,
    ndim: int,
) -> jax.sharding.NamedSharding:
    """Return the sharding of an array with `ndim` axes and a new axis, which is not sharded."""
    parts = list(sharding.spec)
    parts += [None] * (ndim - len(parts))
    parts.insert(axis, None)
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*parts))


def _find_different_axis(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    """Return the first axis on which two shapes differ, up to the end of the shorter one."""
    for axis, (size, other_size) in enumerate(zip(first, second, strict=False)):
        if size != other_size:
            return axis
    return None


def _reshape(array: Any, like: Any) -> Any:
    """Return the array in the shape, and with the sharding, of another one."""
    if isinstance(array, np.ndarray):
        return array.reshape(like.shape)
    return jax.jit(lambda x: x.reshape(like.shape), out_shardings=like.sharding)(array)
