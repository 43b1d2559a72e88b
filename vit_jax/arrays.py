"""Values that pass between the folders of vit_jax, with shapes, dtypes and ranges.

Legend: B global batch, H W image height and width in pixels, C channels (RGB, or bands), K
classes, N patch tokens, P class tokens and registers, D model width; L blocks, S = P + N tokens, T
heads, Q queries (= S).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

P = ParamSpec("P")
R = TypeVar("R")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples as they arrive on the device.

    Attributes:
      image_BHWC: uint8, 0 to 255, RGB; or float32, bands that the data layer has normalised.
      label_B: int32, 0 to K - 1; where an image may have several labels (B, K), 0 or 1 for each
        class.
      mask_B: float32, 1 for an example that counts, 0 for padding or an image that could not be
        read.
    """

    image_BHWC: Any
    label_B: Any
    mask_B: Any

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have several labels."""
        return self.label_B.ndim == 2  # type: ignore[no-any-return]

    def label_BK(self, num_classes: int) -> jax.Array:
        """Return the labels as float32, 1 where an image has one."""
        if self.is_multilabel:
            return self.label_B.astype(jnp.float32)  # type: ignore[no-any-return]
        return jax.nn.one_hot(self.label_B, num_classes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corruption:
    """Input of a network in the place of some patches (ViT, sec. 4.6).

    Attributes:
      is_masked_BN: bool, patches replaced by the learned [mask] embedding.
      source_BN: int32, for every other patch the patch of the same image whose embedding stands
        there; mostly itself.
    """

    is_masked_BN: jax.Array
    source_BN: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """Targets that an objective compares with the model's output.

    The objective prepares them (`Objective.prepare`). The training step adds the logits of a
    teacher; an evaluation replaces smoothed labels by the labels themselves.

    Attributes:
      label_BK: float32 class probabilities; one-hot unless mixed or several. None where patches are
        predicted.
      mask_B: see `Batch`.
      corruption: corruption of the input; None for unchanged images.
      patch_BNT: T targets for each patch: int32 classes, or float32 numbers.
      is_corrupted_BN: bool, the patches whose targets count.
      is_multilabel: classes are independent.
      teacher_BK: float32 logits of a teacher; None without one.
    """

    label_BK: Any
    mask_B: jax.Array
    corruption: Corruption | None = None
    patch_BNT: Any = None
    is_corrupted_BN: Any = None
    is_multilabel: bool = dataclasses.field(default=False, metadata={"static": True})
    teacher_BK: Any = None


ABSENT: Any = None
"""Value of an output that a network does not have.

Outputs have the types of arrays nevertheless, because a caller knows which ones its network has.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """Outputs of a model; those without a value are None, and jit removes those that are not used.

    Attributes:
      logits_BK: float32; training needs them, or `patches_BNO`.
      patches_BNO: float32 predictions of patches, `Architecture.patch_outputs` for each.
      features_BD: input of the last linear layer.
      pooled_BD: class token, mean or attention pooling after the final norm.
      tokens_BND: patch tokens after the final norm.
      prefix_BPD: class tokens, then registers, after the final norm; P may be 0.
      blocks_LBSD: the intermediate "blocks": output of every block before the final norm, in the
        compute dtype.
      attention_LBTQS: the intermediate "attention": float32 weights of token S for query Q in head
        T, which sum to 1 over S. Axial blocks have 2 L, along rows and along columns in turn, 0
        outside of these.
      stages_BHWC: the intermediate "stages": the map after each stage of a ResNet.
      token_logits_TBK: the intermediate "token_logits": float32 logits of the class token and of the
        distillation token (DeiT), whose mean is `logits_BK`.
    """

    logits_BK: jax.Array = ABSENT
    features_BD: jax.Array = ABSENT
    pooled_BD: jax.Array = ABSENT
    tokens_BND: jax.Array = ABSENT
    prefix_BPD: jax.Array = ABSENT
    blocks_LBSD: jax.Array = ABSENT
    attention_LBTQS: jax.Array = ABSENT
    stages_BHWC: tuple[jax.Array, ...] = ABSENT
    patches_BNO: jax.Array = ABSENT
    token_logits_TBK: jax.Array = ABSENT

    if TYPE_CHECKING:

        def __init__(self, **outputs: Any) -> None:
            """Take outputs by name; each may be absent."""


class StepResults(NamedTuple):
    """Results of an evaluation step on a batch, or on the host those of its images that count.

    Attributes:
      sums: sums over the images that count, such as "loss" and "weight" (`objectives.sums`).
      rows: arrays with a row for each image, such as "loss_B" and "class_BT", among them "mask_B",
        which is 0 for images that do not count. Empty if no metric needs rows.
    """

    sums: dict[str, Any]
    rows: dict[str, Any]


def validate_intermediates(intermediates: Collection[str], allowed: Sequence[str]) -> None:
    """Raise ValueError for an intermediate that this network does not have."""
    is_allowed = not isinstance(intermediates, str) and set(intermediates) <= set(allowed)
    if not is_allowed:
        names = ", ".join(allowed)
        raise ValueError(
            f"intermediates={intermediates!r}: give a tuple of names that this network has: "
            f"{names}."
        )


def accept_earlier_name(call: Callable[P, R]) -> Callable[P, R]:
    """Let users write `taps=`, the name of the argument `intermediates=` up to version 0.3.0."""

    @functools.wraps(call)
    def call_with_present_name(*arguments: P.args, **options: P.kwargs) -> R:
        earlier = "taps"
        if earlier in options:
            if "intermediates" in options:
                raise TypeError(
                    f"intermediates= is given twice, also by its earlier name. Remove {earlier}=."
                )
            options["intermediates"] = options.pop(earlier)
        return call(*arguments, **options)

    return call_with_present_name


def normalise(image_BHWC: jax.Array, dtype: str) -> jax.Array:
    """Return uint8 pixels in [-1, 1], the range of every network: (x - 127.5) / 127.5.

    Other images are normalised already.
    """
    if image_BHWC.dtype != jnp.uint8:
        return image_BHWC.astype(dtype)
    pixels_BHWC = image_BHWC.astype(jnp.float32)
    scaled_BHWC = (pixels_BHWC - 127.5) / 127.5
    return scaled_BHWC.astype(dtype)


def abstract_batch(
    global_batch: int,
    image_shape: tuple[int, int, int],
    sharding: jax.sharding.Sharding | None = None,
    label_shape: tuple[int, ...] = (),
    image_dtype: DTypeLike = jnp.uint8,
) -> Batch:
    """Return the shapes and dtypes of a `Batch`, for tracing without data.

    `image_shape` (H, W, C) and `label_shape` are the shapes of one image and of its label.
    """

    def describe(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(
        image_BHWC=describe((global_batch, *image_shape), image_dtype),
        label_B=describe((global_batch, *label_shape), jnp.int32),
        mask_B=describe((global_batch,), jnp.float32),
    )
