"""Weights from memory into every format, with their metadata; and from any format to any other, with a report."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.checkpoint.presence import require_exact_path
from vit_jax.checkpoint.run_folders import require_outside_runs
from vit_jax.checkpoint.store import write_workdir
from vit_jax.config.architecture import Architecture
from vit_jax.storage.files import expanded, make_folder, refuse_bucket, write_atomically
from vit_jax.weights import fit
from vit_jax.weights.card import write_card
from vit_jax.weights.description import describe
from vit_jax.weights.folding import OURS, stored_normalisation, unfold
from vit_jax.weights.formats import write_npz, write_safetensors
from vit_jax.weights.formats.metadata import to_comment
from vit_jax.weights.library_config import write_library_config
from vit_jax.weights.load import Weights, class_names_file, load_weights
from vit_jax.weights.load_report import ArrayStatus, Report
from vit_jax.weights.names import (
    FORMATS,
    Entry,
    refuse_unwritable,
    require_standard,
    tokens,
    unstack,
    with_shape,
)
from vit_jax.weights.names.library_classes import huggingface_model, timm_model
from vit_jax.weights.recognise import format_defaults
from vit_jax.weights.sidecar import WEIGHTS

OWN = "vit_jax"
WRITABLE = (*FORMATS, OWN)
ADDED = "made for the class of the library"
LIBRARIES = {
    "timm": ("gelu",),
    "huggingface": ("gelu", "layer_norm_epsilon"),
}  # fields that their config.json states


def save_weights(
    weights: Weights, path: str | pathlib.Path, format_name: str, *, without_head: bool = False
) -> tuple[list[ArrayStatus], list[str]]:
    """Write weights, completely or not at all, replacing existing ones; return the use of every parameter, and notes.

    A folder for "timm" or "huggingface" also gets their configuration. Without the head the network ends in its
    features.

    Raises:
      ValueError: the format cannot hold this network (the message has all reasons), or the system cannot write.
    """
    refuse_bucket(str(path), f"path={path}")
    into_folder = names_folder(path)
    path = expanded(path)
    without_head = without_head or (
        format_name != OWN and weights.architecture.patch_outputs > 0
    )  # no other has it
    left_out = [name for name in weights.parameters if without_head and name.startswith("head/")]
    statuses = [
        ArrayStatus.of(name, weights.parameters[name], "left out")._replace(name="-")
        for name in left_out
    ]
    weights = fit.without_head(weights, keep_hidden=False) if without_head else weights
    if format_name == OWN:
        write_workdir(path, weights.parameters, describe_weights(weights))
        write_card(weights, OWN, path)
        return [
            ArrayStatus.of(name, array, "copied") for name, array in weights.parameters.items()
        ] + statuses, []
    require_standard(weights.architecture, format_name)
    of_patches = format_name == "timm" or (
        format_name == "huggingface" and weights.architecture.registers > 0
    )
    written = fit.with_position_table(weights, of_patches=of_patches)
    refuse_unwritable(format_name, written.architecture)
    if format_name in LIBRARIES and written.architecture.family == "vit":
        written = _with_library_pixels(written, format_name)
    a = written.architecture
    entries, arrays = _arrays(format_name, written)
    into_folder = into_folder and format_name in LIBRARIES
    stated = LIBRARIES[format_name] if into_folder else ()
    if into_folder and format_name == "timm" and a.layer_norm_epsilon == timm_model(a).epsilon:
        stated = (*stated, "layer_norm_epsilon")
    notes = _differences(format_name, entries, weights.architecture, stated)
    if into_folder:
        path.mkdir(parents=True, exist_ok=True)
        notes += write_library_config(
            path,
            format_name,
            a,
            written.class_names,
            written.preprocessing,
            is_multilabel=written.is_multilabel,
        )
        write_card(written, format_name, path)
    notes += _write(
        path / WEIGHTS if into_folder else path, FORMATS[format_name].suffix, arrays, written
    )
    used = {entry.name for entry in entries}
    added = [
        ArrayStatus(n, (), array.shape, str(array.dtype), ADDED)
        for n, array in arrays.items()
        if n not in used
    ]
    return [
        _status(entry, arrays[entry.name], weights) for entry in entries
    ] + added + statuses, notes


def _arrays(format_name: str, weights: Weights) -> tuple[list[Entry], dict[str, np.ndarray]]:
    """Return the entries of a file, and its arrays by name, with those that only readers need."""
    a = weights.architecture
    format_ = FORMATS[format_name]
    model = huggingface_model(a) if format_name == "huggingface" else None
    is_radio = model is not None and model.family == "radio"
    is_distilled = a.num_class_tokens == 2 and not is_radio
    absent: Collection[str] = ("register_tokens",) if is_radio else ()
    if model and model.family == "clip" and a.num_classes:
        absent = ("head/linear/bias",)
        if weights.parameters[absent[0]].any():
            raise ValueError(
                f"The format huggingface cannot hold {a.name}: the head of CLIP has no bias there, and this one is not "
                "zero. Leave the head out (without_head), or write vit_jax."
            )
    entries = format_.entries(a, absent=absent, is_distilled=is_distilled)
    apart = unstack(weights.parameters, a.num_heads)
    if is_radio:
        apart = tokens.join_tokens(apart)
        entries = with_shape(entries, "class_token", (1, a.prefix_length, a.width))
    elif is_distilled:
        apart = tokens.split_distilled(apart)
    elif model and a.position_tokens == "patches":  # the class token has a row there
        apart["positions/table"] = np.pad(apart["positions/table"], ((0, 0), (1, 0), (0, 0)))
        entries = with_shape(entries, "positions/table", apart["positions/table"].shape)
    arrays = {entry.name: entry.write(apart) for entry in entries}
    return entries, arrays | format_.added(a, stored_normalisation(weights.preprocessing))


def _with_library_pixels(weights: Weights, format_name: str) -> Weights:
    """Return the ViT for pixels that are normalised as its library does it, with the library's patch bias or none."""
    a = weights.architecture
    normalisation = stored_normalisation(weights.preprocessing)
    is_radio = format_name == "huggingface" and huggingface_model(a).family == "radio"
    has_bias = a.embedding_norm != "tokens" and not is_radio
    if normalisation == OURS and a.patch_bias == has_bias:
        return weights
    unfolded = unfold(weights.parameters, normalisation, has_bias=has_bias)
    return weights.with_network(dataclasses.replace(a, patch_bias=has_bias), unfolded)


def names_folder(path: str | pathlib.Path) -> bool:
    """Return True if weights go into a folder of this name: it exists, has no suffix or ends in a slash."""
    return str(path).endswith("/") or not pathlib.Path(path).suffix or expanded(path).is_dir()


def describe_weights(weights: Weights) -> dict[str, object]:
    """Return the metadata that weights carry, in any format."""
    return describe(
        weights.architecture,
        weights.class_names,
        weights.preprocessing,
        weights.training,
        weights.licence,
        is_multilabel=weights.is_multilabel,
    )


def _write(
    path: pathlib.Path, suffix: str, arrays: Mapping[str, np.ndarray], weights: Weights
) -> list[str]:
    metadata = describe_weights(weights)
    names = weights.class_names
    if suffix == ".safetensors":
        write_safetensors(path, arrays, metadata)
        return []
    notes = []
    if names is not None and not _has_room(metadata):
        beside = class_names_file(path)
        if any(len(name.splitlines()) > 1 for name in names):
            raise ValueError(
                f"{path}: class names of several lines cannot be in {beside.name}: write .safetensors."
            )
        write_atomically(beside, "".join(f"{name}\n" for name in names))
        metadata |= {"class_names": None, "class_names_beside": True}
        if weights.training and weights.training.classes:  # as long a list
            metadata["training"] = None
        notes = [
            f"A .npz has no room for {len(names):,} class names: they are in {beside}; keep both together."
        ]
    write_npz(path, arrays, metadata)
    return notes


def _has_room(metadata: Mapping[str, object]) -> bool:
    with contextlib.suppress(ValueError):
        to_comment(metadata)
        return True
    return False


def _differences(
    format_name: str, entries: Sequence[Entry], a: Architecture, stated: Sequence[str]
) -> list[str]:
    """Return notes on differences between this network and readers of the format, except in `stated` fields."""
    shapes = {entry.name: entry.shape for entry in entries}
    reader, names = next(
        (reader, names) for reader in FORMATS.values() if (names := reader.canonical(shapes))
    )
    defaults = format_defaults(
        reader.facts({name: shapes[in_file] for name, in_file in names.items()})
    )
    fields = ["gelu", "layer_norm_epsilon"] if a.has_transformer else []
    if a.has_resnet:
        fields += [
            "group_norm_epsilon",
            "standardization_epsilon",
            "standardization_epsilon_added_to",
        ]
    notes = []
    if a.has_transformer and a.position_embedding != "learned_1d" and a.rope is None:
        notes.append(
            f"The positions ({a.position_embedding}) are written as a learned table, the form of {format_name} "
            "files: it computes the same, and further training changes the table too."
        )
    if format_name == "released" and a.head == "mlp":
        notes.append("timm silently ignores the hidden layer of the head (pre_logits).")
    return notes + [
        f"These weights go with {field}={getattr(a, field)}; readers of {format_name} files compute with "
        f"{defaults[field]}, so their logits differ a little. Read by vit_jax, the file keeps its own."
        for field in fields
        if field not in stated and getattr(a, field) != defaults[field]
    ]


def _status(entry: Entry, array: np.ndarray, weights: Weights) -> ArrayStatus:
    """Return how an array of the file is made of `weights`, in which positions may have another form."""
    ours = entry.ours
    words = entry.status(reading=False)
    if ours == ("positions/table",) and ours[0] not in weights.parameters:
        ours = tuple(name for name in weights.parameters if name.startswith("positions/"))
        words = f"made of {weights.architecture.position_embedding}"
    return ArrayStatus(entry.name, ours, array.shape, str(array.dtype), words)


# From any format to any other.


def convert(
    source: str,
    destination: str,
    *,
    to: str | None = None,
    without_head: bool = False,
    polyak: bool = True,
    overwrite: bool = False,
    class_names: Sequence[str] | None = None,
    allow_code: str | Iterable[str] = (),
    **options: Any,
) -> Report:
    """Read weights and write them in another format; arguments and errors as for `load_weights` and `save`."""
    require_destination(destination, to, overwrite)
    weights = load_weights(
        source, polyak=polyak, class_names=class_names, allow_code=allow_code, **options
    )
    return save(weights, destination, to=to, without_head=without_head, overwrite=overwrite)


def save(
    weights: Weights,
    destination: str,
    *,
    to: str | None = None,
    without_head: bool = False,
    overwrite: bool = False,
) -> Report:
    """Write weights, and describe the use of every array.

    Args:
      weights: of any network that the format can hold.
      destination: a .npz or .safetensors file, or a folder.
      to: one of `WRITABLE`; None decides by the destination: .npz is the released format of the network's family, a
        folder is ours. A .safetensors file, and a folder for a library, need it.
      without_head: omit classifier and hidden layer.
      overwrite: replace files at the destination.

    Raises:
      ValueError: the destination exists or does not match the format, or the format cannot hold the network.
    """
    path = require_destination(destination, to, overwrite)
    is_folder = names_folder(destination)
    format_name = to or (
        OWN if is_folder else "bit" if weights.architecture.family == "resnet" else "released"
    )
    with make_folder(path if is_folder else path.parent):
        statuses, notes = save_weights(weights, path, format_name, without_head=without_head)
    return Report(
        source=weights.source,
        destination=f"{path} ({format_name})",
        network=_describe(weights),
        read=weights.statuses,
        written=statuses,
        notes=[*weights.notes, *weights.warnings(), *notes],
    )


def require_destination(destination: str, to: str | None, overwrite: bool) -> pathlib.Path:
    """Return the path of a destination.

    Raises:
      ValueError: the format is not determined or does not fit the kind of destination, files would be overwritten, or
        the destination is the workdir of a run.
    """
    if "://" in destination:
        raise ValueError(
            f"{destination}: must be a path on this machine. Give a local path, and copy that there."
        )
    if to not in (None, *WRITABLE):
        raise ValueError(f"to={to!r}: must be one of {', '.join(WRITABLE)}.")
    path = expanded(destination)
    is_folder = names_folder(destination)
    problem = ""
    suffix = FORMATS[to].suffix if to in FORMATS else ""
    if to is None and not is_folder and path.suffix != ".npz":
        names = " or ".join(f"--to={name}" for name in LIBRARIES)
        problem = f"does not determine whose names are wanted. Give {names}; or a .npz or a folder"
    elif to == OWN and not is_folder:
        problem = "our own checkpoints are folders. Give one, without a suffix"
    elif suffix and is_folder and to not in LIBRARIES:
        problem = f"the format {to} is a file. Give one that ends in {suffix}"
    elif suffix and not is_folder and path.suffix != suffix:
        problem = f"a file of the format {to} must end in {suffix}"
    if problem:
        raise ValueError(f"{destination}: {problem}.")
    if is_folder and to in (None, OWN):
        require_exact_path(path.absolute())
    require_outside_runs(path, destination)
    files = [path] if path.is_dir() or path.suffix != ".npz" else [path, class_names_file(path)]
    taken = [file for file in files if (any(file.iterdir()) if file.is_dir() else file.exists())]
    if taken and not overwrite:
        raise ValueError(f"{taken[0]} exists: choose another destination, or give --overwrite.")
    return path


def _describe(weights: Weights) -> str:
    a = weights.architecture
    count = sum(array.size for array in weights.parameters.values())
    size = "x".join(map(str, a.image_size))
    words = [
        f"{a.name}: {count:,} parameters, {size} images, {a.num_classes} classes, pool {a.pool}, head {a.head}"
    ]
    if a.has_transformer:
        unusual = [
            name
            for name in ("position_layers", "block")
            if getattr(a, name) != getattr(Architecture, name)
        ]
        kind = "".join(f", {name} {getattr(a, name)}" for name in unusual)
        words.append(
            f"positions {a.position_embedding}{kind}, gelu {a.gelu}, layer norm epsilon {a.layer_norm_epsilon:g}"
        )
    if a.has_resnet:
        words.append(
            f"{a.residual_unit} units, group norm epsilon {a.group_norm_epsilon:g}, standardization epsilon "
            f"{a.standardization_epsilon:g} added to {a.standardization_epsilon_added_to}"
        )
    return "; ".join([*words, f"class names {'known' if weights.class_names else 'unknown'}"])
