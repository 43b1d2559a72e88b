"""Results, from made-up runs: what is shown of several seeds and searched axes, and what is drawn."""

import itertools
import json

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vit_jax.tools.figures.drawing import new_figure
from vit_jax.tools.sweeps import results_table
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.tools.sweeps.grid import make_grid
from vit_jax.tools.sweeps.plots import draw, pareto_front
from vit_jax.tools.sweeps.results import build_rows, get_run_folder
from vit_jax.tools.sweeps.results_table import write_results
from vit_jax.train.run_files import write_summary


def leave(workdir, run, evaluations=(), **summary):
    """What a run that has ended leaves."""
    folder = get_run_folder(workdir, run)
    folder.mkdir(parents=True)
    costs = {"exaflops": 1.0, "parameters": 10, "wall_seconds": 2.0, "steps": 9}
    write_summary(folder, costs | summary)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))


def grid_of(name, **given):
    return make_grid(STUDIES[name], "digits_studies", [], given)


def drawn(figure):
    """Return the points of each series in the first panel."""
    axes = figure.axes[0]
    series = axes.get_legend_handles_labels()
    return {label: handle[0].get_xydata().tolist() for handle, label in zip(*series, strict=True)}


def labels_of(figure):
    """Return the point of each label in the first panel."""
    return {text.get_text(): text.xy for text in figure.axes[0].texts}


def test_seeds_make_a_mean_and_missing_runs_are_named(tmp_path):
    grid = grid_of("pooling", learning_rates=["0.001"], seeds=["0", "1"])
    for run, accuracy in zip(grid.runs, (0.5, 0.7, 0.4), strict=False):
        leave(tmp_path, run, test_accuracy=accuracy)

    token, gap = build_rows(grid, tmp_path)

    assert [token[f"test_accuracy{end}"] for end in ("", "_low", "_high")] == pytest.approx(
        [0.6, 0.5, 0.7]
    )
    assert (token["ended"], gap["ended"], gap["runs"], gap["test_accuracy"]) == (2, 1, 2, 0.4)

    table = write_results(grid, tmp_path)
    assert "Not ended: pool=gap,learning_rate=0.001,seed=1." in table
    assert "| token | 0.001         |        60.00% |  50.00% to 70.00% |" in table

    first, _ = json.loads((tmp_path / "study.json").read_text())["rows"]
    assert first["folders"] == [f"runs/{run.name}" for run in grid.runs[:2]]
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "study.svg").read_bytes()[:1000]


def test_early_stopping_and_the_search_go_by_validation_alone(tmp_path):
    """Of each run the evaluation with the best validation, of the regularisers those of the best validation."""
    grid = grid_of(
        "data_size",
        models=["ViT-48"],
        examples=["70"],
        dropouts=["0", "0.1"],
        measures=["final_accuracy"],
    )
    curves = (
        [(1, 0.3, 0.9), (2, 0.6, 0.5), (3, 0.4, 0.8)],
        [(1, 0.5, 0.7), (2, 0.2, 1.0)],
    )  # step, validation, final
    for run, curve in zip(grid.runs, curves, strict=True):
        lines = [{"step": step, "test_accuracy": a, "final_accuracy": b} for step, a, b in curve]
        leave(tmp_path, run, lines, test_accuracy=0.0, final_accuracy=0.0)

    (row,) = build_rows(grid, tmp_path)

    assert (row["final_accuracy"], row["step"], row["dropout"]) == (0.5, 2, "0")


def test_a_run_that_diverged_is_counted_and_not_drawn(tmp_path):
    grid = grid_of("optimizer", optimizers=["adam"], rate_factors=["1", "3"])
    leave(tmp_path, grid.runs[0], test_accuracy=0.5)
    leave(tmp_path, grid.runs[1], test_accuracy=None, diverged="Step 3: the loss is nan")
    (row,) = build_rows(grid, tmp_path)

    assert (row["test_accuracy"], row["rate_factor"], row["ended"], row["diverged"]) == (
        0.5,
        "1",
        2,
        1,
    )
    assert "2 of 2, 1 diverged" in write_results(grid, tmp_path)


def test_a_measure_that_runs_do_not_have_is_refused(tmp_path):
    grid = grid_of("pooling", measures=["imagenet_5shot_accuracy"])
    leave(tmp_path, grid.runs[0], test_accuracy=0.5)

    with pytest.raises(
        ValueError, match=r"has no imagenet_5shot_accuracy \(--measures=\); it has test_accuracy"
    ):
        build_rows(grid, tmp_path)


def test_without_the_evaluation_that_chooses_nothing_is_chosen(tmp_path):
    early = grid_of("data_size", models=["ViT-48"], examples=["70"])
    searched = grid_of("optimizer", measures=["test_loss"])
    leave(tmp_path, early.runs[0], [{"step": 1, "train_loss": 2.0}], test_accuracy=0.5)
    leave(tmp_path, searched.runs[0], test_accuracy=None, test_loss=1.0)

    for grid, have in ((early, "no evaluation"), (searched, "test_accuracy, test_loss")):
        with pytest.raises(
            ValueError, match=rf"no test_accuracy \(config.checkpoint.best_metric\); it has {have}"
        ):
            build_rows(grid, tmp_path)


def test_shapes_are_drawn_over_compute_relative_to_the_base(tmp_path):
    grid = grid_of("shape", shapes=["base", "depth:2", "width:2"])
    for run, cost in zip(grid.runs, (2.0, 4.0, 7.0), strict=True):
        leave(tmp_path, run, test_accuracy=cost / 10, exaflops=cost)

    figure = draw(grid.study, build_rows(grid, tmp_path), title="t")

    assert drawn(figure) == {"depth": [[1, 20], [2, 40]], "width": [[1, 20], [3.5, 70]]}
    assert labels_of(figure) == {"base": (1, 20), "×2": (3.5, 70)}  # the last of two


def test_a_shape_that_has_not_learnt_is_marked(tmp_path):
    grid = grid_of("shape", shapes=["base", "depth:2", "depth:0.5"])
    for run, accuracy in zip(grid.runs, (0.9, 0.44, 0.46), strict=True):
        leave(tmp_path, run, test_accuracy=accuracy, exaflops=1 + accuracy)

    labels = labels_of(draw(grid.study, build_rows(grid, tmp_path), title="t"))

    assert list(labels) == ["base", "×2, did not learn", "×0.5"]


def test_labels_cover_neither_each_other_nor_points():
    """At least seven of the paper's 18 points have labels, some of them close to each other."""
    figure = draw(STUDIES["scaling"], [], title="t", with_paper=True)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[-1]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
    places = axes.transData.transform([text.xy for text in axes.texts])

    assert len(boxes) > 7
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert not any(box.contains(*place) for box in boxes for place in places)


def test_a_plot_has_a_title_and_the_name_of_the_data(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        results_table, "draw", lambda *_, title, **options: titles.append(title) or new_figure(1, 1)
    )
    for data, name in (
        ("digits", "digits"),
        ("folder:/data/my-images", "my-images"),
        ("tfds:dtd", "tfds:dtd"),
    ):
        grid = make_grid(STUDIES["pooling"], "digits_studies", [f"--config.data={data}"], {})
        write_results(grid, tmp_path)
        assert titles.pop() == f"Class token or average: {name}"


def test_places_of_positions_are_beside_each_other(tmp_path):
    grid = grid_of("positions", positions=["none", "learned_1d"], seeds=["0"])
    for run in grid.runs:
        leave(tmp_path, run, test_accuracy=0.5)

    points = drawn(draw(grid.study, build_rows(grid, tmp_path), title="t"))
    places = {name: np.round([x for x, _ in place]).tolist() for name, place in points.items()}

    assert places == {"stem": [0, 1], "every": [1], "shared": [1]}


def test_the_front_is_what_nothing_cheaper_beats():
    points = [(1, 50), (2, 40), (2, 60), (3, 60), (4, 70)]
    assert pareto_front(points) == [(1, 50), (2, 60), (4, 70)]


@pytest.mark.parametrize(("exaflops", "panels"), [(1e-7, 2), (60.0, 1)])
def test_the_papers_points_are_under_ours_where_the_axes_meet(tmp_path, exaflops, panels):
    grid = grid_of("scaling", models=["ViT-48", "Hybrid"], epochs=["3"])
    for run in grid.runs:
        leave(tmp_path, run, test_accuracy=0.8, exaflops=exaflops)

    figure = draw(grid.study, build_rows(grid, tmp_path), title="t", with_paper=True)

    assert len(figure.axes) == panels

    published = [
        line.get_xdata() for line in figure.axes[-1].get_lines() if line.get_linestyle() == "None"
    ]
    assert sum(4262 in line for line in published) == 1  # ViT-H/14
    assert {"ViT", "hybrid"} <= set(figure.axes[0].get_legend_handles_labels()[1])
