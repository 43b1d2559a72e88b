"""Decode and resize images by OpenCV, uint8 (H, W, 3) in RGB."""

from collections.abc import Callable

import cv2
import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data.crops import Box, cut, restore_channel
from vit_jax.data.decoding import jpeg, rasters
from vit_jax.data.decoding.bands import BandChoice, apply_by_channels
from vit_jax.data.decoding.depth import (
    ValueRange,
    contradicts,
    decode_values,
    map_values,
    read_file_depth,
)
from vit_jax.data.decoding.errors import UnreadableImage
from vit_jax.data.decoding.headers import (
    MAX_JPEG_SCANS,
    TIFF_STARTS,
    count_jpeg_scans,
    count_stated_pixels,
    find_jpeg_segments,
    find_unsupported_process,
    read_jpeg_frame,
)
from vit_jax.data.decoding.orientation import is_transposed, read_orientation, turn, turn_back

# Parallelism comes from grain's threads and processes, with which OpenCV's threads would compete.
cv2.setNumThreads(0)
# OpenCV would log unreadable files, which are counted and named elsewhere.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

RANGE_OPTION = "--config.input.value_range"
"""The option of recipes that maps values of more than 8 bits to 0 to 255."""

# By default an orientation is ignored, as by TensorFlow and the published data sets: annotations
# refer to stored pixels. With `exif_orientation`, the module `orientation` reads it, for all
# formats and for crops.

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "BigTIFF"),
    (b"MM\0+", "BigTIFF"),
    (b"RIFF", "WebP"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"P1", "PBM"),
    (b"P2", "PGM"),
    (b"P3", "PPM"),
    (b"P4", "PBM"),
    (b"P5", "PGM"),
    (b"P6", "PPM"),
    (b"P7", "PAM"),
)
_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"hei", b"hev", b"mif", b"msf")
_SAVE_DEEP = "save it with integers of 16 bits or floating point of 32, grey or RGB"
_MARKUP = (b"<!doctype", b"<html", b"<?xml", b"<svg", b"<head", b"<!--")

_JPEG_START = b"\xff\xd8"
_JPEG_ADOBE = 0xEE


def decode(
    image: bytes | np.ndarray,
    max_image_megapixels: float = InputConfig.max_image_megapixels,
    exif_orientation: bool = False,
    value_range: ValueRange | None = None,
    bands: BandChoice | None = None,
) -> np.ndarray:
    """Decode a file or complete an array to three channels, or to the chosen bands.

    Args:
      image: an encoded file, or uint8 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), whose alpha is
        dropped.
      max_image_megapixels: a file whose header states more is not decoded.
      exif_orientation: turn the image upright by its Exif data.
      value_range: values of a file of more than 8 bits that become 0 and 255, in place of the range
        that the file states.
      bands: bands to return as stored, in place of RGB; arrays have (H, W) or (H, W, bands) then.

    Returns:
      uint8 (H, W, 3), RGB; or uint8, uint16 or float32 (H, W, C) of `bands`. Of RGB, values of more
      than 8 bits are mapped from `value_range` or the range that the file states (see `depth`); else
      16 bits lose their low 8 (of a TIFF in colour they are rounded). Of an animation or several
      pages this is the first. CMYK becomes RGB by (1 - ink) x (1 - black), without colour profiles.
      Alpha and any other fourth band are dropped; stored colours are unchanged. Of two bands, the
      first is grey and the second is dropped.

    Raises:
      UnreadableImage: the bytes cannot be decoded, are too large, have five or more bands, lack a
        range of values, or their colours are ambiguous; the message says which.
      WrongBands: the image does not have these bands.
    """
    if isinstance(image, np.ndarray) and bands is not None:
        return bands.select(image)
    if isinstance(image, np.ndarray):
        return _convert_to_rgb(image)
    stated = count_stated_pixels(image)
    _require_size(stated, max_image_megapixels)
    _require_few_scans(image)
    if not stated:
        raise UnreadableImage(_explain_unreadable(image))
    try:
        if bands is not None:
            pixels = bands.decode(image)
        else:
            pixels = _decode_pixels(image, value_range)
    except cv2.error as error:  # larger than OpenCV's limit of 2**30 pixels
        raise UnreadableImage(f"{_explain_unreadable(image)}: {error.err}") from error
    if pixels is None:
        raise UnreadableImage(_explain_unreadable(image))
    if _has_unmarked_inks(image):
        raise UnreadableImage(
            "The file is a CMYK JPEG without Adobe's marker: colours may be inverted: save as RGB",
        )
    if exif_orientation:
        return turn(pixels, read_orientation(image))
    return pixels


def plan_crop(
    image: bytes | np.ndarray,
    choose: Callable[[int, int], Box],
    size: tuple[int, int],
    max_image_megapixels: float = InputConfig.max_image_megapixels,
    exif_orientation: bool = False,
    value_range: ValueRange | None = None,
    bands: BandChoice | None = None,
) -> Callable[[], np.ndarray]:
    """Choose a part of an image; decode little more than that part of a JPEG.

    Args:
      image: see `decode`.
      choose: returns the part for a height and width; called once, at once for a JPEG, else by the
        returned function.
      size: height and width that the caller wants. A JPEG may be decoded at a half, a quarter or an
        eighth of its size, averaged, if the part is still as large as this.
      max_image_megapixels: see `decode`.
      exif_orientation: see `decode`; `choose` takes the sides of the upright image.
      value_range: see `decode`.
      bands: see `decode`; the complete file is decoded then.

    Returns:
      A function that decodes the part to uint8 (H, W, 3), RGB, or as `decode` with `bands`.

    Raises:
      UnreadableImage: see `decode`; here or in the returned function; damage outside the part
        may stay unnoticed.
    """

    def decode_and_cut() -> np.ndarray:
        pixels = decode(image, max_image_megapixels, exif_orientation, value_range, bands)
        return cut(pixels, choose(*pixels.shape[:2]))

    if isinstance(image, np.ndarray) or bands is not None:
        return decode_and_cut
    layout = jpeg.find_layout(image)
    if layout is None:
        return decode_and_cut

    _require_size(layout.height * layout.width, max_image_megapixels)
    _require_few_scans(image)

    orientation = read_orientation(image) if exif_orientation else 1
    height = layout.height
    width = layout.width
    if is_transposed(orientation):
        height = layout.width
        width = layout.height
        size = (size[1], size[0])
    box = turn_back(choose(height, width), orientation, height, width)
    decode_part = jpeg.plan_crop(image, layout, box, size)

    def decode_or_explain() -> np.ndarray:
        part = decode_part()
        if part is None:
            part = cut(decode(image, max_image_megapixels), box)
        return turn(part, orientation)

    return decode_or_explain


def _decode_pixels(file: bytes, value_range: ValueRange | None) -> np.ndarray | None:
    if file.startswith(TIFF_STARTS):
        return _decode_tiff(file, value_range)
    mapped = _map_deep_values(file, value_range)
    if mapped is not None:
        return mapped
    return rasters.decode_colours(file)


def _decode_tiff(file: bytes, value_range: ValueRange | None) -> np.ndarray:
    from vit_jax.data.decoding import tiff

    # A layout that is not supported is reported before a range that is missing.
    tiff.read_layout(file)
    mapped = _map_deep_values(file, value_range)
    if mapped is not None:
        return mapped
    return _convert_to_rgb(tiff.decode_page(file))


def _map_deep_values(file: bytes, value_range: ValueRange | None) -> np.ndarray | None:
    """Return the pixels by a range of values; None for 8 bits, and for all 16 bits."""
    depth = read_file_depth(file)
    if depth is None:
        return None
    chosen = depth.choose_range(value_range)
    if chosen is None and depth.needs_range:
        kind = f"values of {depth.bits} bits"
        if depth.is_float:
            kind = "floating-point values"
        raise UnreadableImage(
            f"The file has {kind} and states no range: give the values that are black and white, "
            "--config.input.value_range=0,1 (verbs that load weights: --images.value_range=0,1)",
        )
    if chosen is None:
        return None

    values = decode_values(file, depth)
    if values is None:
        reason = _explain_unreadable(file)
        raise UnreadableImage(f"{reason}, or has values that cannot be decoded: {_SAVE_DEEP}")
    if chosen == depth.stated and contradicts(values, depth):
        return None
    return _convert_to_rgb(map_values(values, depth, chosen))


def _require_size(stated: int, max_image_megapixels: float) -> None:
    if stated > max_image_megapixels * 1e6:
        raise UnreadableImage(
            f"The file states {stated / 1e6:,.0f} megapixels, and max_image_megapixels is "
            f"{max_image_megapixels:g}: save it smaller, or raise the limit",
        )


def _require_few_scans(file: bytes) -> None:
    scans = count_jpeg_scans(file)
    if scans > MAX_JPEG_SCANS:
        raise UnreadableImage(
            f"The file is a JPEG of {scans:,} scans, and at most {MAX_JPEG_SCANS} are decoded: "
            "save it again",
        )


def _convert_to_rgb(pixels: np.ndarray) -> np.ndarray:
    has_known_bands = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if pixels.dtype != np.uint8 or not has_known_bands:
        raise ValueError(
            f"An image array is {pixels.dtype} {pixels.shape}; "
            "give uint8 (H, W) or (H, W, 1, 3 or 4), or read the values as stored: "
            "--config.input.channels=N (for 3 channels also --config.input.bands=1,2,3).",
        )
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_GRAY2RGB)
    return np.ascontiguousarray(pixels[..., :3])


def _explain_unreadable(file: bytes) -> str:
    """Return the reason why a file cannot be decoded."""
    if not file:
        return "The file is empty"

    size = f"{len(file)} bytes"
    text = file[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.lower().startswith(_MARKUP):
        return f"The file is a page of markup (HTML, XML or SVG, {size}), no image of pixels"

    process = find_unsupported_process(file)
    if process is not None:
        return (
            f"The file is a JPEG {process}, which cannot be decoded: "
            "save it with 8 bits, as baseline or progressive"
        )

    name = _name_format(file)
    if name is None:
        return f"The file is of no known image format ({size})"
    if name == "HEIC":
        return "The file is HEIC, which is not decoded: convert it to JPEG or PNG"
    return f"The file starts as {name} but is cut off, damaged or of an unknown kind ({size})"


def _name_format(file: bytes) -> str | None:
    if file[4:8] == b"ftyp":
        if file[8:11] in _HEIC_BRANDS:
            return "HEIC"
        if file[8:12] in _AVIF_BRANDS:
            return "AVIF"
        return None

    for start, name in _SIGNATURES:
        if file.startswith(start):
            return name
    return None


def _has_unmarked_inks(file: bytes) -> bool:
    """Return True for a CMYK JPEG without the marker of Adobe.

    The marker states that inks are stored inverted. Without it decoders disagree: to TensorFlow 0
    means no ink, to PIL and OpenCV full ink.
    """
    if not file.startswith(_JPEG_START) or read_jpeg_frame(file)[2] != 4:
        return False
    for marker, place in find_jpeg_segments(file):
        if marker == _JPEG_ADOBE and file.startswith(b"Adobe", place):
            return False
    return True


def resize_bilinear(
    image: np.ndarray,
    size: tuple[int, int],
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Resize to `size` (height, width), bilinear without antialiasing, as TF's `resize`.

    Samples are at the centres of pixels. The result may be `out`, an array of this size, or the
    image itself.
    """
    if image.shape[:2] == tuple(size):
        return image
    resized = cv2.resize(image, (size[1], size[0]), dst=out, interpolation=cv2.INTER_LINEAR)
    return restore_channel(resized)


def resize_to_cover(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize to the smallest image of the same shape that covers `size` (height, width).

    Each new pixel is the average over its area, also where it is smaller than an old one: TF's
    "area".
    """
    height, width = image.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    new_height = max(size[0], round(height * scale))
    new_width = max(size[1], round(width * scale))
    if new_height > height or new_width > width:
        wider = _enlarge(image, new_width, axis=1)
        enlarged = _enlarge(wider, new_height, axis=0)
        if image.dtype == np.uint8:
            return np.rint(enlarged).astype(np.uint8)
        return enlarged

    def average(pixels: np.ndarray) -> np.ndarray:
        return cv2.resize(pixels, (new_width, new_height), interpolation=cv2.INTER_AREA)

    return apply_by_channels(average, image)


def _enlarge(image: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Average over areas along one side, each of which lies in one old pixel or in two.

    Borders are whole numbers: cv2's INTER_AREA takes a neighbour's value where the border of an
    area rounds across the border of a pixel.
    """
    old = image.shape[axis]
    place = np.arange(size)
    first = place * old // size
    share = np.maximum((place + 1) * old - (first + 1) * size, 0) / old  # the share of the second
    share = np.expand_dims(share.astype(np.float32), tuple({0, 1, 2} - {axis}))
    pixels = image.astype(np.float32, copy=False)
    before = pixels.take(first, axis)
    after = pixels.take(np.minimum(first + 1, old - 1), axis)
    after -= before
    after *= share
    after += before
    return after


def crop_centre(image: np.ndarray, size: tuple[int, int], to_even: bool = False) -> np.ndarray:
    """Return the middle of an image that is at least `size` (height, width).

    Half of an odd difference is rounded down, as in Hugging Face, or to an even number, as in
    torchvision and timm.
    """
    height, width = size
    top = _halve(image.shape[0] - height, to_even)
    left = _halve(image.shape[1] - width, to_even)
    return image[top : top + height, left : left + width]


def _halve(pixels: int, to_even: bool) -> int:
    if to_even:
        return round(pixels / 2)
    return pixels // 2
