"""Predictions of files, each in its place, and their texts."""

import json
import re

import numpy as np
import pytest

from tests.data.decoding.test_images import UNREADABLE
from tests.evals.samples import NAMES, logits_of, sample_pixels, sample_weights, softmax, write_pngs
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.api.predictions import predict, to_json, to_table


@pytest.fixture
def files(tmp_path):
    """Pixels and paths of 70 images, more than a batch, and reasons of the unreadable ones."""
    pixels = sample_pixels(70)
    paths = write_pngs(tmp_path, pixels)

    reasons = {}
    for number, (content, reason) in enumerate(UNREADABLE.values(), 40):
        (tmp_path / f"{number:03}.png").write_bytes(content)
        reasons[number] = reason
    (tmp_path / "069.png").unlink()
    reasons[69] = r"cannot be opened \(No such file or directory\)"
    return pixels, paths, reasons


def test_every_file_in_its_place(files):
    """One file is given twice."""
    pixels, paths, reasons = files
    paths = [*paths, paths[3]]
    model = from_weights(sample_weights())

    found = list(predict(model, paths, 3))

    assert [record["image"] for record in found] == paths

    probabilities = softmax(logits_of(model.module, [*pixels, pixels[3]]))
    for number, record in enumerate(found):
        if number in reasons:
            assert list(record) == ["image", "error"]
            assert re.search(reasons[number], record["error"])
        else:
            check_predictions(record["predictions"], probabilities[number])


def check_predictions(predictions, probabilities):
    """Compare the three most probable classes."""
    order = np.argsort(-probabilities)[:3]

    assert [one["class"] for one in predictions] == [NAMES[k] for k in order]
    found = [one["probability"] for one in predictions]
    assert found == pytest.approx(probabilities[order], abs=1e-6)


def make_weights(bias):
    """Return weights whose logits are all equal to a number."""
    weights = sample_weights()
    weights.parameters["head/linear/kernel"][:] = 0
    weights.parameters["head/linear/bias"][:] = bias
    return weights


def test_equal_probabilities(tmp_path):
    paths = write_pngs(tmp_path, sample_pixels(1))

    (record,) = predict(from_weights(make_weights(0)), paths, 9)

    assert [one["class"] for one in record["predictions"]] == list(NAMES)


def test_probabilities_that_are_not_finite(tmp_path):
    paths = write_pngs(tmp_path, sample_pixels(1))
    model = from_weights(make_weights(np.nan))

    with rejects("000.png", "not finite"):
        list(predict(model, paths, 1))


NOT_UTF_8 = b"caf\xe9.png"


NOT_TEXT = NOT_UTF_8.decode("utf-8", "surrogateescape")
RECORDS = [
    {
        "image": "a.png",
        "predictions": [
            {"class": "cat", "probability": 0.625},
            {"class": "ant", "probability": 0.25},
        ],
    },
    {"image": NOT_TEXT, "error": "The file is empty"},
]


def test_json_reads_back_with_one_image_a_line():
    text = to_json(RECORDS)

    starts = [line[:9] for line in text.splitlines()]
    assert json.loads(text.encode("ascii")) == RECORDS
    assert starts == ["[", '{"image":', '{"image":', "]"]


def test_the_table():
    assert to_table(RECORDS).splitlines() == [
        "a.png           cat 62.5%   ant 25.0%",
        r"caf\udce9.png   cannot be read: The file is empty",
    ]
