r"""The picture of the README, from a run on the digits. Needs matplotlib.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/digits \
        --config.evaluation.every="2 epochs" --config.logging.every="20 steps"
    python docs/figures/digits.py runs/digits
"""

import json
import pathlib
import sys

import cv2
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import vit_jax

SHOWN = 8
PIXELS = 160
OPACITY = 0.75
ORANGE = (0.90, 0.45, 0.0)


def curve(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a metric was written, and its values."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def overlay(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the enlarged image; a patch is the more orange, the more attention it gets."""
    size = (PIXELS, PIXELS)
    grey = cv2.resize(image, size, interpolation=cv2.INTER_NEAREST) / 255
    share = cv2.resize(
        (weights / weights.max()).astype(np.float32), size, interpolation=cv2.INTER_NEAREST
    )
    opacity = OPACITY * share[..., None]
    return grey * (1 - opacity) + np.array(ORANGE) * opacity


def main(workdir: str) -> None:
    """Draw test loss and accuracy over the run, and the attention of the last block over test images."""
    lines = [
        json.loads(line)
        for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    ]
    model = vit_jax.load_model(workdir)
    digits = load_digits().images[-SHOWN:]
    images = model.preprocess([(digit * 255 / 16).astype("uint8") for digit in digits])
    attention = np.asarray(model(images, intermediates=("attention",)).attention_LBTQS)[-1].mean(
        axis=(1, 2)
    )
    names = [model.class_names[number] for number in model.predict(images).argmax(axis=1)]

    figure = plt.figure(figsize=(11, 3.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    axes = left.subplots()
    axes.plot(*curve(lines, "test_loss"), color="#888888", linestyle="--", label="test loss (left)")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    accuracy = axes.twinx()
    steps, values = curve(lines, "test_accuracy")
    accuracy.plot(
        steps, [100 * value for value in values], color="#0072b2", label="test accuracy (right)"
    )
    accuracy.set_ylabel("accuracy (%)")
    accuracy.set_ylim(0, 101)
    handles = [*axes.get_lines(), *accuracy.get_lines()]
    axes.legend(
        handles, [handle.get_label() for handle in handles], loc="center right", frameon=False
    )
    axes.set_title(f"{model.architecture.name}, 100 epochs of the digits", fontsize=10)

    panels = right.subplots(2, SHOWN // 2)
    right.suptitle(
        "Attention of the last block over each digit (orange: most), and the prediction",
        fontsize=10,
    )
    for panel, digit, weights, name in zip(panels.ravel(), images, attention, names, strict=True):
        panel.imshow(overlay(255 - digit, weights.reshape(model.architecture.grid)))
        panel.set_title(f"prediction: {name}", fontsize=9)
        panel.axis("off")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
