"""Check that a recipe can start, without the devices of the run.

Data and weights may be on other machines.
"""

import math
import pathlib
from collections.abc import Iterator

import jax

from vit_jax.config import Architecture, FinetuneConfig, PretrainConfig, RunConfig
from vit_jax.config.check import validate
from vit_jax.config.durations import parse_duration
from vit_jax.data.sources import find_data_path
from vit_jax.storage.files import expand_path
from vit_jax.text.printable import first_line
from vit_jax.tools.plan.dataset import count_examples, find_dataset
from vit_jax.tools.plan.estimate import find_network
from vit_jax.tools.plan.topology import StandIn
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.evaluations import require_possible_evaluators
from vit_jax.train.inputs import Datasets, open_datasets, require_known_datasets
from vit_jax.train.start import fitting_weights, steps_to_continue
from vit_jax.train.starting_weights import adapt, set_open_size
from vit_jax.train.state_builder import architecture_of
from vit_jax.weights.hub import is_hub_address

_ENOUGH_EXAMPLES = 10**9
"""Images to assemble a run with whose number is unknown: no length is too long for them.

Steps that depend on this number are not printed."""
_UNKNOWN_CLASSES = 1000


def check_start(
    recipe: str,
    config: RunConfig,
    *,
    num_devices: int | None = None,
    num_slices: int = 1,
    remote: pathlib.Path | None = None,
) -> list[str]:
    """Build the abstract network, optimiser and sharding of a run, and trace a training step.

    Data and weights of this machine are opened.

    Args:
      recipe: its name on the command line.
      config: the loaded recipe.
      num_devices: number of devices of all processes; None: the smallest number that
        `config.sharding` allows.
      num_slices: number of slices, or nodes of GPUs.
      remote: folder that only the machines of the run have: paths below it are not opened.

    Returns:
      One line on the network and the data; with `remote`, one line for each path.

    Raises:
      ValueError: the run cannot start.
    """
    validate(config)
    require_known_datasets(config)
    paths = [] if remote is None else list(_list_paths(config))
    remote_paths = [path for path in paths if path.is_relative_to(str(remote))]
    data = None
    description = f"{config.data} is not visible from here"
    if set(remote_paths).isdisjoint(_list_data_paths(config)):
        data = open_datasets(config)
        description = _describe_data(config, data)

    devices = _make_stand_ins(config, num_devices, num_slices)
    run = _assemble(recipe, config, data, devices, remote_paths)
    if run is None:
        network = f"the network is that of {config.init_from}, and is not checked"
    else:
        _check_run(run, data, remote_paths)
        is_length_known = data is not None or count_examples(recipe, config) is not None
        network = _describe_run(run, is_length_known=is_length_known)

    lines = [f"checked: {network}; {description}"]
    for path in paths:
        state = "not visible from" if path in remote_paths else "looked for"
        lines.append(f"{state} here: {path}")
    return lines


def _list_paths(config: RunConfig) -> Iterator[pathlib.Path]:
    """Yield the files and folders that a run reads."""
    yield from _list_data_paths(config)
    for start in (config.init_from, getattr(config, "resume_from", None)):
        if start is not None and not is_hub_address(start):
            yield expand_path(start)


def _list_data_paths(config: RunConfig) -> list[pathlib.Path]:
    """Return the files and folders of data, also of evaluators.

    Without any, return the folder of prepared datasets.
    """
    names = [config.data]
    names += [evaluator.data for evaluator in config.evaluation.evaluators.values()]
    paths = []
    for name in names:
        path = None if name is None else find_data_path(name, config.input.data_dir)
        if path is not None and path not in paths:
            paths.append(path)
    if not paths and config.input.data_dir is not None:
        paths.append(expand_path(config.input.data_dir))
    return paths


def _describe_data(config: RunConfig, data: Datasets) -> str:
    sizes = f"{len(data.train):,} training and {len(data.test):,} test images"
    return f"{config.data} with {sizes} of {data.train.num_classes:,} classes"


def _assemble(
    recipe: str,
    config: RunConfig,
    data: Datasets | None,
    devices: list[StandIn],
    remote_paths: list[pathlib.Path],
) -> Assembly | None:
    """Return the run; None if its network depends on weights that are remote or unread."""
    label_shape: tuple[int, ...] = ()
    if data is not None:
        num_examples = len(data.train)
        num_classes = data.train.num_classes
        label_shape = data.train.label_shape
    else:
        num_examples = count_examples(recipe, config) or _ENOUGH_EXAMPLES
        known = find_dataset(recipe, config)
        num_classes = _UNKNOWN_CLASSES if known is None else known.num_classes

    network = _build_architecture(config, data, num_classes, remote_paths)
    if network is None:
        return None
    architecture, config = network
    return assemble(
        config,
        architecture,
        num_examples=num_examples,
        devices=devices,  # type: ignore[arg-type]
        label_shape=label_shape,
    )


def _build_architecture(
    config: RunConfig,
    data: Datasets | None,
    num_classes: int,
    remote_paths: list[pathlib.Path],
) -> tuple[Architecture, RunConfig] | None:
    """Return the network, and the config with its open values.

    A fine-tuning run has them from its weights if they are here. None: only the weights on the
    machines of the run know the network.
    """
    if not isinstance(config, FinetuneConfig) or config.init_from is None:
        return architecture_of(config, num_classes), config
    if expand_path(config.init_from) in remote_paths:
        if config.model.name is None:
            return None
        return architecture_of(config, num_classes), config
    if data is None:
        architecture = find_network(config, num_classes).architecture
        return architecture, set_open_size(config, architecture)
    start = adapt(config, data.train)
    return start.architecture, start.config


def _check_run(
    run: Assembly,
    data: Datasets | None,
    remote_paths: list[pathlib.Path],
) -> None:
    """Check evaluators and starting weights, and trace a training step."""
    config = run.config
    sources = None if data is None else data.train_sources
    require_possible_evaluators(config, run.architecture, sources)
    if isinstance(config, PretrainConfig):
        if config.init_from is not None and expand_path(config.init_from) not in remote_paths:
            fitting_weights(run)
        if config.resume_from is not None and pathlib.Path(config.resume_from) not in remote_paths:
            steps_to_continue(run)
    try:
        run.trace_train_step()
    except TypeError as error:  # also of jax, for shapes that do not fit
        raise ValueError(f"A training step cannot be traced: {first_line(error)}") from error


def _make_stand_ins(
    config: RunConfig,
    num_devices: int | None,
    num_slices: int,
) -> list[StandIn]:
    """Return devices in name only, by default the fewest that the sharding and the slices allow."""
    sharding = config.sharding
    count = num_devices
    if not count:
        smallest_mesh = (sharding.num_replicas or 1) * sharding.num_model_shards
        count = math.lcm(smallest_mesh, num_slices)
    if count % num_slices:
        raise ValueError(f"--devices={count}: must be divisible by --slices={num_slices}.")

    platform = "cpu" if num_slices == 1 else "tpu"
    if config.model.attention == "cudnn":
        platform = "gpu"
    devices_per_slice = count // num_slices
    devices = []
    for index in range(count):
        slice_index, position = divmod(index, devices_per_slice)
        devices.append(
            StandIn(
                id=index,
                platform=platform,
                device_kind=platform,
                coords=(position, 0, 0),
                process_index=slice_index,
                slice_index=slice_index,
            )
        )
    return devices


def _describe_run(run: Assembly, *, is_length_known: bool) -> str:
    shape = run.batch_sharding.mesh.shape
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.abstract_state.model))
    mesh = " x ".join(f"{size} {axis}" for axis, size in shape.items())
    num_devices = math.prod(shape.values())
    devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
    global_batch = run.config.global_batch
    length = f"{run.steps.total:,} steps of {global_batch:,} images"
    if not is_length_known and parse_duration(run.config.total)[1] == "epochs":
        length = f"{run.config.total} of unknown size in steps of {global_batch:,} images"
    return (
        f"{run.architecture.name} with {parameters:,} parameters, {run.config.optimizer.name}, "
        f"{length} on {devices} ({mesh})"
    )
