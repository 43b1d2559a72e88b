"""Evaluation of a network on labelled images, each image once, on all devices; its results as text and JSON.

Legend: B global batch, K outputs of the network, N images that count, T predictions of an image.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.arrays import Batch, abstract_batch, normalise
from vit_jax.config import Architecture
from vit_jax.config.evaluators import metric_text
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import MultilabelMetrics, score
from vit_jax.evals.runner import Module, Results, Runner, counted
from vit_jax.evals.single_label import ClassMetrics, predict
from vit_jax.files import printable
from vit_jax.models.flops import FLOPS_PER_MAC, forward_macs
from vit_jax.sharding import batch_sharding, replicated
from vit_jax.tables import columns, to_csv


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Results on one dataset.

    Attributes:
      labelled: the images.
      metrics: of their predictions.
      unreadable: number of images that were skipped.
      images_per_second: from opening the data to the last prediction, including decoding, without compilation.
      gflops_per_image: of the forward pass, 2 for each multiply-add; None if unknown.
    """

    labelled: Labelled
    metrics: ClassMetrics | MultilabelMetrics
    unreadable: int
    images_per_second: float
    gflops_per_image: float | None

    def values(self) -> dict[str, Any]:
        """Return everything by name, for JSON."""
        return {
            "data": self.labelled.words,
            "notes": self.labelled.notes,
            "images": self.metrics.images,
            "unreadable_images": self.unreadable,
            **self.metrics.figures(),
            "images_per_second": self.images_per_second,
            "gflops_per_image": self.gflops_per_image,
            **self.metrics.details(),
        }

    def shown(self) -> dict[str, str]:
        """Return the metrics as text, by name."""
        return {name: metric_text(name, value) for name, value in self.metrics.shown().items()}

    def to_csv(self) -> str:
        """Return the table of classes as CSV."""
        return to_csv(self.metrics.table())


Watch = Callable[[np.ndarray, Mapping[str, np.ndarray]], None]
"""Receives the numbers of images in their split, and their rows of `single_label.predict` or `multilabel.score`."""
Evaluate = Callable[[Labelled, Watch | None], Evaluation]


def make_evaluate(
    module: Module,
    architecture: Architecture,
    transform: EvaluationTransform,
    *,
    source: str,
    is_multilabel: bool,
    global_batch: int,
    max_unreadable: int,
) -> Evaluate:
    """Compile the step of an evaluation on all devices of all processes, for any number of datasets.

    Args:
      module: a network with classes; its parameters lie complete on every device of all processes.
      architecture: of the network.
      transform: prepares the images.
      source: where the network comes from, for messages.
      is_multilabel: images may have several labels.
      global_batch: examples of one step, rounded up to a multiple of the devices.
      max_unreadable: images of a dataset that may be unreadable, over all processes.

    Returns:
      A function of labelled images and of a `Watch`. It raises ValueError if more images than `max_unreadable`, or all,
      are unreadable, or if probabilities are not finite.
    """
    runner = Runner(module, transform, global_batch=global_batch, max_unreadable=max_unreadable)
    num_outputs, everywhere = architecture.num_classes, replicated(runner.mesh)

    def run(module: Module, batch: Batch, is_allowed_K: jax.Array, output_K: jax.Array) -> Results:
        logits_BK = module(normalise(batch.image_BHWC, architecture.compute_dtype)).logits_BK
        return score(logits_BK, batch) if is_multilabel else predict(logits_BK, batch, is_allowed_K, output_K)

    def place(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, everywhere, lambda index: array[index])

    abstract = [jax.ShapeDtypeStruct((num_outputs,), dtype, sharding=everywhere) for dtype in (bool, np.int32)]
    label_shape = (num_outputs,) if is_multilabel else ()
    batch = abstract_batch(runner.global_batch, transform.image_size, batch_sharding(runner.mesh), label_shape)
    compiled = runner.jit(run).lower(module, batch, *abstract).compile()
    gflops = _gflops(module, architecture)

    def evaluate(labelled: Labelled, watch: Watch | None = None) -> Evaluation:
        images, label_map = labelled.source, labelled.label_map
        output_K = np.zeros(num_outputs, np.int32)  # of one size, so that the step is compiled once for all datasets
        if label_map.has_loss:
            output_K[: len(label_map.output_L)] = label_map.output_L
        arguments = place(label_map.is_allowed_K), place(output_K)
        metrics = MultilabelMetrics(images.class_names) if is_multilabel else ClassMetrics(labelled)
        began = time.perf_counter()
        for record_B, rows in runner.rows(images, lambda module, batch: compiled(module, batch, *arguments)):
            record_N, rows = record_B[rows["mask_B"] > 0], counted(rows)
            is_finite_N = np.isfinite(rows[metrics.probabilities]).all(axis=1)
            if not is_finite_N.all():
                raise not_finite(source, images.name_of(int(record_N[is_finite_N.argmin()])))
            metrics.add(record_N, rows)
            if watch is not None:
                watch(record_N, rows)
        seconds = time.perf_counter() - began
        if not metrics.images:
            raise ValueError("No image could be read, so there is nothing to evaluate.")
        return Evaluation(
            labelled=labelled,
            metrics=metrics,
            unreadable=len(images) - metrics.images,
            images_per_second=metrics.images / seconds,
            gflops_per_image=gflops,
        )

    return evaluate


def not_finite(source: str, image: str) -> ValueError:
    """Return the error for a network whose probabilities of an image are NaN or infinite."""
    return ValueError(
        f"{source}: the probabilities of {printable(image)} are not finite. Its parameters are damaged, or too large "
        "for the dtype it computes in."
    )


def _gflops(module: Module, a: Architecture) -> float | None:
    """Return GFLOPs of one image: by formula, or counted in the program of a custom network; None if not countable."""
    try:
        macs = forward_macs(a, None if a.is_standard else module)
    except ValueError:
        return None
    return FLOPS_PER_MAC * macs / 1e9


def to_json(values: Mapping[str, Any]) -> str:
    """Return JSON in ASCII, which every terminal and every file name allows."""
    return json.dumps(values, indent=2, allow_nan=False)


def values(results: Mapping[str, Evaluation], absent: Mapping[str, str], weights: str) -> dict[str, Any]:
    """Return everything for JSON: values of the one dataset, or those of several by name under "sets"."""
    if list(results) == [""]:
        return {"weights": weights, **results[""].values()}
    return {"weights": weights, "sets": {name: one.values() for name, one in results.items()}, "absent": dict(absent)}


def to_text(results: Mapping[str, Evaluation], weights: str) -> str:
    """Return the metrics of one dataset, one to a line, or a table with a line for each of several."""
    if len(results) > 1:
        return _to_table(results, weights)
    (evaluation,) = results.values()
    unreadable = f", and {evaluation.unreadable:,} that cannot be read" if evaluation.unreadable else ""
    lines = {
        "weights": weights,
        "data": evaluation.labelled.words,
        "images": f"{evaluation.metrics.images:,}{unreadable}",
        **evaluation.shown(),
        "images_per_second": f"{evaluation.images_per_second:,.0f}",
    }
    if evaluation.gflops_per_image is not None:
        lines["gflops_per_image"] = f"{evaluation.gflops_per_image:,.3g}"
    return columns((lines | evaluation.metrics.worst()).items(), "<<", gap=" ", least=(18,))


def _to_table(results: Mapping[str, Evaluation], weights: str) -> str:
    rows = [("", "images", "top-1", "95 %", "top-5", "calibration error", "images/s")]
    for name, evaluation in results.items():
        values: dict[str, Any] = evaluation.metrics.figures()
        low, high = values["top1_interval"]
        top1, top5, error = (f"{values[key]:.2%}" for key in ("top1_accuracy", "top5_accuracy", "calibration_error"))
        speed = f"{evaluation.images_per_second:,.0f}"
        rows.append((name, f"{evaluation.metrics.images:,}", top1, f"{low:.2%} to {high:.2%}", top5, error, speed))
    heading = [("weights", weights)]
    if (gflops := next(iter(results.values())).gflops_per_image) is not None:
        heading.append(("network", f"{gflops:,.3g} GFLOPs an image"))
    return f"{columns(heading, '<<')}\n\n{columns(rows, '<>>>>>>')}"
