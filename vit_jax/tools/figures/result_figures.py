"""Figures of an evaluation as PNG files: calibration, confusion matrix, most confident mistakes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.calibration import Bin
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.tools.figures.drawing import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    TILE_PIXELS,
    new_figure,
    shorten,
    shrink,
    to_bytes,
)
from vit_jax.tools.figures.sheets import to_pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 30  # classes of a matrix with class names
MOST_CELLS = 250  # cells on one side of a matrix
MOST_COUNTED = 12  # classes of a matrix with numbers in its cells
FEW_IMAGES = 10  # images of a bin; fewer make its accuracy uncertain


def draw(
    metrics: ClassMetrics | MultilabelMetrics,
    transform: EvaluationTransform,
) -> dict[str, bytes]:
    """Return the figures of an evaluation by name, the widest first; `transform` decodes images."""
    if isinstance(metrics, MultilabelMetrics):
        return {"average_precision": draw_average_precision(metrics)}
    figures = {"mistakes": draw_mistakes(metrics, transform)}
    if metrics.confusion_2LA is not None:
        figures["confusion"] = draw_confusion(metrics)
    return figures | {"reliability": draw_reliability(metrics)}


def draw_average_precision(metrics: MultilabelMetrics) -> bytes:
    """Draw the average precision of classes with images, the highest first; the lowest of many."""
    details = metrics.details()
    known = [entry for entry in details["classes"] if entry["images"]]
    known.sort(key=lambda entry: -entry["average_precision"])
    shown = known[-MOST_NAMED:]

    names = []
    precisions = []
    for entry in shown:
        names.append(f"{shorten(entry['class'])} ({entry['images']:,})")
        precisions.append(entry["average_precision"])

    positions = range(len(shown))
    figure = new_figure(5, 1.2 + 0.25 * len(shown))
    axes = figure.subplots()
    axes.barh(positions, precisions, color=BLUE)
    mean = metrics.values()["mean_average_precision"]
    axes.axvline(mean, color=ORANGE, linestyle="--", label="mean of all classes")
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="average precision of a class (and its images)")
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    return to_bytes(figure)


def draw_reliability(metrics: ClassMetrics) -> bytes:
    """Draw accuracy against confidence in bins, and the number of images in each.

    Bins with few images are pale.
    """
    calibration = metrics.counts.calibration
    many = list[Bin]()
    few = list[Bin]()
    confidences = []
    accuracies = []
    for interval in calibration.bins():
        if not interval.images:
            continue
        confidences.append(interval.confidence)
        accuracies.append(interval.accuracy)
        if interval.images >= FEW_IMAGES:
            many.append(interval)
        else:
            few.append(interval)

    figure = new_figure(5, 6)
    above, below = figure.subplots(
        2,
        1,
        sharex=True,
        height_ratios=(3, 1),
    )
    above.plot(
        [0, 1],
        [0, 1],
        color=GREY,
        linestyle="--",
        label="perfect calibration",
    )
    if many:
        _draw_bins(above, below, many, BLUE, "accuracy")
    if few:
        label = f"accuracy, fewer than {FEW_IMAGES} images"
        _draw_bins(above, below, few, SKY, label)
    above.plot(
        confidences,
        accuracies,
        "o",
        label="mean confidence of a bin",
        color=ORANGE,
        clip_on=False,
    )

    title = f"expected calibration error {calibration.error:.2%}"
    above.set(ylim=(0, 1), ylabel="accuracy (fraction)", title=title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    below.set(
        xlim=(0, 1),
        xlabel="confidence: probability of the predicted class",
        ylabel="images",
        yscale="log",
    )
    below.set_ylim(bottom=0.5)  # a bin of one image has a bar too
    return to_bytes(figure)


def _draw_bins(
    above: "Axes",
    below: "Axes",
    bins: Sequence[Bin],
    colour: str,
    label: str,
) -> None:
    """Draw bars of accuracy above, and of the number of images below."""
    lows = []
    widths = []
    accuracies = []
    num_images = []
    for interval in bins:
        lows.append(interval.low)
        widths.append(interval.high - interval.low)
        accuracies.append(interval.accuracy)
        num_images.append(interval.images)

    style: dict[str, Any] = {
        "align": "edge",
        "edgecolor": "white",
        "color": colour,
    }
    above.bar(lows, accuracies, widths, label=label, **style)
    below.bar(lows, num_images, widths, **style)


def draw_confusion(metrics: ClassMetrics) -> bytes:
    """Draw the share of each class's images by predicted class.

    The cells of a large matrix are the largest share of each block. A small matrix has the number
    of images in its cells.
    """
    from matplotlib.colors import PowerNorm

    assert metrics.confusion_2LA is not None
    listed = metrics.labelled.label_map.listed
    counts_LA = metrics.confusion_2LA.sum(axis=0)[listed]
    num_images_L1 = counts_LA.sum(axis=1, keepdims=True)
    shares_LA = counts_LA / np.maximum(num_images_L1, 1)
    cells, blocks = _pool(shares_LA)
    num_rows, num_columns = shares_LA.shape

    num_named = min(max(num_rows, num_columns), 24)
    size = max(4.0, 0.25 * num_named)
    figure = new_figure(size + 1, size)
    axes = figure.subplots()
    image = axes.imshow(
        cells,
        norm=PowerNorm(0.5, 0, 1),  # most confusions are rare
        cmap="cividis",
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, num_columns - 0.5, num_rows - 0.5, -0.5),
    )
    label = "share of the class's images"
    if blocks != (1, 1):
        label += f", the largest of {blocks[0]} × {blocks[1]}"
    figure.colorbar(image, label=label)
    if max(counts_LA.shape) <= MOST_COUNTED:
        _write_counts(axes, counts_LA, shares_LA)
    _name_classes(axes, metrics)
    return to_bytes(figure)


def _write_counts(
    axes: "Axes",
    counts_LA: np.ndarray,
    shares_LA: np.ndarray,
) -> None:
    """Write the number of images into the cells of a matrix."""
    for row, column in np.argwhere(counts_LA > 0):
        count = counts_LA[row, column]
        is_bright = shares_LA[row, column] > 0.25  # half of the range of colours
        axes.text(
            column,
            row,
            f"{count:,}",
            color="black" if is_bright else "white",
            fontsize=7,
            ha="center",
            va="center",
        )


def _name_classes(axes: "Axes", metrics: ClassMetrics) -> None:
    """Write the names of classes and outputs beside a matrix, if they are few."""
    label_map = metrics.labelled.label_map
    axes.set_xlabel("predicted class: column of confusion.csv")
    num_outputs = len(metrics.output_A)
    if num_outputs <= MOST_NAMED:
        axes.set_xlabel("predicted class")
        output_names = label_map.output_names
        names = [shorten(output_names[output]) for output in metrics.output_A]
        longest = max(map(len, names))
        rotation = 90 if longest > 2 else 0
        axes.set_xticks(range(num_outputs), names, rotation=rotation)

    axes.set_ylabel("class: line of confusion.csv")
    num_labels = len(label_map.listed)
    if num_labels <= MOST_NAMED:
        axes.set_ylabel("class")
        class_names = metrics.labelled.source.class_names
        names = [shorten(class_names[label]) for label in label_map.listed]
        axes.set_yticks(range(num_labels), names)


def _pool(shares_LA: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the largest cell of each block, at most `MOST_CELLS` on a side, and their size."""
    num_rows, num_columns = shares_LA.shape
    block_rows = math.ceil(num_rows / MOST_CELLS)
    block_columns = math.ceil(num_columns / MOST_CELLS)
    missing_rows = -num_rows % block_rows
    missing_columns = -num_columns % block_columns
    padded = np.pad(shares_LA, [(0, missing_rows), (0, missing_columns)])
    padded_rows, padded_columns = padded.shape
    blocks = padded.reshape(
        padded_rows // block_rows,
        block_rows,
        padded_columns // block_columns,
        block_columns,
    )
    return blocks.max(axis=(1, 3)), (block_rows, block_columns)


def draw_mistakes(metrics: ClassMetrics, transform: EvaluationTransform) -> bytes:
    """Draw the most confident mistakes: image, class, prediction and its probability."""
    mistakes = metrics.most_confident_mistakes
    num_columns = max(3, min(6, len(mistakes)))
    num_rows = max(1, math.ceil(len(mistakes) / num_columns))
    figure = new_figure(1.7 * num_columns, 2.1 * num_rows + 0.5)
    title = "no mistake"
    if mistakes:
        title = "most confident mistakes: class → prediction and its probability"
    figure.suptitle(title, fontsize=10)

    all_axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes in all_axes:
        axes.axis("off")
    named_mistakes = metrics.name_mistakes()
    for axes, mistake, named in zip(all_axes, mistakes, named_mistakes, strict=False):
        record = metrics.labelled.source[mistake.record]
        tile = _read_tile(record.image, transform)
        axes.imshow(tile, interpolation="nearest")
        class_name = shorten(named["class"])
        prediction = shorten(named["answer"])
        title = f"{class_name}\n→ {prediction} {named['probability']:.0%}"
        axes.set_title(title, fontsize=8)
    return to_bytes(figure)


def _read_tile(stored: bytes | np.ndarray, transform: EvaluationTransform) -> np.ndarray:
    """Return the image, smaller; a grey one if it has become unreadable."""
    try:
        image = decode(
            stored,
            transform.max_image_megapixels,
            transform.exif_orientation,
            transform.value_range,
            transform.bands,
        )
        if transform.bands is not None:
            complete = transform.bands.complete(image)
            (image,) = to_pixels(complete[None])
        return shrink(image)
    except UnreadableImage:
        return np.full((TILE_PIXELS, TILE_PIXELS, 3), 128, np.uint8)
