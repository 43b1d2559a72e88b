"""Verbs that show what runs do and did: status, plot and report.

`status` and `plot` read the files of workdirs; `report` also evaluates the newest checkpoint.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vit_jax.cli.groups import AllowedCode, ImageFields, WeightFields, load_model
from vit_jax.cli.loading import Limits
from vit_jax.cli.options import Options, argument, format_command, group, option, switch
from vit_jax.cli.outputs import note, resolve_output_file
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Positive, When
from vit_jax.storage.files import expand_path
from vit_jax.text.printable import printable

if TYPE_CHECKING:
    from vit_jax.tools.inspection.status import Status as RunStatus


@verb("runs/digits", "runs --follow=60")
class Status(Options):
    """Print the state of runs: step, loss, speed, time left, last checkpoint, last error.

    It reads the files of workdirs and no device, and can run beside the runs.
    """

    workdirs: tuple[str, ...] = argument(
        "WORKDIR…",
        "workdirs of runs, or folders of workdirs; also on shared file systems",
        reads_bucket=True,
    )

    follow: Annotated[Positive | None, When("json", False)] = option(
        "SECONDS", "repeat until no run is running"
    )
    json: bool = switch("print a list of objects, for programs")

    def suggest_next(self) -> str:
        """Return the figure of the runs."""
        return format_command("plot", *self.workdirs)

    def run(self) -> None:
        from vit_jax.tools.inspection.status import read_all

        while True:
            runs = read_all(self.workdirs)
            self._print(runs)

            is_running = any(run.state == "running" for run in runs)
            if self.follow is None or not is_running:
                return

            time.sleep(self.follow)
            print()

    def _print(self, runs: "Sequence[RunStatus]") -> None:
        """Print a table, or a list of objects."""
        from vit_jax.tools.inspection.status import to_table

        if self.json:
            objects = list(map(dataclasses.asdict, runs))
            print(json.dumps(objects, indent=2), flush=True)
        else:
            print(to_table(runs), end="", flush=True)


@verb("runs/digits", "runs/* --axis=exaflops --metrics=test_accuracy --output=compute.svg")
class Plot(Options):
    """Draw the learning curves of runs in one figure."""

    runs: tuple[str, ...] = argument("RUN…", "workdirs, or folders of workdirs")
    output: str = option("FILE", "figure: a .png, .svg or .pdf file", "curves.png")

    axis: Literal["steps", "images", "exaflops", "time"] = option("", "horizontal axis", "steps")
    metrics: tuple[str, ...] | None = option(
        "NAME,…",
        "metrics, also precision, speed, norms or any; default: loss,accuracy,learning_rate",
    )

    def suggest_next(self) -> str:
        """Return the page of the first run."""
        return format_command("report", self.runs[0])

    def run(self) -> None:
        from vit_jax.storage.files import write_atomically
        from vit_jax.tools.figures import curves, drawing

        output, form = drawing.resolve_output(self.output)
        resolve_output_file(self.output)

        runs = curves.read_runs(self.runs)
        metrics = self.metrics or curves.USUAL
        figure = curves.draw_curves(runs, metrics, self.axis)

        write_atomically(output, drawing.to_bytes(figure, form))
        print(printable(str(output)))


@verb("runs/digits", "runs/pod --without_data --output=pod.html")
class Report(Limits):
    """Write a run as one HTML page: results, curves, mistakes, figures of the network, cost, config.

    The page needs no other file and no network. The test images of the run are evaluated for it.
    """

    workdir: str = argument("WORKDIR", "workdir of a run, finished or not")
    output: str = option("FILE", "HTML file of the page", "report.html")

    without_data: bool = switch("read no images: only the workdir")
    data_dir: Annotated[str | None, When("without_data", False)] = option(
        "FOLDER", "folder of TFDS datasets", reads_bucket=True
    )

    weights: AllowedCode = group(AllowedCode)

    def suggest_next(self) -> str:
        """Return predictions by the run."""
        return f"{format_command('predict', self.workdir)} IMAGE"

    def run(self) -> None:
        if self.without_data:
            self.reject_ineffective(self.limits, "with --without_data")
        output = resolve_output_file(self.output)

        from vit_jax.tools.figures.drawing import require_drawing

        require_drawing("jinja2")

        from vit_jax.storage.files import write_atomically
        from vit_jax.tools.figures import page

        folder = expand_path(self.workdir).absolute()
        content = self._read(folder)
        note(*content.get("notes", ()))
        text = page.build_page(page.Report(**content))
        write_atomically(output, text)
        print(printable(str(output)))

    def _read(self, folder: Path) -> dict[str, Any]:
        """Return the content of the page by name."""
        from vit_jax.checkpoint.reader import has_checkpoints
        from vit_jax.tools.figures.curves import read_run
        from vit_jax.tools.figures.page import evaluate_images
        from vit_jax.train.run_files import read_summary

        content = dict[str, Any]()
        content["run"] = read_run(folder, str(folder))
        content["summary"] = read_summary(folder)
        if not has_checkpoints(folder):
            content["notes"] = [
                "There is no checkpoint yet: the page has no predictions and no figures of the network."
            ]
            return content

        # The run states all other facts.
        weight_fields = WeightFields(allow_code=self.weights.allow_code)
        model, weights = load_model(
            str(folder),
            weight_fields,
            ImageFields(),
            data=content["run"].config.get("data") or "",
            is_placed=True,
            needs_classes=False,
            needs_transform=False,
        )
        content["model"] = model
        if self.without_data:
            return content

        predictions = evaluate_images(model, weights, self.data_dir, **self.limits)
        return content | predictions
