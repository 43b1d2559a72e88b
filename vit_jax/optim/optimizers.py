"""Adam, or SGD with momentum, with decoupled weight decay, as a chain of optax transformations.

The three meanings that papers give to "weight decay 0.1" are one transformation here, told apart by a
coefficient and by which parameters it touches. Micro-batches are summed in `train/step`, before this chain.
"""

import math

import jax
import optax

from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.layer_decay import scale_by_layer
from vit_jax.optim.schedules import Schedule
from vit_jax.optim.trained import train_head_only


def build_optimizer(
    config: OptimizerConfig, schedule: Schedule, peak_learning_rate: float
) -> optax.GradientTransformation:
    """Clipping, direction, weight decay, learning rate, layer decay, in this order.

    The direction `d` of a clipped gradient `g` is

    * "adam": Adam's, from bias-corrected moments; with weight decay this is AdamW;
    * "sgd": the momentum buffer `m = momentum * m + g`, which starts at 0. There is no Nesterov step, and weight decay
      stays out of the buffer (ViT, App. B.1.1, fine-tunes so, with a momentum of 0.9 and no weight decay).

    With `lr` the schedule's value and `wd` the weight decay, a step is

    * "paper": `p - lr * (d + wd * p)` for every parameter. The paper's 0.1, 0.03 and 0.3 mean this
      (decoupled, times the scheduled rate: flax.optim.Adam of its time, today's AdamW);
    * "paper_kernels": the same, but only kernels decay, not biases, norms and embeddings;
    * "big_vision": `p - lr * d - (lr / peak) * wd * p` on kernels: `wd` follows the schedule's shape
      but not its height, so 1e-4 there is the paper's 0.1 at a peak rate of 1e-3.

    A layer decay multiplies this whole step (`scale_by_layer`). With trained="head" all of it happens to the head
    alone (`train_head_only`).

    Args:
      config: its `accumulation_steps` is not read here.
      schedule: from the number of updates already made to the learning rate.
      peak_learning_rate: the schedule's highest value; used by "big_vision" only.

    Returns:
      A transformation whose `update` needs the parameters, a tree with the names of our models.

    Raises:
      ValueError: a value that no optimiser can have.
    """
    _check(config, peak_learning_rate)
    steps = []
    if config.clip_global_norm is not None:
        steps.append(optax.clip_by_global_norm(config.clip_global_norm))
    steps.append(_scale_by_adam(config) if config.name == "adam" else _add_momentum(config))
    if config.weight_decay:
        steps.append(_build_weight_decay(config, peak_learning_rate))
    steps.append(optax.scale_by_learning_rate(schedule))
    if config.layer_decay != 1:
        steps.append(scale_by_layer(config.layer_decay))
    optimizer = optax.chain(*steps)
    return optimizer if config.trained == "all" else train_head_only(optimizer)


def is_kernel(name: str) -> bool:
    """Whether the leaf of this name is the matrix of a dense layer, a convolution or an attention projection."""
    return name.rpartition("/")[2] == "kernel"


def _scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=config.first_moment_dtype)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple:
        # optax mixes int32 counts and bfloat16 moments with float32, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return adam.update(updates, state, params)

    return optax.GradientTransformation(adam.init, update)


def _add_momentum(config: OptimizerConfig) -> optax.GradientTransformation:
    if not config.momentum:
        return optax.identity()
    momentum = optax.trace(config.momentum, accumulator_dtype=config.first_moment_dtype)

    def update(updates: optax.Updates, state: optax.TraceState, params: optax.Params | None = None) -> tuple:
        # optax multiplies in the buffer's dtype, and 0.9 is 0.8984 in bfloat16: in float32 only the buffer is rounded.
        state = optax.TraceState(optax.tree.cast(state.trace, "float32"))
        return momentum.update(updates, state, params)

    return optax.GradientTransformation(momentum.init, update)


def _build_weight_decay(config: OptimizerConfig, peak_learning_rate: float) -> optax.GradientTransformation:
    """Adds a multiple of the parameters to the updates, before the learning rate scales both."""
    big_vision = config.weight_decay_meaning == "big_vision"
    coefficient = config.weight_decay / peak_learning_rate if big_vision else config.weight_decay
    everything = config.weight_decay_meaning == "paper"

    def decay(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        return update + coefficient * parameter if everything or is_kernel(name) else update

    # By name rather than by a mask: optax's masks put placeholders into the tree, which a module need not accept.
    return optax.stateless(lambda updates, params: pytree.map_with_names(decay, updates, params))


def _check(config: OptimizerConfig, peak_learning_rate: float) -> None:
    _check_choices(config)
    for name in ("momentum", "beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"optimizer.{name}={getattr(config, name)}: must be at least 0 and less than 1.")
    if not (config.epsilon > 0 and math.isfinite(config.epsilon)):
        raise ValueError(f"optimizer.epsilon={config.epsilon}: must be positive, for example 1e-8.")
    if not (config.weight_decay >= 0 and math.isfinite(config.weight_decay)):
        raise ValueError(f"optimizer.weight_decay={config.weight_decay}: must be 0 (off) or more.")
    if config.clip_global_norm is not None and not config.clip_global_norm > 0:
        raise ValueError(f"optimizer.clip_global_norm={config.clip_global_norm}: must be positive, or None for off.")
    if not 0 < config.layer_decay <= 1:
        raise ValueError(
            f"optimizer.layer_decay={config.layer_decay}: must be more than 0 and at most 1, where 1 is off."
        )
    if config.trained == "head" and config.layer_decay != 1:
        raise ValueError(
            f"optimizer.layer_decay={config.layer_decay} has no effect with trained='head', because the head is "
            "the last layer: leave layer_decay at 1.0, or use trained='all'."
        )
    if config.weight_decay_meaning == "big_vision" and config.weight_decay and not peak_learning_rate > 0:
        raise ValueError(
            f"weight_decay_meaning='big_vision' divides by the peak learning rate, which is {peak_learning_rate}: "
            "set schedule.learning_rate to a positive number, or weight_decay to 0."
        )


def _check_choices(config: OptimizerConfig) -> None:
    choices = {
        "name": ("adam", "sgd"),
        "first_moment_dtype": ("float32", "bfloat16"),
        "weight_decay_meaning": ("paper", "paper_kernels", "big_vision"),
        "trained": ("all", "head"),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            *others, last = allowed
            raise ValueError(f"optimizer.{name}={getattr(config, name)!r}: use {', '.join(others)} or {last}.")
