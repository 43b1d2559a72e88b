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
BANDS = np.dstack([SMOOTH, SMOOTH[..., ::-1]])
ALPHA = np.linspace(0, 255, 32 * 48).reshape(32, 48).astype(np.uint8)
RGBA = np.dstack([SMOOTH, ALPHA])


def to_rgb(values):
    """Take one or two bands for grey, three or four for RGB."""
    if values.ndim == 2:
        values = values[..., None]
    if values.shape[2] > 2:
        return values[..., :3]
    return np.repeat(values[..., :1], 3, axis=-1)


def assert_close(file, expected, **options):
    found = decode(file, **options)

    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert np.abs(found - expected.astype(float)).max() <= 2


def to_depth(values, bits):
    """Scale values of 8 bits to more or fewer bits."""
    scaled = values.astype(np.uint32) * (2**bits - 1) // 255
    return scaled.astype(np.uint8 if bits <= 8 else np.uint16)


def drop_single_band(values):
    """Return grey values without their axis of bands, as libraries expect them."""
    return values[..., 0] if values.shape[-1] == 1 else values


def read_by_pillow(file):
    """Return pixels of the first image without its alpha."""
    image = Image.open(io.BytesIO(file))
    if image.mode in ("LA", "RGBA", "RGBX"):
        return to_rgb(np.asarray(image))
    if image.mode == "P":
        return np.asarray(image.convert("RGBA"))[..., :3]
    return np.asarray(image.convert("RGB"))


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
    return values // 16 if compression in ("jpeg", "jpeg_lossy") else values


def is_left_to_others(compression, dtype, bands, photometric, layout):
    """Return whether a slow combination of options is covered by simpler ones."""
    is_slow = compression in FAST or dtype != "u1" or bands > 4
    is_common = photometric == "minisblack" and bands in (1, 3)

    return bool(is_slow and layout and not is_common)


UNWRITTEN = (ValueError, KeyError, RuntimeError, NotImplementedError)


"""Errors of tifffile about layouts that it does not write."""


def list_tiffs(compression):
    """Yield name, file and number of bands of all layouts that tifffile writes."""
    kinds = itertools.product(
        range(1, 7),
        ("u1", "u2", "f4"),
        ("rgb", "minisblack"),
        ("contig", "separate"),
        LAYOUTS,
    )
    for bands, dtype, photometric, planes, layout in kinds:
        if is_left_to_others(compression, dtype, bands, photometric, layout):
            continue

        values = make_values(bands, dtype, compression)
        if bands == 1:
            values = values[..., 0]
        elif planes == "separate":
            values = np.moveaxis(values, -1, 0)

        options = {
            "photometric": photometric,
            "planarconfig": planes if bands > 1 else None,
            "compression": compression,
        }
        options |= layout | FAST.get(compression, {})

        try:
            file = write_tiff(values, **options)
        except UNWRITTEN:
            continue

        yield f"{bands} {dtype} {photometric} {planes} {layout}", file, bands


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

    most = 255 if values.dtype == np.float32 else 2**page.bitspersample - 1
    return to_rgb(values).astype(float).clip(0) * 255 / most


@pytest.mark.parametrize("compression", WRITTEN)
def test_tiff(compression):
    """Bands, depths, meanings, planes, strips, tiles, BigTIFF, predictor and order of bytes."""
    num_decoded = 0
    for name, file, bands in list_tiffs(compression):
        page = tifffile.TiffFile(io.BytesIO(file)).pages[0]
        value_range = (0, 255) if page.dtype == np.float32 else None

        message = name_unsupported_layout(page, bands, compression)
        if message is not None:
            with pytest.raises(UnreadableImage, match=message):
                decode(file, value_range=value_range)
            continue

        expected = read_by_tifffile(file, page)
        found = decode(file, value_range=value_range)

        assert np.abs(found - expected).max() <= 2, name

        num_decoded += 1

    assert num_decoded >= 10


def test_every_compression_that_is_listed_is_tested():
    of_pillow = {"CCITT RLE", "CCITT group 3", "CCITT group 4"}
    names = set(tiff.COMPRESSIONS.values())

    assert set(WRITTEN.values()) | of_pillow == names

    row = next(row for row in DECODED if row.format == "TIFF")
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

    file = write_by_pillow(
        Image.fromarray(SMOOTH).convert(mode),
        "TIFF",
        compression=compression,
    )

    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
def test_tiff_of_scanned_pages(compression):
    file = write_by_pillow(
        Image.fromarray(SMOOTH).convert("1"),
        "TIFF",
        compression=compression,
    )
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

    assert file.count(b"JFIF") == 3
    assert_close(file.replace(b"JFIF", b"JFXX"), decode(file))


def encode_jpeg_without_marks(values):
    """Return a JPEG of bands that are not converted, and no marker that says so, as in libtiff."""
    file = imagecodecs.jpeg8_encode(
        values,
        level=95,
        colorspace="RGB",
        outcolorspace="RGB",
    )
    adobe = file.index(b"\xff\xee")
    length = int.from_bytes(file[adobe + 2 : adobe + 4], "big")
    file = bytearray(file[:adobe] + file[adobe + 2 + length :])

    frame = file.index(b"\xff\xc0")
    file[frame + 10 : frame + 19 : 3] = bytes(range(3))
    scan = file.index(b"\xff\xda")
    file[scan + 5 : scan + 11 : 2] = bytes(range(3))

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

    found = decode(change_tag(file.getvalue(), 262, number))

    difference = np.abs(found.astype(int) - SMOOTH)

    assert difference.mean() < 2
    assert difference.max() < 25


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8, 10, 12, 14, 16])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_bits_of_a_grey_tiff(bits, photometric):
    values = to_depth(SMOOTH[..., 0], bits)
    stored = values.astype(bool) if bits == 1 else values
    file = write_tiff(stored, photometric=photometric, bitspersample=bits)

    expected = values * (255 / (2**bits - 1))
    if photometric == "miniswhite":
        expected = 255 - expected

    assert_close(file, to_rgb(expected))


@pytest.mark.parametrize("kind", ["assocalpha", "unassalpha", "unspecified"])
def test_colours_are_not_multiplied_by_a_fourth_band(kind):
    file = write_tiff(RGBA, photometric="rgb", extrasamples=[kind])

    assert_close(file, SMOOTH)
    assert np.array_equal(decode(file), decode(encode(".png", RGBA)))


@pytest.mark.parametrize("kind", ["assocalpha", "unassalpha", "unspecified"])
def test_colours_of_16_bits_are_not_multiplied_by_a_fourth_band(kind):
    values = RGBA.astype(np.uint16) * 257
    file = write_tiff(values, photometric="rgb", extrasamples=[kind])

    assert_close(file, SMOOTH)
    assert_close(file, SMOOTH, value_range=(0, 65535))
    assert np.array_equal(decode(file), decode(encode(".png", RGBA)))


def test_palettes():
    colours = RNG.integers(0, 65536, (3, 256)).astype(np.uint16)
    file = write_tiff(
        SMOOTH[..., 0],
        photometric="palette",
        colormap=colours,
    )

    expected = (colours >> 8).T[SMOOTH[..., 0]]
    assert_close(file, expected)

    image = Image.fromarray(SMOOTH).quantize(13)
    for kind in ("TIFF", "PNG", "GIF", "BMP"):
        assert_close(write_by_pillow(image, kind), np.asarray(image.convert("RGB")))


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
        {"volumetric": True, "tile": (16, 16, 16)},
        "volumes",
    ),
    "Lab": (SMOOTH, {"photometric": "cielab"}, r"colours as CIELAB \(8\)"),
    "inks": (
        BANDS[..., :4],
        {"photometric": "separated", "extratags": [(332, "H", 1, 2, True)]},
        "4 inks that are not CMYK",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_layouts_that_are_not_supported_are_named(kind):
    values, options, message = UNSUPPORTED[kind]
    photometric = "minisblack" if "volumetric" in options else "rgb"
    file = write_tiff(values, **{"photometric": photometric} | options)

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
    lzw = struct.pack("<HHIHH", 259, 3, 1, 5, 0)
    unsupported = struct.pack("<HHIHH", 259, 3, 1, number, 0)
    file = write_tiff(SMOOTH, photometric="rgb", compression="lzw").replace(lzw, unsupported)

    rule = rf"compression {number} \({name}\).*3 bands of 8 bits, unsigned integers"
    with pytest.raises(UnreadableImage, match=rule):
        decode(file)


# Hostile TIFFs


def damage(file, rng):
    """Change two bytes near the ends of a file, and cut some files off."""
    ends = np.r_[0 : min(len(file), 300), max(0, len(file) - 300) : len(file)]
    damaged = bytearray(file)

    for place in rng.choice(ends, 2):
        damaged[place] = rng.choice([0, 1, 127, 255])

    return bytes(damaged[: rng.integers(50, 4 * len(file))])


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
                with contextlib.suppress(UnreadableImage):
                    decode(damage(file, rng), value_range=(0, 1))


def change_tag(file, tag, value):
    """Replace the value of a tag of 16 or 32 bits in a TIFF."""
    pattern = re.escape(struct.pack("<H", tag)) + b"[\3\4]\0\1\0\0\0"
    place = re.search(pattern, file).end()

    return file[:place] + struct.pack("<I", value) + file[place + 4 :]


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

    with pytest.raises(UnreadableImage, match=rule):
        decode(change_tags(tiled, tags))


def test_tiffs_cannot_ask_for_time():
    """A small page cannot have a large image in its strip."""
    large = write_tiff(
        np.zeros((5000, 5000), np.uint8),
        photometric="minisblack",
        compression="png",
        rowsperstrip=5000,
    )

    with pytest.raises(UnreadableImage, match="state more pixels than the page"):
        decode(change_tags(large, {256: 50, 257: 50, 278: 50}))


def test_sparse_tiffs_are_unreadable():
    tiled = write_tiff(SMOOTH, photometric="rgb", tile=(16, 16))
    tile_bytes = 16 * 16 * 3
    counts = struct.pack("<6H", *[tile_bytes] * 6)
    sparse_counts = struct.pack("<6H", 0, *[tile_bytes] * 5)

    assert counts in tiled

    with pytest.raises(UnreadableImage, match="a strip or tile is missing"):
        decode(tiled.replace(counts, sparse_counts))


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
    values = np.zeros((*size, 3), np.uint8)
    for encoded in (
        imagecodecs.jpegxl_encode(values),
        imagecodecs.jpegxl_encode(values, usecontainer=True),
        imagecodecs.jpegxr_encode(values),
        imagecodecs.jpeg2k_encode(values),
        imagecodecs.webp_encode(values),
    ):
        assert count_stated_pixels(encoded) == size[0] * size[1]

    assert count_stated_pixels(imagecodecs.lerc_encode(values)) == size[0] * size[1] * 3  # samples


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
        values = SMOOTH[..., 0]

    file = imagecodecs.avif_encode(
        to_depth(values, bits),
        level=95,
        bitspersample=bits,
        pixelformat=imagecodecs.AVIF.PIXEL_FORMAT[f"YUV{layout}"],
    )

    by_pillow = Image.open(io.BytesIO(file)).convert("RGBA")

    assert_close(file, to_rgb(np.asarray(by_pillow)))

    if bits > 8:
        assert read_file_depth(file).bits == bits

        most = 2**bits - 1
        exact = to_rgb(np.asarray(imagecodecs.avif_decode(file))).astype(float) * 255 / most
        found = decode(file, value_range=(0, most))

        assert np.abs(found - exact).max() <= 2


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
    first = Image.fromarray(RGBA).convert(mode)
    file = write_by_pillow(
        first,
        kind,
        save_all=True,
        append_images=[first.rotate(180)],
    )

    by_pillow = Image.open(io.BytesIO(file)).convert(mode)

    assert_close(file, to_rgb(np.asarray(by_pillow)))


def test_a_png_whose_animation_excludes_the_default_image():
    first = Image.fromarray(SMOOTH)
    file = write_by_pillow(
        first,
        "PNG",
        save_all=True,
        default_image=True,
        append_images=[first.rotate(180), first.rotate(90)],
    )

    assert_close(file, SMOOTH)


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("mode", ["L", "LA"])
@pytest.mark.parametrize("value_range", ["full", "limited"])
def test_grey_avif(value_range, mode, is_sequence):
    """Grey is decoded also with alpha, in the range of video, and turned.

    Pillow 13 cannot write a sequence with Exif data.
    """
    image = Image.fromarray(RGBA).convert(mode)
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

    turned = Image.Exif()
    turned[0x0112] = 6
    file = write_by_pillow(image, "AVIF", exif=turned, **options)
    stored = read_by_pillow(write_by_pillow(image, "AVIF", **options))

    assert_close(file, stored)
    assert_close(file, np.rot90(stored, -1), exif_orientation=True)


# Other formats

IMAGES = {
    mode: Image.fromarray(RGBA).convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")
}
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
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    file = write_by_pillow(IMAGES[mode], kind, **options)

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
    file = write_by_pillow(IMAGES["RGB"].quantize(20), kind, **options)
    assert_close(file, read_by_pillow(file))


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_png_of_16_bits(bands):
    values = RGBA[..., :bands].astype(np.uint16) * 257
    file = imagecodecs.png_encode(drop_single_band(values))

    expected = to_rgb(RGBA[..., :bands])
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
    values = to_depth(BANDS[..., :bands], bits)
    file = encode_jpeg_2000(drop_single_band(values), bits, mct=False)

    if bands > 4:
        with pytest.raises(UnreadableImage, match="JPEG 2000 of 5 bands"):
            decode(file)
        return

    assert_close(file, to_rgb(BANDS[..., :bands]))


@pytest.mark.parametrize("bits", [1, 4, 7, 10])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["jp2", "j2k"])
def test_jpeg_2000_of_other_bits(form, bands, bits):
    values = to_depth(RGBA[..., :bands], bits)
    file = encode_jpeg_2000(
        drop_single_band(values),
        bits,
        form,
        mct=False,
    )
    most = 2**bits - 1

    assert_close(file, to_rgb(values) * (255 / most))

    if bits > 8:
        assert_close(
            file,
            to_rgb(RGBA[..., :bands]),
            value_range=(0, most),
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"irreversible": True},
        {"tile_size": (16, 16)},
    ],
)
def test_jpeg_2000_of_ycbcr(options):
    file = write_by_pillow(
        Image.fromarray(SMOOTH).convert("YCbCr"),
        "JPEG2000",
        **options,
    )
    assert_close(file, read_by_pillow(file))


def make_box(kind, content):
    return struct.pack(">I4s", 8 + len(content), kind) + content


def encode_jp2_with_boxes(*boxes):
    """Return a JP2 of one band of 4 bits with other boxes in its header."""
    file = encode_jpeg_2000(SMOOTH[..., 0] >> 4, bits=4)
    header = file.index(b"jp2h") - 4
    end = header + int.from_bytes(file[header : header + 4], "big")
    image_header = file[header + 8 : header + 8 + 22]

    new_header = make_box(b"jp2h", image_header + b"".join(boxes))
    return file[:header] + new_header + file[end:]


def test_jpeg_2000_with_a_palette():
    colours = RNG.integers(0, 256, (16, 3)).astype(np.uint8)
    bands = b"".join(struct.pack(">HBB", 0, 1, band) for band in range(3))
    file = encode_jp2_with_boxes(
        make_box(b"colr", struct.pack(">3BI", 1, 0, 0, 16)),
        make_box(b"pclr", struct.pack(">HB3B", 16, 3, 7, 7, 7) + colours.tobytes()),
        make_box(b"cmap", bands),
    )

    expected = colours[SMOOTH[..., 0] >> 4]
    assert_close(file, expected)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (12, "CMYK"),
        (14, "CIELAB"),
        (24, "e-sYCC"),
    ],
)
def test_jpeg_2000_of_other_colours_is_named(number, name):
    file = encode_jp2_with_boxes(make_box(b"colr", struct.pack(">3BI", 1, 0, 0, number)))
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


def encode_bmp(bits, compression, data, masks=b"", header_size=40):
    """Return a BMP of 48 x 32 pixels."""
    sizes = (header_size, 48, 32, 1, bits, compression, len(data))
    header = struct.pack("<IiiHHIIiiII", *sizes, 0, 0, 0, 0) + masks
    header = header.ljust(max(header_size, len(header)), b"\0")

    start_of_data = 14 + len(header)
    file_size = start_of_data + len(data)

    return b"BM" + struct.pack("<IHHI", file_size, 0, 0, start_of_data) + header + data


def pack_16_bits(green_bits):
    """Return pixels of 5 bits of red, 5 or 6 bits of green, and 5 bits of blue."""
    red, green, blue = np.moveaxis(SMOOTH[::-1].astype(int), -1, 0)
    red = red >> 3
    green = green >> (8 - green_bits)
    blue = blue >> 3

    pixels = red << (5 + green_bits) | green << 5 | blue
    return pixels.astype("<u2").tobytes()


BGRA = RGBA[::-1, :, [2, 1, 0, 3]].tobytes()
BMPS = {
    "16 bits": encode_bmp(16, 0, pack_16_bits(5)),
    "16 bits with masks": encode_bmp(
        16,
        3,
        pack_16_bits(6),
        struct.pack("<3I", 0xF800, 0x07E0, 0x001F),
    ),
    "32 bits": encode_bmp(32, 0, BGRA),
    "32 bits with masks": encode_bmp(
        32,
        3,
        BGRA,
        struct.pack("<3I", 0xFF0000, 0xFF00, 0xFF),
    ),
    "32 bits with alpha": encode_bmp(
        32,
        3,
        BGRA,
        struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000),
        header_size=108,
    ),
}


@pytest.mark.parametrize("kind", BMPS)
def test_bmp(kind):
    assert_close(BMPS[kind], read_by_pillow(BMPS[kind]))


XBGR = np.dstack([ALPHA, SMOOTH[..., ::-1]])[::-1].tobytes()
MASKED = {
    "RGBA": (RGBA[::-1].tobytes(), (0xFF, 0xFF00, 0xFF0000), 40),
    "RGBA with a longer header": (RGBA[::-1].tobytes(), (0xFF, 0xFF00, 0xFF0000), 108),
    "XBGR": (XBGR, (0xFF000000, 0xFF0000, 0xFF00), 40),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_a_bmp(kind):
    data, masks, header_size = MASKED[kind]
    file = encode_bmp(32, 3, data, struct.pack("<3I", *masks), header_size)

    assert_close(file, SMOOTH)


def test_bmp_of_10_bits():
    red, green, blue = np.moveaxis(
        SMOOTH[::-1].astype(np.uint32) * 1023 // 255,
        -1,
        0,
    )
    pixels = red << 20 | green << 10 | blue
    masks = struct.pack("<3I", 1023 << 20, 1023 << 10, 1023)
    file = encode_bmp(32, 3, pixels.astype("<u4").tobytes(), masks)

    assert_close(file, SMOOTH)

    with pytest.raises(UnreadableImage, match="starts as BMP but is cut off"):
        decode(file[:-1])


def test_a_mask_of_a_bmp_with_gaps_is_named():
    file = encode_bmp(32, 3, BGRA, struct.pack("<3I", 5, 0xFF00, 0xFF0000))

    with pytest.raises(UnreadableImage, match="mask 0x5, which is empty or has gaps"):
        decode(file)


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
        data = " ".join(map(str, values.ravel())).encode()
    else:
        data = values.astype(">u2" if most > 255 else "u1").tobytes()

    file = f"{kind}\n# comment\n48 32\n{most}\n".encode() + data

    assert_close(file, to_rgb(values) * (255 / most))


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
    part = Image.fromarray(SMOOTH[6:26, 5:25]).quantize(20)
    file = bytearray(write_by_pillow(part, "GIF", **options))
    frame = file.index(b"\x2c\0\0\0\0")
    file[frame + 1 : frame + 5] = struct.pack("<HH", 5, 6)
    file[6:10] = struct.pack("<HH", 48, 32)
    file[11] = background

    assert_close(bytes(file), read_by_pillow(bytes(file)))


def encode_sun_raster(bits, data, kind=1, colours=b""):
    has_colours = int(bool(colours))
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
        (24, SMOOTH[..., ::-1], SMOOTH),
        (32, np.dstack([ALPHA, SMOOTH[..., ::-1]]), SMOOTH),
        (8, SMOOTH[..., 0], np.dstack([SMOOTH[..., 0]] * 3)),
    ],
    ids=["RGB", "XRGB", "grey"],
)
def test_sun_rasters(bits, pixels, expected):
    assert_close(encode_sun_raster(bits, pixels.tobytes()), expected)


@pytest.mark.parametrize(
    ("bits", "data", "options", "layout"),
    [
        (1, bytes(32 * 6), {}, "values of 1 bits"),
        (24, SMOOTH.tobytes(), {"kind": 3}, "the type 3"),
        (8, ALPHA.tobytes(), {"colours": bytes(768)}, "a colour map"),
    ],
    ids=["bits", "type", "colours"],
)
def test_sun_rasters_that_are_not_supported_are_named(bits, data, options, layout):
    file = encode_sun_raster(bits, data, **options)

    with pytest.raises(UnreadableImage, match=f"Sun raster with {layout}"):
        decode(file)


@pytest.mark.parametrize(
    ("encode_jpeg", "process"),
    [
        (
            lambda: imagecodecs.jpeg8_encode(SMOOTH.astype(np.uint16) * 16, bitspersample=12),
            "of 12 bits",
        ),
        (lambda: imagecodecs.ljpeg_encode(SMOOTH[..., 0]), "without loss"),
        (lambda: imagecodecs.jpegls_encode(SMOOTH), "of the kind JPEG-LS"),
    ],
)
def test_jpegs_that_are_not_supported_are_named(encode_jpeg, process):
    file = encode_jpeg()

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
    dtype = ">u2" if most > 255 else "u1"

    return "\n".join(header).encode() + values.astype(dtype).tobytes()


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
    values = RGBA[..., :bands]
    file = encode_pam(values.astype(int) * most // 255, kind, most)

    assert_close(file, to_rgb(values))


def test_pam_in_black_and_white():
    black = (SMOOTH[..., :1] > 128).astype(np.uint8)

    assert_close(encode_pam(black, "BLACKANDWHITE", 1), to_rgb(black * 255))


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
