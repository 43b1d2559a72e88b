"""The composition of a run: its parts, built from the config and joined by `Composition`.

`assemble` builds what trains, lays it out on the devices, and joins the parts of each phase.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import optax
from flax import nnx

from vit_jax.config.architecture import Architecture
from vit_jax.config.lengths import RunSteps
from vit_jax.config.schema import EvaluationConfig, RunConfig
from vit_jax.evals.running_metrics import choose_metrics, make_metric_rows
from vit_jax.models import build_model, lora
from vit_jax.models.attention import find_attention_form
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.objectives import Objective, build_objective
from vit_jax.optim.by_name import make_is_trained
from vit_jax.optim.optimizers import adapt_optimizer, build_optimizer
from vit_jax.optim.schedules import Schedule, build_schedule
from vit_jax.train.assembly import Assembly
from vit_jax.train.phases import shrink_sequence
from vit_jax.train.state import TrainState, init_state
from vit_jax.train.step import PrepareNetwork, StepParts, make_evaluation_step
from vit_jax.train.step_compiler import JittedEvaluationStep, StepCompiler

if TYPE_CHECKING:
    from vit_jax.train.teacher import Teacher

BuildNetwork = Callable[[Architecture, jax.Array], nnx.Module]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trainable:
    """The network and the optimizer of a run. They make its first state.

    Attributes:
      seed: seed of the random parameters.
      architecture: the network.
      build_network: (architecture, key) -> module.
      factors: factors of LoRA; None without it.
      optimizer: updates of the parameters.
      schedule: learning rate by steps done.
      has_average: True if the state has a Polyak average.
    """

    seed: int
    architecture: Architecture
    build_network: BuildNetwork
    factors: lora.Lora | None
    optimizer: optax.GradientTransformation
    schedule: Schedule
    has_average: bool

    @property
    def is_standard(self) -> bool:
        """True if the architecture describes the network, False for a network of the caller."""
        return self.build_network is build_model

    def init(self) -> TrainState:
        """Return the state before the first step, with random parameters."""
        key = jax.random.key(self.seed)
        model = self.build_network(self.architecture, key)
        if self.factors is not None:
            model = lora.add_factors(model, self.factors, key)
            model = lora.store_frozen_kernels(model, self.architecture.compute_dtype)
        return self.start_from(model)

    def start_from(self, model: nnx.Module) -> TrainState:
        """Return the state before the first step, with the parameters of a model."""
        return init_state(model, self.optimizer, with_polyak=self.has_average)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The shapes and dtypes of the state."""
        return jax.eval_shape(self.init)


def build_trainable(
    config: RunConfig,
    architecture: Architecture,
    steps: RunSteps,
    network: BuildNetwork | None,
    schedule: Schedule | None,
    optimizer: optax.GradientTransformation | None,
) -> Trainable:
    """Build the network and the optimizer; the last arguments are parts of the caller, or None.

    Raises:
      ValueError: the network cannot have the factors of LoRA that the config wants.
    """
    learning_rate = schedule or build_schedule(config.schedule, steps)
    if optimizer is None:
        peak = config.schedule.learning_rate
        optimizer = build_optimizer(config.optimizer, learning_rate, peak)
    else:
        is_trained = make_is_trained(config.optimizer) or (lambda name: True)
        optimizer = adapt_optimizer(optimizer, is_trained)

    factors = lora.build_lora(config.optimizer)
    if factors is not None:
        lora.require_adaptable(architecture, is_standard=network is None)

    return Trainable(
        seed=config.seed,
        architecture=architecture,
        build_network=network or build_model,
        factors=factors,
        optimizer=optimizer,
        schedule=learning_rate,
        has_average=config.polyak.factor is not None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composition:
    """The parts that all phases of a run share.

    Attributes:
      steps: lengths of the run.
      trainable: its network and its optimizer.
      compiler: its devices, and the layout of its state.
      objective: an objective of the caller; None: the config's.
      label_shape: shape of the label of an image.
      teacher: the teacher of a distillation; None without one.
    """

    steps: RunSteps
    trainable: Trainable
    compiler: StepCompiler
    objective: Objective | None
    label_shape: tuple[int, ...]
    teacher: "Teacher | None" = None

    def join(
        self,
        config: RunConfig,
        phase: Trainable,
        prepare_network: PrepareNetwork,
    ) -> Assembly:
        """Join the parts of the run, or of an earlier phase; both have the state of the run.

        Args:
          config: config with the sizes of the phase.
          phase: `trainable` with the network for images of the phase.
          prepare_network: see `StepParts`.
        """
        architecture = phase.architecture
        compiler = self.compiler
        objective = self.objective or build_objective(config.objective, architecture)
        # On GPUs the host would wait for the condition that skips the norm of the update.
        measures_all_updates = self.steps.log_every == 1 or compiler.platform == "gpu"
        parts = StepParts(
            config=config,
            architecture=architecture,
            objective=objective,
            prepare_network=prepare_network,
            optimizer=self.trainable.optimizer,
            schedule=self.trainable.schedule,
            steps=self.steps,
            measures_all_updates=measures_all_updates,
            teach=self.teacher.predict if self.teacher is not None else None,
        )
        custom_network = None if phase.is_standard else phase.abstract_state.model
        abstract_teacher = self.teacher.abstract if self.teacher is not None else None
        return Assembly(
            config=config,
            steps=self.steps,
            architecture=architecture,
            compiler=compiler,
            label_shape=self.label_shape,
            forward_macs=forward_macs(architecture, custom_network),
            training_flops_per_image=self._count_flops(config, architecture, custom_network),
            init_state=compiler.jit_build(self.trainable.init),
            state_of=compiler.jit_build(self.trainable.start_from),
            step_parts=parts,
            train_step=compiler.jit_train_step(parts.train_step, abstract_teacher),
            train_step_of_leaves=compiler.jit_train_step_of_leaves(
                parts.train_step,
                abstract_teacher,
            ),
            teacher=self.teacher,
            evaluation_step=self._jit_evaluation(config.evaluation, architecture, objective),
            attention_form=self._make_attention_form(shrink_sequence(architecture, config)),
        )

    def _count_flops(
        self,
        config: RunConfig,
        architecture: Architecture,
        custom_network: nnx.Module | None,
    ) -> int:
        """Return the FLOPs of training on an image, with one forward pass of a teacher."""
        num_kept = None
        if config.input.patch_dropout:
            num_kept = architecture.count_kept_patches(config.input.patch_dropout)
        macs = forward_macs(architecture, custom_network, count_padding=False, num_kept=num_kept)
        flops = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * macs
        if self.teacher is None:
            return flops
        teacher_macs = forward_macs(self.teacher.architecture, count_padding=False)
        return flops + FLOPS_PER_MAC * teacher_macs

    def _jit_evaluation(
        self,
        config: EvaluationConfig,
        architecture: Architecture,
        objective: Objective,
    ) -> JittedEvaluationStep:
        """Build the evaluation step, and jit it."""
        metric_rows = None
        if config.metrics:  # only a classifier has them: a network may predict patches alone
            chosen = choose_metrics(config.metrics, "config.evaluation.metrics")
            metric_rows = make_metric_rows(chosen)
        step = make_evaluation_step(architecture, objective, metric_rows)
        return self.compiler.jit_observation(step)

    def _make_attention_form(self, architecture: Architecture) -> Callable[[], str] | None:
        """Return the function that names the form of attention; None without standard blocks."""
        has_blocks = architecture.is_standard and architecture.has_transformer
        if not (self.trainable.is_standard and has_blocks):
            return None
        return self.compiler.place(functools.partial(find_attention_form, architecture))
