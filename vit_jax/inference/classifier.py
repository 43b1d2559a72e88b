"""Weights made ready to use: the network, the preparation of images that belongs to it, and its classes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.arrays import normalise
from vit_jax.config import Architecture
from vit_jax.config.schema import ComputeDtype
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.models import build_model
from vit_jax.weights import Weights


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A network that can be asked.

    Attributes:
      architecture: its numbers; computes in the dtype asked for, without dropout or rematerialisation.
      model: its parameters, on one device or spread over many.
      transform: from stored bytes to the pixels that it was trained on.
      class_names: in the order of the logits; "0", "1", … where the weights do not name them.
      source: where the weights come from.
    """

    architecture: Architecture
    model: nnx.Module
    transform: EvaluationTransform
    class_names: tuple[str, ...]
    source: str


def build_classifier(
    weights: Weights,
    *,
    compute_dtype: str = "float32",
    resize: str | None = None,
    crop_fraction: float | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> Classifier:
    """Builds the network and its preparation of images.

    Args:
      weights: as loaded; must have classes.
      compute_dtype: "float32" or "bfloat16".
      resize: "short_side" or "direct", for weights that do not say how images are prepared.
      crop_fraction: of the short side that the crop keeps, for the same.
      sharding: of every parameter; None for the default device.

    Raises:
      ValueError: an unknown dtype; weights without classes; or nobody says how images are prepared.
    """
    stored = weights.architecture
    if compute_dtype not in get_args(ComputeDtype):
        raise ValueError(f"--compute_dtype={compute_dtype}: choose {' or '.join(get_args(ComputeDtype))}.")
    if stored.num_classes == 0:
        raise ValueError(f"{weights.source} has no classes: its head was left out. Fine-tune it first.")
    architecture = dataclasses.replace(
        stored,
        compute_dtype=cast(ComputeDtype, compute_dtype),
        remat="none",
        dropout_fraction=0.0,
        stochastic_depth_fraction=0.0,
    )
    abstract = jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))

    def place(name: str, leaf: Any) -> jax.Array:
        parameter = weights.parameters[name]
        if sharding is None:
            return jnp.asarray(parameter)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: parameter[index])

    names = weights.class_names or tuple(map(str, range(stored.num_classes)))
    transform = _build_transform(weights, resize, crop_fraction)
    return Classifier(architecture, pytree.map_with_names(place, abstract), transform, names, weights.source)


def probabilities(model: nnx.Module, image_BHWC: jax.Array, compute_dtype: str) -> jax.Array:
    """uint8 images to float32 probabilities_BK: the softmax of the logits."""
    output = model(normalise(image_BHWC, compute_dtype))  # type: ignore[operator]
    return jax.nn.softmax(output.logits_BK)


def _build_transform(weights: Weights, resize: str | None, crop_fraction: float | None) -> EvaluationTransform:
    known = {field: value for field, value in (weights.preprocessing or {}).items() if value is not None}
    for field, value in (("resize", resize), ("crop_fraction", crop_fraction)):
        if value is not None and known.get(field, value) != value:
            raise ValueError(f"--{field}={value}: the weights were trained with {field}={known[field]}; leave it out.")
        if value is not None:
            known[field] = value
    if known.get("resize") == "direct":
        known.setdefault("crop_fraction", 1.0)
    if missing := [field for field in ("resize", "crop_fraction") if field not in known]:
        raise ValueError(
            f"{weights.source} does not say how images are prepared ({', '.join(missing)}): add --resize=direct (both "
            "sides to the network's size) or --resize=short_side --crop_fraction=0.875 (the middle of the image)."
        )
    return EvaluationTransform(weights.architecture.image_size, *_checked(known, weights.source))


def _checked(known: Mapping[str, Any], source: str) -> tuple[Literal["direct", "short_side"], float]:
    """`resize` and `crop_fraction`, which may come from anybody's file."""
    resize, fraction = known["resize"], known["crop_fraction"]
    if resize not in ("direct", "short_side"):
        raise ValueError(f"{source}: resize={resize!r} is unknown; it is direct or short_side.")
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise ValueError(f"{source}: crop_fraction={fraction!r} must be a number above 0, up to 1.")
    if resize == "direct" and fraction != 1:
        raise ValueError(f"{source}: crop_fraction={fraction} has no effect with resize=direct; leave it out.")
    return resize, float(fraction)


def top_classes(probability_BK: np.ndarray, count: int) -> np.ndarray:
    """(B, count) class numbers, the most probable first; of equals the lower number."""
    return np.argsort(-probability_BK, axis=1, kind="stable")[:, :count]
