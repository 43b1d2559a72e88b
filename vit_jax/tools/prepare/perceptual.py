"""A perceptual hash, nearly equal for copies in another size, quality, brightness or colour.

Each of 64 bits tells whether one of the lowest frequencies of the luminance, reduced to 32 x 32
pixels, is above their median. Copies differ in few bits, unrelated images in about half.

Legend: B images, N records, Q queries, H height, W width, U and V frequencies.
"""

from collections.abc import Iterator

import cv2
import numpy as np

from vit_jax.data.crops import Box
from vit_jax.data.decoding import images
from vit_jax.data.decoding.bands import BandChoice, apply_by_channels
from vit_jax.data.records import Record
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.workers import map_in_threads

SIDE = 32  # pixels of a reduced image
_FREQUENCIES = 8  # along each side
_DECODED = (2 * SIDE, 2 * SIDE)  # a JPEG is decoded at a fraction of its size that is no smaller
_AT_ONCE = 2**17  # hashes of 1 MiB; blocks from 2**15 are the fastest measured


class Reduction(EvaluationTransform):
    """Reduces an upright image to the pixels of its hash.

    Args:
      max_image_megapixels: see `InputConfig`.
      bands: bands that are read as stored; None: RGB.
    """

    def __init__(
        self,
        max_image_megapixels: float,
        bands: BandChoice | None = None,
    ) -> None:
        super().__init__(
            (SIDE, SIDE),
            "direct",
            1.0,
            max_image_megapixels,
            exif_orientation=True,
            bands=bands,
        )

    def __call__(self, record: Record) -> np.ndarray:
        """Return averages over areas, uint8 (32, 32, 3), or normalised bands (32, 32, C).

        Raises:
          UnreadableImage: the image cannot be decoded.
        """
        decode = images.plan_crop(
            record.image,
            lambda height, width: Box(0, 0, height, width),
            _DECODED,
            self.max_image_megapixels,
            self.exif_orientation,
            bands=self.bands,
        )
        image_HWC = decode()
        if self.bands is None:
            return _reduce(image_HWC)
        complete_HWC = self.bands.complete(image_HWC)
        return self.bands.normalise(apply_by_channels(_reduce, complete_HWC))


def _reduce(image_HWC: np.ndarray) -> np.ndarray:
    return cv2.resize(image_HWC, (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def compute_hashes(image_BHWC: np.ndarray) -> np.ndarray:
    """Return the hashes of reduced images and of their mirror images, uint64 (B, 2).

    The luminance of bands is their mean.
    """
    frequency_U = np.arange(_FREQUENCIES)
    cosine_UH = np.cos(np.pi / SIDE * np.outer(frequency_U, np.arange(SIDE) + 0.5))
    if image_BHWC.dtype == np.uint8:
        grey_BHW = image_BHWC.astype(np.float64) @ (0.299, 0.587, 0.114)
    else:
        grey_BHW = image_BHWC.mean(axis=-1, dtype=np.float64)
    amplitude_BUV = cosine_UH @ grey_BHW @ cosine_UH.T

    # In a mirror image, odd frequencies along the width change their sign.
    mirror_sign_V = np.where(frequency_U % 2, -1.0, 1.0)
    hash_B = _pack_bits(amplitude_BUV)
    mirror_hash_B = _pack_bits(amplitude_BUV * mirror_sign_V)
    return np.stack([hash_B, mirror_hash_B], axis=1)


def _pack_bits(amplitude_BUV: np.ndarray) -> np.ndarray:
    """Return 64 bits for each image, uint64 (B,): True above the median."""
    flat = amplitude_BUV.reshape(len(amplitude_BUV), -1)
    bits = flat > np.median(flat, axis=1, keepdims=True)
    packed = np.packbits(bits, axis=1).view(">u8")
    return packed[:, 0].astype(np.uint64)


def find_near(
    hash_N: np.ndarray,
    query_Q: np.ndarray,
    distance: int,
    num_threads: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield every pair of hashes that differ in at most `distance` bits.

    All pairs are compared: 1.5 billion a second on one core. Buckets of equal bits are faster for
    few bits only.

    Yields:
      the index of the hash, the index of the query, and the number of different bits.
    """

    def search_block(start: int) -> list[tuple[int, int, int]]:
        block = hash_N[start : start + _AT_ONCE]
        different = np.empty_like(block)
        bits = np.empty(len(block), np.uint8)
        pairs = list[tuple[int, int, int]]()
        for number, query in enumerate(query_Q):
            np.bitwise_xor(block, query, out=different)
            np.bitwise_count(different, out=bits)
            if bits.min() > distance:
                continue
            for index in np.flatnonzero(bits <= distance).tolist():
                pairs.append((start + index, number, int(bits[index])))
        return pairs

    for pairs in map_in_threads(search_block, range(0, len(hash_N), _AT_ONCE), num_threads):
        yield from pairs
