"""Position embeddings of weights for another grid of patches, resized in two dimensions; and in another form.

Legend: h w rows and columns of patches, S sequence length, D width.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import Architecture
from vit_jax.positions import fixed_positions

PositionResize = Literal["corners", "bilinear", "bicubic", "lanczos3"]
"""corners: bilinear between samples whose corners stay corners, as the released code does (scipy's order-1 zoom).
The others see samples as the middles of cells, as image libraries and PyTorch ports do, and smooth when they shrink."""


def resize_grid(table_hwD: np.ndarray, grid: tuple[int, int], method: str = "corners") -> np.ndarray:
    """Resizes a table of positions to another grid.

    Args:
      table_hwD: float32.
      grid: new rows and columns, at least 1 each.
      method: one of `PositionResize`.

    Returns:
      float32 (rows, columns, D); the very same numbers where the grid stays.

    Raises:
      ValueError: unknown method.
    """
    if method not in get_args(PositionResize):
        raise ValueError(
            f"Unknown way to resize positions {method!r}: use one of {', '.join(get_args(PositionResize))}."
        )
    if table_hwD.shape[:2] == tuple(grid):
        return table_hwD
    if method == "corners":
        rows, columns = (_corner_weights(old, new) for old, new in zip(table_hwD.shape[:2], grid, strict=True))
        resized = np.einsum("Hh,Ww,hwD->HWD", rows, columns, table_hwD.astype(np.float64), optimize=True)
        return resized.astype(np.float32)
    name = {"bilinear": "linear", "bicubic": "cubic"}.get(method, method)
    return np.asarray(jax.image.resize(jnp.asarray(table_hwD), (*grid, table_hwD.shape[2]), method=name))


def resize_rows(table_SD: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str) -> np.ndarray:
    """The same for a flat table in raster order, whose rows before the patches (a class token's) stay as they are.

    Args:
      table_SD: float32, as many rows as the old grid has cells, or one more at the front.
      old: rows and columns of its grid.
      new: of the grid wanted.
      method: one of `PositionResize`.
    """
    first = len(table_SD) - old[0] * old[1]
    resized = resize_grid(table_SD[first:].reshape(*old, -1), new, method)
    return np.concatenate([table_SD[:first], resized.reshape(new[0] * new[1], -1)])


def position_table(a: Architecture, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a network adds to its tokens, in one table.

    Args:
      a: a network whose positions are fixed, or learned by row and column.
      parameters: by name; needed for the latter only.

    Returns:
      float32 (1, S, D), the very numbers that the model computes.
    """
    if a.position_embedding != "learned_2d":
        return fixed_positions(a.position_embedding, a.grid, a.width, has_class_token=a.pool == "token")
    half = (*a.grid, a.width // 2)
    columns_hwD = np.broadcast_to(parameters["positions/column_table"], half)
    rows_hwD = np.broadcast_to(parameters["positions/row_table"][:, None], half)
    table_ND = np.concatenate([columns_hwD, rows_hwD], axis=-1).reshape(-1, a.width)
    first_1D = [parameters["positions/class_row"]] if a.pool == "token" else []
    return np.concatenate([*first_1D, table_ND])[None]


def _corner_weights(old: int, new: int) -> np.ndarray:
    """(new, old): each new sample's weights on the old ones; the first and the last keep their places."""
    places = np.linspace(0.0, old - 1.0, new) if new > 1 else np.zeros(1)
    return np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(old)[None]))
