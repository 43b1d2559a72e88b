"""Sources that a user's code returns, checked when they are opened."""

import contextlib
from typing import cast

import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.bands import choose_bands, name_wrong_bands
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.records import Source, check_labels, few

_MEMBERS = (
    "class_names",
    "num_classes",
    "labels",
    "label_shape",
    "__len__",
    "__getitem__",
    "name_of",
    "key_of",
)


def open_custom_source(
    opener: object,
    data: str,
    split: str,
    config: InputConfig,
    seed: int,
) -> Source:
    """Call a user's opener with (split, config, seed) and check the source that it returns.

    Raises:
      ValueError: the object is no function, or the source has no valid members, class names or
        labels.
    """
    if not callable(opener):
        kind = type(opener).__name__
        raise ValueError(
            f"config.data={data!r} is {kind}; give a function of (split, config, seed).",
        )
    source = opener(split, config, seed)
    try:
        _require_source(source, config)
    except ValueError as error:
        raise ValueError(f"config.data={data!r}, split {split!r}: {error}") from error
    return cast(Source, source)


def _require_source(source: Source, config: InputConfig) -> None:
    """Raise ValueError unless an object has the members of a source, and labels of its classes."""
    missing = [name for name in _MEMBERS if not hasattr(source, name)]
    if missing:
        kind = type(source).__name__
        raise ValueError(f"{kind} has no {few(missing)}; return a vit_jax.data.records.Source.")
    _require_class_names(source)
    _require_label_array(source)
    check_labels(source)
    # Unreadable images are counted while training.
    with contextlib.suppress(UnreadableImage), name_wrong_bands(source.name_of, 0):
        decode(source[0].image, bands=choose_bands(config))


def _require_class_names(source: Source) -> None:
    names = source.class_names
    if isinstance(names, tuple):
        are_different = len(set(names)) == len(names)
        if len(names) >= 2 and are_different and len(names) == source.num_classes:
            return
    raise ValueError(f"class_names is {names!r}; give a tuple of at least two different names.")


def _require_label_array(source: Source) -> None:
    labels = source.labels
    shape = (len(source), *source.label_shape)
    if isinstance(labels, np.ndarray):
        given = f"{labels.dtype} {labels.shape}"
        is_integer = np.issubdtype(labels.dtype, np.integer)
        if len(source) and labels.shape == shape and is_integer:
            return
    else:
        given = type(labels).__name__
    each = "record"
    if source.is_multilabel:
        each = "record and class"
    sizes = " x ".join(map(str, shape))
    raise ValueError(
        f"labels are {given} of {len(source)} records; give an array of {sizes} integers, "
        f"one for each {each}, of at least one record.",
    )
