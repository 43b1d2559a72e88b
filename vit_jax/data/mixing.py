"""Mixup and CutMix on the device, inside the jitted train step.

Every example is mixed with the one before it in the global batch, the first one with the last, so
that devices exchange one example each:

    image = weight * image + (1 - weight) * previous image
    label = mean weight * label + (1 - mean weight) * previous label

All examples of a step share one weight:

* with mixup a number, of shape (), which is at least a half;
* with CutMix a number for each pixel, 0 inside a box and 1 outside, (H, W, 1);
* with both, one of them is drawn in each step on the device, and the weight is (H, W, 1).

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

    An example is not mixed if its mask or its partner's mask is 0: an unreadable image is one
    colour, which would veil a good one, and has a label that cannot be seen.

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
    label_weight = weight.mean()  # for CutMix the share of pixels that it keeps
    mixed_label_BK = _blend(label_BK, label_weight, is_paired_B)
    return mixed_image_BHWC, mixed_label_BK


def _sample_weight(
    key: jax.Array,
    config: InputConfig,
    height: int,
    width: int,
) -> jax.Array:
    """Return the weight that every example has in this step, float32, () or (H, W, 1).

    Its partner, the previous example, has 1 - weight.
    """
    # Mixup alone uses the key unsplit: recorded runs had these random numbers.
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
    """Return max(a, 1 - a) of one a ~ Beta(alpha, alpha), float32 ().

    An example counts at least as much as its partner: for a = 0.3 its weight is 0.7.

    Source: AugReg (2106.10270), `get_mixup` of its released code; unlike it, all devices share one
    weight.
    """
    a = jax.random.beta(key, alpha, alpha, dtype=jnp.float32)
    return jnp.maximum(a, 1 - a)


def sample_cutmix_weight(
    key: jax.Array,
    alpha: float,
    height: int,
    width: int,
) -> jax.Array:
    """Return 0 inside a random box and 1 outside of it, float32 (H, W, 1).

    The box covers 1 - kept_fraction of the image, where kept_fraction ~ Beta(alpha, alpha), and has
    its proportions. So each side is sqrt(1 - kept_fraction) of the image's, rounded down to pixels:
    half of it for kept_fraction = 0.75. The centre is uniform over the image, whose edges cut off a
    part of the box. As in the paper, an example may lose most of its pixels.

    Source: CutMix (1905.04899), Algorithm 1.
    """
    area_key, row_key, column_key = jax.random.split(key, 3)
    kept_fraction = jax.random.beta(area_key, alpha, alpha, dtype=jnp.float32)
    side_fraction = jnp.sqrt(1 - kept_fraction)

    def is_covered(side_key: jax.Array, num_pixels: int) -> jax.Array:
        """Return for each pixel of a side whether the box covers it."""
        length = (side_fraction * num_pixels).astype(jnp.int32)
        centre = jax.random.randint(side_key, (), 0, num_pixels)
        # The box has all of its length. The paper's end, centre + length // 2, loses a pixel of odd
        # lengths.
        start = centre - length // 2
        pixel = jnp.arange(num_pixels)
        return (start <= pixel) & (pixel < start + length)

    is_inside_H = is_covered(row_key, height)
    is_inside_W = is_covered(column_key, width)
    is_inside_HW = is_inside_H[:, None] & is_inside_W
    return (~is_inside_HW).astype(jnp.float32)[:, :, None]


def _blend(
    value: jax.Array,
    weight: jax.Array,
    is_paired_B: jax.Array,
) -> jax.Array:
    """Return weight * value + (1 - weight) * previous value; unpaired examples keep their value.

    Args:
      value: images (B, H, W, C), or labels (B, K).
      weight: () or, for images, (H, W, 1).
      is_paired_B: False for examples that are not mixed.
    """
    other_axes = (1,) * (value.ndim - 1)
    is_paired = is_paired_B.reshape(-1, *other_axes)  # (B, 1, 1, 1) or (B, 1)
    # The shape of `is_paired`; for CutMix (B, H, W, 1), a weight for each pixel.
    own_weight = jnp.where(is_paired, weight, jnp.float32(1))
    previous_weight = 1 - own_weight  # in float32: the difference of bfloat16 weights is less exact

    own_part = own_weight.astype(value.dtype) * value
    previous = jnp.roll(value, 1, axis=0)
    return own_part + previous_weight.astype(value.dtype) * previous
