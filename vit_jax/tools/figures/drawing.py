"""Shared parts of all figures: matplotlib without its state, colours, tiles of images, files.

Figures are drawn without pyplot, which has a state and may open windows.
"""

import contextlib
import importlib
import io
import logging
import pathlib
import re
import sys
import warnings
from typing import TYPE_CHECKING, cast

import cv2
import numpy as np

from vit_jax.imports.extras import install_command
from vit_jax.storage.files import expand_path
from vit_jax.text.printable import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are distinct for colour-blind readers.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PINK = "#CC79A7"
SKY = "#56B4E9"
RED = "#D55E00"
BLACK = "#000000"
GREY = "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK)  # order of the series of a plot
MOST_LETTERS = 20  # letters of a name in a figure
FORMS = ("png", "svg", "pdf")  # formats of files
TILE_PIXELS = 160
DOTS_PER_INCH = 120
_reported_letters = set[str]()  # letters that no installed font has


def require_drawing(*packages: str) -> None:
    """Import matplotlib, and other packages of the extra `figures`.

    The file `matplotlibrc` of the working directory, which may make matplotlib run LaTeX, is not
    read.

    Raises:
      ValueError: a package is not installed.
    """
    for name in ("matplotlib", *packages):
        if sys.modules.get(name):
            continue
        try:
            with contextlib.chdir(pathlib.Path(__file__).parent):
                importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"Figures need {name}, which cannot be imported ({error}): "
                f"{install_command('figures')}"
            ) from None


def resolve_output(name: str) -> tuple[pathlib.Path, str]:
    """Return the file that `--output=` names, and its format, one of `FORMS`.

    Raises:
      ValueError: the file has another format, or matplotlib is not installed.
    """
    output = expand_path(name)
    form = output.suffix.removeprefix(".")
    if form not in FORMS:
        raise ValueError(f"--output={name}: the name must end in one of .{', .'.join(FORMS)}.")
    require_drawing()
    return output, form


def new_figure(width: float, height: float) -> "Figure":
    """Return a figure with this size in inches."""
    require_drawing()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def to_bytes(figure: "Figure", form: str = "png") -> bytes:
    """Return a file of one of `FORMS`; other installed fonts supply letters that a font lacks."""
    content, missing = _draw(figure, form)
    families = _find_families(missing) if missing else []
    if families:
        from matplotlib.text import Text

        for text in cast(list[Text], figure.findobj(Text)):
            text.set_fontfamily([*text.get_fontfamily(), *families])
        content, missing = _draw(figure, form)
    _report_missing(missing)
    return content


def _report_missing(letters: set[str]) -> None:
    """Log a warning with letters that are drawn as boxes, each letter once in a process."""
    new = letters - _reported_letters
    if not new:
        return
    _reported_letters.update(new)
    logging.getLogger(__name__).warning(
        "Figures show boxes for %s: install a font that has them.", printable("".join(sorted(new)))
    )


def _draw(figure: "Figure", form: str) -> tuple[bytes, set[str]]:
    """Return the file, and the letters that are drawn as boxes."""
    file = io.BytesIO()
    missing = set[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(file, format=form)

    for warning in caught:
        if match := re.match(r"Glyph (\d+) .*missing from", str(warning.message)):
            missing.add(chr(int(match[1])))
        else:
            warnings.warn_explicit(
                warning.message,
                warning.category,
                warning.filename,
                warning.lineno,
            )
    return file.getvalue(), missing


def _find_families(letters: set[str]) -> list[str]:
    """Return families of installed fonts that together have as many of the letters as possible."""
    from matplotlib import font_manager

    families = []
    missing = set(letters)
    for entry in font_manager.fontManager.ttflist:
        if not missing or entry.name.startswith("Last Resort"):  # has boxes only
            continue
        try:
            font = font_manager.get_font(entry.fname)
        except (OSError, RuntimeError):  # removed, or not supported by matplotlib
            continue
        supplied = {letter for letter in missing if font.get_char_index(ord(letter))}
        if supplied and font.scalable:  # fonts of coloured emoji have bitmaps of one size
            families.append(entry.name)
            missing -= supplied
    return families


def shrink(image_HWC: np.ndarray) -> np.ndarray:
    """Return the image, its longer side at most `TILE_PIXELS`."""
    scale = TILE_PIXELS / max(image_HWC.shape[:2])
    if scale >= 1:
        return image_HWC
    return cv2.resize(
        image_HWC,
        None,
        fx=scale,
        fy=scale,
        interpolation=cv2.INTER_AREA,
    )


def shorten(name: str, most_letters: int = MOST_LETTERS) -> str:
    """Return a name for a figure, shortened; dollars are escaped, because they begin formulas."""
    text = printable(name)
    if len(text) > most_letters:
        text = f"{text[: most_letters - 1]}…"
    return text.replace("$", r"\$")
