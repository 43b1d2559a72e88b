"""Mean and standard deviation of pixels, folded into the patch embedding.

Libraries normalise pixels p in [0, 1] to (p - mean) / std; our networks take x = 2 p - 1. Patches
do not overlap and nothing is padded, so a kernel and a bias with the same output exist. Fine-tuning
trains the folded kernel: weight decay and learning rate act on it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.text.printable import shortened

KERNEL = "embedding/kernel"
BIAS = "embedding/bias"


class Normalisation(NamedTuple):
    """Mean and standard deviation of each colour, of pixels in [0, 1]."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def scaled(self, factor: float) -> "Normalisation":
        """Return the normalisation of pixels that are multiplied by `factor`."""
        mean, std = (tuple(factor * number for number in numbers) for numbers in self)
        return Normalisation(mean, std)


OURS = Normalisation()


def fold(
    parameters: Mapping[str, np.ndarray], normalisation: Normalisation
) -> dict[str, np.ndarray]:
    """Return parameters for pixels in [-1, 1]; the input has those for normalised pixels.

    They hold the patch embedding's kernel (height, width, 3, D), and its bias (D) if there is one.
    """
    mean_C, std_C = (np.asarray(numbers, np.float64) for numbers in normalisation)
    scale_C, shift_C = (
        1 / (2 * std_C),
        (0.5 - mean_C) / std_C,
    )  # of pixels in [-1, 1] to normalised ones
    kernel_hwCD = parameters[KERNEL].astype(np.float64)
    bias_D = np.einsum("hwCD,C->D", kernel_hwCD, shift_C) + parameters.get(BIAS, 0.0)
    dtype = parameters[KERNEL].dtype
    return {
        **parameters,
        KERNEL: (kernel_hwCD * scale_C[:, None]).astype(dtype),
        BIAS: bias_D.astype(dtype),
    }


def unfold(
    parameters: Mapping[str, np.ndarray], normalisation: Normalisation, *, has_bias: bool = True
) -> dict[str, np.ndarray]:
    """Return parameters for normalised pixels; the input has those for pixels in [-1, 1]. The inverse of `fold`.

    Without `has_bias` the bias is dropped: it is zero up to rounding if the input of `fold` had
    none.

    Raises:
      ValueError: a bias that is not zero would be dropped.
    """
    mean_C, std_C = (np.asarray(numbers, np.float64) for numbers in normalisation)
    kernel_hwCD = parameters[KERNEL].astype(np.float64)
    stored_D = parameters.get(BIAS, np.zeros(kernel_hwCD.shape[-1]))
    bias_D = np.einsum("hwCD,C->D", kernel_hwCD, 2 * mean_C - 1) + stored_D
    dtype = parameters[KERNEL].dtype
    result = {
        **parameters,
        KERNEL: (kernel_hwCD * (2 * std_C)[:, None]).astype(dtype),
        BIAS: bias_D.astype(dtype),
    }
    if has_bias:
        return result
    terms_D = np.einsum("hwCD,C->D", np.abs(kernel_hwCD), np.abs(2 * mean_C - 1)) + np.abs(stored_D)
    if (np.abs(bias_D) > np.finfo(np.float32).eps * terms_D).any():
        raise ValueError(
            "patch_bias=True: the class of the library has no patch bias, and this one is not zero "
            "without the normalisation of pixels, for example after fine-tuning. Write vit_jax instead."
        )
    return {name: array for name, array in result.items() if name != BIAS}


def stored_normalisation(preprocessing: Mapping[str, object] | None) -> Normalisation:
    """Return the normalisation that the preprocessing of weights states; ours if it states none.

    Raises:
      ValueError: as for `parse_normalisation`.
    """
    stated = [(preprocessing or {}).get(name) for name in Normalisation._fields]
    return OURS if stated == [None, None] else parse_normalisation(*stated)


def describe_normalisation(normalisation: Normalisation) -> dict[str, object]:
    """Return the fields of the preprocessing of weights that state it; none for ours."""
    return (
        {}
        if normalisation == OURS
        else {name: list(value) for name, value in normalisation._asdict().items()}
    )


def parse_normalisation(mean: object, std: object) -> Normalisation:
    """Return mean and standard deviation as a configuration states them.

    Raises:
      ValueError: they are not three numbers each, or a standard deviation is not positive.
    """
    values = [value for value in (mean, std) if isinstance(value, Sequence) and len(value) == 3]
    numbers = [
        float(number) for value in values for number in value if type(number) in (int, float)
    ]
    if len(numbers) != 6 or not np.isfinite(numbers).all() or min(numbers[3:]) <= 0:
        raise ValueError(
            f"mean={shortened(str(mean), 80)}, std={shortened(str(std), 80)}: must be three finite numbers each, std "
            "positive, since they are folded into the patch embedding. Correct the file."
        )
    return Normalisation(tuple(numbers[:3]), tuple(numbers[3:]))
