"""What passes between the parts of a run, with shapes, dtypes and ranges said once.

Legend: B global batch, H W image height and width in pixels, C = 3 colour channels (RGB), K classes,
N tokens without the class token, D model width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples as they arrive on the device.

    Attributes:
      image_BHWC: uint8, 0 to 255, RGB.
      label_B: int32, 0 to K - 1.
      mask_B: float32, 1 for an example that counts, 0 for padding or an image that could not be read.
    """

    image_BHWC: Any
    label_B: Any
    mask_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """What an objective compares the model's output with.

    Attributes:
      label_BK: float32 class probabilities; one-hot unless mixed.
      mask_B: float32, as in `Batch`.
    """

    label_BK: Any
    mask_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """Everything a model computes that somebody may want; jit drops what nobody uses.

    Attributes:
      logits_BK: float32.
      features_BD: input of the last linear layer (after the hidden layer of the head, if there is one).
      pooled_BD: the image's representation: class token, average or attention pooling after the final norm.
      tokens_BND: patch tokens after the final norm.
    """

    logits_BK: jax.Array
    features_BD: jax.Array
    pooled_BD: jax.Array
    tokens_BND: jax.Array


def normalise(image_BHWC: jax.Array, dtype: str) -> jax.Array:
    """uint8 pixels to [-1, 1], what every network takes: (x - 127.5) / 127.5, in `dtype`."""
    return ((image_BHWC.astype(jnp.float32) - 127.5) / 127.5).astype(dtype)


def abstract_batch(global_batch: int, image_size: tuple[int, int], sharding: Any = None) -> Batch:
    """The shapes and dtypes of a `Batch`, for tracing without data."""

    def leaf(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(
        image_BHWC=leaf((global_batch, *image_size, 3), jnp.uint8),
        label_B=leaf((global_batch,), jnp.int32),
        mask_B=leaf((global_batch,), jnp.float32),
    )
