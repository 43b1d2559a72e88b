"""The composition root: builds the parts of a run, and one step of them for the devices.

`assemble` needs shapes and devices but no data, so the very step that will train can also be
compiled for devices that this machine does not have.

Modules for teachers, phases and masked patches are imported only in runs that have them.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import optax

from vit_jax.config.adaptation import adapt_architecture
from vit_jax.config.architecture import Architecture
from vit_jax.config.check import require_fit, resolve
from vit_jax.config.lengths import Phase, RunSteps
from vit_jax.config.networks import build_architecture, build_named_architecture
from vit_jax.config.schema import AdaptConfig, ModelConfig, OptimizerConfig, RunConfig
from vit_jax.config.variants import parse_name
from vit_jax.evals.running_metrics import choose_metrics, make_metric_rows
from vit_jax.imports.references import is_reference
from vit_jax.objectives import Objective
from vit_jax.optim.by_name import check_patterns, make_is_trained
from vit_jax.optim.schedules import Schedule
from vit_jax.sharding import build_mesh, shard_tree
from vit_jax.train.assembly import Assembly as Assembly

# For training loops of users (docs/examples/training_loop.py).
from vit_jax.train.inputs import Datasets as Datasets
from vit_jax.train.inputs import open_datasets as open_datasets
from vit_jax.train.inputs import open_evaluation_batches as open_evaluation_batches
from vit_jax.train.inputs import open_train_batches as open_train_batches
from vit_jax.train.layout import choose_layout
from vit_jax.train.phases import apply_phase, resize_architecture
from vit_jax.train.state_builder import (
    BuildNetwork,
    Overrides,
    StateBuilder,
    make_state_builder,
)
from vit_jax.train.step import StepParts, make_evaluation_step
from vit_jax.train.step_compiler import (
    JittedEvaluationStep,
    JittedTraining,
    StepCompiler,
    set_shardings,
)

if TYPE_CHECKING:
    from vit_jax.train.teacher import Teacher
    from vit_jax.weights import Weights


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
    teacher_weights: "Weights | None" = None,
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
      optimizer: in the place of the config's. It includes its learning rate; the reported one is the
        schedule's. `frozen` and `trained` of the config hold. It sees parameters by name and layer
        (`optim.optimizers.adapt_optimizer`).
      teacher_weights: weights of `config.objective.teacher`, if they have been read.

    Raises:
      ValueError: values of the config that do not fit each other, the dataset or the devices.
    """
    steps = resolve(config, num_examples=num_examples, num_devices=len(devices))
    require_fit(config, architecture, devices[0].platform)
    overrides = Overrides(
        network=network, objective=objective, schedule=schedule, optimizer=optimizer
    )
    if teacher_weights is None:
        teacher_weights = read_teacher_weights(config)

    builder = make_state_builder(config, architecture, steps, overrides)
    # From here on nothing is `auto`. The lengths in `steps` do not depend on what is chosen.
    config, builder = settle_layout(config, builder, devices, steps.phases, teacher_weights)
    check_optimizer(config.optimizer, builder)

    compiler = make_compiler(config, builder, devices)
    teacher = place_teacher(config, teacher_weights, builder.architecture, compiler)
    run = fit_parts(config, steps, builder, compiler, teacher, overrides, label_shape)
    earlier = [build_phase(run, phase, overrides) for phase in steps.phases]
    return dataclasses.replace(run, earlier=tuple(earlier))


def fit_parts(
    config: RunConfig,
    steps: RunSteps,
    builder: StateBuilder,
    compiler: StepCompiler,
    teacher: "Teacher | None",
    overrides: Overrides,
    label_shape: tuple[int, ...],
) -> Assembly:
    """Return the parts of a run, fitted together, as the only phase."""
    step_parts = build_step_parts(config, builder, steps, overrides, compiler.platform)
    return Assembly(
        config=config,
        steps=steps,
        builder=builder,
        compiler=compiler,
        label_shape=label_shape,
        init_state=compiler.jit_build(builder.init),
        start_from=compiler.jit_build(builder.start_from),
        step_parts=step_parts,
        training=jit_training(compiler, step_parts, teacher),
        evaluation_step=jit_evaluation(compiler, step_parts),
        teacher=teacher,
    )


def settle_layout(
    config: RunConfig,
    builder: StateBuilder,
    devices: Sequence[jax.Device],
    phases: Sequence[Phase],
    teacher_weights: "Weights | None",
) -> tuple[RunConfig, StateBuilder]:
    """Return the config with values in the place of `auto`, and the builder with its network.

    The choice depends on the shapes of the state, which the builder knows. It decides two fields of
    the builder's network: the compute dtype and the rematerialisation.
    """
    config = choose_layout(config, builder, devices, phases, teacher_weights)
    builder = builder.replace_architecture(
        remat=config.model.remat,
        compute_dtype=config.model.compute_dtype,
    )
    return config, builder


def build_phase(run: Assembly, phase: Phase, overrides: Overrides) -> Assembly:
    """Return the parts of an earlier phase of a run, such as one with smaller images.

    A phase has another config and another image size of the network, which the run, its builder and
    its training step hold. State, lengths, layout on the devices, evaluation and teacher are those
    of the run.
    """
    from vit_jax.train.resizing import make_resize

    config = apply_phase(run.config, phase)
    architecture = resize_architecture(run.architecture, phase)
    builder = dataclasses.replace(run.builder, architecture=architecture)
    step_parts = dataclasses.replace(
        run.step_parts,
        config=config,
        architecture=architecture,
        objective=overrides.resolve_objective(config.objective, architecture),
        resize_network=make_resize(
            run.builder.abstract_state.model,
            builder.abstract_state.model,
            run.architecture.grid,
            architecture.grid,
        ),
    )
    return dataclasses.replace(
        run,
        config=config,
        builder=builder,
        step_parts=step_parts,
        training=jit_training(run.compiler, step_parts, run.teacher),
    )


def check_optimizer(config: OptimizerConfig, builder: StateBuilder) -> None:
    """Raise ValueError for patterns that match no parameter, and arguments that suit no update.

    An optimizer by reference may take its arguments and reject them at its first update.
    """
    state = builder.abstract_state
    check_patterns(config, state.model)
    if is_reference(config.name):
        gradients = state.model  # they have its shapes
        jax.eval_shape(builder.optimizer.update, gradients, state.optimizer, state.model)


def make_compiler(
    config: RunConfig,
    builder: StateBuilder,
    devices: Sequence[jax.Device],
) -> StepCompiler:
    """Lay the state out on the devices, for which steps are then compiled."""
    state = builder.abstract_state
    mesh = build_mesh(devices, config.sharding)
    shardings = shard_tree(state, mesh, config.sharding.parameters)
    return StepCompiler(mesh, set_shardings(state, shardings))


def read_teacher_weights(config: RunConfig) -> "Weights | None":
    """Return the weights of `config.objective.teacher`; None for a run without one."""
    if config.objective.teacher is None:
        return None

    from vit_jax.train.teacher import read_teacher

    return read_teacher(config)


def place_teacher(
    config: RunConfig,
    weights: "Weights | None",
    student: Architecture,
    compiler: StepCompiler,
) -> "Teacher | None":
    """Return the teacher on the devices; None without weights."""
    if weights is None:
        return None

    from vit_jax.train.teacher import build_teacher

    return build_teacher(config, weights, student, compiler)


def build_step_parts(
    config: RunConfig,
    builder: StateBuilder,
    steps: RunSteps,
    overrides: Overrides,
    platform: str,
) -> StepParts:
    """Return the parts of the training step for the devices of a platform."""
    return StepParts(
        config=config,
        architecture=builder.architecture,
        objective=overrides.resolve_objective(config.objective, builder.architecture),
        is_trained=make_is_trained(config.optimizer),
        optimizer=builder.optimizer,
        schedule=builder.schedule,
        steps=steps,
        # On GPUs the host would wait for the condition that skips the norm of the update.
        measures_all_updates=steps.log_every == 1 or platform == "gpu",
    )


def jit_training(
    compiler: StepCompiler, parts: StepParts, teacher: "Teacher | None"
) -> JittedTraining:
    """Return the training step, jitted."""
    abstract_teacher = teacher.abstract if teacher is not None else None
    return compiler.jit_training(parts.train_step, abstract_teacher)


def jit_evaluation(compiler: StepCompiler, parts: StepParts) -> JittedEvaluationStep:
    """Build the evaluation step, and jit it."""
    evaluation = parts.config.evaluation
    has_label_sets = any(one.label_sets is not None for one in evaluation.evaluators.values())
    metric_rows = None
    # Rows of metrics need logits, which a network that predicts masked patches does not have.
    if evaluation.metrics or has_label_sets:
        chosen = choose_metrics(evaluation.metrics, "config.evaluation.metrics")
        metric_rows = make_metric_rows(chosen, has_label_sets=has_label_sets)
    step = make_evaluation_step(parts.architecture, parts.objective, metric_rows)
    return compiler.jit_observation(step)


def architecture_of(config: RunConfig, num_classes: int) -> Architecture:
    """Return the network that a run trains, or that a fine-tuning run names before weights are read.

    Raises:
      ValueError: a fine-tuning recipe names none, or no image size.
    """
    if isinstance(config.model, ModelConfig):
        return build_pretraining_network(config, config.model, num_classes)
    return build_finetuning_network(config, config.model, num_classes)


def build_pretraining_network(
    config: RunConfig, model: ModelConfig, num_classes: int
) -> Architecture:
    """Return the network of a pre-training run, which predicts classes or masked patches."""
    num_patch_outputs = 0
    if config.objective.kind == "masked_patch":
        from vit_jax.objectives.masked_patch import count_patch_outputs

        num_classes = 0
        patch_size = parse_name(model.name).patch
        num_patch_outputs = count_patch_outputs(config.objective, patch_size, config.input.channels)
    return build_architecture(
        model,
        image_size=config.input.pixels,
        num_classes=num_classes,
        patch_outputs=num_patch_outputs,
        channels=config.input.channels,
    )


def build_finetuning_network(
    config: RunConfig, model: AdaptConfig, num_classes: int
) -> Architecture:
    """Return the network that a fine-tuning run names, without its weights.

    Raises:
      ValueError: it names none, or no image size.
    """
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
