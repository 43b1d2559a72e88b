"""Sheets of a run's training and evaluation images with their labels, as the network receives them.

Legend: N images, H W height and width, K classes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch, normalise
from vit_jax.config import RunConfig
from vit_jax.config.lengths import convert_lengths
from vit_jax.data.records import Source
from vit_jax.data.stream import EvaluationStream, HostBatch
from vit_jax.data.subset import SubsetSource
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.objectives.classification import build_classification
from vit_jax.tools.figures.drawing import shorten
from vit_jax.tools.figures.network import Figure
from vit_jax.tools.figures.sheets import draw_sheet, to_pixels
from vit_jax.tools.figures.view import spread
from vit_jax.train.inputs import open_datasets, train_stream
from vit_jax.train.phases import apply_phase
from vit_jax.train.step import mix_batch, step_keys

NUM_COLUMNS = 8
MOST_LABELS = 2  # classes in a caption
LEAST_SHARE = 0.02  # smallest share of a class in a caption


def draw_data(config: RunConfig, shown: int) -> dict[str, Figure]:
    """Return figures of the first step's training images, "train", and of evaluation images, "test".

    Their numbers are `image` float32 (N, H, W, 3) from 0 to 1, `label` float32 (N, K), of training
    images after mixing and smoothing, `mask` float32 (N,), 0 for an unreadable image, and `record`
    int64 (N,), the number in the split.

    Args:
      config: the config of the run, with `data`.
      shown: largest number of images of a sheet. Training images are the first of step 0, in the
        size of its phase; evaluation images are evenly spread, in the size without phases.

    Raises:
      ValueError: see `open_datasets`.
    """
    datasets = open_datasets(config)
    class_names = datasets.train.class_names
    return {
        "train": _draw_training(config, datasets.train, shown),
        "test": _draw_evaluation(config, datasets.test, class_names, shown),
    }


def _draw_training(config: RunConfig, source: Source, shown: int) -> Figure:
    """Draw the first images of step 0, as the step mixes and smooths them."""
    phases = convert_lengths(config, len(source)).earlier_phases
    if phases:
        config = apply_phase(config, phases[0])

    # Each row is mixed with the one before it, the first one with the last.
    num_shown = min(shown, config.global_batch)
    rows = np.arange(-1, num_shown) % config.global_batch
    examples = train_stream(config, source, rows, 0, 1)[0]
    batch = _to_batch(examples)

    key, _ = step_keys(config.seed, 0)
    num_classes = len(source.class_names)
    dtype = _find_dtype(config)
    image_NHWC, label_NK = mix_batch(config.input, num_classes, dtype, batch, key)
    if config.objective.kind == "classification":
        objective = build_classification(config.objective)
        label_NK = objective.prepare(batch, label_NK, batch.mask_B, key).label_BK

    return _draw_images(
        f"Training images of step 0: {config.data}, {config.input.train_split}",
        source.class_names,
        image_NHWC[1:],
        np.asarray(label_NK)[1:],
        examples.mask[1:],
        examples.record_index[1:],
        reads_bands=config.input.reads_bands,
    )


def _draw_evaluation(
    config: RunConfig,
    source: Source,
    class_names: tuple[str, ...],
    shown: int,
) -> Figure:
    """Draw evenly spread images of the test split."""
    records = spread(len(source), shown)
    transform = build_evaluation_transform(config.input)
    subset = SubsetSource(source, records)
    stream = EvaluationStream(subset, transform, len(records), np.arange(len(records)))
    examples = stream[0]
    image_NHWC = normalise(jnp.asarray(examples.image), _find_dtype(config))
    label_NK = _to_batch(examples).label_BK(len(class_names))
    return _draw_images(
        f"Evaluation images: {config.data}, {config.input.test_split}",
        class_names,
        image_NHWC,
        np.asarray(label_NK),
        examples.mask,
        records,
        reads_bands=config.input.reads_bands,
    )


def _find_dtype(config: RunConfig) -> str:
    """Return the dtype of pixels; without devices `auto` is float32."""
    dtype = config.model.compute_dtype
    if dtype == "auto":
        return "float32"
    return dtype


def _to_batch(examples: HostBatch) -> Batch:
    return Batch(
        image_BHWC=examples.image,
        label_B=examples.label,
        mask_B=examples.mask,
    )


def _draw_images(
    title: str,
    class_names: tuple[str, ...],
    image_NHWC: jax.Array,
    label_NK: np.ndarray,
    mask_N: np.ndarray,
    record_N: np.ndarray,
    *,
    reads_bands: bool,
) -> Figure:
    """Draw images, from -1 to 1 or normalised bands, with their labels as captions."""
    values_NHWC = np.asarray(image_NHWC, np.float32)
    pixels_NHWC = np.clip((values_NHWC + 1) / 2, 0, 1)
    shown_NHWC = pixels_NHWC
    if reads_bands:
        shown_NHWC = to_pixels(values_NHWC)

    captions = []
    for label_K, mask in zip(label_NK, mask_N, strict=True):
        caption = "unreadable"
        if mask:
            caption = write_caption(label_K, class_names)
        captions.append(caption)

    cells = []
    caption_rows = []
    for first in range(0, len(pixels_NHWC), NUM_COLUMNS):
        end = first + NUM_COLUMNS
        cells.append(shown_NHWC[first:end])
        caption_rows.append(captions[first:end])

    numbers = {
        "image": pixels_NHWC,
        "label": label_NK,
        "mask": mask_N,
        "record": np.asarray(record_N, np.int64),
    }
    return Figure(draw_sheet(cells, title, captions=caption_rows), numbers)


def write_caption(label_K: np.ndarray, class_names: tuple[str, ...]) -> str:
    """Return the classes of a label with their shares, the largest first, a line each: "cat 0.73"."""
    lines = []
    by_share = np.argsort(-label_K, kind="stable")
    for index in by_share[:MOST_LABELS]:
        share = label_K[index]
        if share >= LEAST_SHARE:
            class_name = shorten(class_names[index])
            lines.append(f"{class_name} {share:.2f}")
    return "\n".join(lines)
