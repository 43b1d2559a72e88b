"""Values of more than 8 bits: the range that a file states, and the one that is given."""

import io
import logging
import pickle
import types

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from tests.data.decoding.test_orientation import UPRIGHT
from tests.data.deep_files import packed, png, pnm, tiff
from tests.data.packed_files import encode
from vit_jax.api.model import Images
from vit_jax.data.crops import Box
from vit_jax.data.decoding.depth import MOST_FILES, count_pages, read_file_depth, survey
from vit_jax.data.decoding.images import UnreadableImage, decode, plan_crop
from vit_jax.data.records import Record
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform
from vit_jax.data.unreadable import find_reason
from vit_jax.evals.splits import SplitChoice, open_pair, open_split

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 4096, (7, 9, 3)).astype(np.uint16)  # 12 bits
RGB[0, 0] = 0, 4095, 2047
GREY = RNG.integers(0, 4096, (7, 9)).astype(np.uint16)
GREY[0, :2] = 0, 4095
SIGNED = GREY.astype(np.int16) - 1000
UNIT = GREY.astype(np.float32) / 4095
RAMP = np.arange(63, dtype=np.uint16).reshape(7, 9) * 65  # 12 bits
UNIT_RAMP = RAMP.astype(np.float32) / 4095


def map_to_bytes(values, low=0, high=4095):
    """Return values mapped from a range to RGB of 8 bits, in float64."""
    shifted = values.astype(np.float64) - low
    fractions = np.clip(shifted / (high - low), 0, 1)
    pixels = np.rint(fractions * 255).astype(np.uint8)
    if pixels.ndim == 3:
        return pixels
    return np.dstack([pixels, pixels, pixels])


LEVELS = map_to_bytes(GREY)
COLOURS = map_to_bytes(RGB)
THREE = ("H", 4095, 4095, 4095)
FROM_A_QUARTER = {"t340": ("f", 0.25), "t341": ("f", 1.0)}
TENTH = GREY // 4
NIBBLES = GREY // 273
STEPS = GREY // 16 * 16
STATED = {
    "PNG with sBIT": (
        png(GREY, 12),
        LEVELS,
    ),
    "PNG in RGB with sBIT": (
        png(RGB, 12),
        COLOURS,
    ),
    "TIFF with MaxSampleValue": (
        tiff(GREY, most=4095),
        LEVELS,
    ),
    "TIFF of Motorola with MaxSampleValue": (
        tiff(GREY, ">", most=4095),
        LEVELS,
    ),
    "TIFF with a range of another end": (
        tiff(GREY, most=5000),
        map_to_bytes(GREY, 0, 5000),
    ),
    "TIFF in RGB with SMaxSampleValue": (
        tiff(RGB, t341=THREE),
        COLOURS,
    ),
    "BigTIFF": (
        tiff(RGB, is_big=True, t281=THREE),
        COLOURS,
    ),
    "TIFF where white is zero": (
        tiff(GREY, photometric=0, most=4095),
        255 - LEVELS,
    ),
    "TIFF of signed values": (
        tiff(SIGNED, t340=("H", 0), t341=("H", 3095)),
        map_to_bytes(SIGNED, 0, 3095),
    ),
    "packed TIFF": (
        tiff(GREY, bits=12),
        LEVELS,
    ),
    "packed TIFF where white is zero": (
        tiff(GREY, ">", bits=12, photometric=0),
        255 - LEVELS,
    ),
    "packed TIFF of 10 bits": (
        tiff(TENTH, bits=10),
        map_to_bytes(TENTH, 0, 1023),
    ),
    "PGM": (
        pnm(GREY, 4095),
        LEVELS,
    ),
    "PGM whose values are multiples of 16": (
        pnm(STEPS, 4095),
        map_to_bytes(STEPS),
    ),
    "PPM": (
        pnm(RGB, 4095),
        COLOURS,
    ),
    "PGM of 4 bits": (
        pnm(NIBBLES, 15),
        map_to_bytes(NIBBLES, 0, 15),
    ),
    "TIFF of float32": (
        tiff(UNIT, **FROM_A_QUARTER),
        map_to_bytes(UNIT, 0.25, 1),
    ),
    "TIFF of float32 without a lowest value": (
        tiff(UNIT, t341=("d", 2.0)),
        map_to_bytes(UNIT, 0, 2),
    ),
    "TIFF of float32 in RGB": (
        tiff(RGB.astype(np.float32), t341=("f", 4095, 4095, 4095)),
        COLOURS,
    ),
    "TIFF of float64": (
        tiff(UNIT.astype(np.float64), t341=("d", 1.0)),
        map_to_bytes(UNIT, 0, 1),
    ),
}


@pytest.mark.parametrize("kind", STATED)
def test_the_range_that_a_file_states(kind):
    file, expected = STATED[kind]

    assert_array_equal(decode(file), expected)

    def choose_box(height, width):
        return Box(1, 2, height - 1, width - 2)

    read = plan_crop(file, choose_box, (1, 1))
    assert_array_equal(read(), expected[1:, 2:])


TOP = (GREY.astype(np.uint32) * 65535 // 4095).astype(np.uint16)
# As the PNG specification wants it: values scaled to 16 bits, by a factor or with zeros at the end.
SCALED = (GREY << 4 | GREY >> 8).astype(np.uint16)
SCALED_AND_DARK = (GREY // 20 << 4).astype(np.uint16)
FULL = {
    "PNG": png(TOP),
    "PNG of 12 bits that are not stated": png(GREY),
    "TIFF": tiff(TOP),
    "TIFF of 12 bits that are not stated": tiff(GREY),
    "TIFF in RGB": tiff(RGB),
    "TIFF where white is zero": tiff(GREY, photometric=0),
    "TIFF that states 16 bits": tiff(GREY, most=65535),
    "TIFF of signed values": tiff(GREY.astype(np.int16)),
    "TIFF that states less than there is": tiff(GREY, most=255),
    "PGM of 16 bits": pnm(GREY, 65535),
    "PGM of 8 bits": pnm(GREY // 16, 255),
    "PNG with sBIT, scaled": png(SCALED, 12),
    "PNG with sBIT, scaled and dark": png(SCALED_AND_DARK, 12),
    "PNG with sBIT of all bits": png(GREY, 16),
}


@pytest.mark.parametrize("kind", FULL)
def test_all_16_bits_are_converted_as_by_opencv(kind):
    file = FULL[kind]

    found = decode(file)

    content = np.frombuffer(file, np.uint8)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    expected = cv2.imdecode(content, flags)

    assert_array_equal(found, expected)


FLOATS = GREY.astype(np.float32)
NEGATIVE = GREY.astype(np.int16) - 500
DIM = GREY // 16
GIVEN = {
    "PNG": (
        png(GREY),
        GREY,
    ),
    "PNG in RGB": (
        png(RGB),
        RGB,
    ),
    "PNG with sBIT": (
        png(GREY, 10),
        GREY,
    ),
    "TIFF": (
        tiff(GREY),
        GREY,
    ),
    "TIFF in RGB": (
        tiff(RGB, ">"),
        RGB,
    ),
    "TIFF with MaxSampleValue": (
        tiff(GREY, most=60000),
        GREY,
    ),
    "TIFF of signed values": (
        tiff(NEGATIVE),
        NEGATIVE,
    ),
    "TIFF of uint32": (
        tiff(GREY.astype(np.uint32)),
        GREY,
    ),
    "TIFF of float32": (
        tiff(FLOATS),
        GREY,
    ),
    "TIFF of float32 with a range": (
        tiff(FLOATS, t341=("f", 1.0)),
        GREY,
    ),
    "packed TIFF": (
        tiff(GREY, bits=12),
        GREY,
    ),
    "PGM": (
        pnm(GREY, 4095),
        GREY,
    ),
    "TIFF of float16": (
        tiff(DIM.astype(np.float16)),
        DIM,
    ),
    "TIFF of two bands": (
        tiff(RGB[..., :2], photometric=1),
        RGB[..., 0],
    ),
    "TIFF of three bands that are not called RGB": (
        tiff(RGB, photometric=1),
        RGB,
    ),
    "TIFF of four bands": (
        tiff(np.dstack([RGB, GREY]), photometric=1),
        RGB,
    ),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_given_range_takes_precedence(kind):
    file, values = GIVEN[kind]

    found = decode(file, value_range=(100, 3000.5))

    expected = map_to_bytes(values, 100, 3000.5)
    assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "file",
    [
        png(GREY.astype(np.uint8)),
        tiff(GREY.astype(np.uint8)),
        pnm(GREY // 273, 15),
    ],
    ids=["PNG", "TIFF", "PGM"],
)
def test_a_range_is_for_more_than_8_bits(file):
    without_range = decode(file)

    with_range = decode(file, value_range=(0, 4095))

    assert_array_equal(with_range, without_range)


def test_values_that_are_not_finite():
    """NaN and negative infinity become black, infinity becomes white."""
    values = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)
    file = tiff(values)

    found = decode(file, value_range=(0, 1))

    levels = found[0, :, 0]
    assert levels.tolist() == [0, 255, 0, 128]


def test_a_range_of_a_tiff_in_which_white_is_zero():
    file = tiff(GREY, photometric=0)

    inverted = decode(file, value_range=(0, 2000))

    expected = 255 - map_to_bytes(GREY, 0, 2000)
    assert_array_equal(inverted, expected)


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_deep_files_are_turned_upright(orientation):
    values = 500 * np.array(UPRIGHT[1], np.uint16)
    file = tiff(values, t274=("H", orientation))

    stored = decode(file, value_range=(0, 4095))
    upright = decode(
        file,
        exif_orientation=True,
        value_range=(0, 4095),
    )

    assert_array_equal(stored, map_to_bytes(values))
    upright_values = np.array(UPRIGHT[orientation]) * 500
    expected = map_to_bytes(upright_values)
    assert_array_equal(upright, expected)


def test_alpha_is_dropped_where_values_are_mapped():
    rgba = np.dstack([RGB, GREY[..., None]])
    bgra = rgba[..., [2, 1, 0, 3]]
    files = [
        encode(".png", bgra),
        tiff(rgba, photometric=2, t338=("H", 2)),
    ]

    for file in files:
        found = decode(file, value_range=(0, 4095))
        assert_array_equal(found, map_to_bytes(RGB))


@pytest.mark.parametrize(
    "values",
    [
        UNIT,
        GREY.astype(np.uint32),
        GREY.astype(np.int32),
    ],
)
def test_an_error_about_a_missing_range_names_the_options(values):
    rule = r"--config\.input\.value_range=0,1 .*--images.value_range=0,1"

    with pytest.raises(UnreadableImage, match=rule):
        decode(tiff(values))


COMPLEX = UNIT.astype(np.complex64).view(np.float32)
FIVE_BANDS = np.dstack([RGB, RGB[..., :2]])
SIX_BANDS = np.dstack([RGB, RGB])


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        (tiff(COMPLEX, t339=("H", 6)), "complex numbers of 32 bits"),
        (tiff(RGB, t284=("H", 2)), "1 of 3 strips or tiles are listed"),
        (tiff(RGB, t259=("H", 34661)), r"compression 34661 \(JBIG\)"),
        (tiff(FIVE_BANDS), "5 bands"),
        (tiff(SIX_BANDS, photometric=1), "6 bands"),
        (tiff(GREY)[:60], "cut off"),
    ],
)
def test_values_that_cannot_be_decoded(file, rule):
    with pytest.raises(UnreadableImage, match=rule):
        decode(file, value_range=(0, 1))


def make_reader(file):
    """Return a function from a place and a number of bytes to these bytes of a file."""
    return lambda place, count: file[place : place + count]


@pytest.mark.parametrize(
    "file",
    [
        tiff(GREY, bits=12, most=4095),
        png(GREY, 12),
        pnm(GREY, 4095),
        tiff(UNIT, is_big=True),
    ],
    ids=["TIFF", "PNG", "PGM", "BigTIFF"],
)
def test_headers_that_are_damaged_state_nothing(file):
    for size in range(0, 60, 3):
        cut_off = file[:size]
        read_file_depth(cut_off)

        num_pages = count_pages(make_reader(cut_off))

        assert num_pages == 1


def test_a_directory_of_pages_that_leads_to_itself():
    endless = bytearray(tiff(GREY))
    first = endless[4:8]
    endless[-4:] = first
    reader = make_reader(bytes(endless))

    assert count_pages(reader) == 1


def test_training_and_evaluation_take_the_range(make_config):
    record = Record(tiff(UNIT), 0)
    config = make_config(
        image_size=UNIT.shape,
        train_crop="none",
        flip=False,
        test_resize="direct",
        value_range=(0.0, 2.0),
    )
    train = TrainTransform(config)
    evaluate = build_evaluation_transform(config)

    trained = train(record, np.random.default_rng(0))
    evaluated = evaluate(record)

    expected = map_to_bytes(UNIT, 0, 2)
    assert_array_equal(trained, expected)
    assert_array_equal(evaluated, expected)
    assert trained.max() <= 128


def test_the_files_of_these_tests_are_packed_as_specified():
    twelve = np.array(
        [
            [0xABC, 0x123],
            [0xFFF, 0],
        ]
    )
    ten = np.array([[0b1000000001]])

    assert packed(twelve, 12) == b"\xab\xc1\x23\xff\xf0\x00"
    assert packed(ten, 10) == b"\x80\x40"


# Warnings about files of more than 8 bits and of several pages.


def test_training_crops_take_the_range(make_config):
    """Values up to 1 are the lower half of a range up to 2."""
    config = make_config(
        image_size=UNIT.shape,
        train_crop="inception",
        flip=False,
        value_range=(0.0, 2.0),
    )
    record = Record(tiff(UNIT), 0)
    train = TrainTransform(config)

    trained = train(record, np.random.default_rng(0))

    assert trained.max() <= 128


def test_reasons_take_the_range():
    source = Images(tiff(UNIT))

    without_range = find_reason(source, 0, 1.0)
    with_range = find_reason(source, 0, 1.0, (0, 1))

    assert "--images.value_range=" in without_range
    assert "can be now" in with_range


def write_files(folder, files):
    """Write contents by name; return the paths."""
    paths = []
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths.append(str(path))
    return paths


def test_losses_are_counted(tmp_path):
    """Losses of values, floating point and further pages are warned about once each."""
    option = "--images.value_range"
    paths = write_files(
        tmp_path,
        {
            "0.tif": tiff(RAMP),
            "1.tif": tiff(RAMP),
            "2.tif": tiff(RAMP),
            "a.PNG": png(RAMP),
            "stated.png": png(RAMP, 12),
            "b.png": png(RAMP.astype(np.uint8)),
            "float.tiff": tiff(UNIT_RAMP),
            "float-stated.tiff": tiff(UNIT_RAMP, t341=("f", 1.0)),
            "pages.tif": tiff(RAMP, bits=12, pages=3),
            "small.tif": tiff(RAMP, bits=12, thumbnails=2),
            "broken.tif": b"II*\0",
            "c.pgm": pnm(RAMP, 4095),
            "photo.jpg": tiff(RAMP),
        },
    )

    values, floats, pages = survey(
        [*paths, str(tmp_path / "gone.tif")],
        None,
        option,
    )

    assert values.startswith("4 of 13 checked files have 16 bits")
    assert "divided by 256" in values
    assert f"(first: {paths[0]})" in values
    assert "Pass --images.value_range=0,4095" in values
    assert floats.startswith("1 of 13 checked files have floating-point")
    assert f"(first: {tmp_path}/float.tiff)" in floats
    assert pages == (
        "1 of 13 checked files have several pages: page 1 of 3 is used; "
        "input.channels reads pages as bands."
    )

    with_range = survey(paths, (0, 4095), option)
    of_png = survey(paths[4:6], None, option)

    assert with_range == [pages.replace("13", "12")]
    assert of_png == []


def encode_avif(pixels):
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    image.save(file, "AVIF")
    return file.getvalue()


def test_bands_that_are_ignored_are_noted(tmp_path):
    """One line counts the files of all formats with further bands."""
    values = np.dstack([RGB, GREY]) // 16
    rgba = values.astype(np.uint8).repeat(8, axis=0)
    rgba = rgba.repeat(8, axis=1)
    rgb = rgba[..., :3]
    deep = rgba.astype(np.uint16) * 257
    with_further_band = {
        "rgba.png": encode(".png", rgba),
        "infrared.tif": tiff(rgba, photometric=1),
        "infrared16.tif": tiff(
            deep,
            photometric=1,
            most=65535,
        ),
        "two.tif": tiff(rgba[..., :2], photometric=1),
        "rgba.webp": encode(".webp", rgba),
        "rgba.avif": encode_avif(rgba),
        "rgba.jp2": encode(".jp2", rgba),
    }
    others = {
        "rgb.png": png(RGB.astype(np.uint8)),
        "rgb.webp": encode(".webp", rgb),
        "rgb.avif": encode(".avif", rgb),
        "rgb.jp2": encode(".jp2", rgb),
        "grey.tif": tiff(rgba[..., 0]),
        "cmyk.tif": tiff(rgba, photometric=5),
    }
    paths = write_files(tmp_path, with_further_band | others)

    (line,) = survey(paths, (0, 65535), "--images.value_range")

    assert line.startswith("7 of 13 checked files have a band beyond grey or RGB")
    assert f"(first: {paths[0]})" in line


@pytest.fixture
def thousand_files(tmp_path):
    """Paths of 1,000 files, of which the fifth is a large TIFF and the others are empty."""
    pixels = np.zeros((600, 600), np.uint16)
    large = tiff(pixels)
    files = {f"{number:04}.tif": b"" for number in range(1000)}
    return write_files(tmp_path, files | {"0004.tif": large})


@pytest.fixture
def reads(monkeypatch):
    """The opened paths and the sizes of the reads of surveys, as lists."""
    counts = types.SimpleNamespace(opened=[], sizes=[])

    class CountedFile(io.FileIO):
        def read(self, size):
            counts.sizes.append(size)
            return super().read(size)

    def open_counted(path):
        counts.opened.append(path)
        return CountedFile(path)

    monkeypatch.setattr("vit_jax.data.decoding.depth.open_regular", open_counted)
    return counts


def test_little_of_each_file_is_read(thousand_files, reads):
    """Directories at the end of a file are found."""
    (line,) = survey(
        thousand_files[:256],
        None,
        "input.value_range",
    )

    assert line.startswith("1 of 256")
    assert sum(reads.sizes) < 256 * 5000


def test_few_files_are_read(thousand_files, reads):
    """The files are evenly spaced."""
    survey(thousand_files[300:], None, "input.value_range")

    assert len(reads.opened) == MOST_FILES
    assert reads.opened[0] == thousand_files[300]
    assert reads.opened[-1] >= thousand_files[995]


def name_deep_files():
    """Return five deep files of each of the classes a and b, by name."""
    files = {}
    for kind in "ab":
        for number in range(5):
            files[f"{kind}/{number}.tif"] = tiff(RAMP)
    return files


@pytest.fixture
def deep_folder(tmp_path):
    """An image folder of two classes of deep files; the first file has two pages."""
    folder = tmp_path / "images"
    files = name_deep_files()
    files["a/0.tif"] = tiff(RAMP, pages=2)

    write_files(folder, files)
    return folder


def test_a_folder_warns_once(deep_folder, open_data, caplog):
    """The warnings do not depend on the number of opened splits, or on pickling."""
    caplog.set_level(logging.WARNING)

    for split in ("train", "test"):
        source = open_data(f"folder:{deep_folder}", split)
        pickle.dumps(source)

    values, pages = caplog.messages
    assert "10 of 10 checked files have 16 bits" in values
    assert "Pass --config.input.value_range=0,4095" in values
    assert "page 1 of 2" in pages


def test_a_table_with_a_range_warns_of_pages_alone(
    deep_folder,
    tmp_path,
    make_config,
    caplog,
):
    caplog.set_level(logging.WARNING)
    lines = ["image,label"]
    for path in sorted(deep_folder.rglob("*.tif")):
        lines.append(f"{path.relative_to(tmp_path)},{path.parent.name}")
    table = tmp_path / "images.csv"
    table.write_text("\n".join(lines) + "\n")
    config = make_config(value_range=(0.0, 4095.0))

    open_source(f"csv:{table}", "train", config, 0)

    (message,) = caplog.messages
    assert "page 1 of 2" in message


def test_warnings_of_verbs_on_weights_name_their_option(tmp_path, caplog):
    write_files(tmp_path, name_deep_files())

    open_pair(f"folder:{tmp_path}", SplitChoice())

    (message,) = caplog.messages
    assert "Pass --images.value_range=0,4095" in message

    caplog.clear()
    open_split(
        f"folder:{tmp_path}/../{tmp_path.name}",
        "all",
        SplitChoice(),
    )

    assert "Pass --images.value_range=0,4095" in caplog.messages[0]
