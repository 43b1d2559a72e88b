r"""Draw the figure of Fashion-MNIST in the README: test images and predictions. Needs matplotlib.

Run it:

    vit-jax pretrain --config=fashion:R14x0.5,epochs=8 --config.input.image_size=56,56 \
        --config.input.shift_pixels=4 --workdir=runs/fashion
    python docs/figures/fashion.py runs/fashion
"""

import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np

import vit_jax

NUM_IMAGES = 400
"""Test images among which those of the figure are found."""
NUM_COLUMNS = 10
BLUE = "#0072b2"
ORANGE = "#d55e00"


def choose_images(labels: np.ndarray, predictions: np.ndarray) -> list[int]:
    """Return the first image of each class, then the first of the other mistakes."""
    _, chosen = np.unique(labels, return_index=True)
    wrong = np.flatnonzero(labels != predictions)
    others = np.setdiff1d(wrong, chosen)
    return [*chosen.tolist(), *others[:NUM_COLUMNS].tolist()]


def main(workdir: str) -> None:
    """Draw two rows of images beside this file; wrong predictions are orange."""
    model = vit_jax.load_model(workdir)
    test = vit_jax.open_data("fashion", image_size=28, channels=1).test
    images = [test[index].image for index in range(NUM_IMAGES)]
    labels = np.array([test[index].label for index in range(NUM_IMAGES)])
    probabilities = model.predict(model.preprocess(images))
    predictions = probabilities.argmax(axis=1)

    figure, axes = plt.subplots(2, NUM_COLUMNS, figsize=(11, 2.9), layout="constrained")
    title = f"{model.architecture.name}, Fashion-MNIST: first image of each class, first mistakes"
    figure.suptitle(title, fontsize=10)
    chosen = choose_images(labels, predictions)
    for panel, index in zip(axes.ravel(), chosen, strict=True):
        panel.imshow(255 - images[index], cmap="gray", vmin=0, vmax=255)
        prediction = model.class_names[predictions[index]]
        words = f"{prediction}\n{probabilities[index].max():.0%}"
        color = BLUE
        if predictions[index] != labels[index]:
            words = f"{prediction}\nnot {model.class_names[labels[index]]}"
            color = ORANGE
        panel.set_title(words, fontsize=8, color=color)
        panel.axis("off")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
