"""Photographs that are stored turned: OpenCV's own reading of the same files is the formula."""

import struct
import zlib

import cv2
import numpy as np
import pytest

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


def exif(order):
    """Of orientation 6, in either order of bytes."""
    return struct.pack(f"{order}2sHIHHHIHHI", b"MM" if order == ">" else b"II", 42, 8, 1, 274, 3, 1, 6, 0, 0)


def png(order):
    start, data = cv2.imencode(".png", PIXELS)[1].tobytes(), b"eXIf" + exif(order)
    return start[:33] + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data)) + start[33:]


def webp(order):
    return b"RIFF\0\0\0\0WEBPVP8X" + bytes(14) + b"EXIF" + struct.pack("<I", 26) + exif(order)


@pytest.mark.parametrize("order", "<>")
def test_other_formats_state_it_too(order):
    assert orientation_of(png(order)) == orientation_of(webp(order)) == orientation_of(exif(order)) == 6
    np.testing.assert_array_equal(decode(png(order), exif_orientation=True), np.rot90(PIXELS, -1)[..., ::-1])


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
