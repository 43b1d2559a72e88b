"""Perceptual hashes against SciPy's cosine transform, of mirror images and of copies; and the pairs of near ones."""

import cv2
import numpy as np
import pytest
import scipy.fft

from tests.data.photographs import COPIES, photographs
from vit_jax.data.records import Record
from vit_jax.tools.prepare.perceptual import Reduction, hashes, near

BITS = 6  # that copies of these kinds differ in at most
CROPS = [kind for kind in COPIES if kind.startswith("crop")]


@pytest.fixture(scope="module")
def images():
    return photographs(12, sides=(100, 160))


def hash_images(some):
    reduce = Reduction(180.0)
    return hashes(np.stack([reduce(Record(np.ascontiguousarray(image), 0)) for image in some]))


def expected(image):
    """The 64 bits of one image, by other code."""
    small = cv2.resize(image, (32, 32), interpolation=cv2.INTER_AREA).astype(float)
    low = scipy.fft.dctn(small @ [0.299, 0.587, 0.114], type=2)[:8, :8].ravel()
    return sum(int(bit) << (63 - place) for place, bit in enumerate(low > np.median(low)))


def test_bits_are_those_of_the_cosine_transform(images):
    found = hash_images(images)

    assert found.dtype == np.uint64
    assert found[:, 0].tolist() == [expected(image) for image in images]

    mirrored = hash_images([image[:, ::-1] for image in images])
    assert (
        np.bitwise_count(mirrored ^ found[:, ::-1]).max() <= 2
    )  # averages are rounded to whole grey levels


def test_copies_are_near_and_others_are_not(images):
    own = hash_images(images)
    for kind in COPIES.keys() - CROPS:
        copies = hash_images([COPIES[kind](image) for image in images])
        side = int(kind.startswith("mirrored"))
        assert np.bitwise_count(own[:, side] ^ copies[:, 0]).max() <= BITS, kind

    bits = np.bitwise_count(own[:, :1] ^ own.T.reshape(-1))

    assert np.sort(bits.ravel())[12] > BITS  # after each with itself


def test_a_jpeg_is_reduced_while_it_is_decoded(images):
    """To the hash of the complete decoding, nearly; upright, as its tag says."""
    large = cv2.resize(images[0], (1600, 1200), interpolation=cv2.INTER_CUBIC)
    file = cv2.imencode(".jpg", large)[1].tobytes()
    of_file = hashes(Reduction(180.0)(Record(file, 0))[None])

    assert (
        np.bitwise_count(
            of_file ^ hash_images([cv2.imdecode(np.frombuffer(file, np.uint8), 1)[..., ::-1]])
        ).max()
        <= 2
    )


def test_every_near_pair_is_found(monkeypatch):
    monkeypatch.setattr("vit_jax.tools.prepare.perceptual._AT_ONCE", 64)
    rng = np.random.default_rng(0)
    some = rng.integers(0, 2**64, 150, np.uint64)
    flips = [
        sum(1 << int(bit) for bit in rng.choice(64, count, replace=False)) for count in range(20)
    ]
    queries = some[130:150] ^ np.array(flips, np.uint64)
    expected = {
        (index, number, (int(one) ^ int(query)).bit_count())
        for index, one in enumerate(some)
        for number, query in enumerate(queries)
        if (int(one) ^ int(query)).bit_count() <= 15
    }

    assert len(expected) >= 16
    assert set(near(some, queries, 15, 2)) == expected
