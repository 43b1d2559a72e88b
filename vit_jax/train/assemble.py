"""The composition root: joins the parts of a run into one step for the devices.

`assemble` needs shapes and devices but no data, so the very step that will train can also be
compiled for devices that this machine does not have.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import optax
from flax import nnx

from vit_jax.config.adaptation import adapt_architecture
from vit_jax.config.architecture import Architecture
from vit_jax.config.check import require_fit, resolve
from vit_jax.config.lengths import Phase, RunSteps
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
from vit_jax.models.block import find_attention_form
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.objectives import Objective
from vit_jax.optim.by_name import check_patterns
from vit_jax.optim.schedules import Schedule, build_schedule
from vit_jax.sharding import build_mesh, shard_tree
from vit_jax.train.assembly import Assembly as Assembly
from vit_jax.train.composition import BuildNetwork, Composition, Trainable
from vit_jax.train.inputs import Datasets as Datasets
from vit_jax.train.inputs import open_datasets as open_datasets
from vit_jax.train.inputs import open_evaluation_batches as open_evaluation_batches
from vit_jax.train.inputs import open_train_batches as open_train_batches
from vit_jax.train.layout import resolve_layout
from vit_jax.train.phases import apply_phase, resize_architecture
from vit_jax.train.state import TrainState
from vit_jax.train.step import make_prepare_batch
from vit_jax.train.step_compiler import StepCompiler, set_shardings


def architecture_of(config: RunConfig, num_classes: int) -> Architecture:
    """Return the network that a run trains, or that a fine-tuning run names before weights are read.

    Raises:
      ValueError: a fine-tuning recipe names none.
    """
    model = config.model
    image_size = config.input.image_size
    if isinstance(model, ModelConfig):
        num_outputs = 0
        if config.objective.kind == "masked_patch":
            from vit_jax.objectives.masked_patch import count_patch_outputs

            num_outputs = count_patch_outputs(config.objective, parse_name(model.name).patch)
            num_classes = 0
        return build_architecture(
            model,
            image_size=image_size,
            num_classes=num_classes,
            patch_outputs=num_outputs,
        )
    if model.name is None:
        raise ValueError(
            "config.model.name=None: must name the network, which is not known without weights. "
            "Use --config.model.name=ViT-B/16, or --config=configs/finetune.py:ViT-B/16,..."
        )
    named = build_named_architecture(model.name)
    return adapt_architecture(named, model, image_size=image_size, num_classes=num_classes)


def schedule_of(config: RunConfig, steps: RunSteps) -> Schedule:
    """Return the learning rate of a run by the number of steps done."""
    return build_schedule(config.schedule, steps)


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

    Raises:
      ValueError: values of the config that do not fit each other, the dataset or the devices.
    """
    steps = resolve(config, num_examples=num_examples, num_devices=len(devices))
    require_fit(config, architecture, devices[0].platform)
    composition = Composition(
        steps,
        network=network,
        objective=objective,
        schedule=schedule,
        optimizer=optimizer,
    )
    trainable = composition.build_trainable(
        config.seed, architecture, config.optimizer, config.schedule, config.polyak
    )

    state = trainable.shape_state(architecture)
    laid_out = choose_layout(
        config,
        architecture,
        state,
        devices,
        steps.phases,
        is_standard=network is None,
    )
    if steps.phases:  # micro-batches must divide every batch
        resolve(laid_out, num_examples=num_examples, num_devices=len(devices))

    planned = set_remat(architecture, laid_out.model)
    planned_state = state if planned == architecture else trainable.shape_state(planned)
    check_optimizer(laid_out.optimizer, trainable.optimizer, planned_state)
    compiler = place_state(planned_state, laid_out.sharding, devices)
    return build_assembly(laid_out, planned, composition, trainable, compiler, label_shape)


def choose_layout(
    config: RunConfig,
    architecture: Architecture,
    state: TrainState,
    devices: Sequence[jax.Device],
    phases: Sequence[Phase],
    *,
    is_standard: bool,
) -> RunConfig:
    """Return the config with values in the place of `auto`: a layout for the largest phase."""
    sizes = [(config, architecture)]
    for phase in phases:
        sizes.append((apply_phase(config, phase), resize_architecture(architecture, phase)))

    def count_patches(size: tuple[RunConfig, Architecture]) -> int:
        return size[0].global_batch * math.prod(size[1].grid)

    largest_config, largest = max(sizes, key=count_patches)
    layout = resolve_layout(largest_config, largest, state, devices, is_standard=is_standard)
    sections = {
        "model": layout.model,
        "optimizer": layout.optimizer,
        "sharding": layout.sharding,
    }
    return dataclasses.replace(config, **sections)  # type: ignore[arg-type]


def set_remat(architecture: Architecture, model: ModelConfig | AdaptConfig) -> Architecture:
    """Return the network with the policy of rematerialisation that the layout has chosen."""
    assert model.remat != "auto"
    return dataclasses.replace(architecture, remat=model.remat)


def place_state(
    state: TrainState,
    sharding: ShardingConfig,
    devices: Sequence[jax.Device],
) -> StepCompiler:
    """Lay the state out on the devices."""
    mesh = build_mesh(devices, sharding)
    shardings = shard_tree(state, mesh, sharding.parameters)
    return StepCompiler(mesh, set_shardings(state, shardings))


def check_optimizer(
    config: OptimizerConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
) -> None:
    """Raise ValueError for patterns that match no parameter, and arguments that suit no update.

    An optimizer by reference may take its arguments and reject them at its first update.
    """
    check_patterns(config, state.model)
    if is_reference(config.name):
        jax.eval_shape(optimizer.update, state.model, state.optimizer, state.model)


def build_assembly(
    config: RunConfig,
    architecture: Architecture,
    composition: Composition,
    trainable: Trainable,
    compiler: StepCompiler,
    label_shape: tuple[int, ...],
) -> Assembly:
    """Join the parts of a run, whose config has no `auto` any more."""
    state = compiler.abstract_state
    programs = composition.build_programs(
        architecture,
        trainable,
        compiler,
        config.input,
        config.objective,
        config.optimizer,
        config.polyak,
        config.evaluation,
    )
    batches = composition.place_batches(
        compiler,
        config.global_batch,
        config.evaluation,
        label_shape,
    )
    init = functools.partial(trainable.init, architecture)
    run = Assembly(
        config=config,
        steps=composition.steps,
        architecture=architecture,
        batch_sharding=batches.sharding,
        label_shape=batches.label_shape,
        evaluation_batch=batches.evaluation_batch,
        forward_macs=count_forward_macs(architecture, state.model, composition),
        training_flops_per_image=count_training_flops(architecture, state.model, composition),
        abstract_state=state,
        init_state=compiler.jit_build(init),
        state_of=compiler.jit_build(trainable.start_from),
        step_parts=programs.step_parts,
        compiler=compiler,
        train_step=programs.train_step,
        train_step_of_leaves=programs.train_step_of_leaves,
        evaluation_step=programs.evaluation_step,
        attention_form=make_attention_form(architecture, composition, compiler),
    )
    phases = [build_phase(run, phase, composition, trainable) for phase in composition.steps.phases]
    return dataclasses.replace(run, earlier=tuple(phases))


def build_phase(
    run: Assembly,
    phase: Phase,
    composition: Composition,
    trainable: Trainable,
) -> Assembly:
    """Return the parts of a run for a phase: its training step takes images of another size.

    The state, and so its evaluation, are those of the run.
    """
    from vit_jax.train.resizing import make_resize, resize_loss

    config = apply_phase(run.config, phase)
    architecture = resize_architecture(run.architecture, phase)
    model = trainable.shape_state(architecture).model
    resize = make_resize(run.abstract_state.model, model, run.architecture.grid, architecture.grid)
    objective = composition.build_objective(config.objective, architecture)
    parts = dataclasses.replace(
        run.step_parts,
        prepare_batch=make_prepare_batch(config.input, config.objective, architecture, objective),
        loss=resize_loss(run.step_parts.loss, objective, resize),
    )
    return dataclasses.replace(
        run,
        config=config,
        architecture=architecture,
        forward_macs=count_forward_macs(architecture, model, composition),
        training_flops_per_image=count_training_flops(architecture, model, composition),
        step_parts=parts,
        train_step=run.compiler.jit_train_step(parts.train_step),
        train_step_of_leaves=run.compiler.jit_train_step_of_leaves(parts.train_step),
        attention_form=make_attention_form(architecture, composition, run.compiler),
    )


def count_forward_macs(
    architecture: Architecture,
    model: nnx.Module,
    composition: Composition,
    *,
    count_padding: bool = True,
) -> int:
    """Return the multiply-adds of one image's forward pass; a network of the caller is traced."""
    if composition.is_standard:
        return forward_macs(architecture, None, count_padding=count_padding)
    return forward_macs(architecture, model, count_padding=count_padding)


def count_training_flops(
    architecture: Architecture,
    model: nnx.Module,
    composition: Composition,
) -> int:
    """Return the FLOPs of one image's forward and backward pass, without padding."""
    macs = count_forward_macs(architecture, model, composition, count_padding=False)
    return FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * macs


def make_attention_form(
    architecture: Architecture,
    composition: Composition,
    compiler: StepCompiler,
) -> Callable[[], str] | None:
    """Return the function that names the form of attention; None without standard blocks."""
    if not composition.is_standard or not architecture.is_standard:
        return None
    if not architecture.has_transformer:
        return None
    return compiler.place(functools.partial(find_attention_form, architecture))
