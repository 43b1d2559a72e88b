"""The plots of a study: each measure over an axis, with a colour for each series."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.tools.figures import drawing
from vit_jax.tools.sweeps.catalogue import TABLE_6
from vit_jax.tools.sweeps.grid import Study

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
# Sides of a label at a point: offset in typographic points, alignment of the text
_SIDES = (
    (-5, 4, "right", "bottom"),
    (5, -4, "left", "top"),
    (-5, -4, "right", "top"),
    (5, 4, "left", "bottom"),
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
)
_PAPER_FAMILIES = {"ViT": "ViT.*", "ResNet": "R[^+]*", "hybrid": r".*\+.*"}  # patterns of names
_PAPER_TITLE = "ViT, Table 6: JFT-300M, then ImageNet"
FAILED = 0.5  # a run below this share of the base's accuracy did not learn
_MOST_TICKS = 8  # more values are not labelled one by one


def draw(study: Study, rows: Sequence[Row], *, title: str, with_paper: bool = False) -> "Figure":
    """Return a figure with a panel for each measure.

    The paper's points are drawn in the same panel if the axes overlap, otherwise in a further
    panel.
    """
    x = study.plot.x
    shown = [row for row in rows if study.measures[0] in row and x in row]
    cheapest = min(row.exaflops for row in TABLE_6)
    has_paper_panel = with_paper and all(float(row[x]) < cheapest for row in shown)
    num_panels = len(study.measures) + has_paper_panel
    figure = drawing.new_figure(_WIDTH * num_panels, _HEIGHT)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]

    if has_paper_panel:
        _draw_paper_panel(panels[-1])
    elif with_paper:
        _draw_paper_points(panels[0], f" ({_PAPER_TITLE})")
    for axes, measure in zip(panels, study.measures, strict=False):
        _draw_measure(axes, study, shown, measure)
        axes.set_xlabel(study.plot.x_label)
        axes.set_ylabel(_label_measure(measure))
        axes.set_title(drawing.short(title, 60), fontsize=10)
        axes.grid(alpha=0.3)
        if shown:
            axes.legend(title=study.plot.series.replace("_", " "), fontsize=8, title_fontsize=8)
    _place_labels(figure)
    return figure


def _label_measure(measure: str) -> str:
    """Return the label of the y axis, with its unit."""
    if measure in _LABELS:
        return _LABELS[measure]
    label = measure.replace("_", " ")
    if _is_accuracy(measure):
        return f"{label} (%)"
    if "loss" in measure:
        return f"{label} (nats)"
    return label


def _is_accuracy(measure: str) -> bool:
    return measure.endswith("_accuracy")


def _scale(measure: str) -> int:
    """Return the factor from stored to drawn values: accuracies are drawn in percent."""
    return 100 if _is_accuracy(measure) else 1


def group_series(study: Study, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by series, in the order of a numeric x; the base shape belongs to every series."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        name = str(row.get(study.plot.series, "all"))
        series.setdefault(name, []).append(row)
    if len(series) > 1:
        shared = series.pop("base", [])
        for members in series.values():
            members += shared
    if study.plot.is_log:
        for members in series.values():
            members.sort(key=lambda row: float(row[study.plot.x]))
    return series


def _draw_measure(axes: "Axes", study: Study, rows: Sequence[Row], measure: str) -> None:
    """Draw means with bars from the lowest to the highest value of the seeds."""
    plot = study.plot
    words = list(dict.fromkeys(str(row[plot.x]) for row in rows))
    series = group_series(study, rows)
    for number, (name, members) in enumerate(series.items()):
        if plot.is_log:
            x = [float(row[plot.x]) for row in members]
        else:
            shift = _SERIES_SPACING * (number - (len(series) - 1) / 2)
            x = [words.index(str(row[plot.x])) + shift for row in members]
        has_line = plot.is_log and not plot.has_front
        _draw_series(axes, number, name, x, members, measure, has_line=has_line)

    if plot.is_log:
        _set_log_axes(axes, study, rows, measure)
    else:
        _set_word_axis(axes, words)


def _draw_series(
    axes: "Axes",
    number: int,
    name: str,
    x: Sequence[float],
    rows: Sequence[Row],
    measure: str,
    *,
    has_line: bool,
) -> None:
    """Draw the points of one series, with bars only where seeds differ."""
    scale = _scale(measure)
    means = [scale * row[measure] for row in rows]
    below = [scale * (row[measure] - row[f"{measure}_low"]) for row in rows]
    above = [scale * (row[f"{measure}_high"] - row[measure]) for row in rows]
    seeds_differ = any((*below, *above))
    axes.errorbar(
        x,
        means,
        yerr=(below, above) if seeds_differ else None,
        capsize=3,
        linestyle="-" if has_line else "none",
        label=drawing.short(format_model(name), 32),
        color=drawing.COLOURS[number % len(drawing.COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
    )


def _set_word_axis(axes: "Axes", words: Sequence[str]) -> None:
    labels = [drawing.short(format_model(word)) for word in words]
    axes.set_xticks(range(len(words)), labels)
    axes.set_xlim(-0.6, len(words) - 0.4)
    axes.margins(y=0.15)


def _set_log_axes(axes: "Axes", study: Study, rows: Sequence[Row], measure: str) -> None:
    """Set the scales and ticks of numeric axes; label shapes and the points of the front."""
    x = study.plot.x
    axes.set_xscale("log")
    _set_log_ticks(axes, sorted({float(row[x]) for row in rows}))
    if not _is_accuracy(measure):
        axes.set_yscale("log")

    points = [(float(row[x]), _scale(measure) * row[measure]) for row in rows]
    bases = [row for row in rows if row.get("shape") == "base"]
    if bases:
        for row, point in zip(rows, points, strict=True):
            _write_label(axes, _label_shape(row, bases[0], measure), point)
    if study.plot.has_front:
        names = [drawing.short(format_model(str(row.get("model", ""))), 24) for row in rows]
        _draw_front(axes, points, names)


def _label_shape(row: Row, base: Row, measure: str) -> str:
    """Return the factor of a shape, and a remark if the run did not learn."""
    factor = str(row["shape"]).partition(":")[2]
    if _is_accuracy(measure) and row[measure] < FAILED * base[measure]:
        return f"×{factor}, did not learn"
    return f"×{factor}" if factor else "base"


def _set_log_ticks(axes: "Axes", values: Sequence[float]) -> None:
    """Label a logarithmic axis at its values if they are few, else at 1, 2, 5, 10, … below two decades."""
    if not values:
        return
    is_long = values[-1] >= 100 * values[0]
    has_many = len(values) > _MOST_TICKS
    if is_long and (has_many or values[0] < 1e-5):
        return
    if has_many or not all(map(_is_short, values)):
        values = _list_round_numbers(0.8 * values[0], 1.2 * values[-1])
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
    """Return a value of the axis of models for people: "ViT-B/32 width=64" for "ViT-B/32,model.width=64"."""
    return " ".join(part.removeprefix("model.") for part in value.split(","))


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, accuracy) that no cheaper or equally cheap point beats, by cost."""
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


def _draw_front(axes: "Axes", points: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
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
        _write_label(axes, names[points.index(point)], point)
    axes.margins(x=0.2, y=0.1)


def _write_label(axes: "Axes", text: str, point: tuple[float, float]) -> None:
    """Write a text at a point; `_place_labels` selects the side."""
    background = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    label = axes.annotate(
        text, point, xytext=(0, 0), textcoords="offset points", fontsize=7, bbox=background
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
        is_inside = panel.contains(*box.min) and panel.contains(*box.max)
        boxes.append(box)
        overlaps.append(sum(map(box.overlaps, occupied)) + (not is_inside))
    best = overlaps.index(min(overlaps))
    _set_side(label, _SIDES[best])
    return boxes[best]


def _set_side(label: "Annotation", side: tuple[int, int, str, str]) -> None:
    x, y, horizontal, vertical = side
    label.set(position=(x, y), ha=horizontal, va=vertical)


def _draw_paper_points(axes: "Axes", suffix: str) -> None:
    """Draw the points of the paper's Table 6, with a suffix after the names in the legend."""
    for (family, pattern), marker in zip(_PAPER_FAMILIES.items(), MARKERS, strict=False):
        rows = [row for row in TABLE_6 if re.fullmatch(pattern, row.model)]
        axes.plot(
            [row.exaflops for row in rows],
            [row.imagenet_percent for row in rows],
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
        points.append((row.exaflops, row.imagenet_percent))
        names.append(f"{row.model.replace('ViT-', '')}, {row.epochs} ep.")
    _draw_front(axes, points, names)
    axes.set_xlabel("pre-training compute (exaFLOPs)")
    axes.set_ylabel("ImageNet top-1 after fine-tuning (%)")
    axes.set_title(_PAPER_TITLE, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
