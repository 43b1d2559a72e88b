"""Small networks of current families: values of parameters and images from seeds, known to both sides of the tests."""

import re
import zlib

import numpy as np

NORM = re.compile(r"((norm\w*|ln_\w+)\.weight|/scale)$")


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of this name: near 1 for norms, else near 0; also where the library begins with zeros."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    return np.asarray(1 + 0.1 * drawn if NORM.search(name) else 0.2 * drawn, np.float32)


def pixels(height: int, width: int | None = None) -> np.ndarray:
    """Return images (B, H, W, 3) in [0, 1], square without a width."""
    return np.random.default_rng(0).uniform(size=(2, height, width or height, 3))


def full_names(shapes: dict[str, list[int]], depth: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every array; `{n}` stands for the number of a block."""
    full = {}
    for name, shape in shapes.items():
        for number in range(depth if "{n}" in name else 1):
            full[name.replace("{n}", str(number))] = tuple(shape)

    return full
