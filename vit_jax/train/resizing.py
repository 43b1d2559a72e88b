"""The network of a run for images of another size, as a function of the parameters of the run.

Learned positions are resized in the forward pass, and gradients go through that linear map.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.models.positions import FixedPositions
from vit_jax.weights.position_resize import resize_positions

T = TypeVar("T")


def make_resize(
    model: nnx.Module,
    target: T,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
) -> Callable[[nnx.Module], T]:
    """Return the function from a network for one grid of patches to the network for another.

    Learned positions are averaged over the cells that they cover (bilinear, antialiased), so that
    all of them learn. Fixed ones are computed at the places of the patches in the grid of `model`.

    Args:
      model: arrays or their shapes.
      target: shapes of the network for the other grid.
      old_grid: rows and columns of patches of `model`.
      new_grid: rows and columns of patches of `target`.

    Raises:
      ValueError: other built-in parameters than positions change their shapes; they are listed.
    """
    matrices = compute_resize_matrices(model, old_grid, new_grid)
    positions = getattr(target, "positions", None)
    if isinstance(positions, FixedPositions):
        positions.reference_grid = old_grid

    def resize_parameter(name: str, parameter: jax.Array) -> jax.Array:
        if name not in matrices:
            return parameter
        return jnp.einsum("nm,...md->...nd", matrices[name], parameter, precision="highest")

    def resize(model: nnx.Module) -> T:
        leaves = pytree.name_leaves(model)
        resized = {name: resize_parameter(name, leaf) for name, leaf in leaves.items()}
        return pytree.from_named_leaves(target, resized)

    wanted = pytree.name_leaves(target)
    found = pytree.name_leaves(jax.eval_shape(resize, model))
    lines = pytree.differences(wanted, found)
    if lines:
        raise ValueError(
            f"config.phases: these parameters are not of every image size:{pytree.list_lines(lines)}"
        )
    return resize


def compute_resize_matrices(
    model: nnx.Module,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
) -> dict[str, np.ndarray]:
    """Return the matrix (new tokens, old tokens) of each parameter that holds positions, by name.

    Resizing is linear in the positions, so that the resized identity is its matrix.
    """
    matrices = {}
    for name, leaf in pytree.name_leaves(model).items():
        if leaf.ndim < 2:
            continue
        num_tokens = leaf.shape[-2]
        leading = (1,) * (leaf.ndim - 2)
        identity = np.eye(num_tokens, dtype=np.float32).reshape(*leading, num_tokens, num_tokens)
        resized, changed = resize_positions({name: identity}, old_grid, new_grid, "bilinear")
        if changed:
            matrices[name] = resized[name].reshape(-1, num_tokens)
    return matrices
