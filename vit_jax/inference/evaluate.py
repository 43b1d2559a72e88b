"""Accuracy of weights on a labelled dataset."""

import contextlib
from collections.abc import Iterator, Sequence

import jax

from vit_jax.arrays import Batch, normalise
from vit_jax.data.pipeline import evaluation_batches
from vit_jax.data.placement import local_rows, place, prefetch
from vit_jax.data.records import Source, few
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.data.workers import choose_parallelism
from vit_jax.evals.per_class import PerClassEvaluator, PerClassResult, per_class_sums
from vit_jax.inference.classifier import Classifier
from vit_jax.sharding import batch_sharding, build_mesh, replicated


def replicated_everywhere(devices: Sequence[jax.Device]) -> jax.sharding.NamedSharding:
    """Whole on every device: what `evaluate` expects of the classifier's parameters."""
    return replicated(build_mesh(devices))


def evaluate(classifier: Classifier, source: Source, *, global_batch: int, max_unreadable: int) -> PerClassResult:
    """Evaluates on all devices of all processes; the classifier's parameters are replicated over them.

    Args:
      classifier: built with a sharding over `jax.devices()`.
      source: labels numbered as the classifier's classes.
      global_batch: examples of one step; rounded up to a multiple of the devices.
      max_unreadable: images that may be left out, over all processes.

    Raises:
      ValueError: more images than `max_unreadable`, or all, cannot be read.
    """
    mesh = build_mesh(jax.devices())
    sharding = batch_sharding(mesh)
    global_batch = -(-global_batch // mesh.size) * mesh.size
    rows = local_rows(sharding, global_batch)
    dtype = classifier.architecture.compute_dtype
    height, width = classifier.architecture.image_size
    log = UnreadableLog(source, max_unreadable=len(source))  # counted at the end: one process must not stop alone

    @contextlib.contextmanager
    def open_batches() -> Iterator[Iterator[Batch]]:
        parallelism = choose_parallelism(batch_bytes=len(rows) * height * width * 3)
        with evaluation_batches(
            source, classifier.transform, global_batch=global_batch, rows=rows, parallelism=parallelism
        ) as batches:
            yield prefetch(log.watch(batches), lambda batch: place(batch, sharding, global_batch))

    def step(model: object, batch: Batch) -> dict[str, jax.Array]:
        output = model(normalise(batch.image_BHWC, dtype))  # type: ignore[operator]
        return per_class_sums(output.logits_BK, batch)

    result = PerClassEvaluator(open_batches, jax.jit(step, out_shardings=replicated(mesh))).run(classifier.model)
    if (missing := len(source) - int(result.images_K.sum())) > max_unreadable:
        names = few([source.name_of(index) for index in log.reasons])
        raise ValueError(
            f"{missing} images cannot be read, and --max_unreadable is {max_unreadable}{names and f': {names}'}. "
            "Replace or remove them, or raise it."
        )
    return result


def report(result: PerClassResult, classifier: Classifier, data: str) -> str:
    """The figures, one to a line, under where the weights come from and what they were judged on."""
    lines = [f"weights        {classifier.source}", f"data           {data}"]
    for name, value in result.values():
        text = f"{value:,.0f}" if name == "images" else f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        lines.append(f"{name:<14} {text}")
    return "\n".join(lines)
