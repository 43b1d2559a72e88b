"""Logistic regression on frozen features by L-BFGS, with the penalty chosen on held-out examples.

It is multinomial, or one-vs-rest where examples may have several labels.

The grid is that of CLIP (Radford et al., 2021, appendix A.3): at most 1,000 iterations, no
augmentation, the penalty from 1e-6 to 1e6. The search tries one value every second power of ten,
and halves the step around the best one until it is an eighth of a power of ten. Unlike CLIP's, it
compares log-losses: accuracies of a few held-out examples are equal for many penalties, and weak
ones among them give probabilities that are too confident.

Legend: N examples, C of them at a time, D numbers of a feature, K classes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special

from vit_jax.evals.features import chunks_of

PENALTIES = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
MOST_RISES = 2  # of the loss in a row, after which weaker penalties are not tried
_FINEST_STEP = 10 ** (1 / 8)
MAX_ITERATIONS = 1000
GRADIENT_TOLERANCE = 1e-5  # of the largest number of the gradient
CHUNK = 8192  # examples whose logits are in memory at a time
LEAST_CHUNK = 256
Parameters = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LogisticClassifier:
    """Logits are features times weight_DK plus bias_K.

    Attributes:
      weight_DK, bias_K: float32.
      iterations: of L-BFGS; `MAX_ITERATIONS` if it did not converge.
      has_several_labels: probabilities are sigmoids of the logits, not their softmax.
    """

    weight_DK: np.ndarray
    bias_K: np.ndarray
    iterations: int
    has_several_labels: bool = False

    def to_linear(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel (D, K) and bias (K,) of a linear layer with these logits."""
        return self.weight_DK, self.bias_K

    def predict(self, feature_ND: np.ndarray) -> np.ndarray:
        """Return the class of each example, (N,)."""
        chunks = [logits_CK.argmax(axis=1) for logits_CK in self._logits(feature_ND)]
        return np.concatenate(chunks)

    def logits(self, feature_ND: np.ndarray) -> np.ndarray:
        """Return the logits, (N, K) float64."""
        return np.concatenate(
            [logits_CK.astype(np.float64) for logits_CK in self._logits(feature_ND)]
        )

    def log_probabilities(self, feature_ND: np.ndarray) -> np.ndarray:
        """Return the logarithm of the softmax of each class, (N, K) float64."""
        log_NK: np.ndarray = scipy.special.log_softmax(self.logits(feature_ND), axis=1)
        return log_NK

    def _logits(self, feature_ND: np.ndarray) -> Iterator[np.ndarray]:
        for feature_CD in chunks_of(feature_ND, CHUNK):
            yield feature_CD @ self.weight_DK + self.bias_K


def fit_logistic(
    feature_ND: np.ndarray, labels: np.ndarray, num_classes: int, penalty: float
) -> LogisticClassifier:
    """Minimise the summed cross-entropy plus penalty / 2 times the squares of the weights.

    That is scikit-learn's `LogisticRegression(C=1 / penalty)`, and for several labels the same for
    each class against the others. The bias is free of the penalty.

    Args:
      feature_ND: float32.
      labels: of the examples, (N,), or 0 and 1 for each class, (N, K).
      num_classes: K.
      penalty: more than 0.
    """
    has_several_labels = labels.ndim == 2
    batches = _chunked(feature_ND, labels)
    start = jnp.zeros((feature_ND.shape[1], num_classes)), jnp.zeros(num_classes)
    num = len(labels)
    (weight_DK, bias_K), iterations = _minimise(
        start, batches, penalty / num, num, has_several_labels=has_several_labels
    )
    return LogisticClassifier(
        np.asarray(weight_DK), np.asarray(bias_K), int(iterations), has_several_labels
    )


def choose_penalty(loss_of: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """Return the penalty with the lowest loss, and the losses of all penalties tried.

    Of equal ones it is the largest.

    The search begins with the largest of `PENALTIES` and leaves out weaker ones after `MOST_RISES`
    rises of the loss.

    Args:
      loss_of: fits with a penalty and returns the loss of held-out examples.
    """
    tried: dict[float, float] = {}
    rises = 0
    previous = math.inf
    for penalty in reversed(PENALTIES):
        tried[penalty] = loss_of(penalty)
        rises = rises + 1 if tried[penalty] > previous else 0
        previous = tried[penalty]
        if rises == MOST_RISES:
            break

    step = PENALTIES[1] / PENALTIES[0]
    while step > _FINEST_STEP * 1.001:
        step = math.sqrt(step)
        middle = _find_best(tried)
        for penalty in (middle / step, middle * step):
            if PENALTIES[0] <= penalty <= PENALTIES[-1]:
                tried[penalty] = loss_of(penalty)
    return _find_best(tried), dict(sorted(tried.items()))


def _find_best(tried: Mapping[float, float]) -> float:
    return min(tried, key=lambda penalty: (tried[penalty], -penalty))


def _chunked(feature_ND: np.ndarray, labels: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return features (chunks, C, D), and labels (chunks, C) or (chunks, C, K).

    They are padded with the label -1.

    Sizes are powers of two, so that folds of about equal sizes share a compiled program.
    """
    size = min(CHUNK, max(LEAST_CHUNK, 1 << (len(labels) - 1).bit_length()))
    padding = -len(labels) % size
    features = np.pad(feature_ND, ((0, padding), (0, 0))).reshape(-1, size, feature_ND.shape[1])
    widths = [(0, padding)] + [(0, 0)] * (labels.ndim - 1)
    padded = np.pad(labels.astype(np.int32), widths, constant_values=-1)
    return jnp.asarray(features), jnp.asarray(padded.reshape(-1, size, *labels.shape[1:]))


def _losses(logits_CK: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each example, (C,).

    For several labels it is summed over the classes.
    """
    if labels.ndim == 1:
        return optax.softmax_cross_entropy_with_integer_labels(logits_CK, jnp.maximum(labels, 0))
    return optax.sigmoid_binary_cross_entropy(logits_CK, labels.astype(jnp.float32)).sum(axis=1)


@functools.partial(jax.jit, static_argnames="has_several_labels")
def _minimise(
    start: Parameters,
    batches: tuple[jax.Array, jax.Array],
    penalty: float,
    num: int,
    *,
    has_several_labels: bool,
) -> tuple[Parameters, jax.Array]:
    def mean_loss(parameters: Parameters) -> jax.Array:
        weight_DK, bias_K = parameters

        @jax.checkpoint  # the logits of all examples need not be kept
        def chunk_loss(feature_CD: jax.Array, labels: jax.Array) -> jax.Array:
            logits_CK = (
                jnp.matmul(feature_CD, weight_DK, precision=jax.lax.Precision.HIGHEST) + bias_K
            )
            is_padding_C = labels[:, 0] < 0 if has_several_labels else labels < 0
            return jnp.sum(jnp.where(is_padding_C, 0.0, _losses(logits_CK, labels)))

        total, _ = jax.lax.scan(
            lambda total, chunk: (total + chunk_loss(*chunk), None), jnp.zeros(()), batches
        )
        return total / num + penalty / 2 * jnp.sum(jnp.square(weight_DK))

    optimizer = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(mean_loss)

    def improve(carry: tuple[Parameters, optax.OptState]) -> tuple[Parameters, optax.OptState]:
        parameters, state = carry
        value, gradient = value_and_gradient(parameters, state=state)
        arguments = {"value": value, "grad": gradient, "value_fn": mean_loss}
        updates, state = optimizer.update(gradient, state, parameters, **arguments)
        return optax.apply_updates(parameters, updates), state

    def goes_on(carry: tuple[Parameters, optax.OptState]) -> jax.Array:
        state = carry[1]
        count = optax.tree.get(state, "count")
        gradient = optax.tree.get(state, "grad")
        largest = optax.tree.norm(gradient, ord="inf")
        return (count == 0) | ((count < MAX_ITERATIONS) & (largest > GRADIENT_TOLERANCE))

    parameters, state = jax.lax.while_loop(goes_on, improve, (start, optimizer.init(start)))
    return parameters, optax.tree.get(state, "count")
