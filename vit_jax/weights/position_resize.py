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

EQUALS: dict[str, str] = {
    "corners": "as the released code",
    "bilinear": "antialiased, as PyTorch",
    "bicubic": "antialiased, as timm",
    "lanczos3": "antialiased",
    "huggingface": "as Hugging Face's ViT, CLIP, SigLIP and DINOv2",
    "dinov2": "as the original code of DINOv2",
}
"""The library whose numbers each method equals, for reports.

corners is bilinear between samples whose corners stay corners (scipy's order-1 zoom). The others see samples as the
middles of cells. huggingface and dinov2 are PyTorch's bicubic without antialiasing.
"""


def resize_grid(
    table_hwD: np.ndarray, grid: tuple[int, int], method: str = "corners"
) -> np.ndarray:
    """Resize a table of positions to a grid, float32 (rows, columns, D), by one of the methods of `EQUALS`.

    On the same grid the values are unchanged.
    """
    if method not in EQUALS:
        raise ValueError(f"position_resize={method!r}: use one of {', '.join(EQUALS)}.")
    if table_hwD.shape[:2] == tuple(grid):
        return table_hwD
    if method in _WEIGHTS:
        return _weighted(table_hwD, *map(_WEIGHTS[method], table_hwD.shape[:2], grid))
    name = {"bilinear": "linear", "bicubic": "cubic"}.get(method, method)
    return np.asarray(
        jax.image.resize(jnp.asarray(table_hwD), (*grid, table_hwD.shape[2]), method=name)
    )


def _weighted(table_hwD: np.ndarray, rows_Hh: np.ndarray, columns_Ww: np.ndarray) -> np.ndarray:
    table_hwD = table_hwD.astype(np.float64)
    return np.einsum("Hh,Ww,hwD->HWD", rows_Hh, columns_Ww, table_hwD, optimize=True).astype(
        np.float32
    )


def _linear_weights(places: np.ndarray, old: int) -> np.ndarray:
    return np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(old)[None]))


def _corner_weights(old: int, new: int) -> np.ndarray:
    """Return weights (new, old) of samples whose first and last keep their places."""
    return _linear_weights(np.linspace(0.0, old - 1.0, new) if new > 1 else np.zeros(1), old)


def _bicubic_weights(old: int, new: int, offset: float = 0.0) -> np.ndarray:
    """Return weights (new, old) of PyTorch's bicubic without antialiasing: slope -0.75, the border is repeated.

    DINOv2 adds an offset to `new` in the scale.
    """
    centre = (np.arange(new) + 0.5) * (old / (new + offset)) - 0.5
    place = np.floor(centre).astype(int)[:, None] + np.arange(-1, 3)
    x = np.abs(centre[:, None] - place)
    inner = (1.25 * x - 2.25) * x**2 + 1.0
    outer = ((3.75 - 0.75 * x) * x - 6.0) * x + 3.0
    weights = np.zeros((new, old))
    np.add.at(
        weights,
        (np.arange(new)[:, None], np.clip(place, 0, old - 1)),
        np.where(x <= 1.0, inner, outer),
    )
    return weights


def crop_square(table_SD: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return positions for a grid from those of a large square, as C-RADIO does: float32 (rows * columns, D).

    The square is resized to the longer side of the grid, by PyTorch's bilinear without antialiasing
    (samples are middles of cells, the border is repeated). Then the rows and columns at its top
    left corner are taken.
    """
    side = math.isqrt(len(table_SD))
    longer = max(grid)
    centres = np.clip((np.arange(longer) + 0.5) * (side / longer) - 0.5, 0, side - 1)
    weights = _linear_weights(centres, side)
    cropped_hwD = _weighted(
        table_SD.reshape(side, side, -1), weights[: grid[0]], weights[: grid[1]]
    )
    return cropped_hwD.reshape(grid[0] * grid[1], -1)


_WEIGHTS: dict[str, Callable[[int, int], np.ndarray]] = {
    "corners": _corner_weights,
    "huggingface": _bicubic_weights,
    "dinov2": functools.partial(_bicubic_weights, offset=0.1),
}


def resize_rows(
    table_SD: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str
) -> np.ndarray:
    """Resize a flat table in raster order; rows before the patches, such as a class token's, stay unchanged."""
    first = len(table_SD) - old[0] * old[1]
    resized = resize_grid(table_SD[first:].reshape(*old, -1), new, method)
    return np.concatenate([table_SD[:first], resized.reshape(new[0] * new[1], -1)])


def resize_offsets(
    table_Rh: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str
) -> np.ndarray:
    """Resize relative positions: rows are offsets in raster order, then a class token's, which stay unchanged.

    Offsets are resized as a grid of rows by columns. If several new offsets are one in raster
    order, it gets their mean, weighted by the number of pairs of patches.
    """
    (places_hw, _), (new_places_HW, pairs_HW) = _offsets(old), _offsets(new)
    resized_HWh = resize_grid(table_Rh[places_hw], new_places_HW.shape, method)
    sums_Rh = np.zeros((new_places_HW.max() + 1, table_Rh.shape[1]))
    np.add.at(sums_Rh, new_places_HW, pairs_HW[..., None] * resized_HWh.astype(np.float64))
    means_Rh = sums_Rh / np.bincount(new_places_HW.ravel(), pairs_HW.ravel())[:, None]
    return np.concatenate([means_Rh.astype(np.float32), table_Rh[places_hw.max() + 1 :]])


def _offsets(grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return for every offset by rows and columns its row in a table, and the number of pairs of patches with it."""
    rows, columns = (np.arange(1 - length, length) for length in grid)
    pairs = np.multiply.outer(grid[0] - abs(rows), grid[1] - abs(columns))
    return np.add.outer(rows * grid[1], columns) + grid[0] * grid[1] - 1, pairs


def resize_positions(
    parameters: Mapping[str, np.ndarray], old: tuple[int, int], new: tuple[int, int], method: str
) -> tuple[dict[str, np.ndarray], list[ArrayStatus]]:
    """Resize every table of positions from one grid of patches (rows, columns) to another, by a method of `EQUALS`.

    Return all parameters, stacked and in the same order; and how each table was resized.
    """
    result = dict(parameters)
    statuses = []
    for name, array in parameters.items():
        grids = _grid_of(name, old), _grid_of(name, new)
        if grids[0] != grids[1]:
            result[name] = _resize(name, array, *grids, method)
            sizes = " to ".join(f"{rows}x{columns}" for rows, columns in grids)
            how = f"resized from {sizes} ({method}, {EQUALS[method]})"
            statuses.append(ArrayStatus.of(name, result[name], how))
    return result, statuses


_TABLE = re.compile(
    r"(?:encoder/blocks/)?(?:(rows|columns)/)?(?:attention/)?positions/(table|row_table|column_table)"
)


def _grid_of(name: str, grid: tuple[int, int]) -> tuple[int, int]:
    """Return the grid of a table of positions on patches of this grid; (0, 0) for any other parameter.

    Tables of rows and of columns are grids one wide, those of attention along rows and along
    columns one high.
    """
    rows, columns = grid
    one = {
        "row_table": (rows, 1),
        "column_table": (columns, 1),
        "rows": (1, columns),
        "columns": (1, rows),
    }
    match = _TABLE.fullmatch(name)
    return one.get(match[1] or match[2], grid) if match else (0, 0)


def _resize(
    name: str, array: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str
) -> np.ndarray:
    if name.startswith("encoder/blocks/"):
        rest = name.removeprefix("encoder/blocks/")
        return np.stack([_resize(rest, layer, old, new, method) for layer in array])
    if "attention/" in name:
        return resize_offsets(array, old, new, method)
    if name.endswith("/table"):
        return resize_rows(array[0], old, new, method)[None]
    return resize_grid(array[:, None], new, method)[:, 0]
