"""Letters that the font of a figure lacks: they come from another font, or are named once."""

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


def draw_square():
    """Return the glyph of a filled square."""
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    pen.lineTo((100, 800))
    pen.lineTo((900, 800))
    pen.lineTo((900, 0))
    pen.closePath()
    return pen.glyph()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a font that has the first letter, a filled square, and not the other."""
    path = tmp_path / "square.ttf"
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({ord(WORD[0]): "square"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "square": draw_square()})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "square": (1000, 100)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)

    fonts = list(font_manager.fontManager.ttflist)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    font_manager.fontManager.addfont(path)


def draw_words(*words):
    """Return a figure with the words as a title and, as tables of classes have them, as names of
    ticks.
    """
    figure = drawing.new_figure(3, 2)
    axes = figure.subplots()
    axes.set_title(" ".join(words))
    axes.set_xticks(range(len(words)), words)
    return figure


PRINT_SETTINGS = """\
from vit_jax.tools.figures import drawing
drawing.require_drawing()
import matplotlib, os
print(os.getcwd())
print(matplotlib.rcParams['text.usetex'])
"""


def test_nothing_of_the_working_directory_is_read(tmp_path):
    """This setting would run LaTeX."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True")
    command = [sys.executable, "-P", "-c", PRINT_SETTINGS]

    found = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.split() == [os.path.realpath(tmp_path), "False"]


def test_letters_are_taken_of_another_font(installed, caplog):
    figure = draw_words("cat", WORD)

    assert drawing.to_bytes(figure)
    assert caplog.messages == []

    axes = figure.axes[0]
    texts = (axes.title, *axes.get_xticklabels())

    assert {text.get_fontfamily()[-1] for text in texts} == {"Squares"}


def test_letters_of_no_font_are_named_once(installed, caplog):
    caplog.set_level(logging.WARNING)

    assert drawing.to_bytes(draw_words(WORD, OTHER, OTHER), "png")
    assert drawing.to_bytes(draw_words(WORD, OTHER, OTHER), "svg")

    assert caplog.messages == [f"Figures show boxes for {OTHER}: install a font that has them."]


def test_usual_letters_keep_their_font(caplog):
    figure = draw_words("caf\u00e9 \u2192 \u03b1\u2026", "\u0436")
    drawing.to_bytes(figure)

    assert "Squares" not in figure.axes[0].title.get_fontfamily()
    assert caplog.messages == []
