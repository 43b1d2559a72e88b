"""Files that are odd or broken: what is readable has the right colours, what is not says why.

The files in base64 were written once with PIL, which the tests do not need; PNGs are put together chunk by chunk.
"""

import base64
import struct
import zlib

import cv2
import numpy as np
import pytest

from vit_jax.data import images
from vit_jax.data.files import FileSource
from vit_jax.data.images import UnreadableImage
from vit_jax.data.records import Record
from vit_jax.data.signatures import explain_unreadable
from vit_jax.data.transforms import build_evaluation_transform, build_train_transform
from vit_jax.data.unreadable import reason_of

SMOOTH = np.linspace(0, 255, 40 * 30 * 3).reshape(40, 30, 3).astype(np.uint8)
JPEG, PNG = (cv2.imencode(extension, SMOOTH)[1].tobytes() for extension in (".jpg", ".png"))

# 8 x 8 pixels of cyan 51, magenta 102, yellow 153 and black 51, of 255.
CMYK_JPEG = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwPFxgW"
    "FBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABUAAQEAAAAAAAAAAAAAAAAAAAcI/8QAFBABAAAAAAAAAAAAAAAAAAAAAP/aAA4EQwBN"
    "AFkASwAAPwCyyGOllv/Z"
)
# 8 x 8 pixels of (200, 120, 40) and no black, stored as luma and chroma of the inverted inks, as Photoshop does.
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
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


PALETTE = (b"PLTE", bytes([9, 8, 7, 250, 100, 50, 0, 0, 255]))
PNGS = {
    "palette": (
        make_png([b"\0\1", b"\2\1"], 8, 3, PALETTE),
        [[(9, 8, 7), (250, 100, 50)], [(0, 0, 255), (250, 100, 50)]],
    ),
    "transparent palette": (
        make_png([b"\0\1\2"], 8, 3, PALETTE, (b"tRNS", bytes([0, 128]))),
        [[(9, 8, 7), (250, 100, 50), (0, 0, 255)]],
    ),
    "grey and alpha": (make_png([bytes([17, 0, 99, 255])], 8, 4), [[(17,) * 3, (99,) * 3]]),
    "grey": (make_png([bytes([17, 99])], 8, 0), [[(17,) * 3, (99,) * 3]]),
    "black and white": (make_png([bytes([0b10100000])], 1, 0), [[(255,) * 3, (0,) * 3] * 2 + [(0,) * 3] * 4]),
    "16-bit grey": (make_png([struct.pack(">3H", 0, 0x1234, 0xFFFF)], 16, 0), [[(0,) * 3, (0x12,) * 3, (0xFF,) * 3]]),
    "16-bit RGB": (make_png([struct.pack(">3H", 0x0100, 0x7F80, 0xFE01)], 16, 2), [[(0x01, 0x7F, 0xFE)]]),
}


@pytest.mark.parametrize("kind", PNGS)
def test_png(kind):
    file, expected = PNGS[kind]
    tolerance = 1 if kind.startswith("16") else 0  # OpenCV may round where we say "low bits are lost"
    assert np.abs(images.decode(file).astype(int) - np.array(expected)).max() <= tolerance


def test_cmyk_is_paper_white_less_ink():
    """Light is (1 - ink) (1 - black): 0.8 x 0.8, 0.6 x 0.8 and 0.4 x 0.8 of 255."""
    expected = np.array([0.64, 0.48, 0.32]) * 255
    assert np.abs(images.decode(CMYK_JPEG) - expected).max() <= 3


def test_cmyk_as_luma_and_chroma():
    assert np.abs(images.decode(YCCK_JPEG) - np.array([200.0, 120.0, 40.0])).max() <= 3


def test_cmyk_that_may_be_inverted_or_not_is_refused():
    marker = slice(2, 2 + 2 + 14)
    assert CMYK_JPEG[marker].startswith(b"\xff\xee\0\x0eAdobe")
    unmarked = CMYK_JPEG[: marker.start] + CMYK_JPEG[marker.stop :]
    for file in (unmarked, unmarked[:2] + b"\xff\xff\xff\xfe\0\x07Adobe" + unmarked[2:]):  # fill bytes and a comment
        with pytest.raises(UnreadableImage, match=r"CMYK.*inverted: save as RGB"):
            images.decode(file)


def test_first_frame_of_an_animation():
    frames = cv2.imdecodeanimation(np.frombuffer(ANIMATED_GIF, np.uint8))[1].frames
    assert len(frames) == 3
    assert np.array_equal(images.decode(ANIMATED_GIF), np.broadcast_to([250, 10, 0], (2, 3, 3)))


@pytest.mark.parametrize("size", [(1, 1), (1, 9)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"crop_distribution": "torchvision"},
        {"train_crop": "none", "test_resize": "direct"},
        {"train_crop": "shift", "shift_pixels": 4},
        {"train_crop": "resize", "train_resize_pixels": 37},
        {"train_crop": "resize_short_side", "train_resize_pixels": 37},
    ],
    ids=lambda fields: fields.get("train_crop", fields.get("crop_distribution", "tf")),
)
def test_one_pixel_fills_the_image(make_config, size, fields):
    config = make_config(image_size=(32, 32), **fields)
    file = cv2.imencode(".png", np.full((*size, 3), (30, 20, 10), np.uint8))[1].tobytes()
    train = build_train_transform(config)(Record(file, 0), np.random.default_rng(0))
    test = build_evaluation_transform(config)(Record(file, 0))
    assert train.shape == test.shape == (32, 32, 3)
    assert {tuple(pixel) for pixel in test.reshape(-1, 3).tolist()} == {(10, 20, 30)}
    border = {(0, 0, 0)} if "shift_pixels" in fields else set()
    assert {tuple(pixel) for pixel in train.reshape(-1, 3).tolist()} <= {(10, 20, 30)} | border


UNREADABLE = {
    "empty": (b"", "^The file is empty$"),
    "page": (b"\xef\xbb\xbf\n <!DOCTYPE HTML><html><body>404</body></html>", r"a page of markup \(HTML, XML or SVG"),
    "drawing": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "markup"),
    "text": (b"cat, 3\n", r"no known image format \(7 bytes\)"),
    "JPEG without its end": (JPEG[:-2], "starts as JPEG but is cut off"),
    "JPEG header": (JPEG[:20], "starts as JPEG"),
    "half a PNG": (PNG[: len(PNG) // 2], "starts as PNG"),
    "damaged PNG": (PNG[:60] + b"\0\0\0\0" + PNG[64:], "starts as PNG but is cut off, damaged"),
    "half a GIF": (ANIMATED_GIF[:40], "starts as GIF"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_says_why(kind):
    file, reason = UNREADABLE[kind]
    with pytest.raises(UnreadableImage, match=reason):
        images.decode(file)


def test_no_part_of_a_jpeg_is_taken_for_it():
    for length in range(0, len(JPEG), 7):
        with pytest.raises(UnreadableImage):
            images.decode(JPEG[:length])


def test_too_many_pixels(monkeypatch):
    def refuse(*arguments):
        raise cv2.error("too large")

    monkeypatch.setattr(cv2, "imdecode", refuse)
    with pytest.raises(UnreadableImage, match="starts as PNG"):
        images.decode(PNG)


def test_a_folder_of_surprises(make_folder, make_config):
    """A page that a download left behind, an empty file and one that is gone, under names of images."""
    page, empty = UNREADABLE["page"][0], UNREADABLE["empty"][0]
    folder = make_folder({"a.jpg": page, "b.jpg": empty, "c.jpg": JPEG})
    source = FileSource([str(folder / name) for name in ("a.jpg", "b.jpg", "c.jpg", "gone.jpg")], ("cat", "dog"))
    transform = build_evaluation_transform(make_config())
    assert transform(source[2]).shape == (8, 8, 3)
    reasons = [reason_of(source, index) for index in range(4)]
    assert reasons[0] == explain_unreadable(page)
    assert reasons[1] == "The file is empty"
    assert reasons[2].startswith("It could not be read at first")
    assert reasons[3] == "The file cannot be opened (No such file or directory)"
