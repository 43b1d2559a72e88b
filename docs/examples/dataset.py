"""A dataset: squares, discs and crosses, generated on access.

`data` takes `(split, config.input, seed) -> source`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/shapes --config.data=docs.examples.dataset:open_shapes
"""

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.records import Source

SIZES = {"train": 1200, "test": 300}  # records of each split


class Shapes(Source):
    """Record i is a shape at a place and of a size that depend on (split, i) alone, so any worker may draw it."""

    class_names = ("square", "disc", "cross")

    def __init__(self, split: str, seed: int):
        self._split = split
        self._seed = seed
        self.labels = np.arange(SIZES[split]) % len(self.class_names)

    def image_of(self, index: int) -> np.ndarray:
        """uint8 (32, 32, 3); encoded files (JPEG, PNG, ...) may be returned as bytes instead."""
        rng = np.random.default_rng((self._seed, self._split == "train", index))
        radius = rng.integers(5, 10)
        (row, column) = rng.integers(10, 22, 2)
        rows = np.abs(np.arange(32) - row)[:, None]
        columns = np.abs(np.arange(32) - column)[None]
        shape = {
            "square": np.maximum(rows, columns) <= radius,
            "disc": rows**2 + columns**2 <= radius**2,
            "cross": (np.minimum(rows, columns) <= 1) & (np.maximum(rows, columns) <= radius),
        }[self.class_names[self.labels[index]]]
        noise = rng.integers(0, 100, (32, 32, 3))
        return (noise + 155 * shape[..., None]).astype(np.uint8)


def open_shapes(split: str, config: InputConfig, seed: int) -> Source:
    """Opens one split. `config` is the run's `config.input`."""
    if split not in SIZES:
        raise ValueError(f"Shapes have no split {split!r}; they have {', '.join(SIZES)}.")
    return Shapes(split, seed)
