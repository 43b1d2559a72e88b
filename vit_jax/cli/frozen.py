"""Verbs on frozen features: fewshot, probe, knn, features, duplicates."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vit_jax.cli.groups import ImageFields
from vit_jax.cli.loading import (
    Checkpoint,
    Limits,
    Reading,
    read_data,
    read_datasets,
    require_weights_first,
)
from vit_jax.cli.options import (
    LISTED,
    REQUIRED,
    PositiveShare,
    UsageError,
    argument,
    format_command,
    is_given,
    list_options,
    option,
    switch,
)
from vit_jax.cli.outputs import (
    note,
    resolve_output_file,
    resolve_output_folder,
    show_command,
)
from vit_jax.cli.short_forms import choose_new_folder, name_data
from vit_jax.cli.stop import join_processes
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Count, Number, Positive, Range, When
from vit_jax.storage.files import JsonObject, cache_folder, expand_path

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.data.decoding.bands import BandChoice
    from vit_jax.data.records import Source
    from vit_jax.data.transforms import EvaluationTransform
    from vit_jax.evals.feature_cache import Cache
    from vit_jax.evals.features import Extractor
    from vit_jax.evals.features import Features as SplitFeatures
    from vit_jax.evals.splits import Pair, SplitChoice
    from vit_jax.tools.prepare.duplicates import Duplicate
    from vit_jax.weights import Weights

Preprocessing = Literal["fewshot", "own"]
Choice = Literal["mean_accuracy", "mean_rank"]
_CLASSIFIED = ("pre_logits", "pooled", "token", "mean", "token_mean")  # a network can end in them
_OF_WEIGHTS = ("layer", "cache", "global_batch", "weights")  # options of duplicates
_OF_VALUES = (
    "value_range",
    "channels",
    "bands",
    "channel_mean",
    "channel_std",
    "channel_weights",
)
"""Options of images that the released preparation takes, too."""
_COSINE = 0.95
_CANDIDATE_BITS = 16


# Common options.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Features(Limits, Reading):
    layer: str = option(
        "LAYER",
        "features: pre_logits, pooled, token, mean, token_mean, block:N or stage:N",
        "pre_logits",
    )

    cache: str | None = option("FOLDER", "cache of features: a folder, or none")
    json: bool = switch("print all figures as JSON")
    data_dir: str | None = option("FOLDER", "folder of TFDS datasets", reads_bucket=True)

    @contextlib.contextmanager
    def open_extractor(
        self,
        checkpoint: str,
        data: str,
        preprocessing: str = "own",
        measured_data: str | None = None,
        **choice: Any,
    ) -> "Iterator[tuple[Extractor, SplitChoice, Weights]]":
        """Join the other processes and load the model.

        Args:
          checkpoint: path or address of the weights.
          data: datasets of the images.
          preprocessing: preparation of images, "own" or "fewshot".
          measured_data: the same as for `load_model`.
          **choice: fields of `SplitChoice`.

        Yields:
          the extractor, the choice of data, and the weights.
        """
        self.reject_data_dir(data)
        if preprocessing == "fewshot":
            names = _name_image_options(except_for=_OF_VALUES)
            self.reject_ineffective(names, "with --preprocessing=fewshot")

        with join_processes():
            from vit_jax.evals.features import Extractor
            from vit_jax.evals.splits import SplitChoice

            split_choice = SplitChoice(data_dir=self.data_dir, **choice)
            model, transform, weights = self._load_prepared(
                checkpoint,
                data,
                preprocessing,
                split_choice,
                measured_data,
            )
            extractor = Extractor(
                module=model.module,
                architecture=model.architecture,
                transform=transform,
                layer=self.layer,
                cache=self._open_cache(),
                **self.limits,
            )
            split_choice = dataclasses.replace(
                split_choice,
                value_range=transform.value_range,
                bands=transform.bands,
            )
            yield extractor, split_choice, weights

    def list_channel_words(self) -> list[str]:
        """Return the words of the options that choose channels and their values."""
        words = []
        for known in list_options(ImageFields):
            value = getattr(self.images, known.name)
            if known.name in _OF_VALUES and value != known.default:
                words += known.to_words(value)
        return [f"--images.{word.removeprefix('--')}" for word in words]

    def reject_data_dir(self, data: str) -> None:
        """Raise UsageError for --data_dir= if all data are files that they name."""
        kinds = [name.partition(":")[0] for name in data.split(",")]
        if all(kind in LISTED for kind in kinds):
            self.reject_ineffective(["data_dir"], f"on {data}")

    def print_result(
        self,
        extractor: "Extractor",
        weights: "Weights",
        result: JsonObject,
        text: str,
        notes: Sequence[str],
    ) -> None:
        """Print in the first process: a text, or JSON with weights, layer, preparation and notes.

        Args:
          extractor: its preparation is printed.
          weights: their address is printed.
          result: values for JSON.
          text: the same for a reader.
          notes: sentences for standard error.
        """
        from vit_jax import hosts

        if not hosts.is_first():
            return
        if self.json:
            about = {
                "weights": weights.source,
                "layer": self.layer,
                "preparation": dataclasses.asdict(extractor.transform),
                "notes": notes,
            }
            text = json.dumps(about | dict(result), indent=2)
        print(text, flush=True)
        note(*notes)

    def _load_prepared(
        self,
        checkpoint: str,
        data: str,
        preprocessing: str,
        choice: "SplitChoice",
        measured_data: str | None,
    ) -> "tuple[Model, EvaluationTransform, Weights]":
        """Load the model and build the preparation of its images."""
        is_own = preprocessing == "own"
        model, weights = self.load(
            checkpoint,
            data=data,
            measured_data=measured_data,
            choice=choice,
            is_placed=True,
            needs_classes=False,
            needs_transform=is_own,
            uses_preparation=is_own,
            uses_head=False,
        )
        if is_own:
            return model, model.require_transform(), weights

        from vit_jax.data.decoding.bands import read_bands
        from vit_jax.weights.description import choose_orientation

        is_upright = choose_orientation(weights.preprocessing, weights.training, data)
        bands = read_bands(weights.preprocessing)
        if bands is None and model.transform is not None:
            bands = model.transform.bands
        value_range = self.images.value_range
        if bands is not None and value_range is not None:
            bands = bands.set_range(*value_range)
        transform = _build_fewshot_transform(model, is_upright, value_range, bands)
        return model, transform, weights

    def _open_cache(self) -> "Cache | None":
        """Return the cache of features, the same in all processes.

        None: without a cache, or with a default folder that is read-only.
        """
        from vit_jax import hosts
        from vit_jax.evals.feature_cache import Cache
        from vit_jax.train.lifecycle.lock import WorkdirLock, is_abandoned

        if self.cache == "none":
            return None
        if self.cache is not None:
            return Cache(expand_path(self.cache), WorkdirLock, is_abandoned)

        folder = cache_folder("features")
        if all(hosts.gather(_is_writable(folder))):
            return Cache(folder, WorkdirLock, is_abandoned)
        if hosts.is_first():
            note(f"{folder} is not writable: features are not kept; see --cache=.")
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DataFeatures(_Features, Checkpoint):
    data: str = option("DATA", "", REQUIRED)  # each verb describes it

    def complete(self, words: Sequence[str]) -> "_DataFeatures":
        """Return the options; print the long command of a short form, with data as a word."""
        verb_name = type(self).__name__.lower()
        require_weights_first(verb_name, self.checkpoint, self.data)
        if is_given(words, "--data"):
            return self
        completed = dataclasses.replace(self, **self.choose_values())
        show_command(format_command(verb_name, completed.checkpoint, *completed.to_words()))
        return completed

    def choose_values(self) -> dict[str, Any]:
        """Return values of options that a short form omits, by name."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pairs(_DataFeatures):
    data: Annotated[str, read_datasets] = option(
        "DATA,…",
        "a folder, a file or data as in a recipe; caltech101, cars196, cifar100, dtd, pets, "
        "uc_merced, imagenet; or released: all of these",
        REQUIRED,
        reads_bucket=True,
        is_positional=True,
    )

    train_split: str | None = option("NAME", "training split")
    test_split: str | None = option("NAME", "test split")
    classes: tuple[str, ...] = option("A,B", "keep only images of these classes", ())

    preprocessing: Preprocessing | None = option(
        "", "preparation of images: as released (default of fewshot), or as in training"
    )

    @contextlib.contextmanager
    def open_pairs(
        self,
        preprocessing: str = "own",
        *,
        allows_several_labels: bool = False,
    ) -> "Iterator[tuple[list[Pair], Extractor, Weights]]":
        """Open the datasets of --data=.

        Yields:
          the datasets, the extractor of their features, and its weights.
        """
        splits = self.collect_values("train_split", "test_split", "classes")
        opening = self.open_extractor(
            self.checkpoint,
            self.data,
            self.preprocessing or preprocessing,
            **splits,
        )
        with opening as (extractor, choice, weights):
            from vit_jax.evals.splits import open_pair

            pairs = []
            for name in self._list_datasets():
                pair = open_pair(
                    name,
                    choice,
                    weights.training,
                    allows_several_labels=allows_several_labels,
                )
                pairs.append(pair)
            yield pairs, extractor, weights

    def _list_datasets(self) -> list[str]:
        """Return the names in --data=, which must differ."""
        from vit_jax.evals.splits import RELEASED

        if self.data == "released":
            return list(RELEASED)
        names = list(filter(None, self.data.split(",")))
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    f"--data={self.data}: must be different datasets, and has {name} twice."
                )
        return names


# Verbs.


@verb("ViT-B_16.npz released", "runs/mine my-images --shots=10 --l2=1")
class Fewshot(_Pairs):
    """Accuracy of a linear classifier in closed form on the frozen features of a few images of each class."""

    shots: tuple[Count, ...] | None = option(
        "N,…", "numbers of training images of each class; default: 1,5,10,25"
    )
    seeds: Annotated[tuple[Number, ...] | None, When("sampling", "random")] = option(
        "N,…",
        "random seeds of the choice of images; results are averaged over them; default: 0,1,2",
    )

    l2: tuple[Positive, ...] | None = option("X,…", "L2 penalties; default: 1024")
    penalty_choice: Choice | None = option(
        "", "rule that selects one of several penalties; default: mean_accuracy (scenic: mean_rank)"
    )

    sampling: Literal["random", "first"] = option("", "choice of the images of a class", "random")

    def suggest_next(self) -> str:
        """Return a probe of all training images."""
        return format_command("probe", self.checkpoint, self.data, *self.list_channel_words())

    def run(self) -> None:
        from vit_jax.evals.fewshot import FewShot

        values = self.collect_values("shots", "seeds", "l2", "penalty_choice", "sampling")
        protocol = FewShot(**values)
        with self.open_pairs("fewshot") as (pairs, extractor, weights):
            from vit_jax.evals.few_shot_table import run_few_shot

            table = run_few_shot(pairs, extractor, protocol)
            self.print_result(extractor, weights, table.to_dict(), table.to_text(), table.notes)


@verb(
    "ViT-B_16.npz my-images",
    "ViT-B_16.npz --data=folder:my-images --folds=5 --output=runs/probe",
)
class Probe(_Pairs):
    """Accuracy of a linear classifier on the frozen features of all training images."""

    method: Literal["logistic", "least_squares"] = option(
        "", "classifier: logistic regression, or least squares in closed form", "logistic"
    )
    penalty: Positive | None = option("X", "penalty; default: searched by the log-loss over folds")

    folds: Annotated[int | None, Range("[2, inf)")] = option(
        "K", "cross-validate on K folds, too: mean and deviation"
    )

    output: str | None = option(
        "FOLDER", "write the network with the classifier, for verbs that take weights"
    )
    overwrite: Annotated[bool, When("output")] = switch("replace existing files of --output=")

    def choose_values(self) -> dict[str, Any]:
        """Return a new folder in runs/ for the classifier."""
        if self.output is not None or not self._has_classifier():
            return {}
        return {"output": choose_new_folder(f"{name_data(self.data)}-probe")}

    def suggest_next(self) -> str:
        """Return a prediction by the classifier, or the fine-tuning of the weights."""
        if self.output is not None:
            return f"{format_command('predict', self.output)} IMAGE"
        words = []
        for word in self.list_channel_words():
            field = word.removeprefix("--images.")
            section = "model" if field.startswith("channel_weights") else "input"
            words.append(f"--config.{section}.{field}")
        data = self.data.partition(",")[0]
        return format_command("finetune", self.checkpoint, data, *words)

    def _has_classifier(self) -> bool:
        """Return True if one classifier of features in which a network can end is fitted."""
        is_single = "," not in self.data and self.data not in ("released", "all")
        return is_single and self.layer in _CLASSIFIED and self.preprocessing != "fewshot"

    def run(self) -> None:
        self._require_output()
        with self.open_pairs(allows_several_labels=True) as (pairs, extractor, weights):
            from vit_jax.evals.linear_probe import require_probe_images
            from vit_jax.evals.probes import run_on_pairs, to_text

            for pair in pairs:  # before features are computed
                require_probe_images(
                    pair.train.labels,
                    pair.train.num_classes,
                    self.method,
                    self.penalty,
                    self.folds,
                )
            measure = functools.partial(self._fit, extractor=extractor, weights=weights)
            results, notes = run_on_pairs(pairs, extractor, measure)
            self.print_result(extractor, weights, {"datasets": results}, to_text(results), notes)

    def _fit(
        self,
        pair: "Pair",
        train: "SplitFeatures",
        test: "SplitFeatures",
        *,
        extractor: "Extractor",
        weights: "Weights",
    ) -> tuple[dict[str, Any], list[str]]:
        """Fit and test a classifier, and save it; return its results and notes."""
        from vit_jax import hosts
        from vit_jax.api.build import attach_probe
        from vit_jax.evals.linear_probe import probe
        from vit_jax.weights.saving import save

        values = self.collect_values("method", "penalty", "folds")
        classifier, result = probe(train, test, pair.train.num_classes, **values)
        if self.output is None or not hosts.is_first():
            return result, []

        fitted = attach_probe(
            weights,
            extractor.transform,
            self.layer,
            classifier,
            pair.train.class_names,
            pair.training,
        )
        written = save(fitted, self.output, overwrite=self.overwrite).destination
        return result, [f"{written} has the classifier: vit-jax predict {self.output} IMAGE"]

    def _require_output(self) -> None:
        """Check --output= before anything is computed."""
        if self.output is None:
            return
        self._require_classifier(self.output)
        check = resolve_output_file if pathlib.Path(self.output).suffix else resolve_output_folder
        check(self.output)

        from vit_jax.weights.saving import require_destination

        require_destination(self.output, None, overwrite=self.overwrite)

    def _require_classifier(self, output: str) -> None:
        """Raise UsageError for options that a saved classifier excludes."""
        if pathlib.Path(output).suffix not in ("", ".npz"):
            raise UsageError(f"--output={output}: must be a folder or a file that ends in .npz.")
        if "," in self.data or self.data in ("released", "all"):
            raise UsageError(
                f"--data={self.data}: must be one dataset, whose classifier --output= saves. "
                "Give one."
            )
        if self.layer not in _CLASSIFIED:
            raise UsageError(
                f"--layer={self.layer}: must be one of {', '.join(_CLASSIFIED)} for --output=."
            )
        if self.preprocessing == "fewshot":
            raise UsageError("--preprocessing=fewshot: must be own for --output=. Leave it out.")


@verb("ViT-B_16.npz pets,dtd", "runs/mine my-images --neighbours=10")
class Knn(_Pairs):
    """Accuracy of the nearest neighbours among the training images, by the cosine similarity of features."""

    neighbours: tuple[Count, ...] | None = option(
        "N,…", "numbers of neighbours that vote; default: 10,20,100"
    )
    temperature: Positive | None = option("X", "temperature of the votes; default: 0.07")

    def suggest_next(self) -> str:
        """Return a probe of the same features."""
        return format_command("probe", self.checkpoint, self.data, *self.list_channel_words())

    def run(self) -> None:
        with self.open_pairs() as (pairs, extractor, weights):
            from vit_jax.evals.neighbours import NUM_NEIGHBOURS, require_neighbours
            from vit_jax.evals.probes import measure_neighbours, run_on_pairs, to_text

            for pair in pairs:  # before features are computed
                require_neighbours(self.neighbours or NUM_NEIGHBOURS, len(pair.train))
            values = self.collect_values("neighbours", "temperature")
            measure = functools.partial(measure_neighbours, **values)
            results, notes = run_on_pairs(pairs, extractor, measure)
            self.print_result(extractor, weights, {"datasets": results}, to_text(results), notes)


@verb(
    "ViT-B_16.npz --data=pets --output=pets.npz",
    "runs/mine --data=folder:my-images --split=train --layer=block:3 --output=features.npz",
)
class Features(_DataFeatures):
    """Write frozen features, labels and names to a file."""

    data: Annotated[str, read_data] = option(
        "DATA",
        "folder, file or data as in a recipe, or one of the datasets of fewshot",
        REQUIRED,
        reads_bucket=True,
        is_positional=True,
    )

    output: str = option("FILE", ".npz file of features, labels and names", REQUIRED)

    split: str | None = option("NAME", "split of the data; default: test")
    classes: tuple[str, ...] = option("A,B", "keep only images of these classes", ())

    preprocessing: Preprocessing = option(
        "", "preparation of images: as released, or as in training", "own"
    )

    def suggest_next(self) -> str:
        """Return a probe of the same features."""
        return format_command("probe", self.checkpoint, self.data, *self.list_channel_words())

    def run(self) -> None:
        output = resolve_output_file(self.output)
        if output.suffix != ".npz":
            raise UsageError(f"--output={self.output}: must be a file that ends in .npz.")

        opening = self.open_extractor(
            self.checkpoint,
            self.data,
            self.preprocessing,
            classes=self.classes,
        )
        with opening as (extractor, choice, weights):
            from vit_jax.evals.features import write_features
            from vit_jax.evals.splits import open_split
            from vit_jax.text.tables import columns

            source = open_split(self.data, self.split, choice, weights.training)
            written = write_features(output, extractor.extract(source), source)
            text = columns(written.items(), "<<", gap=" ", least=(12,))
            self.print_result(extractor, weights, written, text, [])


def _read_candidates(text: str) -> str | int:
    if text == "all":
        return text
    if not text.isdecimal():
        raise ValueError("must be a number of bits, or all")
    return int(text)


@verb(
    "folder:my-images --against=folder:my-test-images --output=pairs.csv",
    "wds:i21k --against=tfds:imagenet2012 --against_split=validation --weights=ViT-B_16.npz --write=duplicates.json",
)
class Duplicates(_Features):
    """Find training images that are near-duplicates of test images: resized, recoloured or mirrored.

    --weights= also finds cropped copies. With --distance=0 features decide on all pairs but those
    of equal hashes.
    """

    data: str = argument(
        "DATA",
        "images, as in a recipe, to search for duplicates of --against=",
        reads_bucket=True,
    )

    against: str = option("DATA,…", "test sets, as in a recipe", REQUIRED, reads_bucket=True)

    split: str | None = option("NAME", "split of DATA; default: train, or all without splits")
    against_split: str | None = option(
        "NAME", "split of all test sets; default: test, or all without splits"
    )
    distance: Number = option(
        "N", "largest number of different bits of 64 in the hashes of duplicates", 6
    )

    checkpoint: str | None = option(
        "CHECKPOINT",
        "weights whose features confirm further pairs",
        flag="weights",
        reads_bucket=True,
    )
    candidates: Annotated[str | int | None, When("checkpoint"), _read_candidates] = option(
        "N", "largest number of different bits of further pairs, or all; default: 16"
    )
    cosine: Annotated[PositiveShare | None, When("checkpoint")] = option(
        "X", "least cosine of confirmed pairs; default: 0.95"
    )

    output: str | None = option("FILE", "write the pairs as CSV")
    write: str | None = option(
        "FILE", "write the ids of images of DATA, for --config.input.exclude=FILE"
    )

    def suggest_next(self) -> str:
        """Return a training without the images that were written."""
        if self.write is None:
            return ""
        return format_command("pretrain", self.data, f"--config.input.exclude={self.write}")

    def run(self) -> None:
        if self.checkpoint is None:
            names = _name_image_options(except_for=("channels", "bands"))
            self.reject_ineffective([*_OF_WEIGHTS, *names], "without --weights")
        self.reject_data_dir(f"{self.data},{self.against}")
        files = {}
        for name, path in self.collect_values("output", "write").items():
            files[name] = resolve_output_file(path, f"--{name}=")

        with self._open_search() as (extractor, choice):
            from vit_jax import hosts
            from vit_jax.evals.splits import open_split, split_to_search
            from vit_jax.tools.prepare.duplicates import report

            against = self.against.split(",")
            split = self.split or split_to_search(self.data, "train", choice, against)
            source = open_split(self.data, split, choice)
            tests = {}
            for name in against:
                part = self.against_split or split_to_search(name, "test", choice, [self.data])
                tests[name] = open_split(name, part, choice)

            pairs = self._find(source, list(tests.values()), extractor, choice)
            if hosts.is_first():
                print(report(pairs, source, tests, split, files, self.json))

    def _find(
        self,
        source: "Source",
        tests: "Sequence[Source]",
        extractor: "Extractor | None",
        choice: "SplitChoice",
    ) -> "list[Duplicate]":
        """Return the pairs of near-duplicates, by hashes and by the features of an extractor."""
        from vit_jax.tools.prepare.duplicates import (
            confirm,
            find_by_features,
            find_by_hashes,
            merge_pairs,
        )

        bits = self._count_bits()
        pairs = find_by_hashes(source, tests, bits, self.max_unreadable, choice.bands)
        if extractor is None:
            return pairs
        cosine = self.cosine or _COSINE
        pairs = confirm(pairs, source, tests, extractor, self.distance, cosine)
        if self.candidates == "all":
            pairs = merge_pairs([*pairs, *find_by_features(source, tests, extractor, cosine)])
        return pairs

    def _count_bits(self) -> int:
        """Return the largest number of bits in which the hashes of a pair to confirm differ."""
        if self.checkpoint is None or self.candidates == "all":
            return self.distance
        bits = _CANDIDATE_BITS
        if self.candidates is not None:
            bits = int(self.candidates)
        return max(self.distance, bits)

    @contextlib.contextmanager
    def _open_search(self) -> "Iterator[tuple[Extractor | None, SplitChoice]]":
        """Join the other processes; load the model of --weights=, if there is one."""
        if self.checkpoint is not None:
            opening = self.open_extractor(
                self.checkpoint,
                f"{self.data},{self.against}",
                measured_data=self.data,
            )
            with opening as (extractor, choice, _):
                yield extractor, choice
            return

        with join_processes():
            from vit_jax.data.decoding.bands import choose_bands
            from vit_jax.evals.splits import SplitChoice

            inputs = self.images.choose_input(None)
            bands = None if inputs is None else choose_bands(inputs)
            yield None, SplitChoice(data_dir=self.data_dir, bands=bands)


def _is_writable(folder: pathlib.Path) -> bool:
    """Create a folder; return True if files can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _name_image_options(except_for: Collection[str]) -> list[str]:
    """Return the names of options of images, except for these fields."""
    names = []
    for field in dataclasses.fields(ImageFields):
        if field.name not in except_for:
            names.append(f"images.{field.name}")
    return names


def _build_fewshot_transform(
    model: "Model",
    exif_orientation: bool,
    value_range: tuple[float, float] | None,
    bands: "BandChoice | None",
) -> "EvaluationTransform":
    """Build the released protocol's preparation, with values mapped by `value_range` or as in training."""
    from vit_jax.data.transforms import build_fewshot_transform

    own = model.transform
    if own is not None and value_range is None:
        value_range = own.value_range
    return build_fewshot_transform(
        model.architecture.image_size,
        exif_orientation=exif_orientation,
        value_range=value_range,
        bands=bands,
    )
