"""Photographs that are stored turned, against OpenCV's reading (JPEG) and against pixels written by hand."""

import functools
import struct

import cv2
import numpy as np
import pytest

from tests.data import deep_files
from vit_jax.data.crops import Box, cut
from vit_jax.data.images import decode, plan_crop
from vit_jax.data.orientation import orientation_of, tagged, turn, turn_back
from vit_jax.data.prepared import prepare_folder
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform

ORIENTATIONS = range(1, 9)
PIXELS = np.random.default_rng(0).integers(0, 256, (48, 80, 3), np.uint8)


def photograph(orientation):
    smooth = cv2.resize(PIXELS[:6, :10], (80, 48))
    return tagged(cv2.imencode(".jpg", smooth, (cv2.IMWRITE_JPEG_RST_INTERVAL, 5))[1].tobytes(), orientation)


def by_opencv(file):
    return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_upright_as_by_opencv(orientation):
    file = photograph(orientation)
    assert orientation_of(file) == orientation
    np.testing.assert_array_equal(decode(file, exif_orientation=True), by_opencv(file))
    np.testing.assert_array_equal(decode(file), by_opencv(photograph(1)))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_crop_of_the_upright_image(orientation):
    """Decoded alone, without the rest of the file."""
    file = photograph(orientation)
    whole = by_opencv(file)
    for box in (Box(0, 0, 9, 20), Box(17, 5, 30, 31), Box(11, 9, *(side - 20 for side in whole.shape[:2]))):

        def choose(*sides, box=box):
            assert sides == whole.shape[:2]
            return box

        np.testing.assert_array_equal(plan_crop(file, choose, box[2:], exif_orientation=True)(), cut(whole, box))
        stored = turn_back(box, orientation, *whole.shape[:2])
        np.testing.assert_array_equal(turn(cut(decode(file), stored), orientation), cut(whole, box))


STORED = np.array([[1, 2, 3], [4, 5, 6]])
UPRIGHT = {
    1: [[1, 2, 3], [4, 5, 6]],
    2: [[3, 2, 1], [6, 5, 4]],
    3: [[6, 5, 4], [3, 2, 1]],
    4: [[4, 5, 6], [1, 2, 3]],
    5: [[1, 4], [2, 5], [3, 6]],
    6: [[4, 1], [5, 2], [6, 3]],
    7: [[6, 3], [5, 2], [4, 1]],
    8: [[3, 6], [2, 5], [1, 4]],
}


def coloured(grid):
    """Pixels of another red, green and blue for each number of a grid."""
    return np.stack([np.multiply(grid, factor) for factor in (40, 25, 7)], axis=-1).astype(np.uint8)


def exif(order, orientation):
    """Exif data in either order of bytes."""
    start = struct.pack(f"{order}2sHIH", b"MM" if order == ">" else b"II", 42, 8, 1)
    return start + struct.pack(f"{order}HHIHHI", 274, 3, 1, orientation, 0, 0)


def png(order, orientation):
    return deep_files.with_chunk(deep_files.png(coloured(STORED)), b"eXIf" + exif(order, orientation))


def webp(order, orientation):
    options = (cv2.IMWRITE_WEBP_QUALITY, 101)
    pixels = cv2.imencode(".webp", coloured(STORED)[..., ::-1], options)[1].tobytes()[12:]
    head = b"VP8X" + struct.pack("<I4B", 10, 8, 0, 0, 0) + bytes([2, 0, 0, 1, 0, 0])  # 8: with Exif; 3 x 2 pixels
    data = exif(order, orientation)
    chunks = b"WEBP" + head + pixels + b"EXIF" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def tiff(order, orientation, is_big=False, bits=8):
    samples = (coloured(STORED).astype(int) * (257 if bits == 16 else 1)).astype(f"u{bits // 8}")
    return deep_files.tiff(samples, order, is_big=is_big, t274=("H", orientation))


FORMATS = {
    "PNG": png,
    "WebP": webp,
    "TIFF": tiff,
    "BigTIFF": functools.partial(tiff, is_big=True),
    "TIFF of 16 bits": functools.partial(tiff, bits=16),
}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", FORMATS)
def test_other_formats_by_hand(kind, order):
    """Stored pixels by default, whatever OpenCV does with the tag; upright pixels where they are wanted."""
    for orientation, upright in UPRIGHT.items():
        file = FORMATS[kind](order, orientation)
        assert orientation_of(file) == orientation
        np.testing.assert_array_equal(decode(file), coloured(STORED))
        np.testing.assert_array_equal(decode(file, exif_orientation=True), coloured(upright))
        planned = plan_crop(file, lambda height, width: Box(0, 0, height, width), (1, 1), exif_orientation=True)
        np.testing.assert_array_equal(planned(), coloured(upright))


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"II*\0",
        b"MM\0*\0\0\0\x08\xff\xff",
        photograph(1).replace(b"\xff\xdb", b"\xff\xe1\0\x08Exif\0\0\xff\xdb", 1),
        tagged(photograph(1), 9),
        photograph(6)[:30],
        PIXELS,
    ],
)
def test_what_states_none_is_upright(file):
    assert orientation_of(file) == 1


def test_training_and_evaluation_see_the_same_side_up(make_config):
    """And with the default neither does."""
    record = Record(photograph(6), 0)
    upright = by_opencv(record.image)
    fields = {"image_size": upright.shape[:2], "train_crop": "none", "flip": False, "test_resize": "direct"}
    for config, expected in (
        (make_config(**fields, exif_orientation=True), upright),
        (make_config(**fields), cv2.resize(by_opencv(photograph(1)), upright.shape[1::-1])),
    ):
        trained = TrainTransform(config)(record, np.random.default_rng(0))
        np.testing.assert_array_equal(trained, build_evaluation_transform(config)(record))
        np.testing.assert_array_equal(trained, expected)


def test_a_smaller_copy_keeps_it(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(photograph(6))
    prepare_folder(tmp_path / "images", tmp_path / "copy", short_side=24)
    copy = (tmp_path / "copy" / "a.jpg").read_bytes()
    assert orientation_of(copy) == 6
    assert decode(copy, exif_orientation=True).shape == (40, 24, 3)
