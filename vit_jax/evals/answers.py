"""What a classifier answers to each image of a split: its most probable classes, computed on the devices.

Every process gets the answers to all images, so that whatever is counted of them is plain arithmetic on the host.

Legend: B global batch, K outputs of the network, L classes of the data, N images of a batch that count, T the first
answers, five or as many as there are outputs.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.sums import Results

FIRST = 5


class Answers(NamedTuple):
    """Answers to some images, on the host.

    Attributes:
      record_N: the images' numbers in the split.
      label_N: their classes, in the numbering of the data.
      class_NT: numbers of outputs, the most probable first, of equals the lower number.
      probability_NT: float32, their softmax probabilities; not finite where a logit is not.
      loss_N: softmax cross-entropy of the class's output.
    """

    record_N: np.ndarray
    label_N: np.ndarray
    class_NT: np.ndarray
    probability_NT: np.ndarray
    loss_N: np.ndarray

    @classmethod
    def of(cls, record_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> "Answers":
        """From what `answer` gave for these images."""
        return cls(record_N, *(rows[name] for name in ("label_B", "class_BT", "probability_BT", "loss_B")))


def answer(logits_BK: jax.Array, batch: Batch, is_allowed_K: jax.Array, output_L: jax.Array) -> Results:
    """The fields of `Answers` for a batch, with "mask_B".

    Args:
      logits_BK: float32.
      batch: that they were computed from.
      is_allowed_K: bool; the other outputs take no part, as if the network did not have them.
      output_L: the output that stands for each class of the data; it is for the loss only.
    """
    allowed_BK = jnp.where(is_allowed_K, logits_BK, -jnp.inf)
    log_BK = jax.nn.log_softmax(allowed_BK)
    class_BT = jax.lax.top_k(allowed_BK, min(FIRST, logits_BK.shape[1]))[1]
    loss_B1 = -jnp.take_along_axis(log_BK, output_L[batch.label_B][:, None], axis=1)
    return {
        "label_B": batch.label_B,
        "class_BT": class_BT,
        "probability_BT": jnp.exp(jnp.take_along_axis(log_BK, class_BT, axis=1)),
        "loss_B": loss_B1[:, 0],
        "mask_B": batch.mask_B,
    }
