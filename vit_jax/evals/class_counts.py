"""Counts of the predictions of images with one label, and the metrics that follow from them.

`predict` runs on the devices (`running_metrics.make_metric_rows` calls it). Every process gets the
predictions of all images and adds them up on the host, so that memory does not grow with the
images. `RunningMetrics.compute` reads a metric as the property of its name.

Legend: B global batch, K outputs of the network, L classes of the data, N images of a batch that
count, T most probable outputs: five, or all K if there are fewer.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.calibration import Calibration
from vit_jax.evals.label_map import LabelMap
from vit_jax.evals.step_results import Results, Rows

MOST_PROBABLE = 5


def predict(logits_BK: jax.Array, batch: Batch, output_B: jax.Array) -> Results:
    """Return the most probable outputs and the loss of each image of a batch.

    Args:
      logits_BK: -inf for outputs that cannot be predicted.
      batch: labels and mask of the images.
      output_B: the output that is right for each image, for the loss.

    Returns:
      "label_B" and "mask_B" of the batch; "class_BT", numbers of outputs, the most probable first,
      of equal ones the lower number; "probability_BT", their softmax probabilities, float32, NaN
      if a logit is NaN or +inf; "loss_B", the cross-entropy.
    """
    num_predictions = min(MOST_PROBABLE, logits_BK.shape[1])
    _, class_BT = jax.lax.top_k(logits_BK, num_predictions)

    log_probability_BK = jax.nn.log_softmax(logits_BK)
    log_probability_BT = jnp.take_along_axis(log_probability_BK, class_BT, axis=1)
    log_likelihood_B1 = jnp.take_along_axis(log_probability_BK, output_B[:, None], axis=1)
    return {
        "label_B": batch.label_B,
        "mask_B": batch.mask_B,
        "class_BT": class_BT,
        "probability_BT": jnp.exp(log_probability_BT),
        "loss_B": -log_likelihood_B1[:, 0],
    }


class ClassCounts:
    """Counts of predictions by class. Its properties are the metrics of images with one label.

    Attributes:
      label_map: the output of the network that is right for each class, or several for each image.
      images_L: number of images of each class.
      top1_L: number of images of each class whose most probable output is right.
      top5_L: number of images of each class with a right output among the five most probable ones.
      predicted_K: number of images by their most probable output.
      loss_sum: sum of softmax cross-entropy; meaningless for images with several right outputs.
      calibration: calibration of the most probable outputs.
    """

    def __init__(self, label_map: LabelMap) -> None:
        num_classes = len(label_map.output_L)
        self.label_map = label_map
        self.images_L = np.zeros(num_classes, np.int64)
        self.top1_L = np.zeros(num_classes, np.int64)
        self.top5_L = np.zeros(num_classes, np.int64)
        self.predicted_K = np.zeros(len(label_map.is_allowed_K), np.int64)
        self.loss_sum = 0.0
        self.calibration = Calibration()

    def add(self, rows: Rows) -> None:
        """Add the rows of `predict`, without those of images that do not count.

        `step_results.iterate_step_results` has removed these: N of the B rows remain. They also need
        "record_B", the index of the image, if the label map depends on it.
        """
        label_N = rows["label_B"]
        most_probable_N = rows["class_BT"][:, 0]
        is_right_NT = self.find_right(rows)
        is_right_N = is_right_NT[:, 0]

        self.images_L += self._count(label_N)
        self.top1_L += self._count(label_N[is_right_N])
        self.top5_L += self._count(label_N[is_right_NT.any(axis=1)])
        self.predicted_K += np.bincount(most_probable_N, minlength=len(self.predicted_K))
        self.loss_sum += float(rows["loss_B"].astype(np.float64).sum())
        self.calibration.add(rows["probability_BT"][:, 0], is_right_N)

    def find_right(self, rows: Rows) -> np.ndarray:
        """Return which predictions are right, bool (N, T); arguments as for `add`."""
        return self.label_map.is_right(rows.get("record_B"), rows["label_B"], rows["class_BT"])

    def _count(self, label_N: np.ndarray) -> np.ndarray:
        return np.bincount(label_N, minlength=len(self.images_L))

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.images_L.sum())

    @property
    def accuracy(self) -> float:
        """Fraction of images whose most probable output is right."""
        return int(self.top1_L.sum()) / self.images

    @property
    def top5_accuracy(self) -> float:
        """Fraction of images with a right output among the five most probable ones."""
        return int(self.top5_L.sum()) / self.images

    @property
    def loss(self) -> float:
        """Mean cross-entropy; NaN unless each image has exactly one right output."""
        if not self.label_map.has_single_outputs:
            return math.nan
        return self.loss_sum / self.images

    @property
    def f1_macro(self) -> float:
        """Mean of F1 over the classes with images; NaN as for the loss.

        F1 is 2 TP / ((TP + FP) + (TP + FN)): of the images that are predicted as a class, and of
        the images that have it, TP have both. Outputs that are no class of the data have no F1;
        predicting them is a miss of the class that the image has.
        """
        if not self.label_map.has_single_outputs:
            return math.nan
        predicted_L = self.predicted_K[self.label_map.output_L]
        sum_L = predicted_L + self.images_L
        f1_L = 2 * self.top1_L / np.maximum(sum_L, 1)
        return float(f1_L[self.images_L > 0].mean())

    @property
    def calibration_error(self) -> float:
        """Expected calibration error (Guo et al., ICML 2017)."""
        return self.calibration.error
