"""Learned positions on another grid of patches.

Legend: h w rows and columns of patches, S sequence length, D width, R rows of a table of offsets.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.weights.load_report import ArrayStatus

Grid = tuple[int, int]
"""Rows and columns of patches."""

EQUALS: dict[str, str] = {
    "corners": "as the released code",
    "bilinear": "antialiased, as PyTorch",
    "bicubic": "antialiased, as timm",
    "lanczos3": "antialiased",
    "huggingface": "as Hugging Face's ViT, CLIP, SigLIP and DINOv2",
    "dinov2": "as the original code of DINOv2",
}
"""The library whose numbers each method equals, for reports.

corners is bilinear between samples whose corners stay corners (scipy's order-1 zoom). The others
see samples as the middles of cells. huggingface and dinov2 are PyTorch's bicubic without
antialiasing.
"""


def resize_grid(
    table_hwD: np.ndarray,
    grid: Grid,
    method: str = "corners",
) -> np.ndarray:
    """Resize a table of positions to a grid by one of the methods of `EQUALS`.

    Return float32 (rows, columns, D). On the same grid the values are unchanged.
    """
    if method not in EQUALS:
        raise ValueError(f"position_resize={method!r}: use one of {', '.join(EQUALS)}.")

    old_rows, old_columns, width = table_hwD.shape
    rows, columns = grid
    if (old_rows, old_columns) == (rows, columns):
        return table_hwD

    if method in _WEIGHTS:
        compute_weights = _WEIGHTS[method]
        rows_Hh = compute_weights(old_rows, rows)
        columns_Ww = compute_weights(old_columns, columns)
        return _sum_weighted(table_hwD, rows_Hh, columns_Ww)

    jax_method = _JAX_METHODS.get(method, method)
    resized_HWD = jax.image.resize(
        jnp.asarray(table_hwD),
        (rows, columns, width),
        method=jax_method,
    )
    return np.asarray(resized_HWD)


_JAX_METHODS = {
    "bilinear": "linear",
    "bicubic": "cubic",
}


def _sum_weighted(
    table_hwD: np.ndarray,
    rows_Hh: np.ndarray,
    columns_Ww: np.ndarray,
) -> np.ndarray:
    """Return sums of the rows of a table, computed in float64: float32 (rows, columns, D)."""
    exact_hwD = table_hwD.astype(np.float64)
    sums_HWD = np.einsum(
        "Hh,Ww,hwD->HWD",
        rows_Hh,
        columns_Ww,
        exact_hwD,
        optimize=True,
    )
    return sums_HWD.astype(np.float32)


def _compute_linear_weights(coordinates: np.ndarray, old: int) -> np.ndarray:
    """Return weights (new, old) of samples at these coordinates; old ones are at 0, 1, ..."""
    distances = np.abs(coordinates[:, None] - np.arange(old))
    return np.maximum(0.0, 1.0 - distances)


def _compute_corner_weights(old: int, new: int) -> np.ndarray:
    """Return weights (new, old) of samples whose first and last keep their coordinates."""
    coordinates = np.linspace(0.0, old - 1.0, new)
    return _compute_linear_weights(coordinates, old)


def _compute_bicubic_weights(old: int, new: int, offset: float = 0.0) -> np.ndarray:
    """Return weights (new, old) of PyTorch's bicubic without antialiasing.

    Its slope is -0.75, and the border is repeated. DINOv2 adds an offset to `new` in the scale.
    """
    scale = old / (new + offset)
    centres = (np.arange(new) + 0.5) * scale - 0.5
    left = np.floor(centres).astype(int)
    neighbours = left[:, None] + np.arange(-1, 3)

    x = np.abs(centres[:, None] - neighbours)
    inner = (1.25 * x - 2.25) * x**2 + 1.0
    outer = ((3.75 - 0.75 * x) * x - 6.0) * x + 3.0
    values = np.where(x <= 1.0, inner, outer)

    weights = np.zeros((new, old))
    rows = np.arange(new)[:, None]
    columns = np.clip(neighbours, 0, old - 1)
    np.add.at(weights, (rows, columns), values)
    return weights


def crop_square(table_SD: np.ndarray, grid: Grid) -> np.ndarray:
    """Return positions for a grid from a table for a large square: float32 (rows * columns, D).

    C-RADIO resizes the square to the longer side of the grid, by PyTorch's bilinear without
    antialiasing (samples are middles of cells, the border is repeated), and takes the rows and
    columns at its top left corner.
    """
    rows, columns = grid
    longer = max(grid)
    side = math.isqrt(len(table_SD))

    scale = side / longer
    centres = (np.arange(longer) + 0.5) * scale - 0.5
    centres = np.clip(centres, 0, side - 1)
    weights = _compute_linear_weights(centres, side)

    square_hwD = table_SD.reshape(side, side, -1)
    cropped_HWD = _sum_weighted(square_hwD, weights[:rows], weights[:columns])
    return cropped_HWD.reshape(rows * columns, -1)


_WEIGHTS: dict[str, Callable[[int, int], np.ndarray]] = {
    "corners": _compute_corner_weights,
    "huggingface": _compute_bicubic_weights,
    "dinov2": functools.partial(_compute_bicubic_weights, offset=0.1),
}


def resize_rows(
    table_SD: np.ndarray,
    old: Grid,
    new: Grid,
    method: str,
) -> np.ndarray:
    """Resize a flat table in raster order.

    Rows before the patches, such as a class token's, stay unchanged.
    """
    old_rows, old_columns = old
    new_rows, new_columns = new
    num_patches = old_rows * old_columns
    num_prefix_rows = len(table_SD) - num_patches
    prefix_PD = table_SD[:num_prefix_rows]
    patches_SD = table_SD[num_prefix_rows:]

    grid_hwD = patches_SD.reshape(old_rows, old_columns, -1)
    resized_HWD = resize_grid(grid_hwD, new, method)
    resized_SD = resized_HWD.reshape(new_rows * new_columns, -1)
    return np.concatenate([prefix_PD, resized_SD])


def resize_offsets(
    table_Rh: np.ndarray,
    old: Grid,
    new: Grid,
    method: str,
) -> np.ndarray:
    """Resize relative positions: rows are offsets in raster order, then a class token's.

    The last ones stay unchanged. Offsets are resized as a grid of rows by columns. If several new
    offsets are one in raster order, it gets their mean, weighted by the number of pairs of patches.
    """
    row_hw = _find_offset_rows(old)
    new_row_HW = _find_offset_rows(new)
    offsets_hwh = table_Rh[row_hw]
    resized_HWh = resize_grid(offsets_hwh, new_row_HW.shape, method)

    pairs_HW = _count_pairs(new)
    weighted_HWh = pairs_HW[..., None] * resized_HWh.astype(np.float64)
    num_rows = new_row_HW.max() + 1
    num_heads = table_Rh.shape[1]
    sums_Rh = np.zeros((num_rows, num_heads))
    np.add.at(sums_Rh, new_row_HW, weighted_HWh)

    pairs_R = np.bincount(new_row_HW.ravel(), pairs_HW.ravel())
    means_Rh = sums_Rh / pairs_R[:, None]
    means_Rh = means_Rh.astype(np.float32)

    num_old_rows = row_hw.max() + 1
    class_token_rows = table_Rh[num_old_rows:]
    return np.concatenate([means_Rh, class_token_rows])


def _list_offsets(length: int) -> np.ndarray:
    """Return the offsets between two patches of a row of this length."""
    return np.arange(1 - length, length)


def _find_offset_rows(grid: Grid) -> np.ndarray:
    """Return for every offset by rows and columns its row in a table."""
    rows, columns = grid
    row_offsets = _list_offsets(rows)
    column_offsets = _list_offsets(columns)
    raster_offsets = np.add.outer(row_offsets * columns, column_offsets)
    return raster_offsets + rows * columns - 1


def _count_pairs(grid: Grid) -> np.ndarray:
    """Return for every offset by rows and columns the number of pairs of patches that have it."""
    rows, columns = grid
    row_pairs = rows - abs(_list_offsets(rows))
    column_pairs = columns - abs(_list_offsets(columns))
    return np.multiply.outer(row_pairs, column_pairs)


def resize_positions(
    parameters: Mapping[str, np.ndarray],
    old: Grid,
    new: Grid,
    method: str,
) -> tuple[dict[str, np.ndarray], list[ArrayStatus]]:
    """Resize every table of positions from one grid of patches (rows, columns) to another.

    `method` is one of `EQUALS`. Return all parameters, stacked and in the same order; and how each
    table was resized.
    """
    result = dict(parameters)
    statuses = []
    for name, array in parameters.items():
        match = _TABLE.fullmatch(name)
        if match is None:
            continue
        kind = match["attention_axis"] or match["table"]
        old_grid = _select_sides(kind, old)
        new_grid = _select_sides(kind, new)
        if old_grid == new_grid:
            continue

        result[name] = _resize(name, array, old_grid, new_grid, method)
        sizes = "{}x{} to {}x{}".format(*old_grid, *new_grid)
        how = f"resized from {sizes} ({method}, {EQUALS[method]})"
        statuses.append(ArrayStatus.describe(name, result[name], how))
    return result, statuses


_TABLE = re.compile(
    r"(?:encoder/blocks/)?(?:(?P<attention_axis>rows|columns)/)?(?:attention/)?"
    r"positions/(?P<table>table|row_table|column_table)"
)


def _select_sides(kind: str, grid: Grid) -> Grid:
    """Return the grid of a table of positions for patches of this grid.

    Tables of rows and of columns are grids one wide. Tables of attention along rows and along
    columns are grids one high.
    """
    rows, columns = grid
    if kind == "row_table":
        return rows, 1
    if kind == "column_table":
        return columns, 1
    if kind == "rows":
        return 1, columns
    if kind == "columns":
        return 1, rows
    return grid


def _resize(
    name: str,
    array: np.ndarray,
    old: Grid,
    new: Grid,
    method: str,
) -> np.ndarray:
    """Resize one parameter, by its name."""
    if name.startswith("encoder/blocks/"):
        rest = name.removeprefix("encoder/blocks/")
        layers = [_resize(rest, layer, old, new, method) for layer in array]
        return np.stack(layers)

    if "attention/" in name:
        return resize_offsets(array, old, new, method)
    if name.endswith("/table"):
        return resize_rows(array[0], old, new, method)[None]
    return resize_grid(array[:, None], new, method)[:, 0]
