"""Phases of a pre-training run: earlier steps with images of another size, or another batch.

Parameters have the shapes of the last phase from the first step on. An earlier phase resizes learned positions in its
forward pass, and gradients go through that linear map. So the state, the optimiser and checkpoints know no phases.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.config import RunConfig
from vit_jax.config.check import Phase
from vit_jax.models.positions import FixedPositions
from vit_jax.weights.position_resize import resize_positions

T = TypeVar("T")
C = TypeVar("C", bound=RunConfig)


def config_in(config: C, phase: Phase) -> C:
    """Return the config with the image size and batch of a phase; a resize before the crop is in proportion."""
    inputs = config.input
    pixels = config.input.train_resize_pixels
    if pixels is not None:
        pixels = round(pixels * max(phase.image_size) / max(inputs.image_size))
    inputs = dataclasses.replace(inputs, image_size=phase.image_size, train_resize_pixels=pixels)
    return dataclasses.replace(config, input=inputs, global_batch=phase.global_batch)


def make_view(
    model: nnx.Module, target: T, old: tuple[int, int], new: tuple[int, int]
) -> Callable[[nnx.Module], T]:
    """Return the function that turns a network for one grid of patches into the same network for another.

    Learned positions are averaged over the cells that they cover (bilinear, antialiased), so that all of them learn.
    Fixed ones are computed at the places of the patches in the grid of `model`.

    Args:
      model: arrays or their shapes.
      target: shapes of the network for the other grid.
      old: rows and columns of patches of `model`.
      new: those of `target`.

    Raises:
      ValueError: other parameters than positions of ours change their shapes; they are listed.
    """
    matrices: dict[str, np.ndarray] = {}
    for name, leaf in pytree.named_leaves(model).items():
        if leaf.ndim >= 2:
            size = leaf.shape[-2]
            identity = np.eye(size, dtype=np.float32).reshape(*[1] * (leaf.ndim - 2), size, size)
            resized, changed = resize_positions({name: identity}, old, new, "bilinear")
            matrices |= {name: resized[name].reshape(-1, size)} if changed else {}

    if isinstance(positions := getattr(target, "positions", None), FixedPositions):
        positions.reference_grid = old

    def view(model: nnx.Module) -> T:
        def resize(name: str, leaf: jax.Array) -> jax.Array:
            multiply = functools.partial(jnp.einsum, "nm,...md->...nd", precision="highest")
            return multiply(matrices[name], leaf) if name in matrices else leaf

        leaves = pytree.named_leaves(model)
        return pytree.from_named_leaves(
            target, {name: resize(name, leaf) for name, leaf in leaves.items()}
        )

    wanted, viewed = (pytree.named_leaves(tree) for tree in (target, jax.eval_shape(view, model)))
    if lines := pytree.differences(wanted, viewed):
        raise ValueError(
            f"config.phases: these parameters are not of every image size:{pytree.listed(lines)}"
        )
    return view
