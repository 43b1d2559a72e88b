"""Decode and resize images, uint8 (H, W, 3) in RGB: TIFF by `tiff`, other formats by OpenCV."""

from collections.abc import Callable

import cv2
import numpy as np

from vit_jax.config.schema import InputConfig
from vit_jax.data import jpeg, tiff
from vit_jax.data.crops import Box, cut
from vit_jax.data.depth import ValueRange, contradicts, decode_values, depth_of_file, map_values
from vit_jax.data.headers import TIFF_STARTS, jpeg_frame, jpeg_segments, stated_pixels
from vit_jax.data.orientation import is_transposed, orientation_of, turn, turn_back

# Parallelism comes from grain's threads and processes; threads of OpenCV's own would fight with them.
cv2.setNumThreads(0)
# It would log files that we count and name ourselves.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

# By default the orientation tag is ignored, as TensorFlow and the published data sets do: annotations refer to stored
# pixels. Where it is not, `orientation` reads it, alike for all formats and for crops.
_DECODE_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    *((start, "TIFF") for start in TIFF_STARTS),
    (b"RIFF", "WebP"),
)
_SAVE_DEEP = "save it with integers of 16 bits or floating point of 32, grey or RGB"
_MARKUP = (b"<!doctype", b"<html", b"<?xml", b"<svg", b"<head", b"<!--")

_JPEG_START, _JPEG_ADOBE = b"\xff\xd8", 0xEE


class UnreadableImage(ValueError):
    """A file cannot be opened or decoded; the message says why."""


def decode(
    image: bytes | np.ndarray,
    max_image_megapixels: float = InputConfig.max_image_megapixels,
    exif_orientation: bool = False,
    value_range: ValueRange | None = None,
) -> np.ndarray:
    """Decode a file or complete an array to three channels.

    Args:
      image: an encoded file, or uint8 (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), whose alpha is dropped.
      max_image_megapixels: a file whose header states more is not decoded.
      exif_orientation: turn it upright as its Exif data say.
      value_range: values of a file of more than 8 bits that become 0 and 255, whatever the file states.

    Returns:
      uint8 (H, W, 3), RGB. Values of more than 8 bits are mapped from `value_range` or the range that the file states
      (see `depth`); else 16 bits lose their low 8. Of an animation or several pages this is the first. CMYK becomes RGB
      by (1 - ink) x (1 - black), without colour profiles. Alpha, and the band after grey or RGB of a TIFF, are
      dropped; a GIF shows its background colour where it is transparent.

    Raises:
      UnreadableImage: the bytes cannot be decoded, are too large, lack a range of values, or their colours are
        ambiguous; the message says which.
    """
    if isinstance(image, np.ndarray):
        return _to_rgb(image)
    stated = stated_pixels(image)
    _require_size(stated, max_image_megapixels)
    try:
        pixels = _decode_pixels(image, value_range) if stated else None
    except cv2.error as error:  # larger than OpenCV's limit of 2**30 pixels
        raise UnreadableImage(f"{_explain_unreadable(image)}: {error.err}") from error
    except tiff.UndecodableTiff as error:
        raise UnreadableImage(str(error)) from error
    if pixels is None or _has_unmarked_inks(image):
        inks = "The file is a CMYK JPEG without Adobe's marker: colours may be inverted: save as RGB"
        raise UnreadableImage(_explain_unreadable(image) if pixels is None else inks)
    return turn(pixels, orientation_of(image)) if exif_orientation else pixels


def plan_crop(
    image: bytes | np.ndarray,
    choose: Callable[[int, int], Box],
    size: tuple[int, int],
    max_image_megapixels: float = InputConfig.max_image_megapixels,
    exif_orientation: bool = False,
    value_range: ValueRange | None = None,
) -> Callable[[], np.ndarray]:
    """Choose a part of a file or an array; of a JPEG, decode little more than that part.

    Args:
      image: as for `decode`.
      choose: returns the part for a height and width; called once, at once for a JPEG, else by the returned function.
      size: height and width that the caller wants. A JPEG may be decoded at a half, a quarter or an eighth of its size,
        averaged, if the part is still as large as this.
      max_image_megapixels: as for `decode`.
      exif_orientation: as for `decode`; `choose` takes the sides of the upright image.
      value_range: as for `decode`.

    Returns:
      A function that decodes the part to uint8 (H, W, 3), RGB.

    Raises:
      UnreadableImage: as for `decode`, here or in the returned function; damage outside the part may stay unnoticed.
    """

    def decode_and_cut() -> np.ndarray:
        pixels = decode(image, max_image_megapixels, exif_orientation, value_range)
        return cut(pixels, choose(*pixels.shape[:2]))

    if isinstance(image, np.ndarray) or (layout := jpeg.layout_of(image)) is None:
        return decode_and_cut
    _require_size(layout.height * layout.width, max_image_megapixels)
    orientation, height, width = orientation_of(image) if exif_orientation else 1, layout.height, layout.width
    if is_transposed(orientation):
        height, width, size = width, height, size[::-1]
    box = turn_back(choose(height, width), orientation, height, width)
    decode_part = jpeg.plan_crop(image, layout, box, size)

    def decode_or_explain() -> np.ndarray:
        part = decode_part()
        return turn(cut(decode(image, max_image_megapixels), box) if part is None else part, orientation)

    return decode_or_explain


def _decode_pixels(file: bytes, value_range: ValueRange | None) -> np.ndarray | None:
    depth = depth_of_file(file)
    chosen = None if depth is None else depth.range_of(value_range)
    if depth is not None and chosen is not None:
        values = decode_values(file, depth)
        if values is None:
            raise UnreadableImage(f"{_explain_unreadable(file)}, or has values that cannot be decoded: {_SAVE_DEEP}")
        if chosen != depth.stated or not contradicts(values, depth):
            return _to_rgb(map_values(values, depth, chosen))
    elif depth is not None and depth.needs_range:
        kind = "floating-point values" if depth.is_float else f"values of {depth.bits} bits"
        raise UnreadableImage(
            f"The file has {kind} and states no range: give the values that are black and white, "
            "--config.input.value_range=0,1 (verbs that load weights: --value_range=0,1)"
        )
    if file.startswith(TIFF_STARTS):
        return _to_rgb(tiff.decode_page(file))
    return cv2.imdecode(np.frombuffer(file, np.uint8), _DECODE_FLAGS)


def _require_size(stated: int, max_image_megapixels: float) -> None:
    if stated > max_image_megapixels * 1e6:
        raise UnreadableImage(
            f"The file states {stated / 1e6:,.0f} megapixels, and max_image_megapixels is {max_image_megapixels:g}: "
            "save it smaller, or raise the limit"
        )


def _to_rgb(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise ValueError(f"An image array is {pixels.dtype} {pixels.shape}; give uint8 (H, W) or (H, W, 1, 3 or 4).")
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_GRAY2RGB)
    return np.ascontiguousarray(pixels[..., :3])


def _explain_unreadable(file: bytes) -> str:
    """Return the reason why a file cannot be decoded."""
    if not file:
        return "The file is empty"
    if file[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_MARKUP):
        return f"The file is a page of markup (HTML, XML or SVG, {len(file)} bytes), no image of pixels"
    for signature, name in _SIGNATURES:
        if file.startswith(signature):
            return f"The file starts as {name} but is cut off, damaged or of an unknown kind ({len(file)} bytes)"
    return f"The file is of no known image format ({len(file)} bytes)"


def _has_unmarked_inks(file: bytes) -> bool:
    """Return True for a CMYK JPEG without Adobe's marker, which states that inks are stored inverted.

    Without it decoders disagree: to TensorFlow 0 means no ink, to PIL and OpenCV full ink.
    """
    if not file.startswith(_JPEG_START) or jpeg_frame(file)[2] != 4:
        return False
    return not any(marker == _JPEG_ADOBE and file.startswith(b"Adobe", at) for marker, at in jpeg_segments(file))


def resize_bilinear(image: np.ndarray, size: tuple[int, int], out: np.ndarray | None = None) -> np.ndarray:
    """Resize to `size` (height, width), bilinear without antialiasing, with samples at pixel centres: TF's `resize`.

    The result may be `out`, an array of this size, or the image itself.
    """
    if image.shape[:2] == tuple(size):
        return image
    return cv2.resize(image, (size[1], size[0]), dst=out, interpolation=cv2.INTER_LINEAR)


def resize_to_cover(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize to the smallest image of the same shape that covers `size` (height, width).

    Each new pixel is the average over its area, also where it is smaller than an old one: TF's "area".
    """
    height, width = image.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    new = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    if new[0] > height or new[1] > width:
        return np.rint(_enlarge(_enlarge(image, new[1], axis=1), new[0], axis=0)).astype(np.uint8)
    return cv2.resize(image, (new[1], new[0]), interpolation=cv2.INTER_AREA)


def _enlarge(image: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Average over areas along one side, each of which lies in one old pixel or in two.

    In whole numbers: cv2's INTER_AREA takes a neighbour's value where the border of an area rounds across a pixel's.
    """
    old, place = image.shape[axis], np.arange(size)
    first = place * old // size
    share = np.maximum((place + 1) * old - (first + 1) * size, 0) / old  # of the second
    share = np.expand_dims(share.astype(np.float32), tuple({0, 1, 2} - {axis}))
    pixels = image.astype(np.float32, copy=False)
    before, after = pixels.take(first, axis), pixels.take(np.minimum(first + 1, old - 1), axis)
    after -= before
    after *= share
    after += before
    return after


def central_crop(image: np.ndarray, size: tuple[int, int], to_even: bool = False) -> np.ndarray:
    """Return the middle of an image that is at least `size` (height, width).

    Half of an odd difference is rounded down, as in Hugging Face, or to an even number, as in torchvision and timm.
    """
    rest = image.shape[0] - size[0], image.shape[1] - size[1]
    top, left = (round(pixels / 2) if to_even else pixels // 2 for pixels in rest)
    return image[top : top + size[0], left : left + size[1]]
