"""Perceptual hashes against SciPy's cosine transform, hashes of mirror images and copies, and near
pairs.
"""

import cv2
import numpy as np
import pytest
import scipy.fft

from tests.data.photographs import COPIES, photographs
from vit_jax.data.records import Record
from vit_jax.tools.prepare.perceptual import Reduction, compute_hashes, find_near

# Hashes of copies of these kinds differ in at most this number of bits.
BITS = 6
CROPS = [kind for kind in COPIES if kind.startswith("crop")]


@pytest.fixture(scope="module")
def images():
    return photographs(12, sides=(100, 160))


def hash_images(images):
    reduce = Reduction(180.0)
    reduced = []
    for image in images:
        reduced.append(reduce(Record(np.ascontiguousarray(image), 0)))

    return compute_hashes(np.stack(reduced))


def count_different_bits(hashes, others):
    return np.bitwise_count(hashes ^ others)


def hash_by_scipy(image):
    """Return the 64 bits of one image."""
    small = cv2.resize(
        image,
        (32, 32),
        interpolation=cv2.INTER_AREA,
    )
    grey = small @ [0.299, 0.587, 0.114]
    frequencies = scipy.fft.dctn(grey, type=2)
    low_frequencies = frequencies[:8, :8].ravel()
    is_high = low_frequencies > np.median(low_frequencies)

    packed = np.packbits(is_high)
    return int.from_bytes(packed.tobytes(), "big")


def test_bits_are_those_of_the_cosine_transform(images):
    hash_N2 = hash_images(images)
    expected = [hash_by_scipy(image) for image in images]

    assert hash_N2.dtype == np.uint64
    assert hash_N2[:, 0].tolist() == expected


def test_the_second_hash_is_that_of_the_mirrored_image(images):
    mirrored = [image[:, ::-1] for image in images]

    hash_N2 = hash_images(images)
    mirrored_N2 = hash_images(mirrored)
    num_bits = count_different_bits(mirrored_N2, hash_N2[:, ::-1])

    # Averages are rounded to whole grey levels.
    assert num_bits.max() <= 2


def test_copies_are_near_and_others_are_not(images):
    hash_N2 = hash_images(images)

    for kind in COPIES.keys() - CROPS:
        copies = map(COPIES[kind], images)
        copy_N2 = hash_images(copies)
        side = int(kind.startswith("mirrored"))
        num_bits = count_different_bits(hash_N2[:, side], copy_N2[:, 0])
        assert num_bits.max() <= BITS, kind

    num_bits = count_different_bits(hash_N2[:, :1], hash_N2.T.ravel())
    # The first twelve are the distances of each image to itself.
    assert np.sort(num_bits.ravel())[12] > BITS


def test_a_jpeg_is_reduced_while_it_is_decoded(images):
    """Its hash is nearly that of the complete decoding."""
    large = cv2.resize(
        images[0],
        (1600, 1200),
        interpolation=cv2.INTER_CUBIC,
    )
    _, file = cv2.imencode(".jpg", large)
    decoded = cv2.imdecode(file, cv2.IMREAD_COLOR)
    record = Record(file.tobytes(), 0)

    reduced = Reduction(180.0)(record)
    actual = compute_hashes(reduced[None])
    expected = hash_images([decoded[..., ::-1]])
    num_bits = count_different_bits(actual, expected)

    assert num_bits.max() <= 2


def find_near_pairs(values, queries, most):
    """Return (index, number of the query, distance) of all pairs within this distance."""
    pairs = set()
    for index, value in enumerate(values):
        for number, query in enumerate(queries):
            distance = (int(value) ^ int(query)).bit_count()
            if distance <= most:
                pairs.add((index, number, distance))
    return pairs


def test_every_near_pair_is_found(monkeypatch):
    monkeypatch.setattr("vit_jax.tools.prepare.perceptual._AT_ONCE", 64)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, 150, np.uint64)
    flips = []
    for num_flipped in range(20):
        bits = rng.choice(64, num_flipped, replace=False)
        flips.append(sum(2 ** int(bit) for bit in bits))
    queries = values[130:150] ^ np.array(flips, np.uint64)
    expected = find_near_pairs(values, queries, most=15)

    found = find_near(values, queries, 15, 2)

    assert len(expected) >= 16
    assert set(found) == expected
