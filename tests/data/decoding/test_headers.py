"""The pixels that a header states, against the decoded image; files that state more than may be decoded."""

import struct

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.api.build import build_transform
from vit_jax.data.decoding import headers, images
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform
from vit_jax.data.unreadable import reason_of

PIXELS = np.random.default_rng(0).integers(256, size=(50, 61, 4), dtype=np.uint8)
KINDS = [
    *(
        (extension, 3)
        for extension in ["avif", "bmp", "gif", "jp2", "jpg", "pam", "png", "ppm", "ras", "tiff"]
    ),
    *(
        (extension, 1)
        for extension in [
            "avif",
            "bmp",
            "jp2",
            "jpg",
            "pam",
            "pbm",
            "pgm",
            "png",
            "ras",
            "tiff",
            "webp",
        ]
    ),
    *((extension, 4) for extension in ["avif", "bmp", "gif", "jp2", "png", "tiff", "webp"]),
    ("jpg", 3, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    ("pgm", 1, cv2.IMWRITE_PXM_BINARY, 0),
    ("webp", 3, cv2.IMWRITE_WEBP_QUALITY, 50),
    ("webp", 3, cv2.IMWRITE_WEBP_QUALITY, 101),
]


def encode(extension, channels, *options):
    return cv2.imencode(f".{extension}", PIXELS[..., :channels], options)[1].tobytes()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_headers_state_what_is_decoded(kind):
    assert (
        headers.stated_pixels(encode(*kind))
        == np.prod(images.decode(encode(*kind)).shape[:2])
        == 50 * 61
    )


def tiff(order, version, word, count, kind, side):
    """A TIFF whose only directory has width and height, of numbers of a kind."""
    start = (version, 8, 0, 16) if version == 43 else (version, 8)
    entries = [
        struct.pack(f"{order}HH{word}{side}", tag, kind, 1, size)
        for tag, size in ((256, 61), (257, 50))
    ]
    padded = b"".join(entry.ljust(20 if version == 43 else 12, b"\0") for entry in entries)
    head = struct.pack(f"{order}H" + ("HHQ" if version == 43 else "I"), *start)

    return {"<": b"II", ">": b"MM"}[order] + head + struct.pack(order + count, 2) + padded


MADE = {
    "BMP of OS/2": b"BM" + bytes(12) + struct.pack("<IHH", 12, 61, 50),
    "BMP from top to bottom": b"BM" + bytes(12) + struct.pack("<Iii", 40, 61, -50),
    "PGM with comments": b"P5 # 9 9\n# 7\r61\n#3\n 50\n255\n",
    "TIFF": tiff("<", 42, "I", "H", 4, "I"),
    "TIFF of Motorola": tiff(">", 42, "I", "H", 3, "H"),
    "BigTIFF": tiff("<", 43, "Q", "Q", 16, "Q"),
    "JPEG with fill bytes, rubbish and restarts": encode("jpg", 3).replace(
        b"\xff\xc0",
        b"\0\x07\xff\xd0\xff\xff\xc0",
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_headers_of_rare_kinds(kind):
    assert headers.stated_pixels(MADE[kind]) == 50 * 61


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(0, 200),
    place=st.integers(0, 199),
    byte=st.integers(0, 255),
)
def test_damaged_headers_state_a_number(kind, length, place, byte):
    file = bytearray(encode(*kind))
    file[min(place, len(file) - 1)] = byte

    assert headers.stated_pixels(bytes(file[:length])) >= 0


def test_a_file_that_states_too_many_pixels_is_unreadable_everywhere(monkeypatch, make_config):
    """By the header alone, at the limit of 180 megapixels or another."""
    jpeg = encode("jpg", 3).replace(struct.pack(">HH", 50, 61), struct.pack(">HH", 30_000, 30_000))
    monkeypatch.setattr(cv2, "imdecode", None)

    for prepare in (
        lambda record: TrainTransform(make_config())(record, np.random.default_rng(0)),
        build_evaluation_transform(make_config()),
        build_transform(
            "direct",
            1,
            None,
            (8, 8),
            "weights",
        ),  # of the Python API, predict and evaluate
    ):
        with pytest.raises(
            UnreadableImage,
            match="states 900 megapixels, and max_image_megapixels is 180: save it",
        ):
            prepare(Record(jpeg, 0))

    monkeypatch.undo()
    small = Record(encode("jpg", 3), 0)
    config = make_config(max_image_megapixels=0.003)

    with pytest.raises(UnreadableImage, match=r"max_image_megapixels is 0\.003"):
        TrainTransform(config)(small, np.random.default_rng(0))
    with pytest.raises(UnreadableImage, match=r"max_image_megapixels is 0\.003"):
        build_evaluation_transform(config)(small)

    source = MemorySource(np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, int), ("a", "b"))
    source.image_of = lambda index: small.image

    assert "is 0.003" in reason_of(source, 0, config.max_image_megapixels)
