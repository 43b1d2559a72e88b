"""Position embeddings in numbers: fixed ones, which files of other programs hold as a learned table, and offsets.

Legend: S sequence length, D width.
"""

import numpy as np


def fixed_positions(
    kind: str,
    grid: tuple[int, int],
    width: int,
    *,
    prefix_length: int,
    reference_grid: tuple[int, int] | None = None,
) -> np.ndarray:
    """Return the table of "sincos2d" or "none", float32 (1, S, D).

    It has zeros for the `prefix_length` tokens before the patches; the other arguments are those of `sincos2d`.
    """
    table = (
        sincos2d(grid, width, reference_grid)
        if kind == "sincos2d"
        else np.zeros((grid[0] * grid[1], width), np.float32)
    )
    return np.pad(table, ((prefix_length, 0), (0, 0)))[None]


def sincos2d(
    grid: tuple[int, int], width: int, reference_grid: tuple[int, int] | None = None
) -> np.ndarray:
    """Return sine-cosine positions in MoCo v3's form, float32 (rows * columns, width).

    A quarter each of `width`, which 4 divides, is sin(x w), cos(x w), sin(y w), cos(y w); frequencies w fall from 1 to
    1/10000. The middles of patches are counted on `reference_grid`; None: `grid`.
    """
    quarter = width // 4
    frequencies = 10000.0 ** (-np.arange(quarter) / max(quarter - 1, 1))
    lengths = zip(grid, reference_grid or grid, strict=True)
    places = [
        np.arange(n) if n == counted else (np.arange(n) + 0.5) * counted / n - 0.5
        for n, counted in lengths
    ]
    rows, columns = np.meshgrid(*places, indexing="ij")
    x_angles = columns.reshape(-1, 1) * frequencies
    y_angles = rows.reshape(-1, 1) * frequencies
    quarters = [np.sin(x_angles), np.cos(x_angles), np.sin(y_angles), np.cos(y_angles)]
    return np.concatenate(quarters, axis=1).astype(np.float32)


def rotary_angles(
    kind: str,
    grid: tuple[int, int],
    head_dim: int,
    *,
    has_class_token: bool,
    reference_grid: tuple[int, int] | None = None,
) -> np.ndarray:
    """Return the angles that turn the pairs of a head's values, float32 (rows * columns, head_dim / 2).

    The first half is one coordinate times frequencies that fall geometrically from 1, the second half the other.

    Args:
      kind: "centred" has coordinates from -1 to 1, rows first, and frequencies 2 pi / 100**k (DINOv3); "grid" scales
        rows and columns to 16, rows first (EVA-02); "index" counts columns first, from 1 if there is a class token
        (Perception Encoder); both with 1 / 10000**k.
      grid: rows and columns of patches.
      head_dim: divisible by 4.
      has_class_token: the class token itself is not turned.
      reference_grid: rows and columns that "index" is scaled to; None: `grid`.
    """
    exponents = np.arange(head_dim // 4) * 4 / head_dim
    frequencies = 2 * np.pi * 100.0**-exponents if kind == "centred" else 10000.0**-exponents
    indices = [np.arange(length, dtype=np.float64) for length in grid]
    if kind == "centred":
        sides = [2 * (index + 0.5) / len(index) - 1 for index in indices]
    elif kind == "grid":
        sides = [index * 16 / len(index) for index in indices]
    else:
        lengths = reference_grid or grid
        sides = [
            (i + int(has_class_token)) * (n / len(i)) for i, n in zip(indices, lengths, strict=True)
        ]
    rows, columns = (side.ravel() for side in np.meshgrid(*sides, indexing="ij"))
    first, second = (columns, rows) if kind == "index" else (rows, columns)
    return np.concatenate(
        [np.outer(first, frequencies), np.outer(second, frequencies)], axis=1
    ).astype(np.float32)


def offset_places(num_patches: int, *, has_class_token: bool) -> np.ndarray:
    """Return int (S, S), queries by keys: indices of the offsets between tokens in a table of relative positions.

    The table has the offsets 1 - N to N - 1 of a query from a key in raster order; with a class token, that as a query,
    as a key, and as both follow.
    """
    order = np.arange(num_patches)
    places = order[:, None] - order + num_patches - 1
    if has_class_token:
        places = np.pad(places, ((1, 0), (1, 0)))
        places[0, :] = 2 * num_patches - 1
        places[:, 0] = 2 * num_patches
        places[0, 0] += 1
    return places
