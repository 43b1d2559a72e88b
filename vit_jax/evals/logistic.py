"""Logistic regression on frozen features by L-BFGS, with the penalty chosen on held-out examples.

It is multinomial, or one-vs-rest where examples may have several labels.

The grid is from CLIP (Radford et al., 2021, appendix A.3): at most 1,000 iterations, no
augmentation, the penalty from 1e-6 to 1e6. The search tries one value every second power of ten,
and halves the step around the best one until it is an eighth of a power of ten. Unlike CLIP's, it
compares log-losses: accuracies of a few held-out examples are equal for many penalties, and weak
ones among them give probabilities that are too confident.

Legend: N examples, C of them at a time, D width of the features, K classes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special

from vit_jax.evals.features import iterate_chunks

PENALTIES = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
MOST_RISES = 2  # rises of the loss in a row that end the search
_FINEST_STEP = 10 ** (1 / 8)
MAX_ITERATIONS = 1000
GRADIENT_TOLERANCE = 1e-5  # for the largest entry of the gradient
CHUNK = 8192  # examples whose logits are in memory at a time
LEAST_CHUNK = 256
Parameters = tuple[jax.Array, jax.Array]
Carry = tuple[Parameters, Any]
"""Parameters and the state of the optimiser."""


@dataclasses.dataclass(frozen=True)
class LogisticClassifier:
    """Logits are features times weight_DK plus bias_K.

    Attributes:
      weight_DK, bias_K: float32.
      iterations: number of iterations of L-BFGS; `MAX_ITERATIONS` if it did not converge.
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
        chunks = [logits_CK.astype(np.float64) for logits_CK in self._logits(feature_ND)]
        return np.concatenate(chunks)

    def log_probabilities(self, feature_ND: np.ndarray) -> np.ndarray:
        """Return the logarithm of the softmax of each class, (N, K) float64."""
        logits_NK = self.logits(feature_ND)
        log_NK: np.ndarray = scipy.special.log_softmax(logits_NK, axis=1)
        return log_NK

    def _logits(self, feature_ND: np.ndarray) -> Iterator[np.ndarray]:
        for feature_CD in iterate_chunks(feature_ND, CHUNK):
            yield feature_CD @ self.weight_DK + self.bias_K


def fit_logistic(
    feature_ND: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    penalty: float,
) -> LogisticClassifier:
    """Minimise the summed cross-entropy plus penalty / 2 times the squares of the weights.

    That is scikit-learn's `LogisticRegression(C=1 / penalty)`, and for several labels the same for
    each class against the others. The bias is free of the penalty.

    Args:
      feature_ND: float32.
      labels: labels of the examples, (N,), or 0 and 1 for each class, (N, K).
      num_classes: K.
      penalty: more than 0.
    """
    has_several_labels = labels.ndim == 2
    width = feature_ND.shape[1]
    num_examples = len(labels)
    start = (jnp.zeros((width, num_classes)), jnp.zeros(num_classes))

    parameters, iterations = _minimise(
        start,
        _cut_chunks(feature_ND, labels),
        penalty / num_examples,
        num_examples,
    )
    weight_DK, bias_K = parameters
    return LogisticClassifier(
        weight_DK=np.asarray(weight_DK),
        bias_K=np.asarray(bias_K),
        iterations=int(iterations),
        has_several_labels=has_several_labels,
    )


def choose_penalty(loss_of: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """Return the penalty with the lowest loss, and the losses of all penalties tried.

    Among equal losses it is the largest penalty.

    The search begins with the largest of `PENALTIES` and skips weaker ones after `MOST_RISES` rises
    of the loss.

    Args:
      loss_of: fits with a penalty and returns the loss of held-out examples.
    """
    tried: dict[float, float] = {}
    rises = 0
    previous = math.inf
    for penalty in reversed(PENALTIES):
        loss = loss_of(penalty)
        tried[penalty] = loss
        rises = rises + 1 if loss > previous else 0
        previous = loss
        if rises == MOST_RISES:
            break

    step = PENALTIES[1] / PENALTIES[0]
    while step > _FINEST_STEP * 1.001:
        step = math.sqrt(step)
        middle = _find_best(tried)
        for penalty in (middle / step, middle * step):
            if PENALTIES[0] <= penalty <= PENALTIES[-1]:
                tried[penalty] = loss_of(penalty)

    losses = dict(sorted(tried.items()))
    return _find_best(tried), losses


def _find_best(tried: Mapping[float, float]) -> float:
    """Return the penalty with the lowest loss, the largest one among equal losses."""
    return min(tried, key=lambda penalty: (tried[penalty], -penalty))


def _cut_chunks(feature_ND: np.ndarray, labels: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return features (chunks, C, D), and labels (chunks, C) or (chunks, C, K).

    They are padded with the label -1.

    Sizes are powers of two, so that folds of about equal sizes share a compiled program.
    """
    num_examples, width = feature_ND.shape
    power_of_two = 1 << (num_examples - 1).bit_length()
    size = min(CHUNK, max(LEAST_CHUNK, power_of_two))
    num_padding = -num_examples % size

    padded_features = np.pad(feature_ND, ((0, num_padding), (0, 0)))
    feature_chunks = padded_features.reshape(-1, size, width)

    paddings = [(0, 0)] * labels.ndim
    paddings[0] = (0, num_padding)
    padded_labels = np.pad(
        labels.astype(np.int32),
        paddings,
        constant_values=-1,
    )
    label_chunks = padded_labels.reshape(-1, size, *labels.shape[1:])
    return jnp.asarray(feature_chunks), jnp.asarray(label_chunks)


def _compute_losses(logits_CK: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each example, (C,).

    For several labels it is summed over the classes.
    """
    if labels.ndim == 1:
        label_C = jnp.maximum(labels, 0)
        return optax.softmax_cross_entropy_with_integer_labels(logits_CK, label_C)

    label_CK = labels.astype(jnp.float32)
    loss_CK = optax.sigmoid_binary_cross_entropy(logits_CK, label_CK)
    return loss_CK.sum(axis=1)


def _sum_chunk_losses(
    parameters: Parameters,
    feature_CD: jax.Array,
    labels: jax.Array,
) -> jax.Array:
    """Return the sum of the cross-entropies of the examples of a chunk, without its padding."""
    weight_DK, bias_K = parameters
    product_CK = jnp.matmul(
        feature_CD,
        weight_DK,
        precision=jax.lax.Precision.HIGHEST,
    )
    losses_C = _compute_losses(product_CK + bias_K, labels)
    first_label_C = labels[:, 0] if labels.ndim == 2 else labels
    is_padding_C = first_label_C < 0
    return jnp.sum(jnp.where(is_padding_C, 0.0, losses_C))


def _sum_losses(parameters: Parameters, batches: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the sum of the cross-entropies of all examples, chunk by chunk."""

    @jax.checkpoint  # the logits of all examples need not be kept
    def sum_chunk(feature_CD: jax.Array, labels: jax.Array) -> jax.Array:
        return _sum_chunk_losses(parameters, feature_CD, labels)

    def add_chunk(
        total: jax.Array,
        chunk: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, None]:
        return total + sum_chunk(*chunk), None

    total, _ = jax.lax.scan(add_chunk, jnp.zeros(()), batches)
    return total


@jax.jit
def _minimise(
    start: Parameters,
    batches: tuple[jax.Array, jax.Array],
    penalty: float,
    num_examples: int,
) -> tuple[Parameters, jax.Array]:
    """Return the parameters with the least penalised mean loss, and the number of iterations."""

    def compute_loss(parameters: Parameters) -> jax.Array:
        total = _sum_losses(parameters, batches)
        square = jnp.sum(jnp.square(parameters[0]))
        return total / num_examples + penalty / 2 * square

    optimizer = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(compute_loss)

    def improve(carry: Carry) -> Carry:
        parameters, state = carry
        value, gradient = value_and_gradient(parameters, state=state)
        updates, state = optimizer.update(
            gradient,
            state,
            parameters,
            value=value,
            grad=gradient,
            value_fn=compute_loss,
        )
        return optax.apply_updates(parameters, updates), state

    carry = (start, optimizer.init(start))
    parameters, state = jax.lax.while_loop(_is_unfinished, improve, carry)
    return parameters, optax.tree.get(state, "count")


def _is_unfinished(carry: Carry) -> jax.Array:
    """Return True while the gradient is too large and the iterations do not reach their limit."""
    _, state = carry
    count = optax.tree.get(state, "count")
    gradient = optax.tree.get(state, "grad")
    largest = optax.tree.norm(gradient, ord="inf")
    is_unfinished = (count < MAX_ITERATIONS) & (largest > GRADIENT_TOLERANCE)
    return (count == 0) | is_unfinished
