"""A perceptual hash: nearly equal for copies of an image in another size, quality, brightness or colour.

Each of 64 bits tells whether one of the lowest frequencies of the luminance, reduced to 32 x 32
pixels, is above their median. Copies differ in few bits; unrelated images in about half.

Legend: B images, N records, Q queries, H height, W width, U and V frequencies.
"""

from collections.abc import Iterator

import cv2
import numpy as np

from vit_jax.data.crops import Box
from vit_jax.data.decoding import images
from vit_jax.data.records import Record
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.workers import map_in_threads

SIDE = 32  # pixels
_KEPT = 8  # frequencies along each side
_DECODED = (2 * SIDE, 2 * SIDE)  # a JPEG is decoded at a fraction of its size that is no smaller
_AT_ONCE = 2**17  # hashes of 1 MiB; the fastest measured are from 2**15


class Reduction(EvaluationTransform):
    """Reduces an upright image to the pixels of its hash."""

    def __init__(self, max_image_megapixels: float) -> None:
        super().__init__((SIDE, SIDE), "direct", 1.0, max_image_megapixels, exif_orientation=True)

    def __call__(self, record: Record) -> np.ndarray:
        """Return uint8 (32, 32, 3), averages over areas; raises UnreadableImage."""
        decode = images.plan_crop(
            record.image,
            lambda height, width: Box(0, 0, height, width),
            _DECODED,
            self.max_image_megapixels,
            self.exif_orientation,
        )
        return cv2.resize(decode(), (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def hashes(image_BHWC: np.ndarray) -> np.ndarray:
    """Return the hashes of reduced images and of their mirror images, uint64 (B, 2)."""
    cosine_UH = np.cos(np.pi / SIDE * np.outer(np.arange(_KEPT), np.arange(SIDE) + 0.5))
    grey_BHW = image_BHWC.astype(np.float64) @ (0.299, 0.587, 0.114)
    low_BUV = cosine_UH @ grey_BHW @ cosine_UH.T
    mirrored_V = np.where(
        np.arange(_KEPT) % 2, -1.0, 1.0
    )  # odd frequencies along the width change their sign
    return np.stack([_pack(low_BUV), _pack(low_BUV * mirrored_V)], axis=1)


def _pack(low_BUV: np.ndarray) -> np.ndarray:
    flat = low_BUV.reshape(len(low_BUV), -1)
    return (
        np.packbits(flat > np.median(flat, axis=1, keepdims=True), axis=1)
        .view(">u8")[:, 0]
        .astype(np.uint64)
    )


def near(
    hash_N: np.ndarray, query_Q: np.ndarray, distance: int, num_threads: int
) -> Iterator[tuple[int, int, int]]:
    """Yield every pair of hashes that differ in at most `distance` bits: index, index of the query, distance.

    All pairs are compared: 1.5 billion a second on one core, which buckets of equal bits do not
    beat beyond few bits.
    """

    def near_in_block(start: int) -> list[tuple[int, int, int]]:
        block = hash_N[start : start + _AT_ONCE]
        different = np.empty_like(block)
        bits = np.empty(len(block), np.uint8)
        pairs = list[tuple[int, int, int]]()
        for number, query in enumerate(query_Q):
            np.bitwise_xor(block, query, out=different)
            np.bitwise_count(different, out=bits)
            if bits.min() <= distance:
                pairs += [
                    (start + int(index), number, int(bits[index]))
                    for index in np.flatnonzero(bits <= distance)
                ]
        return pairs

    for pairs in map_in_threads(near_in_block, range(0, len(hash_N), _AT_ONCE), num_threads):
        yield from pairs
