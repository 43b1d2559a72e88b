"""Reads checkpoints, checks them against their digests, and restores them onto any layout of devices."""

import contextlib
import hashlib
import json
import logging
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from vit_jax import hosts, pytree
from vit_jax.checkpoint import workarounds
from vit_jax.checkpoint.damage import (
    METADATA,
    DamagedCheckpoint,
    damage_of,
    damage_of_description,
    reason,
    require_plain_files,
)
from vit_jax.checkpoint.digests import array_digests
from vit_jax.imports.references import mark_stored
from vit_jax.storage.files import MAX_JSON_BYTES, JsonObject, expanded, parse_json, read_bounded

T = TypeVar("T")
ShapesOf = Callable[[JsonObject], Mapping[str, tuple[int, ...]]]
"""From the metadata of a checkpoint to the name and shape of every parameter."""

FOLDER = "checkpoints"
DIGESTS = "array_digests"  # within the metadata, with the next
METADATA_DIGEST = "metadata_sha256"
MOST_VALUES = 2**40  # of one array; a larger one would take 4 TiB
BEST_STEPS = "best_steps"  # in the metadata of a run with early stopping, the best first


class CheckpointReader:
    """The checkpoints of one workdir. Creates, changes and deletes nothing."""

    def __init__(self, workdir: str | pathlib.Path, allowed: tuple[str, ...] = ()):
        """Packages `allowed`, from `references.allowed_code`, are those whose code the metadata may name."""
        workarounds.apply()
        self.folder = expanded(workdir).absolute() / FOLDER
        self.allowed = allowed
        self._described: dict[int, JsonObject] = {}  # metadata with digests, by step

    def all_steps(self) -> list[int]:
        """Every step whose writing was completed, ascending."""
        return sorted(ocp.utils.checkpoint_steps(self.folder)) if self.folder.is_dir() else []

    def item_names(self, step: int) -> set[str]:
        """Items that the checkpoint of `step` holds."""
        return {path.name for path in (self.folder / str(step)).iterdir() if path.is_dir()}

    def metadata(self, step: int) -> JsonObject:
        """Return the metadata that `CheckpointStore.save` received.

        Raises:
          DamagedCheckpoint: it cannot be read, or has changed since.
        """
        return {name: value for name, value in self._metadata(step).items() if name != DIGESTS}

    def restore(self, step: int, abstract: Mapping[str, T]) -> dict[str, T]:
        """Read items into the structure, dtypes and shardings of `abstract`.

        Args:
          step: one of `all_steps`.
          abstract: for each item wanted a tree of `jax.ShapeDtypeStruct` with shardings, or of NumPy arrays. Where
            shardings span several processes, each of them must call this.

        Raises:
          ValueError: names or shapes differ from what is stored; differences are listed.
          DamagedCheckpoint: in every process, if files are missing or cannot be parsed in one of them, or an array has
            changed since.
          Exception: any other error of a read, such as an OSError of a failing disk; it says nothing about the files.
        """
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(dict(abstract))]
        is_local = all(sharding is None or sharding.is_fully_addressable for sharding in shardings)
        restored = {}
        unchecked = {}
        problem = ""
        try:
            digests = self._metadata(step)[DIGESTS]
            for name, tree in abstract.items():
                restored[name], same_dtype = self._restore_item(step, name, tree)
                unchecked[name] = {leaf: digests.get(name, {}).get(leaf) for leaf in same_dtype}
        except _OtherModel:
            raise  # alike in every process: their descriptions are the same files
        except Exception as error:
            problem = damage_of(error, self.folder / str(step))
        problem = problem if is_local else next(filter(None, hosts.gather(problem)), "")
        to_check = {} if problem else unchecked
        changed = [
            f"{item}/{leaf}"
            for item, leaves in to_check.items()
            for leaf in _changed(restored[item], leaves)
        ]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            problem = f"other bytes than were written in {', '.join(changed[:3])}{more}"
        if problem:
            raise DamagedCheckpoint(self.folder / str(step), problem)
        return {
            name: pytree.from_named_leaves(tree, restored[name]) for name, tree in abstract.items()
        }

    def _restore_item(
        self, step: int, name: str, tree: object
    ) -> tuple[dict[str, jax.Array], list[str]]:
        """The item's leaves by name, and the names of those that were stored with the dtype asked for."""
        path = self.folder / str(step) / name
        wanted = pytree.named_leaves(tree)
        if not path.is_dir():
            raise _OtherModel(f"{path.parent} has no item {name!r}.")
        # A handler of its own: those within a checkpointer wait for all processes, and would wait for one that failed.
        handler = ocp.PyTreeCheckpointHandler()
        try:
            stored = pytree.named_leaves(dict(handler.metadata(path).tree))
        except Exception as error:
            raise DamagedCheckpoint(path.parent, damage_of_description(error, path)) from error
        expected = {leaf: _with_heads(value, stored.get(leaf)) for leaf, value in wanted.items()}
        if lines := pytree.differences(expected, stored):
            raise _OtherModel(
                f"{path.parent}, item {name!r}, is not of this model:{pytree.listed(lines)}"
            )
        nested = unflatten_dict(expected, sep="/")
        restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
        args = ocp.args.PyTreeRestore(nested, restore_args=restore_args)
        leaves = pytree.named_leaves(handler.restore(path, args=args))
        for leaf in (leaf for leaf in wanted if expected[leaf] is not wanted[leaf]):
            leaves[leaf] = _reshaped(leaves[leaf], wanted[leaf])
        return leaves, [
            leaf for leaf, value in expected.items() if stored[leaf].dtype == value.dtype
        ]

    def _metadata(self, step: int) -> JsonObject:
        """Return metadata with digests, empty for checkpoints without any; its files are read once."""
        if step in self._described:
            return self._described[step]
        folder = self.folder / str(step)
        try:
            require_plain_files(folder)
            metadata = _parse_metadata(read_bounded(folder / METADATA / METADATA, MAX_JSON_BYTES))
            if metadata.pop(METADATA_DIGEST, None) not in (None, metadata_digest(metadata)):
                raise ValueError(f"other bytes than were written in {METADATA}")
            if not _are_digests(metadata.setdefault(DIGESTS, {})):
                raise ValueError(
                    f"{DIGESTS} in {METADATA} must be an integer or null by item and array"
                )
        except (OSError, TypeError, ValueError) as error:
            problem = damage_of(error, folder) if isinstance(error, OSError) else reason(error)
            raise DamagedCheckpoint(folder, problem) from error
        self._described[step] = mark_stored(metadata, str(folder), self.allowed)
        return self._described[step]


class _OtherModel(ValueError):
    """A checkpoint that is not damaged but does not hold what is asked for."""


def _parse_metadata(content: bytes) -> JsonObject:
    try:
        return dict(parse_json(content))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{METADATA}/{METADATA}: {reason(error)}") from error


def _are_digests(value: object) -> bool:
    """Return whether a value of the metadata is a digest (or None) by item and array."""
    return isinstance(value, dict) and all(
        isinstance(leaves, dict)
        and all(type(digest) in (int, type(None)) for digest in leaves.values())
        for leaves in value.values()
    )


def metadata_digest(metadata: Mapping[str, object]) -> str:
    """SHA-256 of JSON values, the same before they are written and after they are read."""
    as_read = json.loads(json.dumps(metadata))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def has_checkpoints(workdir: str | pathlib.Path) -> bool:
    """Return whether a folder looks like a workdir with at least one checkpoint."""
    folder = expanded(workdir) / FOLDER
    return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())


def read_workdir(
    folder: pathlib.Path,
    shapes_of: ShapesOf,
    *,
    polyak: bool = True,
    allowed: tuple[str, ...] = (),
) -> tuple[dict[str, np.ndarray], JsonObject, str]:
    """Read a run's parameters into this machine's memory, whatever devices they were saved from.

    They are those of the newest checkpoint; of a run with early stopping those of the best that is kept.

    Args:
      folder: a workdir that has checkpoints.
      shapes_of: from the checkpoint's metadata, name and shape of every parameter.
      polyak: take the Polyak average where the checkpoint has one, for it is what was evaluated.
      allowed: packages whose code the metadata may name, from `references.allowed_code`.

    Returns:
      Parameters by name, the metadata, and what they are: "Polyak average of step 5".

    Raises:
      ValueError: no checkpoint is complete, or names or shapes differ from what is stored; differences are listed.
    """
    reader = CheckpointReader(folder, allowed)
    problems: list[str] = []
    for step in _steps_to_read(reader):
        try:
            read = _read_weights(reader, step, shapes_of, polyak=polyak)
        except DamagedCheckpoint as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logging.warning("%s Read instead: %s.", problem, read[2])
        return read
    advice = "Is it half written, or copied in part? Copy it again."
    reasons = problems or ["None is completely on disk."]
    raise ValueError(
        "\n".join([f"No checkpoint in {reader.folder} can be used. {advice}", *reasons])
    )


def _steps_to_read(reader: CheckpointReader) -> list[int]:
    """Every step: the best ones first that the newest checkpoint names, then the newest."""
    newest_first = reader.all_steps()[::-1]
    for step in newest_first:
        with contextlib.suppress(DamagedCheckpoint):
            best = [
                step for step in reader.metadata(step).get(BEST_STEPS, ()) if step in newest_first
            ]
            return list(dict.fromkeys([*best, *newest_first]))
    return newest_first


def _read_weights(
    reader: CheckpointReader, step: int, shapes_of: ShapesOf, *, polyak: bool
) -> tuple[dict[str, np.ndarray], JsonObject, str]:
    metadata = reader.metadata(step)
    item = "polyak" if polyak and "polyak" in reader.item_names(step) else "model"
    shapes = shapes_of(metadata)
    for name, shape in shapes.items():
        if math.prod(shape) > MOST_VALUES:
            raise DamagedCheckpoint(
                reader.folder / str(step), f"{METADATA} states {name} with the shape {shape}"
            )
    # NumPy's arrays, whose place is the memory; these take none.
    abstract = {
        name: np.broadcast_to(np.float32(0), shape)
        for name, shape in shapes.items()
        if math.prod(shape)
    }
    restored = reader.restore(step, {item: abstract})[item]
    parameters = {
        name: restored.get(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()
    }
    return (
        parameters,
        metadata,
        f"{'Polyak average' if item == 'polyak' else 'parameters'} of step {step}",
    )


def _with_heads(leaf: Any, stored: Any) -> Any:
    """`leaf`, or its like in the shape of what is stored where that has heads on an axis of their own.

    So had the projections of attention, and their moments, before 0.3: (D, T, h), where (D, T h) is now.
    """
    shape = leaf.shape
    heads = getattr(stored, "shape", leaf.shape)
    axis = next(
        (axis for axis, pair in enumerate(zip(shape, heads, strict=False)) if pair[0] != pair[1]),
        None,
    )
    if (
        axis is None
        or (*heads[:axis], math.prod(heads[axis : axis + 2]), *heads[axis + 2 :]) != shape
    ):
        return leaf
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.zeros((), leaf.dtype), heads)
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        parts = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        spec = jax.sharding.PartitionSpec(*parts[: axis + 1], None, *parts[axis + 1 :])
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(heads, leaf.dtype, sharding=sharding)


def _reshaped(array: Any, like: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.reshape(like.shape)
    return jax.jit(lambda x: x.reshape(like.shape), out_shardings=like.sharding)(array)


def _changed(leaves: Mapping[str, jax.Array], digests: Mapping[str, int | None]) -> list[str]:
    """Names of leaves that no longer have their digests."""
    known = {name: digest for name, digest in digests.items() if digest is not None}
    current = array_digests({name: leaves[name] for name in known})
    return [name for name, digest in known.items() if current[name] != digest]
