"""Evaluation of a network on labelled images, each image once, on all devices; its results as text and JSON.

Legend: B global batch, K outputs of the network, N images that count, T predictions of an image.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from vit_jax.arrays import Batch, abstract_batch, normalise
from vit_jax.config import Architecture
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.evals.runner import Module, Results, Runner, counted, require_finite, require_images
from vit_jax.evals.single_label import ClassMetrics, predict
from vit_jax.models.flops import FLOPS_PER_MAC, forward_macs
from vit_jax.objectives.sums import score_classes
from vit_jax.sharding import batch_sharding, replicated
from vit_jax.text.tables import columns


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult:
    """Results on one dataset.

    Attributes:
      labelled, metrics: the images, and metrics of their predictions.
      unreadable: number of images that were skipped.
      images_per_second: from opening the data to the last prediction, including decoding, without compilation.
      gflops_per_image: of the forward pass, 2 for each multiply-add; None if unknown.
    """

    labelled: Labelled
    metrics: ClassMetrics | MultilabelMetrics
    unreadable: int
    images_per_second: float
    gflops_per_image: float | None

    def values(self) -> dict[str, object]:
        """Return everything by name, for JSON."""
        return {
            "data": self.labelled.words,
            "notes": self.labelled.notes,
            "images": self.metrics.images,
            "unreadable_images": self.unreadable,
            **self.metrics.values(),
            "images_per_second": self.images_per_second,
            "gflops_per_image": self.gflops_per_image,
            **self.metrics.details(),
        }


WriteRows = Callable[[Iterable[Sequence[object]]], None]


class Evaluate(Protocol):
    """Evaluates a network on labelled images."""

    def __call__(
        self, labelled: Labelled, write_images: WriteRows | None = None
    ) -> EvaluationResult:
        """Return the results; `write_images` receives the table of images, first its header, then batches of rows.

        Raises:
          ValueError: too many images, or all, are unreadable, or probabilities are not finite.
        """


def make_evaluate(
    module: Module,
    architecture: Architecture,
    transform: EvaluationTransform,
    *,
    source: str,
    is_multilabel: bool,
    global_batch: int,
    max_unreadable: int | None,
) -> Evaluate:
    """Compile the step of an evaluation on all devices of all processes, for any number of datasets.

    The network `module` has classes. `source` says where it comes from, for messages. Other arguments are as for
    `Runner`.
    """
    runner = Runner(module, transform, global_batch=global_batch, max_unreadable=max_unreadable)
    num_outputs = architecture.num_classes
    everywhere = replicated(runner.mesh)

    def run(module: Module, batch: Batch, is_allowed_K: jax.Array, output_K: jax.Array) -> Results:
        logits_BK = module(normalise(batch.image_BHWC, architecture.compute_dtype)).logits_BK
        return (
            score_classes(logits_BK, batch)
            if is_multilabel
            else predict(logits_BK, batch, is_allowed_K, output_K)
        )

    abstract = [
        jax.ShapeDtypeStruct((num_outputs,), dtype, sharding=everywhere)
        for dtype in (bool, np.int32)
    ]
    label_shape = (num_outputs,) if is_multilabel else ()
    batch = abstract_batch(
        runner.global_batch, transform.image_size, batch_sharding(runner.mesh), label_shape
    )
    compiled = runner.jit(run).lower(module, batch, *abstract).compile()
    gflops = _gflops(module, architecture)

    def evaluate(labelled: Labelled, write_images: WriteRows | None = None) -> EvaluationResult:
        images = labelled.source
        metrics = MultilabelMetrics(images.class_names) if is_multilabel else ClassMetrics(labelled)
        arguments = [runner.place(array) for array in labelled.label_map.arguments()]
        if write_images:
            write_images([("image", *metrics.image_columns)])
        began = time.perf_counter()
        for every_row in runner.rows(
            images, lambda module, batch: compiled(module, batch, *arguments)
        ):
            rows = counted(every_row)
            names = [images.name_of(record) for record in rows["record_B"].tolist()]
            require_finite(rows[metrics.probabilities], source, names.__getitem__)
            metrics.add(rows)
            if write_images:
                write_images(
                    (name, *cells)
                    for name, cells in zip(names, metrics.image_rows(rows), strict=True)
                )
        seconds = time.perf_counter() - began
        require_images(metrics.images, labelled.words)
        return EvaluationResult(
            labelled=labelled,
            metrics=metrics,
            unreadable=len(images) - metrics.images,
            images_per_second=metrics.images / seconds,
            gflops_per_image=gflops,
        )

    return evaluate


def _gflops(module: Module, a: Architecture) -> float | None:
    """Return GFLOPs of one image: by formula, or counted in the program of a custom network; None if not countable."""
    try:
        macs = forward_macs(a, None if a.is_standard else module)
    except ValueError:
        return None
    return FLOPS_PER_MAC * macs / 1e9


def to_json(values: Mapping[str, object]) -> str:
    """Return JSON in ASCII, which every terminal and every file name allows."""
    return json.dumps(values, indent=2, allow_nan=False)


def values(
    results: Mapping[str, EvaluationResult], absent: Mapping[str, str], weights: str
) -> dict[str, object]:
    """Return everything for JSON: values of the one dataset, or those of several by name under "sets"."""
    if list(results) == [""]:
        return {"weights": weights, **results[""].values()}
    return {
        "weights": weights,
        "sets": {name: one.values() for name, one in results.items()},
        "absent": dict(absent),
    }


def to_text(results: Mapping[str, EvaluationResult], weights: str) -> str:
    """Return the metrics of one dataset, one to a line, or a table with a line for each of several."""
    if len(results) > 1:
        return _to_table(results, weights)
    (result,) = results.values()
    worst = result.metrics.worst()
    unreadable = f", and {result.unreadable:,} that cannot be read" if result.unreadable else ""
    lines = {
        "weights": weights,
        "data": result.labelled.words,
        "images": f"{result.metrics.images:,}{unreadable}",
        **result.metrics.shown(),
        "images_per_second": f"{result.images_per_second:,.0f}",
    }
    if result.gflops_per_image is not None:
        lines["gflops_per_image"] = f"{result.gflops_per_image:,.3g}"
    return columns((lines | worst).items(), "<<", gap=" ", least=(18,))


def _to_table(results: Mapping[str, EvaluationResult], weights: str) -> str:
    rows = [("", "images", "top-1", "95 %", "top-5", "calibration error", "images/s")]
    for name, result in results.items():
        values: dict[str, Any] = result.metrics.values()
        low, high = values["top1_interval"]
        top1, top5, error = (
            f"{values[key]:.2%}" for key in ("top1_accuracy", "top5_accuracy", "calibration_error")
        )
        images = f"{result.metrics.images:,}"
        speed = f"{result.images_per_second:,.0f}"
        rows.append((name, images, top1, f"{low:.2%} to {high:.2%}", top5, error, speed))
    heading = [("weights", weights)]
    if (gflops := next(iter(results.values())).gflops_per_image) is not None:
        heading.append(("network", f"{gflops:,.3g} GFLOPs an image"))
    return f"{columns(heading, '<<')}\n\n{columns(rows, '<>>>>>>')}"
