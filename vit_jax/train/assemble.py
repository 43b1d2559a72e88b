"""The composition root: builds the parts of a run, and its jitted steps for the devices.

`assemble` needs shapes and devices but no data, so the very step that will train can also be
compiled for devices that this machine does not have. It makes, in this order:

1. `StateBuilder`: the network and the optimizer, which build the first state of the run;
2. `StepCompiler`: the devices, the layout of the state on them, and how steps are jitted;
3. `StepParts`: the training step as a pure function;
4. `Assembly`: all of these, and the jitted steps. A run with phases, such as one that begins with
   smaller images, is the `Assembly` of its last phase; `earlier` has those of the others.

Modules for teachers, phases and masked patches are imported only in runs that have them.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import optax

from vit_jax.config.architecture import Architecture
from vit_jax.config.check import require_fit, resolve
from vit_jax.config.lengths import Phase, RunSteps
from vit_jax.config.schema import OptimizerConfig, RunConfig
from vit_jax.evals.running_metrics import choose_metrics, make_metric_rows
from vit_jax.imports.references import is_reference
from vit_jax.objectives import Objective
from vit_jax.optim.by_name import check_patterns, find_trained
from vit_jax.optim.schedules import Schedule
from vit_jax.sharding import build_mesh, compiler_options, shard_tree
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import (
    Datasets,
    open_datasets,
    open_evaluation_batches,
    open_train_batches,
)
from vit_jax.train.layout import choose_layout
from vit_jax.train.phases import apply_phase, resize_architecture
from vit_jax.train.state_builder import (
    BuildNetwork,
    Overrides,
    StateBuilder,
    architecture_of,
    make_state_builder,
)
from vit_jax.train.step import StepParts, make_evaluation_step
from vit_jax.train.step_compiler import (
    JittedEvaluationStep,
    JittedTraining,
    StepCompiler,
    set_shardings,
)
from vit_jax.train.step_norms import choose_norms

if TYPE_CHECKING:
    from vit_jax.train.teacher import Teacher
    from vit_jax.weights import Weights

# Training loops of users import these from here (docs/examples/training_loop.py).
__all__ = [
    "Assembly",
    "Datasets",
    "architecture_of",
    "assemble",
    "open_datasets",
    "open_evaluation_batches",
    "open_train_batches",
]


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
      architecture: the network, for the dataset's classes; `architecture_of` makes it.
      num_examples: size of the training split.
      devices: all devices of all processes, or of a topology that is only compiled for.
      label_shape: shape of the label of one image.
      network: (architecture, key) -> module, in the place of the network that `architecture`
        describes.
      objective: in the place of the config's; an object with methods `prepare` and `sums`.
      schedule: step -> learning rate, in the place of the config's.
      optimizer: in the place of the config's. It has its own learning rate; that of the schedule is
        then only reported. `config.optimizer.frozen` and `.trained` still apply.
        `optim.optimizers.adapt_optimizer` says how it sees the parameters.
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

    resolved_config, builder = resolve_layout(
        config, architecture, steps, overrides, devices, teacher_weights
    )
    check_optimizer(resolved_config.optimizer, builder)

    compiler = make_compiler(resolved_config, builder, devices)
    teacher = place_teacher(resolved_config, teacher_weights, builder.architecture, compiler)

    # Each phase chooses its objective, which may need the size of its network. The builder has taken
    # the other overrides.
    chosen_objective = overrides.resolve_objective(resolved_config.objective, builder.architecture)
    step_parts = build_step_parts(
        resolved_config, builder, steps, chosen_objective, compiler.platform
    )

    # Earlier phases are variants of the last one, whose network has the parameters of the state.
    last_phase = build_last_phase(step_parts, builder, compiler, teacher, label_shape)
    earlier = [build_earlier_phase(last_phase, phase, overrides) for phase in steps.earlier_phases]
    return dataclasses.replace(last_phase, earlier=tuple(earlier))


def resolve_layout(
    config: RunConfig,
    architecture: Architecture,
    steps: RunSteps,
    overrides: Overrides,
    devices: Sequence[jax.Device],
    teacher_weights: "Weights | None",
) -> tuple[RunConfig, StateBuilder]:
    """Return the config with a value for every "auto", such as the sharding, and the builder for it.

    The choice needs the shapes of the state, so there is a provisional builder first. No value
    changes these shapes. The builder of the run differs in the two values that the network uses.
    """
    provisional = make_state_builder(config, architecture, steps, overrides)
    resolved_config = choose_layout(
        config, provisional, devices, steps.earlier_phases, teacher_weights
    )
    builder = provisional.replace_architecture(
        remat=resolved_config.model.remat,
        compute_dtype=resolved_config.model.compute_dtype,
    )
    return resolved_config, builder


def build_last_phase(
    step_parts: StepParts,
    builder: StateBuilder,
    compiler: StepCompiler,
    teacher: "Teacher | None",
    label_shape: tuple[int, ...],
) -> Assembly:
    """Return the assembly of the last, or only, phase of a run."""
    return Assembly(
        config=step_parts.config,
        steps=step_parts.steps,
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


def build_earlier_phase(last: Assembly, phase: Phase, overrides: Overrides) -> Assembly:
    """Return the assembly of an earlier phase, a variant of that of the last one.

    The state has the parameters of the last network in all phases; an earlier phase uses them
    resized. Its config and its network differ, in the builder and in the training step. All else is
    shared: state, lengths, layout on the devices, evaluation, teacher.
    """
    from vit_jax.train.resizing import make_resize

    config = apply_phase(last.config, phase)
    architecture = resize_architecture(last.architecture, phase)
    builder = dataclasses.replace(last.builder, architecture=architecture)
    step_parts = dataclasses.replace(
        last.step_parts,
        config=config,
        architecture=architecture,
        objective=overrides.resolve_objective(config.objective, architecture),
        resize_network=make_resize(
            last.builder.abstract_state.model,
            builder.abstract_state.model,
            last.architecture.grid,
            architecture.grid,
        ),
    )
    return dataclasses.replace(
        last,
        config=config,
        builder=builder,
        step_parts=step_parts,
        training=jit_training(last.compiler, step_parts, last.teacher),
    )


def check_optimizer(config: OptimizerConfig, builder: StateBuilder) -> None:
    """Raise ValueError for patterns that match no parameter, and wrong arguments of an optimizer.

    An optimizer by reference may take its arguments and reject them at its first update, so this is
    tried without computing.
    """
    state = builder.abstract_state
    check_patterns(config, state.model)
    if is_reference(config.name):
        gradients = state.model  # arrays of the same shapes
        jax.eval_shape(builder.optimizer.update, gradients, state.optimizer, state.model)


def make_compiler(
    config: RunConfig,
    builder: StateBuilder,
    devices: Sequence[jax.Device],
) -> StepCompiler:
    """Return the compiler of steps for the devices, with the layout of the state on them."""
    state = builder.abstract_state
    mesh = build_mesh(devices, config.sharding)
    shardings = shard_tree(state, mesh, config.sharding.parameters)
    has_units = bool(builder.architecture.units)
    options = compiler_options(mesh, has_units)
    return StepCompiler(mesh, set_shardings(state, shardings), options)


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
    objective: Objective,
    platform: str,
) -> StepParts:
    """Return the parts of the training step for the devices of a platform."""
    return StepParts(
        config=config,
        architecture=builder.architecture,
        objective=objective,
        trained=find_trained(config.optimizer),
        optimizer=builder.optimizer,
        schedule=builder.schedule,
        steps=steps,
        norms=choose_norms(config, steps, platform),
    )


def jit_training(
    compiler: StepCompiler, parts: StepParts, teacher: "Teacher | None"
) -> JittedTraining:
    """Return the training step, jitted."""
    abstract_teacher = teacher.abstract if teacher is not None else None
    return compiler.jit_training(parts.train_step, abstract_teacher)


def jit_evaluation(compiler: StepCompiler, parts: StepParts) -> JittedEvaluationStep:
    """Return the evaluation step, jitted."""
    evaluation = parts.config.evaluation
    evaluators = evaluation.evaluators.values()
    has_label_sets = any(evaluator.label_sets is not None for evaluator in evaluators)
    if evaluation.metrics or has_label_sets:
        chosen = choose_metrics(evaluation.metrics, "config.evaluation.metrics")
        metric_rows = make_metric_rows(chosen, has_label_sets=has_label_sets)
    else:
        metric_rows = None  # the network may have no logits to make rows from
    step = make_evaluation_step(parts.architecture, parts.objective, metric_rows)
    return compiler.jit_read_only(step)
