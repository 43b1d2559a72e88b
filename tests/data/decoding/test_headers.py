"""Pixels that a header states, against the decoded image; files that state too many."""

import struct

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import packed_files
from vit_jax.api.build import build_transform
from vit_jax.api.model import Images
from vit_jax.data.decoding import headers, images
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform
from vit_jax.data.unreadable import find_reason

HEIGHT = 50
WIDTH = 61
PIXELS = np.random.default_rng(0).integers(
    256,
    size=(HEIGHT, WIDTH, 4),
    dtype=np.uint8,
)
GREY = "avif bmp jp2 jpg pam pbm pgm png ras tiff webp"
COLOUR = "avif bmp gif jp2 jpg pam png ppm ras tiff"
ALPHA = "avif bmp gif jp2 png tiff webp"


def list_kinds(extensions, channels):
    return [(extension, channels) for extension in extensions.split()]


KINDS = [  # extension, number of channels, options of OpenCV
    *list_kinds(COLOUR, 3),
    *list_kinds(GREY, 1),
    *list_kinds(ALPHA, 4),
    ("jpg", 3, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    ("pgm", 1, cv2.IMWRITE_PXM_BINARY, 0),
    ("webp", 3, cv2.IMWRITE_WEBP_QUALITY, 50),
    ("webp", 3, cv2.IMWRITE_WEBP_QUALITY, 101),
]


def encode(extension, channels, *options):
    pixels = PIXELS[..., :channels]
    return packed_files.encode(
        f".{extension}",
        pixels,
        *options,
    )


def name_kind(kind):
    return "-".join(map(str, kind))


@pytest.mark.parametrize("kind", KINDS, ids=name_kind)
def test_headers_state_what_is_decoded(kind):
    file = encode(*kind)

    decoded = images.decode(file)

    assert decoded.shape[:2] == (HEIGHT, WIDTH)
    assert headers.count_stated_pixels(file) == HEIGHT * WIDTH


def make_tiff(order, kind, code):
    """Return a TIFF whose only directory has width and height, of this kind of number."""
    start = struct.pack(f"{order}HIH", 42, 8, 2)
    entries = b""
    for tag, size in ((256, WIDTH), (257, HEIGHT)):
        entry = struct.pack(f"{order}HHI{code}", tag, kind, 1, size)
        entries += entry.ljust(12, b"\0")

    mark = b"II" if order == "<" else b"MM"
    return mark + start + entries


def make_big_tiff():
    """Return a BigTIFF whose only directory has width and height in 64 bits."""
    start = struct.pack("<HHHQQ", 43, 8, 0, 16, 2)
    entries = b""
    for tag, size in ((256, WIDTH), (257, HEIGHT)):
        entries += struct.pack("<HHQQ", tag, 16, 1, size)

    return b"II" + start + entries


BMP_START = b"BM" + bytes(12)
MADE = {
    "BMP of OS/2": BMP_START + struct.pack("<IHH", 12, WIDTH, HEIGHT),
    "BMP from top to bottom": BMP_START + struct.pack("<Iii", 40, WIDTH, -HEIGHT),
    "PGM with comments": b"P5 # 9 9\n# 7\r61\n#3\n 50\n255\n",
    "TIFF": make_tiff("<", 4, "I"),
    "TIFF of Motorola": make_tiff(">", 3, "H"),
    "BigTIFF": make_big_tiff(),
    "JPEG with fill bytes, rubbish and restarts": encode("jpg", 3).replace(
        b"\xff\xc0",
        b"\0\x07\xff\xd0\xff\xff\xc0",
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_headers_of_rare_kinds(kind):
    num_pixels = headers.count_stated_pixels(MADE[kind])

    assert num_pixels == HEIGHT * WIDTH


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(0, 200),
    place=st.integers(0, 199),
    byte=st.integers(0, 255),
)
def test_damaged_headers_state_a_number(kind, length, place, byte):
    file = bytearray(encode(*kind))
    place = min(place, len(file) - 1)
    file[place] = byte
    damaged = bytes(file[:length])

    assert headers.count_stated_pixels(damaged) >= 0


def prepare_for_training(config):
    """Return a function from a record to the training image."""
    transform = TrainTransform(config)
    return lambda record: transform(record, np.random.default_rng(0))


def test_a_file_that_states_too_many_pixels_is_unreadable_everywhere(monkeypatch, make_config):
    """The header alone is read, in training, in evaluation and in the Python API."""
    sides = struct.pack(">HH", HEIGHT, WIDTH)
    large_sides = struct.pack(">HH", 30_000, 30_000)
    file = encode("jpg", 3).replace(sides, large_sides)
    monkeypatch.setattr(cv2, "imdecode", None)
    rule = "states 900 megapixels, and max_image_megapixels is 180: save it"
    config = make_config()

    transforms = [
        prepare_for_training(config),
        build_evaluation_transform(config),
        build_transform("direct", 1, None, (8, 8), "weights"),
    ]
    for prepare in transforms:
        with pytest.raises(UnreadableImage, match=rule):
            prepare(Record(file, 0))


def test_the_limit_of_pixels_is_an_option(make_config):
    record = Record(encode("jpg", 3), 0)
    config = make_config(max_image_megapixels=0.003)
    rule = r"max_image_megapixels is 0\.003"
    train = prepare_for_training(config)
    evaluate = build_evaluation_transform(config)

    with pytest.raises(UnreadableImage, match=rule):
        train(record)
    with pytest.raises(UnreadableImage, match=rule):
        evaluate(record)

    reason = find_reason(
        Images(record.image),
        0,
        config.max_image_megapixels,
    )
    assert "is 0.003" in reason
