"""A run as one HTML page that needs no other file and no network: curves, predictions, pictures, cost, config."""

import base64
import dataclasses
import html
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vit_jax.api import Model
from vit_jax.config.load import flatten
from vit_jax.drawing import to_bytes
from vit_jax.evals import result_figures
from vit_jax.evals.evaluate import Evaluation, make_evaluate
from vit_jax.evals.single_label import ClassMetrics
from vit_jax.evals.splits import SplitChoice, open_labelled
from vit_jax.figures.curves import USUAL, RunLog, draw_curves, select_panels
from vit_jax.figures.network import KINDS, available
from vit_jax.figures.view import View, read_view
from vit_jax.files import first_line, printable
from vit_jax.tables import metric_text
from vit_jax.train.overview import SHARES
from vit_jax.train.progress import duration_text
from vit_jax.train.run_files import DIVERGED
from vit_jax.weights import Weights

MOST_CONFUSED = 10
STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1100px; padding: 1.5rem 1rem 4rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 0.75rem; padding-bottom: 0.25rem; border-bottom: 1px solid #ccc; font-size: 1.2rem; }
h3 { margin: 1.5rem 0 0.25rem; font-size: 1rem; }
p { margin: 0.4rem 0; max-width: 70ch; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 0.6rem; margin: 1rem 0; }
dl div { padding: 0.5rem 0.75rem; border-radius: 6px; background: #f2f5f8; }
dt { color: #555; font-size: 0.8rem; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
img, svg { display: block; max-width: 100%; height: auto; margin: 0.75rem 0; }
.row { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 0 1rem; }
.row > * { flex: 1 1 20rem; min-width: 0; max-width: 34rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { padding: 0.2rem 0.75rem 0.2rem 0; border-bottom: 1px solid #e3e3e3; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
.note { padding: 0.5rem 0.75rem; border-left: 3px solid #E69F00; background: #fff8ea; }
summary { margin: 0.5rem 0; color: #0060a0; cursor: pointer; }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a page.

    Attributes:
      run: the log of the run.
      summary: the content of its `summary.json`; None of a run that has not ended.
      model: the weights of its newest checkpoint; None where there is none.
      evaluation: of the images it is tested on; None where they were not evaluated.
      view: images for the pictures.
      notes: why something is missing.
    """

    run: RunLog
    summary: Mapping[str, Any] | None = None
    model: Model | None = None
    evaluation: Evaluation | None = None
    view: View = dataclasses.field(default_factory=View)
    notes: Sequence[str] = ()


def look_at_data(
    model: Model, weights: Weights, data_dir: str | None, *, global_batch: int, max_unreadable: int
) -> dict[str, Any]:
    """Return the fields of a `Report` that need test images, or a note why these cannot be read."""
    if weights.training is None:  # as of converted weights
        return {"notes": ["The images could not be looked at. The checkpoint does not state the data of the run."]}
    data, found, notes = weights.training.data, dict[str, Any](), list[str]()
    try:
        if model.architecture.num_classes:
            values = model.require_transform().value_range
            labelled = open_labelled(data, weights, SplitChoice(data_dir=data_dir, value_range=values))
            evaluate = make_evaluate(
                model.module,
                model.architecture,
                model.require_transform(),
                source=model.source,
                is_multilabel=model.is_multilabel,
                global_batch=global_batch,
                max_unreadable=max_unreadable,
            )
            found["evaluation"] = evaluate(labelled, None)
        found["view"] = read_view(model, data, data_dir=data_dir)
    except ValueError as error:
        notes.append(f"The images could not be looked at. {error}")
    return found | {"notes": notes}


def build_page(report: Report) -> str:
    """The page."""
    config = report.run.config
    title = f"{_name(report)} on {config.get('data')}"
    sections = [
        _section("Results", _results(report)),
        _section(
            "Learning curves",
            [
                _row(_svg(draw_curves([report.run], [name])) for name in select_panels([report.run], USUAL)),
                *_note_on_mixup(report.run),
            ],
        ),
    ]
    if report.evaluation is not None and report.model is not None:
        sections.append(_section("Predictions", _predictions(report.evaluation, report.model)))
    if report.model is not None:
        sections.append(_section("The network", _pictures(report.model, report.view)))
    values = _table(("field", "value"), sorted(flatten(config).items()))
    sections += [_section("Cost", [_cards(_cost(report))]), _section("Config", [_folded("every value", values)])]
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in report.notes)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{_text(title)}</h1>\n<p>{_text(_relative(report.run.name))}</p>\n{notes}\n{''.join(sections)}</body>\n</html>\n"
    )


def _name(report: Report) -> str:
    return (
        report.model.architecture.name
        if report.model
        else str(report.run.config.get("model", {}).get("name", "a network"))
    )


# Sections.


def _results(report: Report) -> Iterator[str]:
    found: Mapping[str, Any] = report.summary or report.run.last
    steps = report.run.last["step"]
    state = DIVERGED if DIVERGED in found else "ended" if report.summary else "not ended"
    cards = {"state": f"{state}, step {steps:,}"}
    if DIVERGED in found:
        cards["reason"] = found[DIVERGED]
    for name, value in found.items():
        if value is None:  # a run that diverged has no results
            continue
        if name.endswith("_loss") or (name.endswith(SHARES) and report.evaluation is None):
            cards[_words(name)] = metric_text(name, value)
    if report.evaluation is not None:
        shown = report.evaluation.shown()
        cards |= {_words(name): words for name, words in shown.items() if name != "loss"}  # the summary has it
    yield _cards(cards)


def _note_on_mixup(run: RunLog) -> Iterator[str]:
    """Explain the training accuracy of a run with mixup."""
    inputs = run.config.get("input")
    alpha = inputs.get("mixup_alpha") if isinstance(inputs, dict) else None
    if isinstance(alpha, int | float) and alpha > 0 and "train_accuracy" in run.metrics():
        yield (
            "<p>The training accuracy is low and uneven because it is measured on images that mixup blends with others "
            f"(input.mixup_alpha={_text(alpha)}). Compare test accuracies instead.</p>"
        )


def _predictions(evaluation: Evaluation, model: Model) -> Iterator[str]:
    yield f"<p>{_text(_relative(evaluation.labelled.words))}</p>"
    yield from (f'<p class="note">{_text(note)}</p>' for note in evaluation.labelled.notes)
    first, *others = result_figures.draw(evaluation.metrics, model.require_transform()).items()
    yield _png(first[1], _words(first[0]))
    yield _row(_png(picture, _words(name)) for name, picture in others)
    if isinstance(evaluation.metrics, ClassMetrics) and (found := evaluation.metrics.confused(MOST_CONFUSED)):
        confused = [(one["class"], one["answer"], one["images"], one["of"]) for one in found]
        yield _table(("class", "predicted as", "images", "of"), confused)
    header, *rows = evaluation.metrics.table()
    yield _folded("every class", _table(header, rows))


def _pictures(model: Model, view: View) -> Iterator[str]:
    """Draw the figures of a network; name a figure that cannot be drawn with the reason."""
    reasons = available(model)
    for name, kind in KINDS.items():
        if reasons[name] is None and (not kind.needs_images or view.images_NHWC is not None):
            yield f"<h3>{name}</h3><p>{_text((kind.draw.__doc__ or '').splitlines()[0])}</p>"
            try:
                yield _png(kind.draw(model, view).png, name)
            except ValueError as error:
                yield f'<p class="note">{_text(first_line(error))}</p>'


def _cost(report: Report) -> dict[str, str]:
    summary, last = report.summary or {}, report.run.last
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
    versions = {name.removeprefix("version_"): value for name, value in summary.items() if name.startswith("version_")}
    return cards | versions


# Elements.


def _section(title: str, parts: Iterable[str]) -> str:
    return f"<section>\n<h2>{title}</h2>\n{''.join(parts)}\n</section>\n"


def _text(words: Any) -> str:
    return html.escape(printable(str(words)))


def _relative(words: str) -> str:
    """Return words with paths relative to the working directory, whose own place means nothing to readers elsewhere."""
    return words.replace(os.path.join(os.getcwd(), ""), "")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cards(values: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in values.items()) + "</dl>"


def _row(parts: Iterable[str]) -> str:
    """Side by side where there is room."""
    return f'<div class="row">{"".join(parts)}</div>'


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in header)
    lines = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<tr>{cells}</tr>\n{lines}</table></div>'


def _folded(words: str, content: str) -> str:
    return f"<details><summary>{words}</summary>{content}</details>"


def _png(content: bytes, words: str) -> str:
    return f'<img alt="{words}" src="data:image/png;base64,{base64.b64encode(content).decode()}">\n'


def _svg(figure: Any) -> str:
    """The drawing as a part of the page: without the head of a file."""
    text = to_bytes(figure, "svg").decode()
    return text[text.index("<svg") :]
