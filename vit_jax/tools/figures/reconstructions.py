"""Input and prediction of a network trained on masked patches, as images.

Legend: B images, N patches, T targets of a patch, O outputs of the network for a patch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import Batch, normalise
from vit_jax.config import Architecture, ObjectiveConfig
from vit_jax.config.schema import PatchTarget
from vit_jax.objectives.masked_patch import CLASSES, LEVELS, SIDE, MaskedPatch, count_patch_outputs

HIDDEN = 128  # the grey of a masked patch


def find_target(architecture: Architecture) -> PatchTarget:
    """Return the patch target of a network by its number of outputs, which differs between targets.

    Raises:
      ValueError: no patch target has this number of outputs.
    """
    for target in ("mean_colour", "colours_4x4", "pixels"):
        if target == "colours_4x4" and any(pixels % SIDE for pixels in architecture.patch_size):
            continue
        config = ObjectiveConfig(kind="masked_patch", patch_target=target, loss="softmax")
        if count_patch_outputs(config, architecture.patch_size) == architecture.patch_outputs:
            return target
    raise ValueError(
        f"{architecture.name} gives {architecture.patch_outputs} numbers for a patch, "
        "which is no known target."
    )


def to_colours(class_BNT: np.ndarray) -> np.ndarray:
    """Return the middle of each class's range of red, green and blue, uint8 (B, N, T, 3)."""
    levels = np.stack(np.unravel_index(class_BNT, (LEVELS,) * 3), axis=-1)
    return np.round((levels + 0.5) * 255 / LEVELS).astype(np.uint8)


def to_image(
    patch_BNT: np.ndarray,
    target: PatchTarget,
    grid: tuple[int, int],
    patch_size: tuple[int, int],
) -> np.ndarray:
    """Return uint8 images (B, H, W, 3) of the targets of all patches.

    Targets are classes of colours, or pixels in [-1, 1].
    """
    rows, columns = grid
    height, width = patch_size
    if target == "pixels":
        values = np.clip(np.round((patch_BNT + 1) * 127.5), 0, 255).astype(np.uint8)
        pixels = values.reshape(-1, rows, columns, height, width, 3)
    else:
        side = 1 if target == "mean_colour" else SIDE
        colours = to_colours(patch_BNT).reshape(-1, rows, columns, side, side, 3)
        pixels = colours.repeat(height // side, axis=3).repeat(width // side, axis=4)
    return pixels.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows * height, columns * width, 3)


def reconstruct(model: Model, images_NHWC: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Mask half of the patches and predict them.

    Training also keeps or replaces some of the masked patches. Here the [mask] embedding replaces
    all of them.

    Returns:
      uint8 images (N, H, W, 3) of the area that the patches cover: "original", "seen", with masked
      patches in grey, "predicted", and "target", the best possible prediction. Visible patches of
      the last two are the original. "is_hidden" (N, rows, columns) is bool.
    """
    architecture = model.architecture
    target = find_target(architecture)
    config = ObjectiveConfig(
        kind="masked_patch",
        patch_target=target,
        loss="softmax",
        corruption_shares=(1.0, 0.0, 0.0),
    )
    objective = MaskedPatch(config, architecture.grid, architecture.patch_size)

    @jax.jit
    def step(module: Any, image_BHWC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch = Batch(image_BHWC, None, None)  # labels are not used, and every image counts
        targets = objective.prepare(batch, None, jnp.ones(len(image_BHWC)), jax.random.key(seed))
        images = normalise(image_BHWC, architecture.compute_dtype)
        predicted_BNT = module(images, corruption=targets.corruption).patches_BNO
        if target != "pixels":
            logits = predicted_BNT.reshape(*targets.patch_BNT.shape, CLASSES)
            predicted_BNT = logits.argmax(axis=-1)
        return predicted_BNT, targets.patch_BNT, targets.is_corrupted_BN

    results = jax.device_get(step(model.module, images_NHWC))
    predicted_BNT, target_BNT, is_hidden_BN = results

    rows, columns = architecture.grid
    height, width = architecture.patch_size
    original = images_NHWC[:, : rows * height, : columns * width]
    is_hidden = is_hidden_BN.reshape(-1, rows, columns)
    is_hidden_pixel = is_hidden.repeat(height, axis=1).repeat(width, axis=2)[..., None]

    def fill_hidden(patch_BNT: np.ndarray) -> np.ndarray:
        image = to_image(patch_BNT, target, architecture.grid, architecture.patch_size)
        return np.where(is_hidden_pixel, image, original)

    return {
        "original": original,
        "seen": np.where(is_hidden_pixel, np.uint8(HIDDEN), original),
        "predicted": fill_hidden(predicted_BNT),
        "target": fill_hidden(target_BNT),
        "is_hidden": is_hidden,
    }
