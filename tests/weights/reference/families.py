"""Small networks of current families: values of parameters and images from seeds.

Both sides of the tests compute them.
"""

import re
import zlib

import numpy as np

NORM = re.compile(r"((norm\w*|ln_\w+)\.weight|/scale)$")


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of this name: near 1 for norms, else near 0.

    It is random also where the library begins with zeros.
    """
    sample = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if NORM.search(name):
        return np.asarray(1 + 0.1 * sample, np.float32)
    return np.asarray(0.2 * sample, np.float32)


def pixels(height: int, width: int | None = None) -> np.ndarray:
    """Return images (B, H, W, 3) in [0, 1], square without a width."""
    if width is None:
        width = height
    return np.random.default_rng(0).uniform(size=(2, height, width, 3))


def full_names(shapes: dict[str, list[int]], depth: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every array; `{n}` stands for the number of a block."""
    full = {}
    for name, shape in shapes.items():
        if "{n}" not in name:
            full[name] = tuple(shape)
            continue
        for number in range(depth):
            full[name.replace("{n}", str(number))] = tuple(shape)

    return full
