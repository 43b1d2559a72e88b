"""Predictions for files: each in its place, whatever the others are, and what is shown of them."""

import json

import numpy as np
import pytest

from tests.data.decoding.test_images import UNREADABLE
from tests.evals.samples import NAMES, logits_of, sample_pixels, sample_weights, softmax, write_pngs
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.api.predictions import predict, to_json, to_table


def test_every_file_in_its_place(tmp_path):
    """Eighty files, more than a batch; some cannot be read, each for its reason, and one is given twice."""
    pixels = sample_pixels(70)
    paths = write_pngs(tmp_path, pixels)
    reasons = {}

    for number, (content, reason) in enumerate(UNREADABLE.values(), 40):
        (tmp_path / f"{number:03}.png").write_bytes(content)
        reasons[number] = reason

    (tmp_path / "069.png").unlink()
    reasons[69] = r"cannot be opened \(No such file or directory\)"
    model = from_weights(sample_weights())
    found = list(predict(model, [*paths, paths[3]], 3))

    assert [record["image"] for record in found] == [*paths, paths[3]]

    expected = softmax(logits_of(model.module, [*pixels, pixels[3]]))
    for number, record in enumerate(found):
        if number in reasons:
            assert list(record) == ["image", "error"]
            with pytest.raises(ValueError, match=reasons[number]):
                raise ValueError(record["error"])
        else:
            order = np.argsort(-expected[number])[:3]

            assert [one["class"] for one in record["predictions"]] == [NAMES[k] for k in order]
            assert [one["probability"] for one in record["predictions"]] == pytest.approx(
                expected[number][order],
                abs=1e-6,
            )


def test_equal_probabilities_and_those_that_are_not_finite(tmp_path):
    weights = sample_weights()
    paths = write_pngs(tmp_path, sample_pixels(1))

    for name in ("kernel", "bias"):
        weights.parameters[f"head/linear/{name}"][:] = 0

    (record,) = predict(from_weights(weights), paths, 9)

    assert [one["class"] for one in record["predictions"]] == list(NAMES)

    weights.parameters["head/linear/bias"][:] = np.nan
    with rejects("000.png", "not finite"):
        list(predict(from_weights(weights), paths, 1))


NOT_TEXT = b"caf\xe9.png".decode(
    "utf-8",
    "surrogateescape",
)  # a file name in bytes that are not UTF-8
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

    assert json.loads(text.encode("ascii")) == RECORDS
    assert [line[:9] for line in text.splitlines()] == ["[", '{"image":', '{"image":', "]"]


def test_the_table():
    assert to_table(RECORDS).splitlines() == [
        "a.png           cat 62.5%   ant 25.0%",
        r"caf\udce9.png   cannot be read: The file is empty",
    ]
