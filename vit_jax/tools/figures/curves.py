"""Learning curves: the metrics of one run or of several, against steps, images, compute or time."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.storage.files import expanded
from vit_jax.text.nearest import did_you_mean
from vit_jax.tools.figures.drawing import COLOURS, GREY, new_figure, short
from vit_jax.train.run_files import CONFIG_FILE, METRICS_FILE, read_config, read_metrics

MOST_LETTERS = 60  # of a run's name in a legend
MOST_MINUTES = 180  # on an axis of time, before it has hours
LEGEND_COLUMNS = 3
LARGEST = float(np.finfo(np.float32).max)  # axes overflow for larger values of float64
MOST_MARKED = 40  # points of a curve that are drawn as points too


class Curve(NamedTuple):
    """A metric over a run, in the order in which it was written."""

    step_P: np.ndarray
    value_P: np.ndarray


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The config and the metrics of a run, finished or not."""

    name: str
    config: Mapping[str, Any]
    lines: Sequence[Mapping[str, float]]

    def metrics(self) -> list[str]:
        """Return the names of all values that were written."""
        return [
            name
            for name in dict.fromkeys(name for line in self.lines for name in line)
            if name != "step"
        ]

    @property
    def last(self) -> dict[str, float]:
        """The last value of each name, and the last step."""
        return {name: value for line in self.lines for name, value in line.items()}

    def curve(self, metric: str) -> Curve:
        """Return a metric where it was written as a finite number of float32, as metrics are."""
        points = [
            (line["step"], line[metric])
            for line in self.lines
            if abs(line.get(metric, math.nan)) <= LARGEST
        ]
        return Curve(*np.array(points, float).reshape(-1, 2).T)

    def over(self, axis: str, step_P: np.ndarray) -> np.ndarray:
        """Return positions of steps on an axis, time in seconds, interpolated between two lines of training metrics.

        Raises:
          ValueError: the run has not written it.
        """
        if axis == "steps":
            return step_P
        if axis == "images":
            if "global_batch" not in self.config or self.config.get("phases"):
                raise ValueError(
                    f"{self.name}: its config has phases, or no global_batch. Use --axis=steps."
                )
            return step_P * self.config["global_batch"]
        known = self.curve(AXES[axis].metric)
        if not len(known.step_P):
            raise ValueError(
                f"{self.name} has not written {AXES[axis].metric}, so use --axis=steps or images."
            )
        if axis == "exaflops" and not self.config.get("phases"):  # each step costs the same
            return step_P * (known.value_P[-1] / known.step_P[-1])
        return np.interp(step_P, known.step_P, known.value_P)


class Axis(NamedTuple):
    """A horizontal axis."""

    label: str
    metric: str  # that tells where a step is, "" where none is needed


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
USUAL = ("loss", "accuracy", "precision", "learning_rate")  # of a run those that it has


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
    """Read workdirs, or all workdirs below a folder such as that of a study; runs without metrics are skipped.

    Runs are named by the parts of their paths in which they differ.

    Raises:
      ValueError: a folder holds no run, or as `read_run`.
    """
    workdirs = list[pathlib.Path]()
    for name in folders:
        folder = expanded(name)
        inside = [folder] if (folder / METRICS_FILE).is_file() else _workdirs_below(folder)
        if not inside:
            raise ValueError(
                f"{name}: must have {METRICS_FILE} in it or below. Give workdirs of runs."
            )
        workdirs += [path for path in inside if path not in workdirs]
    shared = os.path.commonpath([path.absolute().parent for path in workdirs])
    return [read_run(path, os.path.relpath(path.absolute(), shared)) for path in workdirs]


def _workdirs_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return workdirs of runs that have written metrics, without the trials inside them."""
    files = (
        path for path in folder.rglob(METRICS_FILE) if path.exists() and path.stat().st_size > 0
    )
    workdirs = list[pathlib.Path]()
    for path in sorted(path.parent for path in files):
        if not any(outer in path.parents for outer in workdirs):
            workdirs.append(path)
    return workdirs


def select_panels(
    runs: Sequence[RunLog], asked: Sequence[str]
) -> dict[str, tuple[Panel, list[str]]]:
    """Return panels by name, each with its metrics: one of `PANELS`, or a single metric.

    Raises:
      ValueError: no run has written a metric that was asked for.
    """
    written = list(dict.fromkeys(metric for run in runs for metric in run.metrics()))
    chosen = {}
    for name in asked:
        panel = PANELS.get(name) or _own_panel(name)
        metrics = [metric for metric in written if panel.holds(metric)]
        if metrics:
            chosen[name] = (panel, metrics)
        elif (
            asked != USUAL
        ):  # pixels that are predicted have no accuracy, and few runs several labels
            hint = did_you_mean(name, [*PANELS, *written], "{}")
            raise ValueError(
                f"--metrics={name}: no run has written it.{hint} There are {', '.join(PANELS)}, and by name "
                f"{', '.join(written)}."
            )
    return chosen


def _own_panel(metric: str) -> Panel:
    words = metric.replace("_", " ")
    is_share = any(PANELS[name].holds(metric) for name in ("accuracy", "precision"))
    return Panel(f"{words} (%)" if is_share else words, metric.__eq__, 100 if is_share else 1)


def draw_curves(runs: Sequence[RunLog], asked: Sequence[str] = USUAL, axis: str = "steps") -> Any:
    """Return a figure with a panel for each kind of metric.

    Runs are told apart by colour, metrics of a panel by the line: training metrics thin, others by
    dashes and points.

    `asked` has names of `PANELS` or of metrics; `axis` is one of `AXES`.

    Raises:
      ValueError: a metric, or the values of the axis, were not written.
    """
    panels = select_panels(runs, asked)
    figure = new_figure(
        4.2 * len(panels) + 0.4,
        3.4 + 0.2 * (-(-len(runs) // LEGEND_COLUMNS) if len(runs) > 1 else 0),
    )
    colours = _colours(len(runs))
    (unit, label) = _unit(runs, axis)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (panel, metrics) in zip(every, panels.values(), strict=True):
        styles = dict(zip(metrics, _styles(metrics), strict=True))
        for run, colour in zip(runs, colours, strict=True):
            for metric, style in styles.items():
                step_P, value_P = run.curve(metric)
                if len(step_P):
                    is_marked = len(step_P) == 1 or (
                        style["linestyle"] != "-" and len(step_P) <= MOST_MARKED
                    )
                    one = {"marker": "o" if is_marked else None, "markersize": 3}
                    one |= {"color": colour} if len(runs) > 1 else {}
                    axes.plot(run.over(axis, step_P) / unit, panel.scale * value_P, **style | one)
        axes.set(xlabel=label, ylabel=panel.label)
        axes.grid(alpha=0.3)
        if len(metrics) > 1:
            grey = {"color": GREY} if len(runs) > 1 else {}  # colours are those of runs
            axes.legend(
                **_legend({name: style | grey for name, style in styles.items()}, fontsize=7)
            )
    if len(runs) > 1:
        names = {run.name: {"color": colour} for run, colour in zip(runs, colours, strict=True)}
        columns = min(len(runs), LEGEND_COLUMNS)
        figure.legend(**_legend(names, fontsize=8), loc="outside lower center", ncols=columns)
    return figure


def _legend(styles: Mapping[str, Mapping[str, Any]], *, fontsize: int) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], label=short(name, MOST_LETTERS), **style) for name, style in styles.items()
    ]
    return {"handles": lines, "fontsize": fontsize, "frameon": False}


def _unit(runs: Sequence[RunLog], axis: str) -> tuple[float, str]:
    """Return the divisor of positions on an axis, and the axis's name."""
    label = AXES[axis].label
    if axis != "time":
        return 1, label
    longest = max(line.get("wall_seconds", 0) for run in runs for line in run.lines)
    return (60, f"{label} (minutes)") if longest < MOST_MINUTES * 60 else (3600, f"{label} (hours)")


def _styles(metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return styles of the metrics of a panel: continuous lines for training, different broken lines for others."""
    broken = ["--", ":", "-.", (0, (6, 1, 1, 1, 1, 1))]
    styles = list[dict[str, Any]]()
    num_broken = 0
    for number, metric in enumerate(metrics):
        is_trained = metric in ("train_loss", "train_accuracy") or len(metrics) == 1
        style = "-" if is_trained else broken[num_broken % len(broken)]
        num_broken += not is_trained
        styles.append(
            {"color": COLOURS[number % len(COLOURS)], "linestyle": style, "linewidth": 1.2}
        )
    return styles


def _colours(count: int) -> list[Any]:
    """Return this number of colours: a palette for the colour-blind, or shades if it is too short."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps

    return [colormaps["viridis"](number) for number in np.linspace(0, 0.95, count)]
