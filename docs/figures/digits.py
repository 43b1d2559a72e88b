r"""Draw the figure of the README, from a run on the digits. Needs matplotlib.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/digits \
        --config.evaluation.every="2 epochs" --config.logging.every="20 steps"
    python docs/figures/digits.py runs/digits
"""

import json
import pathlib
import sys
from typing import Any

import cv2
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import vit_jax

SHOWN = 8
PIXELS = 160
OPACITY = 0.75
ORANGE = (0.90, 0.45, 0.0)


def read_metrics(workdir: str) -> list[dict]:
    """Return the lines of metrics of a run."""
    file = pathlib.Path(workdir) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def select_curve(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was written, and its values."""
    steps = []
    values = []
    for line in lines:
        if name in line:
            steps.append(line["step"])
            values.append(line[name])
    return steps, values


def overlay(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the enlarged image; patches with more attention are more orange."""
    size = (PIXELS, PIXELS)
    grey = cv2.resize(image, size, interpolation=cv2.INTER_NEAREST) / 255
    share = (weights / weights.max()).astype(np.float32)
    enlarged_share = cv2.resize(share, size, interpolation=cv2.INTER_NEAREST)
    opacity = OPACITY * enlarged_share[..., None]
    return grey * (1 - opacity) + np.array(ORANGE) * opacity


def draw_curves(figure: Any, lines: list[dict], title: str) -> None:
    """Draw test loss and accuracy over a run."""
    axes = figure.subplots()
    steps, losses = select_curve(lines, "test_loss")
    axes.plot(steps, losses, color="#888888", linestyle="--", label="test loss (left)")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")

    accuracy = axes.twinx()
    steps, shares = select_curve(lines, "test_accuracy")
    percentages = [100 * share for share in shares]
    accuracy.plot(steps, percentages, color="#0072b2", label="test accuracy (right)")
    accuracy.set_ylabel("accuracy (%)")
    accuracy.set_ylim(0, 101)

    handles = [*axes.get_lines(), *accuracy.get_lines()]
    labels = [handle.get_label() for handle in handles]
    axes.legend(handles, labels, loc="center right", frameon=False)
    axes.set_title(title, fontsize=10)


def draw_attention(figure: Any, model: vit_jax.Model) -> None:
    """Draw the attention of the last block over test images, with the predictions."""
    digits = load_digits().images[-SHOWN:]
    images = model.preprocess([(digit * 255 / 16).astype("uint8") for digit in digits])
    output = model(images, intermediates=("attention",))
    last_block = np.asarray(output.attention_LBTQS)[-1]
    attention = last_block.mean(axis=(1, 2))
    labels = model.predict(images).argmax(axis=1)

    panels = figure.subplots(2, SHOWN // 2).ravel()
    figure.suptitle(
        "Attention of the last block over each digit (orange: most), and the prediction",
        fontsize=10,
    )
    for panel, image, weights, label in zip(panels, images, attention, labels, strict=True):
        panel.imshow(overlay(255 - image, weights.reshape(model.architecture.grid)))
        panel.set_title(f"prediction: {model.class_names[label]}", fontsize=9)
        panel.axis("off")


def main(workdir: str) -> None:
    """Draw the curves and the attention of a run, beside this file."""
    model = vit_jax.load_model(workdir)
    figure = plt.figure(figsize=(11, 3.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    title = f"{model.architecture.name}, 100 epochs of the digits"
    draw_curves(left, read_metrics(workdir), title)
    draw_attention(right, model)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
