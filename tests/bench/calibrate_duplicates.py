"""Measure the result of `vit-jax duplicates`: recall for each kind of planted copy, and pairs of unrelated images.

Run it, with any weights:

    python -m tests.bench.calibrate_duplicates [WEIGHTS]

The sets are the digits and synthetic photographs with windows of the two photographs of
scikit-learn (`tests/data/photographs.py`). It prints a table in Markdown.
"""

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.datasets import load_digits

from tests.data.photographs import COPIES, photographs, windows
from vit_jax.data.records import Record, Source
from vit_jax.tools.prepare.perceptual import Reduction, compute_hashes

DISTANCES = (6, 10, 16)
COSINES = (0.98, 0.95, 0.9)
NUM_DIGITS = 600
NUM_PHOTOGRAPHS = 300


class Images(Source):
    """Images of any size in memory."""

    def __init__(self, images: Sequence[np.ndarray]) -> None:
        self.class_names = ("0", "1")
        self.labels = np.zeros(len(images), np.int32)
        self.images = images

    def image_of(self, index: int) -> np.ndarray:
        return np.ascontiguousarray(self.images[index])


def hash_images(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return the hashes of images and of their mirror images, uint64 (N, 2)."""
    reduce = Reduction(180.0)
    reduced = []
    for image in images:
        record = Record(np.ascontiguousarray(image), 0)
        reduced.append(reduce(record))
    return compute_hashes(np.stack(reduced))


def compute_distances(hash_N2: np.ndarray, other_M2: np.ndarray) -> np.ndarray:
    """Return the different bits of all pairs (N, M), of the nearer mirror image."""
    hash_N1 = hash_N2[:, :1]
    plain_M, mirrored_M = other_M2.T
    plain_NM = np.bitwise_count(hash_N1 ^ plain_M)
    mirrored_NM = np.bitwise_count(hash_N1 ^ mirrored_M)
    return np.minimum(plain_NM, mirrored_NM)


def make_extract(weights: str):
    """Return a function from images to features of length 1 of the images and of their mirror
    images, (2, N, D).
    """
    import jax

    from vit_jax.api import load_model
    from vit_jax.evals.features import Extractor
    from vit_jax.sharding import build_mesh, replicate

    mesh = build_mesh(jax.devices())
    model = load_model(weights, sharding=replicate(mesh))
    extractor = Extractor(
        module=model.module,
        architecture=model.architecture,
        layer="pre_logits",
        transform=model.require_transform(),
        global_batch=128,
        max_unreadable=0,
        cache=None,
    )

    def extract(images: Sequence[np.ndarray]) -> np.ndarray:
        mirrored = list(map(np.fliplr, images))
        with contextlib.redirect_stderr(io.StringIO()):
            plain = extractor.extract(Images(images))
            flipped = extractor.extract(Images(mirrored))

        feature_2ND = np.stack([plain.feature_ND, flipped.feature_ND])
        norms = np.linalg.norm(feature_2ND, axis=2, keepdims=True)
        return feature_2ND / norms

    return extract


def measure_recall(
    hash_N2,
    unit_2ND,
    copies: Sequence[np.ndarray],
    extract,
) -> list[str]:
    """Return the recall of one copy of each image at each distance and at each cosine."""
    distances = compute_distances(hash_N2, hash_images(copies))
    bits_N = np.diagonal(distances)
    row = []
    for distance in DISTANCES:
        share = np.mean(bits_N <= distance)
        row.append(f"{share:.1%}")
    if unit_2ND is None:
        return row

    cosine_2N = np.einsum("nd,tnd->tn", unit_2ND[0], extract(copies))
    cosine_N = cosine_2N.max(axis=0)
    for least in COSINES:
        share = np.mean(cosine_N >= least)
        row.append(f"{share:.1%}")
    return row


def count_unrelated(hash_N2, unit_2ND) -> list[str]:
    """Return the number of pairs of different images, and the pairs found at each distance and
    cosine.
    """
    pairs = np.triu_indices(len(hash_N2), 1)
    bits = compute_distances(hash_N2, hash_N2)[pairs]
    row = [f"unrelated, of {len(bits):,} pairs"]
    for distance in DISTANCES:
        count = np.sum(bits <= distance)
        row.append(f"{count:,}")
    if unit_2ND is None:
        return row

    plain_ND, mirrored_ND = unit_2ND
    plain_NN = plain_ND @ plain_ND.T
    mirrored_NN = plain_ND @ mirrored_ND.T

    cosine = np.maximum(plain_NN, mirrored_NN)[pairs]
    for least in COSINES:
        count = np.sum(cosine >= least)
        row.append(f"{count:,}")

    bits_of_similar = bits[cosine >= COSINES[-1]]
    both = [np.sum(bits_of_similar <= distance) for distance in DISTANCES]
    print(f"within {DISTANCES} bits and of cosine {COSINES[-1]}: {both}")
    return row


def build_rows(images: Sequence[np.ndarray], extract) -> list[list[str]]:
    """Return a row for each kind of copy, and a last row for unrelated images."""
    hash_N2 = hash_images(images)
    unit_2ND = extract(images) if extract else None
    rows = []
    for kind, make_copy in COPIES.items():
        copies = list(map(make_copy, images))
        rows.append([kind, *measure_recall(hash_N2, unit_2ND, copies, extract)])
    rows.append(count_unrelated(hash_N2, unit_2ND))
    return rows


def enlarge_digit(image: np.ndarray) -> np.ndarray:
    """Return a digit of 8 x 8 pixels with 32 x 32 pixels and three colours."""
    pixels = (image * 255 / 16).astype(np.uint8)
    enlarged = pixels.repeat(4, axis=0).repeat(4, axis=1)
    return np.dstack([enlarged, enlarged, enlarged])


def main(weights: str | None = None) -> None:
    """Print the tables."""
    digits = load_digits().images[:NUM_DIGITS]
    sets: Mapping[str, list[np.ndarray]] = {
        "photographs": photographs(NUM_PHOTOGRAPHS) + windows(),
        "digits, enlarged to 32 pixels": list(map(enlarge_digit, digits)),
    }
    extract = make_extract(weights) if weights else None
    head = ["copy"]
    for distance in DISTANCES:
        head.append(f"{distance} bits")
    if weights:
        for least in COSINES:
            head.append(f"cosine {least}")

    for name, images in sets.items():
        print(f"\n{name}\n")
        print(f"| {' | '.join(head)} |")
        print(f"|{'---|' * len(head)}")
        for row in build_rows(images, extract):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
