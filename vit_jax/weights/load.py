"""Weights in memory, read from every format.

A file becomes arrays by name, a recognised format, our names and the architecture, and then
`Weights`. All names and shapes are compared before any data is read. Numbers stay as they are; half
precision becomes float32.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax import pytree
from vit_jax.checkpoint.reader import has_checkpoints, read_workdir
from vit_jax.config.adaptation import set_image_size
from vit_jax.config.architecture import Architecture
from vit_jax.imports.references import parse_allowed_code
from vit_jax.models import lora
from vit_jax.storage import is_address
from vit_jax.storage.files import MAX_JSON_BYTES, read_bounded
from vit_jax.weights import description, folding, hub, locate
from vit_jax.weights.adapter import CONFIG as ADAPTER_CONFIG
from vit_jax.weights.adapter import (
    Adapter,
    Merged,
    find_base,
    is_adapter,
    merge_adapter,
    read_adapter,
)
from vit_jax.weights.description import TrainingData
from vit_jax.weights.families import load_families
from vit_jax.weights.folding import OURS, Normalisation, format_numbers
from vit_jax.weights.formats import ArrayFile, StoredArray, naming, open_arrays
from vit_jax.weights.formats.sharded import WEIGHTS, is_index
from vit_jax.weights.load_report import COPIED, ArrayStatus
from vit_jax.weights.names import (
    HEAD_KERNEL,
    find_wrapping,
    is_network,
    list_shapes,
    originals,
    stack,
)
from vit_jax.weights.names.wrappers import Wrapping
from vit_jax.weights.overrides import OPTIONS
from vit_jax.weights.position_resize import resize_positions
from vit_jax.weights.published import find_finetuning_rule, find_licence, list_addresses
from vit_jax.weights.recognise import (
    Recognised,
    recognise,
    reject_contradictions,
    validate_options,
)
from vit_jax.weights.sidecar import CONFIG, Sidecar, build_sidecar, read_sidecar

_LIBRARY_FORMATS = ("timm", "huggingface")
_IGNORED_FOLDERS = {
    "opt": "optimiser state",
    "chrono": "bookkeeping of training",
    "extra": "bookkeeping of training",
    "epoch": "bookkeeping of training",
    "state": "bookkeeping of training",
}
"""Folder of arrays in a checkpoint of training → the reason why they are ignored."""


def read_class_names(path: pathlib.Path) -> list[str]:
    """Return one name per line, in UTF-8.

    Raises:
      ValueError or OSError: another encoding, or a file that is too large.
    """
    return read_bounded(path, MAX_JSON_BYTES).decode().splitlines()


@dataclasses.dataclass(frozen=True)
class Weights:
    """A network's parameters and their metadata; None is unknown."""

    architecture: Architecture
    parameters: Mapping[str, np.ndarray]  # float32 by the names of our model's leaves, in its order
    class_names: tuple[str, ...] | None = None  # in the order of the logits
    preprocessing: Mapping[str, object] | None = None  # in the form of our checkpoints
    source: str = ""  # "PATH (format)"
    statuses: Sequence[ArrayStatus] = ()  # use of each array that was read
    notes: Sequence[str] = ()  # sentences: assumptions, and odd values
    training: TrainingData | None = None  # the data of the run that trained the weights
    format: str = ""  # format of another library: "released", "bit", "timm", ...
    licence: str = ""  # name on the Hub; "" if it is unknown
    has_several_labels: bool = False  # images may have several labels, by the configuration
    finetuning_rule: str = ""  # rule of the recipe finetune for this family; "": for any weights
    processor_size: tuple[int, int] | None = None  # images of the processor beside the file
    resize_method: str = ""  # method of the authors' code for positions; "": of the library

    def choose_resize_method(self, position_resize: str = "library") -> str:
        """Return the method by which positions are resized.

        "library" is the method of the library or the authors whose layout the file has.
        """
        if position_resize != "library":
            return position_resize
        if self.resize_method:
            return self.resize_method
        if self.format == "timm":
            return "bicubic"
        if self.format != "huggingface":
            return "corners"
        # Hugging Face's DINOv2 antialiases if it has registers.
        if self.architecture.registers > 1:
            return "bicubic"
        return "huggingface"

    @property
    def is_multilabel(self) -> bool:
        """True if images may have several labels, by the configuration or the training run."""
        if self.has_several_labels:
            return True
        return self.training is not None and self.training.is_multilabel

    def replace_network(
        self,
        a: Architecture,
        parameters: Mapping[str, np.ndarray],
        **changes: Any,
    ) -> "Weights":
        """Return the weights with another network, whose names select and order its parameters."""
        ordered = {name: parameters[name] for name in list_shapes(a)}
        return dataclasses.replace(self, architecture=a, parameters=ordered, **changes)

    def add_note(self, note: str) -> "Weights":
        """Return the weights with one more note."""
        return dataclasses.replace(self, notes=[*self.notes, note])

    def warnings(self) -> list[str]:
        """Return warnings for uses of the head without training."""
        head = self.parameters.get(HEAD_KERNEL)
        if head is None or not head.size or head.any():
            return []
        return [
            "WARNING: the head is all zeros: it gives the same output for all images. "
            "Fine-tune it before use."
        ]


def load_weights(
    source: str | pathlib.Path,
    *,
    polyak: bool = True,
    class_names: Sequence[str] | None = None,
    allow_code: str | Iterable[str] = (),
    keep_size: bool = False,
    **options: Any,
) -> Weights:
    """Read weights in any format, from a file, a folder or the Hub.

    Without a head, `num_classes` is 0.

    Args:
      source: a .npz or .safetensors file; a folder with one .safetensors, model.safetensors among
        several, or shards with their index; a folder with an adapter of PEFT (LoRA), which names
        its base; a workdir, or the checkpoint of a step, "WORKDIR@STEP"; or "hf://owner/name". All
        but the last also at gs://..., from where files are downloaded and kept.
      polyak: take the Polyak average of a workdir that has one; False is for workdirs only.
      class_names: class names of a file that does not state them.
      allow_code: packages whose code the metadata may name and this program may run; (): none.
      keep_size: keep the image size of the file, also if the processor beside it makes images of
        another. For a caller that resizes the network: positions are resized once only.
      **options: fields that the file does not state, from `vit_jax.weights.OPTIONS`: num_heads,
        gelu, ...; and image_size: if the file has another, the network is resized.

    Raises:
      ValueError: an unknown or damaged file, parameters missing or left over (they are listed), or
        a fact that neither the file nor an option gives.
      CodeNotAllowed: the network needs code of a package that is not allowed.
    """
    unknown = options.keys() - set(OPTIONS)
    if unknown:
        raise TypeError(
            f"unknown options: {', '.join(sorted(unknown))}; known are {', '.join(OPTIONS)}"
        )

    address = str(source)
    allowed = parse_allowed_code(allow_code)
    location, step = locate.split_step(source)
    path = locate.fetch_source(location)

    if has_checkpoints(path):
        weights = _load_workdir(path, step, polyak, options, allowed)
    else:
        weights = _load_arrays(address, path, polyak, options, allowed)

    if options.get("image_size") is not None:
        weights = resize_weights(weights, tuple(options["image_size"]))
    elif not keep_size:
        weights = _resize_for_processor(weights)
    if class_names is not None:
        weights = _set_class_names(weights, tuple(class_names))
    return weights


def _load_arrays(
    address: str,
    path: pathlib.Path,
    polyak: bool,
    options: Mapping[str, object],
    allowed: tuple[str, ...],
) -> Weights:
    """Read weights of a file, a folder or an adapter, which were fetched from an address."""
    if not path.exists() and address in list_addresses():
        raise ValueError(
            f"{address}: this is the name of a network, not a file or folder of weights. "
            f"Run `vit-jax models {address} --weights` for addresses of its weights."
        )

    if is_adapter(path):
        weights = _load_adapter(address, path, options, allowed)
    else:
        file = locate.find_file(path)
        if file.is_file() and not polyak:
            raise ValueError(
                f"{file} has no Polyak average, so raw weights cannot be chosen: "
                "omit --weights.raw."
            )
        sidecar = _find_configuration(path, file, options)
        weights = _load_file(file, sidecar, options, allowed)

    if hub.is_hub_address(address) and not weights.licence:
        licence = find_licence(address.removeprefix("hf://"))
        weights = dataclasses.replace(weights, licence=licence)
    if hub.is_hub_address(address) and not weights.finetuning_rule:
        rule = find_finetuning_rule(address.removeprefix("hf://"))
        weights = dataclasses.replace(weights, finetuning_rule=rule)
    if is_address(address):
        format_name = weights.format or "vit_jax"
        weights = dataclasses.replace(weights, source=f"{address} ({format_name})")
    return weights


def _load_adapter(
    address: str,
    path: pathlib.Path,
    options: Mapping[str, object],
    allowed: tuple[str, ...],
) -> Weights:
    """Read an adapter of PEFT, merged into its base."""
    folder = path if path.is_dir() else path.parent
    factors = path
    if not path.is_file():
        factors = locate.find_adapter_file(folder)

    adapter = read_adapter(folder)
    base = find_base(adapter, is_local=locate.is_local(address))
    try:
        base_path = locate.fetch_source(base)
        if has_checkpoints(base_path) or is_adapter(base_path):
            raise ValueError(
                f"{base}: must hold the arrays of a network, not a workdir or another adapter."
            )
        file = locate.find_file(base_path)
    except ValueError as error:
        raise ValueError(
            f"{folder} is a PEFT adapter of {adapter.base}: {error} "
            "To name another place of the base, set "
            f"base_model_name_or_path in a local copy of {folder / ADAPTER_CONFIG}."
        ) from error

    sidecar = _find_configuration(base_path, file, options)
    weights = _load_file(file, sidecar, options, allowed, (adapter, factors))
    licence = weights.licence or find_licence(base.removeprefix("hf://"))
    return dataclasses.replace(weights, licence=licence)


def resize_weights(
    weights: Weights,
    image_size: tuple[int, int],
    position_resize: str = "library",
) -> Weights:
    """Return the same network for images of another size.

    The weights get a note for each table of positions that is resized. `position_resize` is a value
    of `PositionResize`; "library" also scales the rotary positions of Perception Encoder to the
    grid of the weights, as timm does.

    Raises:
      ValueError: patches do not divide the image size, or an unknown method.
    """
    a = weights.architecture
    if image_size == a.image_size:
        return weights

    scales_rope = position_resize == "library" and weights.format == "timm"
    with naming(f"image_size={image_size}"):
        target = set_image_size(a, image_size, rope_rescale=scales_rope)
    method = weights.choose_resize_method(position_resize)
    parameters, statuses = resize_positions(weights.parameters, a.grid, target.grid, method)

    notes = list(weights.notes)
    for status in statuses:
        notes.append(f"{status.name} was {status.status}.")
    if target.rope_grid != a.rope_grid:
        rows, columns = a.grid
        notes.append(
            f"The rotary positions are scaled to the grid of {rows}x{columns} patches, as timm."
        )

    preprocessing = weights.preprocessing
    if preprocessing:
        preprocessing = {**preprocessing, "image_size": list(image_size)}
    return weights.replace_network(
        target,
        parameters,
        preprocessing=preprocessing,
        notes=notes,
    )


def _set_class_names(weights: Weights, class_names: tuple[str, ...]) -> Weights:
    """Return weights of unknown classes with class names.

    Raises:
      ValueError: their number is wrong, or the weights have other names.
    """
    source = weights.source
    num_classes = weights.architecture.num_classes
    num_names = len(class_names)
    if num_names != num_classes:
        raise ValueError(
            f"class_names: must be {num_classes} names, as {source} has classes, not {num_names}."
        )
    if weights.class_names not in (None, class_names):
        raise ValueError(f"class_names: must not be set, as {source} has class names.")
    return dataclasses.replace(weights, class_names=class_names)


def _load_workdir(
    path: pathlib.Path,
    step: int | None,
    polyak: bool,
    options: Mapping[str, object],
    allowed: tuple[str, ...],
) -> Weights:
    """Read the weights of a run, of one step if it is not None."""
    if options.get("architecture") is not None:
        raise ValueError(
            f"architecture: must not be set, as {path} states its network. Omit the option."
        )

    def compute_shapes(metadata: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
        with naming(str(path)):
            architecture = _read_architecture(metadata, options)
            shapes = list_shapes(architecture)
            factors = description.parse_lora(metadata)
            if factors is None:
                return shapes
            factor_shapes = lora.list_factor_shapes(shapes, factors)
            return {**shapes, **factor_shapes}

    parameters, metadata, kind = read_workdir(
        path, compute_shapes, step=step, polyak=polyak, allowed=allowed
    )
    statuses = [ArrayStatus.describe(name, array, COPIED) for name, array in parameters.items()]

    notes = []
    factors = description.parse_lora(metadata)
    if factors is not None:
        parameters = lora.merge(parameters, factors)
        notes.append(
            f"The factors of LoRA (rank {factors.rank}, scale {factors.scale:g}) are merged "
            "into the kernels."
        )

    class_names = metadata.get("class_names") or ()
    return Weights(
        architecture=_read_architecture(metadata, options),
        parameters=parameters,
        class_names=tuple(class_names) or None,
        preprocessing=metadata.get("preprocessing"),
        source=f"{path} (vit_jax, {kind})",
        statuses=statuses,
        notes=notes,
        training=description.parse_training_data(metadata),
        licence=description.parse_licence(metadata),
        finetuning_rule=_read_finetuning_rule(metadata),
        has_several_labels=description.states_several_labels(metadata),
    )


def _read_finetuning_rule(metadata: Mapping[str, object]) -> str:
    """Return the rule of the recipe finetune in metadata; "" for none, or an unknown one.

    An older checkpoint of a run names the weights that it began with: an address of the Hub tells
    the family.
    """
    rule = metadata.get("finetuning_rule")
    if rule and any(rule == family.finetuning_rule for family in load_families()):
        return str(rule)
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        return ""
    start = config.get("init_from")
    if not isinstance(start, str) or not hub.is_hub_address(start):
        return ""
    return find_finetuning_rule(start.removeprefix("hf://"))


def _read_architecture(
    metadata: Mapping[str, object],
    options: Mapping[str, object],
) -> Architecture:
    """Return the network of a checkpoint; ValueError if the options contradict it."""
    architecture = description.parse_architecture(metadata)
    stated = dataclasses.asdict(architecture)
    reject_contradictions(validate_options(options), stated, "the checkpoint")
    return architecture


def _find_configuration(
    source: pathlib.Path,
    file: pathlib.Path,
    options: Mapping[str, object],
) -> Sidecar:
    """Return the configuration in the folder of a file.

    It is read if the source is the folder or the file has the usual name. The option `architecture`
    is the name that the caller gives to the network.
    """
    name = validate_options(options).get("architecture")
    if source.is_dir() or file.name == WEIGHTS or is_index(file.name):
        return read_sidecar(file.parent, name)
    if name is not None:
        return build_sidecar(name)

    config_path = file.parent / CONFIG
    if file.suffix != ".safetensors" or not config_path.is_file():
        return Sidecar()
    note = f"{CONFIG} beside it is not read, as it may be another file's: if not, give the folder."
    return Sidecar(notes=(note,))


class _Opened(NamedTuple):
    """An open file of a network: names without prefixes, the factors of an adapter merged."""

    file: ArrayFile
    wrapping: Wrapping
    ignored: Mapping[str, StoredArray]  # by name in the file
    adapter: Merged | None

    def describe_use(self, statuses: Iterable[ArrayStatus]) -> list[ArrayStatus]:
        """Return the use of every array, under its name in the file."""
        used = []
        for status in statuses:
            name_in_file = self.wrapping.names.get(status.name, status.name)
            used.append(status._replace(name=name_in_file))
        for name, stored in self.ignored.items():
            reason = self.wrapping.ignored[name].reason
            used.append(_describe_ignored(name, stored, reason))
        return used

    def notes(self) -> list[str]:
        """Return sentences about prefixes and the adapter."""
        notes = self.wrapping.notes()
        if self.adapter:
            notes.append(self.adapter.note)
        return notes


def _describe_ignored(name: str, stored: StoredArray, reason: str) -> ArrayStatus:
    """Return the use of an array that is not part of the network."""
    return ArrayStatus(
        name=name,
        ours=(),
        shape=stored.shape,
        dtype=str(stored.dtype),
        status=f"ignored ({reason})",
    )


@contextlib.contextmanager
def _open_network(
    path: pathlib.Path,
    adapter: tuple[Adapter, pathlib.Path] | None,
    allowed: tuple[str, ...],
) -> Iterator[_Opened]:
    """Open the arrays of a network, below any wrappers, and with an adapter merged.

    The arrays are in one file or several.
    """
    with contextlib.ExitStack() as resources:
        file = resources.enter_context(open_arrays(path, allowed=allowed))
        with naming(str(path)):
            wrapping = find_wrapping(file.arrays, is_network)
        ignored = {name: file.arrays[name] for name in wrapping.ignored}
        network = wrapping.unwrap(file)
        if adapter is None:
            yield _Opened(network, wrapping, ignored, None)
            return

        config, factors_path = adapter
        factors = resources.enter_context(open_arrays(factors_path))
        with naming(str(factors_path)):
            merged = merge_adapter(config, network, factors)
        yield _Opened(merged.file, wrapping, ignored, merged)


def _adapt_sidecar(sidecar: Sidecar, merged: Merged) -> Sidecar:
    """Return the configuration of a base for its network with an adapter.

    The adapter may have another classifier.
    """
    if not merged.replaced:
        return sidecar

    fields = dict(sidecar.fields)
    fields.pop("num_classes", None)
    notes = sidecar.notes
    if sidecar.class_names:
        note = "The class names of the base are kept: the adapter has a classifier and no names."
        notes = (*notes, note)
    return sidecar._replace(fields=fields, notes=notes)


def _load_file(
    path: pathlib.Path,
    sidecar: Sidecar,
    options: Mapping[str, object],
    allowed: tuple[str, ...],
    adapter: tuple[Adapter, pathlib.Path] | None = None,
) -> Weights:
    """Read the arrays of a network, with its configuration.

    Raises:
      ValueError: the network is unknown, the caller names one that the file states, or arrays are
        missing, left over or of another shape.
    """
    with _open_network(path, adapter, allowed) as opened:
        file = opened.file
        with naming(str(path)):
            sidecar = _find_sidecar(sidecar, opened)
            known = recognise(file.arrays, file.metadata, stated=sidecar.fields, options=options)
            _reject_name(options, file, known)
            _require_arrays(known, file)
            preprocessing = _complete_preprocessing(sidecar, file, known)
        network = _read_network(opened, known)

    place = path
    if adapter is not None:
        config, _ = adapter
        place = config.folder
    a = known.architecture
    weights = Weights(
        architecture=a,
        parameters=stack(network.parameters, list_shapes(a)),
        class_names=sidecar.class_names,
        preprocessing=preprocessing,
        source=f"{place} ({known.format})",
        statuses=network.statuses,
        notes=[*known.assumptions, *sidecar.notes, *network.notes],
        training=description.parse_training_data(file.metadata),
        format=known.format,
        licence=sidecar.licence,
        finetuning_rule=sidecar.finetuning_rule,
        resize_method=originals.choose_position_resize(file.arrays),
        has_several_labels=sidecar.is_multilabel and a.num_classes > 0,
        processor_size=_find_processor_size(sidecar, known),
    )

    normalisation = network.normalisation or _find_normalisation(sidecar, file, known)
    if normalisation != OURS:
        weights = _fold_normalisation(weights, normalisation)
    return _drop_wrong_names(weights)


class _Network(NamedTuple):
    """A network that was read from a file."""

    parameters: dict[str, np.ndarray]  # ours, layers taken apart
    normalisation: Normalisation | None  # stated by an array of the file
    statuses: list[ArrayStatus]
    notes: list[str]


def _read_network(opened: _Opened, known: Recognised) -> _Network:
    """Read the arrays of an open file into our parameters."""
    file = opened.file
    packing = known.packing
    parts, statuses, notes = _read_arrays(file, known)
    with naming(str(file.path)):
        unpacked = packing.unpack(parts, file, known.architecture)

    notes = [*opened.notes(), *notes]
    if packing.note:
        notes.append(packing.note)
    if known.folded_rows and not packing.fits_any_grid:
        notes += _fold_positions(unpacked.parameters, known.folded_rows)
    return _Network(
        parameters=unpacked.parameters,
        normalisation=unpacked.normalisation,
        statuses=opened.describe_use(statuses),
        notes=notes,
    )


def _find_sidecar(sidecar: Sidecar, opened: _Opened) -> Sidecar:
    """Return the facts of our metadata in a file, or else the configuration beside it."""
    if opened.file.metadata:
        return _read_our_metadata(opened.file)
    if opened.adapter:
        return _adapt_sidecar(sidecar, opened.adapter)
    return sidecar


def _reject_name(
    options: Mapping[str, object],
    file: ArrayFile,
    known: Recognised,
) -> None:
    """Raise ValueError if the caller names a network that the file states."""
    states_network = bool(file.metadata) or known.format not in _LIBRARY_FORMATS
    if options.get("architecture") and states_network:
        raise ValueError(
            "architecture: must not be set, as the file states its network. Omit the option."
        )


def _complete_preprocessing(
    sidecar: Sidecar,
    file: ArrayFile,
    known: Recognised,
) -> Mapping[str, object] | None:
    """Return the preprocessing, by our metadata or to the image size of the network."""
    if not sidecar.preprocessing or file.metadata:
        return sidecar.preprocessing
    return {**sidecar.preprocessing, "image_size": list(known.architecture.image_size)}


def _find_normalisation(
    sidecar: Sidecar,
    file: ArrayFile,
    known: Recognised,
) -> Normalisation:
    """Return the normalisation of the pixels that the arrays take.

    Among files with our metadata only those in the format of a library have another.
    """
    if file.metadata and known.format in _LIBRARY_FORMATS:
        return folding.read_normalisation(sidecar.preprocessing)
    return sidecar.normalisation


def _fold_positions(parameters: dict[str, np.ndarray], rows: int) -> list[str]:
    """Add the positions of class tokens, the first `rows`, to the tokens; return notes."""
    table_1SD = parameters["positions/table"]
    token_rows, patch_rows = np.split(table_1SD, [rows], axis=1)
    parameters["positions/table"] = patch_rows
    parameters["class_token"] = parameters["class_token"] + token_rows
    if not token_rows.any():
        return []
    return ["The position of the class token was added to it, since registers have none."]


def _drop_wrong_names(weights: Weights) -> Weights:
    """Return the weights without class names, and with a note, if their number is wrong."""
    names = weights.class_names
    num_classes = weights.architecture.num_classes
    if not names or len(names) == num_classes:
        return weights
    note = f"The {len(names)} class names beside it do not fit its {num_classes} classes."
    return dataclasses.replace(weights, class_names=None).add_note(note)


def _find_processor_size(sidecar: Sidecar, known: Recognised) -> tuple[int, int] | None:
    """Return the size of the images that Hugging Face's processor makes.

    It is None if config.json states no size or the same.
    """
    stated_size = sidecar.fields.get("image_size")
    preprocessing = sidecar.preprocessing or {}
    processor_size = preprocessing.get("image_size")
    if known.format != "huggingface" or stated_size is None:
        return None
    if not isinstance(processor_size, list):
        return None

    height, width = processor_size
    if (height, width) in (stated_size, known.architecture.image_size):
        return None
    return height, width


def _resize_for_processor(weights: Weights) -> Weights:
    """Return the network for the images that the processor makes, with a note."""
    if weights.processor_size is None:
        return weights

    a = weights.architecture
    height, width = weights.processor_size
    made = _format_size(weights.processor_size)
    known = _format_size(a.image_size)
    sizes = f"preprocessor_config.json makes images of {made} pixels, config.json says {known}"
    patch_height, patch_width = a.patch_size
    if height % patch_height or width % patch_width:
        patches = _format_size(a.patch_size)
        note = f"{sizes}, which is taken, since patches of {patches} do not divide the other."
        return weights.add_note(note)

    note = f"{sizes}: {made} is taken. For another size set image_size."
    return resize_weights(weights.add_note(note), weights.processor_size)


def _format_size(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _fold_normalisation(weights: Weights, normalisation: Normalisation) -> Weights:
    """Return the network for pixels in [-1, 1], with a note."""
    a = weights.architecture
    mean = format_numbers(normalisation.mean)
    std = format_numbers(normalisation.std)
    stated = f"mean ({mean}) and standard deviation ({std}) of pixels"
    if a.has_resnet:
        note = (
            f"WARNING: these weights were trained with {stated}, which cannot be folded into "
            "convolutions with padding, so accuracy suffers until they are fine-tuned."
        )
        return weights.add_note(note)

    # Stated, so that the network can be written with the pixels of its library.
    preprocessing = dict(weights.preprocessing or {})
    preprocessing |= folding.describe_normalisation(normalisation)
    note = f"The {stated} are folded into the patch embedding: images stay in [-1, 1]."
    return weights.add_note(note).replace_network(
        dataclasses.replace(a, patch_bias=True),
        folding.fold(weights.parameters, normalisation),
        preprocessing=preprocessing,
    )


def _require_arrays(known: Recognised, file: ArrayFile) -> None:
    """Raise ValueError unless the file has every expected array, and no other.

    Names, shapes and types are compared.
    """
    stored = {name: file.arrays[in_file] for name, in_file in known.names.items()}
    expected = {entry.name: entry for entry in known.entries}
    lines = pytree.differences(expected, stored)
    if lines:
        network = f"{known.architecture.name} in the format {known.format}"
        raise ValueError(f"its arrays are not those of {network}:{pytree.list_lines(lines)}")

    integers = [name for name, array in stored.items() if array.dtype.kind in "biu"]
    if integers:
        raise ValueError(f"these arrays are not of floating point: {', '.join(integers[:10])}")


def _read_our_metadata(file: ArrayFile) -> Sidecar:
    """Return the facts in our metadata, with a note if the class names are lost."""
    metadata = file.metadata
    class_names, notes = _read_our_class_names(file)
    preprocessing = metadata.get("preprocessing")
    if not isinstance(preprocessing, dict):
        preprocessing = None
    return Sidecar(
        class_names=class_names,
        preprocessing=preprocessing,
        notes=notes,
        licence=description.parse_licence(metadata),
        finetuning_rule=_read_finetuning_rule(metadata),
        is_multilabel=description.states_several_labels(metadata),
    )


def _read_our_class_names(file: ArrayFile) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the class names in our metadata or in the file beside the weights, and notes."""
    names = file.metadata.get("class_names")
    if names is None and file.metadata.get("class_names_beside"):
        beside = locate.find_class_names_file(file.path)
        if not beside.exists():
            note = (
                f"Its class names should be in {beside}, which does not exist: "
                "fetch it, or give class_names."
            )
            return None, (note,)
        with naming(str(beside)):
            names = read_class_names(beside)

    if not isinstance(names, list) or not names:
        return None, ()
    if not all(isinstance(name, str) for name in names):
        return None, ()
    return tuple(names), ()


def _read_arrays(
    file: ArrayFile,
    known: Recognised,
) -> tuple[dict[str, np.ndarray], list[ArrayStatus], list[str]]:
    """Return parameters with layers taken apart, the use of each array, and notes."""
    parameters: dict[str, np.ndarray] = {}
    statuses = []
    notes = []
    for entry in known.entries:
        name = known.names[entry.name]
        array = file.read(name)
        with np.errstate(over="ignore"):  # infinite values are reported below
            numbers = array.astype(np.float32, copy=False)
        if not np.isfinite(numbers).all():
            notes.append(f"WARNING: {name} has values that are not finite in float32.")
        parameters |= entry.read(numbers)

        status = entry.describe_use(reading=True)
        if array.dtype != np.float32:
            status = f"{status}, to float32"
        statuses.append(ArrayStatus(name, entry.ours, array.shape, str(array.dtype), status))

    if any(status.dtype == "float64" for status in statuses):
        notes.append("Arrays of float64 were rounded to float32.")

    for name in known.ignored:
        folder, _, _ = name.partition("/")
        reason = _IGNORED_FOLDERS.get(folder, "not part of this network")
        statuses.append(_describe_ignored(name, file.arrays[name], reason))
    return parameters, statuses, notes
