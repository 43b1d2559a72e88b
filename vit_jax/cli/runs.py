"""Verbs that show what runs did: plot."""

import pathlib
from collections.abc import Sequence

from vit_jax.cli.words import UsageError, split


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
    print(output)
