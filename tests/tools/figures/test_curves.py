"""Learning curves: what is read of a run, where its steps lie on each axis, and the lines that are drawn."""

import json

import numpy as np
import pytest

from tests.integration.commands import run, succeed
from vit_jax.tools.figures.curves import RunLog, draw_curves, read_runs

LINES = [
    {"step": 10, "train_loss": 2.0, "learning_rate": 0.1, "exaflops": 1.0, "wall_seconds": 120.0},
    {"step": 15, "test_loss": 1.5, "test_accuracy": 0.25},
    {"step": 20, "train_loss": 1.0, "learning_rate": 0.05, "exaflops": 2.0, "wall_seconds": 360.0},
    {"step": 20, "test_loss": float("nan"), "test_accuracy": 0.5},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs `study/a`, with a trial inside, and `study/b`, which is killed while it writes a line."""
    monkeypatch.chdir(tmp_path)
    for name in ("study/a", "study/b", "study/a/search/trial"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"global_batch": 8}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with (tmp_path / "study/b/metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "train_l')
    return tmp_path


def lines_of(axes):
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.get_lines()]


def test_curves_hold_what_was_written(here):
    (only,) = read_runs(["study/b"])

    assert only.metrics()[:2] == ["train_loss", "learning_rate"]
    assert [values.tolist() for values in only.curve("test_loss")] == [
        [15],
        [1.5],
    ]  # not what is not finite

    loss, accuracy, rate = draw_curves([only]).axes
    assert lines_of(loss) == [([10, 20], [2, 1]), ([15], [1.5])]
    assert lines_of(accuracy) == [([15, 20], [25, 50])]
    assert [axes.get_ylabel() for axes in (loss, accuracy, rate)] == [
        "loss",
        "accuracy (%)",
        "learning rate",
    ]


def test_values_that_axes_cannot_hold_are_not_drawn():
    values = (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 3e38)
    log = RunLog(
        "x", {}, [{"step": step, "test_loss": value} for step, value in enumerate(values, 1)]
    )

    assert [values.tolist() for values in log.curve("test_loss")] == [[6], [3e38]]


@pytest.mark.parametrize(
    ("axis", "positions", "label"),
    [
        ("steps", [15, 20], "training steps"),
        ("images", [120, 160], "images seen in training"),
        ("exaflops", [1.5, 2], "training compute (exaFLOPs)"),
        ("time", [4, 6], "time since the start (minutes)"),
    ],
)
def test_positions_on_an_axis(here, axis, positions, label):
    (axes,) = draw_curves(read_runs(["study/a"]), ["test_accuracy"], axis).axes

    assert (lines_of(axes), axes.get_xlabel()) == ([(positions, [25, 50])], label)
    assert axes.get_ylabel() == "test accuracy (%)"


def test_long_runs_have_hours():
    lines = [{"step": 1, "train_loss": 1.0, "wall_seconds": 36_000.0}]
    (axes,) = draw_curves([RunLog("long", {}, lines)], ["loss"], "time").axes

    assert (lines_of(axes), axes.get_xlabel()) == ([([10], [1])], "time since the start (hours)")


def test_runs_of_a_folder_have_their_own_names_and_colours(here):
    runs = read_runs(["study"])

    assert [one.name for one in runs] == ["a", "b"]  # without the trials of a
    assert [one.name for one in read_runs(["study/a", "study/a/search/trial"])] == [
        "a",
        "a/search/trial",
    ]

    figure = draw_curves(runs, ["loss"])
    (axes,) = figure.axes
    colours = [line.get_color() for line in axes.get_lines()]

    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]

    many = draw_curves([runs[0]] * 9, ["train_loss"]).axes[0].get_lines()
    assert len({tuple(np.ravel(line.get_color())) for line in many}) == 9


def test_a_run_of_a_folder_that_has_just_begun_is_left_out(here):
    (here / "study/c").mkdir()
    (here / "study/c/metrics.jsonl").touch()

    assert [one.name for one in read_runs(["study"])] == ["a", "b"]
    assert "study/c has no metrics" in run(["plot", "study/c"]).err


def test_a_value_that_was_written_once_is_a_point():
    (axes,) = draw_curves([RunLog("short", {}, LINES[:1])], ["learning_rate"]).axes
    assert [line.get_marker() for line in axes.get_lines()] == ["o"]


def test_the_verb(here):
    for name in ("curves.png", "x.svg", "x.pdf"):
        assert succeed(["plot", "study", f"--output={name}"]) == f"{name}\n"
    assert (here / "x.svg").read_text().startswith("<?xml")
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing: RUN…"),
        (["nowhere"], "nowhere: must have metrics.jsonl in it or below. Give workdirs of runs."),
        (
            ["study/a", "--axis=epochs"],
            "--axis=epochs: must be one of 'steps', 'images', 'exaflops', 'time'.",
        ),
        (["study/a", "--output=x.bmp"], "must end in one of .png, .svg, .pdf"),
        (["study/a", "--metrics=losss"], "no run has written it. Did you mean loss?"),
        (
            ["study/old", "--axis=time"],
            "old has not written wall_seconds, so use --axis=steps or images.",
        ),
        (["study/bare"], "give the workdir of a run"),
    ],
)
def test_refusals(here, words, message):
    for name, files in {
        "old": ("config.json", "metrics.jsonl"),
        "bare": ("metrics.jsonl",),
    }.items():
        (here / "study" / name).mkdir()
        for file in files:
            (here / "study" / name / file).write_text('{"step": 1, "train_loss": 2.0}\n')

    code, _, error = run(["plot", *words])

    assert (code, message in error) == (2, True), error
    assert not list(here.glob("*.png"))
