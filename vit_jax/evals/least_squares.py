"""Regularised least squares from features to classes, in closed form: few-shot evaluation and linear probes.

Targets are +1 for the class and -1 for the others. Each feature is standardised over the examples that are fitted, and
has a constant feature of 100 beside it as bias, which is nearly free of the penalty. Standardised features sum to zero,
so the bias separates from the rest and is known by formula; what is left is well conditioned in float32.

Source: the released few-shot evaluator of ViT (big_vision, `fewshot_lsr`).

Legend: N examples, D numbers of a feature, K classes, C examples at a time.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evals.features import parts_of

BIAS_FEATURE = 100.0
STD_EPSILON = 1e-5
L2 = 1024.0
CHUNK = 4096  # examples at a time
_precise = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class LinearClassifier:
    """Scores are (features - mean) / scale times weight, plus bias; the highest wins.

    Attributes:
      mean_D, scale_D: float64, of the fitted examples.
      weight_DK, bias_K: float32.
    """

    mean_D: np.ndarray
    scale_D: np.ndarray
    weight_DK: jax.Array
    bias_K: np.ndarray

    def scores(self, feature_ND: np.ndarray) -> Iterator[jax.Array]:
        """Scores (C, K) of one part of the examples after another."""
        for part in _parts(feature_ND):
            yield _score(_standardised(part, self.mean_D, self.scale_D), self.weight_DK, self.bias_K)

    def predict(self, feature_ND: np.ndarray) -> np.ndarray:
        """The class of each example, (N,)."""
        return np.concatenate([np.asarray(jnp.argmax(part, axis=1)) for part in self.scores(feature_ND)])


class LeastSquares:
    """Examples, summarised once; each penalty then takes one factorisation."""

    def __init__(self, feature_ND: np.ndarray, label_N: np.ndarray, num_classes: int):
        """Reads the features, in parts where there are more examples than numbers of a feature.

        Args:
          feature_ND: float32.
          label_N: integers, 0 to num_classes - 1.
          num_classes: also those without examples.

        Raises:
          ValueError: the matrices would not fit into the memory.
        """
        self._num, width = feature_ND.shape
        self._is_dual = self._num <= width
        size, columns = (self._num, self._num + num_classes) if self._is_dual else (width, width + 2 * num_classes)
        _require_memory(4 * (2 * size * columns + width * num_classes), min(self._num, width), num_classes)
        self._mean_D, self._scale_D = _moments(feature_ND)
        self._counts_K = np.bincount(label_N, minlength=num_classes)
        if self._is_dual:  # the kernel matrix (N, N), and targets (N, K)
            self._feature_ND = _standardised(feature_ND, self._mean_D, self._scale_D)
            self._matrix = _precise(self._feature_ND, self._feature_ND.T)
            self._target = 2.0 * jax.nn.one_hot(label_N, num_classes) - 1.0
        else:  # the products of features (D, D), and with targets (D, K)
            self._matrix = jnp.zeros((width, width), jnp.float32)
            for part in _parts(feature_ND):
                self._matrix = _add_products(self._matrix, _standardised(part, self._mean_D, self._scale_D))
            self._target = jnp.asarray(2.0 * self._class_sums(feature_ND, label_N).T)

    def solve(self, l2: float = L2) -> LinearClassifier:
        """The minimiser of the squared error plus `l2` times the squares of the weights."""
        weight = _solve(self._matrix, self._target, l2)
        weight_DK = _precise(self._feature_ND.T, weight) if self._is_dual else weight
        square = BIAS_FEATURE**2
        bias_K = square * (2.0 * self._counts_K - self._num) / (square * self._num + l2)
        return LinearClassifier(self._mean_D, self._scale_D, weight_DK, bias_K.astype(np.float32))

    def _class_sums(self, feature_ND: np.ndarray, label_N: np.ndarray) -> np.ndarray:
        """Standardised features of each class, added up, (K, D) in float32."""
        sums_KD = np.zeros((len(self._counts_K), feature_ND.shape[1]), np.float32)
        first = 0
        for part in _parts(feature_ND):
            standardised = np.asarray(_standardised(part, self._mean_D, self._scale_D))
            label = label_N[first : first + len(part)]
            order = np.argsort(label, kind="stable")
            present, starts = np.unique(label[order], return_index=True)
            sums_KD[present] += np.add.reduceat(standardised[order], starts, axis=0)
            first += len(part)
        return sums_KD


def memory_bytes() -> int:
    """Memory of the device that solves; of a CPU that of the machine."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _require_memory(needed: int, side: int, num_classes: int) -> None:
    if needed > (available := memory_bytes()):
        raise ValueError(
            f"Least squares with a matrix of {side:,} x {side:,} and {num_classes:,} classes needs "
            f"{needed / 2**30:.1f} GiB, and the device has {available / 2**30:.1f} GiB. Lower --shots=, "
            "take a layer with fewer numbers (--layer=), or fewer --classes=."
        )


def _parts(feature_ND: np.ndarray) -> Iterator[np.ndarray]:
    return parts_of(feature_ND, CHUNK)


def _moments(feature_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and population standard deviation plus `STD_EPSILON`, in float64."""
    mean_D = sum(part.sum(axis=0, dtype=np.float64) for part in _parts(feature_ND)) / len(feature_ND)
    square_D = sum(np.square(part - mean_D).sum(axis=0) for part in _parts(feature_ND)) / len(feature_ND)
    return np.asarray(mean_D, np.float64), np.sqrt(square_D) + STD_EPSILON


def _standardised(feature_CD: np.ndarray, mean_D: np.ndarray, scale_D: np.ndarray) -> jax.Array:
    """Float32; the mean is subtracted in two parts, since features may be far from zero and close together."""
    near_D = mean_D.astype(np.float32)
    return _standardise(feature_CD, near_D, (mean_D - near_D).astype(np.float32), scale_D.astype(np.float32))


@jax.jit
def _standardise(feature_CD: jax.Array, near_D: jax.Array, rest_D: jax.Array, scale_D: jax.Array) -> jax.Array:
    return ((feature_CD - near_D) - rest_D) / scale_D


@jax.jit
def _add_products(total_DD: jax.Array, feature_CD: jax.Array) -> jax.Array:
    return total_DD + _precise(feature_CD.T, feature_CD)


@jax.jit
def _score(feature_CD: jax.Array, weight_DK: jax.Array, bias_K: jax.Array) -> jax.Array:
    return _precise(feature_CD, weight_DK) + bias_K


@jax.jit
def _solve(matrix: jax.Array, target: jax.Array, l2: float) -> jax.Array:
    """Solves (matrix + l2 I) x = target by Cholesky, and once more for what is left of the target."""
    penalised = matrix + l2 * jnp.eye(len(matrix), dtype=matrix.dtype)
    factor = jax.scipy.linalg.cho_factor(penalised)
    first = jax.scipy.linalg.cho_solve(factor, target)
    return first + jax.scipy.linalg.cho_solve(factor, target - _precise(penalised, first))
