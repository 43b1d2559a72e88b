"""Learning curves: the values read from a run, its positions on each axis, and the lines that are
drawn.
"""

import json

import numpy as np
import pytest

from tests.columns import list_column
from tests.integration.commands import run, succeed
from vit_jax.tools.figures.curves import RunLog, draw_curves, read_runs

LINES = [
    {
        "step": 10,
        "train_loss": 2.0,
        "learning_rate": 0.1,
        "exaflops": 1.0,
        "wall_seconds": 120.0,
    },
    {"step": 15, "test_loss": 1.5, "test_accuracy": 0.25},
    {
        "step": 20,
        "train_loss": 1.0,
        "learning_rate": 0.05,
        "exaflops": 2.0,
        "wall_seconds": 360.0,
    },
    {
        "step": 20,
        "test_loss": float("nan"),
        "test_accuracy": 0.5,
    },
]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs `study/a`, with a trial inside, and `study/b`, which is killed while it writes a line."""
    monkeypatch.chdir(tmp_path)
    for name in ("study/a", "study/b", "study/a/search/trial"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"global_batch": 8}))
        write_lines(folder / "metrics.jsonl", LINES)
    with (tmp_path / "study/b/metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "train_l')
    return tmp_path


def read_lines(axes):
    curves = []
    for line in axes.get_lines():
        xs = line.get_xdata().tolist()
        ys = line.get_ydata().tolist()
        curves.append((xs, ys))
    return curves


def read_curve(log, name):
    steps, values = log.curve(name)
    return steps.tolist(), values.tolist()


def test_curves_hold_what_was_written(here):
    (only,) = read_runs(["study/b"])
    loss, accuracy, rate = draw_curves([only]).axes

    assert only.metrics()[:2] == ["train_loss", "learning_rate"]
    # Values that are not finite are excluded.
    assert read_curve(only, "test_loss") == ([15], [1.5])

    assert read_lines(loss) == [
        ([10, 20], [2, 1]),
        ([15], [1.5]),
    ]
    assert read_lines(accuracy) == [([15, 20], [25, 50])]
    assert loss.get_ylabel() == "loss"
    assert accuracy.get_ylabel() == "accuracy (%)"
    assert rate.get_ylabel() == "learning rate"


def test_values_that_axes_cannot_hold_are_not_drawn():
    values = (
        float("nan"),
        float("inf"),
        -float("inf"),
        1e308,
        -1e308,
        3e38,
    )
    lines = []
    for step, value in enumerate(values, 1):
        lines.append({"step": step, "test_loss": value})

    log = RunLog("x", {}, lines)

    assert read_curve(log, "test_loss") == ([6], [3e38])


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
    runs = read_runs(["study/a"])
    (axes,) = draw_curves(runs, ["test_accuracy"], axis).axes

    assert read_lines(axes) == [(positions, [25, 50])]
    assert axes.get_xlabel() == label
    assert axes.get_ylabel() == "test accuracy (%)"


def test_long_runs_have_hours():
    lines = [{"step": 1, "train_loss": 1.0, "wall_seconds": 36_000.0}]
    log = RunLog("long", {}, lines)
    (axes,) = draw_curves([log], ["loss"], "time").axes

    assert read_lines(axes) == [([10], [1])]
    assert axes.get_xlabel() == "time since the start (hours)"


def test_runs_of_a_folder_have_their_own_names(here):
    study = read_runs(["study"])
    with_trial = read_runs(["study/a", "study/a/search/trial"])

    # A folder does not include the trials of its runs.
    assert list_column(study, "name") == ["a", "b"]
    assert list_column(with_trial, "name") == ["a", "a/search/trial"]


def test_runs_of_a_folder_have_their_own_colours(here):
    runs = read_runs(["study"])
    figure = draw_curves(runs, ["loss"])
    (axes,) = figure.axes
    train_a, test_a, train_b, test_b = (line.get_color() for line in axes.get_lines())

    assert train_a == test_a
    assert train_b == test_b
    assert test_a != train_b
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]

    (axes,) = draw_curves([runs[0]] * 9, ["train_loss"]).axes
    colours = set()
    for line in axes.get_lines():
        colours.add(tuple(np.ravel(line.get_color())))

    assert len(colours) == 9


WITHOUT_TIME = '{"step": 1, "train_loss": 2.0}\n'


@pytest.fixture
def incomplete(here):
    """Add the runs `study/old`, which has not written times, and `study/bare`, which has no config."""
    for path in ("old/config.json", "old/metrics.jsonl", "bare/metrics.jsonl"):
        file = here / "study" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(WITHOUT_TIME)
    return here


NOT_WRITTEN = "old has not written wall_seconds, so use --axis=steps or images."

NO_RUN = "nowhere: must have metrics.jsonl in it or below. Give workdirs of runs."

NO_AXIS = "--axis=epochs: must be one of 'steps', 'images', 'exaflops', 'time'."


def test_a_run_of_a_folder_that_has_just_begun_is_excluded(here):
    (here / "study/c").mkdir()
    (here / "study/c/metrics.jsonl").touch()

    assert list_column(read_runs(["study"]), "name") == ["a", "b"]
    assert "study/c has no metrics" in run(["plot", "study/c"]).err


def test_a_value_that_was_written_once_is_a_point():
    log = RunLog("short", {}, LINES[:1])

    (axes,) = draw_curves([log], ["learning_rate"]).axes
    (line,) = axes.get_lines()

    assert line.get_marker() == "o"


def test_the_verb(here):
    for name in ("curves.png", "x.svg", "x.pdf"):
        assert succeed(["plot", "study", f"--output={name}"]) == f"{name}\n"
    assert (here / "x.svg").read_text().startswith("<?xml")
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing: RUN…"),
        (["nowhere"], NO_RUN),
        (["study/a", "--axis=epochs"], NO_AXIS),
        (["study/a", "--output=x.bmp"], "must end in one of .png, .svg, .pdf"),
        (["study/a", "--metrics=losss"], "no run has written it. Did you mean loss?"),
        (["study/old", "--axis=time"], NOT_WRITTEN),
        (["study/bare"], "give the workdir of a run"),
    ],
)
def test_rejections(incomplete, words, message):
    code, _, error = run(["plot", *words])

    assert code == 2, error
    assert message in error
    assert not list(incomplete.glob("*.png"))
