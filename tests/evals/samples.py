"""Small classifiers with seeded parameters, and image files, for these tests and those of the verbs."""

import dataclasses

import cv2
import jax
import jax.numpy as jnp
import numpy as np

from tests.weights.small_networks import VIT, weights_of
from vit_jax.arrays import normalise
from vit_jax.evals.evaluate import make_evaluate
from vit_jax.evals.feature_cache import Cache
from vit_jax.evals.features import Extractor
from vit_jax.train.lifecycle.lock import WorkdirLock, is_abandoned

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
SEVEN = dataclasses.replace(VIT, num_classes=len(NAMES))
DIRECT = {
    "image_size": [8, 12],
    "resize": "direct",
    "crop_fraction": 1.0,
    "pixel_range": [-1.0, 1.0],
}
CROPPED = DIRECT | {"resize": "short_side", "crop_fraction": 0.5}


def sample_weights(a=SEVEN, preprocessing=DIRECT, class_names=NAMES, **details):
    return weights_of(
        a,
        preprocessing=preprocessing,
        class_names=class_names,
        source="w.npz (released)",
        **details,
    )


def sample_pixels(count, size=(8, 12), seed=0):
    """uint8 (count, H, W, 3): noise around a colour of its own, so that images are told apart."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 256, (count, 1, 1, 3))

    return np.clip(colours + rng.normal(0, 60, (count, *size, 3)), 0, 255).astype(np.uint8)


def to_png(pixels):
    return cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes()


def write_pngs(folder, pixels):
    """Writes images named by their numbers; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03}.png" for number in range(len(pixels))]

    for path, image in zip(paths, pixels, strict=True):
        path.write_bytes(to_png(image))

    return [str(path) for path in paths]


def write_classes(folder, labels, pixels):
    """Writes images named by their numbers, each below the name of its class; returns the data of a command."""
    for number, (label, image) in enumerate(zip(labels, pixels, strict=True)):
        path = folder / NAMES[label] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(image))
    return f"--data=folder:{folder}"


def logits_of(model, pixels):
    """float64 logits (B, K), one image at a time and without what is tested here."""
    run = jax.jit(lambda image: model(normalise(image, "float32")).logits_BK)
    return np.concatenate([run(jnp.asarray(image)[None]) for image in pixels]).astype(np.float64)


def evaluate_of(model, **limits):
    """Compile the evaluation of a model."""
    facts = {"source": model.source, "is_multilabel": model.is_multilabel}
    return make_evaluate(model.module, model.architecture, model.transform, **facts, **limits)


def extractor_of(model, cache=None, **options):
    """Return the extractor of the features of a model; `cache` is a folder."""
    options = {
        "layer": "pre_logits",
        "max_unreadable": 0,
        "transform": model.transform,
    } | options
    kept = None if cache is None else Cache(cache, WorkdirLock, is_abandoned)

    return Extractor(
        module=model.module,
        architecture=model.architecture,
        cache=kept,
        **options,
    )


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
