"""Reports of a run: the table of parameters at the start, the summary at the end."""

import collections
import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.config import RunConfig, to_dict
from vit_jax.config.evaluators import SHARES
from vit_jax.data.decoding.jpeg import DECODER
from vit_jax.data.exclusion import exclusion_sha256, num_excluded
from vit_jax.data.kinds.folder import describe_copy
from vit_jax.data.records import few
from vit_jax.data.sources import holds_out, listing_of, located
from vit_jax.data.subset import held_up_to
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.data.workers import available_cores, choose_parallelism
from vit_jax.models.lora import lora_of
from vit_jax.optim.by_name import make_is_trained, trained_leaves
from vit_jax.storage.files import JsonObject
from vit_jax.text.tables import columns
from vit_jax.train.assemble import Assembly, Datasets
from vit_jax.train.progress import duration_text
from vit_jax.train.state import TrainState
from vit_jax.weights.description import TrainingData, describe, describe_preparation
from vit_jax.weights.fit import Fitted
from vit_jax.weights.folding import OURS

# Those whose behaviour a run depends on.
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


def parameter_table(
    model: nnx.Module, *, is_folded: bool, is_trained: Callable[[str], bool] | None = None
) -> str:
    """Name, shape and number of every parameter (arrays, or their abstract shapes), or of each part, and the total.

    The number of trained parameters follows if `is_trained` is not None.
    """
    leaves = pytree.named_leaves(model)
    num_trained = sum(leaf.size for leaf in trained_leaves(model, is_trained).values())
    if is_folded:
        sizes: collections.Counter[str] = collections.Counter()
        for name, leaf in leaves.items():
            sizes[name.partition("/")[0]] += leaf.size
        parts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        return f"params   {sizes.total():,}: {parts}{'' if is_trained is None else f'; trained {num_trained:,}'}"
    shapes = (" x ".join(map(str, leaf.shape)) or "scalar" for leaf in leaves.values())
    rows = [
        (f"  {name}", shape, f"{leaves[name].size:,}")
        for name, shape in zip(leaves, shapes, strict=True)
    ]
    rows.append(("  total", "", f"{sum(leaf.size for leaf in leaves.values()):,}"))
    rows += [] if is_trained is None else [("  trained", "", f"{num_trained:,}")]
    return columns(rows, "<<>")


def files_of(config: RunConfig, data: Datasets) -> dict[str, str]:
    """Hash of the names and classes of listed files, because what is held out goes by names, and of excluded ids.

    Other data have versions.
    """
    exclude = config.input.exclude
    excluded = {} if exclude is None else {"exclude_sha256": exclusion_sha256(exclude)}
    if config.data is None or listing_of(config.data) is None:
        return excluded
    return {
        f"{split}_files_sha256": getattr(data, split).records_sha256 for split in ("train", "test")
    } | excluded


def start_of(config: RunConfig, data: Datasets, parameters: Mapping[str, np.ndarray]) -> JsonObject:
    """Return the values that must not change when a fine-tuning run resumes, in its search or after."""
    return {
        "parameters_sha256": pytree.parameters_sha256(parameters),
        "num_train_examples": len(data.train),
        "num_test_examples": len(data.test),
        "class_names": list(data.train.class_names),
        **files_of(config, data),
    }


def opening(run: Assembly, data: Datasets, folder: pathlib.Path, *, split: str) -> str:
    """Return the opening lines: network, data and workdir; `split` is the name of `data.test`."""
    config = run.config
    steps = run.steps
    architecture = run.architecture
    epochs = run.images(steps.total) / len(data.train)
    height, width = architecture.image_size
    size = (
        [f"width {architecture.width}, depth {architecture.depth}"]
        if architecture.has_transformer
        else []
    )
    if architecture.has_resnet:
        units = "-".join(map(str, architecture.units)) or "none"
        size = [f"units {units}, width factor {architecture.width_factor:g}", *size]
    device = jax.devices()[0].device_kind
    labels = ", any number of them an image" if data.train.is_multilabel else ""
    excluded = num_excluded(data.train)
    lines = [
        f"{architecture.name} ({', '.join(size)}) on {height}x{width} images, "
        f"{2 * run.forward_macs / 1e9:,.3g} GFLOPs an image forward",
        parameter_table(
            run.abstract_state.model,
            is_folded=not config.logging.parameters,
            is_trained=make_is_trained(config.optimizer),
        ),
        f"data     {config.data}: {len(data.train):,} training and {len(data.test):,} {split} images, "
        f"{data.train.num_classes:,} classes{labels}{describe_copy(config.data or '')}",
        *([f"excluded {excluded:,} images of {config.input.exclude}"] if excluded else []),
        f"classes  {few(data.train.class_names, repr)}",
        f"length   {steps.total:,} steps of {config.global_batch:,} images = {epochs:,.1f} epochs",
        *(
            f"phase    to step {phase.last_step:,}: {phase.global_batch:,} images of "
            f"{phase.image_size[0]}x{phase.image_size[1]} a step"
            for phase in steps.phases
        ),
        f"devices  {jax.device_count()} x {device} in {jax.process_count()} process(es), {_layout(run)}",
        *(
            [f"compute  {architecture.compute_dtype}, attention {run.attention_form()}"]
            if run.attention_form
            else []
        ),
        f"input    {_input(run)}",
        f"workdir  {folder}",
    ]
    return "\n".join(lines)


def _input(run: Assembly) -> str:
    config = run.config.input
    (height, width) = run.config.input.image_size
    local_bytes = run.config.global_batch // jax.process_count() * height * width * 3
    workers, threads = choose_parallelism(
        config.num_workers, config.num_threads, batch_bytes=local_bytes
    )
    kind = f"{workers} worker processes of {threads}" if workers else str(threads)
    return f"{kind} thread(s) on {available_cores()} core(s), JPEG by {DECODER}"


def _layout(run: Assembly) -> str:
    mesh: dict[str, int] = run.batch_sharding.mesh.shape
    images = run.config.global_batch // (mesh["replica"] * mesh["data"])
    cut = " x ".join(f"{size} {axis}" for axis, size in mesh.items() if size > 1)
    split = f" ({cut})" if mesh["replica"] > 1 or mesh["model"] > 1 else ""
    parts = run.config.optimizer.accumulation_steps or 1
    cut_batch = f" in {parts} micro-batches" if parts > 1 else ""
    remat = f", remat {run.architecture.remat}"
    return f"{images:,} images each{cut_batch}, parameters {run.config.sharding.parameters}{split}{remat}"


def checkpoint_metadata(run: Assembly, data: Datasets, fitted: Fitted | None = None) -> JsonObject:
    """Return metadata of weights: model, classes, preprocessing, and what exact resuming depends on."""
    normalisation, licence = (fitted.normalisation, fitted.licence) if fitted else (OURS, "")
    config = run.config
    architecture = run.architecture
    preprocessing = describe_preparation(build_evaluation_transform(config.input), normalisation)
    assert config.data is not None  # or there would be no data to train on
    training_data = TrainingData(
        data=located(config.data),
        seed=config.seed,
        holdout_fraction=config.input.holdout_fraction,
        train_split=config.input.train_split,
        test_split=config.input.test_split,
        classes=config.input.classes,
        is_multilabel=data.train.is_multilabel,
        held_up_to=held_up_to(data.test, config.seed)
        if holds_out(config.data, config.input)
        else {},
        lora_rank=config.optimizer.lora_rank,
    )
    factors = lora_of(config.optimizer)
    return {
        **describe(
            architecture,
            data.train.class_names if architecture.num_classes else None,
            preprocessing,
            training_data,
            licence,
        ),
        **({} if factors is None else {"lora": dataclasses.asdict(factors)}),
        "config": to_dict(config),
        "data": config.data,
        "num_examples": len(data.train),
        "global_batch": config.global_batch,
        **(
            {"phases": [(p.last_step, p.global_batch) for p in run.steps.phases]}
            if run.steps.phases
            else {}
        ),
        "seed": config.seed,
        **files_of(config, data),
    }


def summary(
    run: Assembly,
    state: TrainState,
    last_step: int,
    train_metrics: Mapping[str, float],
    results: Mapping[str, float],
    num_missing: int,
) -> JsonObject:
    """The content of `summary.json`, flat, with the last training metrics; the loop adds what depends on the run's end.

    `num_missing` images of the split that `results` are of could not be read.
    """
    return {
        **results,
        **({"train_loss": train_metrics["train_loss"]} if "train_loss" in train_metrics else {}),
        "learning_rate": run.config.schedule.learning_rate,
        "steps": last_step,
        "images": run.images(last_step),
        "exaflops": run.training_flops(last_step) / 1e18,
        "wall_seconds": 0.0,
        "images_per_second": train_metrics.get("images_per_second", 0.0),
        "unreadable_images": train_metrics.get("unreadable_images", 0) + num_missing,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.model)),
        "parameters_sha256": pytree.parameters_sha256(state.model),
        **machine(),
    }


def machine() -> JsonObject:
    """The devices, and the versions of what a run depends on."""
    return {
        "device_kind": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        **{
            f"version_{name.replace('-', '_')}": importlib.metadata.version(name)
            for name in PACKAGES
        },
    }


def closing(summary: JsonObject, folder: pathlib.Path, *, split: str) -> str:
    """Return the closing lines: results, cost and paths."""
    shares = [
        f"{split}_{name}" for name in SHARES if f"{split}_{name}" in summary
    ]  # none if pixels are predicted
    results = "".join(f"{name.replace('_', ' ')} {summary[name]:.2%}, " for name in shares)
    missing = f"{summary['unreadable_images']:,} images could not be read and were left out\n"
    of_best = (
        f", at step {summary['best_step']:,}, the best that is kept"
        if "best_step" in summary
        else ""
    )
    return (
        f"{results}{split} loss {summary[f'{split}_loss']:.4f}{of_best}\n"
        f"{missing if summary['unreadable_images'] else ''}"
        f"{summary['images']:,} images in {duration_text(summary['wall_seconds'])} "
        f"({summary['images_per_second']:,.0f} images/s while training), {summary['exaflops']:.3g} exaFLOPs\n"
        f"checkpoints, metrics and summary.json are in {folder}"
    )
