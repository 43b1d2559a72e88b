"""Verbs that use weights: convert, evaluate, predict, export."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vit_jax.cli.verb import verb
from vit_jax.cli.words import Given, UsageError, fail, fraction, whole
from vit_jax.files import printable, write_atomically
from vit_jax.weights import OPTIONS

if TYPE_CHECKING:
    import jax

    from vit_jax.api import Model
    from vit_jax.inference.labelled import Labelled
    from vit_jax.weights import Weights

CHECKPOINT = {"CHECKPOINT": "weights: a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name"}
_NAMES = {"[--class_names=FILE]": "names of the classes, one a line, where the weights do not state them"}
_FACTS = {f"[--{name}={form}]": f"{what}, where the file does not state it" for name, (form, what) in OPTIONS.items()}
_OF_WEIGHTS = {"[--raw]": "use a workdir's parameters, not their Polyak average"} | _FACTS
READING = _OF_WEIGHTS | {
    "[--resize=direct|short_side]": "how images are prepared, where the weights do not state it",
    "[--crop_fraction=X]": "the part of both sides that is kept, after --resize=short_side",
    "[--exif_orientation=applied|ignored]": "turn photographs upright, or not; else as in training, if that is known",
    "[--compute_dtype=float32]": "or bfloat16",
}
NUMBERS = {"global_batch": "128", "max_unreadable": "100"}  # as in training
_CHOOSING = {
    "[--split=NAME]": "test by default; train, all, or another split of the data",
    "[--data_dir=FOLDER]": "of TFDS, or of the ImageNets",
    "[--train_split=NAME]": "the split that decides which classes there are",
    "[--classes=A,B]": "only images of these",
    "[--seed=N]": "of the hold-out of a folder without splits",
    "[--holdout_fraction=X]": "of each class of a folder without splits",
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
    | _OF_WEIGHTS
    | _NAMES,
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
        print(f"uploaded to {hub.push(pathlib.Path(destination).expanduser(), address)}")


def _convert(options: Mapping[str, str], source: str, destination: str, to: str | None) -> None:
    weight_options = _weight_options(options)

    from vit_jax.checkpoint import SaveError
    from vit_jax.weights.saving import convert

    for name in ("without_head", "overwrite"):
        weight_options[name] = name in options
    try:
        report = convert(source, destination, to=to, polyak="raw" not in options, **weight_options)
    except SaveError as error:
        fail(str(error), 1)
    print(report.text(is_complete="verbose" in options))


@verb(
    CHECKPOINT
    | {
        "--data=DATA": "folder:PATH, tfds:NAME, vtab:TASK, digits; imagenet, or imagenet:NAME,… of its test sets",
        "[--report=FOLDER]": "write tables of classes and images, confusions and pictures",
        "[--csv=FILE]": "write the table of classes",
        "[--json]": "print all figures as JSON",
        "[--global_batch=128]": "images at a time on all devices",
        "[--max_unreadable=100]": "more images that cannot be read are an error, as in training",
        "[--real=FILE]": "real.json, the labels of ImageNet ReaL",
    }
    | _CHOOSING
    | READING
    | _NAMES,
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
    numbers = NUMBERS | options
    global_batch, max_unreadable = whole(numbers, "global_batch"), whole(numbers, "max_unreadable")

    from vit_jax import hosts

    with hosts.ends_together():
        hosts.start()
        _evaluate(options, global_batch, max_unreadable)


def _evaluate(options: Mapping[str, str], global_batch: int, max_unreadable: int) -> None:
    from vit_jax import hosts
    from vit_jax.drawing import require_drawing
    from vit_jax.inference import outcome, report
    from vit_jax.inference.evaluate import make_evaluate

    folder = pathlib.Path(options["report"]).expanduser() if "report" in options else None
    if folder is not None:
        require_drawing()
    model, weights = load_placed_model(options)
    opened, absent = _open_evaluated(options, weights)
    evaluate = make_evaluate(model, global_batch=global_batch, max_unreadable=max_unreadable)
    found = {}
    for name, labelled in opened.items():
        if folder is not None and hosts.is_first():
            inside = folder / name if len(opened) > 1 else folder
            found[name] = report.write_report(inside, labelled, model, evaluate)
        else:
            found[name] = evaluate(labelled, None)
    if not hosts.is_first():
        return
    if "json" in options:
        print(outcome.to_json(outcome.values(found, absent, model.source)), flush=True)
    else:
        print(outcome.to_text(found, model.source), flush=True)
    for note in [note for evaluation in found.values() for note in evaluation.labelled.notes]:
        print(f"note: {printable(note)}", file=sys.stderr)
    for name, reason in absent.items():
        print(f"note: imagenet:{name} is not there: {printable(reason)}", file=sys.stderr)
    if "csv" in options:
        (evaluation,) = found.values()
        table = evaluation.to_csv().encode("utf-8", "surrogateescape")
        write_atomically(pathlib.Path(options["csv"]).expanduser(), table)


def _open_evaluated(options: Mapping[str, str], weights: "Weights") -> "tuple[dict[str, Labelled], dict[str, str]]":
    """The images by name, "" of a dataset that stands alone; and how those that are not there are made."""
    from vit_jax.inference.imagenet.sets import is_family, open_family
    from vit_jax.inference.labelled import SplitChoice, open_labelled

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
    )
    return {"": open_labelled(data, weights, choice)}, {}


@verb(
    CHECKPOINT
    | {
        "IMAGE…": "image files, folders with images, or patterns; - for names on standard input, one a line",
        "[--top=3]": "classes to print for each image",
        "[--json]": "print them as JSON",
        "[--csv=FILE]": "write them as a table too, a line for each image",
    }
    | READING
    | _NAMES,
    "runs/mine cat.jpg photos/",
    "ViT-B_16.npz 'photos/*.jpg' --top=1 --json --resize=direct",
)
def predict(given: Given) -> None:
    """Classes of image files: a table, JSON or CSV.

    Ends with exit code 1 if an image cannot be read; the others are classified all the same.
    """
    options, _, paths = given
    top = whole({"top": "3"} | options, "top")
    from vit_jax.data.files import list_images

    images = list_images(paths)

    from vit_jax.hosts import exits
    from vit_jax.inference.predict import predict, to_csv, to_json, to_table

    model = _readable(*open_model(options))
    found = list(predict(model, images, top))
    print(to_json(found) if "json" in options else to_table(found))
    if "csv" in options:
        write_atomically(pathlib.Path(options["csv"]).expanduser(), to_csv(found).encode("utf-8", "surrogateescape"))
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
    | _NAMES,
    "runs/mine --to=npz",
    "runs/mine --to=onnx --output=mine.onnx",
)
def export(given: Given) -> None:
    """One file for other programs: weights, or a program, StableHLO for CPU, CUDA and TPU or ONNX for its runtimes."""
    options = given.options
    kind = options["to"]
    name = pathlib.Path(options["CHECKPOINT"]).expanduser().resolve().name
    output = options.get("output", f"{name.removesuffix('.npz').removesuffix('.safetensors')}.{kind}")
    _require_sense(options, kind, output)
    if kind not in ("stablehlo", "onnx"):
        names = options.get("names", "timm") if kind == "safetensors" else None
        _convert(options, options["CHECKPOINT"], output, names)
        return

    from vit_jax.inference.export import export_onnx, export_stablehlo, require_free

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
    of_programs = ("resize", "crop_fraction", "exif_orientation", "compute_dtype")
    idle = [f"--{name}" for name in of_programs if name in options]
    if idle and kind not in ("stablehlo", "onnx"):
        raise UsageError(f"{', '.join(idle)}: without effect on weights alone; it belongs to --to=stablehlo or onnx.")
    if kind == "npz" and (not output.endswith(".npz") or pathlib.Path(output).expanduser().is_dir()):
        raise UsageError(f"--output={output}: --to=npz writes a file; give one that ends in .npz.")


def load_placed_model(
    options: Mapping[str, str], *, needs_classes: bool = True, needs_transform: bool = True
) -> "tuple[Model, Weights]":
    """The model of the options, complete on every device of all processes."""
    import jax

    from vit_jax.sharding import build_mesh, replicated

    sharding = replicated(build_mesh(jax.devices()))
    return open_model(options, sharding, needs_classes=needs_classes, needs_transform=needs_transform)


def open_model(
    options: Mapping[str, str],
    sharding: "jax.sharding.Sharding | None" = None,
    *,
    needs_classes: bool = True,
    needs_transform: bool = True,
) -> "tuple[Model, Weights]":
    """The model of the options, on one device unless a sharding is given; notes about its weights are printed."""
    from vit_jax import hosts
    from vit_jax.api import from_weights
    from vit_jax.weights import load_weights

    weights = load_weights(options["CHECKPOINT"], polyak="raw" not in options, **_weight_options(options))
    for note in [*weights.notes, *weights.warnings()] if hosts.is_first() else ():
        print(f"note: {printable(note)}", file=sys.stderr)
    model = from_weights(
        weights,
        compute_dtype=options.get("compute_dtype", "float32"),
        resize=options.get("resize"),
        crop_fraction=fraction(options, "crop_fraction") if "crop_fraction" in options else None,
        exif_orientation=options["exif_orientation"] == "applied" if "exif_orientation" in options else None,
        sharding=sharding,
    )
    if needs_classes:
        model.require_classes()
    if needs_transform:
        model.require_transform()
    return model, weights


def _readable(model: "Model", weights: "Weights") -> "Model":
    """The model with names of its classes that people can read; a note where they are not the weights' own."""
    from vit_jax.inference.imagenet.classes import readable_names

    names = readable_names(weights)
    if weights.class_names is None:
        meaning = "their numbers stand for them" if names is None else "they are taken to be ImageNet's 1,000"
        words = f"{meaning}; --class_names=FILE gives names, one a line"
        print(f"note: the weights do not name their classes: {words}.", file=sys.stderr)
    return model if names is None else dataclasses.replace(model, class_names=names)


def _weight_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Options about weights whose file does not state everything, in the types that `load_weights` takes."""
    given: dict[str, Any] = {name: options[name] for name in OPTIONS if name in options}
    kinds = {"num_heads": int} | {name: float for name in OPTIONS if name.endswith("epsilon")}
    try:
        given |= {name: kind(given[name]) for name, kind in kinds.items() if name in given}
        if "image_size" in given:
            parts = [int(part) for part in given["image_size"].split(",")]
            given["image_size"] = tuple(parts * 2 if len(parts) == 1 else parts)
    except ValueError as error:
        raise UsageError(f"An option is not a number: {error}. image_size is SIDE or HEIGHT,WIDTH.") from None
    if "class_names" in options:
        from vit_jax.weights.load import read_class_names

        path = pathlib.Path(options["class_names"]).expanduser()
        if not path.exists():
            raise UsageError(f"--class_names={options['class_names']}: there is no such file; one name a line.")
        try:
            given["class_names"] = read_class_names(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--class_names={options['class_names']} is not readable UTF-8 text: {error}.") from None
    return given
