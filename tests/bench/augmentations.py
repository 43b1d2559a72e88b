"""CPU time of augmentations and crops of one image, on one core."""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.bench.input_against_tf_data import SIZE, open_jpegs
from vit_jax.config.schema import InputConfig
from vit_jax.data import augment
from vit_jax.data.decoding.images import decode
from vit_jax.data.randaugment import apply_randaugment
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform

IMAGES = 200
CONFIG = InputConfig(
    train_split="train",
    test_split="test",
    image_size=(SIZE, SIZE),
)
SIMPLE = dataclasses.replace(CONFIG, train_crop="simple")
CROPS = {
    "default crop, with decoding": CONFIG,
    "the same, `train_interpolation=bicubic`": CONFIG,
    "`train_crop=simple`, with decoding": SIMPLE,
    "the same, bicubic": SIMPLE,
}
AUGMENTATIONS: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "RandAugment (2, 10)": lambda rng, image: apply_randaugment(
        rng,
        image,
        2,
        10,
    ),
    "ThreeAugment": augment.apply_three_augment,
    "colour jitter of 0.3": lambda rng, image: augment.jitter_colors(
        rng,
        image,
        0.3,
    ),
    "random erasing of each image": augment.erase,
}


def measure_rows(words: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return CPU milliseconds an image, the least of the rounds."""
    files = read_files(words.folder)
    pixels = []
    for file in files:
        crop = TrainTransform(CONFIG)
        pixels.append(crop(Record(file, 0), np.random.default_rng(0)))

    rows = {}
    for name, apply in AUGMENTATIONS.items():
        rows[name] = {
            "ms": time_images(
                apply,
                pixels,
                words.rounds,
            )
        }
    for name, config in CROPS.items():
        if "bicubic" in name:
            config = dataclasses.replace(config, train_interpolation="bicubic")
        transform = TrainTransform(config)

        def crop_file(rng, file, transform=transform):
            return transform(Record(file, 0), rng)

        rows[name] = {
            "ms": time_images(
                crop_file,
                files,
                words.rounds,
            )
        }
    return rows


def read_files(folder: Path) -> list[bytes]:
    """Return JPEGs of common size."""
    paths = sorted(open_jpegs(folder).glob("*/*.jpg"))
    files = []
    for path in paths:
        file = path.read_bytes()
        if decode(file).shape == (375, 500, 3):
            files.append(file)
        if len(files) == IMAGES:
            break
    return files


def time_images(apply: Callable, images: list, num_rounds: int) -> float:
    """Return the least CPU milliseconds an image of several rounds."""
    least = math.inf
    for _ in range(num_rounds):
        rng = np.random.default_rng(0)
        start = time.process_time()
        for image in images:
            apply(rng, image)
        least = min(least, time.process_time() - start)
    return 1e3 * least / len(images)
