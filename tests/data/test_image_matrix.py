"""Each format and layout gives the pixels of Pillow, tifffile or imagecodecs, or an error that names the layout.

References are read by these libraries, or are the pixels that were written where a format loses
none.
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
from vit_jax.data.decoding.depth import depth_of_file
from vit_jax.data.decoding.headers import stated_pixels
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


def as_rgb(values):
    """The rule for bands: one or two are grey, three or four RGB."""
    values = values if values.ndim == 3 else values[..., None]
    return values[..., :3] if values.shape[2] > 2 else np.repeat(values[..., :1], 3, axis=-1)


def assert_close(file, expected, **options):
    found = decode(file, **options)

    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert np.abs(found - expected.astype(float)).max() <= 2


def by_pillow(file):
    """Pixels of the first image without its alpha."""
    image = Image.open(io.BytesIO(file))
    if image.mode in ("LA", "RGBA", "RGBX"):
        return as_rgb(np.asarray(image))
    if image.mode == "P":
        return np.asarray(image.convert("RGBA"))[..., :3]
    return np.asarray(image.convert("RGB"))


def saved(image, kind, **options):
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


def written(values, **options):
    file = io.BytesIO()
    if options.get("compression") == "none":
        options["compression"] = None

    tifffile.imwrite(file, values, **options)
    return file.getvalue()


def tiffs(compression):
    """Yield name, file and values of all layouts that tifffile writes with a compression."""
    kinds = itertools.product(
        range(1, 7),
        ("u1", "u2", "f4"),
        ("rgb", "minisblack"),
        ("contig", "separate"),
        LAYOUTS,
    )
    for bands, dtype, photometric, planes, layout in kinds:
        values = BANDS[..., :bands].astype(dtype) * np.dtype(dtype).type(
            257 if dtype == "u2" else 1
        )
        if compression in ("jpeg", "jpeg_lossy") and dtype == "u2":
            values = values // 16  # 12 bits

        stored = np.moveaxis(values, -1, 0) if planes == "separate" and bands > 1 else values
        options = {
            "photometric": photometric,
            "planarconfig": planes if bands > 1 else None,
            **layout,
        }
        stored = stored[..., 0] if bands == 1 else stored
        is_slow = compression in FAST or dtype != "u1" or bands > 4

        if is_slow and layout and (photometric == "rgb" or bands not in (1, 3)):
            continue

        options |= FAST.get(compression, {})
        name = f"{bands} {dtype} {photometric} {planes} {layout}"

        try:
            file = written(stored, compression=compression, **options)
        except (
            ValueError,
            KeyError,
            RuntimeError,
            NotImplementedError,
        ):  # tifffile does not write this layout
            continue

        yield name, file, bands


@pytest.mark.parametrize("compression", WRITTEN)
def test_tiff(compression):
    """Bands, depths, meanings, planes, strips, tiles, BigTIFF, predictor and order of bytes."""
    count = 0
    for name, file, bands in tiffs(compression):
        values = tifffile.imread(io.BytesIO(file))
        value_range = (0, 255) if values.dtype == np.float32 else None

        if bands > 4:
            with pytest.raises(UnreadableImage, match=rf"TIFF of {bands} bands.*gdal_translate"):
                decode(file, value_range=value_range)
            continue

        page = tifffile.TiffFile(io.BytesIO(file)).pages[0]
        if compression == "lerc" and page.predictor == 3:
            with pytest.raises(UnreadableImage, match=r"a predictor for floating point.*LERC"):
                decode(file, value_range=value_range)
            continue

        if page.photometric == 6 and page.bitspersample > 8:
            with pytest.raises(
                UnreadableImage,
                match=r"YCbCr .*compression \d+ \(JPEG\), 3 bands of 12 bits",
            ):
                decode(file)
            continue

        values = (
            np.moveaxis(values, 0, -1) if values.ndim == 3 and page.planarconfig == 2 else values
        )
        most = {"u1": 255, "f4": 255}.get(values.dtype.str[1:], 2**page.bitspersample - 1)

        expected = as_rgb(values).astype(float).clip(0) * 255 / most
        found = decode(file, value_range=value_range)

        assert np.abs(found - expected).max() <= 2, name

        count += 1

    assert count >= 10


def test_every_compression_that_is_listed_is_tested():
    pillow = {"CCITT RLE", "CCITT group 3", "CCITT group 4"}

    assert {*WRITTEN.values()} | pillow == {*tiff.COMPRESSIONS.values()}

    row = next(row for row in DECODED if row.format == "TIFF")
    for name in tiff.COMPRESSIONS.values():
        assert name in row.decoded


@pytest.mark.parametrize("second", ["deflate", "zstd"])
def test_lerc_with_a_second_compression(second):
    file = written(
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

    file = saved(Image.fromarray(SMOOTH).convert(mode), "TIFF", compression=compression)

    assert_close(file, by_pillow(file))


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
def test_tiff_of_scanned_pages(compression):
    file = saved(Image.fromarray(SMOOTH).convert("1"), "TIFF", compression=compression)
    assert_close(file, by_pillow(file))


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
    file = written(
        SMOOTH,
        photometric="rgb",
        compression="jpeg",
        subsampling=subsampling,
        **layout,
    )

    assert_close(file, by_pillow(file))


def test_jpeg_planes_without_jfif():
    """As GDAL writes them: tifffile takes each plane for RGB."""
    file = written(
        np.moveaxis(SMOOTH, -1, 0),
        photometric="rgb",
        planarconfig="separate",
        compression="jpeg",
    )

    assert file.count(b"JFIF") == 3
    assert_close(file.replace(b"JFIF", b"JFXX"), decode(file))


def jpeg_without_marks(values):
    """A JPEG of bands that are not converted, which no marker says, as libtiff writes it."""
    file = imagecodecs.jpeg8_encode(values, level=95, colorspace="RGB", outcolorspace="RGB")
    adobe = file.index(b"\xff\xee")
    file = file[:adobe] + file[adobe + 2 + int.from_bytes(file[adobe + 2 : adobe + 4], "big") :]
    frame, scan = file.index(b"\xff\xc0"), file.index(b"\xff\xda")
    changed = bytearray(file)
    changed[frame + 10 : frame + 19 : 3] = bytes(range(3))
    changed[scan + 5 : scan + 11 : 2] = bytes(range(3))

    return bytes(changed)


@pytest.mark.parametrize("photometric", ["rgb", "minisblack"])
def test_jpeg_bands_without_marks_in_tiff(photometric):
    """As GDAL writes them: they are the bands, not YCbCr."""
    file = io.BytesIO()
    parts = iter([jpeg_without_marks(SMOOTH)])
    tifffile.imwrite(file, parts, shape=SMOOTH.shape, dtype=np.uint8, compression="jpeg")
    number = {"rgb": 2, "minisblack": 1}[photometric]
    found = decode(changed(file.getvalue(), 262, number))

    assert np.abs(found.astype(int) - SMOOTH).mean() < 2
    assert np.abs(found.astype(int) - SMOOTH).max() < 25


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8, 10, 12, 14, 16])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_bits_of_a_grey_tiff(bits, photometric):
    most = 2**bits - 1
    values = (SMOOTH[..., 0].astype(int) * most // 255).astype(np.uint8 if bits <= 8 else np.uint16)
    stored = values.astype(bool) if bits == 1 else values

    expected = values * (255 / most)
    file = written(stored, photometric=photometric, bitspersample=bits)

    assert_close(file, as_rgb(255 - expected if photometric == "miniswhite" else expected))


@pytest.mark.parametrize("kind", ["assocalpha", "unassalpha", "unspecified"])
@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_colours_are_not_multiplied_by_a_fourth_band(kind, dtype):
    values = RGBA.astype(dtype) * np.dtype(dtype).type(257 if dtype == "u2" else 1)
    file = written(values, photometric="rgb", extrasamples=[kind])

    assert_close(file, SMOOTH)

    if dtype == "u2":
        assert_close(file, SMOOTH, value_range=(0, 65535))

    assert np.array_equal(decode(file), decode(encode(".png", RGBA)))


def test_palettes():
    colours = RNG.integers(0, 65536, (3, 256)).astype(np.uint16)

    assert_close(
        written(SMOOTH[..., 0], photometric="palette", colormap=colours),
        (colours >> 8).T[SMOOTH[..., 0]],
    )

    image = Image.fromarray(SMOOTH).quantize(13)
    for kind in ("TIFF", "PNG", "GIF", "BMP"):
        assert_close(saved(image, kind), np.asarray(image.convert("RGB")))


UNSUPPORTED = {
    "signed values of 8 bits": (
        SMOOTH.astype(np.int8),
        {},
        r"signed integers of 8 bits.*compression 1 \(none\), 3 bands",
    ),
    "complex numbers": (SMOOTH.astype(np.complex64), {}, "complex numbers of 64 bits"),
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
    default = {"photometric": "minisblack" if "volumetric" in options else "rgb"}

    with pytest.raises(UnreadableImage, match=message):
        decode(written(values, **default | options))


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
    file = written(SMOOTH, photometric="rgb", compression="lzw").replace(
        struct.pack("<HHIHH", 259, 3, 1, 5, 0),
        struct.pack("<HHIHH", 259, 3, 1, number, 0),
    )
    with pytest.raises(
        UnreadableImage,
        match=rf"compression {number} \({name}\).*3 bands of 8 bits, unsigned integers",
    ):
        decode(file)


# Hostile TIFFs


def test_damaged_tiffs_are_unreadable():
    rng = np.random.default_rng(0)
    layouts = ({}, {"tile": (16, 16), "bigtiff": True})
    files = [
        written(SMOOTH, photometric="rgb", compression=compression, **layout)
        for compression in ("none", "lzw", "jpeg", "lerc", "zstd", "jpegxl")
        for layout in layouts
    ]

    for file in files:
        ends = np.r_[0 : min(len(file), 300), max(0, len(file) - 300) : len(file)]
        for _ in range(60):
            damaged = bytearray(file)
            for place in rng.choice(ends, 2):
                damaged[place] = rng.choice([0, 1, 127, 255])

            damaged = bytes(damaged[: rng.integers(50, 4 * len(file))])
            with contextlib.suppress(UnreadableImage):
                decode(damaged, value_range=(0, 1))


def changed(file, tag, value):
    """The same TIFF with another value of a tag of 16 or 32 bits, whatever it was."""
    pattern = re.escape(struct.pack("<H", tag)) + b"[\3\4]\0\1\0\0\0"
    at = re.search(pattern, file).end()

    return file[:at] + struct.pack("<I", value) + file[at + 4 :]


def test_tiffs_cannot_ask_for_memory_or_time():
    tiled = written(SMOOTH, photometric="rgb", compression="deflate", tile=(16, 16))
    with pytest.raises(UnreadableImage, match="tiles are much larger than the page"):
        decode(changed(changed(tiled, 322, 65536), 323, 65536))
    with pytest.raises(UnreadableImage, match="4,295 megapixels"):
        decode(changed(changed(tiled, 256, 65535), 257, 65535))
    with pytest.raises(UnreadableImage, match="strips or tiles are listed"):
        decode(changed(tiled, 257, 65535))

    large = written(
        np.zeros((5000, 5000), np.uint8),
        photometric="minisblack",
        compression="png",
        rowsperstrip=5000,
    )
    with pytest.raises(UnreadableImage, match="state more pixels than the page"):
        decode(changed(changed(changed(large, 256, 50), 257, 50), 278, 50))


def test_sparse_tiffs_are_unreadable():
    tiled = written(SMOOTH, photometric="rgb", tile=(16, 16))
    counts = struct.pack("<6H", *[16 * 16 * 3] * 6)

    assert counts in tiled

    with pytest.raises(UnreadableImage, match="a strip or tile is missing"):
        decode(tiled.replace(counts, struct.pack("<6H", 0, *[16 * 16 * 3] * 5)))


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
        assert stated_pixels(encoded) == size[0] * size[1]

    assert stated_pixels(imagecodecs.lerc_encode(values)) == size[0] * size[1] * 3  # samples


# AVIF


@pytest.mark.parametrize("bits", [8, 10, 12])
@pytest.mark.parametrize(
    "layout",
    [
        "400",
        "420",
        "422",
        "444",
    ],
)
@pytest.mark.parametrize("has_alpha", [False, True])
def test_avif(bits, layout, has_alpha):
    if layout == "400" and has_alpha:
        pytest.skip("not written")

    values = RGBA[..., : 3 + has_alpha] if layout != "400" else SMOOTH[..., 0]
    if bits > 8:
        values = (values.astype(np.uint32) * (2**bits - 1) // 255).astype(np.uint16)

    file = imagecodecs.avif_encode(
        values,
        level=95,
        bitspersample=bits,
        pixelformat=imagecodecs.AVIF.PIXEL_FORMAT[f"YUV{layout}"],
    )

    assert_close(file, as_rgb(np.asarray(Image.open(io.BytesIO(file)).convert("RGBA"))))

    if bits > 8:
        assert depth_of_file(file).bits == bits

        exact = (
            as_rgb(np.asarray(imagecodecs.avif_decode(file))).astype(float) * 255 / (2**bits - 1)
        )

        assert np.abs(decode(file, value_range=(0, 2**bits - 1)) - exact).max() <= 2


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
def test_of_a_sequence_the_first_image(kind, mode):
    first = Image.fromarray(RGBA).convert(mode)
    file = saved(first, kind, save_all=True, append_images=[first.rotate(180)])

    assert_close(file, as_rgb(np.asarray(Image.open(io.BytesIO(file)).convert(mode))))


def test_a_png_whose_animation_excludes_the_default_image():
    first = Image.fromarray(SMOOTH)
    others = [first.rotate(180), first.rotate(90)]

    assert_close(
        saved(first, "PNG", save_all=True, default_image=True, append_images=others),
        SMOOTH,
    )


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("mode", ["L", "LA"])
@pytest.mark.parametrize("value_range", ["full", "limited"])
def test_grey_avif(value_range, mode, is_sequence):
    """Also with alpha, in the range of video, and turned."""
    image = Image.fromarray(RGBA).convert(mode)
    options = {
        "subsampling": "4:0:0",
        "range": value_range,
        "quality": 95,
    }

    if is_sequence:
        options |= {"save_all": True, "append_images": [image.rotate(180), image.rotate(90)]}
        file = saved(image, "AVIF", **options)

        assert_close(file, by_pillow(file))

        return  # Pillow 13 cannot write a sequence with Exif data

    turned = Image.Exif()
    turned[0x0112] = 6
    file = saved(image, "AVIF", exif=turned, **options)
    stored = by_pillow(saved(image, "AVIF", **options))

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
    file = saved(
        IMAGES[mode],
        kind,
        **({"lossless": True, "exact": True} if kind == "WEBP" else {}),
    )

    assert_close(file, by_pillow(file))


@pytest.mark.parametrize(
    "options",
    [
        {"transparency": 3},
        {"transparency": 3, "background": 5, "interlace": 1},
    ],
)
@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_transparent_colours_of_a_palette(kind, options):
    file = saved(IMAGES["RGB"].quantize(20), kind, **options)
    assert_close(file, by_pillow(file))


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_png_of_16_bits(bands):
    values = RGBA[..., :bands].astype(np.uint16) * 257
    file = imagecodecs.png_encode(values[..., 0] if bands == 1 else values)

    assert_close(file, as_rgb(RGBA[..., :bands]))
    assert_close(file, as_rgb(RGBA[..., :bands]), value_range=(0, 65535))


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5])
def test_jpeg_2000(bands, bits):
    values = BANDS[..., :bands]
    if bits > 8:
        values = (values.astype(np.uint32) * (2**bits - 1) // 255).astype(np.uint16)

    stored = values[..., 0] if bands == 1 else values
    file = imagecodecs.jpeg2k_encode(
        stored,
        level=0,
        bitspersample=bits,
        codecformat="jp2",
        mct=False,
    )

    if bands > 4:
        with pytest.raises(UnreadableImage, match="JPEG 2000 of 5 bands"):
            decode(file)
        return

    assert_close(file, as_rgb(BANDS[..., :bands]))


@pytest.mark.parametrize("bits", [1, 4, 7, 10])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["jp2", "j2k"])
def test_jpeg_2000_of_other_bits(form, bands, bits):
    values = (RGBA[..., :bands].astype(np.uint32) * (2**bits - 1) // 255).astype(
        np.uint8 if bits <= 8 else np.uint16
    )
    stored = values[..., 0] if bands == 1 else values
    file = imagecodecs.jpeg2k_encode(
        stored,
        level=0,
        bitspersample=bits,
        codecformat=form,
        mct=False,
    )

    assert_close(file, as_rgb(values) * (255 / (2**bits - 1)))

    if bits > 8:
        assert_close(file, as_rgb(RGBA[..., :bands]), value_range=(0, 2**bits - 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"irreversible": True},
        {"tile_size": (16, 16)},
    ],
)
def test_jpeg_2000_of_ycbcr(options):
    file = saved(Image.fromarray(SMOOTH).convert("YCbCr"), "JPEG2000", **options)
    assert_close(file, by_pillow(file))


def box(kind, content):
    return struct.pack(">I4s", 8 + len(content), kind) + content


def jp2_with_boxes(*boxes):
    """A JP2 of one band of 4 bits with other boxes in its header."""
    file = imagecodecs.jpeg2k_encode(
        SMOOTH[..., 0] >> 4,
        level=0,
        bitspersample=4,
        codecformat="jp2",
    )
    header = file.index(b"jp2h") - 4
    end = header + int.from_bytes(file[header : header + 4], "big")
    content = file[header + 8 : header + 8 + 22] + b"".join(boxes)

    return file[:header] + box(b"jp2h", content) + file[end:]


def test_jpeg_2000_with_a_palette():
    colours = RNG.integers(0, 256, (16, 3)).astype(np.uint8)
    file = jp2_with_boxes(
        box(b"colr", struct.pack(">3BI", 1, 0, 0, 16)),
        box(b"pclr", struct.pack(">HB3B", 16, 3, 7, 7, 7) + colours.tobytes()),
        box(b"cmap", b"".join(struct.pack(">HBB", 0, 1, band) for band in range(3))),
    )

    assert_close(file, colours[SMOOTH[..., 0] >> 4])


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (12, "CMYK"),
        (14, "CIELAB"),
        (24, "e-sYCC"),
    ],
)
def test_jpeg_2000_of_other_colours_is_named(number, name):
    file = jp2_with_boxes(box(b"colr", struct.pack(">3BI", 1, 0, 0, number)))
    with pytest.raises(UnreadableImage, match=rf"kind {number} \({name}\).*JPEG 2000"):
        decode(file)


def test_jpeg_2000_of_signed_values_is_named():
    file = imagecodecs.jpeg2k_encode(SMOOTH.astype(np.int16), level=0, codecformat="jp2")
    with pytest.raises(UnreadableImage, match=r"signed values.*3 bands of 16 bits"):
        decode(file)


def bmp(bits, compression, data, masks=b"", header_size=40):
    header = struct.pack(
        "<IiiHHIIiiII",
        header_size,
        48,
        32,
        1,
        bits,
        compression,
        len(data),
        0,
        0,
        0,
        0,
    )
    body = header + masks + bytes(max(0, header_size - 40 - len(masks)))

    return (
        b"BM" + struct.pack("<IHHI", 14 + len(body) + len(data), 0, 0, 14 + len(body)) + body + data
    )


def bits_565(green):
    red, rest, blue = (
        SMOOTH[::-1, :, band].astype(int) >> shift
        for band, shift in ((0, 3), (1, 8 - green), (2, 3))
    )
    return (red << (5 + green) | rest << 5 | blue).astype("<u2").tobytes()


BGRA = RGBA[::-1, :, [2, 1, 0, 3]].tobytes()
BMPS = {
    "16 bits": bmp(16, 0, bits_565(5)),
    "16 bits with masks": bmp(16, 3, bits_565(6), struct.pack("<3I", 0xF800, 0x07E0, 0x001F)),
    "32 bits": bmp(32, 0, BGRA),
    "32 bits with masks": bmp(32, 3, BGRA, struct.pack("<3I", 0xFF0000, 0xFF00, 0xFF)),
    "32 bits with alpha": bmp(
        32,
        3,
        BGRA,
        struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000),
        header_size=108,
    ),
}


@pytest.mark.parametrize("kind", BMPS)
def test_bmp(kind):
    assert_close(BMPS[kind], by_pillow(BMPS[kind]))


XBGR = np.dstack([ALPHA, SMOOTH[..., ::-1]])[::-1].tobytes()
MASKED = {
    "RGBA": (RGBA[::-1].tobytes(), (0xFF, 0xFF00, 0xFF0000), 40),
    "RGBA with a longer header": (RGBA[::-1].tobytes(), (0xFF, 0xFF00, 0xFF0000), 108),
    "XBGR": (XBGR, (0xFF000000, 0xFF0000, 0xFF00), 40),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_a_bmp(kind):
    data, masks, header_size = MASKED[kind]
    assert_close(bmp(32, 3, data, struct.pack("<3I", *masks), header_size), SMOOTH)


def test_bmp_of_10_bits():
    deep = SMOOTH[::-1].astype(np.uint32) * 1023 // 255
    numbers = deep[..., 0] << 20 | deep[..., 1] << 10 | deep[..., 2]
    masks = struct.pack("<3I", 1023 << 20, 1023 << 10, 1023)
    file = bmp(32, 3, numbers.astype("<u4").tobytes(), masks)

    assert_close(file, SMOOTH)

    with pytest.raises(UnreadableImage, match="starts as BMP but is cut off"):
        decode(file[:-1])
    with pytest.raises(UnreadableImage, match="mask 0x5, which is empty or has gaps"):
        decode(bmp(32, 3, BGRA, struct.pack("<3I", 5, 0xFF00, 0xFF0000)))


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
    values = values[..., 0] if kind in ("P2", "P5") else values

    if kind in ("P2", "P3"):
        data = " ".join(map(str, values.ravel())).encode()
    else:
        data = values.astype(">u2" if most > 255 else "u1").tobytes()

    file = f"{kind}\n# comment\n48 32\n{most}\n".encode() + data

    assert_close(file, as_rgb(values) * (255 / most))


@pytest.mark.parametrize("background", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transparency": 5},
    ],
)
def test_a_gif_whose_frame_is_smaller_than_the_image(options, background):
    """Pillow shows colour 0 around it, or the transparent one."""
    part = Image.fromarray(SMOOTH[6:26, 5:25]).quantize(20)
    file = bytearray(saved(part, "GIF", **options))
    frame = file.index(b"\x2c\0\0\0\0")
    file[frame + 1 : frame + 5] = struct.pack("<HH", 5, 6)
    file[6:10] = struct.pack("<HH", 48, 32)
    file[11] = background

    assert_close(bytes(file), by_pillow(bytes(file)))


def sun_raster(bits, data, kind=1, colours=b""):
    numbers = (0x59A66A95, 48, 32, bits, len(data), kind, int(bool(colours)), len(colours))
    return struct.pack(">8I", *numbers) + colours + data


def test_sun_rasters():
    bgr = SMOOTH[..., ::-1].tobytes()

    assert_close(sun_raster(24, bgr), SMOOTH)
    assert_close(sun_raster(32, np.dstack([ALPHA, SMOOTH[..., ::-1]]).tobytes()), SMOOTH)
    assert_close(sun_raster(8, SMOOTH[..., 0].tobytes()), as_rgb(SMOOTH[..., 0]))

    for file, layout in (
        (sun_raster(1, bytes(32 * 6)), "values of 1 bits"),
        (sun_raster(24, bgr, kind=3), "the type 3"),
        (sun_raster(8, SMOOTH[..., 0].tobytes(), colours=bytes(768)), "a colour map"),
    ):
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
    with pytest.raises(UnreadableImage, match=f"is a JPEG {process}, which cannot be decoded"):
        decode(encode_jpeg())


def test_heic_is_named():
    with pytest.raises(UnreadableImage, match="The file is HEIC, which is not decoded"):
        decode(box(b"ftyp", b"heic" + bytes(8)) + bytes(100))


def pam(values, kind, most=255):
    height, width, bands = values.shape
    head = f"P7\nWIDTH {width}\nHEIGHT {height}\nDEPTH {bands}\nMAXVAL {most}\nTUPLTYPE {kind}\nENDHDR\n"

    return head.encode() + values.astype(">u2" if most > 255 else "u1").tobytes()


def test_pam():
    for bands, kind in enumerate(("GRAYSCALE", "GRAYSCALE_ALPHA", "RGB", "RGB_ALPHA"), start=1):
        values = RGBA[..., :bands]

        assert_close(pam(values, kind), as_rgb(values))
        assert_close(pam(values.astype(int) * 257, kind, 65535), as_rgb(values))
        assert_close(pam(values.astype(int) * 4095 // 255, kind, 4095), as_rgb(values))

    black = (SMOOTH[..., :1] > 128).astype(np.uint8)

    assert_close(pam(black, "BLACKANDWHITE", 1), as_rgb(black * 255))

    with pytest.raises(UnreadableImage, match="PAM of 5 bands"):
        decode(pam(BANDS[..., :5], "X"))
    with pytest.raises(UnreadableImage, match="PAM of CMYK"):
        decode(pam(RGBA, "CMYK"))
    with pytest.raises(UnreadableImage, match="cut off"):
        decode(pam(RGBA, "RGB_ALPHA")[:-1])


def test_the_table_names_every_format_of_this_file():
    names = {row.format for row in DECODED}
    assert names >= {"JPEG", "PNG", "WebP", "AVIF", "TIFF", "JPEG 2000", "GIF", "BMP", "Sun raster"}
