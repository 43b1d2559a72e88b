"""The composition root: joins the parts of a run into one step for the devices.

`assemble` needs shapes and devices but no data, so the very step that will train can also be
compiled for devices that this machine does not have.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import optax

from vit_jax.config.adaptation import adapt_architecture
from vit_jax.config.architecture import Architecture
from vit_jax.config.check import require_fit, resolve
from vit_jax.config.lengths import Phase
from vit_jax.config.networks import build_architecture, build_named_architecture
from vit_jax.config.schema import (
    AdaptConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ShardingConfig,
)
from vit_jax.config.variants import parse_name
from vit_jax.imports.references import is_reference
from vit_jax.objectives import Objective
from vit_jax.optim.by_name import check_patterns, make_is_trained
from vit_jax.optim.schedules import Schedule
from vit_jax.sharding import build_mesh, shard_tree
from vit_jax.train.assembly import Assembly as Assembly
from vit_jax.train.composition import BuildNetwork, Composition, Trainable, build_trainable
from vit_jax.train.inputs import Datasets as Datasets
from vit_jax.train.inputs import open_datasets as open_datasets
from vit_jax.train.inputs import open_evaluation_batches as open_evaluation_batches
from vit_jax.train.inputs import open_train_batches as open_train_batches
from vit_jax.train.layout import choose_layout
from vit_jax.train.phases import apply_phase, resize_architecture
from vit_jax.train.state import TrainState
from vit_jax.train.step import make_freeze
from vit_jax.train.step_compiler import StepCompiler, set_shardings

if TYPE_CHECKING:
    from vit_jax.weights import Weights


def architecture_of(config: RunConfig, num_classes: int) -> Architecture:
    """Return the network that a run trains, or that a fine-tuning run names before weights are read.

    Raises:
      ValueError: a fine-tuning recipe names none, or no image size.
    """
    model = config.model
    if isinstance(model, ModelConfig):
        num_outputs = 0
        if config.objective.kind == "masked_patch":
            from vit_jax.objectives.masked_patch import count_patch_outputs

            patch_size = parse_name(model.name).patch
            channels = config.input.channels
            num_outputs = count_patch_outputs(config.objective, patch_size, channels)
            num_classes = 0
        return build_architecture(
            model,
            image_size=config.input.pixels,
            num_classes=num_classes,
            patch_outputs=num_outputs,
            channels=config.input.channels,
        )
    if model.name is None:
        raise ValueError(
            "config.model.name=None: must name the network, which is not known without weights. "
            "Use --config.init_from=WEIGHTS, --config.model.name=ViT-B/16, or "
            "--config=configs/finetune.py:ViT-B/16,..."
        )
    if config.input.image_size is None:
        raise ValueError(
            "config.input.image_size=None: must be set where no weights are read. "
            "Use --config.input.image_size=224."
        )
    named = build_named_architecture(model.name)
    return adapt_architecture(
        named,
        model,
        image_size=config.input.image_size,
        num_classes=num_classes,
        channels=config.input.channels,
    )


def assemble(
    config: RunConfig,
    architecture: Architecture,
    *,
    num_examples: int,
    devices: Sequence[jax.Device],
    label_shape: tuple[int, ...] = (),
    network: BuildNetwork | None = None,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    optimizer: optax.GradientTransformation | None = None,
    teacher: "Weights | None" = None,
) -> Assembly:
    """Build a run's parts.

    Args:
      config: a config that `config.validate` accepts.
      architecture: the network, for the dataset's classes.
      num_examples: size of the training split.
      devices: all devices of all processes, or of a topology that is only compiled for.
      label_shape: shape of the label of one image.
      network: (architecture, key) -> module, in the place of the network that `architecture`
        describes.
      objective: in the place of the config's; has its methods `prepare` and `sums`.
      schedule: step -> learning rate, in the place of the config's.
      optimizer: in the place of the config's optimizer and its schedule. `frozen` and `trained` of
        the config hold. It sees parameters by name and layer (`optim.optimizers.adapt_optimizer`).
      teacher: weights of `config.objective.teacher`, if they have been read.

    Raises:
      ValueError: values of the config that do not fit each other, the dataset or the devices.
    """
    steps = resolve(config, num_examples=num_examples, num_devices=len(devices))
    require_fit(config, architecture, devices[0].platform)

    trainable = build_trainable(config, architecture, steps, network, schedule, optimizer)
    teacher = teacher or read_named_teacher(config)
    config = choose_layout(config, trainable, devices, steps.phases, teacher)
    trainable = set_compute_options(trainable, config.model)
    check_optimizer(config.optimizer, trainable)

    composition = Composition(
        steps=steps,
        trainable=trainable,
        compiler=place_state(trainable.abstract_state, config.sharding, devices),
        objective=objective,
        label_shape=label_shape,
    )
    composition = add_teacher(composition, config, teacher)

    freeze = make_freeze(make_is_trained(config.optimizer))
    run = composition.join(config, trainable, freeze)
    phases = [join_phase(composition, run, phase) for phase in steps.phases]
    return dataclasses.replace(run, earlier=tuple(phases))


def read_named_teacher(config: RunConfig) -> "Weights | None":
    """Return the weights of `config.objective.teacher`; None for a run without one."""
    if config.objective.teacher is None:
        return None

    from vit_jax.train.teacher import read_teacher

    return read_teacher(config)


def add_teacher(
    composition: Composition,
    config: RunConfig,
    teacher: "Weights | None",
) -> Composition:
    """Return the composition with a teacher on its devices."""
    if teacher is None:
        return composition

    from vit_jax.train.teacher import build_teacher

    student = composition.trainable.architecture
    placed = build_teacher(config, teacher, student, composition.compiler)
    return dataclasses.replace(composition, teacher=placed)


def set_compute_options(trainable: Trainable, model: ModelConfig | AdaptConfig) -> Trainable:
    """Return the network with the rematerialisation and the dtype that the layout has chosen."""
    assert model.remat != "auto"
    assert model.compute_dtype != "auto"
    architecture = dataclasses.replace(
        trainable.architecture,
        remat=model.remat,
        compute_dtype=model.compute_dtype,
    )
    if architecture == trainable.architecture:
        return trainable
    return dataclasses.replace(trainable, architecture=architecture)


def check_optimizer(config: OptimizerConfig, trainable: Trainable) -> None:
    """Raise ValueError for patterns that match no parameter, and arguments that suit no update.

    An optimizer by reference may take its arguments and reject them at its first update.
    """
    state = trainable.abstract_state
    check_patterns(config, state.model)
    if is_reference(config.name):
        update = trainable.optimizer.update
        jax.eval_shape(update, state.model, state.optimizer, state.model)


def place_state(
    state: TrainState,
    sharding: ShardingConfig,
    devices: Sequence[jax.Device],
) -> StepCompiler:
    """Lay the state out on the devices."""
    mesh = build_mesh(devices, sharding)
    shardings = shard_tree(state, mesh, sharding.parameters)
    return StepCompiler(mesh, set_shardings(state, shardings))


def join_phase(composition: Composition, run: Assembly, phase: Phase) -> Assembly:
    """Join the parts of an earlier phase: its training step takes images of another size.

    State and evaluation are those of the run.
    """
    from vit_jax.train.resizing import make_resize

    config = apply_phase(run.config, phase)
    architecture = resize_architecture(run.architecture, phase)
    of_phase = dataclasses.replace(composition.trainable, architecture=architecture)
    resize = make_resize(
        run.abstract_state.model,
        of_phase.abstract_state.model,
        run.architecture.grid,
        architecture.grid,
    )
    freeze = run.step_parts.prepare_network
    parts = composition.join(config, of_phase, lambda model: resize(freeze(model)))
    return dataclasses.replace(parts, evaluation_step=run.evaluation_step)
