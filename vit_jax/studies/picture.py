"""The picture of a study: each of its measures over what varies, with a colour for each series."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import drawing
from vit_jax.studies.grid import Study
from vit_jax.studies.published import TABLE_6

MARKERS = "osD^vPX"  # beside the colour, for those who cannot tell colours apart
_LABELS = {
    "images_per_second": "images per second",
    "largest_batch": "largest batch (images)",
}
_WIDTH, _HEIGHT = 6.4, 4.2  # inches of a panel


def draw(study: Study, rows: Sequence[Mapping[str, Any]], *, title: str, with_paper: bool = False) -> Any:
    """A figure with a panel for each measure; with the paper's points under ours where their axes meet, else beside."""
    drawn = [row for row in rows if study.measures[0] in row and study.picture.x in row]
    beside = with_paper and not _meets(study, drawn)
    num_panels = len(study.measures) + beside
    figure = drawing.new_figure(_WIDTH * num_panels, _HEIGHT)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    if with_paper:
        _draw_paper(panels[-1 if beside else 0], own_labels=beside)
    for axes, measure in zip(panels, study.measures, strict=False):
        (_lines if study.picture.is_log else _bars)(axes, study, drawn, measure)
        axes.set_xlabel(study.picture.x_label)
        axes.set_ylabel(_label(measure))
        axes.set_title(drawing.short(title, 60), fontsize=10)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if drawn:
            axes.legend(title=study.picture.series.replace("_", " "), fontsize=8, title_fontsize=8)
    return figure


def _label(measure: str) -> str:
    if measure in _LABELS:
        return _LABELS[measure]
    return f"{measure.replace('_', ' ')}{' (%)' if _is_fraction(measure) else ' (nats)' if 'loss' in measure else ''}"


def _is_fraction(measure: str) -> bool:
    return measure.endswith("_accuracy")


def _scale(measure: str) -> float:
    return 100 if _is_fraction(measure) else 1


def series_of(study: Study, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by series, each in the order of x; the base shape belongs to all."""
    column, x = study.picture.series, study.picture.x
    shared = [row for row in rows if row.get(column) == "base"]
    names = [name for name in dict.fromkeys(str(row.get(column, "all")) for row in rows) if name != "base"] or ["base"]
    found = {name: [row for row in rows if row.get(column, "all") == name] for name in names}
    if names != ["base"]:
        found = {name: [*members, *shared] for name, members in found.items()}
    return {name: sorted(members, key=lambda row: float(row[x])) for name, members in found.items()}


def _lines(axes: Any, study: Study, rows: Sequence[Mapping[str, Any]], measure: str) -> None:
    picture, scale = study.picture, _scale(measure)
    styles = zip(itertools.cycle(drawing.COLOURS), itertools.cycle(MARKERS), strict=False)
    line = "none" if picture.has_front else "-"
    for (name, members), (colour, marker) in zip(series_of(study, rows).items(), styles, strict=False):
        x = [float(row[picture.x]) for row in members]
        y = [scale * row[measure] for row in members]
        below = [scale * (row[measure] - row[f"{measure}_low"]) for row in members]
        above = [scale * (row[f"{measure}_high"] - row[measure]) for row in members]
        axes.errorbar(
            x,
            y,
            yerr=(below, above),
            color=colour,
            marker=marker,
            linestyle=line,
            capsize=3,
            label=drawing.short(model_label(name), 32),
        )
    axes.set_xscale("log")
    _name_ticks(axes, sorted({float(row[picture.x]) for row in rows}))
    if not _is_fraction(measure):
        axes.set_yscale("log")
    if picture.has_front:
        front = pareto_front([(float(row[picture.x]), scale * row[measure]) for row in rows])
        axes.step(
            *zip(*front, strict=True), where="post", color=drawing.GREY, zorder=0, label="best so far"
        ) if front else None
        for row in rows:
            text = drawing.short(model_label(str(row.get("model", ""))), 24)
            place = (float(row[picture.x]), scale * row[measure])
            axes.annotate(text, place, xytext=(4, -9), textcoords="offset points", fontsize=6)


def _name_ticks(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis of a few values names these."""
    if values and len(values) <= 8 and values[-1] >= 1e-3 and all(f"{value:g}" == f"{value:.4g}" for value in values):
        axes.set_xticks(values, [f"{value:,g}" for value in values])
        axes.minorticks_off()


def _bars(axes: Any, study: Study, rows: Sequence[Mapping[str, Any]], measure: str) -> None:
    picture, scale = study.picture, _scale(measure)
    groups = list(dict.fromkeys(str(row[picture.x]) for row in rows))
    names = list(dict.fromkeys(str(row.get(picture.series, "all")) for row in rows))
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        members = [row for row in rows if row.get(picture.series, "all") == name]
        x = [groups.index(str(row[picture.x])) + (number - (len(names) - 1) / 2) * width for row in members]
        y = [scale * row[measure] for row in members]
        below = [scale * (row[measure] - row[f"{measure}_low"]) for row in members]
        above = [scale * (row[f"{measure}_high"] - row[measure]) for row in members]
        axes.bar(x, y, width * 0.9, yerr=(below, above), capsize=3, color=drawing.COLOURS[number % 7], label=name)
        for place, value, up in zip(x, y, above, strict=True):
            axes.annotate(f"{value:.1f}", (place, value + up), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), [drawing.short(model_label(group)) for group in groups])
    if rows:  # differences are small beside the accuracies; a bar cut off says so by its axis
        values = [scale * row[f"{measure}_low"] for row in rows]
        axes.set_ylim(bottom=max(0, min(values) - 0.3 * (max(values) - min(values)) - 2))


def model_label(value: str) -> str:
    """A value of the axis of models as people write it: "ViT-B/32,model.width=64" is "ViT-B/32 width=64"."""
    return " ".join(part.removeprefix("model.") for part in value.split(","))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, accuracy) those that no cheaper or equally cheap point beats, by cost."""
    front: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((cost, accuracy))
    return front


def _meets(study: Study, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether our compute reaches the paper's, so that both fit one axis."""
    return any(float(row[study.picture.x]) >= min(row.exaflops for row in TABLE_6) for row in rows)


def _draw_paper(axes: Any, *, own_labels: bool) -> None:
    label = "ViT, Table 6: JFT-300M, then ImageNet"
    for kind, marker in (("ViT", MARKERS[0]), ("ResNet", MARKERS[1]), ("hybrid", MARKERS[2])):
        rows = [row for row in TABLE_6 if _paper_kind(row.model) == kind]
        axes.plot(
            [row.exaflops for row in rows],
            [row.imagenet_percent for row in rows],
            marker,
            color=drawing.GREY,
            fillstyle="none",
            label=kind if own_labels else f"{kind} ({label})",
            zorder=0,
        )
    if own_labels:
        axes.set_xscale("log")
        axes.set_xlabel("pre-training compute (exaFLOPs)")
        axes.set_ylabel("ImageNet top-1 after fine-tuning (%)")
        axes.set_title(label, fontsize=10)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        for row in TABLE_6:
            text = f"{row.model} {row.epochs} ep."
            axes.annotate(
                text, (row.exaflops, row.imagenet_percent), xytext=(4, -9), textcoords="offset points", fontsize=6
            )


def _paper_kind(model: str) -> str:
    return "hybrid" if "+" in model else "ResNet" if model.startswith("R") else "ViT"
