"""Principal components and cosine similarities against NumPy's own decompositions."""

import numpy as np
import pytest

from vit_jax.tools.figures.components import cosine_similarities, principal_components


def test_components_of_rows_that_are_known():
    """Variance 9 along (3, 4) / 5 and 1 across it, around a mean."""
    mean = np.array([5.0, 7.0])
    along = np.array([0.6, 0.8])
    across = np.array([-0.8, 0.6])
    rows = np.array(
        [
            mean + 3 * along + across,
            mean - 3 * along + across,
            mean + 3 * along - across,
            mean - 3 * along - across,
        ]
    )

    found = principal_components(rows, 2)

    assert np.allclose(found.mean_V, mean)
    assert np.allclose(found.component_KV, [along, -across], atol=1e-6)
    assert np.allclose(found.explained_K, [0.9, 0.1])
    assert np.allclose(
        found.project(rows),
        [
            [3, -1],
            [-3, -1],
            [3, 1],
            [-3, 1],
        ],
        atol=1e-5,
    )


@pytest.mark.parametrize("shape", [(40, 6), (5, 12)])
def test_components_are_the_eigenvectors_of_the_covariance(shape):
    scale = np.arange(1, shape[1] + 1)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=shape) * scale
    covariance = np.cov(rows.T)
    values, vectors = np.linalg.eigh(covariance)
    shares = values[::-1] / values.sum()
    components = vectors.T[::-1]

    found = principal_components(rows, 4)
    every = principal_components(rows, 100)
    cosine = np.sum(
        found.component_KV * components[:4],
        axis=1,
    )

    assert np.allclose(found.explained_K, shares[:4], atol=1e-5)
    assert np.allclose(np.abs(cosine), 1, atol=1e-4)
    assert len(every.component_KV) == min(shape)


def test_rows_that_are_all_alike():
    rows = np.ones((3, 4))

    found = principal_components(rows, 2)

    assert not found.explained_K.any()
    assert np.allclose(found.project(rows), 0)


def test_cosine_similarities():
    vectors = np.array(
        [
            [1, 0],
            [2, 2],
            [0, -3],
            [0, 0],
        ]
    )
    half = np.sqrt(0.5)
    expected = [
        [1, half, 0, 0],
        [half, 1, -half, 0],
        [0, -half, 1, 0],
        [0, 0, 0, 0],
    ]

    assert np.allclose(cosine_similarities(vectors), expected)
