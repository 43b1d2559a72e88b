r"""The picture of the README, from a run on the digits. Needs matplotlib.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/digits \
        --config.evaluation.every="2 epochs" --config.logging.every="20 steps"
    python docs/figures/digits.py runs/digits
"""

import json
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import vit_jax

SHOWN = 8


def curve(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a metric was written, and its values."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def main(workdir: str) -> None:
    """Draws test loss and accuracy over the run, and where the last block of the trained network looks."""
    lines = [json.loads(line) for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    model = vit_jax.load_model(workdir)
    digits = load_digits().images[-SHOWN:]
    images = model.preprocess([(digit * 255 / 16).astype("uint8") for digit in digits])
    attention = np.asarray(model(images, taps=("attention",)).attention_LBTQS)[-1].mean(axis=(1, 2))
    names = [model.class_names[number] for number in model.predict(images).argmax(axis=1)]

    figure = plt.figure(figsize=(11, 3.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    axes = left.subplots()
    axes.plot(*curve(lines, "test_loss"), color="#888888", linestyle="--", label="test loss (left)")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    accuracy = axes.twinx()
    steps, values = curve(lines, "test_accuracy")
    accuracy.plot(steps, [100 * value for value in values], color="#0072b2", label="test accuracy (right)")
    accuracy.set_ylabel("accuracy (%)")
    accuracy.set_ylim(0, 101)
    handles = [*axes.get_lines(), *accuracy.get_lines()]
    axes.legend(handles, [handle.get_label() for handle in handles], loc="center right", frameon=False)
    axes.set_title(f"{model.architecture.name}, 100 epochs of the digits", fontsize=10)

    panels = right.subplots(2, SHOWN)
    right.suptitle("Predicted class of a digit; attention of the last block, bright: most", fontsize=10)
    for column, digit, weights, name in zip(panels.T, images, attention, names, strict=True):
        column[0].imshow(255 - digit)
        column[0].set_title(name, fontsize=11)
        column[1].imshow(weights.reshape(model.architecture.grid), cmap="cividis")
        for panel in column:
            panel.axis("off")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
