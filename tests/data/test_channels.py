"""Images of any number of bands: reading, choice, normalisation, augmentation, errors."""

import io

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from vit_jax.config.schema import InputConfig
from vit_jax.data.channel_statistics import measure_bands
from vit_jax.data.decoding.bands import BandChoice
from vit_jax.data.decoding.errors import WrongBands
from vit_jax.data.decoding.images import decode
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.records import Record
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform

GREY = np.arange(64, dtype=np.uint8).reshape(8, 8)
CROPS = ("inception", "resize", "resize_short_side", "simple", "shift", "none")


def make_inputs(channels, **fields):
    defaults = {"train_split": "train", "test_split": "test", "image_size": (8, 8)}
    return InputConfig(channels=channels, **defaults | fields)


def encode_tiff(values, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, values, **options)
    return file.getvalue()


def encode(values, form):
    file = io.BytesIO()
    Image.fromarray(values).save(file, form)
    return file.getvalue()


def make_source(images):
    labels = np.arange(len(images)) % 2
    return MemorySource(images, labels, ("a", "b"))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32, np.float64])
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_values_of_a_tiff_are_those_that_were_stored(dtype, planes):
    rng = np.random.default_rng(0)
    stored = rng.uniform(0, 200, (13, 6, 5)).astype(dtype)
    bands_last = np.moveaxis(stored, 0, -1)
    values = bands_last
    if planes == "separate":
        values = stored
    file = encode_tiff(
        values,
        photometric="minisblack",
        planarconfig=planes,
    )

    read = decode(file, bands=BandChoice(13))

    assert read.shape == (6, 5, 13)
    assert read.dtype in (np.uint8, np.uint16, np.float32)
    np.testing.assert_array_equal(
        read,
        bands_last.astype(read.dtype),
    )


def test_one_pixel_of_16_bits_reaches_the_network():
    values = np.full(
        (8, 8, 4),
        1000,
        np.uint16,
    )
    values[3, 5, 2] = 54_321
    inputs = make_inputs(
        4,
        test_resize="direct",
        value_range=(0.0, 65_535.0),
    )
    source = make_source(values[None])

    transform = build_evaluation_transform(inputs)
    stream = EvaluationStream(source, transform, 1, np.arange(1))
    batch = stream[0]

    assert batch.image.dtype == np.float32
    received = batch.image[0].astype(np.float64) * 32_767.5 + 32_767.5
    np.testing.assert_allclose(
        received,
        values,
        atol=0.01,
    )


def test_bands_are_chosen_in_order():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4096, (6, 5, 8), np.uint16)
    file = encode_tiff(
        values,
        photometric="minisblack",
        planarconfig="contig",
    )

    chosen = decode(
        file,
        bands=BandChoice(4, (8, 1, 2, 3)),
    )

    np.testing.assert_array_equal(
        chosen,
        values[..., [7, 0, 1, 2]],
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "PPM", "TIFF"])
def test_grey_files_have_one_channel(form):
    one = decode(encode(GREY, form), bands=BandChoice(1))
    three = decode(encode(GREY, form))

    assert one.shape == (8, 8, 1)
    np.testing.assert_array_equal(
        one[..., 0],
        three[..., 0],
    )


def test_bands_of_a_png_are_red_green_blue_and_alpha():
    stored = np.stack(
        [GREY, GREY + 64, GREY + 128, 255 - GREY],
        axis=-1,
    )
    pair = stored[..., [0, 3]]

    np.testing.assert_array_equal(
        decode(encode(stored, "PNG"), bands=BandChoice(4)),
        stored,
    )
    np.testing.assert_array_equal(
        decode(encode(pair, "PNG"), bands=BandChoice(2)),
        pair,
    )
    deep = stored * np.uint16(257)
    _, deep_file = cv2.imencode(".png", deep[..., [2, 1, 0, 3]])
    np.testing.assert_array_equal(
        decode(deep_file.tobytes(), bands=BandChoice(4)),
        deep,
    )


def test_equal_colours_count_as_grey():
    colours = np.repeat(GREY[..., None], 3, axis=-1)

    np.testing.assert_array_equal(
        decode(colours, bands=BandChoice(1)),
        GREY[..., None],
    )
    with pytest.raises(WrongBands, match=r"3 bands.*network takes 1"):
        decode(colours + np.arange(3, dtype=np.uint8), bands=BandChoice(1))


def test_white_is_the_highest_value():
    file = encode_tiff(
        GREY,
        photometric="miniswhite",
    )

    np.testing.assert_array_equal(
        decode(file, bands=BandChoice(1))[..., 0],
        255 - GREY,
    )


def test_the_error_of_other_bands_names_the_file(tmp_path):
    source = make_source(np.zeros((3, 8, 8, 5), np.uint8))
    source.name_of = lambda index: f"field_{index}.tif"
    stream = EvaluationStream(
        source,
        build_evaluation_transform(make_inputs(4)),
        2,
        np.arange(2),
    )

    with pytest.raises(ValueError, match=r"field_0\.tif: it has 5 bands, and the network takes 4"):
        stream[0]
    with pytest.raises(WrongBands, match=r"input\.bands=\(9, 1\) wants band 9.*from 1 to 5"):
        decode(source.images[0], bands=BandChoice(2, (9, 1)))


@pytest.mark.parametrize("channels", [1, 2, 5, 13, 32])
@pytest.mark.parametrize("interpolation", [None, "bicubic"])
def test_geometric_augmentations_take_any_channels(channels, interpolation):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 60_000, (20, 14, channels), np.uint16)
    record = Record(values, 0)
    for crop in CROPS:
        inputs = make_inputs(
            channels,
            train_crop=crop,
            train_interpolation=interpolation,
            train_resize_pixels=12 if crop.startswith("resize") else None,
            shift_pixels=2 if crop == "shift" else 0,
            erasing_fraction=1.0,
            value_range=(0.0, 60_000.0),
        )
        image = TrainTransform(inputs)(
            record,
            np.random.default_rng(1),
        )
        assert image.shape == (8, 8, channels)
        assert image.dtype == np.float32
        assert np.abs(image).max() < 1.3

    for resize in ("direct", "short_side"):
        fields = {"test_resize": resize, "test_interpolation": interpolation}
        inputs = make_inputs(
            channels,
            value_range=(0.0, 60_000.0),
            **fields,
        )
        image = build_evaluation_transform(inputs)(record)
        assert image.shape == (8, 8, channels)
        assert np.abs(image.mean()) < 0.3


def test_resizing_treats_each_channel_alone():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (19, 23, 6), np.uint8)
    for resize in ("direct", "short_side"):
        together = build_evaluation_transform(make_inputs(6, test_resize=resize))
        alone = build_evaluation_transform(make_inputs(1, test_resize=resize))
        expected = []
        for band in range(6):
            record = Record(values[..., [band]], 0)
            expected.append(alone(record))
        np.testing.assert_allclose(
            together(Record(values, 0)),
            np.concatenate(expected, axis=-1),
            atol=1e-3,
        )


def test_statistics_are_those_of_all_pixels():
    rng = np.random.default_rng(0)
    values = rng.normal([100, -3, 0.5], [20, 1, 0.1], (40, 9, 7, 3))
    images = values.astype(np.float32)
    images[3, 2, 1, 0] = np.nan
    inputs = make_inputs(
        3,
        bands=(1, 2, 3),
    )

    mean, std = measure_bands(make_source(images), inputs)

    pixels = images.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(
        mean,
        np.nanmean(pixels, axis=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        std,
        np.nanstd(pixels, axis=0),
        rtol=1e-5,
    )


def test_channels_of_one_value_are_named(caplog):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(6, 4, 4, 3)).astype(np.float32)
    images[..., 0] = 7
    images[..., 2] = np.nan
    inputs = make_inputs(
        3,
        bands=(1, 2, 3),
    )

    _, std = measure_bands(make_source(images), inputs)

    assert (std[0], std[2]) == (1, 1)
    (message,) = caplog.messages
    assert "6 training images: 1, 3." in message


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (np.uint16, "7"),
        (np.int16, "7"),
        (np.float32, "7"),
        (np.float32, "-3.4028234663852886e+38"),  # the least value of GDAL
    ],
)
def test_the_no_data_value_of_gdal_is_missing(dtype, text):
    values = np.full((6, 5, 2), 40, dtype)
    values[1, 2, 1] = float(text)
    no_data = (42113, 2, 0, text, True)
    file = encode_tiff(
        values,
        photometric="minisblack",
        planarconfig="contig",
        extratags=[no_data],
    )

    read = decode(file, bands=BandChoice(2))

    assert np.isnan(read[1, 2, 1])
    assert np.nansum(read) == 40 * 59


def test_missing_values_become_the_mean():
    values = np.full(
        (8, 8, 2),
        5,
        np.float32,
    )
    values[1, 2] = np.nan
    inputs = make_inputs(
        2,
        channel_mean=(5.0, 1.0),
        channel_std=(1.0, 2.0),
        test_resize="direct",
    )

    image = build_evaluation_transform(inputs)(
        Record(values, 0),
    )

    assert np.array_equal(image[1, 2], [0, 0])
    assert np.array_equal(image[0, 0], [0, 2])
