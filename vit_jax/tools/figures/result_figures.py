"""Figures of an evaluation as PNG files: calibration, confusion matrix, most confident mistakes."""

import math

import numpy as np

from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.multilabel import MultilabelMetrics
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.tools.figures.drawing import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    TILE_PIXELS,
    new_figure,
    short,
    tile,
    to_bytes,
)

MOST_NAMED = 30  # classes of a matrix with their names
MOST_CELLS = 250  # on one side of a matrix
MOST_COUNTED = 12  # classes of a matrix with numbers in its cells
FEW_IMAGES = 10  # in a bin; fewer make its accuracy uncertain


def draw(
    metrics: ClassMetrics | MultilabelMetrics, transform: EvaluationTransform
) -> dict[str, bytes]:
    """Return the figures of an evaluation by name, the widest first; `transform` decodes images."""
    if isinstance(metrics, MultilabelMetrics):
        return {"average_precision": draw_average_precision(metrics)}
    figures = {"mistakes": draw_mistakes(metrics, transform)}
    if metrics.confusion_2LA is not None:
        figures["confusion"] = draw_confusion(metrics)
    return figures | {"reliability": draw_reliability(metrics)}


def draw_average_precision(metrics: MultilabelMetrics) -> bytes:
    """Draw the average precision of the classes with images, the highest first; of many classes the lowest."""
    known = [one for one in metrics.details()["classes"] if one["images"]]
    shown = sorted(known, key=lambda one: -one["average_precision"])[-MOST_NAMED:]
    figure = new_figure(5, 1.2 + 0.25 * len(shown))
    axes = figure.subplots()
    names = [f"{short(one['class'])} ({one['images']:,})" for one in shown]
    axes.barh(range(len(shown)), [one["average_precision"] for one in shown], color=BLUE)
    mean = metrics.values()["mean_average_precision"]
    axes.axvline(mean, color=ORANGE, linestyle="--", label="mean of all classes")
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="average precision of a class (and its images)")
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    return to_bytes(figure)


def draw_reliability(metrics: ClassMetrics) -> bytes:
    """Draw accuracy against confidence in bins, and the number of images in each; bins with few images are pale."""
    bins = [one for one in metrics.counts.calibration.bins() if one.images]
    figure = new_figure(5, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="perfect calibration")
    few, many = (
        [one for one in bins if (one.images < FEW_IMAGES) == is_few] for is_few in (True, False)
    )
    kinds = ((many, BLUE, "accuracy"), (few, SKY, f"accuracy, fewer than {FEW_IMAGES} images"))
    for chosen, colour, label in kinds:
        if chosen:
            place = {
                "x": [one.low for one in chosen],
                "width": [one.high - one.low for one in chosen],
            }
            sides = place | {"align": "edge", "edgecolor": "white", "color": colour}
            above.bar(height=[one.accuracy for one in chosen], label=label, **sides)
            below.bar(height=[one.images for one in chosen], **sides)
    means = [one.confidence for one in bins]
    above.plot(
        means,
        [one.accuracy for one in bins],
        "o",
        color=ORANGE,
        clip_on=False,
        label="mean confidence of a bin",
    )
    error = metrics.counts.calibration.error
    above.set(
        ylim=(0, 1), ylabel="accuracy (fraction)", title=f"expected calibration error {error:.2%}"
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    below.set(
        xlim=(0, 1),
        xlabel="confidence: probability of the predicted class",
        ylabel="images",
        yscale="log",
    )
    below.set_ylim(bottom=0.5)  # a bin of one image has a bar too
    return to_bytes(figure)


def draw_confusion(metrics: ClassMetrics) -> bytes:
    """Draw the share of each class's images by predicted class; of a large matrix, the largest share of each block.

    The cells of a small matrix have the number of images.
    """
    label_map = metrics.labelled.label_map
    assert metrics.confusion_2LA is not None
    counts_LA = metrics.confusion_2LA.sum(axis=0)[label_map.listed]
    shares_LA = counts_LA / np.maximum(counts_LA.sum(axis=1, keepdims=True), 1)
    cells, blocks = _pool(shares_LA)
    size = max(4.0, 0.25 * min(max(shares_LA.shape), 24))
    figure = new_figure(size + 1, size)
    from matplotlib.colors import PowerNorm

    axes = figure.subplots()
    extent = (-0.5, shares_LA.shape[1] - 0.5, shares_LA.shape[0] - 0.5, -0.5)
    norm = PowerNorm(0.5, 0, 1)  # few confusions are frequent
    image = axes.imshow(
        cells, norm=norm, cmap="cividis", interpolation="nearest", aspect="auto", extent=extent
    )
    of_blocks = "" if blocks == (1, 1) else f", the largest of {blocks[0]} × {blocks[1]}"
    figure.colorbar(image, label=f"share of the class's images{of_blocks}")
    if max(counts_LA.shape) <= MOST_COUNTED:
        for row, column in np.argwhere(counts_LA > 0):
            colour = (
                "black" if shares_LA[row, column] > 0.25 else "white"
            )  # half of the range of colours
            axes.text(
                column,
                row,
                f"{counts_LA[row, column]:,}",
                color=colour,
                fontsize=7,
                ha="center",
                va="center",
            )
    names = metrics.labelled.source.class_names
    labels = [short(names[label]) for label in label_map.listed]
    outputs = [short(label_map.output_names[output]) for output in metrics.output_A]
    axes.set_xlabel(
        "predicted class"
        if len(outputs) <= MOST_NAMED
        else "predicted class: column of confusion.csv"
    )
    axes.set_ylabel("class" if len(labels) <= MOST_NAMED else "class: line of confusion.csv")
    if len(labels) <= MOST_NAMED:
        axes.set_yticks(range(len(labels)), labels)
    if len(outputs) <= MOST_NAMED:
        axes.set_xticks(
            range(len(outputs)), outputs, rotation=90 if max(map(len, outputs)) > 2 else 0
        )
    return to_bytes(figure)


def _pool(shares_LA: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the largest cell of each block, and the size of blocks: at most `MOST_CELLS` on a side."""
    rows, columns = (-(-size // MOST_CELLS) for size in shares_LA.shape)
    padded = np.pad(
        shares_LA, [(0, -shares_LA.shape[0] % rows), (0, -shares_LA.shape[1] % columns)]
    )
    split = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return split.max(axis=(1, 3)), (rows, columns)


def draw_mistakes(metrics: ClassMetrics, transform: EvaluationTransform) -> bytes:
    """Draw the most confident mistakes: image (decoded as by `transform`), class, prediction and its probability."""
    mistakes = metrics.wrong
    columns = min(6, max(len(mistakes), 3))
    rows = max(math.ceil(len(mistakes) / columns), 1)
    figure = new_figure(1.7 * columns, 2.1 * rows + 0.5)
    title = (
        "most confident mistakes: class → prediction and its probability"
        if mistakes
        else "no mistake"
    )
    figure.suptitle(title, fontsize=10)
    for axes in (every := figure.subplots(rows, columns, squeeze=False).ravel()):
        axes.axis("off")
    for axes, mistake, words in zip(every, mistakes, metrics.mistakes(), strict=False):
        stored = metrics.labelled.source[mistake.record].image
        axes.imshow(_tile(stored, transform), interpolation="nearest")
        prediction = f"{short(words['answer'])} {words['probability']:.0%}"
        axes.set_title(f"{short(words['class'])}\n→ {prediction}", fontsize=8)
    return to_bytes(figure)


def _tile(stored: bytes | np.ndarray, transform: EvaluationTransform) -> np.ndarray:
    """Return the image, smaller; a grey one if it has become unreadable."""
    try:
        megapixels = transform.max_image_megapixels
        is_upright = transform.exif_orientation
        return tile(decode(stored, megapixels, is_upright, transform.value_range))
    except UnreadableImage:
        return np.full((TILE_PIXELS, TILE_PIXELS, 3), 128, np.uint8)
