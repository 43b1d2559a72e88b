"""One training step and one evaluation step, as pure functions. `assemble` jits and shards them.

Legend: B global batch, A micro-batches, H W C image, K classes.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax import pytree
from vit_jax.arrays import Batch, Corruption, ModelOutput, Targets, normalise
from vit_jax.config import Architecture, RunConfig, RunSteps
from vit_jax.data.mixing import mix
from vit_jax.kernels.devices import platform
from vit_jax.objectives import Objective
from vit_jax.objectives.sums import compute_means, score_classes
from vit_jax.optim import ema
from vit_jax.optim.by_name import make_is_trained
from vit_jax.train.metrics import READABLE_IMAGES
from vit_jax.train.state import TrainState

Metrics = dict[str, jax.Array]
View = Callable[[nnx.Module], nnx.Module]
"""From the model of a run to the network that sees the images, for another size of these (`train.phases`)."""
S = TypeVar("S")
Total = tuple[nnx.Module, Metrics]  # gradients, and sums of the objective


def same(model: nnx.Module) -> nnx.Module:
    """Return the model: the `View` of images of the run's size."""
    return model


def make_train_step(
    config: RunConfig,
    steps: RunSteps,
    architecture: Architecture,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    view: View = same,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return (state, batch) -> (state, metrics).

    Randomness comes from (seed, step) alone. With accumulation, sums over micro-batches are divided once by
    the weight of the full batch, so gradients equal those of the large batch even where examples are masked.

    `update_norm` is NaN after a step that is not logged, except on GPUs.
    """
    polyak = config.polyak
    gradients_of = make_gradients(
        config, architecture, objective, view, look=lambda output, targets: None
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums, gradients, _ = gradients_of(state, batch)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
            model = optax.apply_updates(state.model, updates)
        step = state.step + 1
        with jax.named_scope("metrics"):
            metrics = {
                **{f"train_{name}": value for name, value in compute_means(sums).items()},
                "learning_rate": schedule(state.step),
                "gradient_norm": optax.tree.norm(gradients),
                "update_norm": _update_norm(updates, step),
                "parameter_norm": optax.tree.norm(model),
                READABLE_IMAGES: batch.mask_B.sum(),
            }
        return TrainState(step, model, optimizer_state, _average(state, model, step)), metrics

    def _update_norm(updates: optax.Updates, step: jax.Array) -> jax.Array:
        # XLA for TPUs fuses the other norms with the update of the parameters; this one takes two more passes.
        if (
            steps.log_every == 1 or platform() == "gpu"
        ):  # where the host would wait for the condition
            return optax.tree.norm(updates)
        is_logged = (step % steps.log_every == 0) | (step == steps.total)
        return jax.lax.cond(is_logged, optax.tree.norm, lambda _: jnp.float32(jnp.nan), updates)

    @jax.named_scope("average")
    def _average(state: TrainState, model: nnx.Module, step: jax.Array) -> nnx.Module | None:
        if state.polyak is None or polyak.factor is None:
            return None
        return ema.update(
            state.polyak,
            model,
            step,
            factor=polyak.factor,
            start_step=steps.polyak_start,
            bias_correction=polyak.bias_correction,
            warmup=polyak.warmup,
        )

    return train_step


def make_gradients(
    config: RunConfig,
    architecture: Architecture,
    objective: Objective,
    view: View,
    look: Callable[[ModelOutput, Targets], S],
    taps: tuple[str, ...] = (),
) -> Callable[[TrainState, Batch], tuple[Metrics, nnx.Module, S]]:
    """Return (state, batch) -> (sums of the objective, gradients, values of `look`) of a training step.

    Args:
      config: of the run.
      architecture: its network.
      objective: what is minimised.
      view: as for `make_train_step`.
      look: called with the output and the targets of each micro-batch; its arrays are stacked over A micro-batches.
      taps: inner results of the network that `look` reads, see `ModelOutput`.
    """
    is_trained = make_is_trained(config.optimizer)
    drops = (
        config.optimizer.trained == "all"
    )  # dropout and stochastic depth; not where the features are frozen
    class_weights = config.objective.class_weights
    num_micro_batches = config.optimizer.accumulation_steps or 1

    def gradients_of(state: TrainState, batch: Batch) -> tuple[Metrics, nnx.Module, S]:
        mixup_key, dropout_key = step_keys(config.seed, state.step)
        image, targets = _prepare(batch, mixup_key)
        return _accumulate(state.model, image, targets, dropout_key)

    def _prepare(batch: Batch, key: jax.Array) -> tuple[jax.Array, Targets]:
        image, label_BK = mix_batch(
            config, architecture.num_classes, architecture.compute_dtype, batch, key
        )
        mask_B = batch.mask_B
        if class_weights:
            mean = sum(class_weights) / len(class_weights)
            mask_B *= label_BK @ jnp.asarray([weight / mean for weight in class_weights])
        return image, objective.prepare(batch, label_BK, mask_B, jax.random.fold_in(key, 1))

    def _accumulate(
        model: nnx.Module, image: jax.Array, targets: Targets, key: jax.Array
    ) -> tuple[Metrics, nnx.Module, S]:
        def loss(
            model: nnx.Module, image: jax.Array, targets: Targets, key: jax.Array
        ) -> tuple[jax.Array, tuple[Metrics, S]]:
            options = _corruption(targets) | ({"taps": taps} if taps else {})
            output = view(_freeze(model))(image, dropout_key=key if drops else None, **options)
            with jax.named_scope("loss"):
                sums = objective.sums(output, targets)
            return sums["loss"], (sums, look(output, targets))

        gradient = jax.grad(loss, has_aux=True)
        if num_micro_batches == 1:
            gradients, (sums, seen) = gradient(model, image, targets, key)
            seen = jax.tree.map(lambda x: x[None], seen)
        else:
            micro_batches = jax.tree.map(_split, (image, targets))
            keys = jax.random.split(key, num_micro_batches)

            def add(
                total: Total, micro: tuple[tuple[jax.Array, Targets], jax.Array]
            ) -> tuple[Total, S]:
                gradients, (sums, seen) = gradient(model, *micro[0], micro[1])
                return jax.tree.map(jnp.add, total, (gradients, sums)), seen

            gradients, (sums, _) = jax.eval_shape(gradient, model, image, targets, key)
            zeros = jax.tree.map(jnp.zeros_like, (gradients, sums))
            (gradients, sums), seen = jax.lax.scan(add, zeros, (micro_batches, keys))
        weight = jnp.maximum(
            sums["weight"], 1.0
        )  # a batch of nothing but unreadable images teaches nothing
        return sums | {"weight": weight}, jax.tree.map(lambda g: g / weight, gradients), seen

    def _split(x: jax.Array) -> jax.Array:
        """(B, ...) to (A, B / A, ...), each micro-batch with a part of every device's examples."""
        return x.reshape(x.shape[0] // num_micro_batches, num_micro_batches, *x.shape[1:]).swapaxes(
            0, 1
        )

    def _freeze(model: nnx.Module) -> nnx.Module:
        """Stop gradients at frozen parameters."""
        if is_trained is None:
            return model
        return pytree.map_with_names(
            lambda name, x: x if is_trained(name) else jax.lax.stop_gradient(x), model
        )

    return gradients_of


def step_keys(seed: int, step: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return the keys of mixing and of dropout in one step."""
    mixing_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return mixing_key, dropout_key


def mix_batch(
    config: RunConfig, num_classes: int, compute_dtype: str, batch: Batch, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return images (B, H, W, C) from -1 to 1 and labels (B, K), mixed as the config says."""
    image = normalise(batch.image_BHWC, compute_dtype)
    label_BK = batch.label_BK(num_classes)
    if config.input.mixup_alpha > 0 or config.input.cutmix_alpha > 0:
        image, label_BK = mix(key, image, label_BK, batch.mask_B, config.input)
    return image, label_BK


def make_evaluation_step(
    architecture: Architecture, objective: Objective
) -> Callable[[TrainState, Batch], Metrics]:
    """Return (state, batch) -> sums over the batch's examples that count, and of several labels their scores.

    What an objective draws at random depends on the place in the batch alone, so that every evaluation draws the same.
    """

    def evaluation_step(state: TrainState, batch: Batch) -> Metrics:
        image = normalise(batch.image_BHWC, architecture.compute_dtype)
        label_BK = batch.label_BK(architecture.num_classes)
        targets = objective.prepare(batch, label_BK, batch.mask_B, jax.random.key(0))
        targets = dataclasses.replace(targets, label_BK=label_BK)  # not smoothed
        output = state.evaluated_model()(image, **_corruption(targets))
        sums = objective.sums(output, targets)
        return sums | score_classes(output.logits_BK, batch) if targets.is_multilabel else sums

    return evaluation_step


def _corruption(targets: Targets) -> dict[str, Corruption]:
    """A further argument of a network that predicts patches; other networks need not know of it."""
    return {} if targets.corruption is None else {"corruption": targets.corruption}
