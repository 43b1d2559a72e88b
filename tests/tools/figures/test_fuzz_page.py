"""Thousands of pages of runs with hostile names: names stay text, and the page runs nothing and fetches nothing."""

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
DRAWN_EVERY = 200  # pages whose pictures are drawn too, which takes a hundred times as long
# In every hostile name, in lower case, as the parser has names of tags and attributes
MARK = "zqjx"
PIECES = (
    *(
        f"<script>{MARK}()</script>",
        f"<img src=x onerror={MARK}()>",
        f'"><svg onload={MARK}()>',
        f"' onclick='{MARK}()",
    ),
    *(
        f"</title><base href=//{MARK}>",
        f"</style><link rel=stylesheet href=http://{MARK}>",
        f"-->{MARK}<!--",
        f"<!--{MARK}",
    ),
    *(
        f"]]><{MARK}>",
        f"<?{MARK} ?>",
        f"&lt;script&gt;{MARK}",
        f"&#60;{MARK}&#62;",
        f"javascript:{MARK}",
        f"<{MARK}",
    ),
    *(
        f"$\\{MARK}$",
        f"${MARK}",
        f"\\{MARK}{{",
        f"{MARK}\0\x1b[2J",
        f"{MARK}\r\n\t\x0b\x85\u2028",
        f"\u202e{MARK}\u2066",
    ),
    *(
        f"\ud800{MARK}\udfff",
        f"{MARK}\ufeff\u200b\u0301",
        f"{MARK}," * 9,
        MARK * 50_000,
        f"{MARK}\U0001f600",
        MARK,
    ),
)
ENDS = ("", "_loss", "_accuracy", "_norm", "_per_second", "_f1")
UNPRINTABLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

TAGS = {
    *(
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
    ),
    *("table", "tr", "th", "td", "details", "summary", "img"),
    *(
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
    ),
    *("defs", "g", "path", "use", "clippath", "rect", "text", "image"),  # of matplotlib
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
    """Parses a page; what is not text and not of the page's own making is an error."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        for name, value in attributes:
            assert not name.startswith("on"), name
            assert MARK not in name, name
            assert MARK not in (value or ""), (name, value)
            if name in ADDRESSES:
                assert value.startswith(("data:image/png;base64,", "#")), (name, value)
            elif not NAMESPACES.fullmatch(name):
                assert "://" not in (value or ""), (name, value)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            assert MARK not in data
            assert "@import" not in data
            assert "url(" not in data
        else:
            self.text.append(data)

    def handle_comment(self, data):
        assert "svg" in self.open  # matplotlib writes there what it draws
        assert "<" not in data
        assert "--" not in data

    def handle_decl(self, declaration):
        assert declaration == "doctype html"

    def handle_pi(self, data):
        raise AssertionError(data)

    unknown_decl = handle_pi


def check(text):
    """Parses a page to its end; returns its text."""
    text.encode()  # no lone surrogates
    assert not UNPRINTABLE.search(text)
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert not parser.rawdata
    return "".join(parser.text)


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


def named(evaluation, names, words):
    """The same evaluation of classes with other names."""
    old = evaluation.labelled
    source = MemorySource(old.source.images, old.source.labels, names)
    label_map = dataclasses.replace(old.label_map, output_names=names)
    metrics = copy.copy(evaluation.metrics)
    metrics.labelled = Labelled(source, words, [words], label_map)
    return dataclasses.replace(evaluation, labelled=metrics.labelled, metrics=metrics)


def hostile(rng):
    """One or several pieces as a name."""
    return "".join(rng.choices(PIECES, k=rng.choice((1, 1, 1, 2, 3))))


def make_report(rng, model, evaluation):
    """A run, and in every second case its evaluation, in which each name and text is hostile."""

    def name(end=""):
        return hostile(rng) + end

    metrics = {
        name(rng.choice(ENDS)): rng.choice((1.5, 0.25, float("nan"), 2**53, 1e308))
        for _ in range(4)
    }
    lines = [
        {"step": step, "train_loss": 1 / step, **metrics, "wall_seconds": 3.0 * step}
        for step in (1, 2)
    ]
    config = {
        "global_batch": 8,
        "data": name(),
        "model": {"name": name(), name(): [name(), {name(): name()}]},
        name(): name(),
    }
    summary = {
        "test_accuracy": 0.5,
        f"version_{name()}": name(),
        name("_loss"): 1.0,
        name(): name(),
    }
    summary |= {"num_devices": 1, "device_kind": name()} | (
        {"diverged": name()} if rng.random() < 0.2 else {}
    )
    found = {"run": RunLog(name(), config, lines), "notes": [name(), name()]}
    found |= {"summary": summary} if rng.random() < 0.8 else {}
    if rng.random() < 0.5:
        architecture = dataclasses.replace(model.architecture, name=name())
        found["model"] = dataclasses.replace(model, architecture=architecture)
        names = tuple(f"{name()} {number}" for number in range(SEVEN.num_classes))
        found["evaluation"] = named(evaluation, names, name())
    return page.Report(**found)


def test_names_stay_text(evaluated, monkeypatch):
    rng = random.Random(0)
    draw_svg = page._svg
    draw_curves = page.draw_curves
    draw_figures = page.result_figures.draw
    monkeypatch.setattr(page, "KINDS", {})  # of the network; they have no names from files
    for case in range(NUM_CASES):
        is_drawn = case % DRAWN_EVERY == 0
        monkeypatch.setattr(page, "_svg", draw_svg if is_drawn else lambda _: Markup("<svg></svg>"))
        monkeypatch.setattr(page, "draw_curves", draw_curves if is_drawn else lambda *_: None)
        monkeypatch.setattr(
            page.result_figures,
            "draw",
            draw_figures if is_drawn else lambda *_: {"mistakes": b"png"},
        )
        report = make_report(rng, *evaluated)
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
