"""Principal components and cosine similarities of the rows of a matrix, in NumPy.

Legend: R rows, V numbers of a row, K components.
"""

from typing import NamedTuple

import numpy as np


class Components(NamedTuple):
    """Directions in which rows differ most, the first most.

    Attributes:
      mean_V: the mean of the rows.
      component_KV: orthonormal; the number of largest magnitude of each component is positive.
      explained_K: fraction of the variance along each component.
    """

    mean_V: np.ndarray
    component_KV: np.ndarray
    explained_K: np.ndarray

    def project(self, row_RV: np.ndarray) -> np.ndarray:
        """Return coordinates of rows, (..., K)."""
        return (row_RV - self.mean_V) @ self.component_KV.T


def principal_components(row_RV: np.ndarray, count: int) -> Components:
    """Return the first `count` components, or all if there are fewer."""
    row_RV = np.asarray(row_RV, np.float32)
    mean_V = row_RV.mean(axis=0)
    _, deviation, component_KV = np.linalg.svd(row_RV - mean_V, full_matrices=False)

    # A singular value decomposition does not define the signs of its components.
    index_K1 = np.abs(component_KV).argmax(axis=1, keepdims=True)
    largest_K1 = np.take_along_axis(component_KV, index_K1, axis=1)
    sign_K1 = np.where(largest_K1 < 0, -1, 1)
    component_KV = component_KV * sign_K1

    variance_K = np.square(deviation)
    total = max(variance_K.sum(), np.finfo(np.float32).tiny)
    explained_K = variance_K / total
    return Components(
        mean_V,
        component_KV[:count],
        explained_K[:count],
    )


def cosine_similarities(row_RV: np.ndarray) -> np.ndarray:
    """Return cosine similarities of all pairs of rows (R, R), -1 to 1; 0 for rows of zeros."""
    row_RV = np.asarray(row_RV, np.float64)
    norms = np.linalg.norm(row_RV, axis=1, keepdims=True)
    unit = row_RV / np.where(norms > 0, norms, 1)
    return np.clip(unit @ unit.T, -1, 1)
