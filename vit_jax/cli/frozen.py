"""Verbs on frozen features: fewshot, probe, knn, features, duplicates."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vit_jax.cli.loading import Checkpoint, Limits, Reading
from vit_jax.cli.options import (
    LISTED,
    REQUIRED,
    PositiveShare,
    UsageError,
    argument,
    option,
    switch,
    verb,
)
from vit_jax.cli.outputs import note, output_file, output_folder
from vit_jax.cli.stop import joined
from vit_jax.config.rules import Count, Number, Positive, Range, When
from vit_jax.storage.files import cache_folder, expanded

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.data.transforms import EvaluationTransform
    from vit_jax.evals.feature_cache import Cache
    from vit_jax.evals.features import Extractor
    from vit_jax.evals.features import Features as SplitFeatures
    from vit_jax.evals.splits import Pair, SplitChoice
    from vit_jax.weights import Weights

_OF_IMAGES = (
    "resize",
    "crop_fraction",
    "interpolation",
    "exif_orientation",
)  # of the weights' own preparation
Preprocessing = Literal["fewshot", "own"]
Choice = Literal["mean_accuracy", "mean_rank"]
_CLASSIFIED = (
    "pre_logits",
    "pooled",
    "token",
    "mean",
    "token_mean",
)  # layers that a network can end in


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Features(Limits, Reading):
    layer: str = option(
        "LAYER", "pre_logits, pooled, token, mean, token_mean, block:N or stage:N", "pre_logits"
    )
    cache: str | None = option("FOLDER", "where features are kept, or none")
    json: bool = switch("print all figures as JSON")
    data_dir: str | None = option("FOLDER", "of TFDS")

    @contextlib.contextmanager
    def extracting(
        self, checkpoint: str, data: str, preprocessing: str = "own", **choice: Any
    ) -> "Iterator[tuple[Extractor, SplitChoice, Weights]]":
        """Join the other processes and load the model; yield the extractor, the choice of data, and the weights."""
        self.reject_data_dir(data)
        if preprocessing == "fewshot":
            self.reject_ineffective(_OF_IMAGES, "with --preprocessing=fewshot")

        with joined():
            from vit_jax.evals.features import Extractor
            from vit_jax.evals.splits import SplitChoice

            is_own = preprocessing == "own"
            # the released protocol takes the range of values, even if the weights do not describe a preparation
            reading = self if is_own else dataclasses.replace(self, value_range=None)
            model, weights = reading.load(
                checkpoint,
                is_placed=True,
                needs_classes=False,
                needs_transform=is_own,
                uses_head=False,
            )
            transform = (
                model.require_transform() if is_own else _fewshot_transform(model, self.value_range)
            )
            extractor = Extractor(
                module=model.module,
                architecture=model.architecture,
                transform=transform,
                layer=self.layer,
                cache=self._cache(),
                **self.limits,
            )
            yield (
                extractor,
                SplitChoice(data_dir=self.data_dir, value_range=transform.value_range, **choice),
                weights,
            )

    def reject_data_dir(self, data: str) -> None:
        """Raise UsageError for --data_dir= if all data are files that they name."""
        if all(name.partition(":")[0] in LISTED for name in data.split(",")):
            self.reject_ineffective(["data_dir"], f"on {data}")

    def _cache(self) -> "Cache | None":
        """Return the cache of features, the same in all processes; None for none, or if the default is read-only."""
        from vit_jax import hosts
        from vit_jax.evals.feature_cache import Cache
        from vit_jax.train.lifecycle.lock import WorkdirLock, is_abandoned

        if self.cache == "none":
            return None
        folder = cache_folder("features") if self.cache is None else expanded(self.cache)
        if self.cache is None and not all(hosts.gather(_is_writable(folder))):
            if hosts.is_first():
                note(f"{folder} is not writable: features are not kept; see --cache=.")
            return None
        return Cache(folder, WorkdirLock, is_abandoned)

    def say(
        self,
        extractor: "Extractor",
        weights: "Weights",
        result: Mapping[str, Any],
        text: str,
        notes: Sequence[str],
    ) -> None:
        """Print in the first process: as text, or as JSON with weights, layer, preparation and notes."""
        from vit_jax import hosts

        if not hosts.is_first():
            return
        about = {
            "weights": weights.source,
            "layer": self.layer,
            "preparation": dataclasses.asdict(extractor.transform),
            "notes": notes,
        }
        print(json.dumps(about | dict(result), indent=2) if self.json else text, flush=True)
        note(*notes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfPairs(_Features, Checkpoint):
    data: str = option(
        "DATA,…",
        "as in a recipe; caltech101, cars196, cifar100, dtd, pets, uc_merced, imagenet; or all: released",
        REQUIRED,
    )
    train_split: str | None = option("NAME", "to fit on")
    test_split: str | None = option("NAME", "to test on")
    classes: tuple[str, ...] = option("A,B", "only images of these classes", ())
    preprocessing: Preprocessing | None = option(
        "", "as released (default of fewshot), or as the weights were trained"
    )

    @contextlib.contextmanager
    def pairs(
        self, preprocessing: str = "own", *, allows_several_labels: bool = False
    ) -> "Iterator[tuple[list[Pair], Extractor, Weights]]":
        """Open the datasets of --data=; yield them with the extractor of their features and its weights."""
        splits = self.chosen("train_split", "test_split", "classes")
        preprocessing = self.preprocessing or preprocessing
        with self.extracting(self.checkpoint, self.data, preprocessing, **splits) as (
            extractor,
            choice,
            weights,
        ):
            from vit_jax.evals.splits import RELEASED, open_pair

            names = (
                list(RELEASED)
                if self.data == "released"
                else list(filter(None, self.data.split(",")))
            )
            if repeated := [name for name in names if names.count(name) > 1]:
                raise UsageError(
                    f"--data={self.data}: must be different datasets, and has {repeated[0]} twice."
                )
            options = {"allows_several_labels": allows_several_labels}
            yield (
                [open_pair(name, choice, weights.training, **options) for name in names],
                extractor,
                weights,
            )


@verb("ViT-B_16.npz --data=released", "runs/mine --data=folder:my-images --shots=10 --l2=1")
class Fewshot(_OfPairs):
    """Accuracy of a linear classifier in closed form on the frozen features of a few images of each class."""

    shots: tuple[Count, ...] | None = option(
        "N,…", "training images of each class; default: 1,5,10,25"
    )
    seeds: Annotated[tuple[Number, ...] | None, When("sampling", "random")] = option(
        "N,…",
        "random seeds of the choice of images; results are averaged over them; default: 0,1,2",
    )
    l2: tuple[Positive, ...] | None = option("X,…", "penalties; default: 1024")
    penalty_choice: Choice | None = option(
        "", "selects one of several penalties: ours (default), or scenic's"
    )
    sampling: Literal["random", "first"] = option("", "which images of a class to use", "random")

    def run(self) -> None:
        from vit_jax.evals.fewshot import FewShot

        values = self.chosen("shots", "seeds", "l2", "penalty_choice", "sampling")
        protocol = FewShot(**({"seeds": (0,)} if self.sampling == "first" else {}) | values)

        with self.pairs("fewshot") as (pairs, extractor, weights):
            from vit_jax.evals.probes import run_few_shot

            table = run_few_shot(pairs, extractor, protocol)
            self.say(extractor, weights, table.to_dict(), table.to_text(), table.notes)


@verb(
    "ViT-B_16.npz --data=cifar100",
    "ViT-B_16.npz --data=folder:my-images --folds=5 --output=runs/probe",
)
class Probe(_OfPairs):
    """Accuracy of a linear classifier on the frozen features of all training images."""

    method: Literal["logistic", "least_squares"] = option(
        "", "logistic regression, or closed form", "logistic"
    )
    penalty: Positive | None = option("X", "default: searched by the log-loss over folds")
    folds: Annotated[int | None, Range("[2, inf)")] = option(
        "K", "also cross-validate on K parts: mean and deviation"
    )
    output: str | None = option(
        "FOLDER", "write the network with the classifier, for verbs that take weights"
    )
    overwrite: Annotated[bool, When("output")] = switch("replace existing files of --output=")

    def run(self) -> None:
        output = self.output
        if output is not None:
            self._require_classifier(output)
            (output_file if pathlib.Path(output).suffix else output_folder)(output)

            from vit_jax.weights.saving import require_destination

            require_destination(output, None, overwrite=self.overwrite)

        with self.pairs(allows_several_labels=True) as (pairs, extractor, weights):
            from vit_jax import hosts
            from vit_jax.api.build import with_probe
            from vit_jax.evals.probes import probe, require_probe_images, run_on_pairs, to_text
            from vit_jax.weights.saving import save

            for pair in pairs:  # before features are computed
                require_probe_images(
                    pair.train.labels, pair.train.num_classes, self.method, self.penalty, self.folds
                )

            def measure(
                pair: "Pair", train: "SplitFeatures", test: "SplitFeatures"
            ) -> tuple[dict[str, Any], list[str]]:
                values = self.chosen("method", "penalty", "folds")
                classifier, result = probe(train, test, pair.train.num_classes, **values)
                if output is None or not hosts.is_first():
                    return result, []
                names = pair.train.class_names
                training = pair.training
                fitted = with_probe(
                    weights, extractor.transform, self.layer, classifier, names, training
                )
                written = save(fitted, output, overwrite=self.overwrite).destination
                return result, [f"{written} has the classifier: vit-jax predict {output} IMAGE"]

            results, notes = run_on_pairs(pairs, extractor, measure)
            self.say(extractor, weights, {"datasets": results}, to_text(results), notes)

    def _require_classifier(self, output: str) -> None:
        """Check options that a saved classifier excludes, before anything is computed."""
        if pathlib.Path(output).suffix not in ("", ".npz"):
            raise UsageError(f"--output={output}: must be a folder or a file that ends in .npz.")
        if "," in self.data or self.data in ("released", "all"):
            raise UsageError(
                f"--data={self.data}: must be one dataset, whose classifier --output= saves. Give one."
            )
        if self.layer not in _CLASSIFIED:
            raise UsageError(
                f"--layer={self.layer}: must be one of {', '.join(_CLASSIFIED)} for --output=."
            )
        if self.preprocessing == "fewshot":
            raise UsageError("--preprocessing=fewshot: must be own for --output=. Leave it out.")


@verb("ViT-B_16.npz --data=pets,dtd", "runs/mine --data=folder:my-images --neighbours=10")
class Knn(_OfPairs):
    """Accuracy of the nearest neighbours among the training images, by the cosine similarity of features."""

    neighbours: tuple[Count, ...] | None = option(
        "N,…", "numbers of neighbours that vote; default: 10,20,100"
    )
    temperature: Positive | None = option("X", "of the weights of their votes; default: 0.07")

    def run(self) -> None:
        with self.pairs() as (pairs, extractor, weights):
            from vit_jax.evals.neighbours import NUM_NEIGHBOURS, require_neighbours
            from vit_jax.evals.probes import measure_neighbours, run_on_pairs, to_text

            for pair in pairs:  # before features are computed
                require_neighbours(self.neighbours or NUM_NEIGHBOURS, len(pair.train))
            measure = functools.partial(
                measure_neighbours, **self.chosen("neighbours", "temperature")
            )
            results, notes = run_on_pairs(pairs, extractor, measure)
            self.say(extractor, weights, {"datasets": results}, to_text(results), notes)


@verb(
    "ViT-B_16.npz --data=pets --output=pets.npz",
    "runs/mine --data=folder:my-images --split=train --layer=block:3 --output=features.npz",
)
class Features(_Features, Checkpoint):
    """Write frozen features, labels and names to a file."""

    data: str = option("DATA", "as in a recipe, or one of the datasets of fewshot", REQUIRED)
    output: str = option("FILE", "of .npz: features, labels and names", REQUIRED)
    split: str | None = option("NAME", "default: test")
    classes: tuple[str, ...] = option("A,B", "only images of these classes", ())
    preprocessing: Preprocessing = option("", "of the released protocol, or as in training", "own")

    def run(self) -> None:
        output = output_file(self.output)
        if output.suffix != ".npz":
            raise UsageError(f"--output={self.output}: must be a file that ends in .npz.")
        with self.extracting(
            self.checkpoint, self.data, self.preprocessing, classes=self.classes
        ) as (
            extractor,
            choice,
            weights,
        ):
            from vit_jax.evals.features import write_features
            from vit_jax.evals.splits import open_split
            from vit_jax.text.tables import columns

            source = open_split(self.data, self.split, choice, weights.training)
            written = write_features(output, extractor.extract(source), source)
            self.say(
                extractor,
                weights,
                written,
                columns(written.items(), "<<", gap=" ", least=(12,)),
                [],
            )


def _read_candidates(text: str) -> str | int:
    if text != "all" and not text.isdecimal():
        raise ValueError("must be a number of bits, or all")
    return text if text == "all" else int(text)


@verb(
    "folder:my-images --against=folder:my-test-images --output=pairs.csv",
    "wds:i21k --against=tfds:imagenet2012 --against_split=validation --weights=ViT-B_16.npz --write=duplicates.json",
)
class Duplicates(_Features):
    """Find training images that are near-duplicates of test images: resized, recoloured or mirrored.

    --weights= also finds cropped copies. With --distance=0 features decide on all pairs but those of equal hashes.
    """

    data: str = argument("DATA", "as in a recipe: images to search for duplicates of --against=")
    against: str = option("DATA,…", "test sets", REQUIRED)
    split: str | None = option("NAME", "of DATA; default: train, or all without splits")
    against_split: str | None = option(
        "NAME", "of all test sets; default: test, or all without splits"
    )
    distance: Number = option(
        "N", "largest number of different bits of 64 in the hashes of duplicates", 6
    )
    weights: str | None = option("CHECKPOINT", "any weights, whose features confirm further pairs")
    candidates: Annotated[str | int | None, When("weights"), _read_candidates] = option(
        "N", "further pairs: those that differ in at most this number of bits, or all; default: 16"
    )
    cosine: Annotated[PositiveShare | None, When("weights")] = option(
        "X", "least cosine of these pairs; default: 0.95"
    )
    output: str | None = option("FILE", "the pairs as CSV")
    write: str | None = option("FILE", "ids of the images of DATA, for --config.input.exclude=FILE")

    def run(self) -> None:
        if self.weights is None:
            of_weights = [field.name for field in dataclasses.fields(Reading)]
            self.reject_ineffective(
                ["layer", "cache", "global_batch", *of_weights], "without --weights"
            )
        self.reject_data_dir(f"{self.data},{self.against}")
        by_features = self.candidates == "all"
        distance = self.distance
        cosine = self.cosine or 0.95
        candidates = distance
        if self.weights is not None and not by_features:
            candidates = max(distance, 16 if self.candidates is None else int(self.candidates))
        files = {
            name: output_file(path, f"--{name}=")
            for name, path in self.chosen("output", "write").items()
        }

        with self._perhaps_extracting() as (extractor, choice):
            from vit_jax import hosts
            from vit_jax.evals.splits import open_split, split_to_search
            from vit_jax.tools.prepare.duplicates import (
                confirm,
                find_by_features,
                find_by_hashes,
                merged,
                report,
            )

            data = self.data
            against = self.against.split(",")
            split = self.split or split_to_search(data, "train", choice, against)
            source = open_split(data, split, choice)
            test_splits = [
                self.against_split or split_to_search(name, "test", choice, [data])
                for name in against
            ]
            tests = [
                open_split(name, part, choice)
                for name, part in zip(against, test_splits, strict=True)
            ]
            pairs = find_by_hashes(source, tests, candidates, self.max_unreadable)
            if extractor:
                pairs = confirm(pairs, source, tests, extractor, distance, cosine)
            if extractor and by_features:
                pairs = merged([*pairs, *find_by_features(source, tests, extractor, cosine)])
            if hosts.is_first():
                print(
                    report(
                        pairs,
                        source,
                        dict(zip(against, tests, strict=True)),
                        split,
                        files,
                        self.json,
                    )
                )

    @contextlib.contextmanager
    def _perhaps_extracting(self) -> "Iterator[tuple[Extractor | None, SplitChoice]]":
        """Join the other processes; load the model of --weights=, if there is one."""
        if self.weights is not None:
            with self.extracting(self.weights, f"{self.data},{self.against}") as (
                extractor,
                choice,
                _,
            ):
                yield extractor, choice
            return
        with joined():
            from vit_jax.evals.splits import SplitChoice

            yield None, SplitChoice(data_dir=self.data_dir)


def _is_writable(folder: pathlib.Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _fewshot_transform(model: "Model", values: tuple[float, float] | None) -> "EvaluationTransform":
    """Build the released protocol's, with photographs turned upright and values mapped as in training, or as given."""
    from vit_jax.data.transforms import build_fewshot_transform

    own = model.transform
    return build_fewshot_transform(
        model.architecture.image_size,
        exif_orientation=own is not None and own.exif_orientation,
        value_range=own.value_range if values is None and own is not None else values,
    )
