"""TIFF files of every layout, written by tifffile, against the values that were written."""

import io

import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal

from vit_jax.data.decoding.images import UnreadableImage, decode

RGB = np.random.default_rng(0).integers(0, 256, (20, 35, 3), dtype=np.uint8)
BAND = np.full((20, 35, 1), 10, np.uint8)


def encode(pixels, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, **options)
    return file.getvalue()


LOSSLESS = ("none", "lzw", "zlib", "packbits", "zstd", "lzma", "lerc", "png", "webp")


@pytest.mark.parametrize("compression", LOSSLESS)
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_compressions(compression, tile):
    options = {}
    if compression == "webp":
        options["compressionargs"] = {"lossless": True}

    file = encode(
        RGB,
        photometric="rgb",
        compression=compression,
        tile=tile,
        **options,
    )

    assert_array_equal(decode(file), RGB)


def test_jpeg_2000_without_loss():
    file = encode(
        RGB,
        photometric="rgb",
        compression="jpeg2000",
        compressionargs={"reversible": True},
    )

    assert_array_equal(decode(file), RGB)


@pytest.mark.parametrize("photometric", ["rgb", "minisblack"])
@pytest.mark.parametrize("planarconfig", ["contig", "separate"])
@pytest.mark.parametrize(
    "extrasamples",
    [
        ["unspecified"],
        ["assocalpha"],
        ["unassalpha"],
    ],
)
def test_a_fourth_band_changes_no_colour(
    photometric,
    planarconfig,
    extrasamples,
):
    pixels = np.dstack([RGB, BAND])
    if planarconfig == "separate":
        pixels = np.moveaxis(pixels, -1, 0)
    if photometric == "minisblack":
        extrasamples = ["unspecified", "unspecified", *extrasamples]

    file = encode(
        pixels,
        photometric=photometric,
        planarconfig=planarconfig,
        extrasamples=extrasamples,
    )

    assert_array_equal(decode(file), RGB)


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("predictor", [False, True])
def test_three_bands_of_16_bits(bigtiff, predictor):
    file = encode(
        RGB.astype(np.uint16) * 257,
        photometric="minisblack",
        planarconfig="contig",
        compression="zlib",
        predictor=predictor,
        bigtiff=bigtiff,
    )

    assert_array_equal(decode(file), RGB)
    assert_array_equal(decode(file, value_range=(0, 65535)), RGB)


def test_a_band_after_grey_is_ignored():
    grey = RGB[..., :1]
    file = encode(
        np.dstack([grey, BAND]),
        photometric="minisblack",
        planarconfig="contig",
    )

    expected = np.repeat(grey, 3, axis=-1)
    assert_array_equal(decode(file), expected)


@pytest.mark.parametrize("bands", [5, 6])
def test_more_than_four_bands_name_their_number(bands):
    pixels = np.repeat(BAND, bands, axis=-1)
    file = encode(
        pixels,
        photometric="minisblack",
        planarconfig="contig",
    )

    with pytest.raises(UnreadableImage, match=f"{bands} bands.*gdal_translate -b 1 -b 2 -b 3"):
        decode(file)
