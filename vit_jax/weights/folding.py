"""Mean and standard deviation of pixels, folded into the patch embedding.

Libraries normalise pixels p in [0, 1] to (p - mean) / std; our networks take x = 2 p - 1. Patches do not overlap and
nothing is padded, so a kernel and a bias with the same output exist. Fine-tuning trains the folded kernel: weight decay
and learning rate act on it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

KERNEL, BIAS = "embedding/kernel", "embedding/bias"


class Normalisation(NamedTuple):
    """Mean and standard deviation of each colour, of pixels in [0, 1]."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def scaled(self, factor: float) -> "Normalisation":
        """Return the normalisation of pixels that are multiplied by `factor`."""
        mean, std = (tuple(factor * number for number in numbers) for numbers in self)
        return Normalisation(mean, std)


OURS = Normalisation()


def fold(parameters: Mapping[str, np.ndarray], normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return parameters for pixels in [-1, 1]; the input has those for normalised pixels.

    Args:
      parameters: with the patch embedding's kernel (height, width, 3, D), and its bias (D) if there is one.
      normalisation: of the pixels that the parameters were trained on.
    """
    mean_C, std_C = (np.asarray(numbers, np.float64) for numbers in normalisation)
    scale_C, shift_C = 1 / (2 * std_C), (0.5 - mean_C) / std_C  # of pixels in [-1, 1] to normalised ones
    kernel_hwCD = parameters[KERNEL].astype(np.float64)
    bias_D = np.einsum("hwCD,C->D", kernel_hwCD, shift_C) + parameters.get(BIAS, 0.0)
    dtype = parameters[KERNEL].dtype
    return {**parameters, KERNEL: (kernel_hwCD * scale_C[:, None]).astype(dtype), BIAS: bias_D.astype(dtype)}


def unfold(parameters: Mapping[str, np.ndarray], normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return parameters for normalised pixels; the input has those for pixels in [-1, 1]. The inverse of `fold`.

    The result always has a bias. Where the input of `fold` had none, it is zero up to the rounding of the folded bias.

    Args:
      parameters: with the patch embedding's kernel (height, width, 3, D), and its bias (D) if there is one.
      normalisation: of the pixels that the result takes.
    """
    mean_C, std_C = (np.asarray(numbers, np.float64) for numbers in normalisation)
    kernel_hwCD = parameters[KERNEL].astype(np.float64)
    bias_D = np.einsum("hwCD,C->D", kernel_hwCD, 2 * mean_C - 1) + parameters.get(BIAS, 0.0)
    dtype = parameters[KERNEL].dtype
    return {**parameters, KERNEL: (kernel_hwCD * (2 * std_C)[:, None]).astype(dtype), BIAS: bias_D.astype(dtype)}


def parse_normalisation(mean: object, std: object) -> Normalisation:
    """Return mean and standard deviation as a configuration states them.

    Raises:
      ValueError: they are not three numbers each, or a standard deviation is not positive.
    """
    values = [value for value in (mean, std) if isinstance(value, Sequence) and len(value) == 3]
    numbers = [float(number) for value in values for number in value if type(number) in (int, float)]
    if len(numbers) != 6 or not np.isfinite(numbers).all() or min(numbers[3:]) <= 0:
        raise ValueError(f"mean={mean}, std={std}: must be three finite numbers each, std positive. Correct the file.")
    return Normalisation(tuple(numbers[:3]), tuple(numbers[3:]))
