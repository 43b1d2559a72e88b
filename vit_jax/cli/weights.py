"""Verbs that use weights: convert, evaluate, predict, export."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vit_jax.cli.loading import (
    CHECKPOINT,
    NAMES,
    OF_LIMITS,
    OF_WEIGHTS,
    READING,
    limits,
    load_placed_model,
    open_model,
    weight_options,
)
from vit_jax.cli.outputs import output_file, output_folder, require_creatable
from vit_jax.cli.stop import joined
from vit_jax.cli.verb import verb
from vit_jax.cli.words import Given, UsageError, fail, fraction, whole
from vit_jax.files import expanded, printable, printable_lines, write_atomically

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.evals.label_map import Labelled
    from vit_jax.weights import Weights

_CHOOSING = {
    "[--split=NAME]": "test by default; train, all, or another split of the data",
    "[--data_dir=FOLDER]": "of TFDS, or of the ImageNets",
    "[--train_split=NAME]": "the split that decides which classes there are",
    "[--classes=A,B]": "only images of these",
    "[--seed=N]": "of the hold-out of files without splits",
    "[--holdout_fraction=X]": "of each class of files without splits",
}


@verb(
    {
        "SOURCE": "weights in any format: a file, a folder, a workdir or hf://owner/name",
        "DESTINATION": "a .npz or .safetensors file, or a folder",
        "[--to=released|bit|timm|huggingface|vit_jax]": "the format; a .npz and a folder have defaults",
        "[--without_head]": "leave the classifier out",
        "[--verbose]": "list every array and how it is used",
        "[--overwrite]": "replace what is there",
        "[--push=hf://OWNER/NAME]": "upload the folder, in the form of timm or huggingface, to the Hugging Face Hub",
    }
    | OF_WEIGHTS
    | NAMES,
    "ViT-B_16.npz weights/",
    "runs/mine my-vit/ --to=huggingface --without_head",
)
def convert(given: Given) -> None:
    """Read weights in any format and write them in any other."""
    from vit_jax.weights import hub
    from vit_jax.weights.saving import LIBRARIES, names_folder

    options = given.options
    destination, address = options["DESTINATION"], options.get("push")
    if address is not None:
        if options.get("to") not in LIBRARIES or not names_folder(destination):
            raise UsageError(f"--push={address}: the Hub takes a folder that is --to=timm or --to=huggingface.")
        hub.require_hub(address)
    _convert(options, options["SOURCE"], destination, options.get("to"))
    if address is not None:
        print(f"uploaded to {hub.push(expanded(destination), address)}")


def _convert(options: Mapping[str, str], source: str, destination: str, to: str | None) -> None:
    require_creatable(expanded(destination).parent, destination)
    facts = weight_options(options)

    from vit_jax.checkpoint import SaveError
    from vit_jax.weights.saving import convert

    for name in ("without_head", "overwrite"):
        facts[name] = name in options
    try:
        report = convert(source, destination, to=to, polyak="raw" not in options, **facts)
    except SaveError as error:
        fail(str(error), 1)
    print(report.text(is_complete="verbose" in options))


@verb(
    CHECKPOINT
    | {
        "--data=DATA": "folder:PATH, csv:FILE, wds:PATH, parquet:PATH, tfds:NAME, vtab:TASK, digits; imagenet, or "
        "imagenet:NAME,… of its sets",
        "[--report=FOLDER]": "write tables of classes and images, confusions and pictures",
        "[--csv=FILE]": "write the table of classes; - shows it, and nothing else",
        "[--json]": "print all figures as JSON",
        "[--real=FILE]": "real.json, the labels of ImageNet ReaL",
    }
    | OF_LIMITS
    | _CHOOSING
    | READING
    | NAMES,
    "runs/mine --data=folder:my-images --csv=classes.csv",
    "ViT-B_16.npz --data=imagenet --data_dir=DATA --report=reports",
)
def evaluate(given: Given) -> None:
    """Accuracy, loss and calibration of weights on a labelled dataset, with intervals.

    Data that the weights were trained on are split as in training. Of other data the split "test" is evaluated, or all
    of a folder without split sub-folders (--split=all), unless --holdout_fraction= or --seed= selects a hold-out. Of
    imagenet those of validation, ReaL, V2, -A, -R, Sketch and ObjectNet that are there, in one table.
    """
    options = given.options
    numbers = limits(options)

    with joined():
        _evaluate(options, numbers)


def _evaluate(options: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    from vit_jax import hosts
    from vit_jax.drawing import require_drawing
    from vit_jax.evals.evaluate import make_evaluate, to_json, to_text, values
    from vit_jax.evals.report_folder import write_report

    folder, table = None, None
    if hosts.is_first():
        folder = output_folder(options["report"], "--report=") if "report" in options else None
        table = _csv_file(options)
    if "report" in options:
        require_drawing()
    model, weights = load_placed_model(options)
    opened, absent = _open_evaluated(options, model, weights)
    transform = model.require_transform()
    evaluate = make_evaluate(
        model.module,
        model.architecture,
        transform,
        source=model.source,
        is_multilabel=model.is_multilabel,
        **numbers,
    )
    evaluations = {}
    for name, labelled in opened.items():
        if folder is not None:
            inside = folder / name if len(opened) > 1 else folder
            evaluations[name] = write_report(inside, labelled, evaluate, transform, model.source)
        else:
            evaluations[name] = evaluate(labelled, None)
    if not hosts.is_first():
        return
    if options.get("csv") != "-":
        as_json = "json" in options
        print(
            to_json(values(evaluations, absent, model.source)) if as_json else to_text(evaluations, model.source),
            flush=True,
        )
    for note in [note for evaluation in evaluations.values() for note in evaluation.labelled.notes]:
        print(f"note: {printable(note)}", file=sys.stderr)
    for name, reason in absent.items():
        print(f"note: imagenet:{name} is not there: {printable(reason)}", file=sys.stderr)
    if "csv" in options:
        (evaluation,) = evaluations.values()
        _write_csv(table, evaluation.to_csv())


def _open_evaluated(
    options: Mapping[str, str], model: "Model", weights: "Weights"
) -> "tuple[dict[str, Labelled], dict[str, str]]":
    """Return the images by name, "" for a single dataset; and how to prepare those that are absent."""
    from vit_jax.evals.imagenet_sets import is_family, open_family
    from vit_jax.evals.splits import SplitChoice, open_labelled

    data, data_dir = options["data"], options.get("data_dir")
    if is_family(data):
        choosing = ("split", "train_split", "classes", "seed", "holdout_fraction")
        if idle := [f"--{name}" for name in choosing if name in options]:
            raise UsageError(f"{', '.join(idle)}: without effect on {data}; leave it out.")
        opened, absent = open_family(data, weights, data_dir=data_dir, real=options.get("real"))
        if "csv" in options and len(opened) > 1:
            raise UsageError(f"--csv= is the table of one dataset, and {data} are {len(opened)}: use --report=FOLDER.")
        return opened, absent
    if "real" in options:
        raise UsageError(f"--real={options['real']}: without effect on {data}, only on imagenet; leave it out.")
    choice = SplitChoice(
        split=options.get("split"),
        train_split=options.get("train_split"),
        classes=tuple(filter(None, options["classes"].split(","))) if "classes" in options else None,
        seed=whole(options, "seed") if "seed" in options else None,
        holdout_fraction=fraction(options, "holdout_fraction") if "holdout_fraction" in options else None,
        data_dir=data_dir,
        value_range=model.require_transform().value_range,
    )
    return {"": open_labelled(data, weights, choice)}, {}


def _csv_file(options: Mapping[str, str]) -> pathlib.Path | None:
    """Return the file of --csv=; None without one, and for "-", standard output."""
    from vit_jax.data.files import is_image

    if options.get("csv", "-") == "-":
        return None
    path = output_file(options["csv"], "--csv=")
    if is_image(path.name):
        raise UsageError(f"--csv={options['csv']}: is the name of an image, which would be replaced. Write NAME.csv.")
    return path


def _write_csv(path: pathlib.Path | None, table: str) -> None:
    """Write a table to a file, with names of images as the bytes that they are, or to standard output.

    On a terminal control characters of names are escaped; a pipe gets the table as it is.
    """
    encoded = table.encode("utf-8", "surrogateescape")
    if path is None:
        text = encoded.decode(errors="replace")
        print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)
    else:
        write_atomically(path, encoded)


@verb(
    CHECKPOINT
    | {
        "IMAGE…": "image files, folders with images, or patterns; - for names on standard input, one a line",
        "[--top=3]": "classes to print for each image; all where it may have several",
        "[--threshold=0.5]": "the least probability of a class that is printed, where an image may have several",
        "[--json]": "print them as JSON",
        "[--csv=FILE]": "write them as a table too, a line for each image; - shows it, and nothing else",
    }
    | READING
    | NAMES,
    "runs/mine cat.jpg photos/",
    "ViT-B_16.npz 'photos/*.jpg' --top=1 --json --resize=direct",
)
def predict(given: Given) -> None:
    """Classes of image files: a table, JSON or CSV.

    Of weights for several labels all that are probable enough. Ends with exit code 1 if an image cannot be read; the
    others are classified all the same.
    """
    options, _, paths = given
    top = whole(options, "top") if "top" in options else None
    threshold = fraction(options, "threshold") if "threshold" in options else None
    table = _csv_file(options)
    from vit_jax.data.files import list_images

    images = list_images(paths)

    from vit_jax.api.predictions import predict, to_csv, to_json, to_table
    from vit_jax.data.depth import survey
    from vit_jax.evals.multilabel import THRESHOLD
    from vit_jax.hosts import exits

    model = _readable(*open_model(options))
    for line in survey(images, model.require_transform().value_range, "--value_range"):
        print(f"note: {line}", file=sys.stderr)
    if threshold is not None and not model.is_multilabel:
        raise UsageError(f"--threshold={threshold:g}: an image has one class of {model.source}; use --top=N.")
    usual_top, usual_threshold = (None, THRESHOLD) if model.is_multilabel else (3, 0.0)
    found = list(predict(model, images, top or usual_top, usual_threshold if threshold is None else threshold))
    if options.get("csv") != "-":
        print(to_json(found) if "json" in options else to_table(found))
    if "csv" in options:
        _write_csv(table, to_csv(found))
    failed = [record["image"] for record in found if "error" in record]
    if failed:
        names = ", ".join(map(printable, failed))
        print(f"vit-jax: {len(failed)} of {len(found)} images cannot be read: {names}", file=sys.stderr)
        sys.exit(exits.FAILED)


@verb(
    CHECKPOINT
    | {
        "--to=npz|safetensors|stablehlo|onnx": "weights, or a program that takes uint8 images",
        "[--output=PATH]": "the name of the weights by default",
        "[--names=timm|huggingface]": "whose names a .safetensors file has",
        "[--overwrite]": "replace what is there",
    }
    | READING
    | NAMES,
    "runs/mine --to=npz",
    "runs/mine --to=onnx --output=mine.onnx",
)
def export(given: Given) -> None:
    """One file for other programs: weights, or the network as a StableHLO or ONNX program."""
    options = given.options
    kind = options["to"]
    name = pathlib.Path(os.path.realpath(expanded(options["CHECKPOINT"]))).name
    output = options.get("output", f"{name.removesuffix('.npz').removesuffix('.safetensors')}.{kind}")
    _require_sense(options, kind, output)
    if kind not in ("stablehlo", "onnx"):
        names = options.get("names", "timm") if kind == "safetensors" else None
        _convert(options, options["CHECKPOINT"], output, names)
        return

    from vit_jax.api.export import export_onnx, export_stablehlo, require_free

    output_file(output)
    require_free(output, kind, overwrite="overwrite" in options)
    model = _readable(*open_model(options))
    write = export_onnx if kind == "onnx" else export_stablehlo
    for path in write(model, output, overwrite="overwrite" in options):
        print(printable(str(path)))


def _require_sense(options: Mapping[str, str], kind: str, output: str) -> None:
    """Every option has an effect on this kind of file, and the output is one."""
    names = options.get("names")
    if names is not None and kind != "safetensors":
        raise UsageError(f"--names={names}: only a .safetensors file has a choice of names.")
    of_programs = ("resize", "crop_fraction", "interpolation", "exif_orientation", "value_range", "compute_dtype")
    idle = [f"--{name}" for name in of_programs if name in options]
    if idle and kind not in ("stablehlo", "onnx"):
        raise UsageError(f"{', '.join(idle)}: without effect on weights alone; it belongs to --to=stablehlo or onnx.")
    if kind == "npz" and (not output.endswith(".npz") or expanded(output).is_dir()):
        raise UsageError(f"--output={output}: --to=npz writes a file; give one that ends in .npz.")


def _readable(model: "Model", weights: "Weights") -> "Model":
    """The model with names of its classes that people can read; a note where they are not the weights' own."""
    from vit_jax.evals.imagenet_classes import readable_names

    names = readable_names(weights)
    if weights.class_names is None:
        meaning = "their numbers stand for them" if names is None else "they are taken to be ImageNet's 1,000"
        words = f"{meaning}; --class_names=FILE gives names, one a line"
        print(f"note: the weights do not name their classes: {words}.", file=sys.stderr)
    return model if names is None else dataclasses.replace(model, class_names=names)
