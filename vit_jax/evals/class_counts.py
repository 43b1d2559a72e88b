"""Counts of the predictions of images with one label, from which their metrics are computed.

`predict` runs on the devices. Every process gets the predictions of all images and adds them up on
the host, so that memory does not grow with the images.

Legend: B global batch, K outputs of the network, L classes of the data, N images of a batch that
count, T most probable outputs: five, or all of fewer.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.calibration import Calibration
from vit_jax.evals.label_map import LabelMap
from vit_jax.evals.runner import Results, Rows

MOST_PROBABLE = 5


def predict(
    logits_BK: jax.Array,
    batch: Batch,
    is_allowed_K: jax.Array,
    output_L: jax.Array,
) -> Results:
    """Return "label_B", "class_BT", "probability_BT", "loss_B" and "mask_B" of a batch.

    "class_BT" has the numbers of outputs, the most probable first, of equal ones the lower number;
    "probability_BT" has their softmax probabilities, float32, not finite if a logit is not;
    "loss_B" is the cross-entropy.

    Outputs that are not allowed are ignored, as if the network did not have them. `output_L` is the
    output of each class of the data, for the loss.
    """
    allowed_BK = jnp.where(is_allowed_K, logits_BK, -jnp.inf)
    log_BK = jax.nn.log_softmax(allowed_BK)
    num_predictions = min(MOST_PROBABLE, logits_BK.shape[1])
    class_BT = jax.lax.top_k(allowed_BK, num_predictions)[1]
    output_B = output_L[batch.label_B]
    log_B1 = jnp.take_along_axis(log_BK, output_B[:, None], axis=1)
    return {
        "label_B": batch.label_B,
        "class_BT": class_BT,
        "probability_BT": jnp.exp(jnp.take_along_axis(log_BK, class_BT, axis=1)),
        "loss_B": -log_B1[:, 0],
        "mask_B": batch.mask_B,
    }


class ClassCounts:
    """Counts of predictions by class, and sums over all images.

    Attributes:
      label_map: the outputs of the network that are right for each class.
      images_L: number of images of each class.
      top1_L: number of images of each class whose most probable output is right.
      top5_L: number of images of each class with a right output among the five most probable ones.
      predicted_K: number of images by their most probable output.
      loss: sum of softmax cross-entropy.
      calibration: calibration of the most probable outputs.
    """

    def __init__(self, label_map: LabelMap) -> None:
        num_classes = len(label_map.output_L)
        self.label_map = label_map
        self.images_L = np.zeros(num_classes, np.int64)
        self.top1_L = np.zeros(num_classes, np.int64)
        self.top5_L = np.zeros(num_classes, np.int64)
        self.predicted_K = np.zeros(len(label_map.is_allowed_K), np.int64)
        self.loss = 0.0
        self.calibration = Calibration()

    def add(self, rows: Rows) -> None:
        """Add the rows of `predict` for images that count.

        They need "record_B" if the label map depends on it.
        """
        label_N = rows["label_B"]
        most_probable_N = rows["class_BT"][:, 0]
        is_right_NT = self.find_right(rows)
        is_right_N = is_right_NT[:, 0]

        self.images_L += self._count(label_N)
        self.top1_L += self._count(label_N[is_right_N])
        self.top5_L += self._count(label_N[is_right_NT.any(axis=1)])
        self.predicted_K += np.bincount(most_probable_N, minlength=len(self.predicted_K))
        self.loss += float(rows["loss_B"].astype(np.float64).sum())
        self.calibration.add(rows["probability_BT"][:, 0], is_right_N)

    def find_right(self, rows: Rows) -> np.ndarray:
        """Return which predictions are right, bool (N, T); arguments as for `add`."""
        return self.label_map.is_right(rows.get("record_B"), rows["label_B"], rows["class_BT"])

    def f1_by_class(self) -> np.ndarray | None:
        """Return F1 of each class, (L,), NaN without images.

        Return None if an image has not exactly one right output.
        """
        if not self.label_map.has_loss:
            return None
        predicted_L = self.predicted_K[self.label_map.output_L]
        f1_L = np.full(len(self.images_L), np.nan)
        has_images_L = self.images_L > 0
        total_L = predicted_L + self.images_L
        f1_L[has_images_L] = 2 * self.top1_L[has_images_L] / total_L[has_images_L]
        return f1_L

    @property
    def mean_loss(self) -> float | None:
        """Mean cross-entropy; None if an image has not exactly one right output."""
        return self.loss / self.images if self.label_map.has_loss else None

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.images_L.sum())

    def _count(self, label_N: np.ndarray) -> np.ndarray:
        return np.bincount(label_N, minlength=len(self.images_L))
