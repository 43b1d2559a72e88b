"""Evaluates weights on labelled images, each image once, on all devices of all processes.

Legend: K outputs of the network, N images that count, T first answers.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.api import Model
from vit_jax.arrays import Batch, abstract_batch, normalise
from vit_jax.data.placement import local_rows, open_placed
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals.answers import Answers, answer
from vit_jax.evals.multilabel import Scores, score
from vit_jax.evals.per_class import Tally
from vit_jax.evals.sums import Results, numbered_rows
from vit_jax.inference.labelled import Labelled
from vit_jax.inference.outcome import ClassEvaluation, Evaluation, MultilabelEvaluation
from vit_jax.inference.predict import not_finite
from vit_jax.models.activations import placed_by
from vit_jax.models.flops import FLOPS_PER_MAC, forward_macs
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicated

Watch = Callable[..., None]
"""Is given the answers to some images, and which of them are right (N, T); of weights for several labels the numbers of
the images, and the rows of `multilabel.score`."""
Evaluate = Callable[[Labelled, Watch | None], Evaluation]


def make_evaluate(model: Model, *, global_batch: int, max_unreadable: int) -> Evaluate:
    """Compiles the step of an evaluation on all devices of all processes, for any number of datasets.

    Args:
      model: its parameters lie complete on every device of all processes.
      global_batch: examples of one step; rounded up to a multiple of the devices.
      max_unreadable: images that may be left out of a dataset, over all processes.

    Returns:
      A function of images, and of what is to see the answers as they come. It raises ValueError if more images than
      `max_unreadable`, or all, cannot be read, or if outputs are not finite.

    Raises:
      ValueError: the model has no classes or states no preparation of images.
    """
    model.require_classes()
    transform, num_outputs = model.require_transform(), model.architecture.num_classes
    mesh = build_mesh(jax.devices())
    sharding = batch_sharding(mesh)
    global_batch = -(-global_batch // mesh.size) * mesh.size

    def run(module: Any, batch: Batch, is_allowed_K: jax.Array, output_K: jax.Array) -> Results:
        logits_BK = module(normalise(batch.image_BHWC, model.architecture.compute_dtype)).logits_BK
        return score(logits_BK, batch) if model.is_multilabel else answer(logits_BK, batch, is_allowed_K, output_K)

    def place(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, replicated(mesh), lambda index: array[index])

    abstract = [jax.ShapeDtypeStruct((num_outputs,), dtype, sharding=replicated(mesh)) for dtype in (bool, np.int32)]
    label_shape = (num_outputs,) if model.is_multilabel else ()
    batch = abstract_batch(global_batch, transform.image_size, sharding, label_shape)
    step = jax.jit(placed_by(Placement(mesh))(run), out_shardings=replicated(mesh))
    compiled = step.lower(model.module, batch, *abstract).compile()
    gflops = _gflops(model)

    def evaluate(labelled: Labelled, watch: Watch | None = None) -> Evaluation:
        source, key = labelled.source, labelled.key
        stream = EvaluationStream(source, transform, global_batch, local_rows(sharding, global_batch))
        decoding = transform.max_image_megapixels, transform.value_range
        log = UnreadableLog(source, len(source), *decoding)  # counted at the end: one process must not stop alone
        output_K = np.zeros(num_outputs, np.int32)  # of one size, so that the step is compiled once for all datasets
        if key.has_loss:
            output_K[: len(key.output_L)] = key.output_L
        arguments = place(key.is_allowed_K), place(output_K)
        tally = (
            Scores(num_outputs) if model.is_multilabel else Tally(len(key.output_L), np.flatnonzero(key.is_allowed_K))
        )
        began = time.perf_counter()
        for record_N, rows in numbered_rows(
            lambda: open_placed(stream, sharding, log),
            lambda module, batch: compiled(module, batch, *arguments),
            model.module,
        ):
            seen: tuple[Any, Any] = record_N, rows
            if isinstance(tally, Scores):
                _require_finite(record_N, rows["probability_BK"], labelled, model)
                tally.add(rows)
            else:
                answers = Answers.of(record_N, rows)
                _require_finite(record_N, answers.probability_NT, labelled, model)
                seen = answers, key.is_right(record_N, answers.label_N, answers.class_NT)
                tally.add(*seen)
            if watch is not None:
                watch(*seen)
        seconds = time.perf_counter() - began
        unreadable = len(source) - tally.images
        log.require_few(unreadable, max_unreadable)
        if not tally.images:
            raise ValueError("No image could be read, so there is nothing to evaluate.")
        figures: dict[str, Any] = {
            "labelled": labelled,
            "unreadable": unreadable,
            "images_per_second": tally.images / seconds,
            "gflops_per_image": gflops,
        }
        if isinstance(tally, Scores):
            return MultilabelEvaluation(tally=tally, **figures)
        if tally.first_2LA is None:
            size = f"{len(tally.images_L):,} classes and {len(tally.answer_A):,} answers"
            labelled.notes.append(f"confusions are not counted: the matrix of {size} would take too much memory.")
        return ClassEvaluation(tally=tally, **figures)

    return evaluate


def _gflops(model: Model) -> float | None:
    """Of one image: by formula, or of a user's own network by counting in its program, where that is possible."""
    a = model.architecture
    try:
        macs = forward_macs(a) if a.is_standard else forward_macs(a, model.module)
    except ValueError:
        return None
    return FLOPS_PER_MAC * macs / 1e9


def _require_finite(record_N: np.ndarray, probabilities: np.ndarray, labelled: Labelled, model: Model) -> None:
    if len(odd := np.flatnonzero(~np.isfinite(probabilities).all(axis=1))):
        raise not_finite(model, labelled.source.name_of(int(record_N[odd[0]])))
