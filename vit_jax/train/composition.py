"""The composition of a run: its parts, each built from the sections of the config that it uses.

`assemble` calls the methods of `Composition` in their order.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import optax
from flax import nnx

from vit_jax.config.architecture import Architecture
from vit_jax.config.lengths import RunSteps
from vit_jax.config.schema import (
    EvaluationConfig,
    InputConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolyakConfig,
    ScheduleConfig,
)
from vit_jax.evals.metric_functions import choose_metrics, make_measure
from vit_jax.models import build_model, lora
from vit_jax.objectives import Objective, build_objective
from vit_jax.optim.by_name import make_is_trained
from vit_jax.optim.optimizers import adapt_optimizer, build_optimizer
from vit_jax.optim.schedules import Schedule, build_schedule
from vit_jax.sharding import batch_sharding
from vit_jax.train.state import TrainState, init_state
from vit_jax.train.step import (
    StepParts,
    TrainingLoss,
    make_evaluation_step,
    make_freeze,
    make_prepare_batch,
)
from vit_jax.train.step_compiler import (
    JittedEvaluationStep,
    JittedLeavesStep,
    JittedTrainStep,
    StepCompiler,
)

BuildNetwork = Callable[[Architecture, jax.Array], nnx.Module]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trainable:
    """The network and the optimizer of a run. They make its first state.

    Attributes:
      seed: seed of the random parameters.
      build_network: (architecture, key) -> module.
      optimizer: updates of the parameters.
      schedule: learning rate by steps done.
      factors: factors of LoRA; None without it.
      has_average: True if the state has a Polyak average.
    """

    seed: int
    build_network: BuildNetwork
    optimizer: optax.GradientTransformation
    schedule: Schedule
    factors: lora.Lora | None
    has_average: bool

    def init(self, architecture: Architecture) -> TrainState:
        """Return the state before the first step, with random parameters."""
        key = jax.random.key(self.seed)
        model = self.build_network(architecture, key)
        if self.factors is not None:
            model = lora.add_factors(model, self.factors, key)
        return self.start_from(model)

    def start_from(self, model: nnx.Module) -> TrainState:
        """Return the state before the first step, with the parameters of a model."""
        return init_state(model, self.optimizer, with_polyak=self.has_average)

    def shape_state(self, architecture: Architecture) -> TrainState:
        """Return the shapes and dtypes of the state."""
        return jax.eval_shape(functools.partial(self.init, architecture))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The steps of a run, jitted for its devices; attributes as in `Assembly`."""

    step_parts: StepParts
    train_step: JittedTrainStep
    train_step_of_leaves: JittedLeavesStep
    evaluation_step: JittedEvaluationStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The layout of batches on the devices of a run.

    Attributes:
      sharding: sharding of every array of a batch.
      label_shape: shape of the label of an image.
      evaluation_batch: examples of one evaluation step.
    """

    sharding: jax.sharding.NamedSharding
    label_shape: tuple[int, ...]
    evaluation_batch: int


class Composition:
    """Builds the parts of a run: model and optimizer, jitted steps, layout of batches.

    Each method gets the sections of the config that it uses. Parts of the caller stand in the place
    of the config's.
    """

    def __init__(
        self,
        steps: RunSteps,
        *,
        network: BuildNetwork | None,
        objective: Objective | None,
        schedule: Schedule | None,
        optimizer: optax.GradientTransformation | None,
    ) -> None:
        self.steps = steps
        self._network = network
        self._objective = objective
        self._schedule = schedule
        self._optimizer = optimizer

    @property
    def is_standard(self) -> bool:
        """True if the architecture describes the network, False for a network of the caller."""
        return self._network is None

    def build_trainable(
        self,
        seed: int,
        architecture: Architecture,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        polyak: PolyakConfig,
    ) -> Trainable:
        """Build the model and the optimizer.

        Raises:
          ValueError: the network cannot have the factors of LoRA that the config wants.
        """
        learning_rate = self._schedule or build_schedule(schedule, self.steps)
        if self._optimizer is None:
            transformation = build_optimizer(optimizer, learning_rate, schedule.learning_rate)
        else:
            is_trained = make_is_trained(optimizer) or (lambda name: True)
            transformation = adapt_optimizer(self._optimizer, is_trained)

        factors = lora.build_lora(optimizer)
        if factors is not None:
            lora.require_adaptable(architecture, is_standard=self.is_standard)

        return Trainable(
            seed=seed,
            build_network=self._network or build_model,
            optimizer=transformation,
            schedule=learning_rate,
            factors=factors,
            has_average=polyak.factor is not None,
        )

    def build_programs(
        self,
        architecture: Architecture,
        trainable: Trainable,
        compiler: StepCompiler,
        inputs: InputConfig,
        task: ObjectiveConfig,
        optimizer: OptimizerConfig,
        polyak: PolyakConfig,
        evaluation: EvaluationConfig,
    ) -> Programs:
        """Build the training step and the evaluation step, and jit both."""
        objective = self.build_objective(task, architecture)
        loss = TrainingLoss(
            objective=objective,
            prepare_network=make_freeze(make_is_trained(optimizer)),
            has_dropout=optimizer.trained == "all",  # features that are frozen have none
        )
        # On GPUs the host would wait for the condition that skips the norm of the update.
        measures_all_updates = self.steps.log_every == 1 or compiler.platform == "gpu"
        parts = StepParts(
            seed=trainable.seed,
            num_micro_batches=optimizer.accumulation_steps or 1,
            prepare_batch=make_prepare_batch(inputs, task, architecture, objective),
            loss=loss,
            optimizer=trainable.optimizer,
            schedule=trainable.schedule,
            polyak=polyak,
            steps=self.steps,
            measures_all_updates=measures_all_updates,
        )
        measure = None
        if evaluation.metrics:  # only a classifier has them: a network may predict patches alone
            metrics = choose_metrics(evaluation.metrics, "config.evaluation.metrics")
            measure = make_measure(metrics)
        evaluation_step = make_evaluation_step(architecture, objective, measure)
        return Programs(
            step_parts=parts,
            train_step=compiler.jit_train_step(parts.train_step),
            train_step_of_leaves=compiler.jit_train_step_of_leaves(parts.train_step),
            evaluation_step=compiler.jit_observation(evaluation_step),
        )

    def place_batches(
        self,
        compiler: StepCompiler,
        global_batch: int,
        evaluation: EvaluationConfig,
        label_shape: tuple[int, ...],
    ) -> BatchLayout:
        """Lay batches out on the devices.

        The batch of evaluation defaults to the one of training.
        """
        return BatchLayout(
            sharding=batch_sharding(compiler.mesh),
            label_shape=label_shape,
            evaluation_batch=evaluation.global_batch or global_batch,
        )

    def build_objective(self, task: ObjectiveConfig, architecture: Architecture) -> Objective:
        """Return the caller's objective, or the one that the config names."""
        if self._objective is not None:
            return self._objective
        return build_objective(task, architecture)
