"""Verbs that show what runs do and did: status, plot and report."""

import dataclasses
import json
import sys
import time
from typing import Any

from vit_jax.cli.loading import OF_LIMITS, limits, load_placed_model
from vit_jax.cli.outputs import output_file
from vit_jax.cli.verb import ALLOW_CODE, verb
from vit_jax.cli.words import Given, UsageError, positive
from vit_jax.files import expanded, printable

_OF_DATA = ("data_dir", "global_batch", "max_unreadable")


@verb(
    {
        "WORKDIR…": "of runs, or folders with workdirs in them; also on mounted or shared file systems",
        "[--follow=SECONDS]": "print the table again after this time, until no run is running",
        "[--json]": "a list of objects, for programs",
    },
    "runs/digits",
    "runs --follow=60",
)
def status(given: Given) -> None:
    """Print the state of runs: step, loss, speed, time left, last checkpoint, last error.

    It reads the files of workdirs and no device, and can run beside the runs.
    """
    options = given.options
    seconds = positive(options, "follow") if "follow" in options else None
    if seconds is not None and "json" in options:
        raise UsageError("--follow has no effect with --json: run the command again.")

    from vit_jax.train.status import read_all, to_table

    while True:
        found = read_all(given.more)
        if "json" in options:
            print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
        else:
            print(to_table(found), end="", flush=True)
        if seconds is None or all(one.state != "running" for one in found):
            return
        time.sleep(seconds)
        print()


@verb(
    {
        "RUN…": "workdirs, or folders with workdirs in them",
        "[--output=FILE]": "curves.png by default; .svg and .pdf too",
        "[--axis=steps|images|exaflops|time]": "against what metrics are drawn; steps by default",
        "[--metrics=NAME,…]": "loss,accuracy,learning_rate by default; precision, speed, norms or any metric",
    },
    "runs/digits",
    "runs/* --axis=exaflops --metrics=test_accuracy --output=compute.svg",
)
def plot(given: Given) -> None:
    """Draw the learning curves of runs in one picture."""
    options, runs = given.options, given.more

    from vit_jax import drawing
    from vit_jax.figures import curves
    from vit_jax.files import write_atomically

    name = options.get("output", "curves.png")
    output, form = drawing.output_of(name)
    output_file(name)
    asked = tuple(options["metrics"].split(",")) if "metrics" in options else curves.USUAL
    figure = curves.draw_curves(curves.read_runs(runs), asked, options.get("axis", "steps"))
    write_atomically(output, drawing.to_bytes(figure, form))
    print(printable(str(output)))


@verb(
    {
        "WORKDIR": "of a run, ended or not",
        "[--output=FILE]": "report.html by default",
        "[--without_data]": "read no images: only what is in the workdir",
        "[--data_dir=FOLDER]": "of TFDS",
    }
    | ALLOW_CODE
    | OF_LIMITS,
    "runs/digits",
    "runs/pod --without_data --output=pod.html",
)
def report(given: Given) -> None:
    """Write a run as one HTML page: results, curves, mistakes, pictures of the network, cost, config.

    The page needs no other file and no network. The images that the run is tested on are evaluated for it.
    """
    options = given.options
    if idle := [f"--{name}" for name in _OF_DATA if name in options and "without_data" in options]:
        raise UsageError(f"{', '.join(idle)}: without effect with --without_data; leave it out.")
    numbers = limits(options)
    output = output_file(options.get("output", "report.html"))
    folder = expanded(options["WORKDIR"]).absolute()

    from vit_jax.checkpoint.reader import has_checkpoints
    from vit_jax.drawing import require_drawing

    require_drawing("jinja2")

    from vit_jax.figures.curves import read_run
    from vit_jax.figures.page import Report, build_page, look_at_data
    from vit_jax.files import write_atomically
    from vit_jax.train.run_files import read_summary

    parts: dict[str, Any] = {"run": read_run(folder, str(folder)), "summary": read_summary(folder)}
    if has_checkpoints(folder):
        of_weights = options | {"CHECKPOINT": str(folder)}
        model, weights = load_placed_model(of_weights, needs_classes=False, needs_transform=False)
        parts["model"] = model
        if "without_data" not in options:
            parts |= look_at_data(model, weights, options.get("data_dir"), **numbers)
    else:
        parts["notes"] = ["There is no checkpoint yet, so there are neither predictions nor pictures of the network."]
    for note in parts.get("notes", ()):
        print(f"note: {printable(note)}", file=sys.stderr)
    write_atomically(output, build_page(Report(**parts)))
    print(printable(str(output)))
