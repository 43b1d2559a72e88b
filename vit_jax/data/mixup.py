"""Mixup on the device, inside the jitted train step.

Legend: B batch, H W height and width, C channels, K classes.
"""

import jax
import jax.numpy as jnp


def mixup(
    key: jax.Array, image_BHWC: jax.Array, label_BK: jax.Array, mask_B: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mixes every example with the one before it, all with one weight a ~ Beta(alpha, alpha), a >= 1/2.

    An example whose mask or whose partner's mask is 0 is left unmixed: the zeros of an unreadable image
    would otherwise darken a good one and give it a label of an invisible image.

    Args:
      key: of this step.
      image_BHWC: floating point, in any range; its dtype is kept.
      label_BK: float32 class probabilities.
      mask_B: float32, 1 for an example that counts.
      alpha: above 0.

    Returns:
      Image, label and mask of the same shapes and dtypes; the mask as it was.

    Source: AugReg (2106.10270), `get_mixup` of its released code; there one weight a device, here one a step.
    """
    weight = jax.random.beta(key, alpha, alpha, dtype=jnp.float32)
    paired_B = (mask_B > 0) & (jnp.roll(mask_B, 1) > 0)
    weight_B = jnp.where(paired_B, jnp.maximum(weight, 1 - weight), jnp.float32(1))

    def blend(value: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (value.ndim - 1)
        own = weight_B.reshape(shape).astype(value.dtype)
        other = (1 - weight_B).reshape(shape).astype(value.dtype)
        return own * value + other * jnp.roll(value, 1, axis=0)

    return blend(image_BHWC), blend(label_BK), mask_B
