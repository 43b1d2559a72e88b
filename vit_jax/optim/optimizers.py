"""Adam, LAMB, SGD with momentum, or any optimiser of optax or of the user, as a chain of optax transformations.

Micro-batches are summed in `train/step`, before this chain.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from vit_jax import pytree
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.config.schema import OptimizerConfig
from vit_jax.imports.references import called, is_reference, resolve
from vit_jax.optim.by_name import make_is_trained, scale_by_layer, scale_by_pattern, train_only
from vit_jax.optim.per_layer import describe_matrices, is_stacked, per_layer
from vit_jax.optim.schedules import Schedule
from vit_jax.optim.zero_start import STAND_IN_STDDEV, lift_zeros, may_start_at_zero, scales_by_norm
from vit_jax.text.printable import first_line


def build_optimizer(
    config: OptimizerConfig, schedule: Schedule, peak_learning_rate: float
) -> optax.GradientTransformation:
    """Build the chain: clipping, direction, weight decay, learning rate, layer decay, multipliers, in this order.

    Directions, of a clipped gradient:

    * adam: bias-corrected moments. With bfloat16 optax rounds a `beta1` of 0.9 to 0.8984, as big_vision does;
    * lamb: Adam's (You et al., 2019), then each layer's kernel update is scaled to the norm of the kernel, weight decay
      included, unless one norm is 0. Other parameters are not scaled (timm, deit3-jax). The norm of a kernel that may
      begin at zero counts at least as a standard deviation of 0.02 (`optim.zero_start`);
    * sgd: `m = momentum * m + g` without Nesterov, from 0 (ViT, App. B.1.1). With bfloat16 only `m` is rounded.

    Meanings of a weight decay `wd`, with the scheduled rate `lr`:

    * paper: `p - lr * (d + wd * p)` for every parameter (today's AdamW);
    * paper_kernels: the same for kernels and factors of LoRA alone;
    * big_vision: `p - lr * d - (lr / peak) * wd * p` on these, so that its 1e-4 is the paper's 0.1 at a peak of 1e-3.

    A reference such as "optax:lion" is called with `learning_rate=schedule` and `config.arguments`, and does all of
    these itself. It sees parameters by name, those of each layer apart (`per_layer`). If its steps are proportional to
    the norm of the parameter, it sees stand-ins of parameters close to zero (`optim.zero_start`).

    Args:
      config: the optimiser, its decay and the trained parameters; others keep their values (`train_only`).
      schedule: from updates made so far to the learning rate.
      peak_learning_rate: the divisor of big_vision's decay.

    Raises:
      ValueError: a reference that cannot be called so, or whose result is no optimiser.
    """
    steps = []
    if config.clip_global_norm is not None:
        steps.append(optax.clip_by_global_norm(config.clip_global_norm))
    if is_reference(config.name):
        steps.append(_build_referenced(config, schedule))
    else:
        dtype = config.first_moment_dtype
        adam = optax.scale_by_adam(
            b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=dtype
        )
        steps.append(_add_momentum(config) if config.name == "sgd" else _promoting(adam))
        if config.weight_decay:
            steps.append(_build_weight_decay(config, peak_learning_rate))
        if config.name == "lamb":
            steps.append(_scale_to_kernels())
        steps.append(optax.scale_by_learning_rate(schedule))
    scales = [scale_by_layer(config.layer_decay)] if config.layer_decay != 1 else []
    scales += (
        [scale_by_pattern(config.learning_rate_multipliers)]
        if config.learning_rate_multipliers
        else []
    )
    is_trained = make_is_trained(config)
    if is_trained is None:
        return optax.chain(*steps, *scales)
    trained = train_only(optax.chain(*steps), is_trained)
    return (
        optax.chain(trained, *scales) if scales else trained
    )  # layers are counted in the complete network


def adapt_optimizer(
    optimizer: optax.GradientTransformation, is_trained: Callable[[str], bool] = lambda name: True
) -> optax.GradientTransformation:
    """Return an optimiser of optax for a network: it sees the trained parameters by name and layer (`per_layer`).

    A dictionary, because transformations that mask put placeholders into the tree, which a module need not accept.
    """
    return train_only(_promoting(per_layer(optimizer)), is_trained)


def _promoting(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return updates of the gradients' dtype; optax mixes dtypes on the way, which strict promotion forbids."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple:
        with jax.numpy_dtype_promotion("standard"):
            steps, state = inner.update(updates, state, params)
        return jax.tree.map(lambda step, update: step.astype(update.dtype), steps, updates), state

    return optax.GradientTransformation(inner.init, update)


def _add_momentum(config: OptimizerConfig) -> optax.GradientTransformation:
    if not config.momentum:
        return optax.identity()
    momentum = optax.trace(config.momentum, accumulator_dtype=config.first_moment_dtype)

    def update(
        updates: optax.Updates, state: optax.TraceState, params: optax.Params | None = None
    ) -> tuple:
        # optax multiplies in the buffer's dtype, and 0.9 is 0.8984 in bfloat16: in float32 only the buffer is rounded.
        state = optax.TraceState(optax.tree.cast(state.trace, "float32"))
        return momentum.update(updates, state, params)

    return optax.GradientTransformation(momentum.init, update)


def _build_weight_decay(
    config: OptimizerConfig, peak_learning_rate: float
) -> optax.GradientTransformation:
    """Add a multiple of the parameters to the updates, before the learning rate scales both."""
    big_vision = config.weight_decay_meaning == "big_vision"
    coefficient = config.weight_decay / peak_learning_rate if big_vision else config.weight_decay
    everything = config.weight_decay_meaning == "paper"

    def decay(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        return update + coefficient * parameter if everything or _is_kernel(name) else update

    return optax.stateless(lambda updates, params: pytree.map_with_names(decay, updates, params))


def _scale_to_kernels() -> optax.GradientTransformation:
    """Scale the update of each layer's kernels to the norms of these kernels: LAMB's trust ratio."""

    def scale(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        if not _is_kernel(name):
            return update
        axes = tuple(range(is_stacked(name), update.ndim))
        kernel_norm, update_norm = (
            jnp.linalg.vector_norm(x, axis=axes, keepdims=True) for x in (parameter, update)
        )
        if may_start_at_zero(name):
            size = math.prod(update.shape[axis] for axis in axes)
            kernel_norm = jnp.maximum(kernel_norm, STAND_IN_STDDEV * math.sqrt(size))
        has_norms = (kernel_norm > 0) & (update_norm > 0)
        return update * jnp.where(
            has_norms, kernel_norm / jnp.where(has_norms, update_norm, 1.0), 1.0
        )

    return optax.stateless(lambda updates, params: pytree.map_with_names(scale, updates, params))


def _is_kernel(name: str) -> bool:
    """Return whether the parameter of this name multiplies activations: a kernel, or a factor of LoRA beside one."""
    return name.rpartition("/")[2] in ("kernel", *LORA_FACTORS)


def _build_referenced(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    field = "config.optimizer.name"
    arguments = f"config.optimizer.arguments={dict(config.arguments)}"
    with called(f"{field}={config.name!r}", f"learning_rate and {arguments}"):
        build = resolve(config.name, field)
        described = (
            {"muon_weight_dimension_numbers": describe_matrices}
            if build is optax.contrib.muon
            else {}
        )
        inner = build(learning_rate=schedule, **described | dict(config.arguments))
    has_transformation = callable(getattr(inner, "init", None)) and callable(
        getattr(inner, "update", None)
    )
    if has_transformation and scales_by_norm(build, config.arguments):
        inner = lift_zeros(inner)
    if not has_transformation:
        raise ValueError(
            f"{field}={config.name!r} gives {type(inner).__name__}, not an optax.GradientTransformation."
        )

    @contextlib.contextmanager
    def suits(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a value of another type leads to
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(
                f"{field}={config.name!r} with {arguments} fails at {what}: {reason}"
            ) from error

    def init(params: optax.Params) -> optax.OptState:
        with suits("its first state"):
            return inner.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple:
        with suits("an update"):
            return inner.update(updates, state, params)

    return adapt_optimizer(optax.GradientTransformation(init, update))
