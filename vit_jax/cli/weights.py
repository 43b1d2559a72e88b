"""Verbs that use weights: convert, evaluate, predict, export."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from vit_jax.cli.groups import WeightFields
from vit_jax.cli.loading import (
    Averaging,
    Checkpoint,
    Limits,
    Names,
    Reading,
    read_data,
    require_weights_first,
)
from vit_jax.cli.options import (
    REQUIRED,
    PositiveShare,
    UsageError,
    argument,
    format_command,
    group,
    is_given,
    option,
    switch,
)
from vit_jax.cli.outputs import (
    fail,
    note,
    reject_runs,
    require_creatable,
    resolve_output_file,
    resolve_output_folder,
    show_command,
)
from vit_jax.cli.stop import join_processes
from vit_jax.cli.verbs import verb
from vit_jax.config.data_kinds import find_kind, spell_forms
from vit_jax.config.rules import Count, Number, When
from vit_jax.storage.files import expand_path, write_atomically
from vit_jax.text.printable import printable, printable_lines

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.api.predictions import Record
    from vit_jax.data.records import Source
    from vit_jax.evals.evaluate import EvaluationResult
    from vit_jax.evals.label_map import Labelled
    from vit_jax.weights import Weights

Library = Literal["timm", "huggingface"]
Programs = Literal["npz", "safetensors", "stablehlo", "onnx"]
Output = Literal["probabilities", "logits", "features", "tokens"]
_CHOICE = ("split", "train_split", "classes", "seed", "holdout_fraction")  # evaluated images
_NUM_TOP = 3  # classes that predict prints for each image


# Conversion and export.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Conversion(Names):
    weights: WeightFields = group(WeightFields)
    overwrite: bool = switch("replace existing files")

    def convert(
        self,
        source: str | Sequence[str],
        destination: str,
        to: str | None,
        *,
        without_head: bool = False,
        verbose: bool = False,
    ) -> None:
        """Write weights in another format; print what was converted."""
        require_creatable(expand_path(destination).parent, destination)
        reject_runs(expand_path(destination), destination)
        facts = self.weights.collect_facts()
        class_names = self.read_class_names()
        if class_names is not None:
            facts["class_names"] = class_names

        from vit_jax.checkpoint import SaveError
        from vit_jax.weights.saving import convert

        try:
            report = convert(
                source,
                destination,
                to=to,
                polyak=not self.weights.raw,
                without_head=without_head,
                overwrite=self.overwrite,
                **facts,
            )
        except SaveError as error:
            fail(str(error), 1)
        print(report.text(is_complete=verbose))


@verb(
    "ViT-B_16.npz weights/",
    "runs/mine my-vit/ --to=huggingface --without_head",
)
class Convert(_Conversion):
    """Read weights in any format and write them in any other."""

    source: str = argument(
        "SOURCE",
        "weights in any format: a file, a folder, a workdir, one of its steps (WORKDIR@STEP) or "
        "hf://owner/name",
        reads_bucket=True,
    )
    destination: str = argument(
        "DESTINATION", "a .npz or .safetensors file, or a folder", reads_bucket=True
    )
    to: Literal["released", "bit", "timm", "huggingface", "vit_jax"] | None = option(
        "", "format; a .npz and a folder have defaults"
    )
    average: bool = switch("write the mean of several weights of one network, A,B,…")
    without_head: bool = switch("remove the classifier")
    verbose: bool = switch("list every array with its use")
    push: str | None = option(
        "hf://OWNER/NAME", "upload the folder of --to=timm or huggingface to the Hub"
    )

    def suggest_next(self) -> str:
        """Return an evaluation of the converted weights."""
        return f"{format_command('evaluate', self.destination)} DATA"

    def run(self) -> None:
        self.reject_ineffective(["weights.compute_dtype"], "on convert, which runs no network")
        self._require_hub()
        self.convert(
            self._list_sources(),
            self.destination,
            self.to,
            without_head=self.without_head,
            verbose=self.verbose,
        )
        self._push()

    def _list_sources(self) -> str | list[str]:
        """Return the weights, with --average all of them."""
        if self.average:
            return self.source.split(",")
        is_one = "," not in self.source or expand_path(self.source).exists()
        if is_one:
            return self.source
        raise UsageError(
            f"SOURCE={self.source}: must be one source of weights. Use --average for the mean of "
            "several."
        )

    def _require_hub(self) -> None:
        """Check --push= before anything is converted."""
        if self.push is None:
            return

        from vit_jax.weights import hub
        from vit_jax.weights.saving import LIBRARIES, is_folder_path

        if self.to not in LIBRARIES or not is_folder_path(self.destination):
            raise UsageError(
                f"--push={self.push}: must be of a folder. Use --to=timm or --to=huggingface."
            )
        hub.require_hub(self.push)

    def _push(self) -> None:
        if self.push is None:
            return

        from vit_jax.weights import hub

        print(f"uploaded to {hub.push(expand_path(self.destination), self.push)}")


@verb("runs/mine --to=npz", "runs/mine --to=onnx --output=mine.onnx")
class Export(_Conversion, Reading, Checkpoint):
    """One file for other programs: weights, or the network as a StableHLO or ONNX program."""

    to: Programs = option("", "format: weights, or a program that takes uint8 images", REQUIRED)
    output: str | None = option("PATH", "file or folder to write; default: the name of the weights")
    names: Annotated[Library | None, When("to", "safetensors")] = option(
        "", "names of parameters; default: timm"
    )
    outputs: Annotated[tuple[Output, ...], When("to", "stablehlo", "onnx")] = option(
        "NAME,…",
        "outputs of a program: probabilities, logits, features, tokens; default: probabilities, or "
        "features,tokens without classes",
        (),
    )

    def suggest_next(self) -> str:
        """Return an evaluation of the weights, or a line of Python that runs the program."""
        output = self._choose_output()
        if self.to in ("npz", "safetensors"):
            return f"{format_command('evaluate', output)} DATA"

        from vit_jax.tools.export.programs import format_use

        return format_use(output, self.to)

    def run(self) -> None:
        output = self._choose_output()
        if self.to in ("stablehlo", "onnx"):
            self._export_program(output)
            return
        self.reject_ineffective(
            ["images", "weights.compute_dtype"], "without --to=stablehlo or onnx"
        )
        library = None
        if self.to == "safetensors":
            library = self.names or "timm"
        self.convert(self.checkpoint, output, library)

    def _choose_output(self) -> str:
        """Return the path of --output=, or the name of the weights with the suffix of the form."""
        name = pathlib.Path(os.path.realpath(expand_path(self.checkpoint))).name
        stem = name.removesuffix(".npz").removesuffix(".safetensors")
        output = self.output or f"{stem}.{self.to}"
        if self.to == "npz" and (not output.endswith(".npz") or expand_path(output).is_dir()):
            raise UsageError(
                f"--output={output}: must be a file for --to=npz. Use a name that ends in .npz."
            )
        return output

    def _export_program(self, output: str) -> None:
        from vit_jax.tools.export.programs import export_onnx, export_stablehlo, require_free

        resolve_output_file(output)
        for path in require_free(output, self.to, overwrite=self.overwrite):
            reject_runs(path, f"--output={output}")
        model, weights = self.load(
            self.checkpoint,
            class_names=self.read_class_names(),
            needs_classes=False,
        )
        if model.architecture.num_classes:
            model = _name_classes(model, weights)
        export = export_onnx if self.to == "onnx" else export_stablehlo
        for path in export(model, output, outputs=self.outputs, overwrite=self.overwrite):
            print(printable(str(path)))


def _name_classes(model: "Model", weights: "Weights") -> "Model":
    """Return the model with readable names of its classes.

    A note is printed if the weights do not have them.
    """
    from vit_jax.evals.imagenet_classes import readable_names

    names = readable_names(weights)
    if weights.class_names is None:
        meaning = "ImageNet's 1,000 names are used"
        if names is None:
            meaning = "their numbers are used"
        note(
            f"the weights do not name their classes: {meaning}; "
            "--class_names=FILE gives names, one a line."
        )
    if names is None:
        return model
    return dataclasses.replace(model, class_names=names)


# Evaluation.


@verb(
    "runs/mine my-images --csv=classes.csv",
    "ViT-B_16.npz --data=imagenet --data_dir=DATA --report=reports",
)
class Evaluate(Limits, Averaging, Reading, Names, Checkpoint):
    """Accuracy, loss and calibration of weights on a labelled dataset, with intervals.

    Data that the weights were trained on are split as in training. Other data are evaluated on
    their split "test", or on all images of a folder without split sub-folders (--split=all), unless
    --holdout_fraction= or --seed= selects a hold-out. imagenet stands for all available sets of
    validation, ReaL, V2, -A, -R, Sketch and ObjectNet, in one table; imagenet:NAME,… for some.
    """

    data: Annotated[str, read_data] = option(
        "DATA",
        f"dataset: {spell_forms()}, a folder or file, imagenet",
        REQUIRED,
        reads_bucket=True,
        is_positional=True,
    )

    report: str | None = option(
        "FOLDER", "write tables of classes and images, confusions and figures"
    )
    csv: str | None = option("FILE", "write the table of classes as CSV; - prints only this table")

    json: bool = switch("print all metrics as JSON")
    metrics: tuple[str, ...] | None = option(
        "A,B", "further metrics: f1_macro, or custom ones, package.module:name"
    )
    real: str | None = option("FILE", "file real.json, the labels of ImageNet ReaL")

    split: str | None = option(
        "NAME", "split: train, all, or another one of the data; default: test"
    )
    data_dir: str | None = option(
        "FOLDER", "folder of TFDS datasets or ImageNet variants", reads_bucket=True
    )
    train_split: str | None = option("NAME", "split that defines the classes")
    classes: tuple[str, ...] | None = option("A,B", "keep only images of these classes")
    seed: Number | None = option("N", "random seed of the hold-out of files without splits")
    holdout_fraction: PositiveShare | None = option(
        "X", "held-out fraction of each class of files without splits"
    )

    def complete(self, words: Sequence[str]) -> "Evaluate":
        """Return the options; weights and data must not be exchanged."""
        require_weights_first(type(self).__name__.lower(), self.checkpoint, self.data)
        if not is_given(words, "--data"):
            show_command(format_command("evaluate", self.checkpoint, *self.to_words()))
        return self

    def suggest_next(self) -> str:
        """Return predictions of images."""
        return f"{format_command('predict', self.checkpoint)} IMAGE"

    def run(self) -> None:
        with join_processes():
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate all datasets, then print and write the results in the first process."""
        from vit_jax import hosts
        from vit_jax.evals.evaluate import make_evaluate
        from vit_jax.evals.running_metrics import choose_metrics
        from vit_jax.tools.figures.drawing import require_drawing
        from vit_jax.tools.figures.report_folder import write_report

        folder = None
        table = None
        if hosts.is_first():
            if self.report is not None:
                folder = resolve_output_folder(self.report, "--report=")
            table = _open_table(self.csv)
        if self.report is not None:
            require_drawing()
        chosen = choose_metrics(self.metrics or (), "--metrics")

        model, weights = self.load(
            self.checkpoint,
            data=self.data,
            class_names=self.read_class_names(),
            is_placed=True,
        )
        model = self.average(model)
        opened, missing = self._open(model, weights)
        transform = model.require_transform()
        evaluate = make_evaluate(
            model.averaging_module,
            model.architecture,
            transform,
            source=model.source,
            is_multilabel=model.is_multilabel,
            chosen=chosen,
            **self.limits,
        )

        results = {}
        for name, labelled in opened.items():
            if folder is None:
                results[name] = evaluate(labelled)
            else:
                inside = folder / name if len(opened) > 1 else folder
                results[name] = write_report(inside, labelled, evaluate, transform, model.source)
        if hosts.is_first():
            self._print(results, missing, model.source, table)

    def _open(
        self,
        model: "Model",
        weights: "Weights",
    ) -> "tuple[dict[str, Labelled], dict[str, str]]":
        """Return the images by name, "" for a single dataset; and how missing sets are made."""
        from vit_jax.evals.splits import SplitChoice, open_labelled
        from vit_jax.tools.prepare.imagenet_sets import is_family, open_family

        data = self.data
        if not is_family(data):
            self.reject_ineffective(["real"], f"on {data}, only on imagenet")
            transform = model.require_transform()
            values = self.collect_values("data_dir", *_CHOICE)
            choice = SplitChoice(
                value_range=transform.value_range,
                bands=transform.bands,
                **values,
            )
            return {"": open_labelled(data, weights, choice)}, {}

        self.reject_ineffective(_CHOICE, f"on {data}")
        opened, missing = open_family(data, weights, data_dir=self.data_dir, real=self.real)
        if self.csv is not None and len(opened) > 1:
            raise UsageError(
                f"--csv={self.csv}: must be of one dataset, and {data} are {len(opened)}. "
                "Use --report=FOLDER."
            )
        return opened, missing

    def _print(
        self,
        results: Mapping[str, "EvaluationResult"],
        missing: Mapping[str, str],
        source: str,
        table: pathlib.Path | None,
    ) -> None:
        """Print the metrics of each dataset, and write the table of classes."""
        from vit_jax.evals.evaluate import to_json, to_text, values
        from vit_jax.text.tables import to_csv

        text = to_text(results, source)
        if self.json:
            text = to_json(values(results, missing, source))
        if self.csv != "-":  # it prints the table only
            print(text, flush=True)

        for result in results.values():
            note(*result.labelled.notes)
        for name, reason in missing.items():
            note(f"imagenet:{name} is missing: {reason}")
        if self.csv is not None:
            (result,) = results.values()
            _write_csv(table, to_csv(result.metrics.class_rows()))


def _open_table(csv: str | None) -> pathlib.Path | None:
    """Return the file of --csv=; None without one, and for "-", standard output."""
    from vit_jax.data.kinds.image_files import is_image

    if csv is None or csv == "-":
        return None
    path = resolve_output_file(csv, "--csv=")
    if is_image(path.name):
        raise UsageError(
            f"--csv={csv}: must not be an image, which would be replaced. Use NAME.csv."
        )
    return path


def _write_csv(path: pathlib.Path | None, table: str) -> None:
    """Write a table to a file, names of images as their bytes, or to standard output.

    On a terminal, control characters of names are escaped; a pipe gets the table unchanged.
    """
    encoded = table.encode("utf-8", "surrogateescape")
    if path is not None:
        write_atomically(path, encoded)
        return
    text = encoded.decode(errors="replace")
    if sys.stdout.isatty():
        text = printable_lines(text)
    print(text, end="", flush=True)


# Prediction.


@verb(
    "runs/mine cat.jpg photos/",
    "ViT-B_16.npz 'photos/*.jpg' --top=1 --json --images.resize=direct",
)
class Predict(Averaging, Reading, Names, Checkpoint):
    """Classes of image files, or of a split of data: a table, JSON or CSV.

    Multi-label weights print all classes that are probable enough. Exit code 1 if an image is unreadable; the
    others are classified.
    """

    files: tuple[str, ...] = argument(
        "IMAGE…",
        "images, folders, patterns, or - for names on standard input; or data, KIND:PATH",
        reads_bucket=True,
    )
    split: str | None = option("NAME", "split of data; default: test")

    top: Count | None = option(
        "N", "number of classes to print for each image; default: 3, or all of multi-label weights"
    )
    threshold: PositiveShare | None = option(
        "X", "least probability of a class of multi-label weights; default: 0.5"
    )

    json: bool = switch("print the predictions as JSON")
    csv: str | None = option(
        "FILE", "write the predictions as CSV, a line for each image; - prints only this table"
    )

    def suggest_next(self) -> str:
        """Return an export for another runtime."""
        return format_command("export", self.checkpoint, "--to=onnx")

    def run(self) -> None:
        table = _open_table(self.csv)

        files = self._list_files()

        from vit_jax.api.predictions import predict, to_csv, to_json, to_table
        from vit_jax.data.decoding.depth import survey

        data = self.files[0] if files is None else ""
        class_names = self.read_class_names()
        model, weights = self.load(self.checkpoint, data=data, class_names=class_names)
        model = _name_classes(self.average(model), weights)
        top, threshold = self._choose_limits(model)
        if files is None:
            records = list(predict(model, self._open_split(model), top, threshold))
        else:
            transform = model.require_transform()
            if transform.bands is None:
                note(*survey(files, transform.value_range, "--images.value_range"))
            records = list(predict(model, files, top, threshold))

        if self.csv != "-":
            print(to_json(records) if self.json else to_table(records))
        if self.csv is not None:
            _write_csv(table, to_csv(records))
        _fail_if_unreadable(records)

    def _list_files(self) -> list[str] | None:
        """Return the image files; None if the word names data."""
        (first, *others) = self.files
        if find_kind(first) is not None and not others and not os.path.exists(first):
            return None
        self.reject_ineffective(["split"], "on files")

        from vit_jax.data.kinds.image_files import list_images

        return list_images(self.files)

    def _open_split(self, model: "Model") -> "Source":
        """Return the images of the chosen split, by default those that training held out."""
        from vit_jax.evals.splits import SplitChoice, open_split

        transform = model.require_transform()
        choice = SplitChoice(value_range=transform.value_range, bands=transform.bands)
        return open_split(self.files[0], self.split, choice, model.training)

    def _choose_limits(self, model: "Model") -> tuple[int | None, float]:
        """Return the number of classes to print, None for all, and their least probability."""
        from vit_jax.evals.label_counts import THRESHOLD

        if model.is_multilabel:
            threshold = THRESHOLD if self.threshold is None else self.threshold
            return self.top, threshold
        if self.threshold is not None:
            raise UsageError(
                f"--threshold={self.threshold:g}: has no effect on single-label {model.source}. "
                "Use --top=N."
            )
        return self.top or _NUM_TOP, 0.0


def _fail_if_unreadable(records: "Sequence[Record]") -> None:
    """End with exit code 1 if an image could not be read."""
    from vit_jax.hosts import exits

    failed = [printable(str(record["image"])) for record in records if "error" in record]
    if failed:
        fail(
            f"{len(failed)} of {len(records)} images cannot be read: {', '.join(failed)}",
            exits.FAILED,
        )
