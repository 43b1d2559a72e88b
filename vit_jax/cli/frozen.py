"""Verbs on frozen features: fewshot, probe, knn, features, duplicates."""

import contextlib
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.cli.loading import CHECKPOINT, OF_LIMITS, READING, limits, load_placed_model
from vit_jax.cli.outputs import output_file, output_folder
from vit_jax.cli.stop import joined
from vit_jax.cli.verb import verb
from vit_jax.cli.words import LISTED, Given, UsageError, fraction, positive, value_range, whole, wholes
from vit_jax.files import cache_folder, expanded, printable

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.data.transforms import EvaluationTransform
    from vit_jax.evals.feature_cache import Cache
    from vit_jax.evals.features import Extractor, Features
    from vit_jax.evals.splits import Pair, SplitChoice
    from vit_jax.weights import Weights

_OF_IMAGES = ("resize", "crop_fraction", "interpolation", "exif_orientation")  # of the weights' own preparation
_CLASSIFIED = ("pre_logits", "pooled", "token", "mean", "token_mean")  # layers that a network can end in
_OF_DATA = {"[--classes=A,B]": "only images of these", "[--data_dir=FOLDER]": "of TFDS"}
_OF_FEATURES = {
    "[--layer=LAYER]": "pre_logits (default), pooled, token, mean, token_mean, block:N or stage:N",
    "[--preprocessing=fewshot|own]": "the released protocol's, or as the weights were trained",
    "[--cache=FOLDER]": "where features are kept, or none",
    "[--json]": "print all figures as JSON",
    **OF_LIMITS,
    **READING,
}
_ON_PAIRS = (
    {
        "[--train_split=NAME]": "to fit on",
        "[--test_split=NAME]": "to test on",
    }
    | _OF_DATA
    | _OF_FEATURES
)
_DATA = CHECKPOINT | {
    "--data=DATA,…": "as in a recipe; caltech101, cars196, cifar100, dtd, pets, uc_merced, imagenet; or all: released"
}


@verb(
    _DATA
    | {
        "[--shots=1,5,10,25]": "training images of each class",
        "[--seeds=0,1,2]": "random seeds of the choice of images; results are averaged over them",
        "[--l2=1024]": "penalties",
        "[--penalty_choice=mean_accuracy|mean_rank]": "rule that selects one of several penalties: ours, or scenic's",
        "[--sampling=random|first]": "which images of a class to use",
    }
    | _ON_PAIRS,
    "ViT-B_16.npz --data=released",
    "runs/mine --data=folder:my-images --shots=10 --l2=1",
)
def fewshot(given: Given) -> None:
    """Accuracy of a linear classifier in closed form on the frozen features of a few images of each class."""
    options = given.options
    chosen: dict[str, Any] = {"sampling": options.get("sampling", "random")}
    if chosen["sampling"] == "first":
        if "seeds" in options:
            raise UsageError(f"--seeds={options['seeds']}: without effect with --sampling=first; leave it out.")
        chosen["seeds"] = (0,)
    for name, lowest in (("shots", 1), ("seeds", 0)):
        chosen |= {name: wholes(options, name, lowest)} if name in options else {}
    if "l2" in options:
        chosen["l2"] = tuple(positive(options, "l2", text) for text in options["l2"].split(","))
    if "penalty_choice" in options:
        chosen["penalty_choice"] = options["penalty_choice"]

    from vit_jax.evals.fewshot import FewShot

    protocol = FewShot(**chosen)

    with _on_pairs(options, "fewshot") as (pairs, extractor, weights):
        from vit_jax.evals.probes import run_few_shot

        table = run_few_shot(pairs, extractor, protocol)
        _print(options, extractor, weights, table.to_dict(), table.to_text(), table.notes)


@verb(
    _DATA
    | {
        "[--method=logistic|least_squares]": "logistic regression (default), or closed form",
        "[--penalty=X]": "searched on a held-out part by default",
        "[--folds=K]": "also cross-validate on K parts of the training images: mean and standard deviation",
        "[--output=FOLDER]": "write the network with the classifier as its last layer; verbs that take weights take it",
        "[--overwrite]": "replace existing files of --output=",
    }
    | _ON_PAIRS,
    "ViT-B_16.npz --data=cifar100",
    "ViT-B_16.npz --data=folder:my-images --folds=5 --output=runs/probe",
)
def probe(given: Given) -> None:
    """Accuracy of a linear classifier on the frozen features of all training images."""
    options = given.options
    chosen: dict[str, Any] = {"method": options.get("method", "logistic")}
    if "penalty" in options:
        chosen["penalty"] = positive(options, "penalty")
    if "folds" in options:
        chosen["folds"] = whole(options, "folds")
    output = options.get("output")
    if output is None and "overwrite" in options:
        raise UsageError("--overwrite has no effect without --output=. Leave it out.")
    if output is not None:
        _require_classifier(options)

        (output_file if pathlib.Path(output).suffix else output_folder)(output)

        from vit_jax.weights.saving import require_destination

        require_destination(output, None, overwrite="overwrite" in options)

    with _on_pairs(options, "own") as (pairs, extractor, weights):
        from vit_jax import hosts
        from vit_jax.api.build import with_probe
        from vit_jax.evals.probes import probe, run_on_pairs, to_text
        from vit_jax.weights.saving import save

        def measure(pair: "Pair", train: "Features", test: "Features") -> tuple[dict[str, Any], list[str]]:
            classifier, result = probe(train, test, pair.train.num_classes, **chosen)
            if output is None or not hosts.is_first():
                return result, []
            layer = options.get("layer", _CLASSIFIED[0])
            fitted = with_probe(weights, extractor.transform, layer, classifier, pair.train.class_names, pair.training)
            written = save(fitted, output, overwrite="overwrite" in options).destination
            return result, [f"{written} has the classifier: vit-jax predict {output} IMAGE"]

        results, notes = run_on_pairs(pairs, extractor, measure)
        _print(options, extractor, weights, {"datasets": results}, to_text(results), notes)


def _require_classifier(options: Mapping[str, str]) -> None:
    """Check options that a saved classifier excludes, before anything is computed."""
    if pathlib.Path(options["output"]).suffix not in ("", ".npz"):
        raise UsageError(f"--output={options['output']}: must be a folder or a file that ends in .npz.")
    if "," in options["data"] or options["data"] in ("released", "all"):
        raise UsageError(f"--data={options['data']}: --output= saves the classifier of one dataset. Give one.")
    if (layer := options.get("layer", _CLASSIFIED[0])) not in _CLASSIFIED:
        raise UsageError(
            f"--layer={layer}: --output= saves a classifier of {', '.join(_CLASSIFIED)}. Use one of these."
        )
    if options.get("preprocessing", "own") != "own":
        raise UsageError("--preprocessing=fewshot: --output= needs own. Leave --preprocessing out.")


@verb(
    _DATA
    | {
        "[--neighbours=10,20,100]": "numbers of neighbours that vote",
        "[--temperature=0.07]": "of the weights of their votes",
    }
    | _ON_PAIRS,
    "ViT-B_16.npz --data=pets,dtd",
    "runs/mine --data=folder:my-images --neighbours=10",
)
def knn(given: Given) -> None:
    """Accuracy of the nearest neighbours among the training images, by the cosine similarity of features."""
    options = given.options
    chosen: dict[str, Any] = {"neighbours": wholes(options, "neighbours")} if "neighbours" in options else {}
    chosen |= {"temperature": positive(options, "temperature")} if "temperature" in options else {}

    with _on_pairs(options, "own") as (pairs, extractor, weights):
        from vit_jax.evals.probes import measure_neighbours, run_on_pairs, to_text

        results, notes = run_on_pairs(pairs, extractor, functools.partial(measure_neighbours, **chosen))
        _print(options, extractor, weights, {"datasets": results}, to_text(results), notes)


@verb(
    CHECKPOINT
    | {
        "--data=DATA": "as in a recipe, or one of the datasets of fewshot",
        "--output=FILE": "of .npz: features, labels and names",
        "[--split=NAME]": "test by default",
    }
    | _OF_DATA
    | _OF_FEATURES,
    "ViT-B_16.npz --data=pets --output=pets.npz",
    "runs/mine --data=folder:my-images --split=train --layer=block:3 --output=features.npz",
)
def features(given: Given) -> None:
    """Write frozen features, labels and names to a file."""
    options = given.options
    output = output_file(options["output"])
    if output.suffix != ".npz":
        raise UsageError(f"--output={options['output']}: must be a file that ends in .npz.")
    with _extracting(options, "own") as (extractor, choice, weights):
        from vit_jax.evals.features import write_features
        from vit_jax.evals.splits import open_split
        from vit_jax.tables import columns

        source = open_split(options["data"], options.get("split"), choice, weights.training)
        written = write_features(output, extractor.extract(source), source)
        _print(options, extractor, weights, written, columns(written.items(), "<<", gap=" ", least=(12,)), [])


_READING = [form.strip("[]-").partition("=")[0] for form in READING]


@verb(
    {
        "DATA": "as in a recipe: images to search for duplicates of --against=",
        "--against=DATA,…": "test sets",
        "[--split=train]": "of DATA; all where there are no splits",
        "[--against_split=test]": "of all test sets; all where there are no splits",
        "[--distance=6]": "pairs whose perceptual hashes differ in at most this number of 64 bits are duplicates",
        "[--weights=CHECKPOINT]": "any weights, whose features confirm further pairs",
        "[--candidates=16]": "further pairs: those that differ in at most this number of bits, or all",
        "[--cosine=0.95]": "least cosine of the features of further pairs",
        "[--output=FILE]": "the pairs as CSV",
        "[--write=FILE]": "ids of the images of DATA, which --config.input.exclude=FILE keeps out of training",
        "[--data_dir=FOLDER]": "of TFDS",
    }
    | {form: meaning for form, meaning in _OF_FEATURES.items() if "preprocessing" not in form},
    "folder:my-images --against=folder:my-test-images --output=pairs.csv",
    "wds:i21k --against=tfds:imagenet2012 --against_split=validation --weights=ViT-B_16.npz --write=duplicates.json",
)
def duplicates(given: Given) -> None:
    """Find training images that are near-duplicates of test images: resized, recoloured or mirrored.

    --weights= also finds cropped copies. With --distance=0 features decide on all pairs but those of equal hashes.
    """
    options = given.options
    of_weights = () if "weights" in options else ("candidates", "cosine", "layer", "cache", "global_batch", *_READING)
    excluded = ["data_dir"] * _are_listed(f"{options['DATA']},{options['against']}")
    if idle := [name for name in (*of_weights, *excluded) if name in options]:
        fix = "Leave it out" if idle[0] in excluded else "Give --weights=CHECKPOINT"
        raise UsageError(f"--{idle[0]}= has no effect here. {fix}.")
    options = {"distance": "6", "candidates": "16", "cosine": "0.95"} | options
    by_features = options["candidates"] == "all"
    distance = whole(options, "distance")
    candidates = distance if by_features or "weights" not in options else max(distance, whole(options, "candidates"))
    cosine = fraction(options, "cosine")
    written: list[str] = [name for name in ("output", "write") if name in options]
    files = {name: output_file(options[name], f"--{name}=") for name in written}

    with _perhaps_extracting(options) as (extractor, choice):
        from vit_jax import hosts
        from vit_jax.evals.duplicates import confirm, find_by_features, find_by_hashes, merged, report
        from vit_jax.evals.splits import open_split, split_to_search

        data, against = options["DATA"], options["against"].split(",")
        split = options.get("split") or split_to_search(data, "train", choice, against)
        source = open_split(data, split, choice)
        of_tests = options.get("against_split")
        test_splits = [of_tests or split_to_search(name, "test", choice, [data]) for name in against]
        tests = [open_split(name, part, choice) for name, part in zip(against, test_splits, strict=True)]
        found = find_by_hashes(source, tests, candidates, limits(options)["max_unreadable"])
        if extractor:
            found = confirm(found, source, tests, extractor, distance, cosine)
        if extractor and by_features:
            found = merged([*found, *find_by_features(source, tests, extractor, cosine)])
        if hosts.is_first():
            print(report(found, source, dict(zip(against, tests, strict=True)), split, files, "json" in options))


@contextlib.contextmanager
def _perhaps_extracting(options: Mapping[str, str]) -> "Iterator[tuple[Extractor | None, SplitChoice]]":
    """Join the other processes; load the model of --weights=, if there is one."""
    of_data = {"data": f"{options['DATA']},{options['against']}", "preprocessing": "own"}
    if "weights" in options:
        with _extracting({**options, **of_data, "CHECKPOINT": options["weights"]}, "own") as (extractor, choice, _):
            yield extractor, choice
        return
    with joined():
        from vit_jax.evals.splits import SplitChoice

        yield None, SplitChoice(data_dir=options.get("data_dir"))


@contextlib.contextmanager
def _on_pairs(options: Mapping[str, str], preprocessing: str) -> "Iterator[tuple[list[Pair], Extractor, Weights]]":
    """Open the datasets of --data=; yield them with the extractor of their features and its weights."""
    with _extracting(options, preprocessing) as (extractor, choice, weights):
        from vit_jax.evals.splits import RELEASED, open_pair

        names = list(RELEASED) if options["data"] == "released" else list(filter(None, options["data"].split(",")))
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"--data={options['data']}: names {repeated[0]} twice.")
        yield [open_pair(name, choice, weights.training) for name in names], extractor, weights


@contextlib.contextmanager
def _extracting(options: Mapping[str, str], preprocessing: str) -> "Iterator[tuple[Extractor, SplitChoice, Weights]]":
    """Join the other processes and load the model; yield the extractor, the choice of data, and the weights."""
    numbers = limits(options)
    preprocessing = options.get("preprocessing", preprocessing)
    idle = [f"--{name}" for name in _OF_IMAGES if name in options and preprocessing == "fewshot"]
    if "data_dir" in options and _are_listed(options["data"]):
        idle.append("--data_dir")
    if idle:
        raise UsageError(f"{', '.join(idle)}: without effect here; leave it out (--preprocessing={preprocessing}).")

    with joined():
        from vit_jax.evals.features import Extractor
        from vit_jax.evals.splits import SplitChoice

        is_own = preprocessing == "own"
        # the released protocol takes the range of values, even if the weights do not describe a preparation
        of_model = options if is_own else {name: value for name, value in options.items() if name != "value_range"}
        model, weights = load_placed_model(of_model, needs_classes=False, needs_transform=is_own, uses_head=False)
        transform = model.require_transform() if is_own else _fewshot_transform(model, value_range(options))
        extractor = Extractor(
            module=model.module,
            architecture=model.architecture,
            transform=transform,
            layer=options.get("layer", _CLASSIFIED[0]),
            cache=_cache(options),
            **numbers,
        )
        choice = SplitChoice(
            train_split=options.get("train_split"),
            test_split=options.get("test_split"),
            data_dir=options.get("data_dir"),
            classes=tuple(filter(None, options.get("classes", "").split(","))),
            value_range=transform.value_range,
        )
        yield extractor, choice, weights


def _are_listed(data: str) -> bool:
    """Return whether all these data are files that they name, which need no --data_dir=."""
    return all(name.partition(":")[0] in LISTED for name in data.split(","))


def _cache(options: Mapping[str, str]) -> "Cache | None":
    """Return the cache of features, the same in all processes; None without one, or if the default is not writable."""
    from vit_jax.evals.feature_cache import Cache
    from vit_jax.train.lifecycle.lock import WorkdirLock, is_abandoned

    folder = _cache_folder(options)
    return None if folder is None else Cache(folder, WorkdirLock, is_abandoned)


def _cache_folder(options: Mapping[str, str]) -> pathlib.Path | None:
    from vit_jax import hosts

    if "cache" in options:
        return None if options["cache"] == "none" else expanded(options["cache"])
    folder = cache_folder("features")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if "no" not in hosts.gather("yes" if is_writable else "no"):
        return folder
    if hosts.is_first():
        print(f"note: {printable(str(folder))} is not writable: features are not kept; see --cache=.", file=sys.stderr)
    return None


def _fewshot_transform(model: "Model", values: tuple[float, float] | None) -> "EvaluationTransform":
    """Build the released protocol's, with the orientation and the range of values of training, or of the option."""
    from vit_jax.data.transforms import build_fewshot_transform

    own = model.transform
    return build_fewshot_transform(
        model.architecture.image_size,
        exif_orientation=own is not None and own.exif_orientation,
        value_range=own.value_range if values is None and own is not None else values,
    )


def _print(
    options: Mapping[str, str],
    extractor: "Extractor",
    weights: "Weights",
    result: Mapping[str, Any],
    text: str,
    notes: Sequence[str],
) -> None:
    """Print results in the first process: as text, or as JSON with weights, layer, preparation and notes."""
    import dataclasses

    from vit_jax import hosts

    if not hosts.is_first():
        return
    about = {
        "weights": weights.source,
        "layer": options.get("layer", _CLASSIFIED[0]),
        "preparation": dataclasses.asdict(extractor.transform),
        "notes": notes,
    }
    print(json.dumps(about | dict(result), indent=2) if "json" in options else text, flush=True)
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
