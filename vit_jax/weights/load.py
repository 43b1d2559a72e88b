"""Weights in memory, and the path into it from every format.

File → arrays by name → recognised format → our names and the architecture → `Weights`. All names and shapes are
compared before any data is read. Numbers stay as they are; half precision becomes float32.
"""

import dataclasses
import fnmatch
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax import pytree
from vit_jax.buckets import is_address
from vit_jax.checkpoint.reader import has_checkpoints, read_workdir
from vit_jax.config.architecture import Architecture, at_image_size
from vit_jax.files import MAX_JSON_BYTES, expanded, fetch, is_in_bucket, read_bounded
from vit_jax.models import lora
from vit_jax.references import allowed_code
from vit_jax.weights import description, folding, hub
from vit_jax.weights.description import TrainingData
from vit_jax.weights.folding import OURS, Normalisation
from vit_jax.weights.formats import ArrayFile, naming, open_arrays
from vit_jax.weights.load_report import ArrayStatus
from vit_jax.weights.names import stack, stacked_shapes, tokens
from vit_jax.weights.overrides import OPTIONS
from vit_jax.weights.position_resize import crop_square, resize_positions
from vit_jax.weights.published import PUBLISHED, licence_of
from vit_jax.weights.recognise import Recognised, recognise, refuse_contradictions, validated_options
from vit_jax.weights.sidecar import CONFIG, WEIGHTS, Sidecar, name_sidecar, read_sidecar

HEAD = "head/linear/kernel"
_IGNORED = {"opt": "optimiser state", **dict.fromkeys(("chrono", "extra", "epoch", "state"), "bookkeeping of training")}


def class_names_file(path: pathlib.Path) -> pathlib.Path:
    """Return the file for the class names of a .npz whose metadata has no room for them."""
    return path.with_name(f"{path.name}.classes.txt")


def read_class_names(path: pathlib.Path) -> list[str]:
    """Return one name per line, in UTF-8; ValueError or OSError for another encoding, or a file that is too large."""
    return read_bounded(path, MAX_JSON_BYTES).decode().splitlines()


@dataclasses.dataclass(frozen=True)
class Weights:
    """A network's parameters and their metadata; None is not known."""

    architecture: Architecture
    parameters: Mapping[str, np.ndarray]  # float32 by the names of our model's leaves, in its order
    class_names: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Mapping[str, object] | None = None  # of the images, as checkpoints have it
    source: str = ""  # "PATH (format)"
    statuses: Sequence[ArrayStatus] = ()  # how each array that was read is used
    notes: Sequence[str] = ()  # sentences: assumptions, and odd values
    training: TrainingData | None = None  # the data of the run that made them
    format: str = ""  # of a file of other libraries: "released", "bit", "timm", ...
    licence: str = ""  # as the Hub names it; "" if it is not known

    def resize_method(self, position_resize: str = "library") -> str:
        """Return how positions are resized: "library" is the method of the library whose names the file has."""
        if position_resize != "library":
            return position_resize
        if self.format == "huggingface":  # whose DINOv2 antialiases if it has registers
            return "bicubic" if self.architecture.registers > 1 else "huggingface"
        return "bicubic" if self.format == "timm" else "corners"

    @property
    def is_multilabel(self) -> bool:
        """Return True if the run that made them was multi-label."""
        return self.training is not None and self.training.is_multilabel

    def with_network(self, a: Architecture, parameters: Mapping[str, np.ndarray], **changes: Any) -> "Weights":
        """Return the weights with another network, whose parameters are chosen and ordered by its names."""
        chosen = {name: parameters[name] for name in stacked_shapes(a)}
        return dataclasses.replace(self, architecture=a, parameters=chosen, **changes)

    def warnings(self) -> list[str]:
        """Return warnings for uses of the head without training."""
        head = self.parameters.get(HEAD)
        if head is None or not head.size or head.any():
            return []
        return ["WARNING: the head is all zeros: it gives the same output for all images. Fine-tune it before use."]


def load_weights(
    source: str | pathlib.Path,
    *,
    polyak: bool = True,
    class_names: Sequence[str] | None = None,
    allow_code: str | Iterable[str] = (),
    **options: Any,
) -> Weights:
    """Read weights in any format, from a file, a folder or the Hub; without a head, `num_classes` is 0.

    Args:
      source: a .npz or .safetensors file; a folder with one .safetensors, or model.safetensors among several; a workdir
        of ours; or "hf://owner/name". All but the last also at gs://..., from where files are downloaded and kept.
      polyak: of a workdir, take the Polyak average where there is one; False is for workdirs only.
      class_names: of a file that does not state them.
      allow_code: packages whose code the metadata may name and this program may run; (): none.
      **options: fields that the file does not state, from `vit_jax.weights.OPTIONS`: num_heads, gelu, ...; and
        image_size: if the file has another, the network is `resized`.

    Raises:
      ValueError: an unknown or damaged file, parameters missing or left over (they are listed), or a fact that neither
        the file nor an option gives.
      CodeNotAllowed: the network needs code of a package that is not allowed.
    """
    if unknown := options.keys() - set(OPTIONS):
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}; known are {', '.join(OPTIONS)}")
    address = str(source)
    path = hub.fetch(address) if hub.is_hub_address(address) else expanded(source)
    if is_in_bucket(path) and not has_checkpoints(path):
        path = _fetch(path)
    if has_checkpoints(path):
        weights = _load_workdir(path, polyak, options, allowed_code(allow_code))
    else:
        if not path.exists() and address in PUBLISHED:
            raise ValueError(
                f"{source}: this is the name of a network, not a file or folder of weights. "
                f"Run `vit-jax models {source} --weights` for addresses of its weights."
            )
        file = _weights_file(path) if path.is_dir() else path
        if file.is_file() and not polyak:
            raise ValueError(f"{file} has no Polyak average, so raw weights cannot be chosen: leave out --raw.")
        sidecar = _beside(path, file, options.get("architecture"))
        weights = _load_file(file, sidecar, options, allowed_code(allow_code))
        if hub.is_hub_address(address) and not weights.licence:
            weights = dataclasses.replace(weights, licence=licence_of(address.removeprefix("hf://")))
        if is_address(address):
            weights = dataclasses.replace(weights, source=f"{address} ({weights.format or 'vit_jax'})")
    if options.get("image_size") is not None:
        weights = resized(weights, tuple(options["image_size"]))
    return weights if class_names is None else _with_class_names(weights, tuple(class_names))


def _fetch(path: pathlib.Path) -> pathlib.Path:
    """Download weights from a bucket, with what belongs to them; return the file or folder on this machine.

    Raises:
      ValueError: there are none, or they cannot be read.
    """
    if path.is_dir():
        files = [file for file in path.iterdir() if any(fnmatch.fnmatchcase(file.name, name) for name in hub.PATTERNS)]
        if not files:
            raise ValueError(f"{path}: must have checkpoints of ours or a .safetensors. Give the folder of weights.")
        fetched = [fetch(file) for file in files]
        return fetched[0].parent
    local = fetch(path)
    names = [class_names_file(path).name, *([CONFIG, "preprocessor_config.json"] if path.name == WEIGHTS else [])]
    for beside in (path.with_name(name) for name in names):
        if beside.is_file():
            fetch(beside)
    return local


def resized(weights: Weights, image_size: tuple[int, int], position_resize: str = "library") -> Weights:
    """Return the same network for images of another size, with a note for each table of positions that is resized.

    `position_resize` is a value of `PositionResize`; "library" also scales the rotary positions of Perception Encoder
    to the grid of the weights, as timm does.

    Raises:
      ValueError: patches do not divide the image size, or an unknown method.
    """
    a, is_theirs = weights.architecture, position_resize == "library" and weights.format == "timm"
    if image_size == a.image_size:
        return weights
    with naming(f"image_size={image_size}"):
        target = at_image_size(a, image_size, rope_rescale=is_theirs)
    method = weights.resize_method(position_resize)
    parameters, statuses = resize_positions(weights.parameters, a.grid, target.grid, method)
    notes = [f"{status.name} was {status.status}." for status in statuses]
    if target.rope_grid != a.rope_grid:
        notes.append("The rotary positions are scaled to the grid of {}x{} patches, as timm.".format(*a.grid))
    preprocessing = weights.preprocessing and {**weights.preprocessing, "image_size": list(image_size)}
    return weights.with_network(target, parameters, preprocessing=preprocessing, notes=[*weights.notes, *notes])


def _with_class_names(weights: Weights, class_names: tuple[str, ...]) -> Weights:
    source, classes = weights.source, weights.architecture.num_classes
    if len(class_names) != classes:
        raise ValueError(f"class_names: must be {classes} names, as {source} has classes, not {len(class_names)}.")
    if weights.class_names not in (None, class_names):
        raise ValueError(f"class_names: must not be set, as {source} has class names.")
    return dataclasses.replace(weights, class_names=class_names)


def _load_workdir(path: pathlib.Path, polyak: bool, options: Mapping[str, object], allowed: tuple[str, ...]) -> Weights:
    if options.get("architecture") is not None:
        raise ValueError(f"architecture: must not be set, as {path} states its network. Omit the option.")

    def architecture_of(metadata: Mapping[str, object]) -> Architecture:
        architecture = description.stored_architecture(metadata)
        refuse_contradictions(validated_options(options), dataclasses.asdict(architecture), "the checkpoint")
        return architecture

    def shapes_of(metadata: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
        with naming(str(path)):
            shapes, factors = stacked_shapes(architecture_of(metadata)), description.stored_lora(metadata)
            return shapes if factors is None else {**shapes, **lora.factor_shapes(shapes, factors)}

    parameters, metadata, kind = read_workdir(path, shapes_of, polyak=polyak, allowed=allowed)
    statuses, notes = [ArrayStatus.of(name, array, "copied") for name, array in parameters.items()], []
    if (factors := description.stored_lora(metadata)) is not None:
        parameters = lora.merge(parameters, factors)
        notes.append(f"The factors of LoRA (rank {factors.rank}, scale {factors.scale:g}) are merged into the kernels.")
    return Weights(
        architecture_of(metadata),
        parameters,
        tuple(metadata.get("class_names") or ()) or None,
        metadata.get("preprocessing"),
        f"{path} (vit_jax, {kind})",
        statuses,
        notes,
        description.stored_training_data(metadata),
        licence=description.stored_licence(metadata),
    )


def _weights_file(folder: pathlib.Path) -> pathlib.Path:
    files = sorted(folder.glob("*.safetensors"))
    chosen = [file for file in files if file.name == WEIGHTS] or files
    if len(chosen) == 1:
        return chosen[0]
    present = ", ".join(file.name for file in files) or "none"
    inside = next((parent for parent in list(folder.absolute().parents)[:2] if has_checkpoints(parent)), None)
    wanted = f"give the workdir, {inside}" if inside else "give a file"
    raise ValueError(
        f"{folder} holds no checkpoints of ours and no {WEIGHTS} (.safetensors in it: {present}): {wanted}."
    )


def _beside(source: pathlib.Path, file: pathlib.Path, architecture: str | None) -> Sidecar:
    """Return the configuration in the folder of a file, if the source is the folder or the file has the usual name.

    `architecture` is the name that the caller gives to the network.
    """
    validated_options({"architecture": architecture})
    if source.is_dir() or file.name == WEIGHTS:
        return read_sidecar(file.parent, architecture)
    if architecture is not None:
        return name_sidecar(architecture)
    if file.suffix != ".safetensors" or not (file.parent / CONFIG).is_file():
        return Sidecar()
    return Sidecar(notes=(f"{CONFIG} beside it is not read, as it may be another file's: if not, give the folder.",))


def _load_file(
    path: pathlib.Path, sidecar: Sidecar, options: Mapping[str, object], allowed: tuple[str, ...]
) -> Weights:
    with open_arrays(path, allowed=allowed) as file:
        with naming(str(path)):
            sidecar = _carried(file) if file.metadata else sidecar
            known = recognise(file.arrays, file.metadata, stated=sidecar.fields, options=options)
            if options.get("architecture") and (file.metadata or known.format not in ("timm", "huggingface")):
                raise ValueError("architecture: must not be set, as the file states its network. Omit the option.")
            shapes = stacked_shapes(known.architecture)
            _require_all(known, file)
            preprocessing, normalisation = sidecar.preprocessing, sidecar.normalisation
            if preprocessing and not file.metadata:
                preprocessing = {**preprocessing, "image_size": list(known.architecture.image_size)}
            # Only arrays of libraries take normalised pixels in files of ours; the others are folded.
            if file.metadata and known.format in ("timm", "huggingface"):
                normalisation = folding.stored_normalisation(preprocessing)
        apart, statuses, notes = _read(file, known)
        if known.facts.is_radio:
            with naming(str(path)):
                normalisation = _arrange_radio(apart, file, known.architecture.grid) or normalisation
            notes.append(tokens.RADIO_NOTE)
    if known.facts.is_distilled:
        apart = tokens.join_distilled(apart)
        notes.append(tokens.DISTILLED_NOTE)
    if known.folded_rows and not known.facts.is_radio:
        rows, apart["positions/table"] = np.split(apart["positions/table"], [known.folded_rows], axis=1)
        apart["class_token"] = apart["class_token"] + rows
        if rows.any():
            notes.append("The position of the class token was added to it, since registers have none.")
    if any(name.endswith(".qkv.bias_mask") for name in known.ignored):
        apart |= {name: np.zeros_like(array) for name, array in apart.items() if name.endswith("/attention/key/bias")}
        notes.append("The biases of keys are zero, as the file's bias_mask has it.")
    weights = Weights(
        known.architecture,
        stack(apart, shapes),
        sidecar.class_names,
        preprocessing,
        source=f"{path} ({known.format})",
        statuses=statuses,
        notes=[*known.assumptions, *sidecar.notes, *notes],
        training=description.stored_training_data(file.metadata),
        format=known.format,
        licence=sidecar.licence,
    )
    weights = weights if normalisation == OURS else _folded(weights, normalisation)
    names, classes = weights.class_names, weights.architecture.num_classes
    if names and len(names) != classes:
        note = f"The {len(names)} class names beside it are not those of its {classes} classes."
        weights = dataclasses.replace(weights, class_names=None, notes=[*weights.notes, note])
    return weights


def _arrange_radio(apart: dict[str, np.ndarray], file: ArrayFile, grid: tuple[int, int]) -> Normalisation | None:
    """Make C-RADIO's arrays ours; return the normalisation that the file has, if any."""
    choice = file.read(tokens.CHOICE) if tokens.CHOICE in file.arrays else np.zeros(1, np.int64)
    apart |= tokens.split_tokens(apart["class_token"], choice)
    apart["positions/table"] = crop_square(apart["positions/table"][0], grid)[None]
    if not set(tokens.NORMALISATION) <= file.arrays.keys():
        return None
    return folding.parse_normalisation(*(file.read(name).ravel().tolist() for name in tokens.NORMALISATION))


def _folded(weights: Weights, normalisation: Normalisation) -> Weights:
    """Return the network for pixels in [-1, 1], with a note."""
    a = weights.architecture
    mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in normalisation)
    stated = f"mean ({mean}) and standard deviation ({std}) of pixels"
    if a.has_resnet:
        problem = "cannot be folded into convolutions with padding, so accuracy suffers until they are fine-tuned."
        note = f"WARNING: these weights were trained with {stated}, which {problem}"
        return dataclasses.replace(weights, notes=[*weights.notes, note])
    note = f"The {stated} are folded into the patch embedding: images stay in [-1, 1]."
    return weights.with_network(
        dataclasses.replace(a, patch_bias=True),
        folding.fold(weights.parameters, normalisation),
        notes=[*weights.notes, note],
        # Kept, so that the network can be written with the pixels of its library.
        preprocessing={**(weights.preprocessing or {}), **folding.describe_normalisation(normalisation)},
    )


def _require_all(known: Recognised, file: ArrayFile) -> None:
    """Raise ValueError unless the file has every name, shape and type, and no other."""
    stored = {name: file.arrays[in_file] for name, in_file in known.names.items()}
    if lines := pytree.differences({entry.name: entry for entry in known.entries}, stored):
        network = f"{known.architecture.name} in the format {known.format}"
        raise ValueError(f"its arrays are not those of {network}:{pytree.listed(lines)}")
    if odd := [name for name, array in stored.items() if array.dtype.kind in "biu"]:
        raise ValueError(f"these arrays are not of floating point: {', '.join(odd[:10])}")


def _carried(file: ArrayFile) -> Sidecar:
    """Return class names and preprocessing from our metadata, and a note if the names are lost."""
    names, preprocessing = file.metadata.get("class_names"), file.metadata.get("preprocessing")
    beside, notes = class_names_file(file.path), tuple[str, ...]()
    if names is None and file.metadata.get("class_names_beside"):
        if beside.exists():
            with naming(str(beside)):
                names = read_class_names(beside)
        else:
            notes = (f"Its class names should be in {beside}, which does not exist: bring it, or give class_names.",)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return Sidecar(
        class_names=tuple(names) if is_list and names else None,
        preprocessing=preprocessing if isinstance(preprocessing, dict) else None,
        notes=notes,
        licence=description.stored_licence(file.metadata),
    )


def _read(file: ArrayFile, known: Recognised) -> tuple[dict[str, np.ndarray], list[ArrayStatus], list[str]]:
    """Return parameters with layers taken apart, how each array is used, and notes."""
    apart: dict[str, np.ndarray] = {}
    statuses, notes = [], []
    for entry in known.entries:
        name = known.names[entry.name]
        array = file.read(name)
        with np.errstate(over="ignore"):  # infinite values are reported below
            numbers = array.astype(np.float32, copy=False)
        if not np.isfinite(numbers).all():
            notes.append(f"WARNING: {name} has values that are not finite in float32.")
        apart |= entry.read(numbers)
        status = entry.status(reading=True) + ("" if array.dtype == np.float32 else ", to float32")
        statuses.append(ArrayStatus(name, entry.ours, array.shape, str(array.dtype), status))
    if any(status.dtype == "float64" for status in statuses):
        notes.append("Arrays of float64 were rounded to float32.")
    for name in known.ignored:
        reason, stored = _IGNORED.get(name.partition("/")[0], "not part of this network"), file.arrays[name]
        statuses.append(ArrayStatus(name, (), stored.shape, str(stored.dtype), f"ignored ({reason})"))
    return apart, statuses, notes
