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


def hash_by_scipy(image):
    """Return the 64 bits of one image."""
    small = cv2.resize(image, (32, 32), interpolation=cv2.INTER_AREA).astype(float)
    grey = small @ [0.299, 0.587, 0.114]
    low_frequencies = scipy.fft.dctn(grey, type=2)[:8, :8].ravel()

    number = 0
    for is_high in low_frequencies > np.median(low_frequencies):
        number = 2 * number + int(is_high)
    return number


def test_bits_are_those_of_the_cosine_transform(images):
    hash_N2 = hash_images(images)

    assert hash_N2.dtype == np.uint64
    assert hash_N2[:, 0].tolist() == [hash_by_scipy(image) for image in images]


def test_the_second_hash_is_that_of_the_mirrored_image(images):
    hash_N2 = hash_images(images)
    mirrored_N2 = hash_images([image[:, ::-1] for image in images])
    num_bits = np.bitwise_count(mirrored_N2 ^ hash_N2[:, ::-1])

    # Averages are rounded to whole grey levels.
    assert num_bits.max() <= 2


def test_copies_are_near_and_others_are_not(images):
    hash_N2 = hash_images(images)

    for kind in COPIES.keys() - CROPS:
        copy_N2 = hash_images([COPIES[kind](image) for image in images])
        side = int(kind.startswith("mirrored"))
        num_bits = np.bitwise_count(hash_N2[:, side] ^ copy_N2[:, 0])
        assert num_bits.max() <= BITS, kind

    bits = np.bitwise_count(hash_N2[:, :1] ^ hash_N2.T.reshape(-1))
    # The first twelve are the distances of each image to itself.
    assert np.sort(bits.ravel())[12] > BITS


def test_a_jpeg_is_reduced_while_it_is_decoded(images):
    """Its hash is nearly that of the complete decoding."""
    large = cv2.resize(images[0], (1600, 1200), interpolation=cv2.INTER_CUBIC)
    file = cv2.imencode(".jpg", large)[1].tobytes()
    decoded = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]

    actual = compute_hashes(Reduction(180.0)(Record(file, 0))[None])
    expected = hash_images([decoded])

    assert np.bitwise_count(actual ^ expected).max() <= 2


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
        flips.append(sum(1 << int(bit) for bit in bits))
    queries = values[130:150] ^ np.array(flips, np.uint64)

    expected = find_near_pairs(values, queries, most=15)

    assert len(expected) >= 16
    assert set(find_near(values, queries, 15, 2)) == expected
