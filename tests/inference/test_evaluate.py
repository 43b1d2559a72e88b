"""Evaluation of whole splits against NumPy: every example once on any devices, labels matched by their names."""

import re

import jax
import numpy as np
import pytest

from tests.inference.samples import (
    DIRECT,
    NAMES,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    to_png,
)
from vit_jax.api import from_weights
from vit_jax.data.memory import MemorySource
from vit_jax.evals.per_class import PerClassResult
from vit_jax.inference.evaluate import evaluate, report
from vit_jax.inference.labelled import open_labelled
from vit_jax.sharding import build_mesh, replicated

LABELS = np.random.default_rng(1).integers(0, 6, 37)  # the last class has no images
PIXELS = sample_pixels(len(LABELS))


def expected_of(weights, pixels, labels):
    """Loss, and images, first and first five by class, one image after the other."""
    logits = logits_of(from_weights(weights).module, pixels)
    places = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1)[np.arange(len(labels)), labels]
    return PerClassResult(
        float(-np.log(softmax(logits)[np.arange(len(labels)), labels]).mean()),
        *(np.bincount(labels[keep], minlength=logits.shape[1]) for keep in (places >= 0, places < 1, places < 5)),
    )


def assert_same_result(found, expected):
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for name in ("images_K", "top1_K", "top5_K"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(("num_devices", "global_batch"), [(1, 64), (8, 5), (3, 10)])
def test_every_example_once_on_any_devices(num_devices, global_batch, monkeypatch):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    weights = sample_weights()
    model = from_weights(weights, sharding=replicated(build_mesh(jax.devices())))
    source = MemorySource(PIXELS, LABELS, NAMES)
    found = evaluate(model, source, global_batch=global_batch, max_unreadable=0)
    expected = expected_of(weights, PIXELS, LABELS)
    assert_same_result(found, expected)
    assert 0 < expected.top1_K.sum() < expected.top5_K.sum() < expected.images_K.sum() == 37


def write_folder(folder, names, labels, pixels):
    """An image folder of two splits: one image of every class to train on, and those given to test."""
    files = [(f"train/{name}/0.png", pixels[0]) for name in names]
    for number, (label, image) in enumerate(zip(labels, pixels, strict=True)):
        files.append((f"test/{names[label]}/{number:03}.png", image))
    for name, image in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(to_png(image))
    return f"folder:{folder}"


def evaluate_folder(weights, data, max_unreadable=0):
    source = open_labelled(data, weights).source
    model = from_weights(weights, sharding=replicated(build_mesh(jax.devices())))
    return evaluate(model, source, global_batch=16, max_unreadable=max_unreadable)


def test_labels_are_matched_by_name_in_another_order(tmp_path):
    """Folders are numbered by the alphabet, the weights' classes backwards."""
    weights = sample_weights(class_names=NAMES[::-1])
    data = write_folder(tmp_path, NAMES[:6], LABELS, PIXELS)
    found = evaluate_folder(weights, data)
    assert_same_result(found, expected_of(weights, PIXELS, 6 - LABELS))
    by_number = expected_of(weights, PIXELS, LABELS)
    assert found.loss != pytest.approx(by_number.loss, rel=1e-3), "or the order would prove nothing"


def test_a_subset_of_the_classes(tmp_path):
    weights = sample_weights()
    data = write_folder(tmp_path, ("bee", "gnu"), [0, 1, 1, 0, 1], PIXELS[:5])
    assert_same_result(evaluate_folder(weights, data), expected_of(weights, PIXELS[:5], np.array([1, 6, 6, 1, 6])))


def test_unreadable_images_are_left_out_as_far_as_allowed(tmp_path):
    weights = sample_weights()
    data = write_folder(tmp_path, NAMES, LABELS, PIXELS)
    for number in (7, 30):
        (tmp_path / "test" / NAMES[LABELS[number]] / f"{number:03}.png").write_bytes(b"no image")
    with pytest.raises(
        ValueError, match=r"2 images cannot be read, and --max_unreadable is 1: .*0(07|30)\.png"
    ) as error:
        evaluate_folder(weights, data, max_unreadable=1)
    assert {"007.png", "030.png"} <= set(re.findall(r"\d+\.png", str(error.value))), "all are named at once"
    found = evaluate_folder(weights, data, max_unreadable=2)
    assert_same_result(found, expected_of(weights, np.delete(PIXELS, (7, 30), 0), np.delete(LABELS, (7, 30))))


def test_the_stored_preparation_is_used(tmp_path):
    pixels = sample_pixels(9, size=(20, 16))
    data = write_folder(tmp_path, NAMES, LABELS[:9], pixels)
    losses = {}
    for resize, crop_fraction in (("direct", 1.0), ("short_side", 1.0), ("short_side", 0.5)):
        weights = sample_weights(preprocessing=DIRECT | {"resize": resize, "crop_fraction": crop_fraction})
        transform = from_weights(weights).transform
        source = open_labelled(data, weights).source
        prepared = np.stack([transform(source[index]) for index in range(len(source))])
        found = evaluate_folder(weights, data)
        assert_same_result(found, expected_of(weights, prepared, source.labels))
        losses[resize, crop_fraction] = found.loss
    assert len(set(losses.values())) == 3


def test_the_report():
    result = PerClassResult(0.51234, np.array([1000.0, 250]), np.array([900.0, 100]), np.array([1000.0, 250]))
    assert report(result, "w.npz (released)", "test of digits, 9 of 9 images").splitlines() == [
        "weights        w.npz (released)",
        "data           test of digits, 9 of 9 images",
        "images         1,250",
        "top1_accuracy  80.00%",
        "top5_accuracy  100.00%",
        "loss           0.5123",
    ]
