"""Learning curves: the metrics of one or several runs against steps, images, compute or time."""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.storage.files import JsonObject, expand_path
from vit_jax.text.nearest import did_you_mean
from vit_jax.tools.figures.drawing import COLOURS, GREY, new_figure, shorten
from vit_jax.train.run_files import CONFIG_FILE, METRICS_FILE, read_config, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = dict[str, Any]
"""Arguments of matplotlib for a line."""
Colour = str | tuple[float, float, float, float]

MOST_LETTERS = 60  # letters of a run's name in a legend
MOST_MINUTES = 180  # end of a time axis in minutes; longer axes are in hours
LEGEND_COLUMNS = 3
LARGEST = float(np.finfo(np.float32).max)  # axes overflow for larger values of float64
MOST_MARKED = 40  # points of a curve with markers


class Curve(NamedTuple):
    """A metric over a run, in the order in which it was written."""

    step_P: np.ndarray
    value_P: np.ndarray


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The config and the metrics of a run, finished or not."""

    name: str
    config: JsonObject
    lines: Sequence[Mapping[str, float]]

    def metrics(self) -> list[str]:
        """Return the names of all values that were written."""
        names = list(self.last)
        if "step" in names:
            names.remove("step")
        return names

    @property
    def last(self) -> dict[str, float]:
        """The last value of each name, and the last step."""
        values = dict[str, float]()
        for line in self.lines:
            values |= line
        return values

    def curve(self, metric: str) -> Curve:
        """Return a metric at the steps that have a finite float32 value."""
        steps = []
        values = []
        for line in self.lines:
            if abs(line.get(metric, math.nan)) <= LARGEST:
                steps.append(line["step"])
                values.append(line[metric])
        return Curve(np.array(steps, float), np.array(values, float))

    def locate_steps(self, axis: str, step_P: np.ndarray) -> np.ndarray:
        """Return positions of steps on an axis; time in seconds.

        Compute and time are interpolated between two lines of training metrics.

        Raises:
          ValueError: the run has not written the values of the axis.
        """
        if axis == "steps":
            return step_P
        if axis == "images":
            if "global_batch" not in self.config or self.config.get("phases"):
                raise ValueError(
                    f"{self.name}: its config has phases, or no global_batch. Use --axis=steps."
                )
            return step_P * self.config["global_batch"]

        metric = AXES[axis].metric
        known = self.curve(metric)
        if len(known.step_P) == 0:
            raise ValueError(
                f"{self.name} has not written {metric}, so use --axis=steps or images."
            )
        if axis == "exaflops" and not self.config.get("phases"):  # each step costs the same
            return step_P * (known.value_P[-1] / known.step_P[-1])
        return np.interp(step_P, known.step_P, known.value_P)


class Axis(NamedTuple):
    """A horizontal axis."""

    label: str
    metric: str  # the position of a step; "" if the step itself states it


AXES = {
    "steps": Axis("training steps", ""),
    "images": Axis("images seen in training", ""),
    "exaflops": Axis("training compute (exaFLOPs)", "exaflops"),
    "time": Axis("time since the start", "wall_seconds"),
}


class Panel(NamedTuple):
    """Metrics that share a pair of axes."""

    label: str
    holds: Callable[[str], bool]
    scale: float = 1.0


PANELS = {
    "loss": Panel("loss", lambda name: name.endswith("_loss")),
    "accuracy": Panel("accuracy (%)", lambda name: name.endswith("_accuracy"), 100),
    "precision": Panel("precision and F1 (%)", lambda name: name.endswith(MULTILABEL_RESULTS), 100),
    "learning_rate": Panel("learning rate", lambda name: name == "learning_rate"),
    "speed": Panel("images per second", lambda name: name == "images_per_second"),
    "norms": Panel("Euclidean norm", lambda name: name.endswith("_norm")),
}
USUAL = ("loss", "accuracy", "precision", "learning_rate")  # panels that a run lacks are skipped


def read_run(folder: pathlib.Path, name: str) -> RunLog:
    """Read a workdir.

    Raises:
      ValueError: it has no config, or no metrics yet, or one of these files is damaged.
    """
    lines = read_metrics(folder)
    if not lines or not os.path.exists(folder / CONFIG_FILE):
        raise ValueError(
            f"{folder} has no metrics ({METRICS_FILE}, {CONFIG_FILE}): give the workdir of a run. "
            "For weights, write vit-jax evaluate WEIGHTS --data=DATA --report=FOLDER."
        )
    return RunLog(name, read_config(folder), lines)


def read_runs(folders: Sequence[str]) -> list[RunLog]:
    """Read workdirs, or all workdirs below a folder such as the folder of a study.

    Below a folder, runs without metrics are skipped. Runs are named by the parts of their paths in
    which they differ.

    Raises:
      ValueError: a folder holds no run, or as `read_run`.
    """
    workdirs = list[pathlib.Path]()
    for name in folders:
        folder = expand_path(name)
        found = [folder]
        if not (folder / METRICS_FILE).is_file():
            found = _find_workdirs(folder)
        if not found:
            raise ValueError(
                f"{name}: must have {METRICS_FILE} in it or below. Give workdirs of runs."
            )
        workdirs += [path for path in found if path not in workdirs]

    shared = os.path.commonpath([path.absolute().parent for path in workdirs])
    runs = []
    for path in workdirs:
        name = os.path.relpath(path.absolute(), shared)
        runs.append(read_run(path, name))
    return runs


def _find_workdirs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the workdirs below a folder that have metrics, without the trials inside workdirs."""
    paths = []
    for file in folder.rglob(METRICS_FILE):
        if file.exists() and file.stat().st_size > 0:
            paths.append(file.parent)

    workdirs = list[pathlib.Path]()
    for path in sorted(paths):
        if not set(workdirs).intersection(path.parents):
            workdirs.append(path)
    return workdirs


def select_panels(
    runs: Sequence[RunLog],
    asked: Sequence[str],
) -> dict[str, tuple[Panel, list[str]]]:
    """Return panels by name with their metrics: panels of `PANELS`, or of a single metric.

    Raises:
      ValueError: no run has written a metric of `asked`.
    """
    written = list[str]()
    for run in runs:
        written += [metric for metric in run.metrics() if metric not in written]

    panels = {}
    for name in asked:
        panel = PANELS.get(name) or _build_panel(name)
        metrics = [metric for metric in written if panel.holds(metric)]
        if metrics:
            panels[name] = (panel, metrics)
        elif asked != USUAL:
            hint = did_you_mean(name, [*PANELS, *written], "{}")
            raise ValueError(
                f"--metrics={name}: no run has written it.{hint} "
                f"There are {', '.join(PANELS)}, and by name {', '.join(written)}."
            )
    return panels


def _build_panel(metric: str) -> Panel:
    """Return the panel of a single metric."""
    label = metric.replace("_", " ")
    for name in ("accuracy", "precision"):
        if PANELS[name].holds(metric):
            return Panel(f"{label} (%)", metric.__eq__, 100)
    return Panel(label, metric.__eq__)


def draw_curves(
    runs: Sequence[RunLog],
    asked: Sequence[str] = USUAL,
    axis: str = "steps",
) -> "Figure":
    """Return a figure with a panel for each kind of metric.

    Runs differ by colour. The metrics of a panel differ by line style: training metrics are
    continuous lines, other metrics are dashed and have markers.

    `asked` has names of `PANELS` or of metrics; `axis` is one of `AXES`.

    Raises:
      ValueError: a metric, or the values of the axis, were not written.
    """
    panels = select_panels(runs, asked)
    num_panels = len(panels)
    legend_rows = 0
    colour_of_metrics = None
    colours: list[Colour | None] = [None]
    if len(runs) > 1:
        legend_rows = math.ceil(len(runs) / LEGEND_COLUMNS)
        colour_of_metrics = GREY
        colours = [*_choose_colours(len(runs))]

    figure = new_figure(4.2 * num_panels + 0.4, 3.4 + 0.2 * legend_rows)
    (all_axes,) = figure.subplots(1, num_panels, squeeze=False)
    unit, label = _choose_unit(runs, axis)
    for axes, (panel, metrics) in zip(all_axes, panels.values(), strict=True):
        styles = _choose_styles(metrics)
        for run, colour in zip(runs, colours, strict=True):
            _draw_run(axes, run, axis, unit, panel.scale, styles, colour)
        axes.set(xlabel=label, ylabel=panel.label)
        axes.grid(alpha=0.3)
        if len(metrics) > 1:
            axes.legend(**_build_legend(styles, colour_of_metrics, fontsize=7))

    if len(runs) > 1:
        styles = {}
        for run, colour in zip(runs, colours, strict=True):
            styles[run.name] = {"color": colour}
        figure.legend(
            **_build_legend(styles, fontsize=8),
            loc="outside lower center",
            ncols=min(len(runs), LEGEND_COLUMNS),
        )
    return figure


def _draw_run(
    axes: "Axes",
    run: RunLog,
    axis: str,
    unit: float,
    scale: float,
    styles: Mapping[str, Style],
    colour: Colour | None,
) -> None:
    """Draw the metrics of a run that have styles; positions are divided by `unit`.

    `colour` replaces the colours of the styles; None keeps them.
    """
    for metric, style in styles.items():
        step_P, value_P = run.curve(metric)
        if len(step_P) == 0:
            continue
        line = style | _choose_marker(style, len(step_P))
        if colour is not None:
            line["color"] = colour
        position_P = run.locate_steps(axis, step_P) / unit
        axes.plot(position_P, scale * value_P, **line)


def _choose_marker(style: Style, num_points: int) -> Style:
    """Return the marker of a line: single points, and broken lines with few points, have one."""
    most_marked = MOST_MARKED
    if style["linestyle"] == "-":
        most_marked = 1
    marker = None
    if num_points <= most_marked:
        marker = "o"
    return {"marker": marker, "markersize": 3}


def _build_legend(
    styles: Mapping[str, Style],
    colour: str | None = None,
    *,
    fontsize: int,
) -> dict[str, Any]:
    """Return arguments of a legend of lines by name, all of this colour if it is given."""
    from matplotlib.lines import Line2D

    lines = []
    for name, style in styles.items():
        line = Line2D([], [], label=shorten(name, MOST_LETTERS), **style)
        if colour is not None:
            line.set_color(colour)
        lines.append(line)
    return {"handles": lines, "fontsize": fontsize, "frameon": False}


def _choose_unit(runs: Sequence[RunLog], axis: str) -> tuple[float, str]:
    """Return the divisor of positions on an axis, and the label of the axis."""
    label = AXES[axis].label
    if axis != "time":
        return 1, label
    longest = 0.0
    for run in runs:
        for line in run.lines:
            longest = max(longest, line.get("wall_seconds", 0.0))
    if longest < MOST_MINUTES * 60:
        return 60, f"{label} (minutes)"
    return 3600, f"{label} (hours)"


def _choose_styles(metrics: Sequence[str]) -> dict[str, Style]:
    """Return styles of the metrics of a panel: continuous lines for training, else broken lines."""
    broken_lines = itertools.cycle(["--", ":", "-.", (0, (6, 1, 1, 1, 1, 1))])
    styles = dict[str, Style]()
    for metric, colour in zip(metrics, itertools.cycle(COLOURS), strict=False):
        is_training = metric in ("train_loss", "train_accuracy")
        line: object = "-"
        if len(metrics) > 1 and not is_training:
            line = next(broken_lines)
        styles[metric] = {
            "color": colour,
            "linestyle": line,
            "linewidth": 1.2,
        }
    return styles


def _choose_colours(count: int) -> list[Colour]:
    """Return this number of colours: a palette for the colour-blind, or shades if it is short."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    return [shades(number) for number in np.linspace(0, 0.95, count)]
