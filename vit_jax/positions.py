"""Position embeddings in numbers: fixed ones, which files of other programs hold as a learned table, and offsets.

Legend: S sequence length, D width.
"""

import numpy as np


def fixed_positions(kind: str, grid: tuple[int, int], width: int, *, has_class_token: bool) -> np.ndarray:
    """One row for each token.

    Args:
      kind: "sincos2d" or "none".
      grid: rows and columns of patches.
      width: D.
      has_class_token: it comes first, and nothing is added to it.

    Returns:
      float32 (1, S, D).
    """
    table = sincos2d(grid, width) if kind == "sincos2d" else np.zeros((grid[0] * grid[1], width), np.float32)
    return np.pad(table, ((int(has_class_token), 0), (0, 0)))[None]


def sincos2d(grid: tuple[int, int], width: int) -> np.ndarray:
    """Fixed two-dimensional positions in MoCo v3's form.

    Args:
      grid: rows and columns of patches.
      width: divisible by 4; a quarter each for sin(x w), cos(x w), sin(y w), cos(y w).

    Returns:
      float32 (rows * columns, width); frequencies w fall from 1 to exactly 1/10000.
    """
    quarter = width // 4
    frequencies = 10000.0 ** (-np.arange(quarter) / max(quarter - 1, 1))
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    x_angles = columns.reshape(-1, 1) * frequencies
    y_angles = rows.reshape(-1, 1) * frequencies
    parts = [np.sin(x_angles), np.cos(x_angles), np.sin(y_angles), np.cos(y_angles)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def offset_places(num_patches: int, *, has_class_token: bool) -> np.ndarray:
    """Where in a table of relative positions the offset between two tokens is.

    The table begins with the offsets 1 - N to N - 1 of a query from a key in raster order; with a class token, that as
    a query, as a key, and as both follow.

    Returns:
      int (S, S), queries by keys.
    """
    order = np.arange(num_patches)
    places = order[:, None] - order + num_patches - 1
    if has_class_token:
        places = np.pad(places, ((1, 0), (1, 0)))
        places[0, :], places[:, 0] = 2 * num_patches - 1, 2 * num_patches
        places[0, 0] += 1
    return places
