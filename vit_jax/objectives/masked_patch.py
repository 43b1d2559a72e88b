"""Masked patch prediction: a ViT predicts what the patches that are hidden from it look like (ViT, sec. 4.6, B.1.2).

Legend: B batch, N patches of an image, T targets of a patch, O outputs of the network for a patch, H W image.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.arrays import Batch, Corruption, ModelOutput, Targets
from vit_jax.config import Architecture, ObjectiveConfig
from vit_jax.objectives.sums import Sums

LEVELS = 8  # of each colour: 3 bits
CLASSES = LEVELS**3
SIDE = 4  # of "colours_4x4"


def patch_outputs(config: ObjectiveConfig, patch_size: tuple[int, int]) -> int:
    """Numbers that a network predicts for each patch; 0 for classification.

    Raises:
      ValueError: patches that cannot be divided into 4 x 4 cells.
    """
    if config.kind != "masked_patch":
        return 0
    if config.patch_target == "colours_4x4":
        if any(pixels % SIDE for pixels in patch_size):
            rule = f"must have patches of {SIDE}x{SIDE} equal cells, not {patch_size[0]}x{patch_size[1]} pixels"
            raise ValueError(
                f"config.objective.patch_target='colours_4x4': {rule}. Use mean_colour or pixels."
            )
        return SIDE * SIDE * CLASSES
    return CLASSES if config.patch_target == "mean_colour" else math.prod(patch_size) * 3


@dataclasses.dataclass(frozen=True)
class MaskedPatch:
    """The choice of masked patches, and the loss of their predictions.

    Attributes:
      config: its `corrupted_fraction`, `corruption_shares` and `patch_target`.
      grid: rows and columns of patches.
      patch_size: height and width in pixels.
    """

    config: ObjectiveConfig
    grid: tuple[int, int]
    patch_size: tuple[int, int]

    def prepare(self, batch: Batch, label_BK: Any, mask_B: jax.Array, key: jax.Array) -> Targets:
        """Draw what is hidden, each patch for itself; targets come from the stored pixels."""
        del label_BK
        shape = (len(batch.image_BHWC), math.prod(self.grid))
        which, how, where = jax.random.split(key, 3)
        is_corrupted_BN = jax.random.uniform(which, shape) < self.config.corrupted_fraction
        masked, moved, _ = self.config.corruption_shares
        share_BN = jax.random.uniform(how, shape)
        is_moved_BN = is_corrupted_BN & (share_BN >= masked) & (share_BN < masked + moved)
        own_N = jnp.arange(shape[1], dtype=jnp.int32)
        other_BN = (own_N + jax.random.randint(where, shape, 1, max(shape[1], 2))) % shape[
            1
        ]  # never itself
        corruption = Corruption(
            is_corrupted_BN & (share_BN < masked), jnp.where(is_moved_BN, other_BN, own_N)
        )
        return Targets(None, mask_B, corruption, self.targets(batch.image_BHWC), is_corrupted_BN)

    def targets(self, image_BHWC: jax.Array) -> jax.Array:
        """patch_BNT: classes of colours, int32; or the pixels of each patch in [-1, 1], row by row."""
        (rows, columns), (height, width) = self.grid, self.patch_size
        covered = image_BHWC[:, : rows * height, : columns * width]
        if self.config.patch_target == "pixels":
            return _cut(covered, rows, columns).astype(jnp.float32) / 127.5 - 1.0
        if self.config.patch_target == "mean_colour":
            return _colour_classes(_cut(covered, rows, columns))[..., None]
        cells_BNV = _cut(
            covered, rows * SIDE, columns * SIDE
        )  # in raster order over the image, not over a patch
        classes = _colour_classes(cells_BNV).reshape(-1, rows, SIDE, columns, SIDE)
        return classes.transpose(0, 1, 3, 2, 4).reshape(-1, rows * columns, SIDE * SIDE)

    def sums(self, output: ModelOutput, targets: Targets) -> Sums:
        """Float32 totals over the corrupted patches: "weight" is their number, "loss" the sum of their mean losses.

        Of colours also "correct", and "majority": what always guessing the batch's commonest colour would score.
        """
        outputs_BNO = output.patches_BNO.astype(jnp.float32)
        patch_BNT = targets.patch_BNT
        counts_BN = targets.is_corrupted_BN.astype(jnp.float32) * targets.mask_B[:, None]
        weight = counts_BN.sum()
        images = targets.mask_B.sum()
        if self.config.patch_target == "pixels":
            loss_BN = jnp.square(outputs_BNO - patch_BNT).mean(axis=-1)
            return {"loss": (loss_BN * counts_BN).sum(), "weight": weight, "images": images}
        logits_BNTK = outputs_BNO.reshape(*patch_BNT.shape, CLASSES)
        loss_BN = optax.softmax_cross_entropy_with_integer_labels(logits_BNTK, patch_BNT).mean(
            axis=-1
        )
        correct_BN = (logits_BNTK.argmax(axis=-1) == patch_BNT).astype(jnp.float32).mean(axis=-1)
        share_BNT = jnp.broadcast_to(counts_BN[..., None] / patch_BNT.shape[-1], patch_BNT.shape)
        tally_K = jnp.zeros(CLASSES).at[patch_BNT.reshape(-1)].add(share_BNT.reshape(-1))
        return {
            "loss": (loss_BN * counts_BN).sum(),
            "correct": (correct_BN * counts_BN).sum(),
            "majority": tally_K.max(),
            "weight": weight,
            "images": images,
        }


def build_masked_patch(config: ObjectiveConfig, a: Architecture) -> MaskedPatch:
    """The objective for a network.

    Raises:
      ValueError: an image of one patch, for which there is no other.
    """
    if math.prod(a.grid) < 2:
        raise ValueError(
            f"config.objective.kind='masked_patch': images of {a.image_size} have one patch of {a.name}."
        )
    return MaskedPatch(config, a.grid, a.patch_size)


def _cut(image_BHWC: jax.Array, rows: int, columns: int) -> jax.Array:
    """Return patches in raster order, their pixels row by row: (B, rows * columns, pixels * 3)."""
    batch, height, width, channels = image_BHWC.shape
    patches = image_BHWC.reshape(batch, rows, height // rows, columns, width // columns, channels)
    return patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)


def _colour_classes(part_BNV: jax.Array) -> jax.Array:
    """The mean colour in 3 bits a channel as one class, red first; in integers, so that no edge is rounded."""
    values = part_BNV.astype(jnp.int32).reshape(*part_BNV.shape[:2], -1, 3)
    level = jnp.minimum(LEVELS * values.sum(axis=2) // (255 * values.shape[2]), LEVELS - 1)
    return level[..., 0] * LEVELS**2 + level[..., 1] * LEVELS + level[..., 2]
