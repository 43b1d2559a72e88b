"""Results of made-up runs: the summary of several seeds and searched axes, and the figures."""

import itertools
import json

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tests.columns import list_column
from vit_jax.tools.figures.drawing import new_figure
from vit_jax.tools.sweeps import results_table
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.tools.sweeps.grid import make_grid
from vit_jax.tools.sweeps.plots import choose_style, draw, find_pareto_front
from vit_jax.tools.sweeps.results import build_rows, get_run_folder
from vit_jax.tools.sweeps.results_table import write_results
from vit_jax.train.run_files import write_summary


def write_run(workdir, run, evaluations=(), **summary):
    """Write the files of a run that has ended."""
    folder = get_run_folder(workdir, run)
    folder.mkdir(parents=True)
    costs = {
        "exaflops": 1.0,
        "parameters": 10,
        "wall_seconds": 2.0,
        "steps": 9,
    }
    write_summary(folder, costs | summary)

    lines = [json.dumps(line) + "\n" for line in evaluations]
    (folder / "metrics.jsonl").write_text("".join(lines))


def make_study_grid(name, **values):
    return make_grid(STUDIES[name], "digits_studies", [], values)


def read_series(figure):
    """Return the points of each series in the first panel."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    series = {}
    for label, handle in zip(labels, handles, strict=True):
        series[label] = handle[0].get_xydata().tolist()
    return series


def read_labels(figure):
    """Return the point of each label in the first panel."""
    return {text.get_text(): text.xy for text in figure.axes[0].texts}


def test_seeds_make_a_mean_and_missing_runs_are_named(tmp_path):
    grid = make_study_grid(
        "pooling",
        learning_rates=["0.001"],
        seeds=["0", "1"],
    )
    write_run(tmp_path, grid.runs[0], test_accuracy=0.5)
    write_run(tmp_path, grid.runs[1], test_accuracy=0.7)
    write_run(tmp_path, grid.runs[2], test_accuracy=0.4)

    token, gap = build_rows(grid, tmp_path)

    assert token["test_accuracy"] == pytest.approx(0.6)
    assert token["test_accuracy_low"] == pytest.approx(0.5)
    assert token["test_accuracy_high"] == pytest.approx(0.7)
    assert token["ended"] == 2
    assert gap["test_accuracy"] == 0.4
    assert gap["ended"] == 1
    assert gap["runs"] == 2


def test_results_are_a_table_json_and_figures(tmp_path):
    grid = make_study_grid(
        "pooling",
        learning_rates=["0.001"],
        seeds=["0", "1"],
    )
    write_run(tmp_path, grid.runs[0], test_accuracy=0.5)
    write_run(tmp_path, grid.runs[1], test_accuracy=0.7)
    write_run(tmp_path, grid.runs[2], test_accuracy=0.4)

    table = write_results(grid, tmp_path)

    assert "Not ended: pool=gap,learning_rate=0.001,seed=1." in table
    assert "| token | 0.001         |        60.00% |  50.00% to 70.00% |" in table

    first, _ = json.loads((tmp_path / "study.json").read_text())["rows"]
    assert first["folders"] == [f"runs/{run.name}" for run in grid.runs[:2]]
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "study.svg").read_bytes()[:1000]


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (20, "| 0.001         |        50.00% | 29.93% to 70.07% |"),
        (2_000, "| 0.001         |        50.00% |        1 |"),
    ],
)
def test_single_runs_on_few_test_images_have_an_interval(
    images,
    expected,
    tmp_path,
):
    grid = make_study_grid("pooling", learning_rates=["0.001"])
    for run in grid.runs:
        write_run(tmp_path, run, test_accuracy=0.5, test_images=images)

    assert expected in write_results(grid, tmp_path)


def make_curve(*values):
    """Return evaluations from values (step, validation accuracy, final accuracy)."""
    names = ("step", "test_accuracy", "final_accuracy")
    return [dict(zip(names, value, strict=True)) for value in values]


def test_early_stopping_and_the_search_go_by_validation_alone(tmp_path):
    """Each run has its evaluation with the best validation, and the regularisers are those of the
    best one.
    """
    grid = make_study_grid(
        "data_size",
        models=["ViT-48"],
        examples=["70"],
        dropouts=["0", "0.1"],
        measures=["final_accuracy"],
    )
    without_dropout, with_dropout = grid.runs
    last = {"test_accuracy": 0.0, "final_accuracy": 0.0}
    curve = make_curve((1, 0.3, 0.9), (2, 0.6, 0.5), (3, 0.4, 0.8))
    write_run(tmp_path, without_dropout, curve, **last)
    write_run(
        tmp_path,
        with_dropout,
        make_curve((1, 0.5, 0.7), (2, 0.2, 1.0)),
        **last,
    )

    (row,) = build_rows(grid, tmp_path)

    assert row["final_accuracy"] == 0.5
    assert row["step"] == 2
    assert row["dropout"] == "0"


def test_a_run_that_diverged_is_counted_and_not_drawn(tmp_path):
    grid = make_study_grid(
        "optimizer",
        optimizers=["adam"],
        rate_factors=["1", "3"],
    )
    write_run(tmp_path, grid.runs[0], test_accuracy=0.5)
    write_run(
        tmp_path,
        grid.runs[1],
        test_accuracy=None,
        diverged="Step 3: the loss is nan",
    )

    (row,) = build_rows(grid, tmp_path)

    assert row["test_accuracy"] == 0.5
    assert row["rate_factor"] == "1"
    assert row["ended"] == 2
    assert row["diverged"] == 1
    assert "2 of 2, 1 diverged" in write_results(grid, tmp_path)


def test_a_measure_that_runs_do_not_have_is_rejected(tmp_path):
    grid = make_study_grid("pooling", measures=["imagenet_5shot_accuracy"])
    write_run(tmp_path, grid.runs[0], test_accuracy=0.5)
    message = r"has no imagenet_5shot_accuracy \(--measures=\); it has test_accuracy"

    with pytest.raises(ValueError, match=message):
        build_rows(grid, tmp_path)


def test_early_stopping_needs_an_evaluation(tmp_path):
    grid = make_study_grid(
        "data_size",
        models=["ViT-48"],
        examples=["70"],
    )
    evaluations = [{"step": 1, "train_loss": 2.0}]
    write_run(tmp_path, grid.runs[0], evaluations, test_accuracy=0.5)
    message = r"no test_accuracy \(config.checkpoint.best_metric\); it has no evaluation"

    with pytest.raises(ValueError, match=message):
        build_rows(grid, tmp_path)


def test_a_search_needs_the_metric_that_chooses(tmp_path):
    grid = make_study_grid("optimizer", measures=["test_loss"])
    write_run(
        tmp_path,
        grid.runs[0],
        test_accuracy=None,
        test_loss=1.0,
    )
    message = r"no test_accuracy \(config.checkpoint.best_metric\); it has test_accuracy, test_loss"

    with pytest.raises(ValueError, match=message):
        build_rows(grid, tmp_path)


def test_shapes_are_drawn_over_compute_relative_to_the_base(tmp_path):
    grid = make_study_grid("shape", shapes=["base", "depth:2", "width:2"])
    for run, exaflops in zip(grid.runs, (2.0, 4.0, 7.0), strict=True):
        write_run(
            tmp_path,
            run,
            test_accuracy=exaflops / 10,
            exaflops=exaflops,
        )

    figure = draw(grid.study, build_rows(grid, tmp_path), title="t")

    assert read_series(figure) == {
        "depth": [
            [1, 20],
            [2, 40],
        ],
        "width": [
            [1, 20],
            [3.5, 70],
        ],
    }
    # The last of the two points ×2 has the label.
    assert read_labels(figure) == {
        "base": (1, 20),
        "×2": (3.5, 70),
    }


def test_a_shape_that_has_not_learnt_is_marked(tmp_path):
    grid = make_study_grid("shape", shapes=["base", "depth:2", "depth:0.5"])
    for run, accuracy in zip(grid.runs, (0.9, 0.44, 0.46), strict=True):
        write_run(
            tmp_path,
            run,
            test_accuracy=accuracy,
            exaflops=1 + accuracy,
        )

    labels = read_labels(draw(grid.study, build_rows(grid, tmp_path), title="t"))

    assert list(labels) == ["base", "×2, did not learn", "×0.5"]


def test_labels_cover_neither_each_other_nor_points():
    """At least seven of the paper's 18 points have labels, some of them close to each other."""
    figure = draw(
        STUDIES["scaling"],
        [],
        title="t",
        with_paper=True,
    )
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[-1]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
    points = axes.transData.transform(list_column(axes.texts, "xy"))

    assert len(boxes) > 7
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box, point in itertools.product(boxes, points):
        assert not box.contains(*point)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("digits", "digits"),
        ("folder:/data/my-images", "my-images"),
        ("tfds:dtd", "tfds:dtd"),
    ],
)
def test_a_plot_has_a_title_and_the_name_of_the_data(
    tmp_path,
    monkeypatch,
    data,
    name,
):
    titles = []

    def record_title(*_, title, **options):
        titles.append(title)
        return new_figure(1, 1)

    monkeypatch.setattr(results_table, "draw", record_title)
    grid = make_grid(
        STUDIES["pooling"],
        "digits_studies",
        [f"--config.data={data}"],
        {},
    )
    write_results(grid, tmp_path)

    assert titles == [f"Class token or average: {name}"]


def test_places_of_positions_are_beside_each_other(tmp_path):
    grid = make_study_grid(
        "positions",
        positions=["none", "learned_1d"],
        seeds=["0"],
    )
    for run in grid.runs:
        write_run(tmp_path, run, test_accuracy=0.5)

    figure = draw(grid.study, build_rows(grid, tmp_path), title="t")

    places = {}
    for name, points in read_series(figure).items():
        places[name] = [round(x) for x, _ in points]
    assert places == {
        "stem": [0, 1],
        "every": [1],
        "shared": [1],
    }


def test_the_front_is_what_nothing_cheaper_beats():
    points = [
        (1, 50),
        (2, 40),
        (2, 60),
        (3, 60),
        (4, 70),
    ]
    assert find_pareto_front(points) == [
        (1, 50),
        (2, 60),
        (4, 70),
    ]


@pytest.mark.parametrize(
    ("exaflops", "panels"),
    [
        (1e-7, 2),
        (60.0, 1),
    ],
)
def test_the_papers_points_are_under_ours_where_the_axes_meet(
    tmp_path,
    exaflops,
    panels,
):
    vit_h14_exaflops = 4262
    grid = make_study_grid(
        "scaling",
        models=["ViT-48", "Hybrid"],
        epochs=["3"],
    )
    for run in grid.runs:
        write_run(
            tmp_path,
            run,
            test_accuracy=0.8,
            exaflops=exaflops,
        )

    figure = draw(
        grid.study,
        build_rows(grid, tmp_path),
        title="t",
        with_paper=True,
    )

    assert len(figure.axes) == panels

    lines = figure.axes[-1].get_lines()
    published = []
    for line in lines:
        if line.get_linestyle() == "None":
            published.append(line.get_xdata())

    assert sum(vit_h14_exaflops in line for line in published) == 1

    _, labels = figure.axes[0].get_legend_handles_labels()
    assert {"ViT", "hybrid"} <= set(labels)


def test_series_differ_in_colour_or_marker():
    """Also those beyond the number of colours, as of nine networks."""
    styles = [choose_style(number) for number in range(49)]
    assert len(set(styles)) == 49
