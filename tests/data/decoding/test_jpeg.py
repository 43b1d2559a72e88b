"""Crops of JPEG files against the completely decoded file, with simplejpeg and without."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import packed_files
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
NOISE = RNG.normal(0, 6, (HEIGHT, WIDTH, 1))
PHOTO = np.clip(SMOOTH + NOISE, 0, 255).astype(np.uint8)


def encode(pixels, *options):
    return packed_files.encode(".jpg", pixels, *options)


PLAIN = encode(
    PHOTO,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
)
WITH_MARKERS = encode(
    PHOTO,
    cv2.IMWRITE_JPEG_RST_INTERVAL,
    -(-WIDTH // 16),
)
OTHER_SAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
)
PROGRESSIVE = encode(PHOTO, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
FILES = [
    PLAIN,
    *(
        encode(
            PHOTO,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
            factor,
        )
        for factor in OTHER_SAMPLINGS
    ),
    PROGRESSIVE,
    WITH_MARKERS,
    encode(PHOTO, cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
    encode(PHOTO, cv2.IMWRITE_JPEG_RST_INTERVAL, 7),
    encode(PHOTO[..., 1], cv2.IMWRITE_JPEG_RST_INTERVAL, 21),
]


@pytest.fixture(params=["simplejpeg", "OpenCV"])
def decoder(request, monkeypatch):
    """Each test runs with both decoders; simplejpeg need not be installed."""
    if request.param == "OpenCV":
        monkeypatch.setattr(jpeg, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    return request.param


def crop_file(file, box, size, *options):
    """Return the pixels of a box, decoded for an image of this size."""
    read = images.plan_crop(
        file,
        lambda height, width: box,
        size,
        *options,
    )
    return read()


@st.composite
def boxes(draw):
    """Boxes inside the photograph."""
    top = draw(st.integers(0, HEIGHT - 1))
    left = draw(st.integers(0, WIDTH - 1))
    height = draw(st.integers(1, HEIGHT - top))
    width = draw(st.integers(1, WIDTH - left))

    return Box(top, left, height, width)


@pytest.mark.parametrize(
    "is_installed",
    [True, False],
    ids=["simplejpeg", "OpenCV"],
)
@settings(derandomize=True, deadline=None, max_examples=120)
@given(file=st.sampled_from(FILES), box=boxes())
def test_a_crop_has_the_very_pixels_of_the_complete_image(
    is_installed,
    file,
    box,
):
    with pytest.MonkeyPatch.context() as patch:
        if not is_installed:
            patch.setattr(jpeg, "simplejpeg", None)
        found = crop_file(file, box, (HEIGHT, WIDTH))

    whole = images.decode(file)
    assert np.array_equal(found, cut(whole, box))


def test_only_the_needed_part_of_a_file_reaches_the_decoder(decoder, monkeypatch):
    """simplejpeg decodes down to the lower edge of the crop.

    With restart markers, both decoders read the rows of the crop alone, in blocks of 16 rows.
    """
    if decoder == "OpenCV":
        library = cv2
        name = "imdecode"
    else:
        library = jpeg.simplejpeg
        name = "decode_jpeg"
    decode = getattr(library, name)
    file_sizes = []
    decoded_rows = []

    def watch(file, *rest, **options):
        pixels = decode(file, *rest, **options)
        file_sizes.append(len(file))
        decoded_rows.append(pixels.shape[0])
        return pixels

    monkeypatch.setattr(library, name, watch)
    box = Box(50, 20, 20, 30)

    crop_file(PLAIN, box, (20, 30))
    crop_file(WITH_MARKERS, box, (20, 30))

    plain_rows = 80 if decoder == "simplejpeg" else HEIGHT
    assert decoded_rows == [plain_rows, 32]
    assert file_sizes[1] < len(WITH_MARKERS) / 2


@pytest.mark.parametrize("reduction", [8, 4, 2, 1])
def test_a_large_crop_is_decoded_smaller(decoder, reduction):
    """Crops are decoded at half, quarter and eighth size.

    The border moves by up to half a pixel of this size.
    """
    large = cv2.resize(
        SMOOTH,
        (WIDTH * 8, HEIGHT * 8),
        interpolation=cv2.INTER_CUBIC,
    )
    file = encode(large, cv2.IMWRITE_JPEG_QUALITY, 95)
    box = Box(100, 204, 803, 1000)

    size = (803 // reduction, 1000 // reduction)

    found = crop_file(file, box, size)

    height, width = found.shape[:2]
    assert abs(height - 803 / reduction) <= 1
    assert abs(width - 1000 / reduction) <= 1

    exact = cut(images.decode(file), box)
    small_exact = images.resize_bilinear(exact, (100, 125))
    small_found = images.resize_bilinear(found, (100, 125))
    difference = np.abs(small_found - small_exact.astype(int))

    assert difference.mean() <= 2.5


def test_training_crops_differ_little_from_exact_decoding(
    decoder,
    make_config,
    monkeypatch,
):
    """One file in twenty has crops that are decoded smaller, as in ImageNet at 224 pixels."""
    large = cv2.resize(
        PHOTO,
        (WIDTH * 4, HEIGHT * 4),
        interpolation=cv2.INTER_CUBIC,
    )
    usual_file = encode(PHOTO, cv2.IMWRITE_JPEG_QUALITY, 90)
    files = [usual_file] * 19 + [encode(large)]
    transform = TrainTransform(make_config(image_size=(64, 64)))

    def make_crops():
        """Return eight random crops of each file, int64 (N, H, W, 3)."""
        crops = []
        for number in range(8 * len(files)):
            record = Record(files[number // 8], 0)
            generator = np.random.default_rng(number)
            crops.append(transform(record, generator))
        return np.stack(crops).astype(int)

    found = make_crops()
    monkeypatch.setattr(jpeg, "find_layout", lambda file: None)
    exact = make_crops()

    difference = np.abs(found - exact)
    assert 0 < difference.mean() <= 0.5


@pytest.mark.parametrize(
    "image",
    [
        PHOTO,
        packed_files.encode(".png", PHOTO),
    ],
    ids=["pixels", "PNG"],
)
def test_images_other_than_usual_jpegs_are_decoded_in_full(decoder, image):
    box = Box(3, 4, 5, 6)

    found = crop_file(image, box, (5, 6))

    whole = images.decode(image)
    assert np.array_equal(found, cut(whole, box))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    file=st.sampled_from(FILES),
    length=st.floats(0, 1, exclude_max=True),
)
def test_a_file_that_is_cut_off_is_unreadable_wherever_the_crop_is(file, length):
    num_bytes = int(length * len(file))
    cut_off = file[:num_bytes]

    for top in (0, 100):
        box = Box(top, 0, 8, 8)
        with pytest.raises(UnreadableImage):
            crop_file(cut_off, box, (8, 8))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    file=st.sampled_from(FILES),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
)
def test_a_damaged_file_is_unreadable_or_an_image(file, place, byte):
    damaged = bytearray(file)
    index = int(place * len(file))
    damaged[index] = byte

    def choose_box(height, width):
        return Box(0, 0, min(9, height), 1)

    try:
        read = images.plan_crop(
            bytes(damaged),
            choose_box,
            (9, 1),
            1.0,
        )
        found = read()
    except UnreadableImage:
        return

    assert found.dtype == np.uint8
    assert found.shape[1:] == (1, 3)


def repeat_last_scan(file, times):
    """Return a JPEG file whose last scan occurs more often."""
    end = file[-2:]
    start_of_last = file.rfind(b"\xff\xda")
    last_scan = file[start_of_last:-2]

    return file[:-2] + last_scan * times + end


def test_a_jpeg_of_very_many_scans_is_unreadable():
    """The first scan of a progressive file has some of the colours: decoders read on."""
    long_file = repeat_last_scan(PROGRESSIVE, 1000)
    box = Box(0, 0, 8, 8)
    rule = "JPEG of 1,010 scans, and at most 128 are decoded"

    assert headers.count_jpeg_scans(PROGRESSIVE) == 10
    with pytest.raises(UnreadableImage, match=rule):
        images.decode(long_file)
    with pytest.raises(UnreadableImage, match=rule):
        crop_file(long_file, box, (8, 8))


def test_scans_after_the_first_do_not_count_if_it_has_all_colours():
    file = encode(PHOTO, cv2.IMWRITE_JPEG_PROGRESSIVE, 0)
    long_file = repeat_last_scan(file, 1000)

    assert headers.count_jpeg_scans(file) == 1
    assert headers.count_jpeg_scans(long_file) == 1
