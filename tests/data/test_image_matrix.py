"""Each format and layout gives the pixels of a library, or an error that names the layout.

The libraries are Pillow, tifffile and imagecodecs. Where a format loses nothing, the pixels that
were written are expected.
"""

import contextlib
import io
import itertools
import re
import struct

import cv2
import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.data.decoding.test_images import encode
from vit_jax.data.decoding import tiff
from vit_jax.data.decoding.depth import read_file_depth
from vit_jax.data.decoding.headers import count_stated_pixels
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.kinds.image_files import DECODED

RNG = np.random.default_rng(0)
SMOOTH = cv2.resize(
    RNG.integers(256, size=(5, 6, 3), dtype=np.uint8),
    (48, 32),
    interpolation=cv2.INTER_CUBIC,
)
BGR = SMOOTH[..., ::-1]
GREY = SMOOTH[..., 0]
BANDS = np.dstack([SMOOTH, BGR])
ALPHA = np.linspace(0, 255, 32 * 48).reshape(32, 48).astype(np.uint8)
RGBA = np.dstack([SMOOTH, ALPHA])
COLOURS = Image.fromarray(SMOOTH)
WITH_ALPHA = Image.fromarray(RGBA)


def to_rgb(values):
    """Take one or two bands for grey, three or four for RGB."""
    if values.ndim == 2:
        values = values[..., None]
    if values.shape[2] > 2:
        return values[..., :3]

    grey = values[..., :1]
    return np.repeat(grey, 3, axis=-1)


def assert_close(file, expected, **options):
    found = decode(file, **options)

    difference = found - expected.astype(float)
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert np.abs(difference).max() <= 2


def to_depth(values, bits):
    """Scale values of 8 bits to more or fewer bits."""
    dtype = np.uint8
    if bits > 8:
        dtype = np.uint16

    scaled = values.astype(np.uint32) * (2**bits - 1) // 255
    return scaled.astype(dtype)


def drop_single_band(values):
    """Return grey values without their axis of bands, as libraries expect them."""
    if values.shape[-1] == 1:
        return values[..., 0]
    return values


def open_by_pillow(file):
    return Image.open(io.BytesIO(file))


def read_by_pillow(file):
    """Return pixels of the first image without its alpha."""
    image = open_by_pillow(file)
    if image.mode == "P":
        image = image.convert("RGBA")
    elif image.mode not in ("LA", "RGBA", "RGBX"):
        image = image.convert("RGB")

    return to_rgb(np.asarray(image))


def write_by_pillow(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)

    return file.getvalue()


# TIFF

# Compressions that tifffile writes, by the name that it takes, and their names in messages
WRITTEN = {
    "none": "none",
    "lzw": "LZW",
    "deflate": "deflate",
    "adobe_deflate": "deflate",
    "packbits": "PackBits",
    "lzma": "LZMA",
    "zstd": "zstd",
    "jpeg": "JPEG",
    "jpeg_lossy": "JPEG",
    "jpeg2000": "JPEG 2000",
    "aperio_jp2000_rgb": "JPEG 2000",
    "aperio_jp2000_ycbc": "JPEG 2000",
    "webp": "WebP",
    "png": "PNG",
    "jpegxl": "JPEG XL",
    "jpegxl_dng": "JPEG XL",
    "jpegxr": "JPEG XR",
    "jpegxr_ndpi": "JPEG XR",
    "lerc": "LERC",
}
LAYOUTS = (
    {},
    {"tile": (16, 32)},
    {"rowsperstrip": 5, "bigtiff": True},
    {"predictor": True},
    {"byteorder": ">"},
)

FAST = {
    "lzma": {"compressionargs": {"level": 0}},
    "jpegxl": {"compressionargs": {"effort": 1}},
    "jpegxl_dng": {"compressionargs": {"effort": 1}},
}


def write_tiff(values, **options):
    if options.get("compression") == "none":
        options["compression"] = None

    file = io.BytesIO()
    tifffile.imwrite(file, values, **options)

    return file.getvalue()


def make_values(bands, dtype, compression):
    """Return values of a dtype that fill its range, 12 bits of it in JPEG files."""
    values = BANDS[..., :bands].astype(dtype)
    if dtype != "u2":
        return values

    values = values * np.uint16(257)
    if compression in ("jpeg", "jpeg_lossy"):
        return values // 16
    return values


def is_left_to_others(compression, dtype, bands, photometric, layout):
    """Return whether a slow combination of options is covered by simpler ones."""
    is_slow = compression in FAST or dtype != "u1" or bands > 4
    is_common = photometric == "minisblack" and bands in (1, 3)

    return bool(is_slow and layout and not is_common)


# Errors of tifffile about layouts that it does not write
UNWRITTEN = (ValueError, KeyError, RuntimeError, NotImplementedError)


def list_tiffs(compression):
    """Yield name, file and number of bands of all layouts that tifffile writes."""
    kinds = itertools.product(
        range(1, 7),
        ("u1", "u2", "f4"),
        ("rgb", "minisblack"),
        ("contig", "separate"),
        LAYOUTS,
    )
    for kind in kinds:
        bands, dtype, photometric, planes, layout = kind
        if is_left_to_others(compression, dtype, bands, photometric, layout):
            continue

        options = {"photometric": photometric, "compression": compression}
        options |= layout
        options |= FAST.get(compression, {})
        values = make_values(bands, dtype, compression)
        if bands == 1:
            values = values[..., 0]
        else:
            options["planarconfig"] = planes
            if planes == "separate":
                values = np.moveaxis(values, -1, 0)

        try:
            file = write_tiff(values, **options)
        except UNWRITTEN:
            continue

        yield str(kind), file, bands


def name_unsupported_layout(page, bands, compression):
    """Return a pattern of the error about the layout of a page; None if it is decoded."""
    if bands > 4:
        return rf"TIFF of {bands} bands.*gdal_translate"
    if compression == "lerc" and page.predictor == 3:
        return r"a predictor for floating point.*LERC"
    if page.photometric == 6 and page.bitspersample > 8:
        return r"YCbCr .*compression \d+ \(JPEG\), 3 bands of 12 bits"
    return None


def read_by_tifffile(file, page):
    """Return RGB values of the range 0 to 255, in floating point."""
    values = tifffile.imread(io.BytesIO(file))
    if values.ndim == 3 and page.planarconfig == 2:
        values = np.moveaxis(values, 0, -1)

    most = 255
    if values.dtype != np.float32:
        most = 2**page.bitspersample - 1
    levels = to_rgb(values).astype(float)
    return levels.clip(0) * 255 / most


@pytest.mark.parametrize("compression", WRITTEN)
def test_tiff(compression):
    """Bands, depths, meanings, planes, strips, tiles, BigTIFF, predictor and order of bytes."""
    num_decoded = 0
    for name, file, bands in list_tiffs(compression):
        opened = tifffile.TiffFile(io.BytesIO(file))
        page = opened.pages[0]
        value_range = None
        if page.dtype == np.float32:
            value_range = (0, 255)

        message = name_unsupported_layout(page, bands, compression)
        if message is not None:
            with pytest.raises(UnreadableImage, match=message):
                decode(file, value_range=value_range)
            continue

        found = decode(file, value_range=value_range)

        expected = read_by_tifffile(file, page)
        assert np.abs(found - expected).max() <= 2, name
        num_decoded += 1

    assert num_decoded >= 10


def test_every_compression_that_is_listed_is_tested():
    of_pillow = {"CCITT RLE", "CCITT group 3", "CCITT group 4"}
    names = set(tiff.COMPRESSIONS.values())

    assert set(WRITTEN.values()) | of_pillow == names

    (row,) = (row for row in DECODED if row.format == "TIFF")
    for name in names:
        assert name in row.decoded


@pytest.mark.parametrize("second", ["deflate", "zstd"])
def test_lerc_with_a_second_compression(second):
    file = write_tiff(
        SMOOTH,
        photometric="rgb",
        compression="lerc",
        compressionargs={"compression": second},
    )

    assert_close(file, SMOOTH)


@pytest.mark.parametrize(
    "compression",
    [
        None,
        "jpeg",
        "tiff_lzw",
        "packbits",
        "tiff_deflate",
        "zstd",
        "lzma",
    ],
)
@pytest.mark.parametrize(
    "mode",
    [
        "RGB",
        "1",
        "L",
        "YCbCr",
        "CMYK",
        "P",
        "LA",
        "PA",
        "RGBA",
        "RGBX",
    ],
)
def test_tiff_of_pillow(mode, compression):
    if compression == "jpeg" and mode in ("1", "P", "PA"):
        pytest.skip("JPEG has no such images")
    image = COLOURS.convert(mode)

    file = write_by_pillow(image, "TIFF", compression=compression)

    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
def test_tiff_of_scanned_pages(compression):
    page = COLOURS.convert("1")

    file = write_by_pillow(page, "TIFF", compression=compression)

    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize(
    "subsampling",
    [
        (1, 1),
        (2, 1),
        (2, 2),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tile": (16, 16)},
        {"rowsperstrip": 16},
    ],
)
def test_jpeg_in_tiff(subsampling, layout):
    file = write_tiff(
        SMOOTH,
        photometric="rgb",
        compression="jpeg",
        subsampling=subsampling,
        **layout,
    )

    assert_close(file, read_by_pillow(file))


def test_jpeg_planes_without_jfif():
    """GDAL writes planes without the marker; tifffile takes each plane for RGB."""
    file = write_tiff(
        np.moveaxis(SMOOTH, -1, 0),
        photometric="rgb",
        planarconfig="separate",
        compression="jpeg",
    )

    without_marker = file.replace(b"JFIF", b"JFXX")
    assert file.count(b"JFIF") == 3
    assert_close(without_marker, decode(file))


def encode_jpeg_without_marks(values):
    """Return a JPEG of bands that are not converted, and no marker that says so, as in libtiff."""
    file = imagecodecs.jpeg8_encode(
        values,
        level=95,
        colorspace="RGB",
        outcolorspace="RGB",
    )
    file = bytearray(file)
    adobe = file.index(b"\xff\xee")
    length = int.from_bytes(file[adobe + 2 : adobe + 4], "big")
    del file[adobe : adobe + 2 + length]

    names = b"\0\1\2"
    frame = file.index(b"\xff\xc0")
    file[frame + 10 : frame + 19 : 3] = names
    scan = file.index(b"\xff\xda")
    file[scan + 5 : scan + 11 : 2] = names

    return bytes(file)


@pytest.mark.parametrize(
    ("photometric", "number"),
    [
        ("rgb", 2),
        ("minisblack", 1),
    ],
)
def test_jpeg_bands_without_marks_in_tiff(photometric, number):
    """GDAL writes bands without conversion: they are no YCbCr."""
    file = io.BytesIO()
    strips = iter([encode_jpeg_without_marks(SMOOTH)])
    tifffile.imwrite(
        file,
        strips,
        shape=SMOOTH.shape,
        dtype=np.uint8,
        compression="jpeg",
    )

    changed = change_tag(file.getvalue(), 262, number)

    found = decode(changed)

    difference = np.abs(found.astype(int) - SMOOTH)
    assert difference.mean() < 2
    assert difference.max() < 25


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8, 10, 12, 14, 16])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_bits_of_a_grey_tiff(bits, photometric):
    values = to_depth(GREY, bits)
    stored = values
    if bits == 1:
        stored = values.astype(bool)

    file = write_tiff(
        stored,
        photometric=photometric,
        bitspersample=bits,
    )

    expected = values * (255 / (2**bits - 1))
    if photometric == "miniswhite":
        expected = 255 - expected

    assert_close(file, to_rgb(expected))


@pytest.mark.parametrize("kind", ["assocalpha", "unassalpha", "unspecified"])
def test_colours_are_not_multiplied_by_a_fourth_band(kind):
    png = encode(".png", RGBA)
    file = write_tiff(
        RGBA,
        photometric="rgb",
        extrasamples=[kind],
    )

    assert_close(file, SMOOTH)
    assert np.array_equal(decode(file), decode(png))


@pytest.mark.parametrize("kind", ["assocalpha", "unassalpha", "unspecified"])
def test_colours_of_16_bits_are_not_multiplied_by_a_fourth_band(kind):
    values = RGBA.astype(np.uint16) * 257
    png = encode(".png", RGBA)
    file = write_tiff(
        values,
        photometric="rgb",
        extrasamples=[kind],
    )

    assert_close(file, SMOOTH)
    assert_close(file, SMOOTH, value_range=(0, 65535))
    assert np.array_equal(decode(file), decode(png))


def test_palettes():
    colours = RNG.integers(0, 65536, (3, 256)).astype(np.uint16)
    file = write_tiff(
        GREY,
        photometric="palette",
        colormap=colours,
    )

    colours_of_8_bits = (colours >> 8).T
    assert_close(file, colours_of_8_bits[GREY])


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "GIF", "BMP"])
def test_palettes_of_pillow(kind):
    image = COLOURS.quantize(13)

    file = write_by_pillow(image, kind)

    expected = image.convert("RGB")
    assert_close(file, np.asarray(expected))


UNSUPPORTED = {
    "signed values of 8 bits": (
        SMOOTH.astype(np.int8),
        {},
        r"signed integers of 8 bits.*compression 1 \(none\), 3 bands",
    ),
    "complex numbers": (
        SMOOTH.astype(np.complex64),
        {},
        "complex numbers of 64 bits",
    ),
    "a volume": (
        np.zeros((16, 16, 16), np.uint8),
        {
            "photometric": "minisblack",
            "volumetric": True,
            "tile": (16, 16, 16),
        },
        "volumes",
    ),
    "Lab": (
        SMOOTH,
        {"photometric": "cielab"},
        r"colours as CIELAB \(8\)",
    ),
    "inks": (
        BANDS[..., :4],
        {
            "photometric": "separated",
            "extratags": [(332, "H", 1, 2, True)],
        },
        "4 inks that are not CMYK",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_layouts_that_are_not_supported_are_named(kind):
    values, options, message = UNSUPPORTED[kind]
    options = {"photometric": "rgb"} | options
    file = write_tiff(values, **options)

    with pytest.raises(UnreadableImage, match=message):
        decode(file)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (34661, "JBIG"),
        (6, "OJPEG"),
        (32809, "THUNDERSCAN"),
        (4711, "unknown"),
    ],
)
def test_compressions_that_are_not_supported_are_named(number, name):
    lzw = write_tiff(
        SMOOTH,
        photometric="rgb",
        compression="lzw",
    )
    file = change_tag(lzw, 259, number)

    rule = rf"compression {number} \({name}\).*3 bands of 8 bits, unsigned integers"
    with pytest.raises(UnreadableImage, match=rule):
        decode(file)


# Hostile TIFFs


def damage(file, rng):
    """Change two bytes near the ends of a file, and cut some files off."""
    places = np.arange(len(file))
    ends = np.concatenate([places[:300], places[-300:]])
    damaged = bytearray(file)

    for place in rng.choice(ends, 2):
        damaged[place] = rng.choice([0, 1, 127, 255])

    length = rng.integers(50, 4 * len(file))
    return bytes(damaged[:length])


def test_damaged_tiffs_are_unreadable():
    """Damaged files are decoded, or raise no other error."""
    rng = np.random.default_rng(0)

    for compression in ("none", "lzw", "jpeg", "lerc", "zstd", "jpegxl"):
        for layout in ({}, {"tile": (16, 16), "bigtiff": True}):
            file = write_tiff(
                SMOOTH,
                photometric="rgb",
                compression=compression,
                **layout,
            )
            for _ in range(60):
                damaged = damage(file, rng)
                with contextlib.suppress(UnreadableImage):
                    decode(damaged, value_range=(0, 1))


def change_tag(file, tag, value):
    """Replace the value of a tag of 16 or 32 bits in a TIFF."""
    pattern = re.escape(struct.pack("<H", tag)) + b"[\3\4]\0\1\0\0\0"
    place = re.search(pattern, file).end()

    changed = bytearray(file)
    struct.pack_into("<I", changed, place, value)
    return bytes(changed)


def change_tags(file, tags):
    for tag, value in tags.items():
        file = change_tag(file, tag, value)
    return file


@pytest.mark.parametrize(
    ("tags", "rule"),
    [
        ({322: 65536, 323: 65536}, "tiles are much larger than the page"),
        ({256: 65535, 257: 65535}, "4,295 megapixels"),
        ({257: 65535}, "strips or tiles are listed"),
    ],
)
def test_tiffs_cannot_ask_for_memory(tags, rule):
    tiled = write_tiff(
        SMOOTH,
        photometric="rgb",
        compression="deflate",
        tile=(16, 16),
    )
    hostile = change_tags(tiled, tags)

    with pytest.raises(UnreadableImage, match=rule):
        decode(hostile)


def test_tiffs_cannot_ask_for_time():
    """A small page cannot have a large image in its strip."""
    large = write_tiff(
        np.zeros((5000, 5000), np.uint8),
        photometric="minisblack",
        compression="png",
        rowsperstrip=5000,
    )
    sizes = {256: 50, 257: 50, 278: 50}
    hostile = change_tags(large, sizes)

    with pytest.raises(UnreadableImage, match="state more pixels than the page"):
        decode(hostile)


def test_sparse_tiffs_are_unreadable():
    tiled = write_tiff(
        SMOOTH,
        photometric="rgb",
        tile=(16, 16),
    )
    tile_bytes = struct.pack("<H", 16 * 16 * 3)
    counts = tile_bytes * 6
    sparse_counts = b"\0\0" + tile_bytes * 5
    sparse = tiled.replace(counts, sparse_counts)

    assert counts in tiled
    with pytest.raises(UnreadableImage, match="a strip or tile is missing"):
        decode(sparse)


@pytest.mark.parametrize(
    "size",
    [
        (1, 1),
        (8, 24),
        (48, 32),
        (300, 400),
        (600, 337),
        (513, 16),
    ],
)
def test_sizes_that_codecs_state(size):
    height, width = size
    values = np.zeros((height, width, 3), np.uint8)
    files = [
        imagecodecs.jpegxl_encode(values),
        imagecodecs.jpegxl_encode(values, usecontainer=True),
        imagecodecs.jpegxr_encode(values),
        imagecodecs.jpeg2k_encode(values),
        imagecodecs.webp_encode(values),
    ]
    lerc = imagecodecs.lerc_encode(values)

    for file in files:
        assert count_stated_pixels(file) == height * width
    assert count_stated_pixels(lerc) == height * width * 3  # samples


# AVIF


@pytest.mark.parametrize("bits", [8, 10, 12])
@pytest.mark.parametrize(
    ("layout", "has_alpha"),
    [
        ("400", False),
        ("420", False),
        ("420", True),
        ("422", False),
        ("422", True),
        ("444", False),
        ("444", True),
    ],
)
def test_avif(bits, layout, has_alpha):
    """Grey is not written with alpha."""
    values = RGBA if has_alpha else SMOOTH
    if layout == "400":
        values = GREY

    file = imagecodecs.avif_encode(
        to_depth(values, bits),
        level=95,
        bitspersample=bits,
        pixelformat=imagecodecs.AVIF.PIXEL_FORMAT[f"YUV{layout}"],
    )

    by_pillow = open_by_pillow(file).convert("RGBA")
    assert_close(file, to_rgb(np.asarray(by_pillow)))

    if bits > 8:
        most = 2**bits - 1
        stored = imagecodecs.avif_decode(file)
        exact = to_rgb(stored) * (255 / most)
        assert_close(file, exact, value_range=(0, most))
        assert read_file_depth(file).bits == bits


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize(
    "kind",
    [
        "AVIF",
        "WEBP",
        "PNG",
        "GIF",
    ],
)
def test_the_first_image_of_a_sequence_is_decoded(kind, mode):
    first = WITH_ALPHA.convert(mode)
    file = write_by_pillow(
        first,
        kind,
        save_all=True,
        append_images=[first.rotate(180)],
    )

    by_pillow = open_by_pillow(file).convert(mode)
    assert_close(file, to_rgb(np.asarray(by_pillow)))


def test_a_png_whose_animation_excludes_the_default_image():
    further = [COLOURS.rotate(180), COLOURS.rotate(90)]

    file = write_by_pillow(
        COLOURS,
        "PNG",
        save_all=True,
        default_image=True,
        append_images=further,
    )

    assert_close(file, SMOOTH)


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("mode", ["L", "LA"])
@pytest.mark.parametrize("value_range", ["full", "limited"])
def test_grey_avif(value_range, mode, is_sequence):
    """Grey is decoded also with alpha, in the range of video, and turned.

    Pillow 13 cannot write a sequence with Exif data.
    """
    image = WITH_ALPHA.convert(mode)
    options = {
        "subsampling": "4:0:0",
        "range": value_range,
        "quality": 95,
    }

    if is_sequence:
        further = [image.rotate(180), image.rotate(90)]
        file = write_by_pillow(
            image,
            "AVIF",
            save_all=True,
            append_images=further,
            **options,
        )

        assert_close(file, read_by_pillow(file))
        return

    exif = Image.Exif()
    exif[0x0112] = 6
    file = write_by_pillow(
        image,
        "AVIF",
        exif=exif,
        **options,
    )
    without_exif = write_by_pillow(image, "AVIF", **options)
    stored = read_by_pillow(without_exif)

    assert_close(file, stored)
    assert_close(
        file,
        np.rot90(stored, -1),
        exif_orientation=True,
    )


# Other formats

MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "AVIF": ("L", "LA", "RGB", "RGBA"),
    "JPEG2000": ("L", "LA", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "PPM": ("1", "L", "RGB"),
    "JPEG": ("L", "RGB"),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind, modes in MODES.items() for mode in modes],
)
def test_formats_and_modes(kind, mode):
    options = {}
    if kind == "WEBP":
        options = {"lossless": True, "exact": True}
    image = WITH_ALPHA.convert(mode)

    file = write_by_pillow(image, kind, **options)

    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize(
    "options",
    [
        {"transparency": 3},
        {"transparency": 3, "background": 5, "interlace": 1},
    ],
)
@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_transparent_colours_of_a_palette(kind, options):
    image = COLOURS.quantize(20)

    file = write_by_pillow(image, kind, **options)

    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_png_of_16_bits(bands):
    pixels = RGBA[..., :bands]
    values = pixels.astype(np.uint16) * 257

    file = imagecodecs.png_encode(drop_single_band(values))

    expected = to_rgb(pixels)
    assert_close(file, expected)
    assert_close(file, expected, value_range=(0, 65535))


def encode_jpeg_2000(values, bits, form="jp2", **options):
    return imagecodecs.jpeg2k_encode(
        values,
        level=0,
        bitspersample=bits,
        codecformat=form,
        **options,
    )


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5])
def test_jpeg_2000(bands, bits):
    pixels = BANDS[..., :bands]
    values = to_depth(pixels, bits)
    file = encode_jpeg_2000(
        drop_single_band(values),
        bits,
        mct=False,
    )

    if bands > 4:
        with pytest.raises(UnreadableImage, match="JPEG 2000 of 5 bands"):
            decode(file)
        return

    assert_close(file, to_rgb(pixels))


@pytest.mark.parametrize("bits", [1, 4, 7, 10])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["jp2", "j2k"])
def test_jpeg_2000_of_other_bits(form, bands, bits):
    pixels = RGBA[..., :bands]
    values = to_depth(pixels, bits)
    file = encode_jpeg_2000(
        drop_single_band(values),
        bits,
        form,
        mct=False,
    )

    most = 2**bits - 1
    expected = to_rgb(values) * (255 / most)

    assert_close(file, expected)
    if bits > 8:
        expected = to_rgb(pixels)
        assert_close(file, expected, value_range=(0, most))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"irreversible": True},
        {"tile_size": (16, 16)},
    ],
)
def test_jpeg_2000_of_ycbcr(options):
    image = COLOURS.convert("YCbCr")

    file = write_by_pillow(image, "JPEG2000", **options)

    assert_close(file, read_by_pillow(file))


def make_box(kind, content):
    length = 8 + len(content)
    return struct.pack(">I4s", length, kind) + content


def encode_jp2_with_boxes(*boxes):
    """Return a JP2 of one band of 4 bits with other boxes in its header."""
    file = encode_jpeg_2000(LEVELS, bits=4)
    before, _, rest = file.partition(b"jp2h")
    length = int.from_bytes(before[-4:], "big")
    before = before[:-4]
    after = rest[length - 8 :]
    image_header = rest[:22]

    new_header = make_box(b"jp2h", image_header + b"".join(boxes))
    return before + new_header + after


def make_colour_box(number):
    """Return the box that states colours by their number in the standard."""
    content = struct.pack(">3BI", 1, 0, 0, number)
    return make_box(b"colr", content)


LEVELS = GREY >> 4


def test_jpeg_2000_with_a_palette():
    colours = RNG.integers(0, 256, (16, 3)).astype(np.uint8)
    sizes = struct.pack(">HB3B", 16, 3, 7, 7, 7)
    bands = b"\0\0\1\0" + b"\0\0\1\1" + b"\0\0\1\2"
    file = encode_jp2_with_boxes(
        make_colour_box(16),
        make_box(b"pclr", sizes + colours.tobytes()),
        make_box(b"cmap", bands),
    )

    assert_close(file, colours[LEVELS])


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (12, "CMYK"),
        (14, "CIELAB"),
        (24, "e-sYCC"),
    ],
)
def test_jpeg_2000_of_other_colours_is_named(number, name):
    file = encode_jp2_with_boxes(make_colour_box(number))

    with pytest.raises(UnreadableImage, match=rf"kind {number} \({name}\).*JPEG 2000"):
        decode(file)


def test_jpeg_2000_of_signed_values_is_named():
    file = imagecodecs.jpeg2k_encode(
        SMOOTH.astype(np.int16),
        level=0,
        codecformat="jp2",
    )

    with pytest.raises(UnreadableImage, match=r"signed values.*3 bands of 16 bits"):
        decode(file)


def encode_bmp(bits, data, masks=(), header_size=40):
    """Return a BMP of 48 x 32 pixels; masks tell the bits of red, green, blue and alpha."""
    compression = 3 if masks else 0
    header = struct.pack(
        "<IiiHHII",
        header_size,
        48,
        32,
        1,
        bits,
        compression,
        len(data),
    )
    header = header.ljust(40, b"\0")
    header += struct.pack(f"<{len(masks)}I", *masks)
    header = header.ljust(header_size, b"\0")

    start_of_data = 14 + len(header)
    file_size = start_of_data + len(data)
    file_header = struct.pack("<IHHI", file_size, 0, 0, start_of_data)
    return b"BM" + file_header + header + data


def pack_16_bits(green_bits):
    """Return pixels of 5 bits of red, 5 or 6 bits of green, and 5 bits of blue."""
    red, green, blue = np.moveaxis(UPWARDS.astype(int), -1, 0)
    red = red >> 3
    green = green >> (8 - green_bits)
    blue = blue >> 3

    pixels = red << (5 + green_bits) | green << 5 | blue
    return pixels.astype("<u2").tobytes()


UPWARDS = SMOOTH[::-1]  # BMP begins with the lowest row
RGBA_ROWS = RGBA[::-1].tobytes()
BGRA_ROWS = RGBA[::-1, :, [2, 1, 0, 3]].tobytes()
XBGR_ROWS = np.dstack([ALPHA, BGR])[::-1].tobytes()
BMPS = {
    "16 bits": encode_bmp(16, pack_16_bits(5)),
    "16 bits with masks": encode_bmp(
        16,
        pack_16_bits(6),
        (0xF800, 0x07E0, 0x001F),
    ),
    "32 bits": encode_bmp(32, BGRA_ROWS),
    "32 bits with masks": encode_bmp(
        32,
        BGRA_ROWS,
        (0xFF0000, 0xFF00, 0xFF),
    ),
    "32 bits with alpha": encode_bmp(
        32,
        BGRA_ROWS,
        (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
        header_size=108,
    ),
}


@pytest.mark.parametrize("kind", BMPS)
def test_bmp(kind):
    file = BMPS[kind]

    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize(
    ("data", "masks", "header_size"),
    [
        (RGBA_ROWS, (0xFF, 0xFF00, 0xFF0000), 40),
        (RGBA_ROWS, (0xFF, 0xFF00, 0xFF0000), 108),
        (XBGR_ROWS, (0xFF000000, 0xFF0000, 0xFF00), 40),
    ],
    ids=["RGBA", "RGBA with a longer header", "XBGR"],
)
def test_masks_of_a_bmp(data, masks, header_size):
    file = encode_bmp(32, data, masks, header_size)

    assert_close(file, SMOOTH)


def test_bmp_of_10_bits():
    values = to_depth(UPWARDS, 10).astype("<u4")
    red, green, blue = np.moveaxis(values, -1, 0)
    pixels = red << 20 | green << 10 | blue
    masks = (1023 << 20, 1023 << 10, 1023)
    file = encode_bmp(32, pixels.tobytes(), masks)

    assert_close(file, SMOOTH)

    with pytest.raises(UnreadableImage, match="starts as BMP but is cut off"):
        decode(file[:-1])


def test_a_mask_of_a_bmp_with_gaps_is_named():
    file = encode_bmp(32, BGRA_ROWS, (5, 0xFF00, 0xFF0000))

    with pytest.raises(UnreadableImage, match="mask 0x5, which is empty or has gaps"):
        decode(file)


def to_big_endian(values, most):
    """Return values up to `most` in one byte each, or in two."""
    dtype = ">u2" if most > 255 else "u1"
    return values.astype(dtype).tobytes()


@pytest.mark.parametrize("most", [1, 7, 100, 255, 256, 1023, 65535])
@pytest.mark.parametrize(
    "kind",
    [
        "P2",
        "P3",
        "P5",
        "P6",
    ],
)
def test_largest_values_of_pnm(kind, most):
    values = SMOOTH.astype(int) * most // 255
    if kind in ("P2", "P5"):
        values = values[..., 0]

    if kind in ("P2", "P3"):
        words = map(str, values.ravel())
        data = " ".join(words).encode()
    else:
        data = to_big_endian(values, most)
    header = f"{kind}\n# comment\n48 32\n{most}\n"
    file = header.encode() + data

    expected = to_rgb(values) * (255 / most)
    assert_close(file, expected)


@pytest.mark.parametrize("background", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transparency": 5},
    ],
)
def test_a_gif_whose_frame_is_smaller_than_the_image(options, background):
    """Pillow shows colour 0 around the frame, or the transparent colour."""
    part = COLOURS.crop((5, 6, 25, 26)).quantize(20)
    changed = bytearray(write_by_pillow(part, "GIF", **options))
    frame = changed.index(b"\x2c\0\0\0\0")
    struct.pack_into("<HH", changed, frame + 1, 5, 6)
    struct.pack_into("<HH", changed, 6, 48, 32)
    changed[11] = background
    file = bytes(changed)

    assert_close(file, read_by_pillow(file))


def encode_sun_raster(bits, data, kind=1, colours=b""):
    has_colours = len(colours) > 0
    header = struct.pack(
        ">8I",
        0x59A66A95,
        48,
        32,
        bits,
        len(data),
        kind,
        has_colours,
        len(colours),
    )

    return header + colours + data


@pytest.mark.parametrize(
    ("bits", "pixels", "expected"),
    [
        (24, BGR, SMOOTH),
        (32, np.dstack([ALPHA, BGR]), SMOOTH),
        (8, GREY, to_rgb(GREY)),
    ],
    ids=["RGB", "XRGB", "grey"],
)
def test_sun_rasters(bits, pixels, expected):
    file = encode_sun_raster(bits, pixels.tobytes())

    assert_close(file, expected)


@pytest.mark.parametrize(
    ("bits", "data", "options", "layout"),
    [
        (1, bytes(32 * 6), {}, "values of 1 bits"),
        (24, SMOOTH.tobytes(), {"kind": 3}, "the type 3"),
        (8, ALPHA.tobytes(), {"colours": bytes(768)}, "a colour map"),
    ],
    ids=["bits", "type", "colours"],
)
def test_sun_rasters_that_are_not_supported_are_named(
    bits,
    data,
    options,
    layout,
):
    file = encode_sun_raster(bits, data, **options)

    with pytest.raises(UnreadableImage, match=f"Sun raster with {layout}"):
        decode(file)


@pytest.mark.parametrize(
    ("codec", "values", "options", "process"),
    [
        ("jpeg8", SMOOTH.astype(np.uint16) * 16, {"bitspersample": 12}, "of 12 bits"),
        ("ljpeg", GREY, {}, "without loss"),
        ("jpegls", SMOOTH, {}, "of the kind JPEG-LS"),
    ],
    ids=["jpeg8", "ljpeg", "jpegls"],
)
def test_jpegs_that_are_not_supported_are_named(
    codec,
    values,
    options,
    process,
):
    encode_jpeg = getattr(imagecodecs, f"{codec}_encode")
    file = encode_jpeg(values, **options)

    with pytest.raises(UnreadableImage, match=f"is a JPEG {process}, which cannot be decoded"):
        decode(file)


def test_heic_is_named():
    file = make_box(b"ftyp", b"heic" + bytes(8)) + bytes(100)

    with pytest.raises(UnreadableImage, match="The file is HEIC, which is not decoded"):
        decode(file)


def encode_pam(values, kind, most=255):
    height, width, bands = values.shape
    header = (
        "P7",
        f"WIDTH {width}",
        f"HEIGHT {height}",
        f"DEPTH {bands}",
        f"MAXVAL {most}",
        f"TUPLTYPE {kind}",
        "ENDHDR\n",
    )
    text = "\n".join(header)

    return text.encode() + to_big_endian(values, most)


@pytest.mark.parametrize(
    ("bands", "kind"),
    [
        (1, "GRAYSCALE"),
        (2, "GRAYSCALE_ALPHA"),
        (3, "RGB"),
        (4, "RGB_ALPHA"),
    ],
)
@pytest.mark.parametrize("most", [255, 4095, 65535])
def test_pam(bands, kind, most):
    pixels = RGBA[..., :bands]
    values = pixels.astype(int) * most // 255

    file = encode_pam(values, kind, most)

    assert_close(file, to_rgb(pixels))


def test_pam_in_black_and_white():
    is_white = SMOOTH[..., :1] > 128

    file = encode_pam(is_white, "BLACKANDWHITE", 1)

    expected = to_rgb(is_white * 255)
    assert_close(file, expected)


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        (encode_pam(BANDS[..., :5], "X"), "PAM of 5 bands"),
        (encode_pam(RGBA, "CMYK"), "PAM of CMYK"),
        (encode_pam(RGBA, "RGB_ALPHA")[:-1], "cut off"),
    ],
    ids=["bands", "CMYK", "cut off"],
)
def test_pam_that_is_not_supported_is_named(file, rule):
    with pytest.raises(UnreadableImage, match=rule):
        decode(file)


def test_the_table_names_every_format_of_this_file():
    names = {row.format for row in DECODED}

    expected = {"JPEG", "PNG", "WebP", "AVIF", "TIFF", "JPEG 2000", "GIF", "BMP", "Sun raster"}
    assert names >= expected
