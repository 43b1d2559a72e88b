"""Thousands of pages of runs with hostile names: names stay text, and the page runs nothing and
fetches nothing.
"""

import copy
import dataclasses
import html.parser
import random
import re

import numpy as np
import pytest
from markupsafe import Markup

from tests.evals.samples import SEVEN, evaluate_of, sample_pixels, sample_weights
from vit_jax.api import from_weights
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals.label_map import Labelled, LabelMap
from vit_jax.text.printable import printable
from vit_jax.tools.figures import page
from vit_jax.tools.figures.curves import RunLog

pytestmark = pytest.mark.slow

NUM_CASES = 2000
# Figures are drawn for one of so many pages, because they take a hundred times as long.
DRAWN_EVERY = 200
# In every hostile name, in lower case, as the parser has names of tags and attributes
MARK = "zqjx"
PIECES = (
    f"<script>{MARK}()</script>",
    f"<img src=x onerror={MARK}()>",
    f'"><svg onload={MARK}()>',
    f"' onclick='{MARK}()",
    f"</title><base href=//{MARK}>",
    f"</style><link rel=stylesheet href=http://{MARK}>",
    f"-->{MARK}<!--",
    f"<!--{MARK}",
    f"]]><{MARK}>",
    f"<?{MARK} ?>",
    f"&lt;script&gt;{MARK}",
    f"&#60;{MARK}&#62;",
    f"javascript:{MARK}",
    f"<{MARK}",
    f"$\\{MARK}$",
    f"${MARK}",
    f"\\{MARK}{{",
    f"{MARK}\0\x1b[2J",
    f"{MARK}\r\n\t\x0b\x85\u2028",
    f"\u202e{MARK}\u2066",
    f"\ud800{MARK}\udfff",
    f"{MARK}\ufeff\u200b\u0301",
    f"{MARK}," * 9,
    MARK * 50_000,
    f"{MARK}\U0001f600",
    MARK,
)
VALUES = (1.5, 0.25, float("nan"), 2**53, 1e308)
ENDS = (
    "",
    "_loss",
    "_accuracy",
    "_norm",
    "_per_second",
    "_f1",
)
UNPRINTABLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "section",
    "h1",
    "h2",
    "h3",
    "p",
    "dl",
    "div",
    "dt",
    "dd",
    "table",
    "tr",
    "th",
    "td",
    "details",
    "summary",
    "img",
    # Tags of matplotlib
    "svg",
    "metadata",
    "rdf:rdf",
    "cc:work",
    "dc:type",
    "dc:date",
    "dc:format",
    "dc:creator",
    "cc:agent",
    "dc:title",
    "defs",
    "g",
    "path",
    "use",
    "clippath",
    "rect",
    "text",
    "image",
}
ADDRESSES = {
    "href",
    "xlink:href",
    "src",
    "srcset",
    "action",
    "formaction",
    "poster",
    "background",
    "data",
    "ping",
}
NAMESPACES = re.compile(r"xmlns(:\w+)?|rdf:resource")


class Checked(html.parser.HTMLParser):
    """Parse a page; everything is an error that is neither text nor made by the page."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        for name, value in attributes:
            self.check_attribute(name, value or "")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def check_attribute(self, name, value):
        assert not name.startswith("on"), name
        assert MARK not in name, name
        assert MARK not in value, (name, value)
        if name in ADDRESSES:
            assert value.startswith(("data:image/png;base64,", "#")), (name, value)
        elif not NAMESPACES.fullmatch(name):
            assert "://" not in value, (name, value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
            return
        assert MARK not in data
        assert "@import" not in data
        assert "url(" not in data

    def handle_comment(self, data):
        # Matplotlib writes there what it draws.
        assert "svg" in self.open
        assert "<" not in data
        assert "--" not in data

    def handle_decl(self, declaration):
        assert declaration == "doctype html"

    def handle_pi(self, data):
        raise AssertionError(data)

    unknown_decl = handle_pi


def check(text):
    """Parse a page to its end; return its text."""
    text.encode()  # no lone surrogates
    assert not UNPRINTABLE.search(text)

    parser = Checked()
    parser.feed(text)
    parser.close()

    assert parser.open == []
    assert not parser.rawdata
    return "".join(parser.text)


def rename_classes(evaluation, names, words):
    """Return the same evaluation of classes with other names."""
    old = evaluation.labelled
    source = MemorySource(old.source.images, old.source.labels, names)
    label_map = dataclasses.replace(old.label_map, output_names=names)
    metrics = copy.copy(evaluation.metrics)
    metrics.labelled = Labelled(source, words, [words], label_map)
    return dataclasses.replace(
        evaluation,
        labelled=metrics.labelled,
        metrics=metrics,
    )


def draw_name(rng):
    """Return a name of one or several pieces."""
    return "".join(rng.choices(PIECES, k=rng.choice((1, 1, 1, 2, 3))))


def make_log(rng):
    """Return a run in which each name and text is hostile."""
    metrics = {}
    for _ in range(4):
        metrics[draw_name(rng) + rng.choice(ENDS)] = rng.choice(VALUES)
    lines = []
    for step in (1, 2):
        times = {
            "step": step,
            "train_loss": 1 / step,
            "wall_seconds": 3.0 * step,
        }
        lines.append(times | metrics)

    nested = [draw_name(rng), {draw_name(rng): draw_name(rng)}]
    config = {
        "global_batch": 8,
        "data": draw_name(rng),
        "model": {
            "name": draw_name(rng),
            draw_name(rng): nested,
        },
        draw_name(rng): draw_name(rng),
    }
    return RunLog(draw_name(rng), config, lines)


def make_summary(rng):
    summary = {
        "test_accuracy": 0.5,
        f"version_{draw_name(rng)}": draw_name(rng),
        f"{draw_name(rng)}_loss": 1.0,
        draw_name(rng): draw_name(rng),
        "num_devices": 1,
        "device_kind": draw_name(rng),
    }
    if rng.random() < 0.2:
        summary["diverged"] = draw_name(rng)
    return summary


@pytest.fixture(scope="module")
def evaluated():
    """A model and an evaluation of it, whose names the cases replace."""
    model = from_weights(sample_weights())
    pixels = sample_pixels(14)
    count = SEVEN.num_classes
    label_map = LabelMap(
        output_names=model.class_names,
        is_allowed_K=np.ones(count, bool),
        output_L=np.arange(count),
        listed=np.arange(count),
    )
    source = MemorySource(pixels, np.arange(14) % count, model.class_names)
    labelled = Labelled(source, "words", [], label_map)
    return model, evaluate_of(model, global_batch=14, max_unreadable=0)(labelled, None)


def make_report(rng, model, evaluation):
    """Return a report of a run, and in every second case of its evaluation, with hostile names."""
    fields = {
        "run": make_log(rng),
        "notes": [draw_name(rng), draw_name(rng)],
    }
    if rng.random() < 0.8:
        fields["summary"] = make_summary(rng)
    if rng.random() < 0.5:
        architecture = dataclasses.replace(
            model.architecture,
            name=draw_name(rng),
        )
        names = tuple(f"{draw_name(rng)} {number}" for number in range(SEVEN.num_classes))
        fields["model"] = dataclasses.replace(model, architecture=architecture)
        fields["evaluation"] = rename_classes(evaluation, names, draw_name(rng))
    return page.Report(**fields)


def replace_figures(patch):
    """Draw nothing."""
    patch.setattr(page, "_to_svg", lambda _: Markup("<svg></svg>"))
    patch.setattr(page, "draw_curves", lambda *_: None)
    patch.setattr(page.result_figures, "draw", lambda *_: {"mistakes": b"png"})


def test_names_stay_text(evaluated, monkeypatch):
    rng = random.Random(0)
    # Figures of the network have no names from files.
    monkeypatch.setattr(page, "KINDS", {})
    monkeypatch.setattr(page, "explain_missing", lambda _: {})  # traces the network five times

    for case in range(NUM_CASES):
        report = make_report(rng, *evaluated)
        with monkeypatch.context() as patch:
            if case % DRAWN_EVERY != 0:
                replace_figures(patch)
            try:
                text = check(page.build_page(report))
            except Exception as error:
                raise AssertionError(f"case {case}") from error

        for words in (report.run.name, report.run.config["data"], *report.notes):
            assert printable(words) in text, case


@pytest.mark.parametrize(
    "text",
    [
        "<script>x()</script>",
        "<img src=x onerror=x()>",
        '<p onclick="x()">',
        "<img src='https://a.example/b.png'>",
        f'<p class="{MARK}">',
        "<style>@import 'x';</style>",
        "<!-- a -->",
        "<p>\x1b[2J</p>",
        "<p>\ud800</p>",
        "<p>",
    ],
)
def test_the_check_can_fail(text):
    with pytest.raises((AssertionError, UnicodeEncodeError)):
        check(text)
