"""Sheets of images, and maps laid over them."""

import math
import textwrap
from collections.abc import Sequence

import cv2
import numpy as np

from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.tools.figures.drawing import TILE_PIXELS, new_figure, to_bytes

CELL_INCHES = 0.9  # width of an image
LEAST_INCHES = 4.5  # width of a sheet
MOST_INCHES = 7.5  # width of a sheet, and of other figures
LETTERS_PER_INCH = 14  # letters of a title


def draw_sheet(
    cells: Sequence[Sequence[np.ndarray] | np.ndarray],
    title: str,
    *,
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
) -> bytes:
    """Return a PNG of images in rows.

    Args:
      cells: rows of images (H, W, 3), or of maps (h, w), which are drawn from dark, 0, to bright,
        the largest number of the map.
      title: is broken into lines.
      row_names: to the left of the first rows.
      column_names: above the first columns.
      captions: above the images, as many as `cells`.
    """
    num_rows = len(cells)
    num_columns = max(map(len, cells))
    width = max(CELL_INCHES * num_columns + 0.2, LEAST_INCHES)
    row_heights = [max(map(_aspect_ratio, row)) for row in cells]  # relative to the width
    column_width = width / num_columns
    images_height = column_width * sum(row_heights)
    captions_height = _caption_inches(captions) * num_rows
    title_height = 0.6 if column_names else 0.4

    figure = new_figure(width, title_height + images_height + captions_height)
    lines = textwrap.fill(title, int(width * LETTERS_PER_INCH))
    figure.suptitle(lines, fontsize=9)
    all_axes = figure.subplots(
        num_rows,
        num_columns,
        squeeze=False,
        height_ratios=row_heights,
    )
    for axes in all_axes.ravel():
        axes.set(xticks=[], yticks=[], frame_on=False)

    for row_axes, images in zip(all_axes, cells, strict=True):
        for axes, image in zip(row_axes, images, strict=False):
            axes.imshow(
                image,
                cmap="cividis",
                vmin=0,
                interpolation="nearest",
            )

    for row_axes, row_captions in zip(all_axes, captions, strict=False):
        for axes, caption in zip(row_axes, row_captions, strict=False):
            axes.set_title(caption, fontsize=7, pad=2)

    first_column = all_axes[:, 0]
    for axes, name in zip(first_column, row_names, strict=False):
        axes.set_ylabel(name, fontsize=8)

    first_row = all_axes[0]
    for axes, name in zip(first_row, column_names, strict=False):
        axes.set_title(name, fontsize=8)
    return to_bytes(figure)


def _aspect_ratio(image: np.ndarray) -> float:
    """Return height over width."""
    height, width = image.shape[:2]
    return height / width


def _caption_inches(captions: Sequence[Sequence[str]]) -> float:
    """Return the height of the captions of a row, or of the gap between rows without captions."""
    if not captions:
        return 0.05
    num_lines = 0
    for row in captions:
        for caption in row:
            num_breaks = caption.count("\n")
            num_lines = max(num_lines, num_breaks + 1)
    return 0.1 + 0.1 * num_lines


def join_tiles(tiles: np.ndarray, fill: float, gap: int = 1) -> np.ndarray:
    """Return tiles (rows, columns, h, w, ...) as one array (H, W, ...) with `fill` between them."""
    rows, columns, height, width, *rest = tiles.shape
    joined_height = rows * (height + gap)
    joined_width = columns * (width + gap)
    joined = np.full((joined_height, joined_width, *rest), fill, tiles.dtype)
    for row, column in np.ndindex(rows, columns):
        top = row * (height + gap)
        left = column * (width + gap)
        joined[top : top + height, left : left + width] = tiles[row, column]
    return joined[:-gap, :-gap]  # without the gaps after the last row and column


def arrange_in_rows(tiles: np.ndarray, fill: float) -> np.ndarray:
    """Return tiles (count, ...) as (rows, columns, ...), wider than high.

    Missing tiles at the end have the value `fill`.
    """
    columns = math.ceil(math.sqrt(1.75 * len(tiles)))
    num_missing = -len(tiles) % columns
    tile_shape = tiles.shape[1:]
    missing = np.full((num_missing, *tile_shape), fill, tiles.dtype)
    complete = np.concatenate([tiles, missing])
    return complete.reshape(-1, columns, *tile_shape)


def scale_to_full_range(values: np.ndarray) -> np.ndarray:
    """Scale the smallest number to 0 and the largest to 1; equal numbers become 0."""
    shifted = values - values.min()
    span = shifted.max()
    return shifted / (span if span > 0 else 1)


def enlarge(image_HWC: np.ndarray) -> tuple[np.ndarray, int]:
    """Repeat the pixels of a small image, so that maps over it are smooth.

    Returns:
      the image, and the number of times that each pixel is repeated along a side.
    """
    longer_side = max(image_HWC.shape[:2])
    times = max(1, TILE_PIXELS // longer_side)
    enlarged = image_HWC.repeat(times, axis=0).repeat(times, axis=1)
    return enlarged, times


def limit_outliers(map_hw: np.ndarray) -> np.ndarray:
    """Return the map (h, w) with at most twice its 99th percentile.

    A ViT without registers can give one patch ten times the attention of all others (Darcet et al.,
    2023), which would be all that a figure shows.
    """
    most = 2 * np.percentile(map_hw, 99)
    return np.minimum(map_hw, most)


def smooth(
    map_hw: np.ndarray,
    cell: tuple[int, int],
    size: tuple[int, int],
) -> np.ndarray:
    """Return a map of patches at the resolution of the image, from 0 to 1, float32 (H, W).

    As the authors of ViT drew it: enlarged by Lanczos, blurred by about a patch, and scaled to the
    full range. Pixels that no patch covers, at the bottom and on the right, repeat the last values.

    Args:
      map_hw: not negative.
      cell: height and width of a patch in pixels.
      size: height and width of the image in pixels.
    """
    largest = map_hw.max()
    if largest <= 0:
        return np.zeros(size, np.float32)
    if np.ptp(map_hw) < 1e-6 * largest:
        return np.ones(size, np.float32)

    rows, columns = map_hw.shape
    height, width = cell
    scaled = (map_hw / largest).astype(np.float32)
    map_width = columns * width
    map_height = rows * height
    enlarged = cv2.resize(
        scaled,
        (map_width, map_height),
        interpolation=cv2.INTER_LANCZOS4,
    )
    blurred = cv2.GaussianBlur(
        enlarged,
        (0, 0),  # the size of the kernel follows from the deviations
        sigmaX=width / 2,
        sigmaY=height / 2,
    )

    image_height, image_width = size
    missing_rows = max(0, image_height - map_height)
    missing_columns = max(0, image_width - map_width)
    padding = [(0, missing_rows), (0, missing_columns)]
    padded = np.pad(blurred, padding, mode="edge")
    return scale_to_full_range(padded[:image_height, :image_width])


def to_pixels(images_NHWC: np.ndarray) -> np.ndarray:
    """Return images as uint8 RGB (N, H, W, 3).

    Of bands these are the first three, or one in grey, each from its 1st to its 99th percentile.
    """
    if images_NHWC.dtype == np.uint8:
        return images_NHWC
    shown_NHWC = images_NHWC[..., :RGB_CHANNELS]
    low_C, high_C = np.percentile(shown_NHWC, (1, 99), axis=(0, 1, 2))
    span_C = np.maximum(high_C - low_C, 1e-6)
    shares_NHWC = np.clip((shown_NHWC - low_C) / span_C, 0, 1)
    pixels_NHWC = np.round(255 * shares_NHWC).astype(np.uint8)
    return select_colours(pixels_NHWC)


def select_colours(pixels_NHWC: np.ndarray) -> np.ndarray:
    """Return the first three channels as red, green and blue, (N, H, W, 3); one channel is grey."""
    num_channels = pixels_NHWC.shape[-1]
    if num_channels == 1:
        return np.repeat(pixels_NHWC, RGB_CHANNELS, axis=-1)
    if num_channels >= RGB_CHANNELS:
        return pixels_NHWC[..., :RGB_CHANNELS]

    map_shape = pixels_NHWC.shape[:-1]
    colours_NHWC = np.zeros((*map_shape, RGB_CHANNELS), pixels_NHWC.dtype)
    colours_NHWC[..., :num_channels] = pixels_NHWC
    return colours_NHWC


def highlight(
    image_HWC: np.ndarray,
    map_hw: np.ndarray,
    cell: tuple[int, int],
) -> np.ndarray:
    """Return the image, dark where the map is low; uint8.

    `cell` is the height and width of a patch in pixels of the image.
    """
    enlarged_HWC, times = enlarge(image_HWC)
    height, width = cell
    enlarged_cell = (height * times, width * times)
    mask_HW = smooth(map_hw, enlarged_cell, enlarged_HWC.shape[:2])
    darkened_HWC = enlarged_HWC * mask_HW[..., None]
    return darkened_HWC.astype(np.uint8)
