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

from tests.data import packed_files
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
        order = [2, 1, 0, 3][: pixels.shape[2]]
        pixels = pixels[..., order]
    return packed_files.encode(extension, pixels, *options)


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


# Channels by color_type of a PNG: grey, RGB, palette, grey and alpha
COLOR_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2}


def make_png_chunk(name, body):
    length = struct.pack(">I", len(body))
    checksum = struct.pack(">I", zlib.crc32(name + body))
    return length + name + body + checksum


def make_png(rows, depth, color_type, *chunks):
    """Return a PNG of rows (bytes) without filters."""
    num_channels = COLOR_CHANNELS[color_type]
    width = len(rows[0]) * 8 // (depth * num_channels)
    sizes = struct.pack(">II", width, len(rows))
    header = sizes + bytes([depth, color_type, 0, 0, 0])
    filtered = b"".join(b"\0" + row for row in rows)
    data = zlib.compress(filtered)

    all_chunks = [
        (b"IHDR", header),
        *chunks,
        (b"IDAT", data),
        (b"IEND", b""),
    ]
    file = b"\x89PNG\r\n\x1a\n"
    for name, body in all_chunks:
        file += make_png_chunk(name, body)
    return file


PALETTE = (b"PLTE", b"\x09\x08\x07\xfa\x64\x32\x00\x00\xff")
ALPHA = (b"tRNS", b"\x00\x80")
PNGS = {  # a row of pixels, and its colours or grey levels
    "transparent palette": (
        make_png([b"\0\1\2"], 8, 3, PALETTE, ALPHA),
        [
            (9, 8, 7),
            (250, 100, 50),
            (0, 0, 255),
        ],
    ),
    "grey and alpha": (
        make_png([b"\x11\x00\x63\xff"], 8, 4),
        [[17], [99]],
    ),
    "black and white": (
        make_png([b"\xa0"], 1, 0),
        [[255], [0]] * 2 + [[0]] * 4,
    ),
    "16-bit grey": (
        make_png([b"\x00\x00\x12\x34\xff\xff"], 16, 0),
        [[0], [0x12], [0xFF]],
    ),
    "16-bit RGB": (
        make_png([b"\x01\x00\x7f\x80\xfe\x01"], 16, 2),
        [(0x01, 0x7F, 0xFE)],
    ),
}


@pytest.mark.parametrize("kind", PNGS)
def test_png(kind):
    """OpenCV may round values of 16 bits, where the rule says that low bits are lost."""
    file, expected = PNGS[kind]
    tolerance = 1 if kind.startswith("16") else 0

    decoded = images.decode(file)

    assert decoded.shape == (1, len(expected), 3)
    difference = decoded.astype(int) - np.array([expected])
    assert np.abs(difference).max() <= tolerance


@pytest.mark.parametrize(
    ("extension", "tolerance"),
    [
        (".png", 0),
        (".bmp", 0),
        (".tiff", 0),
        (".ppm", 0),
        (".webp", 0),
        (".jpg", 4),
        (".gif", 30),
    ],
)
def test_formats(extension, tolerance):
    options = ()
    if extension == ".webp":
        options = (cv2.IMWRITE_WEBP_QUALITY, 101)  # lossless
    file = encode(extension, SMOOTH, *options)

    decoded = images.decode(file)

    difference = decoded.astype(int) - SMOOTH
    assert np.abs(difference).mean() <= tolerance


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (CMYK_JPEG, (0.8 * 204, 0.6 * 204, 0.4 * 204)),
        (YCCK_JPEG, (200, 120, 40)),
    ],
    ids=["CMYK", "YCCK"],
)
def test_cmyk_is_paper_white_less_ink(file, expected):
    """Light is (1 - ink) (1 - black); black is 51, so 204 of 255 remain."""
    decoded = images.decode(file)

    difference = decoded - np.array(expected)
    assert np.abs(difference).max() <= 3


START = CMYK_JPEG[:2]
ADOBE_MARKER = CMYK_JPEG[2:18]
COMMENT = b"\xff\xff\xff\xfe\0\x07Adobe"
UNMARKED_CMYK = CMYK_JPEG.replace(ADOBE_MARKER, b"", 1)


@pytest.mark.parametrize(
    "file",
    [
        UNMARKED_CMYK,
        UNMARKED_CMYK.replace(START, START + COMMENT, 1),
    ],
    ids=["without a marker", "with fill bytes and a comment"],
)
def test_cmyk_that_may_be_inverted_is_rejected(file):
    """The marker of Adobe tells whether inks are inverted."""
    assert ADOBE_MARKER.startswith(b"\xff\xee\0\x0eAdobe")

    with pytest.raises(UnreadableImage, match=r"CMYK.*inverted: save as RGB"):
        images.decode(file)


def test_the_first_frame_of_an_animation_is_decoded():
    decoded = images.decode(ANIMATED_GIF)

    expected = np.broadcast_to([250, 10, 0], (2, 3, 3))
    assert np.array_equal(decoded, expected)


HALF_A_PNG = PNG[: len(PNG) // 2]
DAMAGED_PNG = PNG[:60] + b"\0\0\0\0" + PNG[64:]
UNREADABLE = {
    "empty": (b"", "^The file is empty$"),
    "page": (
        b"\xef\xbb\xbf\n <!DOCTYPE HTML><html><body>404</body></html>",
        r"a page of markup \(HTML, XML or SVG",
    ),
    "text": (b"cat, 3\n", r"no known image format \(7 bytes\)"),
    "JPEG without its end": (JPEG[:-2], "starts as JPEG but is cut off"),
    "half a PNG": (HALF_A_PNG, "starts as PNG"),
    "damaged PNG": (DAMAGED_PNG, "starts as PNG but is cut off, damaged"),
}


def test_the_stored_pixels_of_a_turned_photograph_are_decoded():
    """Exif data states orientation 6, a quarter turn, which OpenCV reads."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    length = (len(exif) + 2).to_bytes(2, "big")
    segment = b"\xff\xe1" + length + exif
    tagged = JPEG[:2] + segment + JPEG[2:]

    decoded = images.decode(tagged)

    content = np.frombuffer(tagged, np.uint8)
    by_opencv = cv2.imdecode(content, cv2.IMREAD_COLOR)

    assert by_opencv.shape == (60, 50, 3)
    assert np.array_equal(decoded, images.decode(JPEG))


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


def test_alpha_is_dropped():
    alpha = np.full((50, 60), 9, np.uint8)
    pixels = np.dstack([SMOOTH, alpha])
    file = encode(".png", pixels)

    for image in (SMOOTH, pixels, file):
        decoded = images.decode(image)
        assert np.array_equal(decoded, SMOOTH)


def test_grey_arrays_become_rgb():
    grey = SMOOTH[..., 0]
    expected = np.dstack([grey, grey, grey])

    for image in (grey, grey[..., None]):
        decoded = images.decode(image)
        assert np.array_equal(decoded, expected)


def test_arrays_of_another_dtype_are_rejected():
    with pytest.raises(ValueError, match="uint8"):
        images.decode(SMOOTH.astype(np.float32))


def build_bilinear_weights(old, new):
    """Return weights (new, old) of linear interpolation by its definition.

    Samples are at pixel centres, and edges are repeated.
    """
    rows = np.arange(new)
    centres = (rows + 0.5) * old / new - 0.5
    centres = np.clip(centres, 0, old - 1)
    low = np.floor(centres).astype(int)
    high = np.minimum(low + 1, old - 1)
    fraction = centres - low

    weights = np.zeros((new, old))
    np.add.at(weights, (rows, low), 1 - fraction)
    np.add.at(weights, (rows, high), fraction)
    return weights


def resize_by_weights(image, size, build_weights):
    """Return float64 (*size, C), by the weights (new, old) of each side."""
    old_height, old_width = image.shape[:2]
    height, width = size
    row_weights = build_weights(old_height, height)
    column_weights = build_weights(old_width, width)

    return np.einsum(
        "ai,bj,ijc->abc",
        row_weights,
        column_weights,
        image.astype(float),
    )


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

    first = np.maximum(starts, edges)
    last = np.minimum(ends, edges + 1)
    overlap = np.maximum(last - first, 0)
    return overlap * new / old


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    factor=st.one_of(
        st.integers(1, 8),
        st.fractions(1, 12, max_denominator=9),
    ),
    seed=st.integers(0, 9),
)
def test_enlarging_averages_areas(height, width, factor, seed):
    """Borders of new pixels may fall on borders of old ones."""
    rng = np.random.default_rng(seed)
    image = rng.integers(
        256,
        size=(height, width, 3),
        dtype=np.uint8,
    )
    size = (round(height * factor), round(width * factor))

    found = images.resize_to_cover(image, size)

    expected = resize_by_weights(
        image,
        found.shape[:2],
        build_area_weights,
    )
    assert np.abs(found - expected).max() <= 0.501


def test_shrinking_averages_areas():
    found = images.resize_to_cover(SMOOTH, (10, 12))

    blocks = SMOOTH.reshape(10, 5, 12, 5, 3)
    expected = blocks.mean(axis=(1, 3))

    assert np.abs(found - expected).max() <= 0.51

    by_weights = resize_by_weights(
        SMOOTH,
        (10, 12),
        build_area_weights,
    )
    assert np.abs(by_weights - expected).max() < 1e-9


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    old_height=st.integers(1, 400),
    old_width=st.integers(1, 400),
    least_height=st.integers(1, 300),
    least_width=st.integers(1, 300),
)
def test_covering_is_tight(old_height, old_width, least_height, least_width):
    """Both sides cover the size, and one of them exactly."""
    image = np.zeros((old_height, old_width, 3), np.uint8)

    covered = images.resize_to_cover(image, (least_height, least_width))

    height, width = covered.shape[:2]
    assert height >= least_height
    assert width >= least_width
    assert height == least_height or width == least_width
