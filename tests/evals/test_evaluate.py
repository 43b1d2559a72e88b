"""Evaluation of whole splits against NumPy: every example once on any devices, labels matched by their names."""

import collections
import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.samples import (
    DIRECT,
    NAMES,
    SEVEN,
    evaluate_of,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    write_classes,
)
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.arrays import ModelOutput
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals.evaluate import EvaluationResult, to_text
from vit_jax.evals.label_map import Labelled, identity_map
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.splits import open_labelled
from vit_jax.sharding import build_mesh, replicated

LABELS = np.random.default_rng(1).integers(0, 6, 37)  # the last class has no images
PIXELS = sample_pixels(len(LABELS))


class Expected(NamedTuple):
    """Loss, and images, first and first five by class; of each image the answers in their order and probabilities."""

    loss: float
    images_L: np.ndarray
    top1_L: np.ndarray
    top5_L: np.ndarray
    order_NK: np.ndarray
    probability_NK: np.ndarray


def expected_of(weights, pixels, labels):
    """Of one image after the other, in NumPy."""
    logits = logits_of(from_weights(weights).module, pixels)
    order = np.argsort(-logits, axis=1, kind="stable")
    shares = softmax(logits)
    places = np.argsort(order, axis=1)[np.arange(len(labels)), labels]
    loss = float(-np.log(shares[np.arange(len(labels)), labels]).mean())
    counts = (
        np.bincount(labels[keep], minlength=logits.shape[1])
        for keep in (places >= 0, places < 1, places < 5)
    )

    return Expected(loss, *counts, order, np.take_along_axis(shares, order, axis=1))


def assert_same_result(found, expected):
    assert found.metrics.counts.loss / found.metrics.images == pytest.approx(
        expected.loss,
        rel=1e-5,
    )
    assert found.values()["loss"] == found.metrics.counts.loss / found.metrics.images

    for name in ("images_L", "top1_L", "top5_L"):
        assert np.array_equal(getattr(found.metrics.counts, name), getattr(expected, name)), name


def evaluate_source(weights, source, write_images=None, **options):
    model = from_weights(weights, sharding=replicated(build_mesh(jax.devices())))
    evaluate = evaluate_of(model, **({"global_batch": 16, "max_unreadable": 0} | options))

    return evaluate(Labelled(source, "words", [], identity_map(source.class_names)), write_images)


@pytest.mark.parametrize(
    ("num_devices", "global_batch"),
    [
        (1, 64),
        (8, 5),
        (3, 10),
    ],
)
def test_every_example_once_on_any_devices(num_devices, global_batch, monkeypatch):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    weights = sample_weights()
    lines = []
    source = MemorySource(PIXELS, LABELS, NAMES)
    found = evaluate_source(weights, source, lines.extend, global_batch=global_batch)

    expected = expected_of(weights, PIXELS, LABELS)
    assert_same_result(found, expected)
    assert 0 < expected.top1_L.sum() < expected.top5_L.sum() < expected.images_L.sum() == 37

    header, *rows = lines

    assert header == ("image", "class", "answer", "probability", "is_right")

    first = expected.order_NK[:, 0]
    names = [
        (f"record {record}", NAMES[LABELS[record]], NAMES[first[record]]) for record in range(37)
    ]

    assert [row[:3] for row in rows] == names
    assert [float(row[3]) for row in rows] == pytest.approx(expected.probability_NK[:, 0], abs=2e-6)
    assert [row[4] for row in rows] == (first == LABELS).tolist()


def test_calibration_confusions_and_mistakes_of_a_split():
    weights = sample_weights()
    found = evaluate_source(weights, MemorySource(PIXELS, LABELS, NAMES)).values()

    expected = expected_of(weights, PIXELS, LABELS)
    first = expected.order_NK[:, 0]
    confidence = expected.probability_NK[:, 0]
    bins = np.ceil(confidence * 15)
    gaps = [
        abs(((first == LABELS) - confidence)[bins == number].sum()) for number in np.unique(bins)
    ]

    assert found["calibration_error"] == pytest.approx(sum(gaps) / 37, rel=1e-5)

    wrong = np.flatnonzero(first != LABELS)
    worst = wrong[np.argsort(-confidence[wrong])]
    mistakes = found["most_confident_mistakes"]

    assert [one["image"] for one in mistakes] == [
        f"record {record}" for record in worst[: len(mistakes)]
    ]
    assert mistakes[0] == {
        "image": f"record {worst[0]}",
        "class": NAMES[LABELS[worst[0]]],
        "answer": NAMES[first[worst[0]]],
        "probability": pytest.approx(confidence[worst[0]], rel=1e-5),
    }

    pairs = collections.Counter(zip(LABELS[wrong].tolist(), first[wrong].tolist(), strict=True))
    shown = [
        (one["class"], one["answer"], one["images"], one["of"]) for one in found["most_confused"]
    ]
    sizes = np.bincount(LABELS)

    expected_shown = sorted(
        (NAMES[k], NAMES[a], count, sizes[k]) for (k, a), count in pairs.items()
    )
    assert sorted(shown) == expected_shown
    assert [count for _, _, count, _ in shown] == sorted(pairs.values(), reverse=True)


def test_outputs_that_are_not_finite_are_no_answers():
    weights = sample_weights()
    weights.parameters["head/linear/bias"][2] = np.nan

    with rejects("w.npz", "record 0.*not finite"):
        evaluate_source(weights, MemorySource(PIXELS, LABELS, NAMES))


def test_gflops_of_networks_of_ones_own():
    """Counted in the program: 8 x 12 x 3 numbers by 7; a loop whose length is not known has none."""
    own = dataclasses.replace(
        from_weights(sample_weights()),
        architecture=dataclasses.replace(SEVEN, network="my:own"),
    )
    labelled = Labelled(MemorySource(PIXELS, LABELS, NAMES), "", [], identity_map(NAMES))

    def once(images):
        return ModelOutput(images.reshape(-1, 288) @ jnp.ones((288, 7)))

    def often(images):
        return jax.lax.while_loop(
            lambda x: x.logits_BK.sum() > 1e9,
            lambda x: once(images),
            once(images),
        )

    models = [
        dataclasses.replace(own, module=jax.tree_util.Partial(network)) for network in (once, often)
    ]
    counted, unknown = (
        evaluate_of(model, global_batch=40, max_unreadable=0)(labelled) for model in models
    )

    assert counted.gflops_per_image == pytest.approx(2 * 288 * 7 / 1e9)
    assert unknown.gflops_per_image is None
    assert not any(
        "flops" in to_text(sets, "w").lower()
        for sets in ({"": unknown}, {"a": unknown, "b": unknown})
    )


def write_folder(folder, names, labels, pixels):
    """An image folder of two splits: one image of every class to train on, and those given to test."""
    write_classes(folder / "train", range(len(names)), [pixels[0]] * len(names))
    write_classes(folder / "test", labels, pixels)

    return f"folder:{folder}"


def evaluate_folder(weights, data, max_unreadable=0):
    return evaluate_source(
        weights,
        open_labelled(data, weights).source,
        max_unreadable=max_unreadable,
    )


def test_labels_are_matched_by_name_in_another_order(tmp_path):
    """Folders are numbered by the alphabet, the weights' classes backwards."""
    weights = sample_weights(class_names=NAMES[::-1])
    data = write_folder(tmp_path, NAMES[:6], LABELS, PIXELS)
    found = evaluate_folder(weights, data)

    assert_same_result(found, expected_of(weights, PIXELS, 6 - LABELS))

    by_number = expected_of(weights, PIXELS, LABELS)

    assert found.values()["loss"] != pytest.approx(by_number.loss, rel=1e-3), (
        "or the order would prove nothing"
    )


def test_unreadable_images_are_left_out_as_far_as_allowed(tmp_path):
    weights = sample_weights()
    data = write_folder(tmp_path, NAMES, LABELS, PIXELS)

    for number in (7, 30):
        (tmp_path / "test" / NAMES[LABELS[number]] / f"{number:03}.png").write_bytes(b"no image")

    with rejects("--max_unreadable", r"1.*0(07|30)\.png") as error:
        evaluate_folder(weights, data, max_unreadable=1)

    assert {"007.png", "030.png"} <= set(re.findall(r"\d+\.png", str(error.value))), (
        "all are named at once"
    )

    found = evaluate_folder(weights, data, max_unreadable=2)

    assert_same_result(
        found,
        expected_of(weights, np.delete(PIXELS, (7, 30), 0), np.delete(LABELS, (7, 30))),
    )


def test_the_stored_preparation_is_used(tmp_path):
    pixels = sample_pixels(9, size=(20, 16))
    data = write_folder(tmp_path, NAMES, LABELS[:9], pixels)
    losses = {}

    for resize, crop_fraction in (("direct", 1.0), ("short_side", 1.0), ("short_side", 0.5)):
        weights = sample_weights(
            preprocessing=DIRECT | {"resize": resize, "crop_fraction": crop_fraction}
        )
        transform = from_weights(weights).transform
        source = open_labelled(data, weights).source
        prepared = np.stack([transform(source[index]) for index in range(len(source))])
        found = evaluate_folder(weights, data)

        assert_same_result(found, expected_of(weights, prepared, source.labels))

        losses[resize, crop_fraction] = found.values()["loss"]

    assert len(set(losses.values())) == 3


def metrics_by_hand(labelled):
    """Of 1,250 images of two classes, 900 and 100 right; the other answer was as sure."""
    metrics = ClassMetrics(labelled)
    for label, right, images in ((0, 900, 1000), (1, 100, 250)):
        first = np.repeat([label, 1 - label], [right, images - right])
        classes = np.stack([first, 1 - first], axis=1)
        rows = {
            "record_B": np.arange(images),
            "label_B": np.full(images, label),
            "class_BT": classes,
        }
        metrics.add(
            rows | {"probability_BT": np.full((images, 2), 0.5), "loss_B": np.full(images, 0.7)}
        )

    return metrics


def test_what_is_printed():
    source = MemorySource(PIXELS, LABELS % 2, ("cat", "dog"))
    labelled = Labelled(source, "test of digits, 9 of 9 images", [], identity_map(("cat", "dog")))
    metrics = metrics_by_hand(labelled)
    speed = {"images_per_second": 1234.5, "gflops_per_image": 17.58}
    found = EvaluationResult(
        labelled=labelled,
        metrics=metrics,
        unreadable=0,
        **speed,
    )

    assert to_text({"": found}, "w.npz (released)").splitlines() == [
        "weights            w.npz (released)",
        "data               test of digits, 9 of 9 images",
        "images             1,250",
        "accuracy           80.00%  (95 %: 77.69% to 82.12%)",
        "top5_accuracy      100.00%  (95 %: 99.69% to 100.00%)",
        "loss               0.7000",
        "calibration_error  30.00%",
        "images_per_second  1,234",
        "gflops_per_image   17.6",
        "most_confused      dog as cat (150 of 250), cat as dog (100 of 1,000)",
    ]
    assert to_text({"a": found, "v2/x": found}, "w.npz").splitlines() == [
        "weights  w.npz",
        "network  17.6 GFLOPs an image",
        "",
        "      images  accuracy              95 %    top-5  calibration error  images/s",
        "a      1,250    80.00%  77.69% to 82.12%  100.00%             30.00%     1,234",
        "v2/x   1,250    80.00%  77.69% to 82.12%  100.00%             30.00%     1,234",
    ]
