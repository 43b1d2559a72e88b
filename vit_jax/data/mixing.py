"""Mixup and CutMix on the device, inside the jitted train step.

Every example is mixed with the one before it in the global batch, the first one with the last, so
that devices exchange one example each:

    image = weight * image + (1 - weight) * previous image
    label = mean weight * label + (1 - mean weight) * previous label

All examples of a step have the same weight: () for mixup, and for CutMix (H, W, 1), which is 1 or 0
for each pixel. Where a step chooses between both, the number of mixup fills (H, W, 1).

Legend: B batch, H W height and width, C channels, K classes.
"""

import jax
import jax.numpy as jnp

from vit_jax.config.schema import InputConfig


def mix(
    key: jax.Array,
    image_BHWC: jax.Array,
    label_BK: jax.Array,
    mask_B: jax.Array,
    config: InputConfig,
) -> tuple[jax.Array, jax.Array]:
    """Mix images and labels by mixup, CutMix, or one of them at random in each step.

    An example is not mixed if its mask or its partner's mask is 0: the zeros of an unreadable image
    would darken a good one and give it the label of an invisible image.

    Args:
      key: random key of this step.
      image_BHWC: floating point, in any range; its dtype is kept.
      label_BK: float32 class probabilities.
      mask_B: float32, 1 for an example that counts.
      config: the section of the input; at least one of `mixup_alpha` and `cutmix_alpha` is above 0.

    Returns:
      Image and label of the same shapes and dtypes.
    """
    _, height, width, _ = image_BHWC.shape
    weight = _sample_weight(key, config, height, width)

    previous_mask_B = jnp.roll(mask_B, 1)
    is_paired_B = (mask_B > 0) & (previous_mask_B > 0)
    mixed_image_BHWC = _blend(image_BHWC, weight, is_paired_B)
    share = weight.mean()  # the fraction of pixels kept by CutMix
    mixed_label_BK = _blend(label_BK, share, is_paired_B)
    return mixed_image_BHWC, mixed_label_BK


def _sample_weight(
    key: jax.Array,
    config: InputConfig,
    height: int,
    width: int,
) -> jax.Array:
    """Return the weight of each example, float32; its partner, the previous one, has 1 - weight.

    Mixup alone has one weight, (); with CutMix there is one for each pixel, (H, W, 1).
    """
    if config.cutmix_alpha == 0:
        return sample_mixup_weight(key, config.mixup_alpha)

    box_key, mixup_key, choice_key = jax.random.split(key, 3)
    cutmix_weight = sample_cutmix_weight(box_key, config.cutmix_alpha, height, width)
    if config.mixup_alpha == 0:
        return cutmix_weight

    is_cutmix = jax.random.bernoulli(choice_key, config.cutmix_fraction)
    mixup_weight = sample_mixup_weight(mixup_key, config.mixup_alpha)
    return jnp.where(is_cutmix, cutmix_weight, mixup_weight)  # (H, W, 1)


def sample_mixup_weight(key: jax.Array, alpha: float) -> jax.Array:
    """Return one weight a ~ Beta(alpha, alpha), float32 ().

    The larger one of a and 1 - a is returned: an example counts at least as much as its partner.
    For a = 0.3 the weight is 0.7.
    Source: AugReg (2106.10270), `get_mixup` of its released code; there one weight a device, here
    one a step.
    """
    weight = jax.random.beta(key, alpha, alpha, dtype=jnp.float32)
    return jnp.maximum(weight, 1 - weight)


def sample_cutmix_weight(
    key: jax.Array,
    alpha: float,
    height: int,
    width: int,
) -> jax.Array:
    """Return 0 inside a random box and 1 outside of it, float32 (H, W, 1).

    The box has the sides of the image times sqrt(1 - kept_area), kept_area ~ Beta(alpha, alpha),
    rounded down: for 0.75 half of each side. Its centre is uniform over the image, and parts
    outside the image are cut off. An example may lose most of its pixels: as in the paper, the
    weight has no lower bound.

    Source: CutMix (1905.04899), Algorithm 1.
    """
    area_key, row_key, column_key = jax.random.split(key, 3)
    kept_area = jax.random.beta(area_key, alpha, alpha, dtype=jnp.float32)
    side = jnp.sqrt(1 - kept_area)

    def is_inside(key: jax.Array, num_pixels: int) -> jax.Array:
        length = (side * num_pixels).astype(jnp.int32)
        centre = jax.random.randint(key, (), 0, num_pixels)
        # The box has `length` pixels, as in timm 1.0; the paper's is one shorter for odd lengths.
        start = centre - length // 2
        pixel = jnp.arange(num_pixels)
        return (start <= pixel) & (pixel < start + length)

    is_inside_H = is_inside(row_key, height)
    is_inside_W = is_inside(column_key, width)
    is_inside_HW = is_inside_H[:, None] & is_inside_W
    return (~is_inside_HW).astype(jnp.float32)[:, :, None]


def _blend(
    value: jax.Array,
    weight: jax.Array,
    is_paired_B: jax.Array,
) -> jax.Array:
    """Return weight * value + (1 - weight) * previous value, or the value of unpaired examples.

    Args:
      value: images (B, H, W, C), or labels (B, K).
      weight: () or, for images, (H, W, 1).
      is_paired_B: False for examples that are not mixed.
    """
    other_axes = (1,) * (value.ndim - 1)
    is_paired = is_paired_B.reshape(-1, *other_axes)  # (B, 1, 1, 1) or (B, 1)
    # (B, 1, 1, 1), (B, H, W, 1) or (B, 1).
    weight_of_example = jnp.where(is_paired, weight, jnp.float32(1))
    weight_of_previous = 1 - weight_of_example  # in float32, before both are rounded

    previous = jnp.roll(value, 1, axis=0)
    return weight_of_example.astype(value.dtype) * value + (
        weight_of_previous.astype(value.dtype) * previous
    )
