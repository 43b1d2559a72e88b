"""A dataset: squares, discs and crosses, generated on access.

`data` takes `(split, config.input, seed) -> source`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/shapes \
        --config.data=docs.examples.dataset:open_shapes
"""

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.records import Source

SIZES = {"train": 1200, "test": 300}  # records of each split


class Shapes(Source):
    """Record i is a shape whose position and size depend on (seed, split, i) alone.

    So every worker generates the same image.
    """

    class_names = ("square", "disc", "cross")

    def __init__(self, split: str, seed: int):
        self._split = split
        self._seed = seed
        self.labels = np.arange(SIZES[split]) % len(self.class_names)

    def image_of(self, index: int) -> np.ndarray:
        """Return uint8 (32, 32, 3); a source may also return encoded files (JPEG, PNG, ...)."""
        rng = np.random.default_rng((self._seed, self._split == "train", index))
        radius = rng.integers(5, 10)
        row, column = rng.integers(10, 22, 2)
        rows = np.abs(np.arange(32) - row)[:, None]
        columns = np.abs(np.arange(32) - column)[None]
        is_near = np.maximum(rows, columns) <= radius
        masks = {
            "square": is_near,
            "disc": rows**2 + columns**2 <= radius**2,
            "cross": is_near & (np.minimum(rows, columns) <= 1),
        }
        mask = masks[self.class_names[self.labels[index]]]
        noise = rng.integers(0, 100, (32, 32, 3))
        return (noise + 155 * mask[..., None]).astype(np.uint8)


def open_shapes(split: str, config: InputConfig, seed: int) -> Source:
    """Open one split. `config` is the run's `config.input`."""
    if split not in SIZES:
        raise ValueError(f"Shapes have no split {split!r}; they have {', '.join(SIZES)}.")
    return Shapes(split, seed)
