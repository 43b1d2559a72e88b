"""One training step and one evaluation step, as pure functions. `assemble` jits and shards them.

Legend: B global batch, A micro-batches, H W C image, K classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import pytree
from vit_jax.arrays import Batch, Targets, normalise
from vit_jax.data.mixup import mixup
from vit_jax.objectives import Classification
from vit_jax.optim import ema
from vit_jax.train.state import TrainState

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step needs from the config, and nothing else of it."""

    seed: int
    num_classes: int
    compute_dtype: str
    mixup_alpha: float
    accumulation_steps: int
    polyak_factor: float | None
    polyak_start: int
    polyak_bias_correction: bool
    is_trained: Callable[[str], bool] | None  # by name of a parameter; None: all are
    drops_in_training: bool  # dropout and stochastic depth; not where the features are frozen


def make_train_step(
    settings: StepSettings,
    objective: Classification,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns (state, batch) -> (state, metrics).

    Randomness comes from (seed, step) alone. With accumulation, sums over micro-batches are divided once by
    the weight of the full batch, so gradients equal those of the large batch even where examples are masked.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        mixup_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), state.step))
        image, targets = _prepare(batch, mixup_key)
        sums, gradients = _accumulate(state.model, image, targets, dropout_key)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        metrics = {
            "train_loss": sums["loss"] / sums["weight"],
            "train_accuracy": sums["correct"] / sums["weight"],
            "learning_rate": schedule(state.step),
            "gradient_norm": optax.tree.norm(gradients),
            "update_norm": optax.tree.norm(updates),
            "parameter_norm": optax.tree.norm(model),
        }
        step = state.step + 1
        return TrainState(step, model, optimizer_state, _average(state, model, step)), metrics

    def _prepare(batch: Batch, key: jax.Array) -> tuple[jax.Array, Targets]:
        image = normalise(batch.image_BHWC, settings.compute_dtype)
        label_BK, mask_B = jax.nn.one_hot(batch.label_B, settings.num_classes), batch.mask_B
        if settings.mixup_alpha > 0:
            image, label_BK, mask_B = mixup(key, image, label_BK, mask_B, settings.mixup_alpha)
        return image, objective.prepare(label_BK, mask_B)

    def _accumulate(model: Any, image: jax.Array, targets: Targets, key: jax.Array) -> tuple[Metrics, Any]:
        def loss(model: Any, image: jax.Array, targets: Targets, key: jax.Array) -> tuple[jax.Array, Metrics]:
            if settings.is_trained is not None:  # nothing is propagated back through what stays as it is
                model = pytree.map_with_names(_freeze(settings.is_trained), model)
            sums = objective.sums(model(image, dropout_key=key if settings.drops_in_training else None), targets)
            return sums["loss"], sums

        gradient = jax.grad(loss, has_aux=True)
        if settings.accumulation_steps == 1:
            gradients, sums = gradient(model, image, targets, key)
        else:
            micro_batches = jax.tree.map(_split, (image, targets))
            keys = jax.random.split(key, settings.accumulation_steps)

            def add(total: Any, micro: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient(model, *micro[0], micro[1])), None

            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, model, image, targets, key))
            (gradients, sums), _ = jax.lax.scan(add, zeros, (micro_batches, keys))
        weight = jnp.maximum(sums["weight"], 1.0)  # a batch of nothing but unreadable images teaches nothing
        return sums | {"weight": weight}, jax.tree.map(lambda g: g / weight, gradients)

    def _split(x: jax.Array) -> jax.Array:
        """(B, ...) to (A, B / A, ...), each micro-batch with a part of every device's examples."""
        num = settings.accumulation_steps
        return x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)

    def _average(state: TrainState, model: Any, step: jax.Array) -> Any:
        if state.polyak is None or settings.polyak_factor is None:
            return None
        return ema.update(
            state.polyak,
            model,
            step,
            factor=settings.polyak_factor,
            start_step=settings.polyak_start,
            bias_correction=settings.polyak_bias_correction,
        )

    return train_step


def _freeze(is_trained: Callable[[str], bool]) -> Callable[[str, jax.Array], jax.Array]:
    return lambda name, leaf: leaf if is_trained(name) else jax.lax.stop_gradient(leaf)


def make_evaluation_step(settings: StepSettings, objective: Classification) -> Callable[[TrainState, Batch], Metrics]:
    """Returns (state, batch) -> sums over the batch's examples that count."""

    def evaluation_step(state: TrainState, batch: Batch) -> Metrics:
        output = state.evaluated_model()(normalise(batch.image_BHWC, settings.compute_dtype))  # type: ignore[operator]
        label_BK = jax.nn.one_hot(batch.label_B, settings.num_classes)
        return objective.sums(output, Targets(label_BK, batch.mask_B))

    return evaluation_step
