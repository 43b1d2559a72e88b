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

HIDDEN = 128  # the grey of a patch that is not seen


def target_of(a: Architecture) -> PatchTarget:
    """Return the kind of target by the network's number of outputs; no two kinds have the same number."""
    for kind in ("mean_colour", "colours_4x4", "pixels"):
        divides = kind != "colours_4x4" or not any(pixels % SIDE for pixels in a.patch_size)
        config = ObjectiveConfig(kind="masked_patch", patch_target=kind, loss="softmax")
        if divides and count_patch_outputs(config, a.patch_size) == a.patch_outputs:
            return kind
    raise ValueError(
        f"{a.name} gives {a.patch_outputs} numbers for a patch, which is no target of ours."
    )


def to_colours(class_BNT: np.ndarray) -> np.ndarray:
    """Return the middle of each class's range of red, green and blue, uint8 (B, N, T, 3)."""
    levels = np.stack(np.unravel_index(class_BNT, (LEVELS,) * 3), axis=-1)
    return np.round((levels + 0.5) * 255 / LEVELS).astype(np.uint8)


def to_image(
    patch_BNT: np.ndarray, kind: PatchTarget, grid: tuple[int, int], patch_size: tuple[int, int]
) -> np.ndarray:
    """Return images (B, H, W, 3) of targets for every patch: classes of colours, or pixels in [-1, 1]; uint8."""
    (rows, columns), (height, width) = grid, patch_size
    if kind == "pixels":
        values = np.clip(np.round((patch_BNT + 1) * 127.5), 0, 255).astype(np.uint8)
        pixels = values.reshape(-1, rows, columns, height, width, 3)
    else:
        side = 1 if kind == "mean_colour" else SIDE
        colours = to_colours(patch_BNT).reshape(-1, rows, columns, side, side, 3)
        pixels = colours.repeat(height // side, axis=3).repeat(width // side, axis=4)
    return pixels.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows * height, columns * width, 3)


def reconstruct(model: Model, images_NHWC: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Hide half of the patches, as in training but all of them by the [mask] embedding, and predict them.

    Returns:
      uint8 images (N, H, W, 3) of what the patches cover: "original", "seen", with hidden patches
      in grey, "predicted", and "target", the best that could be predicted; in the last two patches
      that are seen are the original. And "is_hidden" (N, rows, columns), bool.
    """
    a = model.architecture
    kind = target_of(a)
    config = ObjectiveConfig(
        kind="masked_patch", patch_target=kind, loss="softmax", corruption_shares=(1.0, 0.0, 0.0)
    )
    objective = MaskedPatch(config, a.grid, a.patch_size)

    @jax.jit
    def step(module: Any, image_BHWC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch = Batch(image_BHWC, None, None)  # labels are not used, and every image counts
        targets = objective.prepare(batch, None, jnp.ones(len(image_BHWC)), jax.random.key(seed))
        output = module(normalise(image_BHWC, a.compute_dtype), corruption=targets.corruption)
        predicted_BNT = output.patches_BNO
        if kind != "pixels":
            predicted_BNT = predicted_BNT.reshape(*targets.patch_BNT.shape, CLASSES).argmax(axis=-1)
        return predicted_BNT, targets.patch_BNT, targets.is_corrupted_BN

    predicted, target, is_hidden_BN = jax.device_get(step(model.module, images_NHWC))
    (rows, columns), (height, width) = a.grid, a.patch_size
    original = images_NHWC[:, : rows * height, : columns * width]
    is_hidden = is_hidden_BN.reshape(-1, rows, columns)
    where = is_hidden.repeat(height, axis=1).repeat(width, axis=2)[..., None]
    images = {"original": original, "seen": np.where(where, np.uint8(HIDDEN), original)}
    for name, patch_BNT in (("predicted", predicted), ("target", target)):
        images[name] = np.where(where, to_image(patch_BNT, kind, a.grid, a.patch_size), original)
    return images | {"is_hidden": is_hidden}
