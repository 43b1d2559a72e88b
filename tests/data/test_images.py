"""Decoding odd files, and resizing, held to an exact formula."""

import base64

import cv2
import numpy as np
import pytest

from vit_jax.data import images
from vit_jax.data.images import UnreadableImage
from vit_jax.data.sources import open_source

RNG = np.random.default_rng(0)
SMOOTH = cv2.resize(RNG.integers(256, size=(5, 6, 3), dtype=np.uint8), (60, 50), interpolation=cv2.INTER_CUBIC)


def encode(extension, pixels, *options):
    """A file of RGB pixels; OpenCV writes BGR."""
    if pixels.ndim == 3:
        pixels = pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]
    return cv2.imencode(extension, pixels, options)[1].tobytes()


def bilinear(image, size):
    """Bilinear without antialiasing by its definition: samples at pixel centres, edges repeated."""

    def weights(old, new):
        centre = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.floor(centre).astype(int)
        matrix = np.zeros((new, old))
        np.add.at(matrix, (np.arange(new), low), 1 - (centre - low))
        np.add.at(matrix, (np.arange(new), np.minimum(low + 1, old - 1)), centre - low)
        return matrix

    rows, columns = (weights(old, new) for old, new in zip(image.shape, size, strict=False))
    return np.einsum("ai,bj,ijc->abc", rows, columns, image.astype(float))


@pytest.mark.parametrize("extension", [".png", ".bmp", ".tiff", ".ppm"])
def test_lossless_formats_are_exact_rgb(extension):
    assert np.array_equal(images.decode(encode(extension, SMOOTH)), SMOOTH)


def test_webp_without_loss():
    assert np.array_equal(images.decode(encode(".webp", SMOOTH, cv2.IMWRITE_WEBP_QUALITY, 101)), SMOOTH)


@pytest.mark.parametrize(("extension", "tolerance"), [(".jpg", 4), (".gif", 30)])
def test_lossy_formats_are_near(extension, tolerance):
    difference = images.decode(encode(extension, SMOOTH)).astype(int) - SMOOTH
    assert np.abs(difference).mean() < tolerance


def test_gray_is_repeated():
    gray = SMOOTH[..., 0]
    assert np.array_equal(images.decode(encode(".png", gray)), np.stack([gray] * 3, axis=-1))


def test_sixteen_bits_keep_the_high_ones():
    deep = SMOOTH.astype(np.uint16) * 256 + 7
    assert np.abs(images.decode(encode(".png", deep)).astype(int) - SMOOTH).max() <= 1


def test_alpha_is_dropped():
    alpha = np.concatenate([SMOOTH, np.full((50, 60, 1), 9, np.uint8)], axis=-1)
    assert np.array_equal(images.decode(encode(".png", alpha)), SMOOTH)


def test_cmyk_jpeg():
    """8 x 8 pixels, black above cyan, written once with PIL, which the tests do not need."""
    file = base64.b64decode(
        "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwPFxgW"
        "FBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABUAAQEAAAAAAAAAAAAAAAAAAAEJ/8QAGBAAAgMAAAAAAAAAAAAAAAAAABlnpuT/2gAO"
        "BEMATQBZAEsAAD8AHnQna8RVMqmCMZsqm0//2Q=="
    )
    expected = np.repeat([[[0, 0, 0]], [[0, 255, 255]]], 4, axis=0)
    assert np.abs(images.decode(file).astype(int) - expected).max() <= 3


def test_png_named_jpg_is_a_png(make_folder, make_config):
    path = make_folder({f"{name}/{i}.jpg": encode(".png", SMOOTH) for name in "ab" for i in range(2)})
    assert np.array_equal(images.decode(open_source(f"folder:{path}", "train", make_config(), 0)[0].image), SMOOTH)


def test_orientation_is_ignored():
    plain = encode(".jpg", SMOOTH)
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # orientation 6: a quarter turn
    tagged = plain[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + plain[2:]
    assert cv2.imdecode(np.frombuffer(tagged, np.uint8), cv2.IMREAD_COLOR).shape == (60, 50, 3)  # the tag is read
    assert np.array_equal(images.decode(tagged), images.decode(plain))


def test_one_pixel():
    assert images.decode(encode(".png", np.uint8([[[1, 2, 3]]]))).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", encode(".jpg", SMOOTH)[:20], encode(".png", SMOOTH)[:200]],
    ids=["empty", "text", "header", "half"],
)
def test_unreadable(data):
    with pytest.raises(UnreadableImage):
        images.decode(data)


def test_half_a_jpeg_is_not_silently_gray():
    with pytest.raises(UnreadableImage):
        images.decode(encode(".jpg", SMOOTH)[:600])


def test_arrays_are_completed():
    assert images.decode(SMOOTH).tolist() == SMOOTH.tolist()
    for gray in (SMOOTH[..., 0], SMOOTH[..., :1]):
        assert np.array_equal(images.decode(gray), np.repeat(SMOOTH[..., :1], 3, axis=-1))
    with pytest.raises(ValueError, match="uint8"):
        images.decode(SMOOTH.astype(np.float32))


@pytest.mark.parametrize("size", [(20, 33), (50, 60), (77, 61), (1, 1), (3, 200)])
def test_bilinear_is_the_definition(size):
    found = images.resize_bilinear(SMOOTH, size)
    assert np.abs(found - bilinear(SMOOTH, size)).max() <= 1  # cv2 works with weights of 11 bits


def test_area_averages_blocks():
    expected = SMOOTH.reshape(10, 5, 12, 5, 3).mean(axis=(1, 3))
    assert np.abs(images.resize_area(SMOOTH, (10, 12)) - expected).max() <= 0.51
    assert np.array_equal(images.resize_area(SMOOTH, (70, 20)), images.resize_bilinear(SMOOTH, (70, 20)))


@pytest.mark.parametrize(
    ("old", "size"), [((50, 60), (20, 20)), ((50, 60), (100, 7)), ((1, 300), (9, 9)), ((256, 341), (256, 256))]
)
def test_covering_is_tight(old, size):
    covered = images.resize_to_cover(np.zeros((*old, 3), np.uint8), size).shape
    assert covered[0] >= size[0]
    assert covered[1] >= size[1]
    assert covered[0] == size[0] or covered[1] == size[1]


def test_central_crop_is_central():
    image = np.arange(7 * 9, dtype=np.uint8).reshape(7, 9, 1)
    assert np.array_equal(images.central_crop(image, (3, 3)), image[2:5, 3:6])
