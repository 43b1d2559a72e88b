"""Accuracy of weights on a labelled dataset."""

from typing import Any

import jax

from vit_jax.api import Model
from vit_jax.arrays import Batch, normalise
from vit_jax.data.placement import local_rows, open_placed
from vit_jax.data.records import Source, few
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals.per_class import PerClassResult, evaluate_per_class, per_class_sums
from vit_jax.files import printable
from vit_jax.sharding import batch_sharding, build_mesh, replicated


def evaluate(model: Model, source: Source, *, global_batch: int, max_unreadable: int) -> PerClassResult:
    """Evaluates on all devices of all processes.

    Args:
      model: its parameters lie complete on every device of all processes.
      source: labels numbered as the model's classes.
      global_batch: examples of one step; rounded up to a multiple of the devices.
      max_unreadable: images that may be left out, over all processes.

    Raises:
      ValueError: more images than `max_unreadable`, or all, cannot be read; or the model has no classes or states no
        preparation of images.
    """
    model.require_classes()
    mesh = build_mesh(jax.devices())
    sharding = batch_sharding(mesh)
    global_batch = -(-global_batch // mesh.size) * mesh.size
    stream = EvaluationStream(source, model.require_transform(), global_batch, local_rows(sharding, global_batch))
    megapixels = stream.transform.max_image_megapixels
    log = UnreadableLog(source, len(source), megapixels)  # counted at the end: one process must not stop alone

    def step(module: Any, batch: Batch) -> dict[str, jax.Array]:
        image_BHWC = normalise(batch.image_BHWC, model.architecture.compute_dtype)
        return per_class_sums(module(image_BHWC).logits_BK, batch)

    jitted = jax.jit(step, out_shardings=replicated(mesh))
    result = evaluate_per_class(lambda: open_placed(stream, sharding, log), jitted, model.module)
    if (missing := len(source) - int(result.images_K.sum())) > max_unreadable:
        names = few([source.name_of(index) for index in log.met])
        raise ValueError(
            f"{missing} images cannot be read, and --max_unreadable is {max_unreadable}{names and f': {names}'}. "
            "Replace or remove them, or raise it."
        )
    return result


def report(result: PerClassResult, weights: str, data: str) -> str:
    """The figures, one to a line, under the source of the weights and the data that they were evaluated on."""
    lines = [f"weights        {printable(weights)}", f"data           {printable(data)}"]
    for name, value in result.values():
        text = f"{value:,.0f}" if name == "images" else f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        lines.append(f"{name:<14} {text}")
    return "\n".join(lines)
