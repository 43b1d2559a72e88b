"""A run as one HTML page that needs no other file and no network: curves, predictions, figures, cost, config."""

import base64
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from vit_jax.api import Model
from vit_jax.config.metric_names import SHARES, format_metric
from vit_jax.config.parsing import flatten
from vit_jax.evals.evaluate import EvaluationResult, make_evaluate
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.splits import SplitChoice, open_labelled
from vit_jax.text.printable import first_line, printable
from vit_jax.tools.figures import result_figures
from vit_jax.tools.figures.curves import USUAL, RunLog, draw_curves, select_panels
from vit_jax.tools.figures.drawing import to_bytes
from vit_jax.tools.figures.network import KINDS, available
from vit_jax.tools.figures.view import View, read_view
from vit_jax.train.progress import duration_text
from vit_jax.train.run_files import DIVERGED
from vit_jax.weights import Weights

MOST_CONFUSED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a page.

    Attributes:
      run: the log of the run.
      summary: the content of its `summary.json`; None if the run has not ended.
      model: the weights of its newest checkpoint; None without one.
      evaluation: on the test split; None if it was not evaluated.
      view: input images of the figures.
      notes: why something is missing.
    """

    run: RunLog
    summary: Mapping[str, Any] | None = None
    model: Model | None = None
    evaluation: EvaluationResult | None = None
    view: View = dataclasses.field(default_factory=View)
    notes: Sequence[str] = ()


def look_at_data(
    model: Model,
    weights: Weights,
    data_dir: str | None,
    *,
    global_batch: int,
    max_unreadable: int | None,
) -> dict[str, Any]:
    """Return the fields of a `Report` that need test images, or a note why these cannot be read."""
    if weights.training is None:  # as of converted weights
        return {
            "notes": [
                "The images could not be looked at. The checkpoint does not state the data of the run."
            ]
        }
    data = weights.training.data
    fields = dict[str, Any]()
    notes = list[str]()
    try:
        if model.architecture.num_classes:
            values = model.require_transform().value_range
            labelled = open_labelled(
                data, weights, SplitChoice(data_dir=data_dir, value_range=values)
            )
            evaluate = make_evaluate(
                model.module,
                model.architecture,
                model.require_transform(),
                source=model.source,
                is_multilabel=model.is_multilabel,
                global_batch=global_batch,
                max_unreadable=max_unreadable,
            )
            fields["evaluation"] = evaluate(labelled)
        fields["view"] = read_view(model, data, data_dir=data_dir)
    except ValueError as error:
        notes.append(f"The images could not be looked at. {error}")
    return fields | {"notes": notes}


def build_page(report: Report) -> str:
    """Return the page of a run as HTML."""
    run = report.run
    config = report.run.config
    model = report.model
    evaluation = report.evaluation
    return _template().render(
        title=f"{_name(report)} on {config.get('data')}",
        workdir=_relative(run.name),
        notes=report.notes,
        results=_results(report),
        curves=[_svg(draw_curves([run], [name])) for name in select_panels([run], USUAL)],
        mixup_alpha=_mixup_alpha(run),
        evaluation=None if evaluation is None or model is None else _predictions(evaluation, model),
        network=None if model is None else [*_network(model, report.view)],
        cost=_cost(report),
        config=sorted(flatten(config).items()),
    )


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("vit_jax.tools.figures", package_path="")
    return jinja2.Environment(
        loader=loader, autoescape=True, keep_trailing_newline=True, finalize=_shown
    ).get_template("page.html")


def _shown(value: object) -> object:
    """Escape control characters of a text; leave markup as it is."""
    return value if isinstance(value, markupsafe.Markup) else printable(str(value))


def _name(report: Report) -> str:
    if report.model is not None:
        return report.model.architecture.name
    return str(report.run.config.get("model", {}).get("name", "a network"))


def _results(report: Report) -> dict[str, str]:
    last: Mapping[str, Any] = report.summary or report.run.last
    state = DIVERGED if DIVERGED in last else "ended" if report.summary else "not ended"
    cards = {"state": f"{state}, step {report.run.last['step']:,}"}
    if DIVERGED in last:
        cards["reason"] = last[DIVERGED]
    for name, value in last.items():
        if value is None:  # a run that diverged has no results
            continue
        if name.endswith("_loss") or (name.endswith(SHARES) and report.evaluation is None):
            cards[_words(name)] = format_metric(name, value)
    if report.evaluation is not None:
        shown = report.evaluation.metrics.shown()
        cards |= {
            _words(name): words for name, words in shown.items() if name != "loss"
        }  # the summary has it
    return cards


def _mixup_alpha(run: RunLog) -> float | None:
    """Return the strength of mixup if the run has it and a training accuracy, which mixup makes low."""
    inputs = run.config.get("input")
    alpha = inputs.get("mixup_alpha") if isinstance(inputs, dict) else None
    is_blended = isinstance(alpha, int | float) and alpha > 0 and "train_accuracy" in run.metrics()
    return alpha if is_blended else None


def _predictions(evaluation: EvaluationResult, model: Model) -> dict[str, Any]:
    metrics = evaluation.metrics
    labelled = evaluation.labelled
    figures = result_figures.draw(metrics, model.require_transform()).items()
    confused = metrics.confused(MOST_CONFUSED) if isinstance(metrics, ClassMetrics) else []
    return {
        "words": _relative(labelled.words),
        "notes": labelled.notes,
        "figures": [(_words(name), _base64(png)) for name, png in figures],
        "confused": [(one["class"], one["answer"], one["images"], one["of"]) for one in confused],
        "classes": [*metrics.class_rows()],
    }


def _network(model: Model, view: View) -> Iterator[dict[str, str]]:
    """Yield the figures of a network, or the reason why one cannot be drawn."""
    reasons = available(model)
    for name, kind in KINDS.items():
        if reasons[name] is None and (not kind.needs_images or view.images_NHWC is not None):
            figure = {"name": name, "description": (kind.draw.__doc__ or "").splitlines()[0]}
            try:
                yield figure | {"png": _base64(kind.draw(model, view).png)}
            except ValueError as error:
                yield figure | {"error": first_line(error)}


def _cost(report: Report) -> dict[str, str]:
    summary = report.summary or {}
    last = report.run.last
    cards = dict[str, str]()
    if "global_batch" in report.run.config and not report.run.config.get("phases"):
        cards["images seen"] = f"{last['step'] * report.run.config['global_batch']:,}"
    if "exaflops" in last:
        cards["training compute"] = f"{last['exaflops']:.3g} exaFLOPs"
    if seconds := summary.get("wall_seconds", last.get("wall_seconds")):
        cards["time"] = duration_text(seconds)
    if "images_per_second" in last:
        cards["images per second"] = f"{last['images_per_second']:,.0f}"
    if "mfu" in last:
        cards["MFU"] = f"{last['mfu']:.1%}"
    if "parameters" in summary:
        cards["parameters"] = f"{summary['parameters']:,}"
    if {"num_devices", "device_kind"} <= summary.keys():
        cards["devices"] = f"{summary['num_devices']} x {summary['device_kind']}"
    versions = {
        name.removeprefix("version_"): value
        for name, value in summary.items()
        if name.startswith("version_")
    }
    return cards | versions


def _relative(words: str) -> str:
    """Return words with paths relative to the working directory, whose own place means nothing to readers elsewhere."""
    return words.replace(os.path.join(os.getcwd(), ""), "")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _svg(figure: Any) -> markupsafe.Markup:
    """Return the drawing as an element of the page: without the head of a file."""
    text = to_bytes(figure, "svg").decode()
    return markupsafe.Markup(text[text.index("<svg") :])
