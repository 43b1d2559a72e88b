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
    probabilities,
    sample_pixels,
    sample_weights,
    softmax,
    to_png,
    write_pngs,
)
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.data.records import Record
from vit_jax.inference.predict import predict, to_json, to_table


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
                expected[number][order], abs=1e-6
            )


def test_the_stored_preparation_is_used(tmp_path):
    """The middle of the image is black, its border is white: only a crop of the middle sees black alone."""
    image = np.full((32, 48, 3), 255, np.uint8)
    image[8:24, 12:36] = 0
    (tmp_path / "a.png").write_bytes(to_png(image))
    found = {}
    for preprocessing in (DIRECT, CROPPED):
        model = from_weights(sample_weights(preprocessing=preprocessing))
        prepared = model.transform(Record(to_png(image), 0))
        (found[preprocessing["resize"]],) = probabilities(model, [str(tmp_path / "a.png")])
        expected = softmax(logits_of(model.module, prepared[None]))[0]
        assert found[preprocessing["resize"]] == pytest.approx(expected, abs=1e-6)
    black = np.zeros((1, 8, 12, 3), np.uint8)
    assert found["short_side"] == pytest.approx(softmax(logits_of(model.module, black))[0], abs=1e-6)
    assert not np.allclose(found["direct"], found["short_side"], atol=1e-3)


ODD = {
    "animation.gif": ANIMATED_GIF,
    "inks.jpg": CMYK_JPEG,
    "deep.png": PNGS["16-bit RGB"][0],
    "pixel.png": to_png(np.full((1, 1, 3), 200, np.uint8)),
    "line.png": to_png(np.full((1, 90, 3), 90, np.uint8)),
}


@pytest.mark.parametrize("preprocessing", [DIRECT, CROPPED], ids=lambda value: value["resize"])
def test_odd_images_are_images(tmp_path, preprocessing):
    for name, content in ODD.items():
        (tmp_path / name).write_bytes(content)
    model = from_weights(sample_weights(preprocessing=preprocessing))
    assert probabilities(model, [str(tmp_path / name) for name in ODD]).sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_equal_probabilities_and_those_that_are_not_finite(tmp_path):
    weights, paths = sample_weights(), write_pngs(tmp_path, sample_pixels(1))
    for name in ("kernel", "bias"):
        weights.parameters[f"head/linear/{name}"][:] = 0
    (record,) = predict(from_weights(weights), paths, 9)
    assert [one["class"] for one in record["predictions"]] == list(NAMES)
    weights.parameters["head/linear/bias"][:] = np.nan
    with rejects("000.png", "not finite"):
        list(predict(from_weights(weights), paths, 1))


NOT_TEXT = b"caf\xe9.png".decode("utf-8", "surrogateescape")  # a file name in bytes that are not UTF-8
RECORDS = [
    {"image": "a.png", "predictions": [{"class": "cat", "probability": 0.625}, {"class": "ant", "probability": 0.25}]},
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
