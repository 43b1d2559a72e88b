"""Small classifiers with seeded parameters, and image files, for these tests and the verbs'."""

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


def sample_weights(
    a=SEVEN,
    preprocessing=DIRECT,
    class_names=NAMES,
    **details,
):
    return weights_of(
        a,
        preprocessing=preprocessing,
        class_names=class_names,
        source="w.npz (released)",
        **details,
    )


def sample_pixels(count, size=(8, 12), seed=0):
    """Return uint8 (count, H, W, 3): noise around another colour for each image."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 256, (count, 1, 1, 3))
    noise = rng.normal(0, 60, (count, *size, 3))
    pixels = np.clip(colours + noise, 0, 255)

    return pixels.astype(np.uint8)


def to_png(pixels):
    bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".png", bgr)[1].tobytes()


def write_pngs(folder, pixels):
    """Write images named by their numbers; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, image in enumerate(pixels):
        path = folder / f"{number:03}.png"
        path.write_bytes(to_png(image))
        paths.append(str(path))
    return paths


def write_classes(folder, labels, pixels):
    """Write images named by their numbers, below the names of classes; return the data option."""
    for number, (label, image) in enumerate(zip(labels, pixels, strict=True)):
        path = folder / NAMES[label] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(image))
    return f"--data=folder:{folder}"


def logits_of(model, pixels):
    """Return float64 logits (B, K), one image at a time and without the evaluation."""

    @jax.jit
    def run(image):
        output = model(normalise(image, "float32"))
        return output.logits_BK

    logits = []
    for image in pixels:
        batch = jnp.asarray(image)[None]
        logits.append(run(batch))
    return np.concatenate(logits).astype(np.float64)


def evaluate_of(model, **limits):
    """Compile the evaluation of a model."""
    return make_evaluate(
        model.module,
        model.architecture,
        model.transform,
        source=model.source,
        is_multilabel=model.is_multilabel,
        **limits,
    )


def extractor_of(model, cache=None, **options):
    """Return the extractor of the features of a model; `cache` is a folder."""
    if cache is not None:
        cache = Cache(cache, WorkdirLock, is_abandoned)
    options = {
        "layer": "pre_logits",
        "max_unreadable": 0,
        "transform": model.transform,
    } | options
    return Extractor(
        module=model.module,
        architecture=model.architecture,
        cache=cache,
        **options,
    )


def softmax(logits):
    largest = logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits - largest)
    return exponentials / exponentials.sum(axis=1, keepdims=True)
