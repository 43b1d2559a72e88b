"""Decode a page of a TIFF: its stored values, or uint8 in RGB.

tifffile and imagecodecs decode strips and tiles. They never see the directory of the file: this
module reads the few tags that matter, within limits, and describes the page to tifffile in a
new directory. The file may be hostile.
"""

import contextlib
import enum
import io
import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
import tifffile

from vit_jax.data.decoding.errors import UnreadableImage
from vit_jax.data.decoding.headers import (
    MAX_JPEG_SCANS,
    Tag,
    count_jpeg_scans,
    count_stated_pixels,
    read_tiff_tags,
)

# It would log damage that the exceptions of this module name.
logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)

CHOOSE_BANDS = (
    "Read all with --config.input.channels=NUMBER, some with --config.input.channels=3 "
    "--config.input.bands=1,2,3 (any bands; on frozen features --images. in place of "
    "--config.input.), or choose them with: "
    "gdal_translate -b 1 -b 2 -b 3 FILE NEW_FILE"
)
MOST_BANDS = 4
"""Bands of an image that becomes RGB."""
MOST_STORED_BANDS = 256
"""Bands of an image whose values are read as stored."""

_WIDTH = 256
_HEIGHT = 257
_BITS = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_SAMPLES = 277
_STRIP_OFFSETS = 273
_STRIP_ROWS = 278
_STRIP_BYTES = 279
_PLANES = 284
_TILE_WIDTH = 322
_TILE_HEIGHT = 323
_TILE_OFFSETS = 324
_TILE_BYTES = 325
_COLOR_MAP = 320
_INK_SET = 332
_FORMAT = 339
_JPEG_TABLES = 347
_GDAL_NO_DATA = 42113
_PREDICTOR = 317
_YCBCR_SUBSAMPLING = 530
_IMAGE_DEPTH = 32997
_TILE_DEPTH = 32998
# Tags that tifffile needs unchanged: also fill order, options of CCITT, kinds of extra samples.
_TIFFFILE_TAGS = (
    266,
    292,
    293,
    338,
    _BITS,
    _FORMAT,
    _PLANES,
    _PREDICTOR,
    _SAMPLES,
    _STRIP_ROWS,
    _TILE_WIDTH,
    _TILE_HEIGHT,
    _YCBCR_SUBSAMPLING,
)
_SMALL_TAGS = frozenset(
    (
        *_TIFFFILE_TAGS,
        _WIDTH,
        _HEIGHT,
        _COMPRESSION,
        _PHOTOMETRIC,
        _INK_SET,
        _IMAGE_DEPTH,
        _TILE_DEPTH,
    )
)
_OFFSET_TAGS = (_STRIP_OFFSETS, _STRIP_BYTES, _TILE_OFFSETS, _TILE_BYTES)

DescribedPages = dict[bytes, tifffile.TiffPage]
"""Pages of tifffile by the directory that describes their encoding."""

_SPARE_PIXELS = 2**24
"""Pixels of strips or tiles beyond twice the pixels of the page: a tile may be larger than it."""
_LONGEST_NUMBER = 64
"""Number of bytes of a number in text: the least of float32 has 23, -3.4028234663852886e+38."""
_LARGEST_TABLES = 2**16
"""Number of bytes of JPEG tables."""

JPEGS = (7, 33007, 34892)
LERC = 34887
_LERC_START = b"Lerc2 "
_ZSTD_START = b"\x28\xb5\x2f\xfd"
COMPRESSIONS: Mapping[int, str] = {
    1: "none",
    2: "CCITT RLE",
    3: "CCITT group 3",
    4: "CCITT group 4",
    5: "LZW",
    7: "JPEG",
    8: "deflate",
    22610: "JPEG XR",
    32773: "PackBits",
    32946: "deflate",
    33003: "JPEG 2000",
    33004: "JPEG 2000",
    33005: "JPEG 2000",
    33007: "JPEG",
    34712: "JPEG 2000",
    34887: "LERC",
    34892: "JPEG",
    34925: "LZMA",
    34926: "zstd",
    34927: "WebP",
    34933: "PNG",
    34934: "JPEG XR",
    50000: "zstd",
    50001: "WebP",
    50002: "JPEG XL",
    52546: "JPEG XL",
}
"""Compressions that are decoded, by the value of tag 259."""
_IMAGE_CODECS = frozenset(
    (
        *JPEGS,
        22610,
        33003,
        33004,
        33005,
        34712,
        LERC,
        34927,
        34933,
        34934,
        50001,
        50002,
        52546,
    )
)

FORMATS: Mapping[int, str] = {
    1: "unsigned integers",
    2: "signed integers",
    3: "floating point",
    4: "values of an undefined kind",
    5: "complex integers",
    6: "complex numbers",
}
_UNSIGNED = 1
_SIGNED = 2
_FLOAT = 3
_UNDEFINED = 4


class Photometric(enum.IntEnum):
    """Meanings of the bands that are decoded, by the value of tag 262."""

    WHITE_IS_ZERO = 0
    BLACK_IS_ZERO = 1
    RGB = 2
    PALETTE = 3
    MASK = 4
    CMYK = 5
    YCBCR = 6


class Layout(NamedTuple):
    """The description of a page by its tags.

    Attributes:
      tags: tags with few numbers.
      height, width: sides in pixels.
      bands: samples of a pixel.
      bits: bits of a sample.
      format: kind of a sample, a key of `FORMATS`.
      compression: value of tag 259.
      photometric: meaning of the bands.
      is_planar: each band is stored alone.
      directory_at: offset of the directory of the page; 0: the first of the file.
    """

    tags: Mapping[int, Tag]
    height: int
    width: int
    bands: int
    bits: int
    format: int
    compression: int
    photometric: Photometric
    is_planar: bool
    directory_at: int

    def describe(self) -> str:
        """Return compression, bands, bits and sample format as words."""
        return _describe(self.compression, self.bands, str(self.bits), self.format)


def read_layout(file: bytes, most_bands: int = MOST_BANDS, directory_at: int = 0) -> Layout:
    """Return the layout of a page, by default the first, which has at most `most_bands`.

    Raises:
      UnreadableImage: the layout is not supported, or its tags are damaged.
    """
    try:
        tags = read_tiff_tags(file, _SMALL_TAGS, directory_at=directory_at)
    except (struct.error, ValueError, OverflowError) as error:
        raise UnreadableImage(
            "The file starts as TIFF but its directory is cut off or damaged",
        ) from error

    _require_known_tags(tags, most_bands)
    bands = _get_first_value(tags, _SAMPLES, 1)
    photometric = _get_first_value(tags, _PHOTOMETRIC, Photometric.BLACK_IS_ZERO)
    layout = Layout(
        tags=tags,
        height=_get_first_value(tags, _HEIGHT, 0),
        width=_get_first_value(tags, _WIDTH, 0),
        bands=bands,
        bits=_get_first_value(tags, _BITS, 1),
        format=_get_first_value(tags, _FORMAT, _UNSIGNED),
        compression=_get_first_value(tags, _COMPRESSION, 1),
        photometric=Photometric(photometric),
        is_planar=_get_first_value(tags, _PLANES, 1) == 2 and bands > 1,
        directory_at=directory_at,
    )
    _require_known_colours(layout)
    return layout


def _get_first_value(tags: Mapping[int, Tag], number: int, default: int) -> int:
    """Return the first value of a tag, or the default of a missing tag."""
    if number not in tags:
        return default
    return int(tags[number].values[0])


def _get_distinct_values(tags: Mapping[int, Tag], number: int) -> set[float]:
    """Return the different values of a tag, one value for a missing tag."""
    if number not in tags:
        return {1}
    return {*tags[number].values}


def _require_known_tags(tags: Mapping[int, Tag], most_bands: int) -> None:
    """Raise UnreadableImage for samples, compressions and colours that are not supported."""
    compression = _get_first_value(tags, _COMPRESSION, 1)
    bands = _get_first_value(tags, _SAMPLES, 1)
    sample_format = _get_first_value(tags, _FORMAT, _UNSIGNED)
    photometric = _get_first_value(tags, _PHOTOMETRIC, Photometric.BLACK_IS_ZERO)
    all_bits = _get_distinct_values(tags, _BITS)
    words = " and ".join(str(int(bits)) for bits in sorted(all_bits))
    description = _describe(compression, bands, words, sample_format)

    if not 1 <= bands <= most_bands:
        raise UnreadableImage(
            f"The file is a TIFF of {bands} bands, and images have 1 to {most_bands}. "
            f"{CHOOSE_BANDS}",
        )
    if compression not in COMPRESSIONS:
        name = _find_name(tifffile.COMPRESSION, compression)
        raise _build_unsupported_error(f"compression {compression} ({name})", description)
    if len(all_bits) > 1 or len(_get_distinct_values(tags, _FORMAT)) > 1:
        raise _build_unsupported_error("bands of different kinds", description)
    if not _is_known_sample(sample_format, _get_first_value(tags, _BITS, 1)):
        kind = FORMATS.get(sample_format, f"sample format {sample_format}")
        raise _build_unsupported_error(f"{kind} of {words} bits", description)
    if photometric not in [*Photometric]:
        name = _find_name(tifffile.PHOTOMETRIC, photometric)
        raise _build_unsupported_error(f"colours as {name} ({photometric})", description)
    # This predictor makes LERC lossy, and tifffile decodes it wrongly.
    if compression == LERC and _get_first_value(tags, _PREDICTOR, 1) == 3:
        raise _build_unsupported_error("a predictor for floating point", description)
    image_depth = _get_first_value(tags, _IMAGE_DEPTH, 1)
    tile_depth = _get_first_value(tags, _TILE_DEPTH, 1)
    if image_depth > 1 or tile_depth > 1:
        raise _build_unsupported_error("volumes", description)


def read_values(file: bytes) -> tuple[np.ndarray, Layout]:
    """Return the values of the first page as stored, and its layout.

    The values are (H, W), (H, W, 3) for three or four bands, and (H, W, 4) for CMYK.

    Raises:
      UnreadableImage: see `read_layout`; or strips or tiles are missing or damaged.
    """
    layout = read_layout(file)
    values = _decode_segments(file, layout, {})

    if layout.photometric is Photometric.CMYK:
        return values, layout

    if layout.bands < 3:
        return values[..., 0], layout
    return values[..., :3], layout


def decode_bands(
    file: bytes,
    directory_at: int = 0,
    described: DescribedPages | None = None,
) -> np.ndarray:
    """Return all bands of a page as stored, (H, W, bands); a palette and YCbCr as RGB.

    White is the highest value also where the file has it as 0. Values that GDAL states to be
    missing become NaN, in float32.

    Args:
      file: a TIFF.
      directory_at: offset of the directory of the page; 0: the first of the file.
      described: tifffile's pages of this file, to which the page is added.

    Raises:
      UnreadableImage: see `read_values`.
    """
    layout = read_layout(file, MOST_STORED_BANDS, directory_at)
    if described is None:
        described = {}
    values = _decode_segments(file, layout, described)
    if layout.photometric in (Photometric.PALETTE, Photometric.YCBCR):
        return _convert_page(file, values, layout)

    is_missing = _find_missing(file, values, layout)
    has_integers = layout.format in (_UNSIGNED, _UNDEFINED)
    if layout.photometric is Photometric.WHITE_IS_ZERO and has_integers:
        highest = (1 << layout.bits) - 1
        values = values.dtype.type(highest) - values
    if is_missing.any():
        return np.where(is_missing, np.float32(np.nan), values.astype(np.float32))
    return values


def _find_missing(file: bytes, values: np.ndarray, layout: Layout) -> np.ndarray:
    """Return True for the value that GDAL's tag states to be no data."""
    nothing = np.zeros((), bool)
    tag = read_tiff_tags(file, (_GDAL_NO_DATA,), _LONGEST_NUMBER, layout.directory_at)
    if _GDAL_NO_DATA not in tag:
        return nothing
    text = bytes(map(int, tag[_GDAL_NO_DATA].values)).partition(b"\0")[0]
    try:
        no_data = float(text)
    except ValueError:
        return nothing
    with np.errstate(over="ignore"):
        return np.asarray(values == no_data)


def decode_page(file: bytes) -> np.ndarray:
    """Return the first page as uint8 (H, W) or (H, W, 3), RGB.

    The lower 8 of 16 bits are dropped; colours are rounded.

    Raises:
      UnreadableImage: see `read_values`.
    """
    values, layout = read_values(file)
    return _convert_page(file, values, layout)


def _convert_page(file: bytes, values: np.ndarray, layout: Layout) -> np.ndarray:
    """Return stored values as uint8 (H, W) or (H, W, 3), RGB."""
    if layout.photometric is Photometric.PALETTE:
        return _apply_palette(file, values, layout)
    pixels = _convert_to_8_bits(values, layout)
    if layout.photometric is Photometric.WHITE_IS_ZERO:
        return 255 - pixels
    if layout.photometric is Photometric.CMYK:
        return _convert_cmyk(pixels)

    has_decoded_colours = layout.compression in (*JPEGS, 33003)
    if layout.photometric is Photometric.YCBCR and not has_decoded_colours:
        return _convert_ycbcr(pixels)
    return pixels


def _is_known_sample(sample_format: int, bits: int) -> bool:
    if sample_format in (_UNSIGNED, _UNDEFINED):
        return 1 <= bits <= 32 or bits == 64
    if sample_format == _SIGNED:
        return bits in (16, 32, 64)
    return sample_format == _FLOAT and bits in (16, 24, 32, 64)


def _require_known_colours(layout: Layout) -> None:
    """Raise UnreadableImage for colours that cannot be converted to RGB."""
    description = layout.describe()
    if layout.photometric is Photometric.PALETTE and layout.bits > 8:
        raise _build_unsupported_error(f"a palette for {layout.bits} bits", description)
    if layout.photometric is Photometric.CMYK:
        _require_known_inks(layout, description)
    if layout.photometric is Photometric.YCBCR:
        _require_known_ycbcr(layout, description)


def _require_known_inks(layout: Layout, description: str) -> None:
    ink_set = layout.tags.get(_INK_SET)
    is_cmyk = ink_set is None or ink_set.values[0] == 1
    if layout.bands != 4 or not is_cmyk:
        raise _build_unsupported_error(f"{layout.bands} inks that are not CMYK", description)
    if layout.format not in (_UNSIGNED, _UNDEFINED) or layout.bits not in (8, 16):
        raise _build_unsupported_error("CMYK of these bits", description)


def _require_known_ycbcr(layout: Layout, description: str) -> None:
    is_jpeg = layout.compression in JPEGS
    if layout.bands != 3 or layout.bits != 8 or (is_jpeg and layout.is_planar):
        raise _build_unsupported_error("YCbCr in this layout", description)
    if is_jpeg or layout.compression == 33003:
        return

    subsampling = layout.tags.get(_YCBCR_SUBSAMPLING)
    if subsampling is None or {*subsampling.values} != {1}:
        raise _build_unsupported_error("YCbCr with colours at a lower resolution", description)
    if layout.compression in _IMAGE_CODECS:
        raise _build_unsupported_error("YCbCr with this compression", description)


def _decode_segments(
    file: bytes,
    layout: Layout,
    described: DescribedPages,
) -> np.ndarray:
    """Return all samples, (H, W, bands)."""
    with _explain_damage(layout):
        page = _describe_page(file, layout, described)
        allowed_samples = _count_allowed_pixels(page, layout) * layout.bands
        arguments = {}
        if layout.compression in JPEGS:
            arguments["jpegtables"] = _read_jpeg_tables(file, layout)

        values = np.empty(page.shaped, page.dtype)
        segments = _read_segments(file, layout, math.prod(page.chunked))
        for index, data in enumerate(segments):
            if index == 0:
                # Marks of the JPEG tell its colours, with precedence over the tags; a plane is
                # grey.
                page.is_jfif = layout.is_planar or data[6:10] == b"JFIF"
            if layout.compression == LERC:
                data = _unwrap_lerc(data, _bound_lerc_bytes(page, layout))
            if count_jpeg_scans(data) > MAX_JPEG_SCANS:
                raise ValueError(f"a strip or tile is a JPEG of more than {MAX_JPEG_SCANS} scans")
            allowed_samples -= _count_codec_samples(data, layout)
            if allowed_samples < 0:
                raise ValueError("its strips or tiles state more pixels than the page")

            segment, place, _ = page.decode(data, index, **arguments)
            if segment is None:
                raise ValueError(f"its data are not {page.dtype}")
            if segment.dtype != page.dtype and layout.bits > 1:  # CCITT: integers
                raise ValueError(f"its data are not {page.dtype}")

            plane, _, top, left, _ = place
            bottom = top + segment.shape[1]
            right = left + segment.shape[2]
            part = values[plane, 0, top:bottom, left:right]
            part[...] = segment[0, : part.shape[0], : part.shape[1]]

    if layout.is_planar:
        return np.moveaxis(values[:, 0, :, :, 0], 0, -1)
    return values[0, 0]


def _count_allowed_pixels(page: tifffile.TiffPage, layout: Layout) -> int:
    """Return the pixels that the strips or tiles of a page may decode to.

    Raises:
      ValueError: the page as tifffile understands it is another, or its tiles are too large.
    """
    if page.dtype is None or page.shaped[1] != 1:
        raise ValueError("its tags contradict each other")
    if page.shaped[2:4] != (layout.height, layout.width):
        raise ValueError("its tags contradict each other")

    planes = layout.bands if layout.is_planar else 1
    allowed = 2 * layout.height * layout.width * planes + _SPARE_PIXELS
    if math.prod(page.chunked) * _count_segment_pixels(page, layout) > allowed:
        raise ValueError("its tiles are much larger than the page")
    return allowed


def _count_segment_pixels(page: tifffile.TiffPage, layout: Layout) -> int:
    if page.is_tiled:
        return page.tilewidth * page.tilelength
    return min(page.rowsperstrip, layout.height) * layout.width


def _count_codec_samples(data: bytes, layout: Layout) -> int:
    """Return the samples that a strip or tile states in its header, which its decoder believes.

    Return 0 for compressions of bytes, which state none.
    """
    if layout.compression not in _IMAGE_CODECS:
        return 0
    pixels = count_stated_pixels(data)
    if pixels <= 0:
        raise ValueError("a strip or tile states no size")
    if layout.compression == LERC:  # its header states samples
        return pixels
    return pixels * layout.bands


def _bound_lerc_bytes(page: tifffile.TiffPage, layout: Layout) -> int:
    """Return the largest size of a strip or tile of LERC without its second compression."""
    assert page.dtype is not None
    samples = _count_segment_pixels(page, layout) * layout.bands
    return 2 * samples * page.dtype.itemsize + 4096


def _unwrap_lerc(data: bytes, most: int) -> bytes:
    """Return at most `most` bytes of LERC without its second compression, deflate or zstd."""
    if data.startswith(_ZSTD_START):
        return bytes(imagecodecs.zstd_decode(data, out=most))
    if data.startswith(_LERC_START):
        return data
    return zlib.decompressobj().decompress(data, most)


def _read_segments(file: bytes, layout: Layout, count: int) -> Iterator[bytes]:
    """Yield the encoded bytes of each strip or tile."""
    tags = read_tiff_tags(file, _OFFSET_TAGS, count, layout.directory_at)
    offsets_tag = _STRIP_OFFSETS
    sizes_tag = _STRIP_BYTES
    if _TILE_OFFSETS in tags:
        offsets_tag = _TILE_OFFSETS
        sizes_tag = _TILE_BYTES

    offsets = tags[offsets_tag].values
    if sizes_tag in tags:
        sizes = tags[sizes_tag].values
    elif count == 1:
        sizes = (len(file) - offsets[0],)
    else:
        raise ValueError("the sizes of its strips or tiles are missing")

    num_listed = min(len(offsets), len(sizes))
    if num_listed < count:
        raise ValueError(f"{num_listed} of {count} strips or tiles are listed")

    for offset, size in zip(map(int, offsets), map(int, sizes), strict=False):
        if size <= 0:
            raise ValueError("a strip or tile is missing")
        data = file[offset : offset + size]
        if len(data) < size:
            raise ValueError("a strip or tile is missing")
        yield data


def _read_jpeg_tables(file: bytes, layout: Layout) -> bytes | None:
    tags = read_tiff_tags(file, (_JPEG_TABLES,), _LARGEST_TABLES, layout.directory_at)
    if _JPEG_TABLES not in tags:
        return None
    return bytes(map(int, tags[_JPEG_TABLES].values))


def _describe_page(
    file: bytes,
    layout: Layout,
    described: DescribedPages,
) -> tifffile.TiffPage:
    """Return tifffile's page for a directory with the encoding of strips and tiles.

    A page of the same encoding is described once, which takes half of the time of a small page.
    Pages in JPEG are not shared, since each states its colours.
    """
    numbers: dict[int, tuple[float, ...]] = {}
    for tag in _TIFFFILE_TAGS:
        if tag in layout.tags:
            numbers[tag] = layout.tags[tag].values
    numbers[_WIDTH] = (layout.width,)
    numbers[_HEIGHT] = (layout.height,)
    numbers[_COMPRESSION] = (layout.compression,)
    numbers[_PHOTOMETRIC] = (layout.photometric,)

    is_jpeg = layout.compression in JPEGS
    is_grey = layout.photometric is Photometric.BLACK_IS_ZERO
    if is_jpeg and layout.bands == 3 and is_grey:
        # Without marks of its colours a JPEG would be taken for YCbCr.
        numbers[_PHOTOMETRIC] = (Photometric.RGB,)
    if layout.format == _UNDEFINED:
        numbers[_FORMAT] = (_UNSIGNED,)
    if _TILE_WIDTH in numbers:
        numbers[_TILE_OFFSETS] = (0,)
        numbers[_TILE_BYTES] = (0,)
    else:
        numbers[_STRIP_OFFSETS] = (0,)
        numbers[_STRIP_BYTES] = (0,)

    directory = _encode_directory(file[:2], numbers)
    if directory in described:
        return described[directory]

    with tifffile.TiffFile(io.BytesIO(directory)) as opened:
        page = opened.pages[0]
    assert isinstance(page, tifffile.TiffPage)
    if not is_jpeg:
        described[directory] = page
    return page


def _encode_directory(
    start: bytes,
    numbers: Mapping[int, tuple[float, ...]],
) -> bytes:
    """Return a TIFF of one directory with these tags; `start` states the order of bytes."""
    order = "<" if start == b"II" else ">"
    entries = b""
    data = b""
    data_at = 8 + 2 + 12 * len(numbers) + 4
    for tag, values in sorted(numbers.items()):
        count = len(values)
        encoded = struct.pack(f"{order}{count}I", *map(int, values))
        if count > 1:
            entries += struct.pack(f"{order}HHII", tag, 4, count, data_at + len(data))
            data += encoded
        else:
            entries += struct.pack(f"{order}HHI", tag, 4, 1) + encoded

    header = struct.pack(f"{order}2sHIH", start, 42, 8, len(numbers))
    no_next_page = bytes(4)
    return header + entries + no_next_page + data


def _convert_to_8_bits(values: np.ndarray, layout: Layout) -> np.ndarray:
    if layout.bits == 8:
        return values

    if layout.bits == 16:
        positive = np.maximum(values, 0)
        if values.ndim == 2:
            return (positive >> 8).astype(np.uint8)
        rounded = (positive.astype(np.uint32) + 128) // 257  # the same as libtiff
        return rounded.astype(np.uint8)

    assert layout.bits < 8, "a range is needed, or stated, for all others"
    most = (1 << layout.bits) - 1
    levels = np.arange(most + 1) * (255 / most)
    table = np.rint(levels).astype(np.uint8)
    return table[values.astype(np.uint8)]


def _apply_palette(file: bytes, values: np.ndarray, layout: Layout) -> np.ndarray:
    count = 3 << layout.bits
    tags = read_tiff_tags(file, (_COLOR_MAP,), count, layout.directory_at)
    tag = tags.get(_COLOR_MAP)
    if tag is None or len(tag.values) < count:
        raise UnreadableImage(
            f"The file is a TIFF with a palette that is missing or cut off ({layout.describe()})",
        )

    colours = np.array(tag.values, np.uint16).reshape(3, -1).T
    if colours.max(initial=0) > 255:  # some programs write 8 bits where the specification wants 16
        colours >>= 8
    if values.ndim > 2:
        values = values[..., 0]
    palette = colours.astype(np.uint8)
    return palette[values.astype(np.uint8)]


def _convert_cmyk(inks: np.ndarray) -> np.ndarray:
    """Return (1 - ink) (1 - black)."""
    light = 255 - inks.astype(np.uint16)

    colours = light[..., :3]
    black = light[..., 3:]
    rgb = (colours * black + 127) // 255
    return rgb.astype(np.uint8)


def _convert_ycbcr(pixels: np.ndarray) -> np.ndarray:
    """Convert by the coefficients of Rec. 601 with all 8 bits, as JPEG does."""
    offsets = np.array([0, 128, 128], np.float32)
    centred = pixels.astype(np.float32) - offsets
    luma, blue_difference, red_difference = np.moveaxis(centred, -1, 0)

    red = luma + 1.402 * red_difference
    green = luma - 0.344136 * blue_difference - 0.714136 * red_difference
    blue = luma + 1.772 * blue_difference
    rgb = np.stack([red, green, blue], axis=-1)
    return np.clip(np.rint(rgb), 0, 255).astype(np.uint8)


@contextlib.contextmanager
def _explain_damage(layout: Layout) -> Iterator[None]:
    try:
        yield
    # Codecs have no one class for damage, and may ask for memory that no page needs.
    except Exception as error:
        first_line, _, _ = str(error).partition("\n")
        reason = first_line[:200] or type(error).__name__
        raise UnreadableImage(
            f"The file starts as TIFF ({layout.describe()}) but is cut off, damaged or of an "
            f"unknown kind: {reason}",
        ) from error


def _describe(compression: int, bands: int, bits: str, sample_format: int) -> str:
    name = COMPRESSIONS.get(compression) or _find_name(tifffile.COMPRESSION, compression)
    band_noun = "band" if bands == 1 else "bands"
    bit_noun = "bit" if bits == "1" else "bits"
    kind = FORMATS.get(sample_format, f"sample format {sample_format}")
    return f"compression {compression} ({name}), {bands} {band_noun} of {bits} {bit_noun}, {kind}"


def _find_name(names: Callable[[int], Any], value: int) -> str:
    try:
        return names(value).name
    except ValueError:
        return "unknown"


def _build_unsupported_error(reason: str, description: str) -> UnreadableImage:
    return UnreadableImage(
        f"The file is a TIFF with {reason}, which cannot be decoded ({description}): save it as "
        "PNG, or as TIFF in grey or RGB with compression LZW, deflate or none",
    )
