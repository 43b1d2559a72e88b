"""Conversion of big_vision's preprocessing, "decode|inception_crop(224)|flip_lr", into fields of `input`.

Each operation is a function with the arguments of big_vision and their defaults. It returns our
fields, or raises ValueError for arguments without a counterpart.
"""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.text.nearest import did_you_mean

Fields = dict[str, Any]
Size = int | tuple[int, int]

_LABELS = ("label", "labels")
"""Names of the usual labels of TFDS."""


def convert_train_images(text: str) -> Fields:
    """Return the fields of `input` for a preprocessing of training images.

    Raises:
      ValueError: an operation, an argument or an order without a counterpart.
    """
    fields = _apply_ops(text, _TRAIN_OPS) if text else {}
    flip = fields.pop("flip", False)
    if "image_size" not in fields and fields.get("train_crop") == "resize":
        size = fields.pop("train_resize_pixels")
        fields |= {"train_crop": "none", "image_size": size}
    if "image_size" not in fields:
        raise ValueError("needs a size: inception_crop(SIZE), random_crop(SIZE) or resize(SIZE)")
    return {**fields, "flip": flip}


def convert_test_images(text: str) -> Fields:
    """Return the fields of `input` for a preprocessing of test images.

    Raises:
      ValueError: an operation, an argument or an order without a counterpart.
    """
    fields = _apply_ops(text, _TEST_OPS) if text else {}
    resized = fields.pop("resized", None)
    cropped = fields.pop("cropped", resized)
    is_direct = fields.get("test_resize") == "direct"
    if resized is None or (is_direct and cropped != resized):
        raise ValueError("must be resize(SIZE), or resize_small(SIZE)|central_crop(SIZE)")
    if is_direct:
        return {**fields, "image_size": cropped}
    if not isinstance(cropped, int) or cropped > resized:
        raise ValueError("central_crop must be square, and smaller than resize_small")
    return {**fields, "image_size": cropped, "test_crop_fraction": cropped / resized}


def require_few_shot_images(text: str, image_size: object) -> None:
    """Raise ValueError unless a preprocessing is that of the released few-shot protocol.

    It resizes both sides to 8/7 of the image size, 256 for 224, and crops the middle.
    """
    fields = _apply_ops(text, _TEST_OPS) if text else {}
    cropped = fields.get("cropped")
    is_proportional = isinstance(cropped, int) and fields.get("resized") == cropped * 256 // 224
    if fields.get("test_resize") != "direct" or not is_proportional or cropped != image_size:
        raise ValueError(
            "must be resize(SIZE * 8 / 7)|central_crop(SIZE) with the image size of the test split"
        )


def _apply_ops(text: str, ops: Mapping[str, Callable[..., Fields]]) -> Fields:
    """Return the fields of all operations of a text, which must be in the order of `ops`."""
    fields: Fields = {}
    order = list(ops)
    latest = 0
    for word in filter(None, map(str.strip, text.split("|"))):
        name, arguments, options = _parse_op(word)
        if name not in ops:
            hint = _FIXES.get(name) or did_you_mean(name, ops).strip() or "remove it"
            raise ValueError(f"{name} has no counterpart ({hint})")
        position = order.index(name)
        if position < latest and name not in _ANY_PLACE:
            raise ValueError(f"{name} must come before {order[latest]}")
        if name not in _ANY_PLACE:
            latest = position
        try:
            fields |= ops[name](*arguments, **options)
        except TypeError as error:
            raise ValueError(f"{word}: {str(error).partition('() ')[2]}") from None
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
    return fields


def _parse_op(word: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the positional and the named arguments of "resize(256, method='area')"."""
    try:
        call = ast.parse(word, mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        options = {}
        for keyword in call.keywords:
            options[keyword.arg or ""] = ast.literal_eval(keyword.value)
        return call.func.id, list(map(ast.literal_eval, call.args)), options
    except (SyntaxError, ValueError):
        raise ValueError(f"{word!r} is no operation, such as resize(256)") from None


# Operations of both.


def decode(channels: int = 3, precise: bool = False) -> Fields:
    """Decoding to three channels, as here."""
    if channels != 3:
        raise ValueError("channels must be 3")
    return {}


def value_range(
    vmin: float = -1,
    vmax: float = 1,
    in_min: float = 0,
    in_max: float = 255.0,
    clip_values: bool = False,
) -> Fields:
    """The values that networks take."""
    if (vmin, vmax, in_min, in_max) != (-1, 1, 0, 255):
        raise ValueError("networks take values in [-1, 1]: use value_range(-1, 1)")
    return {}


def onehot(depth: int, key: str = "labels", key_result: str | None = None, **_: Any) -> Fields:
    """Labels as numbers, as here."""
    if key not in _LABELS:
        raise ValueError(f"labels are those of the data: use key='label' instead of {key!r}")
    return {}


def keep(*_: str) -> Fields:
    """A choice of features, which is fixed here."""
    return {}


def _find_filter(method: str, usual: str, antialias: bool) -> str | None:
    """Return our antialiased filter, None for sampling as TensorFlow does."""
    if antialias and method in ("bilinear", "bicubic"):
        return method
    if antialias or method != usual:
        raise ValueError(f"method must be {usual}, or bilinear or bicubic with antialias=True")
    return None


# Operations of training images.


def inception_crop(
    size: Size | None = None,
    area_min: float = 5,
    area_max: float = 100,
    method: str = "bilinear",
    antialias: bool = False,
) -> Fields:
    """A random area, resized."""
    if size is None:
        raise ValueError("needs a size")
    return {
        "train_crop": "inception",
        "image_size": size,
        "crop_area_fraction": (area_min / 100, area_max / 100),
        "train_interpolation": _find_filter(method, "bilinear", antialias),
    }


def inception_crop_of_jpeg(
    size: Size | None = None,
    area_min: float = 5,
    area_max: float = 100,
    ratio_min: float = 0.75,
    ratio_max: float = 1.33,
    method: str = "bilinear",
    antialias: bool = False,
) -> Fields:
    """A random area of a JPEG, resized."""
    if (ratio_min, ratio_max) != (0.75, 1.33):
        raise ValueError("ratios must be 0.75 and 1.33")
    return inception_crop(size, area_min, area_max, method, antialias)


def resize_for_crop(size: Size, method: str = "bilinear", antialias: bool = False) -> Fields:
    """Both sides resized, before `random_crop`."""
    interpolation = _find_filter(method, "bilinear", antialias)
    return {
        "train_crop": "resize",
        "train_resize_pixels": size,
        "train_interpolation": interpolation,
    }


def resize_small_for_crop(
    smaller_size: int, method: str = "area", antialias: bool = False
) -> Fields:
    """The short side resized, before `random_crop`."""
    interpolation = _find_filter(method, "area", antialias)
    return {
        "train_crop": "resize_short_side",
        "train_resize_pixels": smaller_size,
        "train_interpolation": interpolation,
    }


def random_crop(crop_size: Size) -> Fields:
    """A random square or rectangle of this size."""
    return {"image_size": crop_size}


def flip_lr() -> Fields:
    """Half of the images flipped."""
    return {"flip": True}


def randaug(num_layers: int = 2, magnitude: int = 10) -> Fields:
    """RandAugment."""
    return {"randaugment_layers": num_layers, "randaugment_magnitude": magnitude}


# Operations of test images.


def resize_test(size: Size, method: str = "bilinear", antialias: bool = False) -> Fields:
    """Both sides resized."""
    interpolation = _find_filter(method, "bilinear", antialias)
    return {"test_resize": "direct", "resized": size, "test_interpolation": interpolation}


def resize_small_test(smaller_size: int, method: str = "area", antialias: bool = False) -> Fields:
    """The short side resized, before `central_crop`."""
    interpolation = _find_filter(method, "area", antialias)
    return {
        "test_resize": "short_side",
        "resized": smaller_size,
        "test_interpolation": interpolation,
    }


def central_crop(crop_size: Size) -> Fields:
    """The middle of the image."""
    return {"cropped": crop_size}


_TRAIN_OPS: Mapping[str, Callable[..., Fields]] = {
    "decode": decode,
    "decode_jpeg_and_inception_crop": inception_crop_of_jpeg,
    "inception_crop": inception_crop,
    "resize": resize_for_crop,
    "resize_small": resize_small_for_crop,
    "random_crop": random_crop,
    "flip_lr": flip_lr,
    "randaug": randaug,
    "value_range": value_range,
    "onehot": onehot,
    "keep": keep,
}
"""Operations in the order in which they are applied here."""
_TEST_OPS: Mapping[str, Callable[..., Fields]] = {
    "decode": decode,
    "resize": resize_test,
    "resize_small": resize_small_test,
    "central_crop": central_crop,
    "value_range": value_range,
    "onehot": onehot,
    "keep": keep,
}
_ANY_PLACE = ("value_range", "onehot", "keep")
"""Operations that do not change the image, whose place is free."""
_FIXES = {
    "vgg_value_range": "use value_range(-1, 1)",
    "clip_value_range": "use value_range(-1, 1)",
    "autoaugment": "use randaug, or --config.input.three_augment=True",
    "random_erasing": "use --config.input.erasing_fraction",
    "colorjitter": "use --config.input.color_jitter",
    "copy": "labels are those of the data: remove it",
}
"""Substitutes for operations without a counterpart."""
