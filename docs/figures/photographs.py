"""Crops of scikit-learn's sample photographs as folders: a dataset without a download.

Run it:

    python docs/figures/photographs.py

It writes `crops/`, with a folder of 150 square crops for each of eight classes (photograph and
rotation), and `photos/`, with the left, middle and right part of both photographs.
"""

import pathlib
import sys

import cv2
import numpy as np
from sklearn.datasets import load_sample_images

NUM_CROPS = 150  # of a class
PIXELS = 96  # side of a file
SMALLEST = 0.5  # side of a crop, relative to the short side of the photograph


def random_crop(photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a square part of a photograph, from `SMALLEST` to all of its height."""
    height, width = photo.shape[:2]
    side = int(height * rng.uniform(SMALLEST, 1))
    top = rng.integers(height - side + 1)
    left = rng.integers(width - side + 1)
    return photo[top : top + side, left : left + side]


def write(path: pathlib.Path, image: np.ndarray) -> None:
    """Write an image in RGB as JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.ascontiguousarray(image[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 92])


def main(folder: str = ".") -> None:
    """Write `crops/` and `photos/` into a folder."""
    root = pathlib.Path(folder)
    rng = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        for turns in range(4):
            for number in range(NUM_CROPS):
                crop = random_crop(photo, rng)
                resized = cv2.resize(crop, (PIXELS, PIXELS), interpolation=cv2.INTER_AREA)
                path = root / f"crops/{name} {90 * turns}/{number:03}.jpg"
                write(path, np.rot90(resized, turns))
        side, width = photo.shape[:2]
        for number, left in enumerate((0, (width - side) // 2, width - side), 1):
            write(root / f"photos/{name}-{number}.jpg", photo[:, left : left + side])


if __name__ == "__main__":
    main(*sys.argv[1:])
