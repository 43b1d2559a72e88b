"""A run as one HTML page: curves, predictions, figures, cost, config.

The page needs no other file and no network.
"""

import base64
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

from vit_jax.api import Model
from vit_jax.config.metric_names import SHARES, format_metric
from vit_jax.config.parsing import flatten
from vit_jax.evals.evaluate import EvaluationResult, make_evaluate
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.splits import SplitChoice, open_labelled
from vit_jax.storage.files import JsonObject
from vit_jax.text.printable import first_line, printable
from vit_jax.tools.figures import result_figures
from vit_jax.tools.figures.curves import USUAL, RunLog, draw_curves, select_panels
from vit_jax.tools.figures.drawing import to_bytes
from vit_jax.tools.figures.network import KINDS, explain_missing
from vit_jax.tools.figures.view import View, read_view
from vit_jax.train.progress import duration_text
from vit_jax.train.run_files import DIVERGED
from vit_jax.weights import Weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

MOST_CONFUSED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a page.

    Attributes:
      run: the log of the run.
      summary: the content of its `summary.json`; None if the run has not ended.
      model: the model of its newest checkpoint; None without a checkpoint.
      evaluation: the result on the test split; None if it was not evaluated.
      view: input images of the figures.
      notes: reasons why a part of the page is missing.
    """

    run: RunLog
    summary: JsonObject | None = None
    model: Model | None = None
    evaluation: EvaluationResult | None = None
    view: View = dataclasses.field(default_factory=View)
    notes: Sequence[str] = ()


def evaluate_images(
    model: Model,
    weights: Weights,
    data_dir: str | None,
    *,
    global_batch: int,
    max_unreadable: int | None,
) -> dict[str, Any]:
    """Return the fields of a `Report` that need test images, or a note why these are unreadable."""
    if weights.training is None:  # for example after a conversion of weights
        reason = "The checkpoint does not state the data of the run."
        return {"notes": [f"The images could not be looked at. {reason}"]}

    data = weights.training.data
    fields = dict[str, Any]()
    fields["notes"] = []
    try:
        if model.architecture.num_classes:
            transform = model.require_transform()
            choice = SplitChoice(
                data_dir=data_dir,
                value_range=transform.value_range,
                bands=transform.bands,
            )
            labelled = open_labelled(data, weights, choice)
            evaluate = make_evaluate(
                model.module,
                model.architecture,
                transform,
                source=model.source,
                is_multilabel=model.is_multilabel,
                global_batch=global_batch,
                max_unreadable=max_unreadable,
            )
            fields["evaluation"] = evaluate(labelled)
        fields["view"] = read_view(model, data, data_dir=data_dir)
    except ValueError as error:
        fields["notes"].append(f"The images could not be looked at. {error}")
    return fields


def build_page(report: Report) -> str:
    """Return the page of a run as HTML."""
    run = report.run
    config = run.config
    model = report.model
    network = None
    evaluation = None
    if model is not None:
        network = list(_draw_network(model, report.view))
        if report.evaluation is not None:
            evaluation = _describe_evaluation(report.evaluation, model)

    curves = []
    for name in select_panels([run], USUAL):
        curves.append(_to_svg(draw_curves([run], [name])))

    return _load_template().render(
        title=f"{_find_name(report)} on {config.get('data')}",
        workdir=_make_relative(run.name),
        notes=report.notes,
        results=_list_results(report),
        curves=curves,
        mixup_alpha=_find_mixup_alpha(run),
        evaluation=evaluation,
        network=network,
        cost=_list_costs(report),
        config=sorted(flatten(config).items()),
    )


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vit_jax.tools.figures", package_path=""),
        autoescape=True,
        keep_trailing_newline=True,
        finalize=_escape_control_characters,
    )
    return environment.get_template("page.html")


def _escape_control_characters(value: object) -> object:
    if isinstance(value, markupsafe.Markup):
        return value
    return printable(str(value))


def _find_name(report: Report) -> str:
    """Return the name of the network."""
    if report.model is not None:
        return report.model.architecture.name
    return str(report.run.config.get("model", {}).get("name", "a network"))


def _list_results(report: Report) -> dict[str, str]:
    """Return the state of the run, and the metrics of the summary and of the evaluation."""
    last: JsonObject = report.summary or report.run.last
    state = "ended" if report.summary else "not ended"
    if DIVERGED in last:
        state = DIVERGED
    cards = {"state": f"{state}, step {report.run.last['step']:,}"}
    if DIVERGED in last:
        cards["reason"] = last[DIVERGED]

    for name, value in last.items():
        if value is None:  # a run that diverged has no results
            continue
        if name.endswith("_loss") or (name.endswith(SHARES) and report.evaluation is None):
            cards[_to_words(name)] = format_metric(name, value)

    if report.evaluation is not None:
        for name, text in report.evaluation.metrics.shown().items():
            if name != "loss":  # the summary has it
                cards[_to_words(name)] = text
    return cards


def _find_mixup_alpha(run: RunLog) -> float | None:
    """Return the strength of mixup if it makes the training accuracy low, otherwise None."""
    inputs = run.config.get("input")
    if not isinstance(inputs, dict) or "train_accuracy" not in run.metrics():
        return None
    alpha = inputs.get("mixup_alpha")
    if not isinstance(alpha, int | float) or alpha <= 0:
        return None
    return alpha


def _describe_evaluation(evaluation: EvaluationResult, model: Model) -> dict[str, Any]:
    """Return the values of the page's section of predictions."""
    metrics = evaluation.metrics
    labelled = evaluation.labelled
    drawn = result_figures.draw(metrics, model.require_transform())
    figures = []
    for name, png in drawn.items():
        figures.append((_to_words(name), _to_base64(png)))

    confused = []
    if isinstance(metrics, ClassMetrics):
        for pair in metrics.list_confusions(MOST_CONFUSED):
            row = (pair["class"], pair["answer"], pair["images"], pair["of"])
            confused.append(row)
    return {
        "words": _make_relative(labelled.words),
        "notes": labelled.notes,
        "figures": figures,
        "confused": confused,
        "classes": list(metrics.class_rows()),
    }


def _draw_network(model: Model, view: View) -> Iterator[dict[str, str]]:
    """Yield the figures of a network, or the reason why one cannot be drawn."""
    reasons = explain_missing(model)
    for name, kind in KINDS.items():
        lacks_images = kind.needs_images and view.images_NHWC is None
        if reasons[name] is not None or lacks_images:
            continue
        description, *_ = (kind.draw.__doc__ or "").splitlines()
        figure = {"name": name, "description": description}
        try:
            drawn = kind.draw(model, view)
            figure["png"] = _to_base64(drawn.png)
        except ValueError as error:
            figure["error"] = first_line(error)
        yield figure


def _list_costs(report: Report) -> dict[str, str]:
    """Return images, compute, time, speed, devices and versions of the run."""
    config = report.run.config
    summary = report.summary or {}
    last = report.run.last
    cards = dict[str, str]()
    if "global_batch" in config and not config.get("phases"):
        cards["images seen"] = f"{last['step'] * config['global_batch']:,}"
    if "exaflops" in last:
        cards["training compute"] = f"{last['exaflops']:.3g} exaFLOPs"
    seconds = summary.get("wall_seconds", last.get("wall_seconds"))
    if seconds:
        cards["time"] = duration_text(seconds)
    if "images_per_second" in last:
        cards["images per second"] = f"{last['images_per_second']:,.0f}"
    if "mfu" in last:
        cards["MFU"] = f"{last['mfu']:.1%}"
    if "parameters" in summary:
        cards["parameters"] = f"{summary['parameters']:,}"
    if {"num_devices", "device_kind"} <= summary.keys():
        cards["devices"] = f"{summary['num_devices']} x {summary['device_kind']}"
    for name, value in summary.items():
        if name.startswith("version_"):
            cards[name.removeprefix("version_")] = value
    return cards


def _make_relative(text: str) -> str:
    """Return a text with paths relative to the working directory, which only this machine has."""
    return text.replace(os.path.join(os.getcwd(), ""), "")


def _to_words(name: str) -> str:
    return name.replace("_", " ")


def _to_base64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _to_svg(figure: "MatplotlibFigure") -> markupsafe.Markup:
    """Return the drawing as an element of the page: without the head of a file."""
    text = to_bytes(figure, "svg").decode()
    start = text.index("<svg")
    return markupsafe.Markup(text[start:])
