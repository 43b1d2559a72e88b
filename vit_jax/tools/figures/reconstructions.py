"""Input and prediction of a network trained on masked patches, as images.

Legend: B images, N patches, T targets of a patch, O outputs of the network for a patch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import Batch, normalise
from vit_jax.config import Architecture, ObjectiveConfig
from vit_jax.config.schema import PatchTarget
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.objectives.masked_patch import (
    LEVELS,
    MOST_CLASSIFIED,
    SIDE,
    MaskedPatch,
    count_patch_outputs,
)
from vit_jax.tools.figures.sheets import select_colours

HIDDEN = 128  # the grey of a masked patch


def find_target(architecture: Architecture) -> PatchTarget:
    """Return the patch target of a network by its number of outputs, which differs between targets.

    Raises:
      ValueError: no patch target has this number of outputs.
    """
    height, width = architecture.patch_size
    for target in ("mean_colour", "colours_4x4", "pixels"):
        if target == "colours_4x4" and (height % SIDE or width % SIDE):
            continue
        is_class = target != "pixels"
        if is_class and architecture.channels > MOST_CLASSIFIED:
            continue
        config = ObjectiveConfig(
            kind="masked_patch",
            patch_target=target,
            loss="softmax",
        )
        outputs = count_patch_outputs(
            config,
            architecture.patch_size,
            architecture.channels,
        )
        if outputs == architecture.patch_outputs:
            return target
    raise ValueError(
        f"{architecture.name} gives {architecture.patch_outputs} numbers for a patch, "
        "which is no known target."
    )


def to_colours(class_BNT: np.ndarray, channels: int = RGB_CHANNELS) -> np.ndarray:
    """Return the middle of each class's range of each channel, uint8 (B, N, T, C)."""
    num_levels = (LEVELS,) * channels
    levels = np.unravel_index(class_BNT, num_levels)  # an array for each channel
    level_BNTC = np.stack(levels, axis=-1)
    middle_BNTC = (level_BNTC + 0.5) * 255 / LEVELS
    return np.round(middle_BNTC).astype(np.uint8)


def to_image(
    patch_BNT: np.ndarray,
    target: PatchTarget,
    grid: tuple[int, int],
    patch_size: tuple[int, int],
    channels: int = RGB_CHANNELS,
) -> np.ndarray:
    """Return uint8 images (B, H, W, C) of the targets of all patches.

    Targets are classes of colours, or pixels in [-1, 1].
    """
    rows, columns = grid
    height, width = patch_size
    if target == "pixels":
        values = _to_bytes(patch_BNT)
        pixels = values.reshape(-1, rows, columns, height, width, channels)
    else:
        side = 1 if target == "mean_colour" else SIDE
        colours = to_colours(patch_BNT, channels)
        cells = colours.reshape(-1, rows, columns, side, side, channels)
        high_cells = cells.repeat(height // side, axis=3)
        pixels = high_cells.repeat(width // side, axis=4)
    in_rows = pixels.transpose(0, 1, 3, 2, 4, 5)
    return in_rows.reshape(-1, rows * height, columns * width, channels)


def _show(images_NHWC: np.ndarray) -> np.ndarray:
    """Return images as uint8 RGB; normalised channels from -1 to 1, as predictions."""
    if images_NHWC.dtype == np.uint8:
        return images_NHWC
    return select_colours(_to_bytes(images_NHWC))


def _to_bytes(values: np.ndarray) -> np.ndarray:
    """Return values of which -1 and 1 become 0 and 255, uint8."""
    rounded = np.round((values + 1) * 127.5)
    return np.clip(rounded, 0, 255).astype(np.uint8)


def _make_predict(
    architecture: Architecture,
    target: PatchTarget,
) -> Callable[[Any, np.ndarray], tuple[jax.Array, jax.Array, jax.Array]]:
    """Return a jitted function from network and images to what it predicts for masked patches.

    Its results are predictions, targets and True for masked patches.
    """
    config = ObjectiveConfig(
        kind="masked_patch",
        patch_target=target,
        loss="softmax",
        corruption_shares=(1.0, 0.0, 0.0),
    )
    objective = MaskedPatch(config, architecture.grid, architecture.patch_size)

    @jax.jit
    def predict(module: Any, image_BHWC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch = Batch(image_BHWC, None, None)  # labels are not used, and every image counts
        targets = objective.prepare(
            batch,
            None,
            jnp.ones(len(image_BHWC)),
            jax.random.key(0),
        )
        images = normalise(image_BHWC, architecture.compute_dtype)
        predicted_BNT = module(images, corruption=targets.corruption).patches_BNO
        if target != "pixels":
            logits = predicted_BNT.reshape(*targets.patch_BNT.shape, -1)
            predicted_BNT = logits.argmax(axis=-1)
        return predicted_BNT, targets.patch_BNT, targets.is_corrupted_BN

    return predict


def reconstruct(model: Model, images_NHWC: np.ndarray) -> dict[str, np.ndarray]:
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
    predict = _make_predict(architecture, target)
    results = jax.device_get(predict(model.module, images_NHWC))
    predicted_BNT, target_BNT, is_hidden_BN = results

    rows, columns = architecture.grid
    height, width = architecture.patch_size
    original = _show(images_NHWC[:, : rows * height, : columns * width])
    is_hidden = is_hidden_BN.reshape(-1, rows, columns)
    is_hidden_pixel = is_hidden.repeat(height, axis=1).repeat(width, axis=2)[..., None]

    def fill_hidden(patch_BNT: np.ndarray) -> np.ndarray:
        image = to_image(
            patch_BNT,
            target,
            architecture.grid,
            architecture.patch_size,
            architecture.channels,
        )
        return np.where(is_hidden_pixel, select_colours(image), original)

    return {
        "original": original,
        "seen": np.where(is_hidden_pixel, np.uint8(HIDDEN), original),
        "predicted": fill_hidden(predicted_BNT),
        "target": fill_hidden(target_BNT),
        "is_hidden": is_hidden,
    }
