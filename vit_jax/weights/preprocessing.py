"""How timm and Hugging Face prepare images, in our words: resize directly, or crop the middle; pixels in [-1, 1].

What ours cannot do is left unknown, and told; so is what ours does otherwise.
"""

from collections.abc import Mapping
from typing import Any

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers
_OURS = {"direct": "takes one bilinear sample a pixel", "short_side": "averages over areas"}
_LIKE_OURS = {"direct": (), "short_side": ("bilinear", "box")}  # both average over areas where images shrink
Prepared = tuple[dict[str, Any] | None, tuple[str, ...]]


def of_huggingface(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Prepared:
    """Preprocessing, as our checkpoints have it, and notes; from `config.json` and `preprocessor_config.json`."""
    if not processor:  # the network takes images of some size; how they came to it, nobody says
        return None, ()
    size = typed(processor, "size", dict, int) or config.get("image_size")
    target, edge = pair(size), typed(size, "shortest_edge", int) if isinstance(size, dict) else None
    crop = pair(processor.get("crop_size")) if processor.get("do_center_crop") is True else target
    found = None
    if processor.get("do_resize") is not False and crop:
        if crop == target:
            found = _prepared(crop, "direct", 1.0)
        elif edge and crop[0] == crop[1] and 0 < crop[0] <= edge:
            found = _prepared(crop, "short_side", crop[0] / edge)
    notes = () if found else _unknown(processor, "do_resize", "size", "do_center_crop", "crop_size")
    network = pair(config.get("image_size"))
    if found and network and found["image_size"] != list(network):
        notes = (f"Their images were made {found['image_size']}, but config.json says {list(network)}, which counts.",)
    resample = _RESAMPLING.get(typed(processor, "resample", int), "bilinear")
    return _with_range(found, processor, "image_mean", "image_std", (*notes, *_resampled(resample, found)))


def of_timm(pretrained: Mapping[str, Any], size: tuple[int, int] | None) -> Prepared:
    """Preprocessing, as our checkpoints have it, and notes; from timm's `pretrained_cfg`."""
    crop, mode = typed(pretrained, "crop_pct", float, int), typed(pretrained, "crop_mode", str) or "center"
    found = None
    if size and crop and 0 < crop <= 1:
        if mode == "center":
            found = _prepared(size, "short_side", float(crop))
        elif mode == "squash" and crop == 1:
            found = _prepared(size, "direct", 1.0)
    notes = () if found or not crop else _unknown(pretrained, "crop_pct", "crop_mode")
    notes += _resampled(typed(pretrained, "interpolation", str) or "bilinear", found)
    return _with_range(found, pretrained, "mean", "std", notes)


def typed(values: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A value of one of these types, or None."""
    value = values.get(name)
    return value if isinstance(value, kinds) and not isinstance(value, bool) else None


def pair(size: Any) -> tuple[int, int] | None:
    """Height and width, in whichever of the libraries' ways they are written."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if type(size) is int:
        size = [size, size]
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(pixels) is int for pixels in size)
    return (size[0], size[1]) if is_pair else None


def _prepared(size: tuple[int, int], resize: str, crop_fraction: float) -> dict[str, Any]:
    return {"image_size": list(size), "resize": resize, "crop_fraction": crop_fraction}


def _unknown(values: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    said = ", ".join(f"{name}={values[name]}" for name in names if name in values)
    if not said:
        return ()
    return (
        f"The images of these weights were prepared by {said}, which ours cannot do, so their preprocessing is left "
        "unknown: resize and crop_fraction can be given where they are used.",
    )


def _resampled(how: str, prepared: Mapping[str, Any] | None) -> tuple[str, ...]:
    if prepared is None or how in _LIKE_OURS[prepared["resize"]]:
        return ()
    theirs = f"{how} interpolation" + ("" if how == "nearest" else ", smoothed where it shrinks")
    return (f"Their images were resized with {theirs}; ours {_OURS[prepared['resize']]}, so logits differ a little.",)


def _with_range(
    prepared: dict[str, Any] | None, values: Mapping[str, Any], mean: str, std: str, notes: tuple[str, ...]
) -> Prepared:
    """With pixels in [-1, 1], which our networks take: a mean and a deviation of one half; or a warning."""
    odd = {name: False for name in ("do_rescale", "do_normalize") if values.get(name) is False}
    factor = typed(values, "rescale_factor", float, int)
    if factor is not None and not abs(factor * 255 - 1) < 1e-3:
        odd["rescale_factor"] = factor
    found = {name: values[name] for name in (mean, std) if values.get(name) is not None and "do_normalize" not in odd}
    if not all(isinstance(value, list) and all(part == 0.5 for part in value) for value in found.values()):
        odd |= found
    if not odd:
        return prepared and {**prepared, "pixel_range": [-1.0, 1.0]}, notes
    text = ", ".join(f"{name}={value}" for name, value in odd.items())
    warning = (
        f"WARNING: these weights were trained on pixels prepared with {text}; our networks take [-1, 1] "
        "(0.5 and 0.5), so accuracy suffers until they are fine-tuned."
    )
    return prepared, (warning, *notes)
