"""The folder of a report: every file against the images themselves, and what happens where it cannot be written."""

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
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.evals.label_map import Labelled, identity_map
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.imports.extras import install_command
from vit_jax.tools.figures import result_figures as figures
from vit_jax.tools.figures.drawing import BLUE, SKY
from vit_jax.weights.saving import OWN, save_weights

PIXELS = sample_pixels(20)
LABELS = np.arange(20) % 7


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Weights `w` and a folder `images` of twenty images in seven classes."""
    monkeypatch.chdir(tmp_path)
    save_weights(sample_weights(), tmp_path / "w", OWN)
    write_classes(tmp_path / "images", LABELS, PIXELS)
    return tmp_path


def rows_of(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.reader(file))


WORDS = ["evaluate", "w", "--data=folder:images", "--global_batch=8"]
TABLES = {"classes.csv", "images.csv", "confusion.csv"}
FIGURES = {"reliability.png", "confusion.png", "mistakes.png"}
FILES = {"result.json"} | TABLES | FIGURES


def test_every_file_against_the_images(here):
    out = succeed([*WORDS, "--report=report", "--csv=classes.csv"])
    assert {path.name for path in (here / "report").iterdir()} == FILES

    shares = softmax(logits_of(from_weights(sample_weights()).module, PIXELS))
    header, *rows = rows_of(here / "report/images.csv")

    assert header == ["image", "class", "answer", "probability", "is_right"]
    assert len(rows) == len({row[0] for row in rows}) == 20

    for name, label, answer, probability, is_right in rows:
        number = int(name[-7:-4])

        assert name == f"images/{label}/{number:03}.png"
        assert (label, answer) == (NAMES[LABELS[number]], NAMES[shares[number].argmax()])
        assert float(probability) == pytest.approx(shares[number].max(), abs=2e-6)
        assert is_right == str(int(label == answer))

    header, *rows = rows_of(here / "report/confusion.csv")

    assert header == ["class", *NAMES]

    counts = np.zeros((7, 7), int)
    np.add.at(counts, (LABELS, shares.argmax(axis=1)), 1)

    assert [[row[0], *map(int, row[1:])] for row in rows] == [
        [NAMES[k], *counts[k]] for k in range(7)
    ]
    assert (here / "report/classes.csv").read_text() == (here / "classes.csv").read_text()

    result = json.loads((here / "report/result.json").read_text())
    assert result["accuracy"] == np.trace(counts) / 20
    assert f"{result['accuracy']:.2%}" in out

    for name in FIGURES:
        picture = cv2.imread(str(here / "report" / name))
        assert min(picture.shape[:2]) > 300
        assert picture.std() > 10, "something is drawn"


def test_json_is_the_result_of_the_report(here):
    printed = json.loads(succeed([*WORDS, "--report=report", "--json"]))
    written = json.loads((here / "report/result.json").read_text())

    assert printed == written
    assert printed["weights"] == "w (vit_jax, parameters of step 0)"
    assert printed["unreadable_images"] == 0
    assert printed["gflops_per_image"] > 0
    assert sum(one["images"] for one in printed["calibration_bins"]) == 20

    low, high = printed["accuracy_interval"]
    assert low <= printed["accuracy"] <= high


def test_what_cannot_be_read_is_in_no_table(here):
    """A name that is no text, and an image that is none."""
    odd = here / "images" / NAMES[0] / os.fsdecode(b"caf\xe9.png")
    (here / "images" / NAMES[0] / "000.png").rename(odd)
    (here / "images" / NAMES[1] / "001.png").write_bytes(b"")
    result = json.loads(succeed([*WORDS, "--report=report", "--json"]))

    assert (result["images"], result["unreadable_images"]) == (19, 1)

    names = [row[0] for row in rows_of(here / "report/images.csv")[1:]]
    assert len(names) == 19
    assert str(odd.relative_to(here)) in names
    assert f"images/{NAMES[1]}/001.png" not in names


def test_too_many_that_cannot_be_read_leave_no_table(here):
    (here / "images" / NAMES[1] / "001.png").write_bytes(b"")
    code, _, err = run([*WORDS, "--report=report", "--max_unreadable=0"])

    assert (code, "1 images cannot be read" in err) == (2, True)
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
    """Records whose images are given; the last is damaged."""

    class_names = ("$x$", "a long name that has no room \x1b[2J")

    def __getitem__(self, index):
        from vit_jax.data.records import Record

        return Record(b"rubbish" if index else np.zeros((400, 30, 3), np.uint8), 0)

    def name_of(self, index):
        return f"image {index}"


def metrics_of(source, first, confidence):
    """Metrics of images of class 0, whose most probable outputs are `first`."""
    metrics = ClassMetrics(Labelled(source, "", [], identity_map(source.class_names)))
    rows = {"class_BT": np.array(first)[:, None], "probability_BT": np.array(confidence)[:, None]}
    rows |= {
        "record_B": np.arange(len(first)),
        "label_B": np.zeros(len(first), int),
        "loss_B": np.zeros(len(first)),
    }
    metrics.add(rows)
    return metrics


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_pictures_of_odd_names_and_images(wrong):
    metrics = metrics_of(Stored(), [1] * wrong + [0] * (3 - wrong), [0.75] * 3)
    transform = EvaluationTransform((8, 8), "direct", 1.0)

    for draw in (
        figures.draw_reliability,
        figures.draw_confusion,
        lambda one: figures.draw_mistakes(one, transform),
    ):
        assert draw(metrics).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("size", "shape", "words"), [(1000, (250, 113), ", the largest of 4 × 1"), (7, (7, 7), "")]
)
def test_a_large_matrix_keeps_its_single_cells(size, shape, words, monkeypatch):
    monkeypatch.setattr(figures, "to_bytes", lambda figure: figure)
    label_map = dataclasses.replace(
        identity_map(("x",) * size), is_allowed_K=np.arange(size) < shape[1]
    )
    metrics = ClassMetrics(Labelled(SimpleNamespace(class_names=("x",) * size), "", [], label_map))
    metrics.confusion_2LA[:, [3, -1], [5, -1]] = [[1, 0], [3, 2]]
    metrics.confusion_2LA[0, 3, 4] = 12
    axes, bar = figures.draw_confusion(metrics).axes
    cells = axes.images[0].get_array()

    assert (cells.shape, bar.get_ylabel()) == (shape, f"share of the class's images{words}")

    row = 3 * shape[0] // size
    assert (cells[-1, -1], cells[row, 5], cells[row, 4], cells.sum()) == (1, 0.25, 0.75, 2)

    counts = {(text.get_position(), text.get_text()) for text in axes.texts}
    assert counts == ({((4, 3), "12"), ((5, 3), "4"), ((6, 6), "2")} if size == 7 else set())


def test_bins_with_few_images_are_pale(monkeypatch):
    monkeypatch.setattr(figures, "to_bytes", lambda figure: figure)
    metrics = metrics_of(Stored(), [0] * 19, [0.55] * 9 + [0.95] * 10)
    above, below = figures.draw_reliability(metrics).axes
    colours = {
        bars.get_label(): to_hex(bars[0].get_facecolor()).upper() for bars in above.containers
    }

    assert colours == {"accuracy": BLUE, "accuracy, fewer than 10 images": SKY}
    assert [bar.get_height() for bars in below.containers for bar in bars] == [10, 9]


def test_too_many_classes_for_a_matrix_are_told(here, monkeypatch):
    monkeypatch.setattr("vit_jax.evals.single_label.LARGEST_CONFUSION", 48)
    code, _, err = run([*WORDS, "--report=report"])

    assert code == 0
    assert (
        "note: confusions are not counted: the matrix of 7 classes and 7 answers would take too much memory."
        in err
    )
    assert {path.name for path in (here / "report").iterdir()} == FILES - {
        "confusion.csv",
        "confusion.png",
    }
