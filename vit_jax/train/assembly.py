"""The parts of a run, fitted together: phases, executables, images and FLOPs of its steps."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from vit_jax import pytree
from vit_jax.arrays import Batch, abstract_batch
from vit_jax.config import Architecture, RunConfig, RunSteps
from vit_jax.config.lengths import Phase
from vit_jax.models.attention import find_attention_form
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.sharding import batch_sharding
from vit_jax.train.phases import apply_phase, shrink_sequence
from vit_jax.train.state import TrainState
from vit_jax.train.state_builder import StateBuilder
from vit_jax.train.step import Metrics, StepParts, TeacherNetwork
from vit_jax.train.step_compiler import (
    JittedEvaluationStep,
    JittedLeavesStep,
    JittedTraining,
    JittedTrainStep,
    Leaves,
    StepCompiler,
)

if TYPE_CHECKING:
    from vit_jax.train.teacher import Teacher

Executable = Callable[..., tuple[Leaves, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembly:
    """A run's parts, fitted together; nothing has been computed yet.

    Attributes:
      config: config of the run, with values in the place of `auto`.
      steps: lengths of the run.
      builder: the network and the optimizer.
      compiler: jits steps for the devices of the run, and knows the layout of its state.
      label_shape: shape of the label of an image: (), or (num_classes,) for several labels.
      init_state: returns the state before the first step, with parameters drawn by the seed.
      start_from: returns the state before the first step, with the parameters of a model.
      step_parts: the parts of the training step.
      training: the training step, jitted; it reuses the memory of the old state.
      evaluation_step: (state, batch) -> sums over the batch, and rows of its images.
      teacher: the teacher of a distillation, the last argument of a step; None without one.
      earlier: the parts for each of `steps.earlier_phases`; state and evaluation are the run's.
    """

    config: RunConfig
    steps: RunSteps
    builder: StateBuilder
    compiler: StepCompiler
    label_shape: tuple[int, ...]
    init_state: Callable[[], TrainState]
    start_from: Callable[[nnx.Module], TrainState]
    step_parts: StepParts
    training: JittedTraining
    evaluation_step: JittedEvaluationStep
    teacher: "Teacher | None" = None
    earlier: tuple["Assembly", ...] = ()

    @property
    def architecture(self) -> Architecture:
        """The network."""
        return self.builder.architecture

    @property
    def train_step(self) -> JittedTrainStep:
        """(state, batch) -> (state, metrics)."""
        return self.training.step

    @property
    def train_step_of_leaves(self) -> JittedLeavesStep:
        """The training step for the leaves of a state by name."""
        return self.training.step_of_leaves

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.compiler.abstract_state

    @property
    def training_architecture(self) -> Architecture:
        """The network with the sequence length of training, for formulas of its cost."""
        return shrink_sequence(self.architecture, self.config)

    @functools.cached_property
    def forward_macs(self) -> int:
        """Multiply-adds of one image's forward pass, padding included."""
        return forward_macs(self.architecture, self.builder.custom_network)

    @functools.cached_property
    def training_flops_per_image(self) -> int:
        """FLOPs of training on an image, without padding, with the forward pass of a teacher."""
        num_kept = None
        if self.config.input.patch_dropout:
            num_kept = self.architecture.count_kept_patches(self.config.input.patch_dropout)
        macs = forward_macs(
            self.architecture,
            self.builder.custom_network,
            count_padding=False,
            num_kept=num_kept,
        )
        flops = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * macs
        if self.teacher is None:
            return flops
        teacher_macs = forward_macs(self.teacher.architecture, count_padding=False)
        return flops + FLOPS_PER_MAC * teacher_macs

    @property
    def attention_form(self) -> Callable[[], str] | None:
        """The function that returns the form of attention of the standard blocks on the devices.

        None without such blocks.
        """
        a = self.training_architecture
        if not (self.builder.is_standard and a.is_standard and a.has_transformer):
            return None
        return self.compiler.place(functools.partial(find_attention_form, a))

    @property
    def teacher_network(self) -> TeacherNetwork | None:
        """The teacher with its parameters on the devices; None without one."""
        if self.teacher is None:
            return None
        return self.teacher.network

    def require_classes(self, class_names: Sequence[str]) -> None:
        """Raise ValueError if the run has a teacher whose outputs are not these classes."""
        if self.teacher is not None:
            self.teacher.require_classes(class_names)

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of every array of a batch."""
        return batch_sharding(self.compiler.mesh)

    @property
    def evaluation_batch(self) -> int:
        """Examples of one evaluation step."""
        return self.config.evaluation.global_batch or self.config.global_batch

    def select_phase(self, step: int) -> "Assembly":
        """Return the parts for a step, counted from 1, with the image size and batch of its phase."""
        for phase, parts in zip(self.steps.earlier_phases, self.earlier, strict=True):
            if step <= phase.last_step:
                config = apply_phase(self.config, phase)
                return dataclasses.replace(parts, config=config, steps=self.steps)
        return self

    def images(self, step: int) -> int:
        """Images of the first `step` steps."""
        return sum(count * batch for count, batch, _ in self._work(step))

    def training_flops(self, step: int) -> int:
        """FLOPs of the first `step` steps, counted as `training_flops_per_image`."""
        return sum(count * batch * flops for count, batch, flops in self._work(step))

    def _work(self, step: int) -> Iterator[tuple[int, int, int]]:
        """Yield steps, batch and FLOPs of an image for each phase; the last one has no end."""
        first = 0
        for phase, parts in zip(self.steps.earlier_phases, self.earlier, strict=True):
            last = min(step, phase.last_step)
            yield last - first, phase.global_batch, parts.training_flops_per_image
            first = last
        yield step - first, self.config.global_batch, self.training_flops_per_image

    def list_phase_ends(self, start_step: int) -> list[int]:
        """Return the last step of each phase that is not over after `start_step`, and of the run."""
        ends = []
        for phase in self.steps.earlier_phases:
            if phase.last_step > start_step:
                ends.append(phase.last_step)
        return [*ends, self.steps.total]

    def trace_train_step(self) -> jax.stages.Traced:
        """Trace the train step: a second call, and the compilation, use the same trace.

        Raises:
          ValueError: the user's code returns arrays of wrong shapes.
        """
        batch = abstract_batch(
            self.config.global_batch,
            self.architecture.image_shape,
            self.batch_sharding,
            self.label_shape,
            self.config.input.pixel_dtype,
        )
        leaves = pytree.name_leaves(self.abstract_state)
        if self.teacher is None:
            return self.train_step_of_leaves.trace(leaves, batch)
        return self.train_step_of_leaves.trace(leaves, batch, self.teacher.abstract_leaves)

    def compile_train_step(self, start_step: int = 0) -> "CompiledStep":
        """Return the train step as executables, so that no later call can hide a compilation.

        There is one for each phase that is not over after `start_step`; equal phases share it.
        """
        compiled: dict[Phase, Executable] = {}
        phases = []
        first_step = start_step + 1
        for last_step in self.list_phase_ends(start_step):
            parts = self.select_phase(first_step)
            config = parts.config
            size = Phase(0, config.input.pixels, config.global_batch, config.input.patch_dropout)
            if size not in compiled:
                compiled[size] = parts.trace_train_step().lower().compile()
            phases.append((last_step, compiled[size]))
            first_step = last_step + 1
        frozen: tuple[Leaves, ...] = ()
        if self.teacher is not None:
            frozen = (self.teacher.leaves,)
        return CompiledStep(tuple(phases), frozen)

    def state_from(self, leaves: Leaves) -> TrainState:
        """The state with these leaves."""
        return pytree.from_named_leaves(self.abstract_state, leaves)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The train step as executables.

    They take and return the leaves of a state by name (`pytree.name_leaves`): modules take Python
    three milliseconds more to hand over. A call runs the first phase.

    Attributes:
      phases: last step of each phase, and its executable.
      frozen: further arguments of each step: the parameters of a teacher.
    """

    phases: tuple[tuple[int, Executable], ...]
    frozen: tuple[Leaves, ...] = ()

    def __call__(self, leaves: Leaves, batch: Batch) -> tuple[Leaves, Metrics]:
        """Take a step of the first phase."""
        _, executable = self.phases[0]
        return executable(leaves, batch, *self.frozen)

    def select(self, step: int) -> Executable:
        """Return the executable for a step, counted from 1."""
        for last_step, executable in self.phases:
            if step > last_step:
                continue
            if not self.frozen:
                return executable
            return lambda leaves, batch: executable(leaves, batch, *self.frozen)
        raise ValueError(f"step {step}: must be at most {self.phases[-1][0]}, the last of the run.")

    def memory_analysis(self) -> Any:
        """Return XLA's analysis of the memory of the first phase."""
        _, executable = self.phases[0]
        return executable.memory_analysis()  # type: ignore[attr-defined]


class LiveState:
    """The state of a run in training, of which there is only one copy: a step takes its memory.

    Attributes:
      step: steps done.
    """

    def __init__(self, run: Assembly, state: TrainState) -> None:
        self.step = int(jax.device_get(state.step))
        self._run = run
        self._leaves = pytree.name_leaves(state)

    def compile_step(self) -> None:
        """Compile the training step."""
        self._compiled = self._run.compile_train_step(self.step)

    def advance(self, batch: Batch) -> Metrics:
        """Take a step, and hold its state; return its metrics, which the devices may still compute."""
        train_step = self._compiled.select(self.step + 1)
        self._leaves, metrics = train_step(self._leaves, batch)
        self.step += 1
        return metrics

    def read(self) -> TrainState:
        """Return the state; the next step takes its memory."""
        return self._run.state_from(self._leaves)

    def delete(self) -> None:
        """Free the memory of the state."""
        for leaf in self._leaves.values():
            leaf.delete()
