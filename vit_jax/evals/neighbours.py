"""Classification by the k nearest neighbours among the training images.

Features are scaled to length 1. Each of the k training images with the greatest cosine similarity
votes for its class with exp(similarity / temperature). Sources: instance discrimination (Wu et al.,
2018), section 3.4; DINO (Caron et al., 2021), section 4.1, which uses k = 10, 20, 100 and 200, and
the temperature 0.07.

Legend: N training images, Q test images, C of them at a time, D width of the features, K classes, k
neighbours.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evals.features import Features, MeasureFeatures, iterate_chunks, select_readable
from vit_jax.evals.fewshot import require_counts, require_positive

NUM_NEIGHBOURS = (10, 20, 100)
TEMPERATURE = 0.07
QUERIES = 1024
KEYS = 65536  # training images at a time


def find_nearest(
    feature_ND: np.ndarray,
    query_QD: np.ndarray,
    k: int,
    *,
    keys_at_once: int = KEYS,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the k greatest cosine similarities and their indices, both (C, k), by chunk.

    The greatest comes first; among equal ones the lower index. k is at most N. A query is compared
    with `keys_at_once` features at a time, which bounds the memory.
    """
    for query_chunk in iterate_chunks(query_QD, QUERIES):
        query_CD = _scale_to_unit(jnp.asarray(query_chunk))
        start = 0
        similarity_Ck = jnp.zeros((len(query_CD), 0), jnp.float32)
        index_Ck = jnp.zeros((len(query_CD), 0), jnp.int32)
        for keys_ND in iterate_chunks(feature_ND, keys_at_once):
            num_known = index_Ck.shape[1] + len(keys_ND)
            similarity_Ck, index_Ck = _merge(
                query_CD,
                keys_ND,
                start,
                similarity_Ck,
                index_Ck,
                min(k, num_known),
            )
            start += len(keys_ND)

        yield np.asarray(similarity_Ck), np.asarray(index_Ck)


def vote(
    similarity_Ck: np.ndarray,
    label_Ck: np.ndarray,
    num_classes: int,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Return the class with the most weight among the neighbours, (C,), the lower one if equal."""
    votes_CK = np.zeros((len(label_Ck), num_classes))
    row_C1 = np.arange(len(label_Ck))[:, None]
    greatest_C1 = similarity_Ck.max(axis=1, keepdims=True)
    weight_Ck = np.exp((similarity_Ck - greatest_C1) / temperature)
    np.add.at(votes_CK, (row_C1, label_Ck), weight_Ck)
    return votes_CK.argmax(axis=1)


def require_neighbours(neighbours: Sequence[int], num_images: int) -> None:
    """Raise ValueError if there are fewer training images than each number of neighbours."""
    least = min(neighbours)
    if least > num_images:
        raise ValueError(
            f"neighbours={least}: must be at most {num_images:,}, the readable training images."
        )


def neighbour_accuracy(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    neighbours: Sequence[int] = NUM_NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> dict[int, float]:
    """Return the accuracy on readable test images by the number of neighbours.

    Numbers above the number of training images are skipped.

    Raises:
      ValueError: no readable image on one of the sides, fewer training images than the least number
        of neighbours, or a number or temperature that is not positive.
    """
    _validate(neighbours, temperature)
    train, test = select_readable(train, test)
    require_neighbours(neighbours, len(train))

    possible = [k for k in neighbours if k <= len(train)]
    num_correct = dict.fromkeys(possible, 0)
    first = 0
    for similarity_Ck, index_Ck in find_nearest(
        train.feature_ND,
        test.feature_ND,
        max(possible),
    ):
        last = first + len(index_Ck)
        label_C = test.label_N[first:last]
        label_Ck = train.label_N[index_Ck]
        for k in possible:
            predicted_C = vote(
                similarity_Ck[:, :k],
                label_Ck[:, :k],
                num_classes,
                temperature,
            )
            is_correct_C = predicted_C == label_C
            num_correct[k] += int(is_correct_C.sum())
        first = last

    return {k: count / len(test) for k, count in num_correct.items()}


def make_neighbour_measure(
    num_classes: int,
    *,
    neighbours: Sequence[int],
    temperature: float = TEMPERATURE,
) -> MeasureFeatures:
    """Return a measure that yields "20nn_accuracy" and so on.

    Arguments are as for `neighbour_accuracy`.
    """
    _validate(neighbours, temperature)

    def measure(train: Features, test: Features) -> Iterator[tuple[str, float]]:
        accuracies = neighbour_accuracy(
            train,
            test,
            num_classes,
            neighbours=neighbours,
            temperature=temperature,
        )
        for k, accuracy in accuracies.items():
            yield f"{k}nn_accuracy", accuracy

    return measure


def _validate(neighbours: Sequence[int], temperature: float) -> None:
    different_numbers = tuple(dict.fromkeys(neighbours))
    require_counts("neighbours", different_numbers, lowest=1)
    require_positive("temperature", (temperature,))


def _scale_to_unit(feature_ND: jax.Array) -> jax.Array:
    """Return features of length 1; zeros stay zeros."""
    length_N1 = jnp.linalg.norm(feature_ND, axis=1, keepdims=True)
    return feature_ND / jnp.maximum(length_N1, 1e-12)


@jax.jit(static_argnames=("k",))
def _merge(
    query_CD: jax.Array,
    keys_ND: jax.Array,
    start: int,
    similarity_Ck: jax.Array,
    index_Ck: jax.Array,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the best k of earlier ones and of more keys, which count from `start`."""
    unit_ND = _scale_to_unit(keys_ND)
    similarity_CN = jnp.matmul(
        query_CD,
        unit_ND.T,
        precision=jax.lax.Precision.HIGHEST,
    )
    index_N = start + jnp.arange(len(keys_ND), dtype=jnp.int32)
    index_CN = jnp.broadcast_to(index_N, similarity_CN.shape)

    similarities = jnp.concatenate([similarity_Ck, similarity_CN], axis=1)
    indices = jnp.concatenate([index_Ck, index_CN], axis=1)
    best, places = jax.lax.top_k(similarities, k)  # equal ones: the lower place
    return best, jnp.take_along_axis(indices, places, axis=1)
