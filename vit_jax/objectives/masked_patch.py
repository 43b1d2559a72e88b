"""Masked patch prediction: a ViT predicts hidden patches (ViT, sec. 4.6, B.1.2).

Legend: B batch, N patches of an image, M cells of an image, V values of a part, T targets of a
patch, O outputs of the network for a patch, H W image.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from vit_jax.arrays import Batch, Corruption, ModelOutput, Targets
from vit_jax.config import Architecture, ObjectiveConfig
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.objectives.sums import Sums

LEVELS = 8  # levels of each channel: 3 bits
CLASSES = LEVELS**RGB_CHANNELS
MOST_CLASSIFIED = 4
"""Largest number of channels whose levels are classes together: 4,096 of them."""
SIDE = 4  # cells along a side of a patch of "colours_4x4"


def count_patch_outputs(
    config: ObjectiveConfig,
    patch_size: tuple[int, int],
    channels: int = RGB_CHANNELS,
) -> int:
    """Return the number of values that a network predicts for each patch; 0 for classification.

    Raises:
      ValueError: patches that cannot be divided into 4 x 4 cells, or too many channels for classes.
    """
    if config.kind != "masked_patch":
        return 0
    height, width = patch_size
    if config.patch_target == "pixels":
        return height * width * channels
    if channels > MOST_CLASSIFIED:
        raise ValueError(
            f"config.objective.patch_target={config.patch_target!r}: must have at most "
            f"{MOST_CLASSIFIED} channels, not {channels}. Use pixels."
        )
    classes = LEVELS**channels
    if config.patch_target == "mean_colour":
        return classes
    if height % SIDE or width % SIDE:
        raise ValueError(
            f"config.objective.patch_target='colours_4x4': must have patches of {SIDE}x{SIDE} "
            f"equal cells, not {height}x{width} pixels. Use mean_colour or pixels."
        )
    return SIDE * SIDE * classes


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

    def prepare(
        self,
        batch: Batch,
        label_BK: jax.Array | None,
        mask_B: jax.Array,
        key: jax.Array,
    ) -> Targets:
        """Sample the corruption of each patch; targets come from the stored pixels."""
        del label_BK
        num_images = len(batch.image_BHWC)
        corruption, is_corrupted_BN = self._sample_corruption(num_images, key)
        return Targets(
            None,
            mask_B,
            corruption,
            self.compute_targets(batch.image_BHWC),
            is_corrupted_BN,
        )

    def _sample_corruption(self, num_images: int, key: jax.Array) -> tuple[Corruption, jax.Array]:
        """Return the corruption of the patches, and which of them are corrupted, bool (B, N)."""
        num_patches = math.prod(self.grid)
        shape = (num_images, num_patches)
        which_key, how_key, where_key = jax.random.split(key, 3)
        uniform_BN = jax.random.uniform(which_key, shape)
        is_corrupted_BN = uniform_BN < self.config.corrupted_fraction

        # A corrupted patch is masked, replaced by another patch of its image, or left as it is.
        masked_share, moved_share, _ = self.config.corruption_shares
        position_BN = jax.random.uniform(how_key, shape)
        is_masked_BN = is_corrupted_BN & (position_BN < masked_share)
        is_above_masked_BN = position_BN >= masked_share
        is_below_moved_BN = position_BN < masked_share + moved_share
        is_moved_BN = is_corrupted_BN & is_above_masked_BN & is_below_moved_BN

        # An offset of at least 1 never leads to the patch itself.
        patch_N = jnp.arange(num_patches, dtype=jnp.int32)
        end = max(num_patches, 2)
        offset_BN = jax.random.randint(where_key, shape, 1, end)
        other_BN = (patch_N + offset_BN) % num_patches
        source_BN = jnp.where(is_moved_BN, other_BN, patch_N)
        return Corruption(is_masked_BN, source_BN), is_corrupted_BN

    def compute_targets(self, image_BHWC: jax.Array) -> jax.Array:
        """Return patch_BNT: int32 classes of colours, or float32 pixels of each patch.

        Pixels are as the network sees them, row by row.
        """
        rows, columns = self.grid
        height, width = self.patch_size
        covered_height = rows * height
        covered_width = columns * width
        covered_BHWC = image_BHWC[:, :covered_height, :covered_width]
        channels = image_BHWC.shape[-1]

        if self.config.patch_target == "pixels":
            pixels_BNT = _cut(covered_BHWC, rows, columns)
            return _scale_pixels(pixels_BNT)
        if self.config.patch_target == "mean_colour":
            pixels_BNV = _cut(covered_BHWC, rows, columns)
            class_BN = _classify_colours(pixels_BNV, channels)
            return class_BN[..., None]

        # Cells are in raster order over the image; those of a patch must be side by side.
        cells_BMV = _cut(covered_BHWC, rows * SIDE, columns * SIDE)
        class_BM = _classify_colours(cells_BMV, channels)
        classes = class_BM.reshape(-1, rows, SIDE, columns, SIDE)
        classes = classes.transpose(0, 1, 3, 2, 4)
        return classes.reshape(-1, rows * columns, SIDE * SIDE)

    def sums(self, output: ModelOutput, targets: Targets) -> Sums:
        """Return float32 totals over the corrupted patches.

        "weight" is their number, "loss" the sum of their mean losses. Of colours also "correct",
        and "majority": the score of a network that always predicts the batch's commonest colour.
        """
        outputs_BNO = output.patches_BNO.astype(jnp.float32)
        is_corrupted_BN = targets.is_corrupted_BN.astype(jnp.float32)
        counts_BN = is_corrupted_BN * targets.mask_B[:, None]

        if self.config.patch_target == "pixels":
            error_BNO = outputs_BNO - targets.patch_BNT
            loss_BN = jnp.square(error_BNO).mean(axis=-1)
            sums = {"loss": (loss_BN * counts_BN).sum()}
        else:
            sums = _sum_colours(outputs_BNO, targets.patch_BNT, counts_BN)

        return {
            **sums,
            "weight": counts_BN.sum(),
            "images": targets.mask_B.sum(),
        }


def _sum_colours(
    outputs_BNO: jax.Array,
    patch_BNT: jax.Array,
    counts_BN: jax.Array,
) -> Sums:
    """Return the sums "loss", "correct" and "majority" of predicted classes of colours."""
    logits_BNTK = outputs_BNO.reshape(*patch_BNT.shape, -1)
    loss_BNT = optax.softmax_cross_entropy_with_integer_labels(logits_BNTK, patch_BNT)
    loss_BN = loss_BNT.mean(axis=-1)
    is_correct_BNT = logits_BNTK.argmax(axis=-1) == patch_BNT
    correct_BN = is_correct_BNT.astype(jnp.float32).mean(axis=-1)

    share_BN1 = counts_BN[..., None] / patch_BNT.shape[-1]
    share_BNT = jnp.broadcast_to(share_BN1, patch_BNT.shape)
    classes = patch_BNT.reshape(-1)
    shares = share_BNT.reshape(-1)
    frequency_K = jnp.zeros(logits_BNTK.shape[-1]).at[classes].add(shares)
    return {
        "loss": (loss_BN * counts_BN).sum(),
        "correct": (correct_BN * counts_BN).sum(),
        "majority": frequency_K.max(),
    }


def build_masked_patch(config: ObjectiveConfig, a: Architecture) -> MaskedPatch:
    """Build the objective for a network.

    Raises:
      ValueError: an image of one patch, for which there is no other.
    """
    if math.prod(a.grid) < 2:
        raise ValueError(
            f"config.objective.kind='masked_patch': images of {a.image_size} have one patch of "
            f"{a.name}."
        )
    return MaskedPatch(config, a.grid, a.patch_size)


def _cut(image_BHWC: jax.Array, rows: int, columns: int) -> jax.Array:
    """Return patches in raster order, their pixels row by row: (B, rows * columns, pixels * C)."""
    batch, height, width, channels = image_BHWC.shape
    patches = image_BHWC.reshape(
        batch,
        rows,
        height // rows,
        columns,
        width // columns,
        channels,
    )
    patches = patches.transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(batch, rows * columns, -1)


def _scale_pixels(pixels: jax.Array) -> jax.Array:
    """Return pixels of 8 bits in [-1, 1]; other images are normalised already."""
    if pixels.dtype != jnp.uint8:
        return pixels.astype(jnp.float32)
    return pixels.astype(jnp.float32) / 127.5 - 1.0


def _classify_colours(part_BNV: jax.Array, channels: int) -> jax.Array:
    """Return the mean colour in 3 bits a channel as one class, the first channel first.

    It is computed in integers, so that no edge is rounded. Normalised channels have their levels
    between -1 and 1.
    """
    if part_BNV.dtype != jnp.uint8:
        part_BNV = jnp.clip(127.5 * part_BNV + 127.5, 0, 255)
    batch, num_parts, _ = part_BNV.shape
    values = part_BNV.astype(jnp.int32).reshape(batch, num_parts, -1, channels)
    num_pixels = values.shape[2]
    total = values.sum(axis=2)
    level = LEVELS * total // (255 * num_pixels)
    level = jnp.minimum(level, LEVELS - 1)

    colour = level[..., 0]
    for channel in range(1, channels):
        colour = colour * LEVELS + level[..., channel]
    return colour
