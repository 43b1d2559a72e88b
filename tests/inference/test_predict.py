"""Predictions for files: each in its place, whatever the others are, and what is shown of them."""

import json

import numpy as np
import pytest

from tests.data.test_images import ANIMATED_GIF, CMYK_JPEG, PNGS, UNREADABLE
from tests.inference.samples import (
    CROPPED,
    DIRECT,
    NAMES,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    to_png,
    write_pngs,
)
from vit_jax.data.records import Record
from vit_jax.inference import predict as module
from vit_jax.inference.classifier import build_classifier
from vit_jax.inference.predict import Prediction, predict, to_json, to_record, to_table


def test_every_file_in_its_place_over_many_batches(tmp_path, monkeypatch):
    """Eleven files in batches of four; two cannot be read, and one is given twice."""
    monkeypatch.setattr(module, "LARGEST_BATCH", 4)
    pixels = sample_pixels(10)
    paths = write_pngs(tmp_path, pixels)
    (tmp_path / "002.png").write_bytes(b"")
    (tmp_path / "007.png").write_bytes(UNREADABLE["half a PNG"][0])
    paths.append(paths[3])
    classifier = build_classifier(sample_weights())
    found = list(predict(classifier, paths))
    assert [prediction.image for prediction in found] == paths
    expected = softmax(logits_of(classifier.model, [*pixels, pixels[3]]))
    for number, prediction in enumerate(found):
        if number in (2, 7):
            assert prediction.probabilities is None
            assert prediction.error.startswith("The file is empty" if number == 2 else "The file starts as PNG")
        else:
            assert prediction.error is None
            assert prediction.probabilities == pytest.approx(expected[number], abs=1e-6)


def test_the_stored_preparation_is_used(tmp_path):
    """The middle of the image is black, its border is white: only a crop of the middle sees black alone."""
    image = np.full((32, 48, 3), 255, np.uint8)
    image[8:24, 12:36] = 0
    (tmp_path / "a.png").write_bytes(to_png(image))
    found = {}
    for preprocessing in (DIRECT, CROPPED):
        classifier = build_classifier(sample_weights(preprocessing=preprocessing))
        prepared = classifier.transform(Record(to_png(image), 0))
        (prediction,) = predict(classifier, [str(tmp_path / "a.png")])
        expected = softmax(logits_of(classifier.model, prepared[None]))[0]
        assert prediction.probabilities == pytest.approx(expected, abs=1e-6)
        found[preprocessing["resize"]] = prediction.probabilities
    black = np.zeros((1, 8, 12, 3), np.uint8)
    assert found["short_side"] == pytest.approx(softmax(logits_of(classifier.model, black))[0], abs=1e-6)
    assert not np.allclose(found["direct"], found["short_side"], atol=1e-3)


ODD = {
    "animation.gif": ANIMATED_GIF,
    "inks.jpg": CMYK_JPEG,
    "deep.png": PNGS["16-bit RGB"][0],
    "deep_grey.png": PNGS["16-bit grey"][0],
    "pixel.png": to_png(np.full((1, 1, 3), 200, np.uint8)),
    "line.png": to_png(np.full((1, 90, 3), 90, np.uint8)),
}


@pytest.mark.parametrize("preprocessing", [DIRECT, CROPPED], ids=lambda value: value["resize"])
def test_odd_images_are_images(tmp_path, preprocessing):
    for name, content in ODD.items():
        (tmp_path / name).write_bytes(content)
    classifier = build_classifier(sample_weights(preprocessing=preprocessing))
    for prediction in predict(classifier, [str(tmp_path / name) for name in ODD]):
        assert prediction.error is None, prediction.image
        assert prediction.probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_every_unreadable_kind_has_its_reason(tmp_path):
    paths = []
    for name, (content, _) in UNREADABLE.items():
        (tmp_path / f"{name}.jpg").write_bytes(content)
        paths.append(str(tmp_path / f"{name}.jpg"))
    found = list(predict(build_classifier(sample_weights()), [*paths, str(tmp_path / "gone.jpg")]))
    assert [prediction.probabilities for prediction in found] == [None] * len(found)
    assert found[-1].error == "The file cannot be opened (No such file or directory)"
    assert all(prediction.error.startswith("The file ") for prediction in found)


def test_answers_that_are_no_numbers(tmp_path):
    weights = sample_weights()
    weights.parameters["head/linear/bias"][:] = np.nan
    paths = write_pngs(tmp_path, sample_pixels(1))
    with pytest.raises(ValueError, match=r"the answer to .*000.png is no number. Its parameters are damaged"):
        list(predict(build_classifier(weights), paths))


PREDICTIONS = [
    Prediction("a.png", np.float32([0.25, 0.125, 0.625])),
    Prediction("broken.png", error="The file is empty"),
    Prediction("tie.png", np.float32([0.125, 0.125, 0.75])),
]


def records(top):
    return [to_record(prediction, ("ant", "naïve bee", "cat"), top) for prediction in PREDICTIONS]


def test_records_hold_the_first_classes():
    first, broken, tie = records(2)
    assert first == {
        "image": "a.png",
        "predictions": [{"class": "cat", "probability": 0.625}, {"class": "ant", "probability": 0.25}],
    }
    assert broken == {"image": "broken.png", "error": "The file is empty"}
    assert [found["class"] for found in tie["predictions"]] == ["cat", "ant"]
    assert [len(record.get("predictions", ())) for record in records(9)] == [3, 0, 3]


def test_json_reads_back_with_one_image_a_line():
    text = to_json(records(3))
    assert json.loads(text) == records(3)
    lines = text.splitlines()
    assert [json.loads(line.rstrip(","))["image"] for line in lines[1:-1]] == ["a.png", "broken.png", "tie.png"]
    assert (lines[0], lines[-1]) == ("[", "]")


def test_names_that_are_no_text():
    """A file name in bytes that are not UTF-8 can be read back from JSON; the command line can print the table."""
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    record = to_record(Prediction(name, error="The file is empty"), NAMES, 1)
    assert json.loads(to_json([record]).encode("ascii"))[0]["image"] == name
    assert to_table([record]) == f"{name}   cannot be read: The file is empty"


def test_the_table():
    assert to_table(records(2)).splitlines() == [
        "a.png        cat 62.5%   ant 25.0%",
        "broken.png   cannot be read: The file is empty",
        "tie.png      cat 75.0%   ant 12.5%",
    ]
