"""Verbs that show what runs did: plot and report."""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.cli.weights import load_placed_model
from vit_jax.cli.words import UsageError, split, whole
from vit_jax.files import printable


def plot(words: Sequence[str]) -> None:
    """Learning curves of runs in one picture."""
    options, _, runs = split(words, positional=("RUN…",), optional=("output", "metrics", "axis"))
    output = pathlib.Path(options.get("output", "curves.png")).expanduser()

    from vit_jax import drawing
    from vit_jax.analysis import curves
    from vit_jax.files import write_atomically

    form, axis = output.suffix.removeprefix("."), options.get("axis", "steps")
    if form not in drawing.FORMS:
        raise UsageError(f"--output={options['output']}: the name must end in one of .{', .'.join(drawing.FORMS)}.")
    if axis not in curves.AXES:
        raise UsageError(f"--axis={axis}: choose one of {', '.join(curves.AXES)}.")
    drawing.require_drawing()
    asked = tuple(options["metrics"].split(",")) if "metrics" in options else curves.USUAL
    figure = curves.draw_curves(curves.read_runs(runs), asked, axis)
    write_atomically(output, drawing.to_bytes(figure, form))
    print(printable(str(output)))


def report(words: Sequence[str]) -> None:
    """A run as one HTML page."""
    optional, switches = ("output", "data_dir", "global_batch", "max_unreadable"), ("without_data",)
    options, _, _ = split(words, positional=("WORKDIR",), optional=optional, switches=switches)
    if idle := [f"--{name}" for name in optional[1:] if name in options and "without_data" in options]:
        raise UsageError(f"{', '.join(idle)}: without effect with --without_data; leave it out.")
    numbers = {"global_batch": "128", "max_unreadable": "0"} | options
    limits = {name: whole(numbers, name) for name in ("global_batch", "max_unreadable")}
    output = pathlib.Path(options.get("output", "report.html")).expanduser()
    folder = pathlib.Path(options["WORKDIR"]).expanduser().absolute()

    from vit_jax.analysis.curves import read_run
    from vit_jax.analysis.page import Report, build_page, look_at_data
    from vit_jax.checkpoint.reader import has_checkpoints
    from vit_jax.drawing import require_drawing
    from vit_jax.files import write_atomically
    from vit_jax.train.writers import read_summary

    require_drawing()
    parts: dict[str, Any] = {"run": read_run(folder, str(folder)), "summary": read_summary(folder)}
    if has_checkpoints(folder):
        model, weights = load_placed_model({"CHECKPOINT": str(folder)}, needs_classes=False, needs_transform=False)
        parts["model"] = model
        if "without_data" not in options:
            parts |= look_at_data(model, weights, options.get("data_dir"), **limits)
    else:
        parts["notes"] = ["There is no checkpoint yet, so neither answers nor pictures of the network."]
    for note in parts.get("notes", ()):
        print(f"note: {printable(note)}", file=sys.stderr)
    write_atomically(output, build_page(Report(**parts)))
    print(printable(str(output)))
