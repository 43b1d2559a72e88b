"""Steps jitted for the devices of a run, with the shardings of its state and its batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from vit_jax import pytree
from vit_jax.arrays import Batch, StepResults
from vit_jax.kernels.devices import trace_for
from vit_jax.sharding import Options, Placement, batch_sharding, replicate
from vit_jax.train.state import TrainState
from vit_jax.train.step import Metrics, TeacherNetwork

Leaves = dict[str, jax.Array]
R = TypeVar("R")
State = TypeVar("State", contravariant=True)
Result = TypeVar("Result", covariant=True)


class JittedStep(Protocol[State, Result]):
    """A jitted function of a state, as a `TrainState` or as `Leaves` by name, and a batch."""

    def __call__(self, state: State, batch: Batch, /, *frozen: Any) -> Result:
        """Run the step."""

    def trace(self, state: State, batch: Batch, /, *frozen: Any) -> jax.stages.Traced:
        """Trace the step on arrays or their abstract shapes."""

    def lower(self, state: State, batch: Batch, /, *frozen: Any) -> jax.stages.Lowered:
        """Trace and lower the step."""


TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""(state, batch), and the teacher of a run that has one -> (state, metrics)."""
JittedTrainStep = JittedStep[TrainState, tuple[TrainState, Metrics]]
JittedLeavesStep = JittedStep[Leaves, tuple[Leaves, Metrics]]
JittedEvaluationStep = JittedStep[TrainState, StepResults]


class JittedTraining(NamedTuple):
    """A training step, jitted in two forms that compute the same.

    Attributes:
      step: (state, batch) -> (state, metrics).
      step_of_leaves: the same for the leaves of a state by name, which takes Python less time to
        hand over than a module.
    """

    step: JittedTrainStep
    step_of_leaves: JittedLeavesStep


@dataclasses.dataclass(frozen=True)
class StepCompiler:
    """Jits steps for a mesh.

    A jitted step takes and returns arrays with the shardings of the run.

    Attributes:
      mesh: the devices.
      abstract_state: shapes, dtypes and shardings of the state.
      options: options of the compiler for the devices, or None.
    """

    mesh: jax.sharding.Mesh
    abstract_state: TrainState
    options: Options | None

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        return Placement(self.mesh).platform

    @property
    def state_shardings(self) -> TrainState:
        """The sharding of every leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    def place(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function for the mesh.

        Activations get their layouts, and kernels learn the platform, when it is traced.
        """
        return trace_for(Placement(self.mesh))(function)

    def jit_build(self, build: Callable[..., TrainState]) -> Callable[..., TrainState]:
        """Jit a function that returns a state."""
        return jax.jit(build, out_shardings=self.state_shardings)

    def jit_training(
        self, step: TrainStep, teacher: TeacherNetwork | None = None
    ) -> JittedTraining:
        """Jit a training step. It reuses the memory of the state that it gets.

        With a teacher, whose parameters are abstract here, its network is the third argument.
        """
        placed_step = self.place(step)

        # The compiled program names its arguments state['model/...'], by which plans tell their kinds.
        def train_step_of_leaves(
            state: Leaves,
            batch: Batch,
            *frozen: Leaves,
        ) -> tuple[Leaves, Metrics]:
            complete_state = pytree.from_named_leaves(self.abstract_state, state)
            networks = [pytree.from_named_leaves(teacher, leaves) for leaves in frozen]
            new_state, metrics = placed_step(complete_state, batch, *networks)
            return pytree.name_leaves(new_state), metrics

        leaf_shardings = pytree.name_leaves(self.state_shardings)
        teacher_leaves = None
        if teacher is not None:
            teacher_leaves = pytree.name_leaves(teacher)
        return JittedTraining(
            step=self._jit(placed_step, self.state_shardings, teacher),
            step_of_leaves=self._jit(train_step_of_leaves, leaf_shardings, teacher_leaves),
        )

    def jit_read_only(self, step: Callable[[TrainState, Batch], R]) -> JittedStep[TrainState, R]:
        """Jit a step that does not change the state.

        Its results are complete on each device.
        """
        return jax.jit(
            self.place(step),
            in_shardings=(self.state_shardings, batch_sharding(self.mesh)),
            out_shardings=replicate(self.mesh),
            compiler_options=self.options,
        )

    def _jit(self, step: Callable[..., Any], state_shardings: Any, teacher: Any) -> Any:
        """Jit a step that donates its state; states and teachers are modules or leaves by name."""
        in_shardings = [state_shardings, batch_sharding(self.mesh)]
        if teacher is not None:
            in_shardings.append(jax.tree.map(lambda leaf: leaf.sharding, teacher))
        return jax.jit(
            step,
            in_shardings=tuple(in_shardings),
            out_shardings=(state_shardings, replicate(self.mesh)),
            donate_argnums=0,
            compiler_options=self.options,
        )


def set_shardings(tree: R, shardings: object) -> R:
    """Return abstract arrays with these shardings.

    Args:
      tree: arrays or their abstract shapes.
      shardings: a tree of the same structure.
    """

    def set_sharding(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract: R = jax.tree.map(set_sharding, tree, shardings)
    return abstract
