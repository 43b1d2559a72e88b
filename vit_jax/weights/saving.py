"""Weights written in every format, with their metadata, and converted between formats."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.checkpoint.presence import require_exact_path
from vit_jax.checkpoint.run_folders import require_outside_runs
from vit_jax.checkpoint.store import write_workdir
from vit_jax.config.architecture import Architecture
from vit_jax.storage.files import expand_path, make_folder, reject_bucket, write_atomically
from vit_jax.weights import head_edits, position_table
from vit_jax.weights.averaging import load_average
from vit_jax.weights.card import write_card
from vit_jax.weights.description import describe
from vit_jax.weights.folding import OURS, read_normalisation, unfold
from vit_jax.weights.formats import write_npz, write_safetensors
from vit_jax.weights.formats.metadata import encode_comment
from vit_jax.weights.formats.sharded import WEIGHTS
from vit_jax.weights.library_config import write_library_config
from vit_jax.weights.library_lookup import find_huggingface_model, find_timm_model
from vit_jax.weights.library_models import LibraryModel, TransformersModel
from vit_jax.weights.load import Weights, load_weights
from vit_jax.weights.load_report import COPIED, ArrayStatus, Report
from vit_jax.weights.locate import find_class_names_file
from vit_jax.weights.names import (
    FORMATS,
    HEAD_BIAS,
    Entry,
    replace_shape,
    require_standard,
    require_writable,
    unstack,
)
from vit_jax.weights.packing import PLAIN
from vit_jax.weights.recognise import collect_fields

OWN = "vit_jax"
WRITABLE = (*FORMATS, OWN)
ADDED = "made for the class of the library"
LIBRARIES: dict[str, tuple[str, ...]] = {
    "timm": ("gelu",),
    "huggingface": ("gelu", "layer_norm_epsilon"),
}
"""Libraries that read a folder, and the fields that their config.json states."""


def save_weights(
    weights: Weights,
    path: str | pathlib.Path,
    format_name: str,
    *,
    without_head: bool = False,
) -> tuple[list[ArrayStatus], list[str]]:
    """Write weights, completely or not at all; existing ones are replaced.

    Return the use of every parameter, and notes. A folder for "timm" or "huggingface" also gets
    their configuration. Without the head the network ends in its features.

    Raises:
      ValueError: the format cannot hold this network (the message has all reasons), or the system
        cannot write.
    """
    reject_bucket(str(path), f"path={path}")
    into_folder = is_folder_path(path)
    path = expand_path(path)

    # No other format has the head that predicts masked patches.
    has_patch_head = weights.architecture.patch_outputs > 0
    dropped: list[ArrayStatus] = []
    if without_head or (has_patch_head and format_name != OWN):
        dropped = _describe_head(weights)
        weights = head_edits.remove_head(weights, keep_hidden=False)

    notes: list[str] = []
    if format_name == OWN:
        statuses = _save_checkpoint(weights, path)
    elif into_folder and format_name in LIBRARIES:
        statuses, notes = _save_for_library(weights, path, format_name)
    else:
        statuses, notes = _save_file(weights, path, format_name)
    return statuses + dropped, notes


def _describe_head(weights: Weights) -> list[ArrayStatus]:
    """Return the use of the parameters of a head that is dropped."""
    statuses = []
    for name, array in weights.parameters.items():
        if name.startswith("head/"):
            status = ArrayStatus.describe(name, array, "dropped")
            statuses.append(status._replace(name="-"))
    return statuses


def _save_checkpoint(weights: Weights, path: pathlib.Path) -> list[ArrayStatus]:
    """Write a checkpoint of step 0."""
    write_workdir(path, weights.parameters, describe_weights(weights))
    write_card(weights, OWN, path)
    statuses = []
    for name, array in weights.parameters.items():
        statuses.append(ArrayStatus.describe(name, array, COPIED))
    return statuses


def _save_file(
    weights: Weights,
    path: pathlib.Path,
    format_name: str,
) -> tuple[list[ArrayStatus], list[str]]:
    """Write one file."""
    written = _adapt(weights, format_name)
    entries, arrays = _build_arrays(format_name, written)
    notes = _list_differences(format_name, entries, weights.architecture, ())
    notes += _write(path, FORMATS[format_name].suffix, arrays, written)
    return _describe_use(entries, arrays, weights), notes


def _save_for_library(
    weights: Weights,
    folder: pathlib.Path,
    format_name: str,
) -> tuple[list[ArrayStatus], list[str]]:
    """Write a folder with the configuration of a library."""
    written = _adapt(weights, format_name)
    a = written.architecture
    entries, arrays = _build_arrays(format_name, written)
    stated = LIBRARIES[format_name]
    if format_name == "timm" and a.layer_norm_epsilon == find_timm_model(a).epsilon:
        stated = (*stated, "layer_norm_epsilon")
    notes = _list_differences(format_name, entries, weights.architecture, stated)

    folder.mkdir(parents=True, exist_ok=True)
    notes += write_library_config(
        folder,
        format_name,
        a,
        written.class_names,
        written.preprocessing,
        is_multilabel=written.is_multilabel,
    )
    write_card(written, format_name, folder)
    notes += _write(folder / WEIGHTS, FORMATS[format_name].suffix, arrays, written)
    return _describe_use(entries, arrays, weights), notes


def _adapt(weights: Weights, format_name: str) -> Weights:
    """Return the same network as a format holds it.

    Its positions are in a table, and its pixels as the library of the format normalises them.

    Raises:
      ValueError: the format cannot hold it.
    """
    require_standard(weights.architecture, format_name)
    has_registers = weights.architecture.registers > 0
    has_patch_table = format_name == "timm" or (format_name == "huggingface" and has_registers)
    adapted = position_table.tabulate_positions(weights, allows_patch_table=has_patch_table)
    require_writable(format_name, adapted.architecture)
    if format_name in LIBRARIES and adapted.architecture.family == "vit":
        return _normalise_for_library(adapted, format_name)
    return adapted


def _describe_use(
    entries: Sequence[Entry],
    arrays: Mapping[str, np.ndarray],
    weights: Weights,
) -> list[ArrayStatus]:
    """Return the use of every array of a file that is made of weights."""
    statuses = []
    used = set()
    for entry in entries:
        used.add(entry.name)
        statuses.append(_describe_array(entry, arrays[entry.name], weights))
    for name, array in arrays.items():
        if name not in used:
            statuses.append(ArrayStatus(name, (), array.shape, str(array.dtype), ADDED))
    return statuses


def _build_arrays(
    format_name: str,
    weights: Weights,
) -> tuple[list[Entry], dict[str, np.ndarray]]:
    """Return the entries of a file, and its arrays by name, also arrays that only readers need."""
    a = weights.architecture
    format_ = FORMATS[format_name]
    model = find_library_model(format_name, a)
    packing = model.packing if model else PLAIN
    apart = unstack(weights.parameters, a.num_heads)
    parts = packing.pack(apart)
    absent = _find_absent(model, weights)
    entries = format_.make_entries(a, None, absent, packing)

    has_class_row = format_name == "huggingface" and packing.pads_class_position
    if has_class_row and a.position_tokens == "patches":
        table = np.pad(parts["positions/table"], ((0, 0), (1, 0), (0, 0)))
        parts["positions/table"] = table
        entries = replace_shape(entries, "positions/table", table.shape)

    arrays = {entry.name: entry.write(parts) for entry in entries}
    normalisation = read_normalisation(weights.preprocessing)
    arrays |= format_.make_arrays(a, normalisation)
    return entries, arrays


def find_library_model(format_name: str, a: Architecture) -> LibraryModel | None:
    """Return the model of timm or the class of transformers for a network; None otherwise."""
    if format_name == "timm":
        return find_timm_model(a)
    if format_name == "huggingface":
        return find_huggingface_model(a)
    return None


def _find_absent(model: LibraryModel | None, weights: Weights) -> tuple[str, ...]:
    """Return the parameters that a file does not store, since its readers take zeros.

    Raises:
      ValueError: they are not zeros.
    """
    a = weights.architecture
    if not isinstance(model, TransformersModel) or model.names is None:
        return ()
    if model.names.has_head_bias or not a.num_classes:
        return ()
    if weights.parameters[HEAD_BIAS].any():
        raise ValueError(
            f"The format huggingface cannot hold {a.name}: the head of CLIP has no bias there, "
            "and this one is not zero. Omit the head (without_head), or write vit_jax."
        )
    return (HEAD_BIAS,)


def _normalise_for_library(weights: Weights, format_name: str) -> Weights:
    """Return the ViT for pixels as its library normalises them.

    It has a patch bias if the model of the library has one.
    """
    a = weights.architecture
    normalisation = read_normalisation(weights.preprocessing)
    model = find_library_model(format_name, a)
    has_bias = a.embedding_norm != "tokens" and model is not None and model.has_patch_bias
    if normalisation == OURS and a.patch_bias == has_bias:
        return weights

    unfolded = unfold(weights.parameters, normalisation, has_bias=has_bias)
    architecture = dataclasses.replace(a, patch_bias=has_bias)
    return weights.replace_network(architecture, unfolded)


def is_folder_path(path: str | pathlib.Path) -> bool:
    """Return True for the path of a folder: it exists, has no suffix, or ends in a slash."""
    if str(path).endswith("/"):
        return True
    if not pathlib.Path(path).suffix:
        return True
    return expand_path(path).is_dir()


def describe_weights(weights: Weights) -> dict[str, object]:
    """Return the metadata that weights carry, in any format."""
    return describe(
        weights.architecture,
        weights.class_names,
        weights.preprocessing,
        weights.training,
        weights.licence,
        finetuning_rule=weights.finetuning_rule,
        is_multilabel=weights.is_multilabel,
    )


def _write(
    path: pathlib.Path,
    suffix: str,
    arrays: Mapping[str, np.ndarray],
    weights: Weights,
) -> list[str]:
    """Write a file with its metadata; return notes."""
    metadata = describe_weights(weights)
    if suffix == ".safetensors":
        write_safetensors(path, arrays, metadata)
        return []

    names = weights.class_names
    if names is None or _has_room(metadata):
        write_npz(path, arrays, metadata)
        return []

    beside = find_class_names_file(path)
    _write_class_names(path, beside, names)
    metadata["class_names"] = None
    metadata["class_names_beside"] = True
    if weights.training and weights.training.classes:  # a list of the same length
        metadata["training"] = None
    write_npz(path, arrays, metadata)
    return [
        f"A .npz has no room for {len(names):,} class names: they are in {beside}; "
        "keep both together."
    ]


def _write_class_names(
    path: pathlib.Path,
    beside: pathlib.Path,
    names: Sequence[str],
) -> None:
    """Write the class names of a file, one a line, beside it."""
    text = ""
    for name in names:
        if len(name.splitlines()) > 1:
            raise ValueError(
                f"{path}: class names of several lines cannot be in {beside.name}: "
                "write .safetensors."
            )
        text += f"{name}\n"
    write_atomically(beside, text)


def _has_room(metadata: Mapping[str, object]) -> bool:
    with contextlib.suppress(ValueError):
        encode_comment(metadata)
        return True
    return False


def _list_differences(
    format_name: str,
    entries: Sequence[Entry],
    a: Architecture,
    stated: Sequence[str],
) -> list[str]:
    """Return notes on differences between this network and readers of the format.

    Differences in `stated` fields have none.
    """
    notes = []
    if a.has_transformer and a.position_embedding != "learned_1d" and a.rope is None:
        notes.append(
            f"The positions ({a.position_embedding}) are written as a learned table, "
            f"the form of {format_name} files: it computes the same, and further training "
            "changes the table too."
        )
    if format_name == "released" and a.head == "mlp":
        notes.append("timm silently ignores the hidden layer of the head (pre_logits).")

    shapes = {entry.name: entry.shape for entry in entries}
    defaults = _read_defaults(shapes)
    for field in _list_unstated(a):
        value = getattr(a, field)
        default = defaults[field]
        if field in stated or value == default:
            continue
        notes.append(
            f"These weights go with {field}={value}; readers of {format_name} files compute with "
            f"{default}, so their logits differ a little. vit_jax reads {value} from the file."
        )
    return notes


def _list_unstated(a: Architecture) -> list[str]:
    """Return the fields of a network that arrays do not show."""
    fields = []
    if a.has_transformer:
        fields += ["gelu", "layer_norm_epsilon"]
    if a.has_resnet:
        fields += ["group_norm_epsilon", "standardization_epsilon"]
        fields += ["standardization_epsilon_added_to"]
    return fields


def _read_defaults(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of the architecture that a reader takes for a file with these arrays."""
    for reader in FORMATS.values():
        names = reader.find_canonical(shapes)
        if not names:
            continue
        canonical_shapes = {name: shapes[in_file] for name, in_file in names.items()}
        facts = reader.find_facts(canonical_shapes)
        return collect_fields(facts)
    raise AssertionError("no format reads this file")


def _describe_array(entry: Entry, array: np.ndarray, weights: Weights) -> ArrayStatus:
    """Return the use of an array of a file; the weights' positions may have another form."""
    ours = entry.ours
    words = entry.describe_use(reading=False)
    if ours == ("positions/table",) and "positions/table" not in weights.parameters:
        ours = tuple(name for name in weights.parameters if name.startswith("positions/"))
        words = f"made of {weights.architecture.position_embedding}"
    return ArrayStatus(entry.name, ours, array.shape, str(array.dtype), words)


# From any format to any other.


def convert(
    sources: str | Sequence[str],
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
    """Read weights, or several whose mean is taken, and write them in another format.

    Other arguments and errors are those of `load_weights`, `load_average` and `save`.
    """
    require_destination(destination, to, overwrite)
    options |= {"polyak": polyak, "class_names": class_names, "allow_code": allow_code}
    if isinstance(sources, str):
        weights = load_weights(sources, **options)
    else:
        weights = load_average(sources, **options)
    return save(
        weights,
        destination,
        to=to,
        without_head=without_head,
        overwrite=overwrite,
    )


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
      weights: weights of a network that the format can hold.
      destination: a .npz or .safetensors file, or a folder.
      to: one of `WRITABLE`; None decides by the destination: .npz is the released format of the
        network's family, a folder is ours. A .safetensors file, and a folder for a library, need
        it.
      without_head: omit classifier and hidden layer.
      overwrite: replace files at the destination.

    Raises:
      ValueError: the destination exists or does not match the format, or the format cannot hold the
        network.
    """
    path = require_destination(destination, to, overwrite)
    is_folder = is_folder_path(destination)
    format_name = to or _choose_format(weights.architecture, is_folder=is_folder)
    folder = path if is_folder else path.parent
    with make_folder(folder):
        statuses, notes = save_weights(weights, path, format_name, without_head=without_head)
    return Report(
        source=weights.source,
        destination=f"{path} ({format_name})",
        network=_describe(weights),
        read=weights.statuses,
        written=statuses,
        notes=[*weights.notes, *weights.warnings(), *notes],
    )


def _choose_format(a: Architecture, *, is_folder: bool) -> str:
    """Return the format that a destination determines."""
    if is_folder:
        return OWN
    if a.family == "resnet":
        return "bit"
    return "released"


def require_destination(destination: str, to: str | None, overwrite: bool) -> pathlib.Path:
    """Return the path of a destination.

    Raises:
      ValueError: the format is not determined or does not fit the kind of destination, files would
        be overwritten, or the destination is the workdir of a run.
    """
    if "://" in destination:
        raise ValueError(
            f"{destination}: must be a path on this machine. Give a local path, and copy its "
            "files there."
        )
    if to not in (None, *WRITABLE):
        raise ValueError(f"to={to!r}: must be one of {', '.join(WRITABLE)}.")
    path = expand_path(destination)
    is_folder = is_folder_path(destination)
    problem = _find_folder_problem(to) if is_folder else _find_file_problem(path, to)
    if problem:
        raise ValueError(f"{destination}: {problem}.")
    if is_folder and to in (None, OWN):
        require_exact_path(path.absolute())
    require_outside_runs(path, destination)
    if not overwrite:
        _reject_existing(path)
    return path


def _find_folder_problem(to: str | None) -> str:
    """Return why a format cannot be a folder; "" if it can."""
    if to in (None, OWN, *LIBRARIES):
        return ""
    return f"the format {to} is a file. Give one that ends in {FORMATS[str(to)].suffix}"


def _find_file_problem(path: pathlib.Path, to: str | None) -> str:
    """Return why a format cannot be this file; "" if it can."""
    if to == OWN:
        return "our own checkpoints are folders. Give one, without a suffix"
    if to is None:
        if path.suffix == ".npz":
            return ""
        options = " or ".join(f"--to={name}" for name in LIBRARIES)
        return f"does not determine the format. Give {options}; or a .npz or a folder"

    suffix = FORMATS[to].suffix
    if path.suffix == suffix:
        return ""
    return f"a file of the format {to} must end in {suffix}"


def _reject_existing(path: pathlib.Path) -> None:
    """Raise ValueError if a file that would be written, or a folder with files, is there."""
    files = [path]
    if path.suffix == ".npz" and not path.is_dir():
        files.append(find_class_names_file(path))
    for file in files:
        if _is_taken(file):
            raise ValueError(f"{file} exists: choose another destination, or give --overwrite.")


def _is_taken(path: pathlib.Path) -> bool:
    """Return True if a path is a file, or a folder with files."""
    if path.is_dir():
        return any(path.iterdir())
    return path.exists()


def _describe(weights: Weights) -> str:
    """Return one line about a network."""
    a = weights.architecture
    count = sum(array.size for array in weights.parameters.values())
    size = "x".join(map(str, a.image_size))
    words = [
        f"{a.name}: {count:,} parameters, {size} images, {a.num_classes} classes, "
        f"pool {a.pool}, head {a.head}"
    ]

    if a.has_transformer:
        words.append(_describe_transformer(a))
    if a.has_resnet:
        words.append(
            f"{a.residual_unit} units, group norm epsilon {a.group_norm_epsilon:g}, "
            f"standardization epsilon {a.standardization_epsilon:g} added to "
            f"{a.standardization_epsilon_added_to}"
        )

    knowledge = "known" if weights.class_names else "unknown"
    words.append(f"class names {knowledge}")
    return "; ".join(words)


def _describe_transformer(a: Architecture) -> str:
    positions = f"positions {a.position_embedding}"
    for name in ("position_layers", "block"):
        value = getattr(a, name)
        if value != getattr(Architecture, name):
            positions += f", {name} {value}"
    return f"{positions}, gelu {a.gelu}, layer norm epsilon {a.layer_norm_epsilon:g}"
