"""Decoding usual, odd and broken files, and resizing, compared with exact formulas.

The files in base64 were written once with PIL, which the tests do not need; PNGs are put together
chunk by chunk.
"""

import base64
import struct
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.data.decoding import images
from vit_jax.data.decoding.images import UnreadableImage

RNG = np.random.default_rng(0)
SMOOTH = cv2.resize(
    RNG.integers(256, size=(5, 6, 3), dtype=np.uint8),
    (60, 50),
    interpolation=cv2.INTER_CUBIC,
)


def encode(extension, pixels, *options):
    """A file of RGB pixels; OpenCV writes BGR."""
    if pixels.ndim == 3:
        pixels = pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]
    return cv2.imencode(extension, pixels, options)[1].tobytes()


JPEG = encode(".jpg", SMOOTH)
PNG = encode(".png", SMOOTH)

# 8 x 8 pixels of cyan 51, magenta 102, yellow 153 and black 51, of 255.
CMYK_JPEG = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwPFxgW"
    "FBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABUAAQEAAAAAAAAAAAAAAAAAAAcI/8QAFBABAAAAAAAAAAAAAAAAAAAAAP/aAA4EQwBN"
    "AFkASwAAPwCyyGOllv/Z"
)
# 8 x 8 pixels of (200, 120, 40) and no black, stored as luma and chroma of the inverted inks, as
# Photoshop does.
YCCK_JPEG = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAC/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwPFxgW"
    "FBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABcAAAMBAAAAAAAAAAAAAAAAAAUHCAn/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oADgRD"
    "AE0AWQBLAAA/ABSkCEapv//Z"
)
# Three frames of 2 x 3 pixels: (250, 10, 0), (0, 250, 20) and (30, 0, 250).
ANIMATED_GIF = base64.b64decode(
    "R0lGODdhAwACAIEAAPoKAAAAAAAAAAAAACwAAAAAAwACAAAIBgABCBwYEAAh+QQBAAABACwAAAAAAwACAIEA+hQAAAAAAAAAAAAIBgABCBwY"
    "EAAh+QQBAAABACwAAAAAAwACAIEeAPoAAAAAAAAAAAAIBgABCBwYEAA7"
)


COLOR_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2}


"""Channels by color_type of a PNG: grey, RGB, palette, grey and alpha."""


def make_png_chunk(name, body):
    length = struct.pack(">I", len(body))
    checksum = struct.pack(">I", zlib.crc32(name + body))
    return length + name + body + checksum


def make_png(rows, depth, color_type, *chunks):
    """Return a PNG of rows (bytes) without filters."""
    width = len(rows[0]) * 8 // (depth * COLOR_CHANNELS[color_type])
    header = struct.pack(
        ">IIBBBBB",
        width,
        len(rows),
        depth,
        color_type,
        0,
        0,
        0,
    )
    data = zlib.compress(b"".join(b"\0" + row for row in rows))

    file = b"\x89PNG\r\n\x1a\n" + make_png_chunk(b"IHDR", header)
    for name, body in chunks:
        file += make_png_chunk(name, body)
    return file + make_png_chunk(b"IDAT", data) + make_png_chunk(b"IEND", b"")


PALETTE = (b"PLTE", bytes([9, 8, 7, 250, 100, 50, 0, 0, 255]))
PNGS = {
    "transparent palette": (
        make_png([b"\0\1\2"], 8, 3, PALETTE, (b"tRNS", bytes([0, 128]))),
        [[(9, 8, 7), (250, 100, 50), (0, 0, 255)]],
    ),
    "grey and alpha": (make_png([bytes([17, 0, 99, 255])], 8, 4), [[(17,) * 3, (99,) * 3]]),
    "black and white": (
        make_png([bytes([0b10100000])], 1, 0),
        [[(255,) * 3, (0,) * 3] * 2 + [(0,) * 3] * 4],
    ),
    "16-bit grey": (
        make_png([struct.pack(">3H", 0, 0x1234, 0xFFFF)], 16, 0),
        [[(0,) * 3, (0x12,) * 3, (0xFF,) * 3]],
    ),
    "16-bit RGB": (
        make_png([struct.pack(">3H", 0x0100, 0x7F80, 0xFE01)], 16, 2),
        [[(0x01, 0x7F, 0xFE)]],
    ),
}


@pytest.mark.parametrize("kind", PNGS)
def test_png(kind):
    """OpenCV may round values of 16 bits, where the rule says that low bits are lost."""
    file, expected = PNGS[kind]
    tolerance = 1 if kind.startswith("16") else 0

    difference = images.decode(file).astype(int) - np.array(expected)

    assert np.abs(difference).max() <= tolerance


@pytest.mark.parametrize(
    ("extension", "options", "tolerance"),
    [
        (".png", (), 0),
        (".bmp", (), 0),
        (".tiff", (), 0),
        (".ppm", (), 0),
        (".webp", (cv2.IMWRITE_WEBP_QUALITY, 101), 0),
        (".jpg", (), 4),
        (".gif", (), 30),
    ],
)
def test_formats(extension, options, tolerance):
    file = encode(extension, SMOOTH, *options)

    difference = images.decode(file).astype(int) - SMOOTH

    assert np.abs(difference).mean() <= tolerance


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (CMYK_JPEG, np.array([0.8 * 0.8, 0.6 * 0.8, 0.4 * 0.8]) * 255),
        (YCCK_JPEG, np.array([200, 120, 40])),
    ],
    ids=["CMYK", "YCCK"],
)
def test_cmyk_is_paper_white_less_ink(file, expected):
    """Light is (1 - ink) (1 - black)."""
    assert np.abs(images.decode(file) - expected).max() <= 3


ADOBE_MARKER = slice(2, 2 + 2 + 14)


UNMARKED_CMYK = CMYK_JPEG[: ADOBE_MARKER.start] + CMYK_JPEG[ADOBE_MARKER.stop :]


@pytest.mark.parametrize(
    "file",
    [
        UNMARKED_CMYK,
        UNMARKED_CMYK[:2] + b"\xff\xff\xff\xfe\0\x07Adobe" + UNMARKED_CMYK[2:],
    ],
    ids=["without a marker", "with fill bytes and a comment"],
)
def test_cmyk_that_may_be_inverted_is_rejected(file):
    """The marker of Adobe tells whether inks are inverted."""
    assert CMYK_JPEG[ADOBE_MARKER].startswith(b"\xff\xee\0\x0eAdobe")

    with pytest.raises(UnreadableImage, match=r"CMYK.*inverted: save as RGB"):
        images.decode(file)


def test_the_first_frame_of_an_animation_is_decoded():
    expected = np.broadcast_to([250, 10, 0], (2, 3, 3))
    assert np.array_equal(images.decode(ANIMATED_GIF), expected)


UNREADABLE = {
    "empty": (b"", "^The file is empty$"),
    "page": (
        b"\xef\xbb\xbf\n <!DOCTYPE HTML><html><body>404</body></html>",
        r"a page of markup \(HTML, XML or SVG",
    ),
    "text": (b"cat, 3\n", r"no known image format \(7 bytes\)"),
    "JPEG without its end": (JPEG[:-2], "starts as JPEG but is cut off"),
    "half a PNG": (PNG[: len(PNG) // 2], "starts as PNG"),
    "damaged PNG": (PNG[:60] + b"\0\0\0\0" + PNG[64:], "starts as PNG but is cut off, damaged"),
}


def test_the_stored_pixels_of_a_turned_photograph_are_decoded():
    """Exif data states orientation 6, a quarter turn, which OpenCV reads."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    length = (len(exif) + 2).to_bytes(2, "big")
    tagged = JPEG[:2] + b"\xff\xe1" + length + exif + JPEG[2:]

    by_opencv = cv2.imdecode(np.frombuffer(tagged, np.uint8), cv2.IMREAD_COLOR)

    assert by_opencv.shape == (60, 50, 3)
    assert np.array_equal(images.decode(tagged), images.decode(JPEG))


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_says_why(kind):
    file, reason = UNREADABLE[kind]

    with pytest.raises(UnreadableImage, match=reason):
        images.decode(file)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(length=st.integers(0, len(JPEG) - 1))
def test_part_of_a_jpeg_is_unreadable(length):
    with pytest.raises(UnreadableImage):
        images.decode(JPEG[:length])


def test_too_many_pixels(monkeypatch):
    def reject(*arguments):
        raise cv2.error("too large")

    monkeypatch.setattr(cv2, "imdecode", reject)

    with pytest.raises(UnreadableImage, match="starts as PNG"):
        images.decode(PNG)


def test_arrays_are_completed_and_alpha_is_dropped():
    assert images.decode(SMOOTH).tolist() == SMOOTH.tolist()

    alpha = np.concatenate([SMOOTH, np.full((50, 60, 1), 9, np.uint8)], axis=-1)
    for image in (alpha, encode(".png", alpha)):
        assert np.array_equal(images.decode(image), SMOOTH)

    expected_grey = np.repeat(SMOOTH[..., :1], 3, axis=-1)
    for grey in (SMOOTH[..., 0], SMOOTH[..., :1]):
        assert np.array_equal(images.decode(grey), expected_grey)

    with pytest.raises(ValueError, match="uint8"):
        images.decode(SMOOTH.astype(np.float32))


def build_bilinear_weights(old, new):
    """Return weights (new, old) of linear interpolation by its definition.

    Samples are at pixel centres, and edges are repeated.
    """
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.floor(centres).astype(int)
    high = np.minimum(low + 1, old - 1)

    weights = np.zeros((new, old))
    np.add.at(weights, (np.arange(new), low), 1 - (centres - low))
    np.add.at(weights, (np.arange(new), high), centres - low)
    return weights


def resize_by_weights(image, size, build_weights):
    """Return float64 (*size, C), by the weights (new, old) of each side."""
    row_weights = build_weights(image.shape[0], size[0])
    column_weights = build_weights(image.shape[1], size[1])
    return np.einsum(
        "ai,bj,ijc->abc",
        row_weights,
        column_weights,
        image.astype(float),
    )


@pytest.mark.parametrize("size", [(20, 33), (50, 60), (77, 61), (1, 1), (3, 200)])
def test_bilinear_is_the_definition(size):
    """OpenCV computes with weights of 11 bits."""
    found = images.resize_bilinear(SMOOTH, size)

    expected = resize_by_weights(SMOOTH, size, build_bilinear_weights)
    assert np.abs(found - expected).max() <= 1


def build_area_weights(old, new):
    """Return weights (new, old) of averages over areas by their definition.

    They are the part of each new pixel that is in each old one.
    """
    ends = np.arange(1, new + 1)[:, None] * old / new
    starts = ends - old / new
    edges = np.arange(old)

    overlap = np.minimum(ends, edges + 1) - np.maximum(starts, edges)
    return np.maximum(overlap, 0) * new / old


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    old=st.tuples(*[st.integers(1, 40)] * 2),
    factor=st.one_of(st.integers(1, 8), st.fractions(1, 12, max_denominator=9)),
    seed=st.integers(0, 9),
)
def test_enlarging_averages_areas(old, factor, seed):
    """Borders of new pixels may fall on borders of old ones."""
    image = np.random.default_rng(seed).integers(
        256,
        size=(*old, 3),
        dtype=np.uint8,
    )
    size = tuple(round(side * factor) for side in old)

    found = images.resize_to_cover(image, size)

    expected = resize_by_weights(
        image,
        found.shape[:2],
        build_area_weights,
    )
    assert np.abs(found - expected).max() <= 0.501


def test_shrinking_averages_areas():
    found = images.resize_to_cover(SMOOTH, (10, 12))

    expected = SMOOTH.reshape(10, 5, 12, 5, 3).mean(axis=(1, 3))
    assert np.abs(found - expected).max() <= 0.51

    by_weights = resize_by_weights(SMOOTH, (10, 12), build_area_weights)
    assert np.abs(by_weights - expected).max() < 1e-9


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    old=st.tuples(*[st.integers(1, 400)] * 2),
    size=st.tuples(*[st.integers(1, 300)] * 2),
)
def test_covering_is_tight(old, size):
    """Both sides cover the size, and one of them exactly."""
    covered = images.resize_to_cover(np.zeros((*old, 3), np.uint8), size)
    height, width = covered.shape[:2]

    assert height >= size[0]
    assert width >= size[1]
    assert height == size[0] or width == size[1]
