"""Evaluation of whole splits against NumPy, on any devices, with labels matched by name."""

import collections
import dataclasses
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
from vit_jax.evals.label_map import Labelled, build_identity_map
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.splits import open_labelled
from vit_jax.sharding import build_mesh, replicate

LABELS = np.random.default_rng(1).integers(0, 6, 37)  # the last class has no images
PIXELS = sample_pixels(len(LABELS))


class Expected(NamedTuple):
    """Loss, and counts of images, first and first five predictions by class.

    Of each image also the classes by probability, and their probabilities.
    """

    loss: float
    images_L: np.ndarray
    top1_L: np.ndarray
    top5_L: np.ndarray
    order_NK: np.ndarray
    probability_NK: np.ndarray


def compute_expected(weights, pixels, labels):
    """Evaluate one image after the other in NumPy."""
    logits = logits_of(from_weights(weights).module, pixels)
    num_classes = logits.shape[1]
    numbers = np.arange(len(labels))
    order = np.argsort(-logits, axis=1, kind="stable")
    probabilities = softmax(logits)
    ranks = np.argsort(order, axis=1)[numbers, labels]

    losses = -np.log(probabilities[numbers, labels])

    def count_images(is_counted):
        counted = labels[is_counted]
        return np.bincount(counted, minlength=num_classes)

    return Expected(
        loss=float(losses.mean()),
        images_L=count_images(ranks >= 0),
        top1_L=count_images(ranks < 1),
        top5_L=count_images(ranks < 5),
        order_NK=order,
        probability_NK=np.take_along_axis(probabilities, order, axis=1),
    )


def assert_same_result(found, expected):
    counts = found.metrics.counts
    mean_loss = counts.loss_sum / found.metrics.images

    assert mean_loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.values()["loss"] == mean_loss
    assert np.array_equal(counts.images_L, expected.images_L)
    assert np.array_equal(counts.top1_L, expected.top1_L)
    assert np.array_equal(counts.top5_L, expected.top5_L)


def evaluate_source(weights, source, write_images=None, **options):
    mesh = build_mesh(jax.devices())
    model = from_weights(weights, sharding=replicate(mesh))
    options = {"global_batch": 16, "max_unreadable": 0} | options
    evaluate = evaluate_of(model, **options)
    labelled = Labelled(
        source,
        "words",
        [],
        build_identity_map(source.class_names),
    )
    return evaluate(labelled, write_images)


@pytest.mark.parametrize(
    ("num_devices", "global_batch"),
    [
        (1, 64),
        (8, 5),
        (3, 10),
    ],
)
def test_every_example_once_on_any_devices(
    num_devices,
    global_batch,
    monkeypatch,
):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    weights = sample_weights()
    source = MemorySource(PIXELS, LABELS, NAMES)
    lines = []

    found = evaluate_source(
        weights,
        source,
        lines.extend,
        global_batch=global_batch,
    )

    expected = compute_expected(weights, PIXELS, LABELS)
    num_top1 = expected.top1_L.sum()
    num_top5 = expected.top5_L.sum()
    assert_same_result(found, expected)
    assert 0 < num_top1 < num_top5 < 37
    assert expected.images_L.sum() == 37

    header, *rows = lines
    assert header == ("image", "class", "answer", "probability", "is_right")
    predicted = expected.order_NK[:, 0]
    confidence = expected.probability_NK[:, 0]
    for record, row in enumerate(rows):
        label = NAMES[LABELS[record]]
        answer = NAMES[predicted[record]]
        *names, probability, is_right = row
        assert names == [f"record {record}", label, answer]
        assert float(probability) == pytest.approx(confidence[record], abs=2e-6)
        assert is_right == (label == answer)
    assert len(rows) == 37


@pytest.fixture(scope="module")
def evaluated():
    """Values of a split, and by NumPy the predicted classes and their probabilities."""
    weights = sample_weights()
    source = MemorySource(PIXELS, LABELS, NAMES)
    values = evaluate_source(weights, source).values()
    expected = compute_expected(weights, PIXELS, LABELS)
    return values, expected.order_NK[:, 0], expected.probability_NK[:, 0]


def test_calibration_of_a_split(evaluated):
    values, predicted, confidence = evaluated

    deviation = (predicted == LABELS) - confidence
    bins = np.ceil(confidence * 15)
    total_gap = 0
    for number in np.unique(bins):
        total_gap += abs(deviation[bins == number].sum())

    assert values["calibration_error"] == pytest.approx(total_gap / 37, rel=1e-5)


def test_mistakes_of_a_split(evaluated):
    values, predicted, confidence = evaluated

    wrong = np.flatnonzero(predicted != LABELS)
    worst = wrong[np.argsort(-confidence[wrong])]
    first = worst[0]
    mistakes = values["most_confident_mistakes"]
    names = [f"record {record}" for record in worst[: len(mistakes)]]

    assert [one["image"] for one in mistakes] == names
    assert mistakes[0] == {
        "image": f"record {first}",
        "class": NAMES[LABELS[first]],
        "answer": NAMES[predicted[first]],
        "probability": pytest.approx(confidence[first], rel=1e-5),
    }


def test_confusions_of_a_split(evaluated):
    values, predicted, _ = evaluated

    wrong = predicted != LABELS
    pairs = zip(LABELS[wrong], predicted[wrong], strict=True)
    counts = collections.Counter(pairs)
    sizes = np.bincount(LABELS)
    expected = []
    for (label, answer), count in counts.items():
        confusion = {
            "class": NAMES[label],
            "answer": NAMES[answer],
            "images": count,
            "of": sizes[label],
        }
        expected.append(confusion)

    found = values["most_confused"]
    found_counts = [one["images"] for one in found]

    assert len(found) == len(expected)
    assert all(one in expected for one in found)
    assert found_counts == sorted(counts.values(), reverse=True)


def test_outputs_that_are_not_finite_are_an_error():
    weights = sample_weights()
    weights.parameters["head/linear/bias"][2] = np.nan

    source = MemorySource(PIXELS, LABELS, NAMES)

    with rejects("w.npz", "record 0.*not finite"):
        evaluate_source(weights, source)


def project(images):
    """Return logits by a product of 288 by 7 numbers."""
    return ModelOutput(images.reshape(-1, 288) @ jnp.ones((288, 7)))


def project_often(images):
    """Return logits after a loop whose length is not known."""
    return jax.lax.while_loop(
        lambda output: output.logits_BK.sum() > 1e9,
        lambda output: project(images),
        project(images),
    )


def evaluate_custom_network(network):
    model = dataclasses.replace(
        from_weights(sample_weights()),
        architecture=dataclasses.replace(SEVEN, network="my:own"),
        module=jax.tree_util.Partial(network),
    )
    labelled = Labelled(
        MemorySource(PIXELS, LABELS, NAMES),
        "",
        [],
        build_identity_map(NAMES),
    )
    evaluate = evaluate_of(
        model,
        global_batch=40,
        max_unreadable=0,
    )
    return evaluate(labelled)


def test_gflops_of_custom_networks():
    """Operations are counted in the program; a loop of unknown length has no count."""
    counted = evaluate_custom_network(project)
    unknown = evaluate_custom_network(project_often)

    assert counted.gflops_per_image == pytest.approx(2 * 288 * 7 / 1e9)
    assert unknown.gflops_per_image is None
    for results in ({"": unknown}, {"a": unknown, "b": unknown}):
        text = to_text(results, "w")
        assert "flops" not in text.lower()


def write_folder(folder, names, labels, pixels):
    """Write an image folder of two splits; return the data.

    The training split has one image of every class, the test split these images.
    """
    write_classes(
        folder / "train",
        range(len(names)),
        [pixels[0]] * len(names),
    )
    write_classes(folder / "test", labels, pixels)
    return f"folder:{folder}"


def evaluate_folder(weights, data, max_unreadable=0):
    source = open_labelled(data, weights).source
    return evaluate_source(weights, source, max_unreadable=max_unreadable)


def test_labels_are_matched_by_name_in_another_order(tmp_path):
    """Folders are numbered by the alphabet, the weights' classes backwards.

    Labels that are matched by number have another loss.
    """
    weights = sample_weights(class_names=NAMES[::-1])
    data = write_folder(tmp_path, NAMES[:6], LABELS, PIXELS)

    found = evaluate_folder(weights, data)

    by_name = compute_expected(weights, PIXELS, 6 - LABELS)
    assert_same_result(found, by_name)
    by_number = compute_expected(weights, PIXELS, LABELS)
    assert found.values()["loss"] != pytest.approx(by_number.loss, rel=1e-3)


def test_unreadable_images_are_skipped_as_far_as_allowed(tmp_path):
    """Too many are an error that names all of them."""
    weights = sample_weights()
    data = write_folder(tmp_path, NAMES, LABELS, PIXELS)
    unreadable = (7, 30)
    for number in unreadable:
        path = tmp_path / "test" / NAMES[LABELS[number]] / f"{number:03}.png"
        path.write_bytes(b"no image")

    with rejects("--max_unreadable", r"1.*0(07|30)\.png") as error:
        evaluate_folder(weights, data, max_unreadable=1)
    assert "007.png" in str(error.value)
    assert "030.png" in str(error.value)

    found = evaluate_folder(weights, data, max_unreadable=2)
    expected = compute_expected(
        weights,
        np.delete(PIXELS, unreadable, 0),
        np.delete(LABELS, unreadable),
    )

    assert_same_result(found, expected)


def test_the_stored_preparation_is_used(tmp_path):
    """Three preparations have three losses."""
    pixels = sample_pixels(9, size=(20, 16))
    data = write_folder(tmp_path, NAMES, LABELS[:9], pixels)

    cropped = DIRECT | {"resize": "short_side", "crop_fraction": 0.5}
    preparations = [
        DIRECT,
        cropped | {"crop_fraction": 1.0},
        cropped,
    ]

    losses = set()
    for preprocessing in preparations:
        weights = sample_weights(preprocessing=preprocessing)
        transform = from_weights(weights).transform
        source = open_labelled(data, weights).source
        prepared = []
        for index in range(len(source)):
            prepared.append(transform(source[index]))

        found = evaluate_folder(weights, data)

        expected = compute_expected(
            weights,
            np.stack(prepared),
            source.labels,
        )
        assert_same_result(found, expected)
        losses.add(found.values()["loss"])

    assert len(losses) == 3


def make_metrics(labelled):
    """Return metrics of 1,250 images of two classes, of which 900 and 100 are right.

    Both classes have the probability 0.5.
    """
    metrics = ClassMetrics(labelled)
    for label, num_right, images in ((0, 900, 1000), (1, 100, 250)):
        num_wrong = images - num_right
        other = 1 - label
        predicted = np.repeat([label, other], [num_right, num_wrong])
        metrics.add(
            {
                "record_B": np.arange(images),
                "label_B": np.full(images, label),
                "class_BT": np.stack([predicted, 1 - predicted], axis=1),
                "probability_BT": np.full((images, 2), 0.5),
                "loss_B": np.full(images, 0.7),
            }
        )
    return metrics


@pytest.fixture
def result():
    names = ("cat", "dog")
    source = MemorySource(PIXELS, LABELS % 2, names)
    labelled = Labelled(
        source,
        "test of digits, 9 of 9 images",
        [],
        build_identity_map(names),
    )
    return EvaluationResult(
        labelled=labelled,
        metrics=make_metrics(labelled),
        unreadable=0,
        images_per_second=1234.5,
        gflops_per_image=17.58,
    )


def test_the_text_of_one_result(result):
    text = to_text({"": result}, "w.npz (released)")

    assert text.splitlines() == [
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


def test_the_text_of_several_results(result):
    text = to_text({"a": result, "v2/x": result}, "w.npz")

    assert text.splitlines() == [
        "weights  w.npz",
        "network  17.6 GFLOPs an image",
        "",
        "      images  accuracy              95 %    top-5  calibration error  images/s",
        "a      1,250    80.00%  77.69% to 82.12%  100.00%             30.00%     1,234",
        "v2/x   1,250    80.00%  77.69% to 82.12%  100.00%             30.00%     1,234",
    ]
