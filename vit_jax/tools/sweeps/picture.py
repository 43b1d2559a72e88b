"""The picture of a study: each measure over an axis, with a colour for each series."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.tools.figures import drawing
from vit_jax.tools.sweeps.catalogue import TABLE_6
from vit_jax.tools.sweeps.grid import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX"  # beside the colour, for those who cannot tell colours apart
_LABELS = {"images_per_second": "images per second", "largest_batch": "largest batch (images)"}
_WIDTH = 6.4
_HEIGHT = 4.2  # inches of a panel
# Places of a label beside a point: offset in typographic points, alignment of the text
_SIDES = (
    (-5, 4, "right", "bottom"),
    (5, -4, "left", "top"),
    (-5, -4, "right", "top"),
    (5, 4, "left", "bottom"),
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
)
_KINDS = {"ViT": "ViT.*", "ResNet": "R[^+]*", "hybrid": r".*\+.*"}  # patterns of the paper's models
FAILED = 0.5  # of the base's accuracy: a run below this share did not learn


def draw(
    study: Study, rows: Sequence[Mapping[str, Any]], *, title: str, with_paper: bool = False
) -> "Figure":
    """Return a figure with a panel for each measure.

    The paper's points are drawn in the same panel if the axes overlap, otherwise in a panel of
    their own.
    """
    drawn = [row for row in rows if study.measures[0] in row and study.picture.x in row]
    cheapest = min(row.exaflops for row in TABLE_6)
    beside = with_paper and all(float(row[study.picture.x]) < cheapest for row in drawn)
    num_panels = len(study.measures) + beside
    figure = drawing.new_figure(_WIDTH * num_panels, _HEIGHT)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    if with_paper:
        _draw_paper(panels[-1 if beside else 0], is_alone=beside)
    for axes, measure in zip(panels, study.measures, strict=False):
        _draw_measure(axes, study, drawn, measure)
        axes.set_xlabel(study.picture.x_label)
        axes.set_ylabel(_measure_label(measure))
        axes.set_title(drawing.short(title, 60), fontsize=10)
        axes.grid(alpha=0.3)
        if drawn:
            axes.legend(title=study.picture.series.replace("_", " "), fontsize=8, title_fontsize=8)
    _place_labels(figure)
    return figure


def _measure_label(measure: str) -> str:
    if measure in _LABELS:
        return _LABELS[measure]
    return f"{measure.replace('_', ' ')}{' (%)' if _is_fraction(measure) else ' (nats)' if 'loss' in measure else ''}"


def _is_fraction(measure: str) -> bool:
    return measure.endswith("_accuracy")


def series_of(
    study: Study, rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[Mapping[str, Any]]]:
    """Return rows by series, in the order of a numeric x; the base shape belongs to every series."""
    series = dict[str, list[Mapping[str, Any]]]()
    for row in rows:
        series.setdefault(str(row.get(study.picture.series, "all")), []).append(row)
    if len(series) > 1:
        shared = series.pop("base", [])
        series = {name: [*members, *shared] for name, members in series.items()}
    if study.picture.is_log:
        for members in series.values():
            members.sort(key=lambda row: float(row[study.picture.x]))
    return series


def _draw_measure(
    axes: "Axes", study: Study, rows: Sequence[Mapping[str, Any]], measure: str
) -> None:
    """Draw means with bars from the lowest to the highest; at words on the x axis, series stand side by side."""
    picture = study.picture
    scale = 100 if _is_fraction(measure) else 1
    series = series_of(study, rows)
    words = list(dict.fromkeys(str(row[picture.x]) for row in rows))
    line = "-" if picture.is_log and not picture.has_front else "none"
    for number, (name, members) in enumerate(series.items()):
        shift = 0.15 * (number - (len(series) - 1) / 2)
        x = [
            float(row[picture.x]) if picture.is_log else words.index(str(row[picture.x])) + shift
            for row in members
        ]
        y = [scale * row[measure] for row in members]
        low = [scale * (row[measure] - row[f"{measure}_low"]) for row in members]
        high = [scale * (row[f"{measure}_high"] - row[measure]) for row in members]
        colour = drawing.COLOURS[number % len(drawing.COLOURS)]
        marker = MARKERS[number % len(MARKERS)]
        label = drawing.short(model_label(name), 32)
        bars = (low, high) if any((*low, *high)) else None
        axes.errorbar(
            x, y, yerr=bars, capsize=3, linestyle=line, label=label, color=colour, marker=marker
        )
    if not picture.is_log:
        axes.set_xticks(range(len(words)), [drawing.short(model_label(word)) for word in words])
        axes.set_xlim(-0.6, len(words) - 0.4)
        axes.margins(y=0.15)
        return
    axes.set_xscale("log")
    _name_ticks(axes, sorted({float(row[picture.x]) for row in rows}))
    if not _is_fraction(measure):
        axes.set_yscale("log")
    if base := next((row for row in rows if row.get("shape") == "base"), None):
        for row in rows:
            factor = str(row["shape"]).partition(":")[2]
            has_failed = _is_fraction(measure) and row[measure] < FAILED * base[measure]
            name = f"×{factor}, did not learn" if has_failed else f"×{factor}" if factor else "base"
            _label(axes, name, (float(row[picture.x]), scale * row[measure]))
    if picture.has_front:
        points = [(float(row[picture.x]), scale * row[measure]) for row in rows]
        names = [drawing.short(model_label(str(row.get("model", ""))), 24) for row in rows]
        _draw_front(axes, points, names)


def _draw_front(axes: "Axes", points: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
    """Draw the best result for each cost, with a name at each point of this front."""
    front = pareto_front(points)
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
        _label(axes, names[points.index(point)], point)
    axes.margins(x=0.2, y=0.1)


def _label(axes: "Axes", words: str, point: tuple[float, float]) -> None:
    """Write words at a point; `_place_labels` chooses the side."""
    background = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    label = axes.annotate(
        words, point, xytext=(0, 0), textcoords="offset points", fontsize=7, bbox=background
    )
    label.set_in_layout(False)


def _place_labels(figure: "Figure") -> None:
    """Move each label to the first side of its point where it covers no point, no legend and no other label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = [text for text in axes.texts if isinstance(text, Annotation)]
        legend = axes.get_legend()
        points = [axes.transData.transform(label.xy) for label in labels]
        taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points]
        taken += [legend.get_window_extent(renderer)] if legend else []
        for label in labels:
            boxes = []
            for x, y, horizontal, vertical in _SIDES:
                label.set(position=(x, y), ha=horizontal, va=vertical)
                boxes.append(label.get_window_extent(renderer))
            inside = [
                axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) for box in boxes
            ]
            covered = [
                sum(map(box.overlaps, taken)) + (not fits)
                for box, fits in zip(boxes, inside, strict=True)
            ]
            best = covered.index(min(covered))
            x, y, horizontal, vertical = _SIDES[best]
            label.set(position=(x, y), ha=horizontal, va=vertical)
            taken.append(boxes[best])


def _name_ticks(axes: "Axes", values: Sequence[float]) -> None:
    """Label a logarithmic axis at its values if they are few, else at 1, 2, 5, 10, … below two decades."""
    if not values or ((len(values) > 8 or values[0] < 1e-5) and values[-1] >= 100 * values[0]):
        return
    if len(values) > 8 or any(f"{value:g}" != f"{value:.3g}" for value in values if value < 1000):
        decades = (10.0**power for power in range(-12, 13))
        round_ones = [step * decade for decade in decades for step in (1, 2, 5)]
        values = [value for value in round_ones if 0.8 * values[0] <= value <= 1.2 * values[-1]]
    axes.set_xticks(values, [f"{value:,g}" for value in values])
    axes.minorticks_off()


def model_label(value: str) -> str:
    """Return a value of the axis of models as people write it: "ViT-B/32 width=64" for "ViT-B/32,model.width=64"."""
    return " ".join(part.removeprefix("model.") for part in value.split(","))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, accuracy) that no cheaper or equally cheap point beats, by cost."""
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


def _draw_paper(axes: "Axes", *, is_alone: bool) -> None:
    label = "ViT, Table 6: JFT-300M, then ImageNet"
    for (kind, pattern), marker in zip(_KINDS.items(), MARKERS, strict=False):
        rows = [row for row in TABLE_6 if re.fullmatch(pattern, row.model)]
        points = [row.exaflops for row in rows], [row.imagenet_percent for row in rows]
        name = kind if is_alone else f"{kind} ({label})"
        axes.plot(
            *points, marker, label=name, color=drawing.BLACK, fillstyle="none", alpha=0.6, zorder=0
        )
    if is_alone:
        axes.set_xscale("log")
        every = [(row.exaflops, row.imagenet_percent) for row in TABLE_6]
        _draw_front(
            axes, every, [f"{row.model.replace('ViT-', '')}, {row.epochs} ep." for row in TABLE_6]
        )
        axes.set_xlabel("pre-training compute (exaFLOPs)")
        axes.set_ylabel("ImageNet top-1 after fine-tuning (%)")
        axes.set_title(label, fontsize=10)
        axes.legend(fontsize=8, loc="lower right")
        axes.grid(alpha=0.3)
