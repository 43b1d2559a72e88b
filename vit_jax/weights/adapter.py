"""Adapters of PEFT: thin factors of LoRA in a folder of their own, merged into their base when it is read.

An adapter names its base in `adapter_config.json`. W + scale * B A is computed in float32 under the
names of the base, so that any network that is read can be a base. Other methods, and options that
change more, are errors with a remedy.
"""

import math
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.storage.files import read_json
from vit_jax.weights.formats import ArrayFile, StoredArray
from vit_jax.weights.formats.stored import shown
from vit_jax.weights.names import huggingface

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_BYTES = 4 * 2**20
_PREFIX = "base_model.model."
_WRAPPERS = ("", "timm_model.")  # of networks of timm in transformers
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])\.weight")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DEFAULTS = {"r": 8, "lora_alpha": 8}  # of peft, for a configuration without them
_INITIAL = (
    None,
    True,
    False,
    "gaussian",
    "eva",
    "orthogonal",
)  # that leave the arrays of the base as they are
_NEUTRAL = {  # fields that change nothing when factors are merged, or are read here
    *(
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "auto_mapping",
    ),
    *(
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
    ),
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
    ),
    *(
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "bias",
    ),
}
_MERGE = (
    "import sys; from peft import PeftModel; from transformers import AutoModelForImageClassification as M; "
    "PeftModel.from_pretrained(M.from_pretrained(sys.argv[1]), sys.argv[2]).merge_and_unload()"
    ".save_pretrained(sys.argv[3])"
)


class Adapter(NamedTuple):
    """The configuration of LoRA's factors."""

    folder: pathlib.Path
    base: str  # a folder, or a name of the Hub
    revision: str | None  # of the base on the Hub
    rank: int
    alpha: float
    alphas: Mapping[str, float]  # of layers whose names end so
    has_ranks: bool  # layers may have other ranks
    is_stabilised: bool  # alpha is divided by the root of the rank

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of B A in a layer."""
        endings = (end for end in self.alphas if layer == end or layer.endswith(f".{end}"))
        end = next(endings, None)
        alpha = self.alpha if end is None else self.alphas[end]
        return alpha / math.sqrt(rank) if self.is_stabilised else alpha / rank


class Merged(NamedTuple):
    """The arrays of a base with an adapter."""

    file: ArrayFile
    note: str
    replaced: frozenset[
        str
    ]  # arrays of the base that the adapter has as a whole, such as a classifier's


def is_adapter(path: pathlib.Path) -> bool:
    """Return True for a folder with an adapter, and for the file of one."""
    folder = path if path.is_dir() else path.parent
    return (path.is_dir() or path.name == WEIGHTS) and (folder / CONFIG).is_file()


def read_adapter(folder: pathlib.Path) -> Adapter:
    """Read the configuration of an adapter.

    Raises:
      ValueError: it is not LoRA, has an option that is not covered, or names no base.
    """
    path = folder / CONFIG
    config = read_json(path, MAX_BYTES)
    if not isinstance(config, dict):
        raise ValueError(
            f"{path}: must be a JSON object, not {type(config).__name__}. Fetch it again."
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or not base.isprintable():
        raise ValueError(
            f"{path}: base_model_name_or_path={shown(str(base))}: must name the base. Set it to its folder."
        )

    if problem := _find_problem(config):
        command = f'python -c "{_MERGE}" {shlex.join([base, str(folder), "merged"])}'
        raise ValueError(
            f"{path}: {problem}, which is not read for a PEFT adapter (of {base}). Merge it with peft, and give the "
            f"folder merged: {command}"
        )
    revision = config.get("revision")
    return Adapter(
        folder,
        base,
        revision if isinstance(revision, str) and revision else None,
        rank=config.get("r", _DEFAULTS["r"]),
        alpha=config.get("lora_alpha", _DEFAULTS["lora_alpha"]),
        alphas=config.get("alpha_pattern") or {},
        has_ranks=bool(config.get("rank_pattern")),
        is_stabilised=config.get("use_rslora") is True,
    )


def _find_problem(config: Mapping[str, object]) -> str:
    """Return the field of a configuration that is not covered, with its value; "" if all are."""
    for field, is_covered in _COVERED.items():
        value = config.get(field, _DEFAULTS.get(field))
        if not is_covered(value):
            return f"{field}={shown(str(value))}"
    unknown = [
        field
        for field, value in config.items()
        if value and value != "none" and field not in _NEUTRAL
    ]
    return f"{shown(unknown[0])[1:-1]}={shown(str(config[unknown[0]]))}" if unknown else ""


def _are_plain(alphas: object) -> bool:
    """Return True for numbers by the ends of layers' names."""
    return not alphas or (
        isinstance(alphas, dict) and all(map(_is_plain_alpha, alphas, alphas.values()))
    )


def _is_plain_alpha(ending: str, alpha: object) -> bool:
    """Return True for the end of a layer's name with a number: expressions of others could take forever."""
    return re.fullmatch(r"[\w.]+", ending) is not None and type(alpha) in (int, float)


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


_COVERED: Mapping[str, Callable[[object], bool]] = {  # field → True for values that are read
    "peft_type": lambda value: value == "LORA",
    "bias": lambda value: value in (None, "none"),
    "init_lora_weights": lambda value: value in _INITIAL,
    "r": _is_rank,
    "lora_alpha": _is_alpha,
    "alpha_pattern": _are_plain,
}


def base_address(adapter: Adapter, *, is_local: bool) -> str:
    """Return the base as a source of weights.

    A local adapter names a folder, as peft has it, or a name of the Hub; a downloaded one only the
    latter.

    Raises:
      ValueError: the base is neither.
    """
    if is_local and (
        adapter.base.startswith(("gs://", "hf://")) or pathlib.Path(adapter.base).exists()
    ):
        return adapter.base
    if _HUB_NAME.fullmatch(adapter.base):
        return f"hf://{adapter.base}" + (f"@{adapter.revision}" if adapter.revision else "")
    raise ValueError(
        f"{adapter.folder} is a PEFT adapter of {adapter.base}, which is neither a name of the Hub nor a folder of "
        f"this machine. Set base_model_name_or_path in {CONFIG} of a local copy to the folder of the base."
    )


def merge_adapter(adapter: Adapter, base: ArrayFile, factors: ArrayFile) -> Merged:
    """Return the arrays of a base, merged with an open file of an adapter when they are read.

    Raises:
      ValueError: layers that the base does not have, factors without their pair, or of other
        shapes.
    """
    pairs, whole = _sort_arrays(factors.arrays)
    kernels = {layer: f"{layer}.weight" for layer in pairs}
    places = find_places([*kernels.values(), *whole], base.arrays)
    if missing := [layer for layer, kernel in kernels.items() if kernel not in places]:
        raise ValueError(
            f"its layer {shown(missing[0])} has no array in the base {base.path}. Give the right base."
        )

    arrays = dict(base.arrays)
    merged: dict[
        str, tuple[str, str, float]
    ] = {}  # array of the base → its factors and their scale
    for layer, pair in pairs.items():
        place = places[kernels[layer]]
        scale = _check_pair(adapter, layer, pair, factors.arrays, arrays[place].shape)
        merged[place] = (pair["A"], pair["B"], scale)
        arrays[place] = StoredArray(arrays[place].shape, np.dtype(np.float32))
    replaced = {places.get(short, short): name for short, name in whole.items()}
    arrays |= {place: factors.arrays[name] for place, name in replaced.items()}

    def read(name: str) -> np.ndarray:
        if name in replaced:
            return factors.read_array(replaced[name])
        array = base.read_array(name)
        if name not in merged:
            return array
        first, second, scale = merged[name]
        thin = factors.read_array(first).astype(np.float32)
        wide = factors.read_array(second).astype(np.float32)
        product = wide.reshape(len(wide), -1) @ thin.reshape(len(thin), -1)
        return array.astype(np.float32) + np.float32(scale) * product.reshape(array.shape)

    others = f", and {len(replaced)} arrays replaced" if replaced else ""
    note = f"The LoRA factors of {len(merged)} layers in {adapter.folder} are merged into the base {base.path}{others}."
    return Merged(ArrayFile(base.path, arrays, {}, read), note, frozenset(replaced))


def _sort_arrays(arrays: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the factors of each layer, and other arrays by their name in the network; ValueError for other methods."""
    pairs: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for name in arrays:
        short = name.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(short)
        if short == name or (match is None and "lora_" in short):
            raise ValueError(
                f"its array {shown(name)} is of no part of LoRA that is read. Merge the adapter with peft."
            )
        if match is None:
            whole[short] = name
        else:
            pairs.setdefault(match["layer"], {})[match["factor"]] = name
    return pairs, whole


def find_places(names: Iterable[str], in_base: Iterable[str]) -> dict[str, str]:
    """Return names of an adapter → names in the base, for those it has, also under another generation of names."""
    names = list(names)
    in_base = set(in_base)
    found: dict[str, str] = {}
    for wrapper in _WRAPPERS:
        found |= {
            name: name.removeprefix(wrapper)
            for name in names
            if name.removeprefix(wrapper) in in_base
        }
    others = [name for name in names if name not in found]
    return {**huggingface.find_names(others, in_base), **found} if others else found


def _check_pair(
    adapter: Adapter,
    layer: str,
    pair: Mapping[str, str],
    arrays: Mapping[str, StoredArray],
    shape: tuple[int, ...],
) -> float:
    """Return the scale of a layer; ValueError unless its factors are of its kernel's shape."""
    if len(pair) < 2:
        raise ValueError(
            f"its layer {shown(layer)} has one factor of two. Fetch the adapter again."
        )
    thin = arrays[pair["A"]].shape
    wide = arrays[pair["B"]].shape
    is_fitting = len(thin) >= 2 and thin[0] > 0 and wide[1:] == (thin[0], *(1 for _ in thin[2:]))
    if not is_fitting or (wide[0], *thin[1:]) != shape:
        raise ValueError(
            f"the factors of its layer {shown(layer)} have the shapes {thin} and {wide}, and the base {shape}. "
            "Give the right base."
        )
    if thin[0] != adapter.rank and not adapter.has_ranks:
        raise ValueError(
            f"its layer {shown(layer)} has the rank {thin[0]}, and {CONFIG} r={adapter.rank}."
        )
    return adapter.scale(layer, thin[0])
