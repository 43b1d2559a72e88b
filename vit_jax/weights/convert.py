"""From any format of weights to any other, with a report of every parameter's fate."""

import pathlib
from collections.abc import Sequence
from typing import Any

from vit_jax.weights.load import Weights, class_names_file, load_weights
from vit_jax.weights.names import FORMATS
from vit_jax.weights.report import Report
from vit_jax.weights.saving import LIBRARIES, OWN, WRITABLE, names_folder, save_weights


def convert(
    source: str,
    destination: str,
    *,
    to: str | None = None,
    without_head: bool = False,
    polyak: bool = True,
    overwrite: bool = False,
    class_names: Sequence[str] | None = None,
    **answers: Any,
) -> Report:
    """Reads weights and writes them in another format.

    Args:
      source: as in `load_weights`.
      destination: a .npz or .safetensors file, or a folder.
      to: one of `WRITABLE`; None decides by the destination: .npz is the released format of the network's family, a
        folder is ours. A .safetensors file, and a folder for a library, must say.
      without_head: leave classifier and hidden layer out.
      polyak: of a workdir, take the Polyak average where there is one.
      overwrite: replace what is at the destination.
      class_names: of a file that does not tell them.
      **answers: what the source does not tell: image_size, num_heads, gelu, ...

    Raises:
      ValueError: the source cannot be read, the destination exists or does not go with the format, or the format cannot
        hold the network.
    """
    path = pathlib.Path(destination).expanduser()
    _require_sense(path, destination, to)
    _require_free(path, overwrite)
    weights = load_weights(source, polyak=polyak, class_names=class_names, **answers)
    format_name = to or _default_format(path, weights)
    folder = path if names_folder(destination) else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made: {error.strerror}. Choose a folder that you may write to.") from None
    fates, notes = save_weights(weights, path, format_name, without_head=without_head)
    return Report(
        source=weights.source,
        destination=f"{path} ({format_name})",
        network=_describe(weights),
        read=weights.fates,
        written=fates,
        notes=[*weights.notes, *weights.warnings(), *notes],
    )


def _require_sense(path: pathlib.Path, destination: str, to: str | None) -> None:
    """The format can be told, and goes with the kind of destination."""
    if to is not None and to not in WRITABLE:
        raise ValueError(f"to={to!r} is not a format that is written. Those are: {', '.join(WRITABLE)}.")
    if "://" in destination:
        raise ValueError(f"{destination} is no place on this machine: give a file or folder here, and copy that there.")
    is_folder = names_folder(destination)
    if to is None and not is_folder and path.suffix != ".npz":
        names = " or ".join(f"--to={name}" for name in LIBRARIES)
        raise ValueError(
            f"{destination} does not tell whose names are wanted: say {names}; or give a .npz or a folder."
        )
    if to == OWN and not is_folder:
        raise ValueError(f"{destination}: our own checkpoints are folders; give one, without a suffix.")
    if to in FORMATS and is_folder and to not in LIBRARIES:
        raise ValueError(f"{destination}: the format {to} is a file; give one that ends in {FORMATS[to].suffix}.")
    if to in FORMATS and not is_folder and path.suffix != FORMATS[to].suffix:
        raise ValueError(f"{destination}: a file of the format {to} ends in {FORMATS[to].suffix}.")


def _require_free(path: pathlib.Path, overwrite: bool) -> None:
    """Nothing would be written over; a .npz may need a second file."""
    files = [path] if path.is_dir() or path.suffix != ".npz" else [path, class_names_file(path)]
    taken = [file for file in files if (any(file.iterdir()) if file.is_dir() else file.exists())]
    if taken and not overwrite:
        raise ValueError(f"{taken[0]} exists: choose another destination, or say --overwrite.")


def _default_format(path: pathlib.Path, weights: Weights) -> str:
    if path.suffix != ".npz" or path.is_dir():
        return OWN
    return "bit" if weights.architecture.family == "resnet" else "released"


def _describe(weights: Weights) -> str:
    a = weights.architecture
    count = sum(array.size for array in weights.parameters.values())
    size = "x".join(map(str, a.image_size))
    words = [f"{a.name}: {count:,} parameters, {size} images, {a.num_classes} classes, pool {a.pool}, head {a.head}"]
    if a.has_transformer:
        words.append(f"positions {a.position_embedding}, gelu {a.gelu}, layer norm epsilon {a.layer_norm_epsilon:g}")
    if a.has_resnet:
        words.append(
            f"{a.residual_unit} units, group norm epsilon {a.group_norm_epsilon:g}, standardization epsilon "
            f"{a.standardization_epsilon:g} added to {a.standardization_epsilon_added_to}"
        )
    names = "known" if weights.class_names else "unknown"
    return "; ".join([*words, f"class names {names}"])
