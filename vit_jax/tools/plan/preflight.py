"""Check that a recipe can start, without the devices of the run and, where these are elsewhere, without its data."""

import math
import pathlib
from collections.abc import Iterator

import jax

from vit_jax.config import Architecture, FinetuneConfig, PretrainConfig, RunConfig
from vit_jax.config.check import validate
from vit_jax.data.sources import path_of
from vit_jax.storage.files import expanded
from vit_jax.text.printable import first_line
from vit_jax.tools.plan.dataset import known_dataset, known_examples
from vit_jax.tools.plan.topology import StandIn
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.evaluations import require_possible_evaluators
from vit_jax.train.inputs import Datasets, open_datasets, require_known_datasets
from vit_jax.train.start import fitting_weights, steps_to_continue
from vit_jax.train.starting_weights import adapt
from vit_jax.weights.hub import is_hub_address

_UNKNOWN_EXAMPLES = 10**9  # so large that no length of a run is too long for it
_UNKNOWN_CLASSES = 1000


def check_start(
    recipe: str,
    config: RunConfig,
    *,
    num_devices: int | None = None,
    num_slices: int = 1,
    remote: pathlib.Path | None = None,
) -> list[str]:
    """Build the abstract network, optimiser and sharding of a run, trace a training step, and open what the run reads.

    Args:
      recipe: as on the command line.
      config: as loaded.
      num_devices: of all processes; None: the smallest number that `config.sharding` allows.
      num_slices: of these devices, or nodes of GPUs.
      remote: folder that only the machines of the run have: paths below it are not opened.

    Returns:
      One line on what was checked; with `remote`, one line for each path.

    Raises:
      ValueError: the run cannot start.
    """
    validate(config)
    require_known_datasets(config)
    paths = [] if remote is None else [*_paths(config)]
    unseen = [path for path in paths if path.is_relative_to(str(remote))]
    data, about = _open(config, unseen)
    if data is not None:
        num_classes = data.train.num_classes
        num_examples = len(data.train)
        shape = data.train.label_shape
    else:
        num_examples = known_examples(recipe, config) or _UNKNOWN_EXAMPLES
        known = known_dataset(recipe, config)
        num_classes = _UNKNOWN_CLASSES if known is None else known.num_classes
        shape = ()
    devices = _stand_ins(config, num_devices, num_slices)
    if (architecture := _architecture(config, data, num_classes, unseen)) is None:
        network = f"the network is that of {config.init_from}, and is not checked"
    else:
        run = assemble(
            config,
            architecture,
            num_examples=num_examples,
            devices=devices,  # type: ignore[arg-type]
            label_shape=shape,
        )
        require_possible_evaluators(
            config, architecture, None if data is None else data.train_sources
        )
        if isinstance(config, PretrainConfig):
            if config.init_from is not None and expanded(config.init_from) not in unseen:
                fitting_weights(run)
            if config.resume_from is not None and pathlib.Path(config.resume_from) not in unseen:
                steps_to_continue(run)
        try:
            run.trace_train_step()
        except TypeError as error:  # also of jax, for shapes that do not fit
            raise ValueError(f"A training step cannot be traced: {first_line(error)}") from error
        network = _describe(run)
    where = (
        f"{'not visible from' if path in unseen else 'looked for'} here: {path}" for path in paths
    )
    return [f"checked: {network}; {about}", *where]


def _paths(config: RunConfig) -> Iterator[pathlib.Path]:
    """Yield the files and folders that a run reads."""
    yield from _data_paths(config)
    for start in (config.init_from, getattr(config, "resume_from", None)):
        if start is not None and not is_hub_address(start):
            yield expanded(start)


def _data_paths(config: RunConfig) -> Iterator[pathlib.Path]:
    """Yield the files and folders of data, also of evaluators; without any, the folder of prepared datasets."""
    data = [config.data, *(evaluator.data for evaluator in config.evaluation.evaluators.values())]
    paths = [path_of(name, config.input.data_dir) for name in data if name is not None]
    found = [path for path in paths if path is not None]
    yield from dict.fromkeys(found)
    if not found and config.input.data_dir is not None:
        yield expanded(config.input.data_dir)


def _open(config: RunConfig, unseen: list[pathlib.Path]) -> tuple[Datasets | None, str]:
    """Return the datasets, None if they are elsewhere, and a description of them."""
    if not {*unseen}.isdisjoint(_data_paths(config)):
        return None, f"{config.data} is not visible from here"
    data = open_datasets(config)
    sizes = f"{len(data.train):,} training and {len(data.test):,} test images"
    return data, f"{config.data} with {sizes} of {data.train.num_classes:,} classes"


def _architecture(
    config: RunConfig, data: Datasets | None, num_classes: int, unseen: list[pathlib.Path]
) -> Architecture | None:
    """Return the network; of a fine-tuning run that of its weights, if they and the data are here.

    None: it is that of weights, and they or the data are elsewhere.
    """
    if isinstance(config, FinetuneConfig) and config.init_from is not None:
        if data is not None and expanded(config.init_from) not in unseen:
            return adapt(config, data.train)[0]
        if config.model.name is None:
            return None
    return architecture_of(config, num_classes)


def _stand_ins(config: RunConfig, num_devices: int | None, num_slices: int) -> list[StandIn]:
    sharding = config.sharding
    count = num_devices or math.lcm(
        (sharding.num_replicas or 1) * sharding.num_model_shards, num_slices
    )
    if count % num_slices:
        raise ValueError(f"--devices={count}: must be divisible by --slices={num_slices}.")
    platform = "gpu" if config.model.attention == "cudnn" else "cpu" if num_slices == 1 else "tpu"
    per_slice = count // num_slices
    return [
        StandIn(
            i, platform, platform, (i % per_slice, 0, 0), i // per_slice, slice_index=i // per_slice
        )
        for i in range(count)
    ]


def _describe(run: Assembly) -> str:
    shape = run.batch_sharding.mesh.shape
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.abstract_state.model))
    mesh = " x ".join(f"{size} {axis}" for axis, size in shape.items())
    count = math.prod(shape.values())
    return (
        f"{run.architecture.name} with {parameters:,} parameters, {run.config.optimizer.name}, {run.steps.total:,} "
        f"steps of {run.config.global_batch:,} images on {count} device{'s' * (count > 1)} ({mesh})"
    )
