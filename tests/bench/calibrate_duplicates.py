"""Measure what `vit-jax duplicates` finds: recall for each kind of planted copy, and pairs of unrelated images.

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
from vit_jax.tools.prepare.perceptual import Reduction, hashes

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
    return hashes(np.stack([reduce(Record(np.ascontiguousarray(image), 0)) for image in images]))


def distances(hash_N2: np.ndarray, other_M2: np.ndarray) -> np.ndarray:
    """Return the different bits of all pairs (N, M), of the nearer mirror image."""
    plain, mirrored = (np.bitwise_count(hash_N2[:, :1] ^ other_M2[:, side]) for side in (0, 1))
    return np.minimum(plain, mirrored)


def features_of(weights: str):
    """Return a function from images to features of length 1 of the images and of their mirror images, (2, N, D)."""
    import jax

    from vit_jax.api import load_model
    from vit_jax.evals.features import Extractor
    from vit_jax.sharding import build_mesh, replicated

    model = load_model(weights, sharding=replicated(build_mesh(jax.devices())))
    extractor = Extractor(
        module=model.module,
        architecture=model.architecture,
        layer="pre_logits",
        transform=model.require_transform(),
        global_batch=128,
        max_unreadable=0,
        cache=None,
    )

    def features(images: Sequence[np.ndarray]) -> np.ndarray:
        with contextlib.redirect_stderr(io.StringIO()):
            both = [
                extractor.extract(Images(side)).feature_ND
                for side in (images, [one[:, ::-1] for one in images])
            ]
        feature_2ND = np.stack(both)
        return feature_2ND / np.linalg.norm(feature_2ND, axis=2, keepdims=True)

    return features


def table(images: Sequence[np.ndarray], features) -> list[list[str]]:
    """Return the rows: a copy's kind, its recall at each distance, at each cosine; last, the unrelated pairs found."""
    own = hash_images(images)
    unit = features(images) if features else None
    rows = []
    for kind, copy in COPIES.items():
        copies = [copy(image) for image in images]
        found = np.diagonal(distances(own, hash_images(copies)))
        row = [f"{(found <= distance).mean():.1%}" for distance in DISTANCES]
        if unit is not None:
            cosine = np.einsum("nd,tnd->tn", unit[0], features(copies)).max(axis=0)
            row += [f"{(cosine >= least).mean():.1%}" for least in COSINES]
        rows.append([kind, *row])
    others = np.triu_indices(len(images), 1)
    bits = distances(own, own)[others]
    row = [f"{(bits <= distance).sum():,}" for distance in DISTANCES]
    if unit is not None:
        cosine = np.maximum(unit[0] @ unit[0].T, unit[0] @ unit[1].T)[others]
        row += [f"{(cosine >= least).sum():,}" for least in COSINES]
        both = [((bits <= distance) & (cosine >= COSINES[-1])).sum() for distance in DISTANCES]
        print(f"within {DISTANCES} bits and of cosine {COSINES[-1]}: {both}")
    return [*rows, [f"unrelated, of {len(bits):,} pairs", *row]]


def main(weights: str | None = None) -> None:
    """Print the tables."""
    digits = [
        np.kron((image * 255 / 16).astype(np.uint8), np.ones((4, 4), np.uint8))
        for image in load_digits().images
    ]
    sets: Mapping[str, list[np.ndarray]] = {
        "photographs": photographs(NUM_PHOTOGRAPHS) + windows(),
        "digits, enlarged to 32 pixels": [
            np.repeat(image[..., None], 3, axis=2) for image in digits[:NUM_DIGITS]
        ],
    }
    features = features_of(weights) if weights else None
    head = [
        "copy",
        *(f"{distance} bits" for distance in DISTANCES),
        *(f"cosine {least}" for least in COSINES if weights),
    ]
    for name, images in sets.items():
        print(f"\n{name}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for row in table(images, features):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
