"""Adapters of PEFT: low-rank factors of LoRA in a folder, merged into their base when it is read.

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
from vit_jax.weights.formats.stored import quote
from vit_jax.weights.names import huggingface

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_BYTES = 4 * 2**20
_PREFIX = "base_model.model."
_WRAPPER = "timm_model."  # prefix of networks of timm in transformers
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])\.weight")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DEFAULTS = {"r": 8, "lora_alpha": 8}  # values that peft takes if they are absent

# Initialisations that do not change the arrays of the base.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")

# Fields that change nothing when factors are merged, or are read here.
_KNOWN_FIELDS = """
peft_type task_type base_model_name_or_path revision peft_version auto_mapping inference_mode
r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern
target_modules exclude_modules layers_to_transform layers_pattern modules_to_save
init_lora_weights loftq_config eva_config megatron_core qalora_group_size runtime_config bias
"""

_MERGE = (
    "import sys; from peft import PeftModel; "
    "from transformers import AutoModelForImageClassification as M; "
    "PeftModel.from_pretrained(M.from_pretrained(sys.argv[1]), sys.argv[2]).merge_and_unload()"
    ".save_pretrained(sys.argv[3])"
)


class Adapter(NamedTuple):
    """The configuration of LoRA's factors."""

    folder: pathlib.Path
    base: str  # a folder, or a name of the Hub
    revision: str | None  # revision of the base on the Hub
    rank: int
    alpha: float
    alphas: Mapping[str, float]  # by the end of a layer's name
    has_ranks: bool  # layers may have other ranks
    is_stabilised: bool  # alpha is divided by the root of the rank

    def compute_scale(self, layer: str, rank: int) -> float:
        """Return the factor of B A in a layer."""
        alpha = self._find_alpha(layer)
        if self.is_stabilised:
            return alpha / math.sqrt(rank)
        return alpha / rank

    def _find_alpha(self, layer: str) -> float:
        for ending, alpha in self.alphas.items():
            if layer == ending or layer.endswith(f".{ending}"):
                return alpha
        return self.alpha


class Merged(NamedTuple):
    """The arrays of a base with an adapter."""

    file: ArrayFile
    note: str
    # Arrays of the base that the adapter has as a whole, such as a classifier's.
    replaced: frozenset[str]


def is_adapter(path: pathlib.Path) -> bool:
    """Return True for a folder with an adapter, and for the file of one."""
    if path.is_dir():
        return (path / CONFIG).is_file()
    return path.name == WEIGHTS and path.with_name(CONFIG).is_file()


# Configuration.


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
            f"{path}: base_model_name_or_path={quote(str(base))}: must name the base. "
            "Set it to its folder."
        )

    problem = _find_problem(config)
    if problem:
        arguments = shlex.join([base, str(folder), "merged"])
        raise ValueError(
            f"{path}: {problem}, which is not read for a PEFT adapter (of {base}). "
            f'Merge it with peft, and give the folder merged: python -c "{_MERGE}" {arguments}'
        )

    revision = config.get("revision")
    has_revision = isinstance(revision, str) and revision != ""
    return Adapter(
        folder,
        base,
        revision=revision if has_revision else None,
        rank=config.get("r", _DEFAULTS["r"]),
        alpha=config.get("lora_alpha", _DEFAULTS["lora_alpha"]),
        alphas=config.get("alpha_pattern") or {},
        has_ranks=bool(config.get("rank_pattern")),
        is_stabilised=config.get("use_rslora") is True,
    )


def _find_problem(config: Mapping[str, object]) -> str:
    """Return the field of a configuration that is not covered, with its value; "" without any."""
    for field, is_covered in _COVERED_VALUES.items():
        value = config.get(field, _DEFAULTS.get(field))
        if not is_covered(value):
            return f"{field}={quote(str(value))}"

    known_fields = _KNOWN_FIELDS.split()
    for field, value in config.items():
        if field in known_fields or not value or value == "none":
            continue
        name = quote(field)[1:-1]
        return f"{name}={quote(str(value))}"
    return ""


def _is_lora(value: object) -> bool:
    return value == "LORA"


def _is_no_bias(value: object) -> bool:
    return value in (None, "none")


def _keeps_base(value: object) -> bool:
    return value in _INITIALISATIONS


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: object) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int


def _are_plain_alphas(alphas: object) -> bool:
    """Return True for numbers by the ends of layers' names.

    Regular expressions, which peft allows there too, could take forever.
    """
    if not alphas:
        return True
    if not isinstance(alphas, dict):
        return False
    for ending, alpha in alphas.items():
        is_plain = re.fullmatch(r"[\w.]+", ending) is not None
        if not is_plain or type(alpha) not in (int, float):
            return False
    return True


_COVERED_VALUES: Mapping[str, Callable[[object], bool]] = {
    "peft_type": _is_lora,
    "bias": _is_no_bias,
    "init_lora_weights": _keeps_base,
    "r": _is_rank,
    "lora_alpha": _is_alpha,
    "alpha_pattern": _are_plain_alphas,
}
"""Field of the configuration → test of the values that are read."""


def find_base(adapter: Adapter, *, is_local: bool) -> str:
    """Return the base as a source of weights.

    A local adapter names a folder, as peft writes it, or a name of the Hub; a downloaded one only
    the latter.

    Raises:
      ValueError: the base is neither.
    """
    base = adapter.base
    if is_local and (base.startswith(("gs://", "hf://")) or pathlib.Path(base).exists()):
        return base
    if not _HUB_NAME.fullmatch(base):
        raise ValueError(
            f"{adapter.folder} is a PEFT adapter of {base}, which is neither a name of the Hub "
            f"nor a folder of this machine. Set base_model_name_or_path in {CONFIG} of a local "
            "copy to the folder of the base."
        )
    if adapter.revision:
        return f"hf://{base}@{adapter.revision}"
    return f"hf://{base}"


# Arrays.


class _Update(NamedTuple):
    """A change of one kernel: W + scale * B A."""

    thin: str  # name of A, (rank, ...), in the adapter
    wide: str  # name of B, (..., rank), in the adapter
    scale: float

    def apply(self, kernel: np.ndarray, factors: ArrayFile) -> np.ndarray:
        """Return the changed kernel in float32."""
        thin = factors.read_array(self.thin).astype(np.float32)
        wide = factors.read_array(self.wide).astype(np.float32)
        product = wide.reshape(len(wide), -1) @ thin.reshape(len(thin), -1)
        change = np.float32(self.scale) * product.reshape(kernel.shape)
        return kernel.astype(np.float32) + change


def merge_adapter(adapter: Adapter, base: ArrayFile, factors: ArrayFile) -> Merged:
    """Return the arrays of a base, merged with an open file of an adapter when they are read.

    Raises:
      ValueError: layers that the base does not have, factors without their pair, or of other
        shapes.
    """
    pairs, whole = _sort_arrays(factors.arrays)
    kernels = [f"{layer}.weight" for layer in pairs]
    places = find_places([*kernels, *whole], base.arrays)

    arrays = dict(base.arrays)
    updates: dict[str, _Update] = {}
    for layer, pair in pairs.items():
        place = places.get(f"{layer}.weight")
        if place is None:
            raise ValueError(
                f"its layer {quote(layer)} has no array in the base {base.path}. "
                "Give the right base."
            )
        shape = base.arrays[place].shape
        rank = _check_pair(adapter, layer, pair, factors.arrays, shape)
        scale = adapter.compute_scale(layer, rank)
        updates[place] = _Update(pair["A"], pair["B"], scale)
        arrays[place] = StoredArray(shape, np.dtype(np.float32))

    replaced: dict[str, str] = {}
    for short_name, name in whole.items():
        place = places.get(short_name, short_name)
        replaced[place] = name
        arrays[place] = factors.arrays[name]

    def read(name: str) -> np.ndarray:
        if name in replaced:
            return factors.read_array(replaced[name])
        array = base.read_array(name)
        if name in updates:
            return updates[name].apply(array, factors)
        return array

    note = (
        f"The LoRA factors of {len(updates)} layers in {adapter.folder} are merged into the base "
        f"{base.path}"
    )
    if replaced:
        note += f", and {len(replaced)} arrays replaced"
    return Merged(ArrayFile(base.path, arrays, {}, read), f"{note}.", frozenset(replaced))


def _sort_arrays(arrays: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the two factors of each layer, and other arrays by their name in the network.

    Raises:
      ValueError: the arrays are of another method.
    """
    pairs: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for name in arrays:
        short_name = name.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(short_name)
        if short_name == name or (match is None and "lora_" in short_name):
            raise ValueError(
                f"its array {quote(name)} is of no part of LoRA that is read. "
                "Merge the adapter with peft."
            )
        if match is None:
            whole[short_name] = name
        else:
            pair = pairs.setdefault(match["layer"], {})
            pair[match["factor"]] = name
    return pairs, whole


def find_places(names: Iterable[str], in_base: Iterable[str]) -> dict[str, str]:
    """Return names of an adapter → names in the base, for those it has.

    The adapter can have another generation of Hugging Face's names.
    """
    base_names = set(in_base)
    found: dict[str, str] = {}
    others = []
    for name in names:
        short_name = name.removeprefix(_WRAPPER)
        if short_name in base_names:
            found[name] = short_name
        elif name in base_names:
            found[name] = name
        else:
            others.append(name)
    if not others:
        return found
    return {**huggingface.find_names(others, base_names), **found}


def _check_pair(
    adapter: Adapter,
    layer: str,
    pair: Mapping[str, str],
    arrays: Mapping[str, StoredArray],
    shape: tuple[int, ...],
) -> int:
    """Return the rank of a layer; raise ValueError unless its factors fit the kernel's shape."""
    if len(pair) < 2:
        raise ValueError(
            f"its layer {quote(layer)} has one factor of two. Fetch the adapter again."
        )
    thin = arrays[pair["A"]].shape
    wide = arrays[pair["B"]].shape
    if not _are_factors(thin, wide, shape):
        raise ValueError(
            f"the factors of its layer {quote(layer)} have the shapes {thin} and {wide}, and the "
            f"base {shape}. Give the right base."
        )
    rank = thin[0]
    if rank != adapter.rank and not adapter.has_ranks:
        raise ValueError(
            f"its layer {quote(layer)} has the rank {rank}, and {CONFIG} r={adapter.rank}."
        )
    return rank


def _are_factors(thin: tuple[int, ...], wide: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True if A (rank, in, ...) and B (out, rank, 1, ...) are factors of (out, in, ...)."""
    if len(thin) < 2 or len(wide) != len(thin):
        return False
    rank = thin[0]
    ones = (1,) * (len(thin) - 2)
    if rank == 0 or wide[1:] != (rank, *ones):
        return False
    return (wide[0], *thin[1:]) == shape
