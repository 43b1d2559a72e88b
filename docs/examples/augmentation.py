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
    """Return the image with noise in a random rectangle, uint8 (H, W, 3).

    All randomness comes from `rng`, which depends on (seed, epoch, record): runs repeat and resume
    exactly.
    """
    if rng.random() > PROBABILITY:
        return image
    image_height, image_width, _ = image.shape
    height = max(int(image_height * rng.uniform(0.1, LARGEST_SIDE)), 1)
    width = max(int(image_width * rng.uniform(0.1, LARGEST_SIDE)), 1)
    top = rng.integers(image_height - height + 1)
    left = rng.integers(image_width - width + 1)

    erased = image.copy()
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    erased[top : top + height, left : left + width] = noise
    return erased
