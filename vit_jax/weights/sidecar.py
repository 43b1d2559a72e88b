"""What stands in `config.json` and `preprocessor_config.json` beside weights from timm or Hugging Face.

Both files come from elsewhere: a value of an unexpected type is passed over as if it were not there.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_jax.weights.preprocessing import of_huggingface, of_timm, pair, typed

CONFIG, PREPROCESSOR, WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
MAX_BYTES = 16 * 2**20
_ACTIVATIONS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
_SIGLIP_NOTE = (
    "timm builds some SigLIP models with the tanh GELU and does not write it down; the exact form is taken. Where "
    "timm's model has act_layer='gelu_tanh', give gelu=tanh."
)
_POOLS = {"token": "token", "avg": "gap", "map": "map"}


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """Facts beside a file of weights.

    Attributes:
      fields: of the architecture, and those that the file decides, to compare.
      class_names: in the order of the logits.
      preprocessing: as our checkpoints have it; without pixel_range where that is another.
      notes: sentences for the report.
    """

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    preprocessing: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def read_sidecar(folder: pathlib.Path) -> Sidecar:
    """Reads what is there; an empty `Sidecar` where nothing is.

    Raises:
      ValueError: a file is no JSON object, or names an activation that our networks do not have.
    """
    config = _read(folder / CONFIG)
    if not config:
        return Sidecar()
    is_timm = "pretrained_cfg" in config or "architecture" in config
    return _from_timm(config) if is_timm else _from_huggingface(config, _read(folder / PREPROCESSOR))


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object but {type(value).__name__}.")
    return value


def _from_huggingface(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Sidecar:
    labels = config.get("id2label")
    fields = {
        "image_size": pair(config.get("image_size")),
        "patch_size": pair(config.get("patch_size")),
        "num_classes": len(labels) if isinstance(labels, dict) else None,
        "width": typed(config, "hidden_size", int),
        "depth": typed(config, "num_hidden_layers", int),
        "mlp_dim": typed(config, "intermediate_size", int),
        "num_heads": typed(config, "num_attention_heads", int),
        "layer_norm_epsilon": typed(config, "layer_norm_eps", float, int),
        "gelu": _gelu(typed(config, "hidden_act", str)),
    }
    preprocessing, notes = of_huggingface(config, processor)
    return Sidecar(_known(fields), _names(labels), preprocessing, notes)


def _from_timm(config: Mapping[str, Any]) -> Sidecar:
    pretrained = typed(config, "pretrained_cfg", dict) or config
    arguments = typed(config, "model_args", dict) or {}
    input_size = typed(pretrained, "input_size", list)
    size = pair(arguments.get("img_size")) or pair(input_size[-2:] if input_size else None)
    width = typed(arguments, "embed_dim", int)
    fields = {
        "image_size": size,
        "patch_size": pair(arguments.get("patch_size")),
        "num_classes": typed(config, "num_classes", int),
        "width": width,
        "depth": typed(arguments, "depth", int),
        "mlp_dim": _product(width, typed(arguments, "mlp_ratio", float, int)),
        "num_heads": typed(arguments, "num_heads", int),
        "gelu": _gelu(typed(arguments, "act_layer", str)),
        "pool": _POOLS.get(str(config.get("global_pool"))),
    }
    preprocessing, notes = of_timm(pretrained, size)
    if "siglip" in str(config.get("architecture")) and fields["gelu"] is None:
        notes += (_SIGLIP_NOTE,)
    return Sidecar(
        _known(fields), _names(config.get("label_names", pretrained.get("label_names"))), preprocessing, notes
    )


def _product(width: int | None, ratio: float | None) -> int | None:
    """The whole part, as timm takes it; a ratio is written with rounding errors."""
    try:
        return None if width is None or ratio is None else int(width * ratio + 1e-6)
    except (OverflowError, ValueError):  # of numbers that are not finite
        return None


def _gelu(activation: str | None) -> str | None:
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"{CONFIG} names the activation {activation!r}; our networks have GELU only, "
            f"known as {', '.join(_ACTIVATIONS)}."
        )
    return None if activation is None else _ACTIVATIONS[activation]


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _names(labels: Any) -> tuple[str, ...] | None:
    """Names in the order of their numbers; None where they are only made up."""
    if isinstance(labels, dict) and all(key.isdecimal() for key in labels):
        labels = [labels[key] for key in sorted(labels, key=int)]
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        return None
    is_made_up = labels == [f"LABEL_{number}" for number in range(len(labels))]
    return None if is_made_up else tuple(labels)
