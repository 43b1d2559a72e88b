"""Parameters that begin at zero, under optimisers with steps in proportion to norms.

Such an optimiser (LAMB, LARS, Fromage, Adafactor with its parameter scale) moves a parameter by at
most the learning rate times its norm. A parameter that begins at zero then hardly leaves it: the
last layer, B of LoRA, biases.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.network_options import LORA_FACTORS

STAND_IN_STDDEV = 0.02
"""Least standard deviation of a parameter that begins at zero: the usual one of kernels."""
_ZERO_KERNELS = ("head/linear/kernel", LORA_FACTORS[1])
_ZERO_VECTORS = ("bias", "class_token", "register_tokens")
_NORM_SCALED = (optax.lamb, optax.lars, optax.fromage)
Leaves = dict[str, jax.Array]


def may_start_at_zero(name: str) -> bool:
    """Return whether the parameter of this name may begin at zero, or at less than 1e-5."""
    is_residual_norm = name.startswith(("body/", "stem/")) and name.endswith("scale")
    has_zero_name = name.endswith((*_ZERO_KERNELS, *_ZERO_VECTORS))
    return has_zero_name or is_residual_norm


def scales_by_norm(build: Callable[..., object], arguments: Mapping[str, object]) -> bool:
    """Return whether this function of optax builds steps in proportion to norms."""
    if build is optax.adafactor:
        return bool(arguments.get("multiply_by_parameter_scale", True))
    return any(build is known for known in _NORM_SCALED)


def lift_zeros(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `optimizer`, which sees larger stand-ins of parameters close to zero.

    The stand-in has the parameter's direction and a root mean square of at least `STAND_IN_STDDEV`.
    So the steps are those of a parameter that began with this standard deviation. State and other
    parameters are unchanged.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: Leaves | None = None,
    ) -> tuple:
        if params is None:
            return optimizer.update(updates, state)

        stand_ins = dict(params)
        for name, leaf in params.items():
            if may_start_at_zero(name):
                stand_ins[name] = _lift(leaf)
        return optimizer.update(updates, state, stand_ins)

    return optax.GradientTransformation(optimizer.init, update)


def _lift(parameter: jax.Array) -> jax.Array:
    """Return the parameter, or a stand-in if its root mean square is small."""
    root_mean_square = jnp.sqrt(jnp.mean(jnp.square(parameter)))
    is_small = root_mean_square < STAND_IN_STDDEV
    factor = STAND_IN_STDDEV / jnp.where(root_mean_square > 0, root_mean_square, 1.0)
    lifted = jnp.where(root_mean_square > 0, parameter * factor, STAND_IN_STDDEV)
    return jnp.where(is_small, lifted, parameter)
