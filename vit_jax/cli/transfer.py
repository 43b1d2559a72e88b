"""Verbs on frozen features: fewshot, probe, knn, features."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.cli.weights import load_placed_model, split_weights
from vit_jax.cli.words import UsageError, positive, whole, wholes
from vit_jax.files import printable

if TYPE_CHECKING:
    from vit_jax.transfer.datasets import Choice, Pair
    from vit_jax.transfer.features import Extractor
    from vit_jax.weights import Weights

_SIDES = ("train_split", "test_split", "classes", "data_dir")
_OF_IMAGES = ("resize", "crop_fraction")  # for weights that do not state their own preparation
_EXTRACTING = ("layer", "preprocessing", "global_batch", "max_unreadable", "cache", "compute_dtype", *_OF_IMAGES)
_NUMBERS = {"global_batch": "128", "max_unreadable": "0"}


def fewshot(words: Sequence[str]) -> None:
    """Few-shot accuracy in closed form."""
    options = _options(words, "shots", "seeds", "l2", "sampling")
    given: dict[str, Any] = {"sampling": options.get("sampling", "random")}
    if given["sampling"] == "first":
        if "seeds" in options:
            raise UsageError(f"--seeds={options['seeds']}: without effect with --sampling=first; leave it out.")
        given["seeds"] = (0,)
    for name, lowest in (("shots", 1), ("seeds", 0)):
        given |= {name: wholes(options, name, lowest)} if name in options else {}
    if "l2" in options:
        given["l2"] = tuple(positive(options, "l2", text) for text in options["l2"].split(","))

    from vit_jax.evals.fewshot import FewShot

    protocol = FewShot(**given)

    with _on_pairs(options, "fewshot") as (pairs, extractor):
        from vit_jax.transfer.frozen import run_few_shot

        table = run_few_shot(pairs, extractor, protocol)
        _say(options, extractor, table.to_dict(), table.to_text(), table.notes)


def probe(words: Sequence[str]) -> None:
    """A linear classifier on all training images."""
    options = _options(words, "method", "penalty")
    method = options.get("method", "logistic")
    if method not in ("logistic", "least_squares"):
        raise UsageError(f"--method={method}: choose logistic or least_squares.")
    penalty = positive(options, "penalty") if "penalty" in options else None
    _each(options, "probe", method=method, penalty=penalty)


def knn(words: Sequence[str]) -> None:
    """Nearest neighbours."""
    options = _options(words, "neighbours", "temperature")
    given: dict[str, Any] = {"neighbours": wholes(options, "neighbours")} if "neighbours" in options else {}
    given |= {"temperature": positive(options, "temperature")} if "temperature" in options else {}
    _each(options, "knn", **given)


def features(words: Sequence[str]) -> None:
    """Frozen features as a file."""
    optional = ("split", "classes", "data_dir", *_EXTRACTING)
    switches = ("json",)
    options, _ = split_weights(
        words, ("CHECKPOINT",), required=("data", "output"), optional=optional, switches=switches
    )
    output = pathlib.Path(options["output"]).expanduser()
    if output.suffix != ".npz" or not output.parent.is_dir():
        raise UsageError(f"--output={output}: must be a file that ends in .npz, in an existing folder.")
    with _extracting(options, "own") as (extractor, choice, weights):
        from vit_jax.transfer.datasets import open_split
        from vit_jax.transfer.features import write_features

        source = open_split(options["data"], options.get("split"), choice, weights.training)
        written = write_features(output, extractor.extract(source), source)
        _say(options, extractor, written, "\n".join(f"{name:<12} {value}" for name, value in written.items()), [])


def _options(words: Sequence[str], *own: str) -> dict[str, str]:
    optional = (*own, *_SIDES, *_EXTRACTING)
    options, _ = split_weights(words, ("CHECKPOINT",), required=("data",), optional=optional, switches=("json",))
    return options


def _each(options: Mapping[str, str], kind: Any, **arguments: Any) -> None:
    with _on_pairs(options, "own") as (pairs, extractor):
        from vit_jax.transfer.frozen import run_each, to_text

        results: dict[str, Any] = {}
        notes: list[str] = []
        for name, result, found in run_each(pairs, extractor, kind, **arguments):
            results[name], notes = result, notes + found
        _say(options, extractor, {"datasets": results}, to_text(results), notes)


@contextlib.contextmanager
def _on_pairs(options: Mapping[str, str], preprocessing: str) -> "Iterator[tuple[list[Pair], Extractor]]":
    """Opens the datasets of --data=, and yields them with what computes their features."""
    with _extracting(options, preprocessing) as (extractor, choice, weights):
        from vit_jax.transfer.datasets import RELEASED, open_pair

        names = list(RELEASED) if options["data"] == "released" else list(filter(None, options["data"].split(",")))
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"--data={options['data']}: names {repeated[0]} twice.")
        yield [open_pair(name, choice, weights.training) for name in names], extractor


@contextlib.contextmanager
def _extracting(options: Mapping[str, str], preprocessing: str) -> "Iterator[tuple[Extractor, Choice, Weights]]":
    """Joins the other processes, loads the model, and yields what computes its features."""
    numbers = {name: whole(_NUMBERS | dict(options), name) for name in _NUMBERS}
    preprocessing = options.get("preprocessing", preprocessing)
    if preprocessing not in ("fewshot", "own"):
        raise UsageError(f"--preprocessing={preprocessing}: choose fewshot or own.")
    idle = [f"--{name}" for name in _OF_IMAGES if name in options and preprocessing == "fewshot"]
    if "data_dir" in options and all(name.startswith("folder:") for name in options["data"].split(",")):
        idle.append("--data_dir")
    if idle:
        raise UsageError(f"{', '.join(idle)}: without effect here; leave it out (--preprocessing={preprocessing}).")

    from vit_jax import hosts

    with hosts.ends_together():
        hosts.start()
        from vit_jax.data.transforms import build_fewshot_transform
        from vit_jax.transfer.datasets import Choice
        from vit_jax.transfer.features import Extractor, default_cache

        is_own, cache = preprocessing == "own", options.get("cache", "")
        model, weights = load_placed_model(options, needs_classes=False, needs_transform=is_own)
        extractor = Extractor(
            model=model,
            layer=options.get("layer", "pre_logits"),
            transform=model.require_transform() if is_own else build_fewshot_transform(model.architecture.image_size),
            cache=None if cache == "none" else pathlib.Path(cache).expanduser() if cache else default_cache(),
            **numbers,
        )
        choice = Choice(
            **{name: options.get(name) for name in _SIDES if name != "classes"},
            classes=tuple(filter(None, options.get("classes", "").split(","))),
        )
        yield extractor, choice, weights


def _say(
    options: Mapping[str, str], extractor: "Extractor", result: Mapping[str, Any], text: str, notes: Sequence[str]
) -> None:
    """Prints in the first process: as text, or with everything that a reader needs as JSON."""
    import dataclasses

    from vit_jax import hosts

    if not hosts.is_first():
        return
    about = {
        "weights": extractor.model.source,
        "layer": extractor.layer,
        "preparation": dataclasses.asdict(extractor.transform),
        "notes": notes,
    }
    print(json.dumps(about | dict(result), indent=2) if "json" in options else text, flush=True)
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
