"""What all pictures share: matplotlib without its state, colours, tiles of images, files.

Pictures are drawn on the canvas of a `Figure`: pyplot has a state and may open windows.
"""

import importlib
import io
import pathlib
from typing import Any

import cv2
import numpy as np

from vit_jax.files import printable

# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK)  # of series, in this order
MOST_LETTERS = 20  # of a name in a picture
FORMS = ("png", "svg", "pdf")  # of files
TILE_PIXELS = 160
DOTS_PER_INCH = 120


def require_drawing() -> None:
    """Raises ValueError where matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            f"Pictures are drawn by matplotlib, which cannot be imported ({error}): pip install 'vit_jax[figures]'."
        ) from None


def output_of(name: str) -> tuple[pathlib.Path, str]:
    """The file that `--output=` names, and which of `FORMS` it has.

    Raises:
      ValueError: it has none of them, or matplotlib is not installed.
    """
    output = pathlib.Path(name).expanduser()
    form = output.suffix.removeprefix(".")
    if form not in FORMS:
        raise ValueError(f"--output={name}: the name must end in one of .{', .'.join(FORMS)}.")
    require_drawing()
    return output, form


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches."""
    require_drawing()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def to_bytes(figure: Any, form: str = "png") -> bytes:
    """The content of a file of one of `FORMS`."""
    file = io.BytesIO()
    figure.savefig(file, format=form)
    return file.getvalue()


def tile(image_HWC: np.ndarray, pixels: int = TILE_PIXELS) -> np.ndarray:
    """The image, its longer side at most `pixels`."""
    scale = pixels / max(image_HWC.shape[:2])
    return image_HWC if scale >= 1 else cv2.resize(image_HWC, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)


def short(name: str, letters: int = MOST_LETTERS) -> str:
    """A name in a picture; a dollar would begin a formula."""
    shown = printable(name)
    return (shown if len(shown) <= letters else f"{shown[: letters - 1]}…").replace("$", r"\$")
