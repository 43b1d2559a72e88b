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


def make_png(rows, depth, color_type, *chunks):
    """A PNG of rows (bytes) that are not filtered; color_type 0 is grey, 2 RGB, 3 palette, 4 grey and alpha."""
    width = len(rows[0]) * 8 // (depth * {0: 1, 2: 3, 3: 1, 4: 2}[color_type])
    header = struct.pack(">IIBBBBB", width, len(rows), depth, color_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = ((b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b""))

    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


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
    file, expected = PNGS[kind]
    # OpenCV may round where we say "low bits are lost"
    tolerance = 1 if kind.startswith("16") else 0

    assert np.abs(images.decode(file).astype(int) - np.array(expected)).max() <= tolerance


@pytest.mark.parametrize(
    ("extension", "options", "tolerance"),
    [
        *((extension, (), 0) for extension in (".png", ".bmp", ".tiff", ".ppm")),
        (".webp", (cv2.IMWRITE_WEBP_QUALITY, 101), 0),
        (".jpg", (), 4),
        (".gif", (), 30),
    ],
)
def test_formats(extension, options, tolerance):
    difference = images.decode(encode(extension, SMOOTH, *options)).astype(int) - SMOOTH
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


def test_cmyk_that_may_be_inverted_or_not_is_rejected():
    marker = slice(2, 2 + 2 + 14)

    assert CMYK_JPEG[marker].startswith(b"\xff\xee\0\x0eAdobe")

    unmarked = CMYK_JPEG[: marker.start] + CMYK_JPEG[marker.stop :]
    for file in (
        unmarked,
        unmarked[:2] + b"\xff\xff\xff\xfe\0\x07Adobe" + unmarked[2:],
    ):  # fill bytes and a comment
        with pytest.raises(UnreadableImage, match=r"CMYK.*inverted: save as RGB"):
            images.decode(file)


def test_of_an_animation_the_first_frame_and_of_a_photograph_the_stored_pixels():
    assert np.array_equal(images.decode(ANIMATED_GIF), np.broadcast_to([250, 10, 0], (2, 3, 3)))

    # Orientation 6: a quarter turn
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    tagged = JPEG[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + JPEG[2:]

    shape = cv2.imdecode(np.frombuffer(tagged, np.uint8), cv2.IMREAD_COLOR).shape

    assert shape == (60, 50, 3)  # the tag is read
    assert np.array_equal(images.decode(tagged), images.decode(JPEG))


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
    def refuse(*arguments):
        raise cv2.error("too large")

    monkeypatch.setattr(cv2, "imdecode", refuse)
    with pytest.raises(UnreadableImage, match="starts as PNG"):
        images.decode(PNG)


def test_arrays_are_completed_and_alpha_is_dropped():
    assert images.decode(SMOOTH).tolist() == SMOOTH.tolist()

    alpha = np.concatenate([SMOOTH, np.full((50, 60, 1), 9, np.uint8)], axis=-1)
    for image in (alpha, encode(".png", alpha)):
        assert np.array_equal(images.decode(image), SMOOTH)

    for gray in (SMOOTH[..., 0], SMOOTH[..., :1]):
        assert np.array_equal(images.decode(gray), np.repeat(SMOOTH[..., :1], 3, axis=-1))

    with pytest.raises(ValueError, match="uint8"):
        images.decode(SMOOTH.astype(np.float32))


def bilinear(old, new):
    """Weights (new, old) of linear interpolation by its definition: samples at pixel centres, edges repeated."""
    centre = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.floor(centre).astype(int)
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new), low), 1 - (centre - low))
    np.add.at(matrix, (np.arange(new), np.minimum(low + 1, old - 1)), centre - low)

    return matrix


def resized(image, size, weights):
    """float64 (*size, C), by the weights (new, old) of each side."""
    rows, columns = (weights(old, new) for old, new in zip(image.shape, size, strict=False))
    return np.einsum("ai,bj,ijc->abc", rows, columns, image.astype(float))


@pytest.mark.parametrize(
    "size",
    [
        (20, 33),
        (50, 60),
        (77, 61),
        (1, 1),
        (3, 200),
    ],
)
def test_bilinear_is_the_definition(size):
    found = images.resize_bilinear(SMOOTH, size)

    assert (
        np.abs(found - resized(SMOOTH, size, bilinear)).max() <= 1
    )  # cv2 works with weights of 11 bits


def areas(old, new):
    """Weights (new, old) of averages over areas by their definition: how much of each new pixel is in each old one."""
    ends = np.arange(1, new + 1)[:, None] * old / new
    edges = np.arange(old)
    overlap = np.minimum(ends, edges + 1) - np.maximum(ends - old / new, edges)

    return np.maximum(overlap, 0) * new / old


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    old=st.tuples(*[st.integers(1, 40)] * 2),
    factor=st.one_of(st.integers(1, 8), st.fractions(1, 12, max_denominator=9)),
    seed=st.integers(0, 9),
)
def test_enlarging_averages_areas(old, factor, seed):
    """Also where borders of new pixels fall on those of old ones."""
    image = np.random.default_rng(seed).integers(256, size=(*old, 3), dtype=np.uint8)
    found = images.resize_to_cover(image, tuple(round(side * factor) for side in old))

    assert np.abs(found - resized(image, found.shape[:2], areas)).max() <= 0.501


def test_shrinking_averages_areas():
    expected = SMOOTH.reshape(10, 5, 12, 5, 3).mean(axis=(1, 3))
    assert np.abs(images.resize_to_cover(SMOOTH, (10, 12)) - expected).max() <= 0.51
    assert np.abs(resized(SMOOTH, (10, 12), areas) - expected).max() < 1e-9


@settings(derandomize=True, deadline=None, max_examples=100)
@given(old=st.tuples(*[st.integers(1, 400)] * 2), size=st.tuples(*[st.integers(1, 300)] * 2))
def test_covering_is_tight(old, size):
    covered = images.resize_to_cover(np.zeros((*old, 3), np.uint8), size).shape

    assert covered[0] >= size[0]
    assert covered[1] >= size[1]
    assert covered[0] == size[0] or covered[1] == size[1]
