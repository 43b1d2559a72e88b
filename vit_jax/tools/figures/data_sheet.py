"""Sheets of the images that a run trains and evaluates on, exactly as the network receives them, with their labels.

Legend: N images, H W height and width, K classes.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch, normalise
from vit_jax.config import RunConfig
from vit_jax.config.lengths import convert_lengths
from vit_jax.data.stream import EvaluationStream, HostBatch
from vit_jax.data.subset import SubsetSource
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.objectives.classification import build_classification
from vit_jax.tools.figures.drawing import short
from vit_jax.tools.figures.network import Figure
from vit_jax.tools.figures.sheets import draw_sheet
from vit_jax.tools.figures.view import spread
from vit_jax.train.inputs import open_datasets, train_stream
from vit_jax.train.phases import apply_phase
from vit_jax.train.step import mix_batch, step_keys

COLUMNS = 8
LEAST_SHARE = 0.02  # of a label that a caption names


def draw_data(config: RunConfig, shown: int) -> dict[str, Figure]:
    """Return figures of the first step's training images, "train", and of evaluation images, "test".

    Their numbers are `image` float32 (N, H, W, 3) from 0 to 1, `label` float32 (N, K), of training
    images after mixing and smoothing, `mask` float32 (N,), 0 for an unreadable image, and `record`
    int64 (N,), the number in the split.

    Args:
      config: with `data`.
      shown: most images of each sheet. Training images are the first of step 0, in the size of its
        phase; evaluation images are evenly spread.

    Raises:
      ValueError: as for `open_datasets`.
    """
    datasets = open_datasets(config)
    objective = build_classification(config.objective)
    names = datasets.train.class_names
    phases = convert_lengths(config, len(datasets.train)).phases
    own, config = (
        config,
        apply_phase(config, phases[0]) if phases else config,
    )  # evaluations have no phases
    num_shown = min(shown, config.global_batch)
    key, _ = step_keys(config.seed, 0)
    # Each row is mixed with the one before it, the first one with the last.
    rows = np.arange(-1, num_shown) % config.global_batch
    trained = train_stream(config, datasets.train, rows, 0, 1)[0]
    batch = _batch(trained)
    dtype = config.model.compute_dtype
    image, label_NK = mix_batch(config.input, len(names), dtype, batch, key)
    if config.objective.kind == "classification":
        label_NK = objective.prepare(batch, label_NK, batch.mask_B, key).label_BK

    chosen = spread(len(datasets.test), shown)
    subset = SubsetSource(datasets.test, chosen)
    transform = build_evaluation_transform(own.input)
    tested = EvaluationStream(subset, transform, len(chosen), np.arange(len(chosen)))[0]
    return {
        "train": _figure(
            f"Training images of step 0: {config.data}, {config.input.train_split}",
            names,
            np.asarray(image, np.float32)[1:],
            np.asarray(label_NK)[1:],
            trained.mask[1:],
            trained.record_index[1:],
        ),
        "test": _figure(
            f"Evaluation images: {config.data}, {config.input.test_split}",
            names,
            np.asarray(normalise(jnp.asarray(tested.image), dtype), np.float32),
            np.asarray(_batch(tested).label_BK(len(names))),
            tested.mask,
            chosen,
        ),
    }


def _batch(host: HostBatch) -> Batch:
    return Batch(image_BHWC=host.image, label_B=host.label, mask_B=host.mask)


def _figure(
    title: str,
    names: tuple[str, ...],
    image: np.ndarray,
    label: np.ndarray,
    mask: np.ndarray,
    record: np.ndarray,
) -> Figure:
    image = np.clip((image + 1) / 2, 0, 1)
    captions = [
        caption(label_K, names) if mask else "unreadable"
        for label_K, mask in zip(label, mask, strict=True)
    ]
    starts = range(0, len(image), COLUMNS)
    png = draw_sheet(
        [list(image[start : start + COLUMNS]) for start in starts],
        title,
        captions=[captions[start : start + COLUMNS] for start in starts],
    )
    return Figure(
        png, {"image": image, "label": label, "mask": mask, "record": np.asarray(record, np.int64)}
    )


def caption(label_K: np.ndarray, names: tuple[str, ...]) -> str:
    """Return the classes of a label with their shares, the largest first, a line each: "cat 0.73"."""
    order = [k for k in np.argsort(-label_K, kind="stable")[:2] if label_K[k] >= LEAST_SHARE]
    return "\n".join(f"{short(names[k])} {label_K[k]:.2f}" for k in order)
