"""Evaluation of a network on labelled images, on all devices, with results as text and JSON.

Each image is evaluated once.

Legend: B global batch, K outputs of the network, N images that count, T predictions of an image.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch, abstract_batch, normalise
from vit_jax.config import Architecture
from vit_jax.config.metric_names import USUAL_METRICS, format_metric
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.class_counts import predict
from vit_jax.evals.intervals import INTERVAL_OF
from vit_jax.evals.label_map import Labelled
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.evals.runner import Module, Runner, require_finite
from vit_jax.evals.running_metrics import NO_FURTHER_METRICS, ChosenMetrics
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.step_results import Results, keep_counted, require_images
from vit_jax.models.flops import FLOPS_PER_MAC, forward_macs
from vit_jax.models.views import ViewAverage, count_views
from vit_jax.objectives.sums import score_classes
from vit_jax.sharding import batch_sharding, replicate
from vit_jax.storage.files import JsonObject
from vit_jax.text.tables import columns


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult:
    """Results on one dataset.

    Attributes:
      labelled, metrics: the images, and metrics of their predictions.
      unreadable: number of images that were skipped.
      images_per_second: speed from opening the data to the last prediction, including decoding,
        without compilation.
      gflops_per_image: GFLOPs of the forward pass, 2 for each multiply-add; None if unknown.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluates a network on labelled images; `make_evaluate` builds it.

    Attributes:
      runner: runs the step over the images.
      step: (module, batch, is_allowed_K, output_K) -> the rows of the metrics.
      source, is_multilabel, chosen: see `make_evaluate`.
      gflops_per_image: see `EvaluationResult`.
    """

    runner: Runner
    step: Callable[..., Results]
    source: str
    is_multilabel: bool
    chosen: ChosenMetrics
    gflops_per_image: float | None

    def __call__(
        self,
        labelled: Labelled,
        write_images: WriteRows | None = None,
    ) -> EvaluationResult:
        """Return the results.

        `write_images` receives the table of images, first its header, then batches of rows.

        Raises:
          ValueError: too many images, or all, are unreadable, or probabilities are not finite.
        """
        images = labelled.source
        metrics = self._make_metrics(labelled)
        label_arguments = list(map(self.runner.place, labelled.label_map.arguments()))

        def step(module: Module, batch: Batch) -> Results:
            return self.step(module, batch, *label_arguments)

        if write_images:
            write_images([("image", *metrics.image_columns)])
        began = time.perf_counter()
        for batch_rows in self.runner.compute_rows(images, step):
            rows = keep_counted(batch_rows)
            names = [images.name_of(record) for record in rows["record_B"].tolist()]
            require_finite(rows[metrics.probabilities], self.source, names.__getitem__)
            metrics.add(rows)
            if write_images:
                write_images(_prepend_names(names, metrics.image_rows(rows)))
        seconds = time.perf_counter() - began

        require_images(metrics.images, labelled.words)
        return EvaluationResult(
            labelled=labelled,
            metrics=metrics,
            unreadable=len(images) - metrics.images,
            images_per_second=metrics.images / seconds,
            gflops_per_image=self.gflops_per_image,
        )

    def _make_metrics(self, labelled: Labelled) -> ClassMetrics | MultilabelMetrics:
        if self.is_multilabel:
            return MultilabelMetrics(labelled.source.class_names, self.chosen)
        return ClassMetrics(labelled, self.chosen)


def make_evaluate(
    module: Module,
    architecture: Architecture,
    transform: EvaluationTransform,
    *,
    source: str,
    is_multilabel: bool,
    global_batch: int,
    max_unreadable: int | None,
    chosen: ChosenMetrics = NO_FURTHER_METRICS,
) -> Evaluate:
    """Compile an evaluation on all devices of all processes, for any number of datasets.

    Args:
      module: a network with classes.
      architecture: the architecture of the network.
      transform: prepares the images.
      source: the origin of the network, for messages.
      is_multilabel: images may have several labels.
      global_batch: see `Runner`.
      max_unreadable: see `Runner`.
      chosen: metrics besides the usual ones.

    Raises:
      ValueError: a chosen metric is not defined for images with one label, or with several.
    """
    chosen.require_labels("several" if is_multilabel else "one", "--metrics")
    runner = Runner(
        module,
        transform,
        global_batch=global_batch,
        max_unreadable=max_unreadable,
    )
    return Evaluate(
        runner=runner,
        step=_compile_step(runner, architecture, is_multilabel, chosen),
        source=source,
        is_multilabel=is_multilabel,
        chosen=chosen,
        gflops_per_image=_compute_gflops(module, architecture),
    )


def _prepend_names(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> Iterator[Sequence[object]]:
    """Yield each row of the table of images after the name of its image."""
    for name, row in zip(names, rows, strict=True):
        yield (name, *row)


def _compile_step(
    runner: Runner,
    architecture: Architecture,
    is_multilabel: bool,
    chosen: ChosenMetrics,
) -> Callable[..., Results]:
    """Compile (module, batch, is_allowed_K, output_K) -> the rows of the metrics.

    The last two arguments come from `LabelMap.arguments`, so that one program fits all datasets.
    """
    num_outputs = architecture.num_classes

    def step(
        module: Module,
        batch: Batch,
        is_allowed_K: jax.Array,
        output_K: jax.Array,
    ) -> Results:
        image_BHWC = normalise(batch.image_BHWC, architecture.compute_dtype)
        logits_BK = module(image_BHWC).logits_BK
        if is_multilabel:
            rows = score_classes(logits_BK, batch)
            label_BK = batch.label_BK(num_outputs)
            return rows | chosen.compute_custom_rows(logits_BK, label_BK)

        allowed_BK = jnp.where(is_allowed_K, logits_BK, -jnp.inf)
        output_B = output_K[batch.label_B]
        rows = predict(allowed_BK, batch, output_B)
        label_BK = jax.nn.one_hot(output_B, num_outputs)
        return rows | chosen.compute_custom_rows(allowed_BK, label_BK)

    everywhere = replicate(runner.mesh)
    label_shape = (num_outputs,) if is_multilabel else ()
    batch = abstract_batch(
        runner.global_batch,
        runner.transform.image_shape,
        batch_sharding(runner.mesh),
        label_shape,
        runner.transform.dtype,
    )
    is_allowed_K = jax.ShapeDtypeStruct((num_outputs,), bool, sharding=everywhere)
    output_K = jax.ShapeDtypeStruct((num_outputs,), np.int32, sharding=everywhere)
    compiled: Callable[..., Results] = (
        runner.jit(step)
        .lower(
            runner.module,
            batch,
            is_allowed_K,
            output_K,
        )
        .compile()
    )
    return compiled


def _compute_gflops(module: Module, a: Architecture) -> float | None:
    """Return GFLOPs of one image: by formula, or counted in the program of a custom network.

    Return None if they cannot be counted.
    """
    num_views = 1
    if isinstance(module, ViewAverage):
        num_views = count_views(module.views)
        module = module.network
    custom_module = None if a.is_standard else module
    try:
        macs = forward_macs(a, custom_module)
    except ValueError:
        return None
    return FLOPS_PER_MAC * num_views * macs / 1e9


def to_json(values: Mapping[str, object]) -> str:
    """Return JSON in ASCII, which every terminal can print."""
    return json.dumps(values, indent=2, allow_nan=False)


def values(
    results: Mapping[str, EvaluationResult],
    absent: Mapping[str, str],
    weights: str,
) -> dict[str, object]:
    """Return everything for JSON, several datasets by name under "sets"."""
    if list(results) == [""]:
        return {"weights": weights, **results[""].values()}

    sets = {name: result.values() for name, result in results.items()}
    return {
        "weights": weights,
        "sets": sets,
        "absent": dict(absent),
    }


def to_text(results: Mapping[str, EvaluationResult], weights: str) -> str:
    """Return the metrics of one dataset, one to a line, or a table of several datasets."""
    if len(results) > 1:
        return _to_table(results, weights)

    (result,) = results.values()
    images = f"{result.metrics.images:,}"
    if result.unreadable:
        images += f", and {result.unreadable:,} that cannot be read"
    lines = {
        "weights": weights,
        "data": result.labelled.words,
        "images": images,
        **result.metrics.shown(),
        "images_per_second": f"{result.images_per_second:,.0f}",
    }
    if result.gflops_per_image is not None:
        lines["gflops_per_image"] = f"{result.gflops_per_image:,.3g}"
    lines |= result.metrics.worst()
    return columns(lines.items(), "<<", gap=" ", least=(18,))


def _to_table(results: Mapping[str, EvaluationResult], weights: str) -> str:
    first = next(iter(results.values()))
    further = [name for name in first.metrics.values() if _is_further(name)]
    head = ["", "images", "accuracy", "95 %", "top-5", "calibration error", "images/s"]
    head += [name.replace("_", " ") for name in further]
    rows = [head]
    for name, result in results.items():
        rows.append([name, *_list_cells(result, further)])

    heading = [("weights", weights)]
    if first.gflops_per_image is not None:
        heading.append(("network", f"{first.gflops_per_image:,.3g} GFLOPs an image"))
    alignment = "<" + ">" * (len(head) - 1)
    return f"{columns(heading, '<<')}\n\n{columns(rows, alignment)}"


def _list_cells(result: EvaluationResult, further: Sequence[str]) -> list[str]:
    """Return the cells of a dataset, with further metrics at the end."""
    values: JsonObject = result.metrics.values()
    low, high = values[INTERVAL_OF["accuracy"]]
    cells = [
        f"{result.metrics.images:,}",
        format_metric("accuracy", values["accuracy"]),
        f"{low:.2%} to {high:.2%}",
        format_metric("top5_accuracy", values["top5_accuracy"]),
        format_metric("calibration_error", values["calibration_error"]),
        f"{result.images_per_second:,.0f}",
    ]
    for name in further:
        value = values[name]
        if value is None:
            cells.append("–")
        else:
            cells.append(format_metric(name, value))
    return cells


def _is_further(name: str) -> bool:
    """Return True for a chosen metric, which is neither a usual one nor an interval."""
    return name not in USUAL_METRICS["one"] and name not in INTERVAL_OF.values()
