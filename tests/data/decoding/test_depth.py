"""Values of more than 8 bits: the range that a file states, and the one that is given."""

import io
import logging
import pickle
import struct

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.data.decoding.test_orientation import UPRIGHT
from tests.data.deep_files import packed, png, pnm, tiff
from vit_jax.api.model import Images
from vit_jax.data.crops import Box
from vit_jax.data.decoding.depth import MOST_FILES, depth_of_file, num_pages, survey
from vit_jax.data.decoding.images import UnreadableImage, decode, plan_crop
from vit_jax.data.records import Record
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform
from vit_jax.data.unreadable import reason_of
from vit_jax.evals.splits import SplitChoice, open_pair, open_split

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 4096, (7, 9)).astype(np.uint16)  # 12 bits
GREY[0, :2] = 0, 4095
RGB = RNG.integers(0, 4096, (7, 9, 3)).astype(np.uint16)
RGB[0, 0] = 0, 4095, 2047
SIGNED = GREY.astype(np.int16) - 1000
UNIT = GREY.astype(np.float32) / 4095
RAMP = np.arange(63, dtype=np.uint16).reshape(7, 9) * 65  # 12 bits
UNIT_RAMP = RAMP.astype(np.float32) / 4095


def mapped(values, low=0, high=4095):
    """The definition, in float64, as RGB."""
    exact = np.clip((values.astype(np.float64) - low) / (high - low), 0, 1) * 255
    pixels = np.rint(exact).astype(np.uint8)

    return pixels if pixels.ndim == 3 else np.stack([pixels] * 3, axis=-1)


STATED = {
    "PNG with sBIT": (png(GREY, 12), mapped(GREY)),
    "PNG in RGB with sBIT": (png(RGB, 12), mapped(RGB)),
    "TIFF with MaxSampleValue": (tiff(GREY, t281=("H", 4095)), mapped(GREY)),
    "TIFF of Motorola with MaxSampleValue": (tiff(GREY, ">", t281=("H", 4095)), mapped(GREY)),
    "TIFF with a range of another end": (tiff(GREY, t281=("H", 5000)), mapped(GREY, 0, 5000)),
    "TIFF in RGB with SMaxSampleValue": (tiff(RGB, t341=("H", 4095, 4095, 4095)), mapped(RGB)),
    "BigTIFF": (tiff(RGB, is_big=True, t281=("H", 4095, 4095, 4095)), mapped(RGB)),
    "TIFF where white is zero": (tiff(GREY, t262=("H", 0), t281=("H", 4095)), 255 - mapped(GREY)),
    "TIFF of signed values": (
        tiff(SIGNED, t340=("H", 0), t341=("H", 3095)),
        mapped(SIGNED, 0, 3095),
    ),
    "packed TIFF": (tiff(GREY, bits=12), mapped(GREY)),
    "packed TIFF where white is zero": (
        tiff(GREY, ">", bits=12, t262=("H", 0)),
        255 - mapped(GREY),
    ),
    "packed TIFF of 10 bits": (tiff(GREY // 4, bits=10), mapped(GREY // 4, 0, 1023)),
    "PGM": (pnm(GREY, 4095), mapped(GREY)),
    "PGM whose values are multiples of 16": (pnm(GREY // 16 * 16, 4095), mapped(GREY // 16 * 16)),
    "PPM": (pnm(RGB, 4095), mapped(RGB)),
    "PGM of 4 bits": (pnm(GREY // 273, 15), mapped(GREY // 273, 0, 15)),
    "TIFF of float32": (tiff(UNIT, t340=("f", 0.25), t341=("f", 1.0)), mapped(UNIT, 0.25, 1)),
    "TIFF of float32 without a lowest value": (tiff(UNIT, t341=("d", 2.0)), mapped(UNIT, 0, 2)),
    "TIFF of float32 in RGB": (
        tiff(RGB.astype(np.float32), t341=("f", 4095, 4095, 4095)),
        mapped(RGB),
    ),
    "TIFF of float64": (tiff(UNIT.astype(np.float64), t341=("d", 1.0)), mapped(UNIT, 0, 1)),
}


@pytest.mark.parametrize("kind", STATED)
def test_the_range_that_a_file_states(kind):
    file, expected = STATED[kind]

    np.testing.assert_array_equal(decode(file), expected)

    planned = plan_crop(file, lambda height, width: Box(1, 2, height - 1, width - 2), (1, 1))

    np.testing.assert_array_equal(planned(), expected[1:, 2:])


TOP = GREY.astype(np.uint32) * 65535 // 4095
FULL = {
    "PNG": png(TOP.astype(np.uint16)),
    "PNG of 12 bits that are not stated": png(GREY),
    "TIFF": tiff(TOP.astype(np.uint16)),
    "TIFF of 12 bits that are not stated": tiff(GREY),
    "TIFF in RGB": tiff(RGB),
    "TIFF where white is zero": tiff(GREY, t262=("H", 0)),
    "TIFF that states 16 bits": tiff(GREY, t281=("H", 65535)),
    "TIFF of signed values": tiff(GREY.astype(np.int16)),
    "TIFF that states less than there is": tiff(GREY, t281=("H", 255)),
    "PGM of 16 bits": pnm(GREY, 65535),
    "PGM of 8 bits": pnm(GREY // 16, 255),
    # as the PNG specification wants it: values scaled to 16 bits, by a factor or with zeros at the
    # end
    "PNG with sBIT, scaled": png((GREY << 4 | GREY >> 8).astype(np.uint16), 12),
    "PNG with sBIT, scaled and dark": png((GREY // 20 << 4).astype(np.uint16), 12),
    "PNG with sBIT of all bits": png(GREY, 16),
}


@pytest.mark.parametrize("kind", FULL)
def test_all_16_bits_are_converted_as_by_opencv(kind):
    file = FULL[kind]
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION

    np.testing.assert_array_equal(decode(file), cv2.imdecode(np.frombuffer(file, np.uint8), flags))


GIVEN = {
    "PNG": (png(GREY), GREY),
    "PNG in RGB": (png(RGB), RGB),
    "PNG with sBIT": (png(GREY, 10), GREY),
    "TIFF": (tiff(GREY), GREY),
    "TIFF in RGB": (tiff(RGB, ">"), RGB),
    "TIFF with MaxSampleValue": (tiff(GREY, t281=("H", 60000)), GREY),
    "TIFF of signed values": (tiff(GREY.astype(np.int16) - 500), GREY.astype(int) - 500),
    "TIFF of uint32": (tiff(GREY.astype(np.uint32)), GREY),
    "TIFF of float32": (tiff(GREY.astype(np.float32)), GREY),
    "TIFF of float32 with a range": (tiff(GREY.astype(np.float32), t341=("f", 1.0)), GREY),
    "packed TIFF": (tiff(GREY, bits=12), GREY),
    "PGM": (pnm(GREY, 4095), GREY),
}


GIVEN |= {
    "TIFF of float16": (tiff((GREY // 16).astype(np.float16)), GREY // 16),
    "TIFF of two bands": (tiff(RGB[..., :2], t262=("H", 1)), RGB[..., 0]),
    "TIFF of three bands that are not called RGB": (tiff(RGB, t262=("H", 1)), RGB),
    "TIFF of four bands": (tiff(np.dstack([RGB, GREY]), t262=("H", 1)), RGB),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_the_range_that_is_given_wins(kind):
    file, values = GIVEN[kind]

    np.testing.assert_array_equal(
        decode(file, value_range=(100, 3000.5)),
        mapped(values, 100, 3000.5),
    )


def test_a_range_is_for_more_than_8_bits():
    for file in (png(GREY.astype(np.uint8)), tiff(GREY.astype(np.uint8)), pnm(GREY // 273, 15)):
        np.testing.assert_array_equal(decode(file, value_range=(0, 4095)), decode(file))


def test_white_is_zero_and_what_is_no_number():
    values = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)

    np.testing.assert_array_equal(
        decode(tiff(values), value_range=(0, 1))[0, :, 0],
        [0, 255, 0, 128],
    )

    inverted = decode(tiff(GREY, t262=("H", 0)), value_range=(0, 2000))

    np.testing.assert_array_equal(inverted, 255 - mapped(GREY, 0, 2000))


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_deep_files_are_turned_upright(orientation):
    values = np.array([[1, 2, 3], [4, 5, 6]], np.uint16) * 500
    file = tiff(values, t274=("H", orientation))

    np.testing.assert_array_equal(decode(file, value_range=(0, 4095)), mapped(values))

    upright = mapped(np.array(UPRIGHT[orientation]) * 500)

    np.testing.assert_array_equal(
        decode(file, exif_orientation=True, value_range=(0, 4095)),
        upright,
    )


def test_alpha_is_dropped_where_values_are_mapped():
    transparent = np.dstack([RGB, GREY[..., None]])
    file = cv2.imencode(".png", transparent[..., [2, 1, 0, 3]])[1].tobytes()

    np.testing.assert_array_equal(decode(file, value_range=(0, 4095)), mapped(RGB))

    file = tiff(transparent, t262=("H", 2), t338=("H", 2))

    np.testing.assert_array_equal(decode(file, value_range=(0, 4095)), mapped(RGB))


@pytest.mark.parametrize(
    "values",
    [
        UNIT,
        GREY.astype(np.uint32),
        GREY.astype(np.int32),
    ],
)
def test_what_needs_a_range_names_the_option(values):
    with pytest.raises(
        UnreadableImage,
        match=r"--config\.input\.value_range=0,1 .*--images.value_range=0,1",
    ):
        decode(tiff(values))


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        (
            tiff(UNIT.astype(np.complex64).view(np.float32), t339=("H", 6)),
            "complex numbers of 32 bits",
        ),
        (tiff(RGB, t284=("H", 2)), "1 of 3 strips or tiles are listed"),
        (tiff(RGB, t259=("H", 34661)), r"compression 34661 \(JBIG\)"),
        (tiff(np.dstack([RGB, RGB[..., :2]])), "5 bands"),
        (tiff(np.dstack([RGB, RGB]), t262=("H", 1)), "6 bands"),
        (tiff(GREY)[:60], "cut off"),
    ],
)
def test_values_that_cannot_be_decoded(file, rule):
    with pytest.raises(UnreadableImage, match=rule):
        decode(file, value_range=(0, 1))


def test_headers_that_are_damaged_state_nothing():
    for file in (
        tiff(GREY, bits=12, t281=("H", 4095)),
        png(GREY, 12),
        pnm(GREY, 4095),
        tiff(UNIT, is_big=True),
    ):
        for size in range(0, 60, 3):
            depth_of_file(file[:size])
            assert num_pages(lambda place, count, cut=file[:size]: cut[place : place + count]) == 1

    endless = bytearray(tiff(GREY))  # its directory is followed by itself
    (first,) = struct.unpack_from("<I", endless, 4)
    endless[-4:] = struct.pack("<I", first)

    assert num_pages(lambda place, size: bytes(endless[place : place + size])) == 1


def test_training_evaluation_and_reasons_take_the_range(make_config):
    record = Record(tiff(UNIT), 0)
    for crop in ("none", "inception"):
        config = make_config(
            image_size=UNIT.shape,
            train_crop=crop,
            flip=False,
            test_resize="direct",
            value_range=(0.0, 2.0),
        )
        if crop == "none":
            expected = mapped(UNIT, 0, 2)
            np.testing.assert_array_equal(
                TrainTransform(config)(record, np.random.default_rng(0)),
                expected,
            )
            np.testing.assert_array_equal(build_evaluation_transform(config)(record), expected)

        assert TrainTransform(config)(record, np.random.default_rng(0)).max() <= 128

    source = Images(record.image)

    assert "--images.value_range=" in reason_of(source, 0, 1.0)
    assert "can be now" in reason_of(source, 0, 1.0, (0, 1))


def test_the_files_of_these_tests_are_packed_as_specified():
    assert packed(np.array([[0xABC, 0x123], [0xFFF, 0]]), 12) == bytes.fromhex("abc123fff000")
    assert packed(np.array([[0b1000000001]]), 10) == bytes([0b10000000, 0b01000000])


# Warnings about files of more than 8 bits and of several pages.


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in files]


def test_losses_are_counted(tmp_path):
    files = {
        **{f"{n}.tif": tiff(RAMP) for n in range(3)},
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
    }
    paths = write(tmp_path, files)
    values, floats, pages = survey(
        [*paths, str(tmp_path / "gone.tif")],
        None,
        "--images.value_range",
    )

    assert values.startswith("4 of 13 checked files have 16 bits")
    assert "divided by 256" in values
    assert f"(first: {paths[0]})" in values
    assert "Pass --images.value_range=0,4095" in values
    assert floats.startswith("1 of 13 checked files have floating-point")
    assert f"(first: {tmp_path}/float.tiff)" in floats
    assert pages == "1 of 13 checked files have several pages: page 1 of 3 is used."
    assert survey(paths, (0, 4095), "input.value_range") == [pages.replace("13", "12")]
    assert survey(paths[4:6], None, "input.value_range") == []


def test_bands_that_are_ignored_are_noted(tmp_path):
    """Once, whatever the format."""
    rgba = np.dstack([RGB // 16, GREY // 16]).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    of_avif = io.BytesIO()
    Image.fromarray(rgba).save(of_avif, "AVIF")
    files = {
        "rgba.png": cv2.imencode(".png", rgba)[1].tobytes(),
        "infrared.tif": tiff(rgba, t262=("H", 1)),
        "infrared16.tif": tiff(rgba.astype(np.uint16) * 257, t262=("H", 1), t281=("H", 65535)),
        "two.tif": tiff(rgba[..., :2], t262=("H", 1)),
        "rgba.webp": cv2.imencode(".webp", rgba)[1].tobytes(),
        "rgba.avif": of_avif.getvalue(),
        "rgba.jp2": cv2.imencode(".jp2", rgba)[1].tobytes(),
        "rgb.png": png(RGB.astype(np.uint8)),
        "rgb.webp": cv2.imencode(".webp", rgba[..., :3])[1].tobytes(),
        "rgb.avif": cv2.imencode(".avif", rgba[..., :3])[1].tobytes(),
        "rgb.jp2": cv2.imencode(".jp2", rgba[..., :3])[1].tobytes(),
        "grey.tif": tiff(rgba[..., 0]),
        "cmyk.tif": tiff(rgba, t262=("H", 5)),
    }
    paths = write(tmp_path, files)
    (line,) = survey(paths, (0, 65535), "--images.value_range")

    assert line.startswith(f"7 of {len(files)} checked files have a band beyond grey or RGB")
    assert f"(first: {paths[0]})" in line


def test_few_files_are_read_and_little_of_each(tmp_path, monkeypatch):
    """Evenly spaced ones; directories at the end of a file are found."""
    large = tiff(np.zeros((600, 600), np.uint16))
    paths = write(tmp_path, {f"{n:04}.tif": large if n == 4 else b"" for n in range(1000)})
    sizes = []
    opened = []

    class Counted(io.FileIO):
        def read(self, size):
            sizes.append(size)
            return super().read(size)

    def open_counted(path):
        opened.append(path)
        return Counted(path)

    monkeypatch.setattr("vit_jax.data.decoding.depth.open_regular", open_counted)
    (line,) = survey(paths[:256], None, "input.value_range")

    assert line.startswith("1 of 256")
    assert sum(sizes) < 256 * 5000

    opened.clear()
    survey(paths[300:], None, "input.value_range")

    assert len(opened) == MOST_FILES
    assert opened[0] == paths[300]
    assert opened[-1] >= paths[995]


def test_a_folder_warns_once(tmp_path, make_config, caplog):
    """Whichever of its splits are opened; with a range only of pages."""
    caplog.set_level(logging.WARNING)
    names = [f"images/{kind}/{n}.tif" for kind in "ab" for n in range(5)]
    write(tmp_path, {name: tiff(RAMP, pages=1 + (name == names[0])) for name in names})

    for split in ("train", "test"):
        source = open_source(f"folder:{tmp_path}/images", split, make_config(), 0)
        pickle.dumps(source)

    assert len(caplog.messages) == 2
    assert "10 of 10 checked files have 16 bits" in caplog.messages[0]
    assert "Pass --config.input.value_range=0,4095" in caplog.messages[0]
    assert "page 1 of 2" in caplog.messages[1]

    (tmp_path / "images.csv").write_text(
        "image,label\n" + "".join(f"{name},{name[7]}\n" for name in names)
    )
    caplog.clear()
    open_source(f"csv:{tmp_path}/images.csv", "train", make_config(value_range=(0.0, 4095.0)), 0)

    assert len(caplog.messages) == 1
    assert "page 1 of 2" in caplog.messages[0]


def test_warnings_of_verbs_on_weights_name_their_option(tmp_path, caplog):
    write(tmp_path, {f"{kind}/{n}.tif": tiff(RAMP) for kind in "ab" for n in range(5)})
    open_pair(f"folder:{tmp_path}", SplitChoice())
    (message,) = caplog.messages

    assert "Pass --images.value_range=0,4095" in message

    caplog.clear()
    open_split(f"folder:{tmp_path}/../{tmp_path.name}", "all", SplitChoice())

    assert "Pass --images.value_range=0,4095" in caplog.messages[0]
