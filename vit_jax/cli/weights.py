"""Verbs that use weights: convert, evaluate, predict, export."""

import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from vit_jax.cli.loading import Checkpoint, Limits, Names, OfWeights, Reading
from vit_jax.cli.options import (
    REQUIRED,
    PositiveShare,
    UsageError,
    argument,
    fail,
    option,
    switch,
    verb,
)
from vit_jax.cli.outputs import note, output_file, output_folder, reject_runs, require_creatable
from vit_jax.cli.stop import joined
from vit_jax.config.data_kinds import spell_forms
from vit_jax.config.rules import Count, Number, When
from vit_jax.storage.files import expanded, write_atomically
from vit_jax.text.printable import printable, printable_lines

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.evals.label_map import Labelled
    from vit_jax.weights import Weights

Library = Literal["timm", "huggingface"]
Programs = Literal["npz", "safetensors", "stablehlo", "onnx"]
_CHOICE = (
    "split",
    "train_split",
    "classes",
    "seed",
    "holdout_fraction",
)  # of the images to evaluate on


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Conversion(OfWeights, Names):
    overwrite: bool = switch("replace existing files")

    def convert(
        self,
        source: str,
        destination: str,
        to: str | None,
        *,
        without_head: bool = False,
        verbose: bool = False,
    ) -> None:
        """Write weights in another format; print what was converted."""
        require_creatable(expanded(destination).parent, destination)
        reject_runs(expanded(destination), destination)
        facts = self.facts() | {"without_head": without_head, "overwrite": self.overwrite}

        from vit_jax.checkpoint import SaveError
        from vit_jax.weights.saving import convert

        try:
            report = convert(source, destination, to=to, polyak=not self.raw, **facts)
        except SaveError as error:
            fail(str(error), 1)
        print(report.text(is_complete=verbose))


@verb("ViT-B_16.npz weights/", "runs/mine my-vit/ --to=huggingface --without_head")
class Convert(_Conversion):
    """Read weights in any format and write them in any other."""

    source: str = argument(
        "SOURCE", "weights in any format: a file, a folder, a workdir or hf://owner/name"
    )
    destination: str = argument("DESTINATION", "a .npz or .safetensors file, or a folder")
    to: Literal["released", "bit", "timm", "huggingface", "vit_jax"] | None = option(
        "", "the format; a .npz and a folder have defaults"
    )
    without_head: bool = switch("remove the classifier")
    verbose: bool = switch("list every array and how it is used")
    push: str | None = option(
        "hf://OWNER/NAME", "upload the folder of --to=timm or huggingface to the Hub"
    )

    def run(self) -> None:
        from vit_jax.weights import hub
        from vit_jax.weights.saving import LIBRARIES, names_folder

        if self.push is not None:
            if self.to not in LIBRARIES or not names_folder(self.destination):
                raise UsageError(
                    f"--push={self.push}: must be of a folder. Use --to=timm or --to=huggingface."
                )
            hub.require_hub(self.push)
        more = {"without_head": self.without_head, "verbose": self.verbose}
        self.convert(self.source, self.destination, self.to, **more)
        if self.push is not None:
            print(f"uploaded to {hub.push(expanded(self.destination), self.push)}")


@verb(
    "runs/mine --data=folder:my-images --csv=classes.csv",
    "ViT-B_16.npz --data=imagenet --data_dir=DATA --report=reports",
)
class Evaluate(Limits, Reading, Names, Checkpoint):
    """Accuracy, loss and calibration of weights on a labelled dataset, with intervals.

    Data that the weights were trained on are split as in training. Of other data the split "test" is evaluated, or all
    of a folder without split sub-folders (--split=all), unless --holdout_fraction= or --seed= selects a hold-out. Of
    imagenet all available sets of validation, ReaL, V2, -A, -R, Sketch and ObjectNet, in one table.
    """

    data: str = option(
        "DATA",
        f"{spell_forms()}; imagenet, or imagenet:NAME,… of its sets",
        REQUIRED,
    )
    report: str | None = option(
        "FOLDER", "write tables of classes and images, confusions and pictures"
    )
    csv: str | None = option("FILE", "write the table of classes; - prints only this table")
    json: bool = switch("print all metrics as JSON")
    real: str | None = option("FILE", "real.json, the labels of ImageNet ReaL")
    split: str | None = option("NAME", "train, all, or another split of the data; default: test")
    data_dir: str | None = option("FOLDER", "of TFDS, or of the ImageNets")
    train_split: str | None = option("NAME", "the split that defines the classes")
    classes: tuple[str, ...] | None = option("A,B", "only images of these classes")
    seed: Number | None = option("N", "of the hold-out of files without splits")
    holdout_fraction: PositiveShare | None = option("X", "of each class of files without splits")

    def run(self) -> None:
        with joined():
            self._evaluate()

    def _evaluate(self) -> None:
        from vit_jax import hosts
        from vit_jax.evals.evaluate import make_evaluate, to_json, to_text, values
        from vit_jax.text.tables import to_csv
        from vit_jax.tools.figures.drawing import require_drawing
        from vit_jax.tools.figures.report_folder import write_report

        folder = None
        table = None
        if hosts.is_first():
            folder = output_folder(self.report, "--report=") if self.report is not None else None
            table = _csv_file(self.csv)
        if self.report is not None:
            require_drawing()
        model, weights = self.load(self.checkpoint, is_placed=True)
        opened, absent = self._open(model, weights)
        transform = model.require_transform()
        evaluate = make_evaluate(
            model.module,
            model.architecture,
            transform,
            source=model.source,
            is_multilabel=model.is_multilabel,
            **self.limits,
        )
        results = {}
        for name, labelled in opened.items():
            if folder is not None:
                inside = folder / name if len(opened) > 1 else folder
                results[name] = write_report(inside, labelled, evaluate, transform, model.source)
            else:
                results[name] = evaluate(labelled)
        if not hosts.is_first():
            return
        if self.csv != "-":
            text = (
                to_json(values(results, absent, model.source))
                if self.json
                else to_text(results, model.source)
            )
            print(text, flush=True)
        for result in results.values():
            note(*result.labelled.notes)
        note(*(f"imagenet:{name} is missing: {reason}" for name, reason in absent.items()))
        if self.csv is not None:
            (result,) = results.values()
            _write_csv(table, to_csv(result.metrics.class_rows()))

    def _open(
        self, model: "Model", weights: "Weights"
    ) -> "tuple[dict[str, Labelled], dict[str, str]]":
        """Return the images by name, "" for a single dataset; and how missing sets are made."""
        from vit_jax.evals.splits import SplitChoice, open_labelled
        from vit_jax.tools.imagenet_sets import is_family, open_family

        data = self.data
        if is_family(data):
            self.reject_ineffective(_CHOICE, f"on {data}")
            opened, absent = open_family(data, weights, data_dir=self.data_dir, real=self.real)
            if self.csv is not None and len(opened) > 1:
                raise UsageError(
                    f"--csv={self.csv}: must be of one dataset, and {data} are {len(opened)}. Use --report=FOLDER."
                )
            return opened, absent
        self.reject_ineffective(["real"], f"on {data}, only on imagenet")
        value_range = model.require_transform().value_range
        choice = SplitChoice(value_range=value_range, **self.chosen("data_dir", *_CHOICE))
        return {"": open_labelled(data, weights, choice)}, {}


def _csv_file(csv: str | None) -> pathlib.Path | None:
    """Return the file of --csv=; None without one, and for "-", standard output."""
    from vit_jax.data.kinds.image_files import is_image

    if csv is None or csv == "-":
        return None
    path = output_file(csv, "--csv=")
    if is_image(path.name):
        raise UsageError(
            f"--csv={csv}: must not be an image, which would be replaced. Use NAME.csv."
        )
    return path


def _write_csv(path: pathlib.Path | None, table: str) -> None:
    """Write a table to a file, with names of images as the bytes that they are, or to standard output.

    On a terminal, control characters of names are escaped; a pipe gets the table unchanged.
    """
    encoded = table.encode("utf-8", "surrogateescape")
    if path is None:
        text = encoded.decode(errors="replace")
        print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)
    else:
        write_atomically(path, encoded)


@verb("runs/mine cat.jpg photos/", "ViT-B_16.npz 'photos/*.jpg' --top=1 --json --resize=direct")
class Predict(Reading, Names, Checkpoint):
    """Classes of image files: a table, JSON or CSV.

    Of multi-label weights all that are probable enough. Exit code 1 if an image is unreadable; the others are
    classified.
    """

    images: tuple[str, ...] = argument(
        "IMAGE…", "images, folders, patterns, or - for names on standard input"
    )
    top: Count | None = option(
        "N", "classes to print for each image; default: 3, all of multi-label weights"
    )
    threshold: PositiveShare | None = option(
        "X", "least probability of a class of multi-label weights; default: 0.5"
    )
    json: bool = switch("print them as JSON")
    csv: str | None = option(
        "FILE", "write them as a table too, a line for each image; - prints only this table"
    )

    def run(self) -> None:
        table = _csv_file(self.csv)
        from vit_jax.data.kinds.image_files import list_images

        images = list_images(self.images)

        from vit_jax.api.predictions import predict, to_csv, to_json, to_table
        from vit_jax.data.decoding.depth import survey
        from vit_jax.evals.multilabel import THRESHOLD
        from vit_jax.hosts import exits

        model = _readable(*self.load(self.checkpoint))
        note(*survey(images, model.require_transform().value_range, "--value_range"))
        threshold = self.threshold
        if threshold is not None and not model.is_multilabel:
            raise UsageError(
                f"--threshold={threshold:g}: has no effect on single-label {model.source}. Use --top=N."
            )
        usual_top, usual_threshold = (None, THRESHOLD) if model.is_multilabel else (3, 0.0)
        records = list(
            predict(
                model,
                images,
                self.top or usual_top,
                usual_threshold if threshold is None else threshold,
            )
        )
        if self.csv != "-":
            print(to_json(records) if self.json else to_table(records))
        if self.csv is not None:
            _write_csv(table, to_csv(records))
        if failed := [printable(record["image"]) for record in records if "error" in record]:
            fail(
                f"{len(failed)} of {len(records)} images cannot be read: {', '.join(failed)}",
                exits.FAILED,
            )


@verb("runs/mine --to=npz", "runs/mine --to=onnx --output=mine.onnx")
class Export(_Conversion, Reading, Checkpoint):
    """One file for other programs: weights, or the network as a StableHLO or ONNX program."""

    to: Programs = option("", "weights, or a program that takes uint8 images", REQUIRED)
    output: str | None = option("PATH", "default: the name of the weights")
    names: Annotated[Library | None, When("to", "safetensors")] = option(
        "", "names of parameters; default: timm"
    )

    def run(self) -> None:
        name = pathlib.Path(os.path.realpath(expanded(self.checkpoint))).name
        output = (
            self.output or f"{name.removesuffix('.npz').removesuffix('.safetensors')}.{self.to}"
        )
        if self.to == "npz" and (not output.endswith(".npz") or expanded(output).is_dir()):
            raise UsageError(
                f"--output={output}: must be a file for --to=npz. Use a name that ends in .npz."
            )
        if self.to not in ("stablehlo", "onnx"):
            of_programs = [
                field.name
                for field in dataclasses.fields(Reading)
                if not hasattr(OfWeights, field.name)
            ]
            self.reject_ineffective(of_programs, "without --to=stablehlo or onnx")
            self.convert(
                self.checkpoint,
                output,
                (self.names or "timm") if self.to == "safetensors" else None,
            )
            return

        from vit_jax.tools.export.programs import export_onnx, export_stablehlo, require_free

        output_file(output)
        for path in require_free(output, self.to, overwrite=self.overwrite):
            reject_runs(path, f"--output={output}")
        model = _readable(*self.load(self.checkpoint))
        write = export_onnx if self.to == "onnx" else export_stablehlo
        for path in write(model, output, overwrite=self.overwrite):
            print(printable(str(path)))


def _readable(model: "Model", weights: "Weights") -> "Model":
    """Return the model with readable names of its classes; print a note if the weights do not have them."""
    from vit_jax.evals.imagenet_classes import readable_names

    names = readable_names(weights)
    if weights.class_names is None:
        meaning = "their numbers are used" if names is None else "ImageNet's 1,000 names are used"
        note(
            f"the weights do not name their classes: {meaning}; --class_names=FILE gives names, one a line."
        )
    return model if names is None else dataclasses.replace(model, class_names=names)
