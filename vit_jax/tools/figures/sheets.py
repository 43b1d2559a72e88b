"""Sheets of images, and maps laid over them."""

import math
import textwrap
from collections.abc import Sequence

import cv2
import numpy as np

from vit_jax.tools.figures.drawing import TILE_PIXELS, new_figure, to_bytes

INCHES = 0.9  # of a cell of a sheet
LEAST_INCHES = 4.5
MOST_INCHES = 7.5  # of a sheet, and of other figures
LETTERS_PER_INCH = 14  # of a title


def draw_sheet(
    cells: Sequence[Sequence[np.ndarray]],
    title: str,
    *,
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
) -> bytes:
    """Return a PNG of images in rows: (H, W, 3), or maps (h, w) from dark, 0, to bright, the largest of the map."""
    rows = len(cells)
    columns = max(map(len, cells))
    width = max(INCHES * columns + 0.2, LEAST_INCHES)
    side = width / columns
    heights = [max(cell.shape[0] / cell.shape[1] for cell in row) for row in cells]
    lines = max((caption.count("\n") + 1 for row in captions for caption in row), default=0)
    headings = (0.1 + 0.1 * lines if captions else 0.05) * rows + 0.4 + (0.2 if column_names else 0)
    figure = new_figure(width, side * sum(heights) + headings)
    figure.suptitle(textwrap.fill(title, int(width * LETTERS_PER_INCH)), fontsize=9)
    every = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for axes in every.ravel():
        axes.set(xticks=[], yticks=[], frame_on=False)
    for row, (images, line) in enumerate(zip(cells, every, strict=True)):
        for column, (image, axes) in enumerate(zip(images, line, strict=False)):
            axes.imshow(image, cmap="cividis", vmin=0, interpolation="nearest")
            if captions:
                axes.set_title(captions[row][column], fontsize=7, pad=2)
    for axes, name in zip(every[:, 0], row_names, strict=False):
        axes.set_ylabel(name, fontsize=8)
    for axes, name in zip(every[0], column_names, strict=False):
        axes.set_title(name, fontsize=8)
    return to_bytes(figure)


def montage(tiles: np.ndarray, fill: float, gap: int = 1) -> np.ndarray:
    """Return tiles (rows, columns, h, w, ...) as one array (H, W, ...) with `fill` between them."""
    rows, columns, height, width, *rest = tiles.shape
    padded = np.pad(
        tiles, [(0, 0), (0, 0), (0, gap), (0, gap), *[(0, 0)] * len(rest)], constant_values=fill
    )
    joined = padded.swapaxes(1, 2).reshape(rows * (height + gap), columns * (width + gap), *rest)
    return joined[:-gap, :-gap]


def in_rows(tiles: np.ndarray, fill: float) -> np.ndarray:
    """Return tiles (count, ...) as (rows, columns, ...), wider than high; the last ones may be `fill`."""
    columns = math.ceil(math.sqrt(1.75 * len(tiles)))
    missing = -len(tiles) % columns
    padded = np.concatenate([tiles, np.full((missing, *tiles.shape[1:]), fill, tiles.dtype)])
    return padded.reshape(-1, columns, *tiles.shape[1:])


def full_range(tile: np.ndarray) -> np.ndarray:
    """Scale the smallest number to 0 and the largest to 1."""
    low = tile.min()
    high = tile.max()
    return (tile - low) / (high - low if high > low else 1)


def large(image_HWC: np.ndarray) -> tuple[np.ndarray, int]:
    """Repeat the pixels of a small image, so that maps over it are smooth; return the image and the factor."""
    times = max(1, TILE_PIXELS // max(image_HWC.shape[:2]))
    return image_HWC.repeat(times, axis=0).repeat(times, axis=1), times


def smooth(map_hw: np.ndarray, cell: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """Return a map of patches at the resolution of the image, from 0 to 1, float32 (H, W).

    As the authors of ViT drew it: enlarged by Lanczos, blurred by about a patch, and scaled to the
    full range. What no patch covers, at the bottom and on the right, repeats the last values.

    Args:
      map_hw: not negative.
      cell: height and width of a patch in pixels.
      size: of the image in pixels.
    """
    (rows, columns), (height, width) = map_hw.shape, cell
    if map_hw.max() <= 0 or np.ptp(map_hw) < 1e-6 * map_hw.max():
        return np.full(size, float(map_hw.max() > 0), np.float32)
    scaled = (map_hw / map_hw.max()).astype(np.float32)
    enlarged = cv2.resize(
        scaled, (columns * width, rows * height), interpolation=cv2.INTER_LANCZOS4
    )
    blurred = cv2.GaussianBlur(enlarged, (0, 0), sigmaX=width / 2, sigmaY=height / 2)
    missing = [(0, max(0, pixels - have)) for pixels, have in zip(size, blurred.shape, strict=True)]
    return full_range(np.pad(blurred, missing, mode="edge")[: size[0], : size[1]])


def lit(image_HWC: np.ndarray, map_hw: np.ndarray, cell: tuple[int, int]) -> np.ndarray:
    """Return the image, dark where the map is low; uint8."""
    shown, times = large(image_HWC)
    mask_HW = smooth(map_hw, (cell[0] * times, cell[1] * times), shown.shape[:2])
    return (shown * mask_HW[..., None]).astype(np.uint8)
