"""Reports of a run: the table of parameters at the start, the summary at the end."""

import collections
import dataclasses
import importlib.metadata
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.config import RunConfig, to_dict
from vit_jax.config.metric_names import SHARES
from vit_jax.data.decoding.jpeg import DECODER
from vit_jax.data.exclusion import digest_exclusion, num_excluded
from vit_jax.data.records import few
from vit_jax.data.sources import find_listing, holds_out, normalize_data
from vit_jax.data.subset import read_held_hashes
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.data.workers import choose_parallelism, count_cores
from vit_jax.evals.intervals import INTERVAL_OF, describe_interval
from vit_jax.models.flops import FLOPS_PER_MAC
from vit_jax.models.lora import build_lora
from vit_jax.optim.by_name import TrainedParameters, find_trained, select_trained
from vit_jax.storage.files import JsonObject
from vit_jax.text.tables import columns
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import Datasets
from vit_jax.train.progress import duration_text
from vit_jax.train.state import TrainState
from vit_jax.weights.description import TrainingData, describe, describe_preparation
from vit_jax.weights.folding import OURS

if TYPE_CHECKING:
    from vit_jax.weights.fit import Fitted

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "numpy",
)
"""Packages whose versions a run depends on."""


def parameter_table(
    model: nnx.Module,
    *,
    is_folded: bool,
    trained: TrainedParameters | None = None,
) -> str:
    """Return a table of parameters with shape and number, or a line with the number of each part.

    The number of trained parameters follows if `trained` is not None.
    """
    leaves = pytree.name_leaves(model)
    num_trained = None
    if trained is not None:
        num_trained = _count_values(select_trained(model, trained))

    if is_folded:
        return _count_by_part(leaves, num_trained)
    return _list_parameters(leaves, num_trained)


def _count_values(tree: object) -> int:
    """Return the number of values of all arrays of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _count_by_part(leaves: Mapping[str, jax.Array], num_trained: int | None) -> str:
    """Return a line with the number of parameters of each part of the network."""
    sizes: collections.Counter[str] = collections.Counter()
    for name, leaf in leaves.items():
        part = name.partition("/")[0]
        sizes[part] += leaf.size
    parts = [f"{name} {size:,}" for name, size in sizes.items()]
    text = f"params   {sizes.total():,}: {', '.join(parts)}"
    if num_trained is not None:
        text += f"; trained {num_trained:,}"
    return text


def _list_parameters(leaves: Mapping[str, jax.Array], num_trained: int | None) -> str:
    """Return a table with a row for each parameter."""
    rows = []
    for name, leaf in leaves.items():
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        rows.append((f"  {name}", shape, f"{leaf.size:,}"))
    rows.append(("  total", "", f"{_count_values(leaves):,}"))
    if num_trained is not None:
        rows.append(("  trained", "", f"{num_trained:,}"))
    return columns(rows, "<<>")


def files_of(config: RunConfig, data: Datasets) -> dict[str, str]:
    """Return hashes of names and classes of listed files, by which images are held out.

    The hash of excluded ids is added.
    Other data have versions.
    """
    hashes = {}
    if config.data is not None and find_listing(config.data) is not None:
        hashes["train_files_sha256"] = data.train.records_sha256
        hashes["test_files_sha256"] = data.test.records_sha256
    if config.input.exclude is not None:
        hashes["exclude_sha256"] = digest_exclusion(config.input.exclude)
    return hashes


def start_of(config: RunConfig, data: Datasets, parameters: Mapping[str, np.ndarray]) -> JsonObject:
    """Return the values that must not change when a fine-tuning run or its search resumes."""
    return {
        "parameters_sha256": pytree.parameters_sha256(parameters),
        "num_train_examples": len(data.train),
        "num_test_examples": len(data.test),
        "class_names": list(data.train.class_names),
        **files_of(config, data),
    }


def opening(run: Assembly, data: Datasets, folder: pathlib.Path) -> str:
    """Return the opening lines: network, data and workdir."""
    lines = [
        *_describe_network(run),
        *_describe_data(run.config, data),
        *_describe_length(run, len(data.train)),
        *_describe_devices(run),
        f"input    {_describe_input(run)}",
        f"workdir  {folder}",
    ]
    return "\n".join(lines)


def _describe_network(run: Assembly) -> list[str]:
    """Return lines on the network and its parameters."""
    architecture = run.architecture
    sizes = []
    if architecture.has_resnet:
        units = "-".join(map(str, architecture.units)) or "none"
        sizes.append(f"units {units}, width factor {architecture.width_factor:g}")
    if architecture.has_transformer:
        sizes.append(f"width {architecture.width}, depth {architecture.depth}")
    height, width = architecture.image_size
    gigaflops = FLOPS_PER_MAC * run.forward_macs / 1e9
    parameters = parameter_table(
        run.abstract_state.model,
        is_folded=not run.config.logging.parameters,
        trained=find_trained(run.config.optimizer),
    )
    return [
        f"{architecture.name} ({', '.join(sizes)}) on {height}x{width} images, "
        f"{gigaflops:,.3g} GFLOPs an image forward",
        parameters,
    ]


def _describe_data(config: RunConfig, data: Datasets) -> list[str]:
    """Return lines on the images and their classes."""
    labels = ", any number of them an image" if data.train.is_multilabel else ""
    copy = ""
    if config.data is not None and config.data.startswith("folder:"):
        from vit_jax.data.kinds.folder import describe_copy

        copy = describe_copy(config.data)
    lines = [
        f"data     {config.data}: {len(data.train):,} training and {len(data.test):,} "
        f"{data.test_name} images, {data.train.num_classes:,} classes{labels}{copy}"
    ]
    if config.data is not None and config.data.startswith("hf:"):
        from vit_jax.data.kinds.hub_parquet import read_licence

        licence = read_licence(config.data) or "not stated: read the dataset's page on the Hub"
        lines.append(f"licence  {licence}")
    excluded = num_excluded(data.train)
    if excluded:
        lines.append(f"excluded {excluded:,} images of {config.input.exclude}")
    return [*lines, f"classes  {few(data.train.class_names, repr)}"]


def _describe_length(run: Assembly, num_examples: int) -> list[str]:
    """Return lines on the steps of the run and of its phases."""
    steps = run.steps
    epochs = run.images(steps.total) / num_examples
    lines = [
        f"length   {steps.total:,} steps of {run.config.global_batch:,} images = {epochs:,.1f} "
        "epochs"
    ]
    for phase in steps.earlier_phases:
        height, width = phase.image_size
        lines.append(
            f"phase    to step {phase.last_step:,}: {phase.global_batch:,} images of "
            f"{height}x{width} a step"
        )
        if phase.patch_dropout:
            lines[-1] += f", {phase.patch_dropout:.0%} of their patches dropped"
    return lines


def _describe_devices(run: Assembly) -> list[str]:
    """Return lines on the devices and how they compute."""
    kind = jax.devices()[0].device_kind
    lines = [
        f"devices  {jax.device_count()} x {kind} in {jax.process_count()} process(es), "
        f"{_describe_layout(run)}"
    ]
    if run.attention_form is not None:
        dtype = run.architecture.compute_dtype
        lines.append(f"compute  {dtype}, attention {run.attention_form()}")
    return lines


def _describe_input(run: Assembly) -> str:
    """Return the threads and processes that prepare images."""
    config = run.config.input
    image_bytes = math.prod(run.architecture.image_shape) * np.dtype(config.pixel_dtype).itemsize
    local_images = run.config.global_batch // jax.process_count()
    workers, threads = choose_parallelism(
        config.num_workers,
        config.num_threads,
        batch_bytes=local_images * image_bytes,
    )
    parallelism = str(threads)
    if workers:
        parallelism = f"{workers} worker processes of {threads}"
    return f"{parallelism} thread(s) on {count_cores()} core(s), JPEG by {DECODER}"


def _describe_layout(run: Assembly) -> str:
    """Return how the images of a step and the parameters lie on the devices."""
    mesh: dict[str, int] = run.batch_sharding.mesh.shape
    images = run.config.global_batch // (mesh["replica"] * mesh["data"])
    text = f"{images:,} images each"
    num_micro_batches = run.config.optimizer.accumulation_steps or 1
    if num_micro_batches > 1:
        text += f" in {num_micro_batches} micro-batches"
    text += f", parameters {run.config.sharding.parameters}"
    if mesh["replica"] > 1 or mesh["model"] > 1:
        axes = " x ".join(f"{size} {axis}" for axis, size in mesh.items() if size > 1)
        text += f" ({axes})"
    return f"{text}, remat {run.architecture.remat}"


def checkpoint_metadata(
    run: Assembly,
    data: Datasets,
    fitted: "Fitted | None" = None,
) -> JsonObject:
    """Return metadata of weights: model, classes, preprocessing, and the needs of exact resuming."""
    config = run.config
    metadata = _describe_weights(run, data, fitted)
    factors = build_lora(config.optimizer)
    if factors is not None:
        metadata["lora"] = dataclasses.asdict(factors)
    metadata["config"] = to_dict(config)
    metadata["data"] = config.data
    metadata["num_examples"] = len(data.train)
    metadata["global_batch"] = config.global_batch
    if run.steps.earlier_phases:
        phases = [(phase.last_step, phase.global_batch) for phase in run.steps.earlier_phases]
        metadata["phases"] = phases
    if run.teacher is not None:
        metadata["teacher"] = run.teacher.metadata
    metadata["seed"] = config.seed
    metadata.update(files_of(config, data))
    return metadata


def _describe_weights(run: Assembly, data: Datasets, fitted: "Fitted | None") -> JsonObject:
    """Return the metadata that weights carry; a fine-tuning run starts with `fitted`."""
    architecture = run.architecture
    transform = build_evaluation_transform(run.config.input)
    normalisation = OURS
    licence = ""
    finetuning_rule = ""
    if fitted is not None:
        normalisation = fitted.normalisation
        licence = fitted.licence
        finetuning_rule = fitted.finetuning_rule

    class_names = None
    if architecture.num_classes:
        class_names = data.train.class_names

    preprocessing = describe_preparation(transform, normalisation)
    training = _describe_training_data(run.config, data)
    return describe(
        architecture,
        class_names,
        preprocessing,
        training,
        licence,
        finetuning_rule=finetuning_rule,
    )


def _describe_training_data(config: RunConfig, data: Datasets) -> TrainingData:
    assert config.data is not None, "without data nothing is trained"
    held_up_to_class = {}
    if holds_out(config.data, config.input):
        held_up_to_class = read_held_hashes(data.test, config.seed)
    return TrainingData(
        data=normalize_data(config.data),
        seed=config.seed,
        holdout_fraction=config.input.holdout_fraction,
        train_split=config.input.train_split,
        test_split=config.input.test_split,
        classes=config.input.classes,
        is_multilabel=data.train.is_multilabel,
        held_up_to=held_up_to_class,
        lora_rank=config.optimizer.lora_rank,
    )


def summary(
    run: Assembly,
    state: TrainState,
    last_step: int,
    train_metrics: Mapping[str, float],
    results: Mapping[str, float],
    num_missing: int,
) -> JsonObject:
    """Return the content of `summary.json`; the loop adds values that depend on the end of the run.

    Args:
      run: the parts of the run.
      state: the state that was evaluated last.
      last_step: the last step of the run.
      train_metrics: metrics of the last logged step.
      results: results of the last evaluation.
      num_missing: images of the evaluated split that could not be read.
    """
    values: JsonObject = dict(results)
    if "train_loss" in train_metrics:
        values["train_loss"] = train_metrics["train_loss"]
    values["learning_rate"] = run.config.schedule.learning_rate
    values["steps"] = last_step
    values["images"] = run.images(last_step)
    values["exaflops"] = run.training_flops(last_step) / 1e18
    values["wall_seconds"] = 0.0
    values["images_per_second"] = train_metrics.get("images_per_second", 0.0)
    values["unreadable_images"] = train_metrics.get("unreadable_images", 0) + num_missing
    values["parameters"] = _count_values(state.model)
    values["parameters_sha256"] = pytree.parameters_sha256(state.model)
    values.update(machine())
    return values


def machine() -> JsonObject:
    """The devices, and the versions of the packages that a run depends on."""
    values: JsonObject = {
        "device_kind": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }
    for name in PACKAGES:
        values[f"version_{name.replace('-', '_')}"] = importlib.metadata.version(name)
    return values


def closing(summary: JsonObject, folder: pathlib.Path, *, split: str) -> str:
    """Return the closing lines: results, cost and paths."""
    lines = [
        _describe_results(summary, split),
        f"{summary['images']:,} images in {duration_text(summary['wall_seconds'])} "
        f"({summary['images_per_second']:,.0f} images/s while training, which took "
        f"{summary['goodput']:.0%} of the time), {summary['exaflops']:.3g} exaFLOPs",
        f"checkpoints, metrics and summary.json are in {folder}",
    ]
    unreadable = summary["unreadable_images"]
    if unreadable:
        lines.insert(1, f"{unreadable:,} images could not be read and were skipped")
    return "\n".join(lines)


def _describe_results(summary: JsonObject, split: str) -> str:
    """Return the line of results. A run that predicts pixels has only a loss."""
    results = []
    for name in SHARES:
        metric = f"{split}_{name}"
        if metric in summary:
            text = f"{metric.replace('_', ' ')} {summary[metric]:.2%}"
            if name in INTERVAL_OF:
                text += describe_interval(summary[metric], summary.get(f"{split}_images", 0))
            results.append(text)
    results.append(f"{split} loss {summary[f'{split}_loss']:.4f}")
    if "best_step" in summary:
        results.append(f"at step {summary['best_step']:,}, the best that is kept")
    return ", ".join(results)
