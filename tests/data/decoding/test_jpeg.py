"""Crops of JPEG files against the same part of the completely decoded file, with simplejpeg and without."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.data.crops import Box, cut
from vit_jax.data.decoding import headers, images, jpeg
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform

RNG = np.random.default_rng(0)
HEIGHT = 131
WIDTH = 167
SMOOTH = cv2.resize(
    RNG.integers(256, size=(9, 11, 3), dtype=np.uint8),
    (WIDTH, HEIGHT),
    interpolation=cv2.INTER_CUBIC,
)
PHOTO = np.clip(SMOOTH + RNG.normal(0, 6, (HEIGHT, WIDTH, 1)), 0, 255).astype(np.uint8)
SAMPLINGS = [
    getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}") for name in (420, 422, 444, 440, 411)
]
OPTIONS = [
    *((cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling) for sampling in SAMPLINGS),
    (cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    *((cv2.IMWRITE_JPEG_RST_INTERVAL, interval) for interval in (-(-WIDTH // 16), 1, 7)),
]


def encode(pixels, *options):
    return cv2.imencode(".jpg", pixels, options)[1].tobytes()


FILES = [
    *(encode(PHOTO, *options) for options in OPTIONS),
    encode(PHOTO[..., 1], cv2.IMWRITE_JPEG_RST_INTERVAL, 21),
]


@pytest.fixture(params=["simplejpeg", "OpenCV"])
def decoder(request, monkeypatch):
    """Each test runs with both decoders, of which one need not be installed."""
    if request.param == "OpenCV":
        monkeypatch.setattr(jpeg, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    return request.param


boxes = st.tuples(st.integers(0, HEIGHT - 1), st.integers(0, WIDTH - 1)).flatmap(
    lambda corner: st.builds(
        Box,
        *map(st.just, corner),
        st.integers(1, HEIGHT - corner[0]),
        st.integers(1, WIDTH - corner[1]),
    )
)


@pytest.mark.parametrize("is_installed", [True, False], ids=["simplejpeg", "OpenCV"])
@settings(derandomize=True, deadline=None, max_examples=120)
@given(file=st.sampled_from(FILES), box=boxes)
def test_a_crop_has_the_very_pixels_of_the_complete_image(is_installed, file, box):
    with pytest.MonkeyPatch.context() as patch:
        if not is_installed:
            patch.setattr(jpeg, "simplejpeg", None)
        found = images.plan_crop(file, lambda height, width: box, (HEIGHT, WIDTH))()

    assert np.array_equal(found, cut(images.decode(file), box))


def test_of_a_file_only_what_is_needed_reaches_the_decoder(decoder, monkeypatch):
    """Down to the crop's lower edge where the decoder allows it; with restart markers the crop's rows alone."""
    library, name = (cv2, "imdecode") if decoder == "OpenCV" else (jpeg.simplejpeg, "decode_jpeg")
    seen = []
    decode = getattr(library, name)

    def watch(file, *rest, **options):
        seen.append((len(file), decode(file, *rest, **options)))
        return seen[-1][1]

    monkeypatch.setattr(library, name, watch)
    box = Box(50, 20, 20, 30)
    plain = FILES[0]
    marked = FILES[6]

    for file in (plain, marked):
        images.plan_crop(file, lambda *_: box, (20, 30))()

    rows = [pixels.shape[0] for _, pixels in seen]

    assert rows == [80 if decoder == "simplejpeg" else HEIGHT, 32]  # of blocks of 16 rows
    assert seen[1][0] < len(marked) / 2


def test_a_large_crop_is_decoded_smaller(decoder):
    """At half, quarter and eighth size; its border is moved by up to half of a pixel of these."""
    large = cv2.resize(SMOOTH, (WIDTH * 8, HEIGHT * 8), interpolation=cv2.INTER_CUBIC)
    file = encode(large, cv2.IMWRITE_JPEG_QUALITY, 95)
    box = Box(100, 204, 803, 1000)

    for reduction in (8, 4, 2, 1):
        size = (803 // reduction, 1000 // reduction)
        found = images.plan_crop(file, lambda *_: box, size)()

        assert abs(found.shape[0] - 803 / reduction) <= 1
        assert abs(found.shape[1] - 1000 / reduction) <= 1

        exact = images.resize_bilinear(cut(images.decode(file), box), (100, 125)).astype(int)

        assert np.abs(images.resize_bilinear(found, (100, 125)) - exact).mean() <= 2.5


def test_training_crops_differ_little_from_exact_decoding(decoder, make_config, monkeypatch):
    """On average over files of which one in twenty has crops that are decoded smaller, as in ImageNet at 224 pixels."""
    files = [encode(PHOTO, cv2.IMWRITE_JPEG_QUALITY, 90)] * 19
    files.append(encode(cv2.resize(PHOTO, (WIDTH * 4, HEIGHT * 4), interpolation=cv2.INTER_CUBIC)))
    transform = TrainTransform(make_config(image_size=(64, 64)))

    def run():
        rngs = (np.random.default_rng(seed) for seed in range(1000))
        return np.stack(
            [transform(Record(file, 0), next(rngs)) for file in files for _ in range(8)]
        ).astype(int)

    found = run()
    monkeypatch.setattr(jpeg, "layout_of", lambda file: None)
    difference = np.abs(found - run()).mean()

    assert 0 < difference <= 0.5


def test_what_is_no_usual_jpeg_is_decoded_in_full(decoder):
    box = Box(3, 4, 5, 6)
    for image in (PHOTO, cv2.imencode(".png", PHOTO)[1].tobytes()):
        assert np.array_equal(
            images.plan_crop(image, lambda *_: box, (5, 6))(),
            cut(images.decode(image), box),
        )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(file=st.sampled_from(FILES), length=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_unreadable_wherever_the_crop_is(file, length):
    for top in (0, 100):
        with pytest.raises(UnreadableImage):
            images.plan_crop(
                file[: int(length * len(file))],
                lambda *_, top=top: Box(top, 0, 8, 8),
                (8, 8),
            )()


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    file=st.sampled_from(FILES),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
)
def test_a_damaged_file_is_unreadable_or_an_image(file, place, byte):
    damaged = bytearray(file)
    damaged[int(place * len(file))] = byte

    try:
        found = images.plan_crop(
            bytes(damaged),
            lambda height, width: Box(0, 0, min(9, height), 1),
            (9, 1),
            1.0,
        )()
    except UnreadableImage:
        return

    assert found.dtype == np.uint8
    assert found.shape[1:] == (1, 3)


@pytest.mark.parametrize("is_progressive", [False, True])
def test_a_jpeg_of_very_many_scans_is_unreadable(is_progressive):
    """In its first scan all colours, or some: only then do decoders read on."""
    file = encode(PHOTO, cv2.IMWRITE_JPEG_PROGRESSIVE, int(is_progressive))
    last = file[file.rfind(b"\xff\xda") : -2]
    many = file[:-2] + last * 1000 + file[-2:]

    assert headers.jpeg_scans(file) == (10 if is_progressive else 1)

    if not is_progressive:
        assert headers.jpeg_scans(many) == 1
        return

    for read in (
        images.decode,
        lambda file: images.plan_crop(file, lambda *sides: Box(0, 0, 8, 8), (8, 8)),
    ):
        with pytest.raises(
            UnreadableImage,
            match="JPEG of 1,010 scans, and at most 128 are decoded",
        ):
            read(many)
