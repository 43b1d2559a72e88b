"""One training step and one evaluation step, as pure functions. `assemble` jits and shards them.

A training step is a method of `StepParts`, and each of its parts is one, too: `vit-jax replay`
calls the parts to take a step apart.

Legend: B global batch, A micro-batches, H W C image, M patches that patch dropout keeps, K classes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax import pytree
from vit_jax.arrays import Batch, Corruption, ModelOutput, StepResults, Targets, normalise
from vit_jax.config import Architecture, InputConfig, RunConfig, RunSteps
from vit_jax.data.mixing import mix
from vit_jax.objectives import Objective
from vit_jax.objectives.sums import Sums, compute_means, score_classes
from vit_jax.optim import ema
from vit_jax.optim.by_name import TrainedParameters, apply_updates, select_trained
from vit_jax.train.metrics import READABLE_IMAGES
from vit_jax.train.state import TrainState
from vit_jax.train.step_norms import StepNorms

Metrics = dict[str, jax.Array]
GradientsAndSums = tuple[nnx.Module, Sums]
Tree = TypeVar("Tree")


class StepKeys(NamedTuple):
    """Random keys of one step, for its four uses.

    `mixing` and `dropout` are split from the key of the step. The others, which were added later,
    derive from `mixing`: a split into four would change the losses of recorded runs. The numbers 0
    to 2 give the keys into which mixup and CutMix split `mixing`.
    """

    mixing: jax.Array
    dropout: jax.Array

    @property
    def targets(self) -> jax.Array:
        """The key of the objective; recorded runs with masked patches, which mix nothing, have it."""
        return jax.random.fold_in(self.mixing, 1)

    @property
    def patches(self) -> jax.Array:
        """The key of patch dropout."""
        return jax.random.fold_in(self.mixing, 3)


class LossInputs(NamedTuple):
    """Everything that the loss of a step depends on, besides the model.

    The arrays have the examples of the batch on their first axis. `split_batch` returns the inputs
    of all micro-batches with one more axis in front of each field, A: of the key, too.

    Attributes:
      images: mixed images from -1 to 1, (B, H, W, C).
      targets: targets of the objective; `compute_loss` adds the logits of a teacher.
      kept_BM: indices of the patches that patch dropout keeps; None without it.
      dropout_key: random key of dropout.
    """

    images: jax.Array
    targets: Targets
    kept_BM: jax.Array | None
    dropout_key: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TeacherNetwork:
    """The network of a teacher, an argument of the training step.

    Attributes:
      network: the module, its parameters the leaves.
      architecture: the network as the step computes it.
    """

    network: nnx.Module
    architecture: Architecture = dataclasses.field(metadata={"static": True})

    @jax.named_scope("teacher")
    def predict(self, image_BHWC: jax.Array) -> jax.Array:
        """Return the float32 logits of images in [-1, 1], resized to the size of the teacher."""
        shape = (len(image_BHWC), *self.architecture.image_shape)
        if image_BHWC.shape != shape:
            resized = jax.image.resize(image_BHWC.astype(jnp.float32), shape, "bilinear")
            image_BHWC = resized.astype(image_BHWC.dtype)
        image_BHWC = image_BHWC.astype(self.architecture.compute_dtype)
        logits_BK = self.network(image_BHWC).logits_BK  # type: ignore[operator]
        return jax.lax.stop_gradient(logits_BK.astype(jnp.float32))


def keep_size(model: nnx.Module) -> nnx.Module:
    """Return the network itself, for images of the size of the run."""
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """A training step and its parts.

    Gradients and losses are sums over examples, until `average_gradients` and `compute_means`.

    Attributes:
      config: config of the run, with the sizes of its phase. Its seed and the number of a step
        decide all random numbers of the step.
      architecture: the network of the phase.
      objective: the loss of an output.
      trained: the parameters that change; None: all of them.
      optimizer: updates of the parameters by their gradients.
      schedule: learning rate by steps done; the optimizer has its own reference to it.
      steps: lengths of the run.
      norms: how the norms among the metrics are computed.
      resize_network: returns the model itself, or, in a phase of a run that begins with smaller
        images, a network for these.

    The methods take a `teacher` as an argument, whose parameters are then arguments of the jitted
    step: as an attribute they would be constants of the program. It is None unless
    `config.objective.teacher` names one.
    """

    config: RunConfig
    architecture: Architecture
    objective: Objective
    trained: TrainedParameters | None
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array]
    steps: RunSteps
    norms: StepNorms
    resize_network: Callable[[nnx.Module], nnx.Module] = keep_size

    def train_step(
        self,
        state: TrainState,
        batch: Batch,
        teacher: TeacherNetwork | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Take one optimizer step. Randomness depends on (seed, step) only."""
        # The learning rate and random numbers depend on the steps done before; logs and averages on
        # the number of this step.
        steps_done = state.step
        step = steps_done + 1
        inputs = self.prepare_inputs(steps_done, batch)
        gradients, sums = self.compute_gradients(state.model, inputs, teacher)

        with jax.named_scope("optimizer"):
            updates, optimizer_state = self.optimizer.update(
                gradients, state.optimizer, state.model
            )
            model = apply_updates(state.model, updates, self.trained)

        with jax.named_scope("metrics"):
            metrics = {f"train_{name}": mean for name, mean in compute_means(sums).items()}
            metrics["learning_rate"] = self.schedule(steps_done)
            trained_gradients = select_trained(gradients, self.trained)
            trained_updates = select_trained(updates, self.trained)
            metrics |= self.norms.measure(step, trained_gradients, trained_updates, model)
            metrics[READABLE_IMAGES] = batch.mask_B.sum()

        polyak = self.update_average(state.polyak, model, step)
        return TrainState(step, model, optimizer_state, polyak), metrics

    def prepare_inputs(self, steps_done: jax.Array, batch: Batch) -> LossInputs:
        """Return images and targets of the next step, mixed and weighted as the config says."""
        keys = step_keys(self.config.seed, steps_done)
        images, label_BK = mix_batch(
            self.config.input,
            self.architecture.num_classes,
            self.architecture.compute_dtype,
            batch,
            keys.mixing,
        )

        weight_B = batch.mask_B
        class_weights = self.config.objective.class_weights
        if class_weights:
            weight_B = weight_B * weigh_examples(label_BK, class_weights)

        return LossInputs(
            images=images,
            targets=self.objective.prepare(batch, label_BK, weight_B, keys.targets),
            kept_BM=self._sample_kept_patches(keys.patches, len(batch.mask_B)),
            dropout_key=keys.dropout,
        )

    def _sample_kept_patches(self, key: jax.Array, num_images: int) -> jax.Array | None:
        """Return the patches that patch dropout keeps, (B, M); None without it."""
        fraction = self.config.input.patch_dropout
        if not fraction:
            return None
        num_kept = self.architecture.count_kept_patches(fraction)
        num_patches = math.prod(self.architecture.grid)
        return sample_patches(key, (num_images, num_patches), num_kept)

    def compute_gradients(
        self,
        model: nnx.Module,
        inputs: LossInputs,
        teacher: TeacherNetwork | None = None,
    ) -> GradientsAndSums:
        """Return mean gradients over the examples of a batch, and the sums of the objective."""
        loss_of_inputs = functools.partial(self.compute_loss, teacher=teacher)
        gradients, sums = accumulate_gradients(
            loss_of_inputs, model, inputs, self.num_micro_batches
        )
        return average_gradients(gradients, sums)

    def compute_loss(
        self,
        model: nnx.Module,
        inputs: LossInputs,
        teacher: TeacherNetwork | None = None,
    ) -> tuple[jax.Array, Sums]:
        """Return the loss, summed over the examples, and all sums of the objective."""
        targets = self.complete_targets(inputs, teacher)
        output = self.predict(model, inputs)
        with jax.named_scope("loss"):
            sums = self.objective.sums(output, targets)
        return sums["loss"], sums

    def complete_targets(
        self,
        inputs: LossInputs,
        teacher: TeacherNetwork | None,
    ) -> Targets:
        """Return the targets with the logits of the teacher, which sees the mixed images."""
        if teacher is None:
            return inputs.targets
        return dataclasses.replace(inputs.targets, teacher_BK=teacher.predict(inputs.images))

    def predict(
        self,
        model: nnx.Module,
        inputs: LossInputs,
        intermediates: tuple[str, ...] = (),
    ) -> ModelOutput:
        """Return the output of the network, with these intermediates and those of the loss.

        Frozen arrays get no gradient by `stop_frozen_gradients`. If only the last blocks are
        trained, the network stops the gradient before them (`num_trained_blocks`): one array has a
        parameter of all blocks, and is frozen in part.
        """
        network = self.resize_network(stop_frozen_gradients(model, self.trained))
        return call_network(
            network,
            inputs.images,
            corruption=inputs.targets.corruption,
            kept_BM=inputs.kept_BM,
            dropout_key=self._select_dropout_key(inputs),
            intermediates=(*intermediates, *self._list_needed_intermediates(network)),
            num_trained_blocks=self._count_trained_blocks(),
        )

    def _select_dropout_key(self, inputs: LossInputs) -> jax.Array | None:
        """Return the key of dropout; None where only the head is trained, on exact features."""
        if self.trained is not None and self.trained.is_head_alone:
            return None
        return inputs.dropout_key

    def _list_needed_intermediates(self, network: nnx.Module) -> tuple[str, ...]:
        """Return the intermediates that the loss needs: with a teacher the distillation token's."""
        has_teacher = self.config.objective.teacher is not None
        # A custom network may not state them.
        allowed = getattr(network, "allowed_intermediates", ())
        if has_teacher and "token_logits" in allowed:
            return ("token_logits",)
        return ()

    def _count_trained_blocks(self) -> int | None:
        """Return the number of last blocks that are trained; None for all."""
        if self.trained is None:
            return None
        return self.trained.num_last_blocks

    @property
    def num_micro_batches(self) -> int:
        """Number of equal parts of a batch whose gradients are added one by one."""
        return self.config.optimizer.accumulation_steps or 1

    @jax.named_scope("average")
    def update_average(
        self,
        average: nnx.Module | None,
        model: nnx.Module,
        step: jax.Array,
    ) -> nnx.Module | None:
        """Return the Polyak average after a step; None for a run without one."""
        polyak = self.config.polyak
        if polyak.factor is None:
            return None
        assert average is not None, "the state has an average if the config has a factor"
        return ema.update(
            average,
            model,
            step,
            factor=polyak.factor,
            start_step=self.steps.polyak_start,
            bias_correction=polyak.bias_correction,
            warmup=polyak.warmup,
        )


def step_keys(seed: int, steps_done: jax.typing.ArrayLike) -> StepKeys:
    """Return the random keys of the step after `steps_done` others."""
    step_key = jax.random.fold_in(jax.random.key(seed), steps_done)
    mixing_key, dropout_key = jax.random.split(step_key)
    return StepKeys(mixing_key, dropout_key)


def mix_batch(
    config: InputConfig,
    num_classes: int,
    compute_dtype: str,
    batch: Batch,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return images (B, H, W, C) from -1 to 1 and labels (B, K), mixed as the config says.

    Args:
      config: the section with mixup and CutMix.
      num_classes: number of outputs of the network; K.
      compute_dtype: dtype of the images.
      batch: images from 0 to 255, and their labels.
      key: random key of mixing in this step.
    """
    images = normalise(batch.image_BHWC, compute_dtype)
    label_BK = batch.label_BK(num_classes)

    if config.mixup_alpha > 0 or config.cutmix_alpha > 0:
        images, label_BK = mix(key, images, label_BK, batch.mask_B, config)
    return images, label_BK


def sample_patches(key: jax.Array, shape: tuple[int, int], num_kept: int) -> jax.Array:
    """Return `num_kept` patches of each image in ascending order, without repetition, (B, M).

    Args:
      key: random key.
      shape: number of images and of patches of an image.
      num_kept: number of patches to return, M.
    """
    # The places of the largest random numbers are a uniform choice without repetition.
    _, kept_BM = jax.lax.top_k(jax.random.uniform(key, shape), num_kept)
    return jnp.sort(kept_BM, axis=1)


def weigh_examples(label_BK: jax.Array, class_weights: Sequence[float]) -> jax.Array:
    """Return the weight of each example, (B,): of its class, divided by the mean over classes."""
    mean = sum(class_weights) / len(class_weights)
    return label_BK @ jnp.asarray([weight / mean for weight in class_weights])


def call_network(
    network: Callable[..., ModelOutput],
    images: jax.Array,
    *,
    corruption: Corruption | None = None,
    kept_BM: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    intermediates: tuple[str, ...] = (),
    num_trained_blocks: int | None = None,
) -> ModelOutput:
    """Call a network with the options that are in use: a custom one may not have the others."""
    options = {
        "corruption": corruption,
        "kept_BM": kept_BM,
        "dropout_key": dropout_key,
        "intermediates": intermediates or None,
        "num_trained_blocks": num_trained_blocks,
    }
    in_use = {name: value for name, value in options.items() if value is not None}
    return network(images, **in_use)


def stop_frozen_gradients(model: Tree, trained: TrainedParameters | None) -> Tree:
    """Return the model, without gradients at the parameters that are not trained. None: all are."""
    if trained is None:
        return model

    def stop_if_frozen(name: str, parameter: jax.Array) -> jax.Array:
        return parameter if trained.includes(name) else jax.lax.stop_gradient(parameter)

    return pytree.map_with_names(stop_if_frozen, model)


def accumulate_gradients(
    compute_loss: Callable[[nnx.Module, LossInputs], tuple[jax.Array, Sums]],
    model: nnx.Module,
    inputs: LossInputs,
    num_micro_batches: int,
) -> GradientsAndSums:
    """Return the gradients of the loss and the sums of a batch, added over its micro-batches.

    They are sums over examples, not means. Divided once by the weight of the whole batch they are
    its mean gradients, also if micro-batches have different numbers of masked examples.
    """
    differentiate = functools.partial(jax.grad(compute_loss, has_aux=True), model)
    if num_micro_batches == 1:
        return differentiate(inputs)

    def add_micro_batch(
        total: GradientsAndSums, micro_batch: LossInputs
    ) -> tuple[GradientsAndSums, None]:
        return jax.tree.map(jnp.add, total, differentiate(micro_batch)), None

    micro_batches = split_batch(inputs, num_micro_batches)
    # Gradients and sums have no axis of examples: their shapes are the same for the whole batch.
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(differentiate, inputs))
    total, _ = jax.lax.scan(add_micro_batch, zeros, micro_batches)
    return total


def split_batch(inputs: LossInputs, num_micro_batches: int) -> LossInputs:
    """Return the inputs of all micro-batches, with a first axis A.

    With A = 2, micro-batch 0 takes the examples 0, 2, 4, ... and micro-batch 1 takes 1, 3, 5, ...:
    consecutive examples lie on one device, so that every device has an equal part of each
    micro-batch and sends no example to another.
    """

    def split(x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0] // num_micro_batches, num_micro_batches, *x.shape[1:])
        return parts.swapaxes(0, 1)

    dropout_key_A = jax.random.split(inputs.dropout_key, num_micro_batches)
    examples = (inputs.images, inputs.targets, inputs.kept_BM)
    images, targets, kept_BM = jax.tree.map(split, examples)  # None stays None
    return LossInputs(images, targets, kept_BM, dropout_key_A)


def average_gradients(gradients: nnx.Module, sums: Sums) -> GradientsAndSums:
    """Return mean gradients, and the sums with the weight that the means divide by.

    The weight of a batch without a readable image is 1 in the place of 0: its gradients, and the
    means that `compute_means` returns later, are 0 and not NaN.
    """
    weight = jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
    mean_gradients = jax.tree.map(lambda gradient: gradient / weight, gradients)
    return mean_gradients, {**sums, "weight": weight}


def make_evaluation_step(
    architecture: Architecture,
    objective: Objective,
    metric_rows: Callable[[jax.Array, Batch], Metrics] | None = None,
) -> Callable[[TrainState, Batch], StepResults]:
    """Return (state, batch) -> sums of the objective, and rows of images for other metrics.

    Rows are those of `score_classes` for images with several labels, and those that `metric_rows`
    returns for (logits_BK, batch).

    The random numbers of an objective are the same in every batch, so that evaluations can be
    compared.
    """

    def evaluation_step(state: TrainState, batch: Batch) -> StepResults:
        images = normalise(batch.image_BHWC, architecture.compute_dtype)
        label_BK = batch.label_BK(architecture.num_classes)
        targets = objective.prepare(batch, label_BK, batch.mask_B, jax.random.key(0))
        # `prepare` may smooth the labels, which an evaluation does not want.
        targets = dataclasses.replace(targets, label_BK=label_BK)
        output = call_network(state.evaluated_model(), images, corruption=targets.corruption)
        sums = objective.sums(output, targets)

        rows: Metrics = {}
        if targets.is_multilabel:
            rows |= score_classes(output.logits_BK, batch)
        if metric_rows is not None:
            rows |= metric_rows(output.logits_BK, batch)
        return StepResults(sums, rows)

    return evaluation_step
