"""Letters that the font of a picture lacks: taken of another one, or named once."""

import logging
import os
import subprocess
import sys

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from vit_jax.tools.figures import drawing

WORD = "\u4e2d\u4e2d"
OTHER = "\u6587"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a font that has the first letter, a filled square, and not the other."""
    path = tmp_path / "square.ttf"
    pen = TTGlyphPen(None)
    for place in ((100, 0), (100, 800), (900, 800), (900, 0)):
        (pen.lineTo if pen.points else pen.moveTo)(place)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({ord(WORD[0]): "square"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "square": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "square": (1000, 100)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", list(font_manager.fontManager.ttflist))
    font_manager.fontManager.addfont(path)


def figure_of(*words):
    """Each as a title and, in the way of tables of classes, as the name of a tick."""
    figure = drawing.new_figure(3, 2)
    axes = figure.subplots()
    axes.set_title(" ".join(words))
    axes.set_xticks(range(len(words)), words)
    return figure


def test_nothing_of_the_working_directory_is_read(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True")  # runs LaTeX
    code = "from vit_jax.tools.figures import drawing; drawing.require_drawing(); "
    code += "import matplotlib, os; print(os.getcwd())\n"
    code += "print(matplotlib.rcParams['text.usetex'])"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert found.stdout.split() == [os.path.realpath(tmp_path), "False"]


def test_letters_are_taken_of_another_font(installed, caplog):
    figure = figure_of("cat", WORD)

    assert drawing.to_bytes(figure)
    assert caplog.messages == []

    axes = figure.axes[0]
    assert {text.get_fontfamily()[-1] for text in (axes.title, *axes.get_xticklabels())} == {
        "Squares"
    }


def test_letters_of_no_font_are_named_once(installed, caplog):
    caplog.set_level(logging.WARNING)

    for form in ("png", "svg"):
        assert drawing.to_bytes(figure_of(WORD, OTHER, OTHER), form)
    assert caplog.messages == [f"Figures show boxes for {OTHER}: install a font that has them."]


def test_usual_letters_keep_their_font(caplog):
    figure = figure_of("caf\u00e9 \u2192 \u03b1\u2026", "\u0436")
    drawing.to_bytes(figure)

    assert "Squares" not in figure.axes[0].title.get_fontfamily()
    assert caplog.messages == []
