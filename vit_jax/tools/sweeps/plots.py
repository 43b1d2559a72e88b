"""The plot of a study: each measure over an axis, with a colour for each series."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.tools.figures import drawing
from vit_jax.tools.sweeps.catalogue import TABLE_6
from vit_jax.tools.sweeps.grid import Plot, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import BboxBase

Row = Mapping[str, Any]

MARKERS = "osD^vPX"  # beside the colour, for readers who cannot tell colours apart
_LABELS = {"images_per_second": "images per second", "largest_batch": "largest batch (images)"}
_WIDTH = 6.4
_HEIGHT = 4.2  # inches of a panel
_SERIES_SPACING = 0.15  # on an axis of words, where series stand side by side


class _Side(NamedTuple):
    """A side of a point for its label: offset in typographic points, alignment of the text."""

    x: int
    y: int
    horizontal: str
    vertical: str


_SIDES = (
    _Side(-5, 4, "right", "bottom"),
    _Side(5, -4, "left", "top"),
    _Side(-5, -4, "right", "top"),
    _Side(5, 4, "left", "bottom"),
    _Side(0, 7, "center", "bottom"),
    _Side(0, -7, "center", "top"),
)
_PAPER_FAMILIES = {"ViT": "ViT.*", "ResNet": "R[^+]*", "hybrid": r".*\+.*"}  # patterns of names
_PAPER_TITLE = "ViT, Table 6: JFT-300M, then ImageNet"
FAILED = 0.5  # a run below this share of the base's accuracy did not learn
_MOST_TICKS = 8  # more values are not labelled one by one


def draw(
    study: Study,
    rows: Sequence[Row],
    *,
    title: str,
    with_paper: bool = False,
) -> "Figure":
    """Return a figure with a panel for each measure.

    The paper's points are drawn in the same panel if the axes overlap, otherwise in a further
    panel.
    """
    required = {study.measures[0], study.plot.x}
    shown = [row for row in rows if required <= row.keys()]
    has_paper_panel = with_paper and _are_cheaper_than_paper(shown, study.plot)

    num_panels = len(study.measures)
    if has_paper_panel:
        num_panels += 1
    figure = drawing.new_figure(_WIDTH * num_panels, _HEIGHT)
    (all_axes,) = figure.subplots(1, num_panels, squeeze=False)
    if has_paper_panel:
        _draw_paper_panel(all_axes[-1])
    elif with_paper:
        _draw_paper_points(all_axes[0], f" ({_PAPER_TITLE})")

    short_title = drawing.shorten(title, 60)
    for axes, measure in zip(all_axes, study.measures, strict=False):
        panel = _Panel(axes, study.plot, shown, measure)
        panel.draw(short_title)
    _place_labels(figure)
    return figure


def _are_cheaper_than_paper(rows: Sequence[Row], plot: Plot) -> bool:
    """Return True if no row has the compute of the paper's cheapest model."""
    cheapest = min(row.exaflops for row in TABLE_6)
    return all(float(row[plot.x]) < cheapest for row in rows)


class _Panel:
    """The panel of one measure.

    Attributes:
      axes: axes to draw on.
      plot: the meaning of both axes, and the column with the names of the series.
      rows: settings with a value of the measure.
      measure: name of the result.
      is_accuracy: True for a share, which is drawn in percent.
      words: values on an x axis without numbers, from left to right.
    """

    def __init__(
        self,
        axes: "Axes",
        plot: Plot,
        rows: Sequence[Row],
        measure: str,
    ):
        self.axes = axes
        self.plot = plot
        self.rows = rows
        self.measure = measure
        self.is_accuracy = measure.endswith("_accuracy")
        words = [str(row[plot.x]) for row in rows]
        self.words = list(dict.fromkeys(words))

    def draw(self, title: str) -> None:
        """Draw all series, scales and labels."""
        self._draw_all_series()
        if self.plot.is_log:
            self._set_log_scales()
            self._label_shapes()
        else:
            self._set_words()
        if self.plot.has_front:
            self._draw_front()

        self.axes.set_xlabel(self.plot.x_label)
        self.axes.set_ylabel(self._label_measure())
        self.axes.set_title(title, fontsize=10)
        self.axes.grid(alpha=0.3)
        if self.rows:
            self._add_legend()

    def _add_legend(self) -> None:
        """Name the series, beside the axes if they are many."""
        place: dict[str, Any] = {}
        _, names = self.axes.get_legend_handles_labels()
        if len(names) > len(drawing.COLOURS):
            place = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        self.axes.legend(
            title=self.plot.series.replace("_", " "),
            fontsize=8,
            title_fontsize=8,
            **place,
        )

    def get_x(self, row: Row) -> float:
        """Return the number of a row, or the position of its word."""
        value = row[self.plot.x]
        if self.plot.is_log:
            return float(value)
        return self.words.index(str(value))

    def scale(self, value: float) -> float:
        """Return a stored value as it is drawn."""
        if self.is_accuracy:
            return 100 * value
        return value

    def get_point(self, row: Row) -> tuple[float, float]:
        """Return the point of a row as it is drawn."""
        return self.get_x(row), self.scale(row[self.measure])

    def _draw_all_series(self) -> None:
        """Draw each series; on an axis of words, series stand side by side."""
        series = group_series(self.plot, self.rows)
        middle = (len(series) - 1) / 2
        for number, (name, members) in enumerate(series.items()):
            shift = 0.0
            if not self.plot.is_log:
                shift = _SERIES_SPACING * (number - middle)
            self._draw_series(number, name, members, shift)

    def _draw_series(
        self,
        number: int,
        name: str,
        rows: Sequence[Row],
        shift: float,
    ) -> None:
        """Draw means, with bars from the lowest to the highest value where seeds differ."""
        x = []
        means = []
        below = []
        above = []
        for row in rows:
            mean = row[self.measure]
            low = row[f"{self.measure}_low"]
            high = row[f"{self.measure}_high"]
            x.append(self.get_x(row) + shift)
            means.append(self.scale(mean))
            below.append(self.scale(mean - low))
            above.append(self.scale(high - mean))

        bars = None
        if any(below) or any(above):
            bars = (below, above)
        has_line = self.plot.is_log and not self.plot.has_front
        color, marker = choose_style(number)
        self.axes.errorbar(
            x,
            means,
            yerr=bars,
            capsize=3,
            linestyle="-" if has_line else "none",
            label=drawing.shorten(format_model(name), 32),
            color=color,
            marker=marker,
        )

    def _set_words(self) -> None:
        """Label the x axis with words."""
        num_words = len(self.words)
        labels = [drawing.shorten(format_model(word)) for word in self.words]
        self.axes.set_xticks(range(num_words), labels)
        self.axes.set_xlim(-0.6, num_words - 0.4)
        self.axes.margins(y=0.15)

    def _set_log_scales(self) -> None:
        """Set logarithmic scales, except for accuracies."""
        values = {self.get_x(row) for row in self.rows}
        self.axes.set_xscale("log")
        _set_log_ticks(self.axes, sorted(values))
        if not self.is_accuracy:
            self.axes.set_yscale("log")

    def _label_shapes(self) -> None:
        """Write the factor of each shape beside its point, if the base shape has a point."""
        bases = [row for row in self.rows if row.get("shape") == "base"]
        if not bases:
            return

        least = FAILED * bases[0][self.measure]
        for row in self.rows:
            _, _, factor = str(row["shape"]).partition(":")
            label = "base"
            if factor:
                label = f"×{factor}"
            if self.is_accuracy and row[self.measure] < least:
                label = f"×{factor}, did not learn"
            point = self.get_point(row)
            _write_label(self.axes, label, point)

    def _draw_front(self) -> None:
        """Draw the Pareto front with the names of the models on it."""
        points = []
        names = []
        for row in self.rows:
            model = str(row.get("model", ""))
            points.append(self.get_point(row))
            names.append(drawing.shorten(format_model(model), 24))
        _draw_front(self.axes, points, names)

    def _label_measure(self) -> str:
        """Return the label of the y axis, with its unit."""
        if self.measure in _LABELS:
            return _LABELS[self.measure]
        label = self.measure.replace("_", " ")
        if self.is_accuracy:
            return f"{label} (%)"
        if "loss" in self.measure:
            return f"{label} (nats)"
        return label


def group_series(plot: Plot, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by series, in the order of a numeric x.

    The base shape belongs to every series.
    """
    series: dict[str, list[Row]] = {}
    for row in rows:
        name = str(row.get(plot.series, "all"))
        series.setdefault(name, []).append(row)
    if len(series) > 1:
        shared = series.pop("base", [])
        for members in series.values():
            members += shared
    if plot.is_log:
        for members in series.values():
            members.sort(key=lambda row: float(row[plot.x]))
    return series


def _set_log_ticks(axes: "Axes", values: Sequence[float]) -> None:
    """Label a logarithmic axis at its values if they are few.

    Other axes are labelled at 1, 2, 5, 10, … below two decades.
    """
    if not values:
        return
    lowest = values[0]
    highest = values[-1]
    is_long = highest >= 100 * lowest
    has_many = len(values) > _MOST_TICKS
    if is_long and (has_many or lowest < 1e-5):
        return

    if has_many or not all(map(_is_short, values)):
        values = _list_round_numbers(0.8 * lowest, 1.2 * highest)
    axes.set_xticks(values, [f"{value:,g}" for value in values])
    axes.minorticks_off()


def _is_short(value: float) -> bool:
    """Return True for a number of at most three digits, or from 1000."""
    return value >= 1000 or f"{value:g}" == f"{value:.3g}"


def _list_round_numbers(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 of each decade between two limits."""
    numbers = []
    for power in range(-12, 13):
        for digit in (1, 2, 5):
            number = digit * 10.0**power
            if low <= number <= high:
                numbers.append(number)
    return numbers


def format_model(value: str) -> str:
    """Return a value of the axis of models for people.

    "ViT-B/32,model.width=64" becomes "ViT-B/32 width=64".
    """
    parts = [part.removeprefix("model.") for part in value.split(",")]
    return " ".join(parts)


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, accuracy) that no cheaper or equally cheap point beats, by cost."""

    def rank(point: tuple[float, float]) -> tuple[float, float]:
        cost, accuracy = point
        return cost, -accuracy

    front = list[tuple[float, float]]()
    best_accuracy = -math.inf
    for cost, accuracy in sorted(points, key=rank):
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            front.append((cost, accuracy))
    return front


def _draw_front(
    axes: "Axes",
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
) -> None:
    """Draw the best result for each cost, with a name at each point of this front."""
    front = find_pareto_front(points)
    if front:
        costs, accuracies = zip(*front, strict=True)
        axes.step(
            costs,
            accuracies,
            where="post",
            label="best so far",
            color=drawing.GREY,
            linewidth=1,
            zorder=0,
        )
    for point in front:
        name = names[points.index(point)]
        _write_label(axes, name, point)
    axes.margins(x=0.2, y=0.1)


def _write_label(
    axes: "Axes",
    text: str,
    point: tuple[float, float],
) -> None:
    """Write a text at a point; `_place_labels` selects the side."""
    background = {
        "facecolor": "white",
        "edgecolor": "none",
        "alpha": 0.7,
        "pad": 0.5,
    }
    label = axes.annotate(
        text,
        point,
        xytext=(0, 0),
        textcoords="offset points",
        fontsize=7,
        bbox=background,
    )
    label.set_in_layout(False)


def _place_labels(figure: "Figure") -> None:
    """Move each label to the side of its point with the fewest overlaps.

    A label should not cover a point, the legend, or a label that was placed before it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = [text for text in axes.texts if isinstance(text, Annotation)]
        occupied: list[BboxBase] = []
        for label in labels:
            x, y = axes.transData.transform(label.xy)
            occupied.append(Bbox.from_bounds(x - 4, y - 4, 8, 8))

        legend = axes.get_legend()
        if legend:
            occupied.append(legend.get_window_extent(renderer))
        for label in labels:
            occupied.append(_place_label(label, axes.bbox, occupied, renderer))


def choose_style(number: int) -> tuple[str, str]:
    """Return colour and marker of a series; the first 49 have different pairs."""
    cycle, position = divmod(number, len(drawing.COLOURS))
    colour = drawing.COLOURS[position]
    marker = MARKERS[(position + cycle) % len(MARKERS)]
    return colour, marker


def _place_label(
    label: "Annotation",
    panel: "BboxBase",
    occupied: "Sequence[BboxBase]",
    renderer: "RendererAgg",
) -> "BboxBase":
    """Move a label to the first of the best sides, and return its box in pixels."""
    boxes = []
    overlaps = []
    for side in _SIDES:
        _set_side(label, side)
        box = label.get_window_extent(renderer)
        num_overlaps = sum(map(box.overlaps, occupied))
        is_inside = panel.contains(*box.min) and panel.contains(*box.max)
        if not is_inside:
            num_overlaps += 1
        boxes.append(box)
        overlaps.append(num_overlaps)

    best = overlaps.index(min(overlaps))
    _set_side(label, _SIDES[best])
    return boxes[best]


def _set_side(label: "Annotation", side: _Side) -> None:
    """Move a label to a side of its point."""
    label.set(position=(side.x, side.y), ha=side.horizontal, va=side.vertical)


def _draw_paper_points(axes: "Axes", suffix: str) -> None:
    """Draw the points of the paper's Table 6, with a suffix after the names in the legend."""
    for (family, pattern), marker in zip(_PAPER_FAMILIES.items(), MARKERS, strict=False):
        exaflops = []
        percents = []
        for row in TABLE_6:
            if re.fullmatch(pattern, row.model):
                exaflops.append(row.exaflops)
                percents.append(row.imagenet_percent)
        axes.plot(
            exaflops,
            percents,
            marker,
            label=f"{family}{suffix}",
            color=drawing.BLACK,
            fillstyle="none",
            alpha=0.6,
            zorder=0,
        )


def _draw_paper_panel(axes: "Axes") -> None:
    """Draw the paper's Table 6 with its Pareto front in a separate panel."""
    _draw_paper_points(axes, "")
    axes.set_xscale("log")
    points = []
    names = []
    for row in TABLE_6:
        size = row.model.replace("ViT-", "")
        points.append((row.exaflops, row.imagenet_percent))
        names.append(f"{size}, {row.epochs} ep.")
    _draw_front(axes, points, names)

    axes.set_xlabel("pre-training compute (exaFLOPs)")
    axes.set_ylabel("ImageNet top-1 after fine-tuning (%)")
    axes.set_title(_PAPER_TITLE, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
