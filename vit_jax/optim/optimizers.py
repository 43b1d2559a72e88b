"""Adam, LAMB, SGD or any optimiser of optax or of the user, as a chain of transformations.

Micro-batches are summed in `train/step`, before this chain. Gradients, updates and parameters are
float32; only first moments may have another dtype (`optim.moment_dtypes`).
"""

import math

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.config.schema import OptimizerConfig
from vit_jax.imports.references import is_reference
from vit_jax.optim.by_name import (
    find_trained,
    map_updates,
    scale_by_layer,
    scale_by_pattern,
    train_only,
)
from vit_jax.optim.moment_dtypes import add_momentum, allow_mixed_dtypes
from vit_jax.optim.per_layer import adapt_optimizer, list_axes_within_layer
from vit_jax.optim.schedules import Schedule
from vit_jax.optim.zero_start import STAND_IN_STDDEV, may_start_at_zero

# Users import `adapt_optimizer` from here, for optimizers that they have written.
__all__ = ["adapt_optimizer", "build_optimizer"]


def build_optimizer(
    config: OptimizerConfig,
    schedule: Schedule,
    peak_learning_rate: float,
) -> optax.GradientTransformation:
    """Build an optimiser, a chain of two stages.

    1. The update of the trained parameters, by `_list_parts`. Frozen ones are hidden from it, so
       that clipping measures trained gradients, and get an update of zero (`train_only`).
    2. Factors of the complete update, weight decay included: by depth (`layer_decay`) and by name
       (`learning_rate_multipliers`). They also see frozen parameters, to count all layers.

    `config.name` is "adam", "lamb", "sgd", or a reference such as "optax:lion".

    Args:
      config: the parts and their values, and the trained parameters.
      schedule: from updates made so far to the learning rate.
      peak_learning_rate: largest value of the schedule. Weight decay in the meaning of big_vision
        is divided by it.

    Raises:
      ValueError: a reference that cannot be called so, or whose result is no optimiser.
    """
    parts = _list_parts(config, schedule, peak_learning_rate)
    factors = []
    if config.layer_decay != 1:
        factors.append(scale_by_layer(config.layer_decay))
    if config.learning_rate_multipliers:
        factors.append(scale_by_pattern(config.learning_rate_multipliers))

    # Checkpoints name the states of an optimizer by their places in nested tuples: each of these
    # cases keeps its nesting.
    trained = find_trained(config)
    if trained is None:
        return optax.chain(*parts, *factors)  # state: (parts ..., factors ...)
    update = train_only(optax.chain(*parts), trained)
    if not factors:
        return update  # state: (parts ...)
    return optax.chain(update, *factors)  # state: ((parts ...), factors ...)


def _list_parts(
    config: OptimizerConfig,
    schedule: Schedule,
    peak_learning_rate: float,
) -> list[optax.GradientTransformation]:
    """Return the parts of an update.

    They are the clipping of the gradients, and then either

    * direction, weight decay, trust ratio of lamb, and minus the learning rate; or
    * the optimiser of a reference such as "optax:lion", which has its own weight decay and takes
      the schedule.
    """
    parts = []
    if config.clip_global_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_global_norm))
    if is_reference(config.name):
        from vit_jax.optim.referenced_optimizer import build_referenced_optimizer

        return [*parts, build_referenced_optimizer(config, schedule)]

    parts.append(_build_direction(config))
    if config.weight_decay:
        parts.append(_build_weight_decay(config, peak_learning_rate))
    if config.name == "lamb":
        parts.append(_build_trust_ratio())
    parts.append(optax.scale_by_learning_rate(schedule))  # times minus the learning rate
    return parts


def _build_direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the part that makes the direction `d` of a step from the gradient `g`.

    * sgd: `d = m`, with `m = momentum * m + g` from 0 and without Nesterov (ViT, App. B.1.1). With
      a first moment in bfloat16 only the stored `m` is rounded.
    * adam and lamb: `d = m / (sqrt(v) + epsilon)`, both moments corrected for their start at 0.
    """
    if config.name == "sgd":
        return add_momentum(config)

    # With a first moment in bfloat16, optax rounds `beta1`, too: 0.9 acts as 0.8984. So it does for
    # big_vision, whose recipes have such moments.
    adam = optax.scale_by_adam(
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        mu_dtype=config.first_moment_dtype,
    )
    # Adam adds bfloat16 moments and float32 gradients, which strict dtype promotion would reject.
    return allow_mixed_dtypes(adam)


def _build_weight_decay(
    config: OptimizerConfig, peak_learning_rate: float
) -> optax.GradientTransformation:
    """Return the part that adds a multiple of the parameters to the direction.

    It comes before the trust ratio of lamb and the learning rate, which multiply the sum of this
    part and the direction. `config.weight_decay_meaning` decides what is added for a parameter:

    * paper: weight_decay * parameter, for every parameter (today's AdamW);
    * paper_kernels: weight_decay * parameter, for parameters that multiply activations;
    * big_vision: weight_decay / peak_learning_rate * parameter, for parameters that multiply
      activations. With a peak of 1e-3, 1e-4 does what 0.1 does in the other meanings.
    """
    coefficient = config.weight_decay
    if config.weight_decay_meaning == "big_vision":
        coefficient = config.weight_decay / peak_learning_rate
    decays_all = config.weight_decay_meaning == "paper"

    def decay(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        if decays_all or _multiplies_activations(name):
            return update + coefficient * parameter
        return update

    return map_updates(decay)


def _build_trust_ratio() -> optax.GradientTransformation:
    """Return the part that scales updates of kernels to the kernels' norms (You et al., 2019).

    The update includes weight decay. Other parameters are not scaled (timm, deit3-jax).
    """

    def scale(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        if _multiplies_activations(name):
            return update * _compute_trust_ratio(name, update, parameter)
        return update

    return map_updates(scale)


def _compute_trust_ratio(name: str, update: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return norm(kernel) / norm(update) of each layer; 1 if one of the norms is 0.

    The kernels of all blocks are one array, whose first axis is the layer.

    Kernels that may begin at zero (by name: `may_start_at_zero`) would hardly move, as their ratio
    would stay near 0. Their norm counts as at least that of random values with the standard
    deviation 0.02.
    """
    axes = list_axes_within_layer(name, kernel.ndim)
    kernel_norm = jnp.linalg.vector_norm(kernel, axis=axes, keepdims=True)
    update_norm = jnp.linalg.vector_norm(update, axis=axes, keepdims=True)
    if may_start_at_zero(name):
        layer_size = math.prod(kernel.shape[axis] for axis in axes)
        least_norm = STAND_IN_STDDEV * math.sqrt(layer_size)
        kernel_norm = jnp.maximum(kernel_norm, least_norm)

    is_defined = (kernel_norm > 0) & (update_norm > 0)
    # `where` evaluates the branch that it does not take, too: no division by 0.
    divisor = jnp.where(is_defined, update_norm, 1.0)
    return jnp.where(is_defined, kernel_norm / divisor, 1.0)


def _multiplies_activations(name: str) -> bool:
    """Return whether the parameter of this name is a kernel, or a factor of LoRA beside one."""
    return name.rpartition("/")[2] in ("kernel", *LORA_FACTORS)
