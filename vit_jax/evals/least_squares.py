"""Regularised least squares from features to classes, in closed form.

Few-shot evaluation and linear probes use it. The problem is

    minimise |X W + c ones b - Y|^2 + l2 (|W|^2 + |b|^2)

for the weights W (D, K) and b (1, K), with

* X (N, D): features, standardised over the examples that are fitted, so that X^T ones = 0;
* ones (N, 1): a column of ones, so that ones^T ones = N;
* c = 100: one more feature, the same for all examples, whose weight is b. It is large, so that b
  is nearly free of the penalty; c b is the bias of the scores;
* Y (N, K): targets, +1 for the class of an example and -1 for the others.

The derivatives by W and by b are zero:

    X^T (X W - Y) + c X^T ones b + l2 W = 0
    c ones^T X W + c ones^T (c ones b - Y) + l2 b = 0

X^T ones = 0 removes b from the first equation and W from the second:

    (X^T X + l2 I) W = X^T Y            D equations: `PrimalEquations`
    (c^2 N + l2) b = c ones^T Y         `solve_bias`

The first one has the same solution as N equations, which are fewer if N <= D:

    W = X^T A, (X X^T + l2 I) A = Y     `DualEquations`, which subtract mean(Y) from Y

The equations are ill conditioned with small penalties, or if N is about D: NumPy and SciPy solve
them in float64 on the host.

Source: the released few-shot evaluation of ViT (big_vision, `fewshot_lsr`).

Legend: N examples, D width of the features, K classes, C examples at a time.
"""

import dataclasses
import os
from collections.abc import Iterator

import numpy as np
import scipy.linalg

from vit_jax.evals.features import iterate_chunks

BIAS_INPUT = 100.0  # c
STD_EPSILON = 1e-5
L2 = 1024.0
CHUNK = 4096  # examples at a time


@dataclasses.dataclass(frozen=True)
class LinearClassifier:
    """A linear layer on features, float64.

    Attributes:
      kernel_DK, bias_K: the scores of the classes are feature times kernel, plus bias.
    """

    kernel_DK: np.ndarray
    bias_K: np.ndarray

    def iterate_scores(self, feature_ND: np.ndarray) -> Iterator[np.ndarray]:
        """Yield scores (C, K), chunk by chunk."""
        for feature_CD in iterate_chunks(feature_ND, CHUNK):
            yield feature_CD @ self.kernel_DK + self.bias_K

    def predict(self, feature_ND: np.ndarray) -> np.ndarray:
        """Return the class of each example, (N,)."""
        classes = [score_CK.argmax(axis=1) for score_CK in self.iterate_scores(feature_ND)]
        return np.concatenate(classes)

    def to_linear(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel (D, K) and bias (K,) of a linear layer with these scores."""
        return self.kernel_DK, self.bias_K


class LeastSquares:
    """Prepares the equations of some examples once; `solve` solves them for a penalty."""

    def __init__(self, feature_ND: np.ndarray, label_N: np.ndarray, num_classes: int) -> None:
        """Read float32 features, in chunks if N > D.

        Raises:
          ValueError: the matrices would not fit into the memory.
        """
        num_examples, width = feature_ND.shape
        _require_memory(num_examples, width, num_classes)

        self._num_examples_K = np.bincount(label_N, minlength=num_classes)
        self._scaler = Scaler(feature_ND)
        equations_class = PrimalEquations if num_examples > width else DualEquations
        self._equations = equations_class(self._scaler, feature_ND, label_N, num_classes)

    def solve(self, l2: float = L2) -> LinearClassifier:
        """Return the minimiser of the squared error plus `l2` times the squares of the weights."""
        # For standardised features.
        weight_DK = self._equations.solve(l2)
        standardised_bias_K = solve_bias(self._num_examples_K, l2)

        # The same scores for features as they are: the standardisation goes into the classifier.
        kernel_DK = weight_DK / self._scaler.scale_D[:, None]
        bias_K = standardised_bias_K - self._scaler.mean_D @ kernel_DK
        return LinearClassifier(kernel_DK, bias_K)


class Scaler:
    """Standardises features: (feature - mean) / scale, in float64.

    Attributes:
      mean_D, scale_D: mean, and population standard deviation plus `STD_EPSILON`, of the examples.
    """

    def __init__(self, feature_ND: np.ndarray) -> None:
        num_examples, width = feature_ND.shape
        sum_D = np.zeros(width)
        for feature_CD in iterate_chunks(feature_ND, CHUNK):
            sum_D += feature_CD.sum(axis=0, dtype=np.float64)
        self.mean_D = sum_D / num_examples

        square_D = np.zeros(width)
        for feature_CD in iterate_chunks(feature_ND, CHUNK):
            square_D += np.square(feature_CD - self.mean_D).sum(axis=0)
        self.scale_D = np.sqrt(square_D / num_examples) + STD_EPSILON

    def standardise(self, feature_CD: np.ndarray) -> np.ndarray:
        """Return the standardised features of some examples."""
        return (feature_CD - self.mean_D) / self.scale_D


class PrimalEquations:
    """W with N > D: (X^T X + l2 I) W = X^T Y, D equations."""

    def __init__(
        self, scaler: Scaler, feature_ND: np.ndarray, label_N: np.ndarray, num_classes: int
    ) -> None:
        width = feature_ND.shape[1]
        self._matrix_DD = np.zeros((width, width))
        self._target_DK = np.zeros((width, num_classes))
        feature_chunks = iterate_chunks(feature_ND, CHUNK)
        label_chunks = iterate_chunks(label_N, CHUNK)
        for feature_CD, label_C in zip(feature_chunks, label_chunks, strict=True):
            x_CD = scaler.standardise(feature_CD)
            y_CK = build_targets(label_C, num_classes)
            self._matrix_DD += x_CD.T @ x_CD
            self._target_DK += x_CD.T @ y_CK

    def solve(self, l2: float) -> np.ndarray:
        """Return W, (D, K)."""
        return _solve_penalised(self._matrix_DD, self._target_DK, l2)


class DualEquations:
    """W with N <= D: W = X^T A and (X X^T + l2 I) A = Y - mean(Y), N equations.

    Y goes in without its mean, for fewer rounding errors. W stays the same: as X X^T ones = 0, to
    subtract m ones from a column of Y subtracts (m / l2) ones from that of A, which X^T maps to 0.
    """

    def __init__(
        self, scaler: Scaler, feature_ND: np.ndarray, label_N: np.ndarray, num_classes: int
    ) -> None:
        y_NK = build_targets(label_N, num_classes)
        self._x_ND = scaler.standardise(feature_ND)
        self._matrix_NN = self._x_ND @ self._x_ND.T
        self._target_NK = y_NK - y_NK.mean(axis=0)

    def solve(self, l2: float) -> np.ndarray:
        """Return W, (D, K)."""
        a_NK = _solve_penalised(self._matrix_NN, self._target_NK, l2)
        return self._x_ND.T @ a_NK


def build_targets(label_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Return Y (N, K): +1 for the class of an example and -1 for the others."""
    target_NK = np.full((len(label_N), num_classes), -1.0)
    target_NK[np.arange(len(label_N)), label_N] = 1.0
    return target_NK


def solve_bias(num_examples_K: np.ndarray, l2: float) -> np.ndarray:
    """Return the bias of the scores, c b = c^2 sum(Y) / (c^2 N + l2).

    Of a class with n examples, n targets are +1 and N - n are -1: sum(Y) = 2 n - N.
    """
    num_examples = num_examples_K.sum()
    target_sum_K = 2 * num_examples_K - num_examples
    square = BIAS_INPUT**2
    return square * target_sum_K / (square * num_examples + l2)


def _solve_penalised(matrix: np.ndarray, target: np.ndarray, l2: float) -> np.ndarray:
    """Solve (matrix + l2 I) x = target; the matrix is positive semidefinite up to rounding."""
    # Rounding can make eigenvalues negative, by less than eps times the trace. With this much more on
    # the diagonal the Cholesky factorisation exists. It is little: X is standardised, so the trace of
    # X^T X is N D, and this is 2e-7 for a million examples with features of width 1,000.
    rounding = np.finfo(np.float64).eps * np.trace(matrix)
    penalised = matrix.copy()
    np.fill_diagonal(penalised, matrix.diagonal() + l2 + rounding)
    factor = scipy.linalg.cho_factor(penalised, overwrite_a=True)
    return scipy.linalg.cho_solve(factor, target)


def memory_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _require_memory(num_examples: int, width: int, num_classes: int) -> None:
    """Raise ValueError if the float64 values do not fit into the memory of the machine."""
    num_equations = min(num_examples, width)
    matrices = 2 * num_equations**2  # one, and its copy with the penalty
    right_sides = 2 * num_equations * num_classes  # one, and the solution
    kernel = width * num_classes
    features = 0
    if num_examples <= width:
        features = num_examples * width  # X, which `DualEquations` keep

    needed = 8 * (matrices + right_sides + kernel + features)
    available = memory_bytes()
    if needed <= available:
        return
    raise ValueError(
        f"Least squares with {num_equations:,} equations and {num_classes:,} classes needs "
        f"{needed / 2**30:.1f} GiB, and the machine has {available / 2**30:.1f} GiB. Lower "
        "--shots=, take a narrower layer (--layer=), or fewer --classes=."
    )
