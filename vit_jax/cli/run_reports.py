"""Verbs that show what runs do and did: status, plot and report."""

import dataclasses
import json
import time
from typing import Annotated, Any, Literal

from vit_jax.cli.loading import Limits, Reading
from vit_jax.cli.options import AllowCode, Options, argument, option, switch, verb
from vit_jax.cli.outputs import note, output_file
from vit_jax.config.rules import Positive, When
from vit_jax.storage.files import expanded
from vit_jax.text.printable import printable


@verb("runs/digits", "runs --follow=60")
class Status(Options):
    """Print the state of runs: step, loss, speed, time left, last checkpoint, last error.

    It reads the files of workdirs and no device, and can run beside the runs.
    """

    workdirs: tuple[str, ...] = argument(
        "WORKDIR…", "of runs, or folders of workdirs; also on shared file systems"
    )
    follow: Annotated[Positive | None, When("json", False)] = option(
        "SECONDS", "repeat until no run is running"
    )
    json: bool = switch("print a list of objects, for programs")

    def run(self) -> None:
        from vit_jax.tools.status import read_all, to_table

        while True:
            runs = read_all(self.workdirs)
            text = (
                json.dumps(list(map(dataclasses.asdict, runs)), indent=2) + "\n"
                if self.json
                else to_table(runs)
            )
            print(text, end="", flush=True)
            if self.follow is None or all(run.state != "running" for run in runs):
                return
            time.sleep(self.follow)
            print()


@verb("runs/digits", "runs/* --axis=exaflops --metrics=test_accuracy --output=compute.svg")
class Plot(Options):
    """Draw the learning curves of runs in one picture."""

    runs: tuple[str, ...] = argument("RUN…", "workdirs, or folders of workdirs")
    output: str = option("FILE", ".png, .svg or .pdf", "curves.png")
    axis: Literal["steps", "images", "exaflops", "time"] = option("", "horizontal axis", "steps")
    metrics: tuple[str, ...] | None = option(
        "NAME,…", "also precision, speed, norms or any; default: loss,accuracy,learning_rate"
    )

    def run(self) -> None:
        from vit_jax.storage.files import write_atomically
        from vit_jax.tools.figures import curves, drawing

        output, form = drawing.output_of(self.output)
        output_file(self.output)
        figure = curves.draw_curves(
            curves.read_runs(self.runs), self.metrics or curves.USUAL, self.axis
        )
        write_atomically(output, drawing.to_bytes(figure, form))
        print(printable(str(output)))


@verb("runs/digits", "runs/pod --without_data --output=pod.html")
class Report(Limits, AllowCode):
    """Write a run as one HTML page: results, curves, mistakes, pictures of the network, cost, config.

    The page needs no other file and no network. The test images of the run are evaluated for it.
    """

    workdir: str = argument("WORKDIR", "of a run, also one that is not finished")
    output: str = option("FILE", "the page", "report.html")
    without_data: bool = switch("read no images: only the workdir")
    data_dir: Annotated[str | None, When("without_data", False)] = option("FOLDER", "of TFDS")

    def run(self) -> None:
        if self.without_data:
            self.reject_ineffective(self.limits, "with --without_data")
        output = output_file(self.output)
        folder = expanded(self.workdir).absolute()

        from vit_jax.checkpoint.reader import has_checkpoints
        from vit_jax.tools.figures.drawing import require_drawing

        require_drawing("jinja2")

        from vit_jax.storage.files import write_atomically
        from vit_jax.tools.figures import page
        from vit_jax.tools.figures.curves import read_run
        from vit_jax.train.run_files import read_summary

        content: dict[str, Any] = {
            "run": read_run(folder, str(folder)),
            "summary": read_summary(folder),
        }
        if has_checkpoints(folder):
            reading = Reading(allow_code=self.allow_code)
            model, weights = reading.load(
                str(folder), is_placed=True, needs_classes=False, needs_transform=False
            )
            content["model"] = model
            if not self.without_data:
                content |= page.look_at_data(model, weights, self.data_dir, **self.limits)
        else:
            content["notes"] = [
                "There is no checkpoint yet: the page has no predictions and no network pictures."
            ]
        note(*content.get("notes", ()))
        write_atomically(output, page.build_page(page.Report(**content)))
        print(printable(str(output)))
