"""What stands in `config.json` and `preprocessor_config.json` beside weights from timm or Hugging Face.

Both files come from elsewhere: a value of an unexpected type is passed over as if it were not there.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

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
      fields: of the architecture.
      class_names: in the order of the logits.
      preprocessing: as our checkpoints have it.
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
    size = _pair(_of(processor, "size", dict, int) or config.get("image_size"))
    epsilon, heads = _of(config, "layer_norm_eps", float, int), _of(config, "num_attention_heads", int)
    fields = {
        "image_size": _pair(config.get("image_size")),
        "num_heads": heads,
        "layer_norm_epsilon": None if epsilon is None else float(epsilon),
        "gelu": _gelu(_of(config, "hidden_act", str)),
    }
    preprocessing = {"image_size": list(size), "resize": "direct", "crop_fraction": 1.0} if size else None
    notes = _range_notes(processor, "image_mean", "image_std")
    return Sidecar(_known(fields), _names(config.get("id2label")), _with_range(preprocessing), notes)


def _from_timm(config: Mapping[str, Any]) -> Sidecar:
    pretrained = _of(config, "pretrained_cfg", dict) or config
    arguments = _of(config, "model_args", dict) or {}
    input_size = _of(pretrained, "input_size", list)
    size = _pair(arguments.get("img_size")) or _pair(input_size[-2:] if input_size else None)
    fields = {
        "image_size": size,
        "num_heads": _of(arguments, "num_heads", int),
        "gelu": _gelu(_of(arguments, "act_layer", str)),
        "pool": _POOLS.get(str(config.get("global_pool"))),
    }
    crop = _of(pretrained, "crop_pct", float, int)
    is_direct = pretrained.get("crop_mode") == "squash"
    preprocessing = (
        {"image_size": list(size), "resize": "direct" if is_direct else "short_side", "crop_fraction": float(crop)}
        if size and crop
        else None
    )
    names = config.get("label_names", pretrained.get("label_names"))
    notes = _range_notes(pretrained, "mean", "std")
    if "siglip" in str(config.get("architecture")) and fields["gelu"] is None:
        notes += (_SIGLIP_NOTE,)
    return Sidecar(_known(fields), _names(names), _with_range(preprocessing), notes)


def _gelu(activation: str | None) -> str | None:
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"{CONFIG} names the activation {activation!r}; our networks have GELU only, "
            f"known as {', '.join(_ACTIVATIONS)}."
        )
    return None if activation is None else _ACTIVATIONS[activation]


def _range_notes(values: Mapping[str, Any], mean: str, std: str) -> tuple[str, ...]:
    """Our networks take [-1, 1], which is a mean and a deviation of one half."""
    found = {name: values.get(name) for name in (mean, std) if values.get(name) is not None}
    if all(isinstance(value, list) and all(part == 0.5 for part in value) for value in found.values()):
        return ()
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    return (
        f"WARNING: these weights were trained on pixels normalised by {text}; our networks take [-1, 1] "
        "(0.5 and 0.5), so accuracy suffers until they are fine-tuned.",
    )


def _with_range(preprocessing: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if preprocessing is None else {**preprocessing, "pixel_range": [-1.0, 1.0]}


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _of(values: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = values.get(name)
    return value if isinstance(value, kinds) and not isinstance(value, bool) else None


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if isinstance(size, int):
        size = [size, size]
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(pixels) is int for pixels in size)
    return (size[0], size[1]) if is_pair else None


def _names(labels: Any) -> tuple[str, ...] | None:
    """Names in the order of their numbers; None where they are only made up."""
    if isinstance(labels, dict) and all(key.isdecimal() for key in labels):
        labels = [labels[key] for key in sorted(labels, key=int)]
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        return None
    is_made_up = labels == [f"LABEL_{number}" for number in range(len(labels))]
    return None if is_made_up else tuple(labels)
