"""Regularised least squares from features to classes, in closed form.

Few-shot evaluation and linear probes use it. The problem is

    minimise |X W + c b - Y|^2 + l2 (|W|^2 + |b|^2)

for the weights W and b, with

* X (N, D): features, each standardised over the examples that are fitted, so that X^T 1 = 0;
* c = 100: the constant feature of the bias, large so that b is nearly free of the penalty;
* Y (N, K): targets, +1 for the class of an example and -1 for the others.

Because of X^T 1 = 0, the two unknowns have separate equations.

* b: c sum(X W + c b - Y) + l2 b = 0 has no term of W, so the bias of the scores is
  c b = c^2 sum(Y) / (N c^2 + l2). A class with n examples has sum(Y) = n - (N - n) = 2 n - N.
* W with N > D (primal): (X^T X + l2 I) W = X^T Y. X^T Y is twice the sum of the features of each
  class, because Y is twice the one-hot labels, less 1.
* W with N <= D (dual): W = X^T A with (X X^T + l2 I) A = Y - mean(Y). Subtracting the mean changes
  nothing but rounding.

The equations are ill conditioned with small penalties, or if there are about as many examples as
numbers of a feature: NumPy and SciPy solve them in float64 on the host. The device computes scores
in float32 where that is precise enough.

Source: the released few-shot evaluation of ViT (big_vision, `fewshot_lsr`).

Legend: N examples, D numbers of a feature, K classes, C examples at a time.
"""

import dataclasses
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from vit_jax.evals.features import iterate_chunks

BIAS_FEATURE = 100.0
STD_EPSILON = 1e-5
L2 = 1024.0
CHUNK = 4096  # examples at a time
SCORE_ERROR = 2e-5  # largest rounding of a score


@dataclasses.dataclass(frozen=True)
class LinearClassifier:
    """A linear layer on standardised features: (features - mean) / scale times weight, plus bias.

    Attributes:
      mean_D, scale_D: float64, of the fitted examples.
      weight_DK, bias_K: float64.
    """

    mean_D: np.ndarray
    scale_D: np.ndarray
    weight_DK: np.ndarray
    bias_K: np.ndarray

    def scores(self, feature_ND: np.ndarray) -> Iterator[jax.Array | np.ndarray]:
        """Yield scores (C, K), chunk by chunk; in float64 if float32 is too imprecise."""
        is_precise = self._is_precise_in_float32()
        weight_DK = jnp.asarray(self.weight_DK, jnp.float32)
        bias_K = jnp.asarray(self.bias_K, jnp.float32)
        for feature_CD in iterate_chunks(feature_ND, CHUNK):
            standardised = _standardise(feature_CD, self.mean_D, self.scale_D)
            if is_precise:
                yield _score(standardised.astype(np.float32), weight_DK, bias_K)
            else:
                yield standardised @ self.weight_DK + self.bias_K

    def _is_precise_in_float32(self) -> bool:
        """Return True if the rounding of float32 scores is below `SCORE_ERROR`.

        A score is the product of a standardised feature, whose root mean square is about 1, and the
        weights of a class. Its rounding is in proportion to the lengths of both vectors.
        """
        feature_length = len(self.mean_D) ** 0.5
        weight_length_K = np.linalg.norm(self.weight_DK, axis=0)
        rounding_K = feature_length * weight_length_K * np.finfo(np.float32).eps
        return bool(rounding_K.max() < SCORE_ERROR)

    def to_linear(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel (D, K) and bias (K,) of a linear layer with these scores, float64."""
        kernel_DK = self.weight_DK / self.scale_D[:, None]
        bias_K = self.bias_K - self.mean_D @ kernel_DK
        return kernel_DK, bias_K

    def predict(self, feature_ND: np.ndarray) -> np.ndarray:
        """Return the class of each example, (N,)."""
        classes = []
        for score_CK in self.scores(feature_ND):
            class_C = score_CK.argmax(axis=1)
            classes.append(np.asarray(class_C))

        return np.concatenate(classes)


class LeastSquares:
    """A summary of examples; each penalty then takes one factorisation."""

    def __init__(
        self,
        feature_ND: np.ndarray,
        label_N: np.ndarray,
        num_classes: int,
    ):
        """Read float32 features, in chunks if there are more examples than numbers of a feature.

        Raises:
          ValueError: the matrices would not fit into the memory.
        """
        num_examples, width = feature_ND.shape
        _require_memory(num_examples, width, num_classes)

        self._num_examples = num_examples
        self._is_dual = num_examples <= width
        self._mean_D, self._scale_D = _compute_moments(feature_ND)
        self._counts_K = np.bincount(label_N, minlength=num_classes)
        if self._is_dual:
            self._prepare_dual(feature_ND, label_N)
        else:
            self._prepare_primal(feature_ND, label_N)

    def _prepare_dual(self, feature_ND: np.ndarray, label_N: np.ndarray) -> None:
        """Compute the kernel matrix X X^T (N, N), and targets less their means (N, K)."""
        self._feature_ND = _standardise(feature_ND, self._mean_D, self._scale_D)
        self._matrix = self._feature_ND @ self._feature_ND.T

        # Features cannot fit the mean of the targets: small penalties would amplify its rounding.
        # Y - mean(Y) is 2 - 2 n / N for the class of an example, and -2 n / N for the others.
        other_K = -2.0 * self._counts_K / self._num_examples
        self._target = np.tile(other_K, (self._num_examples, 1))
        rows = np.arange(self._num_examples)
        self._target[rows, label_N] += 2.0

    def _prepare_primal(self, feature_ND: np.ndarray, label_N: np.ndarray) -> None:
        """Compute X^T X (D, D) and X^T Y (D, K), chunk by chunk."""
        width = feature_ND.shape[1]
        self._matrix = np.zeros((width, width))
        sums_KD = np.zeros((len(self._counts_K), width))

        feature_chunks = iterate_chunks(feature_ND, CHUNK)
        label_chunks = iterate_chunks(label_N, CHUNK)
        for feature_CD, label_C in zip(
            feature_chunks,
            label_chunks,
            strict=True,
        ):
            standardised_CD = _standardise(
                feature_CD,
                self._mean_D,
                self._scale_D,
            )
            self._matrix += standardised_CD.T @ standardised_CD
            _add_class_sums(sums_KD, standardised_CD, label_C)

        self._target = 2.0 * sums_KD.T

    def solve(self, l2: float = L2) -> LinearClassifier:
        """Return the minimiser of the squared error plus `l2` times the squares of the weights."""
        weight_DK = _solve(self._matrix, self._target, l2)
        if self._is_dual:
            weight_DK = self._feature_ND.T @ weight_DK

        square = BIAS_FEATURE**2
        target_sum_K = 2.0 * self._counts_K - self._num_examples
        divisor = square * self._num_examples + l2
        bias_K = square * target_sum_K / divisor
        return LinearClassifier(
            self._mean_D,
            self._scale_D,
            weight_DK,
            bias_K,
        )


@jax.jit
def _score(
    feature_CD: jax.Array,
    weight_DK: jax.Array,
    bias_K: jax.Array,
) -> jax.Array:
    """Return the scores, (C, K) float32."""
    product_CK = jnp.matmul(
        feature_CD,
        weight_DK,
        precision=jax.lax.Precision.HIGHEST,
    )
    return product_CK + bias_K


def _add_class_sums(
    sums_KD: np.ndarray,
    feature_CD: np.ndarray,
    label_C: np.ndarray,
) -> None:
    """Add the features of each example to the sum of its class; faster than `np.add.at`."""
    order = np.argsort(label_C, kind="stable")
    present, starts = np.unique(label_C[order], return_index=True)
    sums_KD[present] += np.add.reduceat(feature_CD[order], starts, axis=0)


def memory_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _require_memory(num_examples: int, width: int, num_classes: int) -> None:
    """Raise ValueError if the float64 matrices do not fit into the memory of the machine."""
    side = min(num_examples, width)
    num_values = 2 * side * (side + num_classes) + width * num_classes
    if num_examples <= width:
        num_values += num_examples * width

    needed = 8 * num_values
    available = memory_bytes()
    if needed <= available:
        return
    raise ValueError(
        f"Least squares with a matrix of {side:,} x {side:,} and {num_classes:,} classes needs "
        f"{needed / 2**30:.1f} GiB, and the machine has {available / 2**30:.1f} GiB. Lower "
        "--shots=, take a layer with fewer numbers (--layer=), or fewer --classes=."
    )


def _compute_moments(feature_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean, and population standard deviation plus `STD_EPSILON`, in float64."""
    num_examples, width = feature_ND.shape
    sum_D = np.zeros(width)
    for feature_CD in iterate_chunks(feature_ND, CHUNK):
        sum_D += feature_CD.sum(axis=0, dtype=np.float64)
    mean_D = sum_D / num_examples

    square_D = np.zeros(width)
    for feature_CD in iterate_chunks(feature_ND, CHUNK):
        square_CD = np.square(feature_CD - mean_D)
        square_D += square_CD.sum(axis=0)
    deviation_D = np.sqrt(square_D / num_examples)
    return mean_D, deviation_D + STD_EPSILON


def _standardise(
    feature_CD: np.ndarray,
    mean_D: np.ndarray,
    scale_D: np.ndarray,
) -> np.ndarray:
    """Return standardised features in float64."""
    return (feature_CD - mean_D) / scale_D


def _solve(matrix: np.ndarray, target: np.ndarray, l2: float) -> np.ndarray:
    """Solve (matrix + l2 I) x = target; the matrix is positive semidefinite up to rounding."""
    penalised = matrix.copy()
    diagonal = np.s_[:: len(matrix) + 1]
    penalised.flat[diagonal] += l2
    try:
        factor = scipy.linalg.cho_factor(penalised, overwrite_a=True)
        return scipy.linalg.cho_solve(factor, target)
    except scipy.linalg.LinAlgError:  # the penalty is less than the rounding of a dependent feature
        return _solve_by_eigenvalues(matrix, target, l2)


def _solve_by_eigenvalues(
    matrix: np.ndarray,
    target: np.ndarray,
    l2: float,
) -> np.ndarray:
    """Solve as `_solve`, with eigenvalues of at least the rounding of the largest one."""
    value, vector = scipy.linalg.eigh(matrix)
    rounding = np.finfo(np.float64).eps * value[-1]
    value = np.maximum(value, rounding) + l2
    coordinates = (vector.T @ target) / value[:, None]
    return vector @ coordinates
