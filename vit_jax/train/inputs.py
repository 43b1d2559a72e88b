"""The data of a run: its splits, and the placed batches of training and evaluation."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np

from vit_jax.arrays import Batch
from vit_jax.config.check import require_labels
from vit_jax.config.data_kinds import spell_descriptions
from vit_jax.config.schema import EvaluatorConfig, RunConfig
from vit_jax.data.decoding.bands import choose_bands
from vit_jax.data.placement import find_local_rows, open_placed, open_whole
from vit_jax.data.records import Source, require_same_classes
from vit_jax.data.sources import open_source, pin_data, require_known_data
from vit_jax.data.stream import TrainStream, build_train_stream
from vit_jax.data.transforms import (
    EvaluationTransform,
    build_evaluation_transform,
    check_augmentations,
)
from vit_jax.data.unreadable import UnreadableLog, require_readable
from vit_jax.storage.files import JsonObject, expand_path
from vit_jax.train.assembly import Assembly
from vit_jax.train.run_files import CONFIG_FILE, read_config

R = TypeVar("R", bound=RunConfig)


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The splits of a run, open.

    Attributes:
      train: training images.
      test: images on which the run is evaluated.
      others: images of further evaluators, by name.
      train_sources: images that evaluators on frozen features learn from, by name.
      correct: for evaluators with label sets the correct classes of their images, (N, S), filled
        with -1, by name.
      test_name: name of `test`, the prefix of its results: "validation" in a search.
    """

    train: Source
    test: Source
    others: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    train_sources: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    correct: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    test_name: str = "test"


def pin_datasets(config: R, workdir: str) -> R:
    """Return the config with the commits of data on the Hub, those of the workdir if it has them.

    A resumed run reads the same images, and `config.json` records which.

    Raises:
      ValueError: the Hub does not have the data, or cannot be reached.
    """
    folder = expand_path(workdir)
    stored: JsonObject = {}
    if (folder / CONFIG_FILE).is_file():
        stored = read_config(folder)
    if config.data is not None:
        config = dataclasses.replace(config, data=pin_data(config.data, stored.get("data")))

    stored_evaluators = stored.get("evaluation", {}).get("evaluators", {})
    evaluators = dict(config.evaluation.evaluators)
    for name, evaluator in evaluators.items():
        if evaluator.data is not None:
            stored_data = stored_evaluators.get(name, {}).get("data")
            data = pin_data(evaluator.data, stored_data)
            evaluators[name] = dataclasses.replace(evaluator, data=data)
    evaluation = dataclasses.replace(config.evaluation, evaluators=evaluators)
    return dataclasses.replace(config, evaluation=evaluation)


def measure_channels(config: R, source: Source, workdir: str) -> R:
    """Return the config with mean and standard deviation of each channel, if it reads bands.

    A resumed run has those of its workdir; otherwise they are measured on training images.

    Raises:
      ValueError: an image does not have the bands of the config.
    """
    inputs = config.input
    if not inputs.standardises_bands or inputs.channel_mean:
        return config

    folder = expand_path(workdir)
    stored: JsonObject = {}
    if (folder / CONFIG_FILE).is_file():
        stored = read_config(folder).get("input", {})
    if stored.get("channel_mean") and stored.get("channels") == inputs.channels:
        mean = tuple(stored["channel_mean"])
        std = tuple(stored["channel_std"])
    else:
        from vit_jax.data.channel_statistics import measure_bands

        mean, std = measure_bands(source, inputs)
    measured = dataclasses.replace(inputs, channel_mean=mean, channel_std=std)
    return dataclasses.replace(config, input=measured)


def open_datasets(config: RunConfig) -> Datasets:
    """Open every split and compare their classes.

    Raises:
      ValueError: no dataset was chosen, one is missing, or splits that belong together have
        different classes; a value of the config is not for data whose images may have several
        labels, or only for these.
    """
    if config.data is None:
        raise ValueError(
            "config.data=None: must be set, since the recipe does not choose a dataset. "
            f"Add --config.data= with one of: {spell_descriptions()}."
        )
    require_known_datasets(config)
    data = Datasets(
        train=open_source(config.data, config.input.train_split, config.input, config.seed),
        test=open_source(config.data, config.input.test_split, config.input, config.seed),
        others=_open_evaluated(config),
        train_sources=_open_learned(config),
    )
    _require_same_classes(config, data)
    frozen = {
        name: source.is_multilabel or data.others[name].is_multilabel
        for name, source in data.train_sources.items()
    }
    require_labels(config, is_multilabel=data.train.is_multilabel, frozen=frozen)
    data = _keep_label_sets(config, data)
    _require_readable_splits(config, data)
    check_augmentations(config.input, data.train[0])
    return data


def _keep_label_sets(config: RunConfig, data: Datasets) -> Datasets:
    """Return the data with the correct classes of evaluators that have label sets.

    Images without a correct class are skipped.

    Raises:
      ValueError: label sets are absent or do not fit the images.
    """
    others = dict(data.others)
    correct = {}
    for name, evaluator in config.evaluation.evaluators.items():
        if evaluator.label_sets is None:
            continue
        from vit_jax.evals.label_sets import open_label_sets

        field = f"config.evaluation.evaluators.{name}.label_sets={evaluator.label_sets}"
        if others[name].is_multilabel:
            raise ValueError(
                f"{field}: must not be set: the images of the data have several labels."
            )
        try:
            others[name], correct[name] = open_label_sets(others[name], evaluator.label_sets)
        except (OSError, ValueError) as error:
            raise ValueError(f"{field}: {error}") from error
    return dataclasses.replace(data, others=others, correct=correct)


def _data_of(config: RunConfig, evaluator: EvaluatorConfig) -> str:
    """Return the dataset of an evaluator."""
    data = evaluator.data or config.data
    assert data is not None, "open_datasets checks it"
    return data


def _open_evaluated(config: RunConfig) -> dict[str, Source]:
    """Open the split on which each further evaluator measures, by its name."""
    sources = {}
    for name, evaluator in config.evaluation.evaluators.items():
        data = _data_of(config, evaluator)
        split = evaluator.split or config.input.test_split
        sources[name] = open_source(data, split, config.input, config.seed)
    return sources


def _open_learned(config: RunConfig) -> dict[str, Source]:
    """Open the split from which each evaluator on frozen features learns, by its name.

    A run on fewer training examples is measured like a run on all of them: evaluators learn from
    all.
    """
    inputs = dataclasses.replace(config.input, train_examples=None)
    sources = {}
    for name, evaluator in config.evaluation.evaluators.items():
        if evaluator.frozen:
            data = _data_of(config, evaluator)
            split = evaluator.train_split or inputs.train_split
            sources[name] = open_source(data, split, inputs, config.seed)
    return sources


def _require_same_classes(config: RunConfig, data: Datasets) -> None:
    """Raise ValueError if a split has other classes than the split that is learned from."""
    inputs = config.input
    assert config.data is not None
    require_same_classes(config.data, inputs.train_split, data.train, inputs.test_split, data.test)

    learned: dict[str, Source] = {}
    for name, evaluator in config.evaluation.evaluators.items():
        if evaluator.kind == "classification":
            learned[name] = data.train
    learned.update(data.train_sources)
    for name, source in learned.items():
        evaluator = config.evaluation.evaluators[name]
        split = evaluator.train_split or inputs.train_split
        require_same_classes(_data_of(config, evaluator), split, source, name, data.others[name])


def require_known_datasets(config: RunConfig) -> None:
    """Raise ValueError for data of an unknown kind, before anything is opened."""
    if config.data is not None:
        require_known_data(config.data, "config.data")
    for name, evaluator in config.evaluation.evaluators.items():
        if evaluator.data is not None:
            require_known_data(evaluator.data, f"config.evaluation.evaluators.{name}.data")


def _require_readable_splits(config: RunConfig, data: Datasets) -> None:
    """Raise TooManyUnreadable for a split or the data of an evaluator without a readable image."""
    inputs = config.input
    splits = {inputs.train_split: data.train, inputs.test_split: data.test, **data.others}
    for name, source in splits.items():
        require_readable(
            source,
            f"config.data={config.data}, split {name}",
            inputs.max_unreadable,
            inputs.max_image_megapixels,
            inputs.value_range,
            choose_bands(inputs),
        )


def train_stream(
    config: RunConfig,
    source: Source,
    rows: np.ndarray,
    start_step: int,
    num_steps: int,
    first_sample: int | None = None,
) -> TrainStream:
    """Return the stream of training batches, of which this process supplies `rows`."""
    return build_train_stream(
        source,
        config.input,
        seed=config.seed,
        global_batch=config.global_batch,
        global_rows=rows,
        start_step=start_step,
        num_steps=num_steps,
        first_sample=first_sample,
    )


@contextlib.contextmanager
def open_train_batches(
    assembly: Assembly,
    source: Source,
    start_step: int,
) -> Iterator[tuple[Iterator[Batch], UnreadableLog]]:
    """Open placed batches of the steps from `start_step` on, and count unreadable images.

    Threads and workers end with the context. Each phase begins with new ones.
    """
    inputs = assembly.config.input
    log = UnreadableLog(
        source,
        inputs.max_unreadable,
        inputs.max_image_megapixels,
        inputs.value_range,
        bands=choose_bands(inputs),
    )
    first_end, *later_ends = assembly.list_phase_ends(start_step)
    with contextlib.ExitStack() as pipeline:
        first_phase = open_phase(assembly, source, log, start_step, first_end)
        batches = pipeline.enter_context(first_phase)

        def iterate_phases() -> Iterator[Batch]:
            yield from batches
            steps_done = first_end
            for end in later_ends:
                pipeline.close()  # its threads and workers would take cores from the next one
                phase = open_phase(assembly, source, log, steps_done, end)
                yield from pipeline.enter_context(phase)
                steps_done = end

        yield iterate_phases(), log


def open_phase(
    assembly: Assembly,
    source: Source,
    log: UnreadableLog,
    start_step: int,
    end_step: int,
) -> contextlib.AbstractContextManager[Iterator[Batch]]:
    """Return a context of placed batches of the steps after `start_step`, all of one phase."""
    config = assembly.select_phase(start_step + 1).config
    stream = train_stream(
        config,
        source,
        find_local_rows(assembly.batch_sharding, config.global_batch),
        start_step,
        end_step,
        first_sample=assembly.images(start_step),
    )
    return open_placed(
        stream,
        assembly.batch_sharding,
        log,
        config.input.num_workers,
        config.input.num_threads,
    )


def open_evaluation_batches(
    assembly: Assembly,
    source: Source,
    log: UnreadableLog,
    transform: EvaluationTransform | None = None,
) -> contextlib.AbstractContextManager[Iterator[Batch]]:
    """Return a context of placed batches that hold every example of the split once.

    `log` is the split's, of all evaluations; without a `transform` images are prepared as the
    config says.
    """
    inputs = assembly.config.input
    return open_whole(
        source,
        transform or build_evaluation_transform(inputs),
        assembly.batch_sharding,
        assembly.evaluation_batch,
        log,
        inputs.num_workers,
        inputs.num_threads,
    )
