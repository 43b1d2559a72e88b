"""Mean and standard deviation of pixels, folded into the patch embedding.

Libraries normalise pixels p in [0, 1] to (p - mean) / std; our networks take x = 2 p - 1. Patches
do not overlap and nothing is padded, so a kernel and a bias with the same output exist. Fine-tuning
trains the folded kernel: weight decay and learning rate act on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.text.printable import shorten

KERNEL = "embedding/kernel"
BIAS = "embedding/bias"


class Normalisation(NamedTuple):
    """Mean and standard deviation of each colour, of pixels in [0, 1]."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def scale(self, factor: float) -> "Normalisation":
        """Return the normalisation of pixels that are multiplied by `factor`."""
        mean = factor * np.asarray(self.mean)
        std = factor * np.asarray(self.std)
        return Normalisation(tuple(mean.tolist()), tuple(std.tolist()))


OURS = Normalisation()


def format_numbers(numbers: Iterable[float]) -> str:
    """Return a mean or a standard deviation for a sentence."""
    return ", ".join(f"{number:g}" for number in numbers)


def fold(
    parameters: Mapping[str, np.ndarray],
    normalisation: Normalisation,
) -> dict[str, np.ndarray]:
    """Return parameters for pixels in [-1, 1]; the input has those for normalised pixels.

    They hold the patch embedding's kernel (height, width, 3, D), and its bias (D) if there is one.
    """
    mean_C = np.asarray(normalisation.mean, np.float64)
    std_C = np.asarray(normalisation.std, np.float64)

    # Pixels in [-1, 1] times the scale plus the shift are normalised ones.
    scale_C = 1 / (2 * std_C)
    shift_C = (0.5 - mean_C) / std_C
    kernel_hwCD = parameters[KERNEL].astype(np.float64)
    shift_D = np.einsum("hwCD,C->D", kernel_hwCD, shift_C)
    bias_D = shift_D + parameters.get(BIAS, 0.0)
    folded_hwCD = kernel_hwCD * scale_C[:, None]

    dtype = parameters[KERNEL].dtype
    return {
        **parameters,
        KERNEL: folded_hwCD.astype(dtype),
        BIAS: bias_D.astype(dtype),
    }


def unfold(
    parameters: Mapping[str, np.ndarray],
    normalisation: Normalisation,
    *,
    has_bias: bool = True,
) -> dict[str, np.ndarray]:
    """Return parameters for normalised pixels; the input has those for pixels in [-1, 1].

    The inverse of `fold`.

    Without `has_bias` the bias is dropped: it is zero up to rounding if the input of `fold` had
    none.

    Raises:
      ValueError: a bias that is not zero would be dropped.
    """
    mean_C = np.asarray(normalisation.mean, np.float64)
    std_C = np.asarray(normalisation.std, np.float64)
    kernel_hwCD = parameters[KERNEL].astype(np.float64)
    width = kernel_hwCD.shape[-1]
    stored_D = parameters.get(BIAS, np.zeros(width))

    scale_C = 2 * std_C
    shift_C = 2 * mean_C - 1
    unfolded_hwCD = kernel_hwCD * scale_C[:, None]
    shift_D = np.einsum("hwCD,C->D", kernel_hwCD, shift_C)
    bias_D = shift_D + stored_D

    dtype = parameters[KERNEL].dtype
    result = dict(parameters)
    result[KERNEL] = unfolded_hwCD.astype(dtype)
    if has_bias:
        result[BIAS] = bias_D.astype(dtype)
        return result

    magnitudes_D = np.einsum("hwCD,C->D", np.abs(kernel_hwCD), np.abs(shift_C))
    rounding_D = np.finfo(np.float32).eps * (magnitudes_D + np.abs(stored_D))
    if (np.abs(bias_D) > rounding_D).any():
        raise ValueError(
            "patch_bias=True: the class of the library has no patch bias, and this one is not "
            "zero without the normalisation of pixels, for example after fine-tuning. "
            "Write vit_jax instead."
        )
    result.pop(BIAS, None)
    return result


def read_normalisation(preprocessing: Mapping[str, object] | None) -> Normalisation:
    """Return the normalisation that the preprocessing of weights states; `OURS` without any.

    Raises:
      ValueError: they are not three numbers each, or a standard deviation is not positive.
    """
    if not preprocessing:
        return OURS
    mean = preprocessing.get("mean")
    std = preprocessing.get("std")
    if mean is None and std is None:
        return OURS
    return parse_normalisation(mean, std)


def describe_normalisation(normalisation: Normalisation) -> dict[str, object]:
    """Return the fields of the preprocessing of weights that state it; none for `OURS`."""
    if normalisation == OURS:
        return {}
    return {
        "mean": list(normalisation.mean),
        "std": list(normalisation.std),
    }


def parse_normalisation(mean: object, std: object) -> Normalisation:
    """Return mean and standard deviation as a configuration states them.

    Raises:
      ValueError: they are not three numbers each, or a standard deviation is not positive.
    """
    numbers: list[float] = []
    for value in (mean, std):
        if not isinstance(value, Sequence) or len(value) != 3:
            continue
        for number in value:
            if type(number) in (int, float):
                numbers.append(float(number))

    if len(numbers) != 6 or not np.isfinite(numbers).all() or min(numbers[3:]) <= 0:
        raise ValueError(
            f"mean={shorten(str(mean), 80)}, std={shorten(str(std), 80)}: must be three finite "
            "numbers each, std positive, since they are folded into the patch embedding. "
            "Correct the file."
        )
    return Normalisation(tuple(numbers[:3]), tuple(numbers[3:]))
