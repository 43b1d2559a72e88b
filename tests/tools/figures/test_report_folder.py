"""The folder of a report: every file is compared with the images, and errors of writing are
reported.
"""

import csv
import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from matplotlib.colors import to_hex

from tests.columns import list_column
from tests.evals.samples import (
    NAMES,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    write_classes,
)
from tests.integration.commands import run, succeed
from vit_jax.api import from_weights
from vit_jax.data.records import Record
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.label_map import Labelled, build_identity_map
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.imports.extras import install_command
from vit_jax.tools.figures import result_figures as figures
from vit_jax.tools.figures.drawing import BLUE, SKY
from vit_jax.weights.saving import OWN, save_weights

PIXELS = sample_pixels(20)
LABELS = np.arange(20) % 7
WORDS = ["evaluate", "w", "--data=folder:images", "--global_batch=8"]


def write_inputs(folder):
    """Write weights `w` and a folder `images` of twenty images in seven classes."""
    save_weights(sample_weights(), folder / "w", OWN)
    write_classes(folder / "images", LABELS, PIXELS)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A folder with the report of its images, and the output of the verb."""
    folder = tmp_path_factory.mktemp("reported")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        out = succeed([*WORDS, "--report=report", "--csv=classes.csv"])
    return folder, out


def read_rows(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.reader(file))


def write_report(*more):
    """Write a report; return the result that `--json` prints."""
    return json.loads(succeed([*WORDS, "--report=report", "--json", *more]))


@pytest.fixture(scope="module")
def shares():
    """Probabilities of the images."""
    model = from_weights(sample_weights())
    logits = logits_of(model.module, PIXELS)
    return softmax(logits)


def test_every_file_is_written(reported):
    folder, out = reported
    report = folder / "report"
    result = json.loads((report / "result.json").read_text())

    names = list_column(report.iterdir(), "name")
    table = (folder / "classes.csv").read_text()

    assert set(names) == FILES
    assert (report / "classes.csv").read_text() == table
    assert f"{result['accuracy']:.2%}" in out

    for name in FIGURES:
        pixels = cv2.imread(str(report / name))
        assert min(pixels.shape[:2]) > 300
        assert pixels.std() > 10, "something is drawn"


def test_the_table_of_images(reported, shares):
    folder, _ = reported
    header, *rows = read_rows(folder / "report/images.csv")

    assert header == ["image", "class", "answer", "probability", "is_right"]
    assert len(rows) == 20
    assert len(set(list_column(rows, 0))) == 20

    for name, label, predicted, probability, is_right in rows:
        number = int(name[-7:-4])
        share_K = shares[number]
        largest = pytest.approx(share_K.max(), abs=2e-6)

        assert name == f"images/{label}/{number:03}.png"
        assert label == NAMES[LABELS[number]]
        assert predicted == NAMES[share_K.argmax()]
        assert float(probability) == largest
        assert is_right == str(int(label == predicted))


def test_the_confusion_matrix(reported, shares):
    folder, _ = reported
    counts = np.zeros((7, 7), int)
    predictions = shares.argmax(axis=1)
    np.add.at(counts, (LABELS, predictions), 1)

    header, *rows = read_rows(folder / "report/confusion.csv")
    written = (folder / "report/result.json").read_text()
    result = json.loads(written)

    assert header == ["class", *NAMES]
    for name, row, expected in zip(NAMES, rows, counts, strict=True):
        assert row == [name, *map(str, expected)]
    assert result["accuracy"] == np.trace(counts) / 20


TABLES = {"classes.csv", "images.csv", "confusion.csv"}
FIGURES = {"reliability.png", "confusion.png", "mistakes.png"}
FILES = {"result.json"} | TABLES | FIGURES


def test_json_is_the_result_of_the_report(here):
    printed = write_report()
    written = json.loads((here / "report/result.json").read_text())

    assert printed == written
    assert printed["weights"] == "w (vit_jax, parameters of step 0)"
    assert printed["unreadable_images"] == 0
    assert printed["gflops_per_image"] > 0
    assert sum(one["images"] for one in printed["calibration_bins"]) == 20

    low, high = printed["accuracy_interval"]
    assert low <= printed["accuracy"] <= high


def test_what_cannot_be_read_is_in_no_table(here):
    """One name is no text, and one image is empty."""
    images = here / "images"
    odd = images / NAMES[0] / os.fsdecode(b"caf\xe9.png")
    (images / NAMES[0] / "000.png").rename(odd)
    (images / NAMES[1] / "001.png").write_bytes(b"")

    result = write_report()

    assert result["images"] == 19
    assert result["unreadable_images"] == 1

    _, *rows = read_rows(here / "report/images.csv")
    names = list_column(rows, 0)

    assert len(names) == 19
    assert str(odd.relative_to(here)) in names
    assert f"images/{NAMES[1]}/001.png" not in names


def test_too_many_that_cannot_be_read_leave_no_table(here):
    (here / "images" / NAMES[1] / "001.png").write_bytes(b"")

    code, _, err = run(
        [
            *WORDS,
            "--report=report",
            "--max_unreadable=0",
        ]
    )

    assert code == 2
    assert "1 images cannot be read" in err
    assert not (here / "report").exists()


def test_a_folder_that_cannot_be(here):
    (here / "report").write_text("a file")

    code, out, err = run([*WORDS, "--report=report"])

    assert (code, out) == (2, "")
    assert err.startswith("vit-jax: --report=report: ")


def test_without_matplotlib_it_says_so_first(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    code, out, err = run([*WORDS, "--report=report"])

    assert (code, out) == (2, "")
    assert install_command("figures") in err
    assert not (here / "report").exists()
    assert run(WORDS)[0] == 0


class Stored:
    """Records with fixed images; all but the first are damaged."""

    class_names = ("$x$", "a long name that has no room \x1b[2J")

    def __getitem__(self, index):
        image = np.zeros((400, 30, 3), np.uint8)
        return Record(b"rubbish" if index else image, 0)

    def name_of(self, index):
        return f"image {index}"


def make_metrics(source, predicted, confidence):
    """Return metrics of images of class 0 with these predictions."""
    label_map = build_identity_map(source.class_names)
    metrics = ClassMetrics(Labelled(source, "", [], label_map))
    count = len(predicted)
    metrics.add(
        {
            "class_BT": np.array(predicted)[:, None],
            "probability_BT": np.array(confidence)[:, None],
            "record_B": np.arange(count),
            "label_B": np.zeros(count, int),
            "loss_B": np.zeros(count),
        }
    )
    return metrics


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_figures_of_odd_names_and_images(wrong):
    predicted = [1] * wrong + [0] * (3 - wrong)
    metrics = make_metrics(Stored(), predicted, [0.75] * 3)
    transform = EvaluationTransform((8, 8), "direct", 1.0)

    drawn = (
        figures.draw_reliability(metrics),
        figures.draw_confusion(metrics),
        figures.draw_mistakes(metrics, transform),
    )

    for content in drawn:
        assert content.startswith(b"\x89PNG")


SMALL_COUNTS = {
    (4, 3): "12",
    (5, 3): "4",
    (6, 6): "2",
}


@pytest.mark.parametrize(
    ("size", "shape", "words", "expected_counts"),
    [
        (1000, (250, 113), ", the largest of 4 × 1", {}),
        (7, (7, 7), "", SMALL_COUNTS),
    ],
)
def test_a_large_matrix_keeps_its_single_cells(
    size,
    shape,
    words,
    expected_counts,
    monkeypatch,
):
    monkeypatch.setattr(figures, "to_bytes", lambda figure: figure)
    names = ("x",) * size
    label_map = dataclasses.replace(
        build_identity_map(names),
        is_allowed_K=np.arange(size) < shape[1],
    )
    source = SimpleNamespace(class_names=names)
    metrics = ClassMetrics(Labelled(source, "", [], label_map))
    metrics.confusion_2LA[:, [3, -1], [5, -1]] = [
        [1, 0],
        [3, 2],
    ]
    metrics.confusion_2LA[0, 3, 4] = 12

    axes, bar = figures.draw_confusion(metrics).axes

    cells = axes.images[0].get_array()
    row = 3 * shape[0] // size
    counts = {}
    for text in axes.texts:
        counts[text.get_position()] = text.get_text()

    assert cells.shape == shape
    assert bar.get_ylabel() == f"share of the class's images{words}"
    assert cells[-1, -1] == 1
    assert cells[row, 5] == 0.25
    assert cells[row, 4] == 0.75
    assert cells.sum() == 2
    assert counts == expected_counts


def test_bins_with_few_images_are_pale(monkeypatch):
    monkeypatch.setattr(figures, "to_bytes", lambda figure: figure)
    confidence = [0.55] * 9 + [0.95] * 10
    metrics = make_metrics(Stored(), [0] * 19, confidence)

    above, below = figures.draw_reliability(metrics).axes
    colours = {}
    for bars in above.containers:
        colour = to_hex(bars[0].get_facecolor())
        colours[bars.get_label()] = colour.upper()
    heights = []
    for bars in below.containers:
        for bar in bars:
            heights.append(bar.get_height())

    assert colours == {
        "accuracy": BLUE,
        "accuracy, fewer than 10 images": SKY,
    }
    assert heights == [10, 9]


def test_too_many_classes_for_a_matrix_are_told(here, monkeypatch):
    monkeypatch.setattr("vit_jax.evals.single_label.LARGEST_CONFUSION", 48)
    reason = "the matrix of 7 classes and 7 answers would take too much memory."

    code, _, err = run([*WORDS, "--report=report"])

    assert code == 0
    assert f"note: confusions are not counted: {reason}" in err

    names = set(list_column((here / "report").iterdir(), "name"))
    assert names == FILES - {"confusion.csv", "confusion.png"}
