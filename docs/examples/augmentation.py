"""An augmentation: random erasing (Zhong et al., 2017), after the crop and the flip.

`input.augmentations` takes `(image, rng) -> image`, uint8 (H, W, 3).

Run it:

    vit-jax pretrain --config=digits --workdir=runs/erasing \
        --config.input.augmentations=docs.examples.augmentation:random_erasing
"""

import numpy as np

PROBABILITY = 0.5
LARGEST_SIDE = 0.4


def random_erasing(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fills a random rectangle with noise. Takes and returns uint8 (H, W, 3).

    All randomness comes from `rng`, which is made of (seed, epoch, record): runs repeat and resume exactly.
    """
    if rng.random() > PROBABILITY:
        return image
    height, width = (max(int(side * rng.uniform(0.1, LARGEST_SIDE)), 1) for side in image.shape[:2])
    top = rng.integers(image.shape[0] - height + 1)
    left = rng.integers(image.shape[1] - width + 1)
    image = image.copy()
    image[top : top + height, left : left + width] = rng.integers(
        0, 256, (height, width, 3), np.uint8
    )
    return image
